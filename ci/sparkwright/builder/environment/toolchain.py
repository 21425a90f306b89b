"""
The tools of a build: an environment made of exactly the wheels that ``pylock.toml`` names by hash
(PEP 751).

A whole CUDA toolkit lies among them. What its wheels leave out (unversioned library names,
``lib64``, a stub of the driver to link against) is added here, once, when the environment is made.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import platform
import re
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sparkwright.builder.environment import pylock
from sparkwright.builder.wheel import version
from sparkwright.core import digest, process, strict_yaml
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, FileError
from sparkwright.forks import download as downloads
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project

if TYPE_CHECKING:
    pass

#: Version of the additions below; part of the environment's address.
ADDITIONS = 2


class ForkEnvironment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    How one fork is built.

    Attributes:
        variables: Environment variables of its configure and build; they reach nothing else.
        defines: CMake cache entries. ``{python}``, ``{cuda}``, ``{build}`` and ``{source:FORK}``
            stand for folders. core_targets: For a graft: the CMake targets that need no vendored
            source; they are compiled unless stack.yaml or ``--targets``
            names others.
        core_defines: Cache entries that leave all other targets out; set where only core targets
            are compiled. targets: The targets to compile, as `settings` chooses them; not read from
            environment.yaml. package: For a graft: the folder of the tree whose files lie in the
            wheel at the same path. version_files: Python files of the wheel that state its version.
            requires: For a graft: normalised name of a project that the official wheel requires →
            the requirement to put in place of that, or
            nothing where it is to go (`archive.change_requirements`).
        distribution: Name of the wheel's project.
        memory: Path pattern of a unit → megabytes that its compiler may hold, where this machine
            has no record of it yet. disk: Kind of build → megabytes that it takes in the cache
            directory, tools and downloads left aside. seconds, longest: Work of a whole build on
            one core and of its longest unit, as measured; for the first estimate.
    """

    variables: dict[str, str] = {}
    defines: dict[str, str] = {}
    core_targets: tuple[str, ...] = ()
    core_defines: dict[str, str] = {}
    targets: tuple[str, ...] = ()
    package: str = ""
    version_files: tuple[str, ...] = ()
    requires: dict[str, str] = {}
    distribution: str = ""
    memory: dict[str, int] = {}
    disk: dict[str, int] = {}
    seconds: float = 0
    longest: float = 0

    @property
    def named_targets(self) -> tuple[str, ...]:
        """The targets to compile by name; empty where all are compiled."""
        return () if "all" in self.targets else self.targets

    @property
    def needs_vendored(self) -> bool:
        """Do the targets to compile need the vendored sources?"""
        return not set(self.targets) <= set(self.core_targets)

    def deciding(self) -> ForkEnvironment:
        """
        Return the settings that decide the bytes of a wheel, without those about time, memory and
        disk.
        """
        return msgspec.structs.replace(self, seconds=0, longest=0, memory={}, disk={})

    def __post_init__(self) -> None:
        for project, text in self.requires.items():
            _check_requirement(project, text)


def _check_requirement(project: str, text: str) -> None:
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    if not project or canonicalize_name(project) != project:
        raise ValueError(f"requires: {project!r} is not the normalised name of a project")
    if not text:
        return
    try:
        wanted = Requirement(text)
    except InvalidRequirement as error:
        raise ValueError(
            f"requires: {text!r} is not a requirement: {' '.join(str(error).split())}"
        ) from error
    if canonicalize_name(wanted.name) != project or wanted.url:
        raise ValueError(f"requires: {text!r} is not a version of {project} on the package index")


class EnvironmentSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``environment.yaml``: tools and per-fork settings of a stack.

    Attributes:
        image: Base of the builder image, ``name@sha256:…``; ``name@unresolved`` where nobody could
            ask a registry for its digest.
    """

    forks: dict[str, ForkEnvironment] = {}
    image: str = ""


class Toolchain(msgspec.Struct, frozen=True):
    """
    An installed environment.

    Attributes:
        key: Address of its content: the hashes of the wheels for this Python and machine.
        root: The virtual environment.
    """

    key: str
    root: Path

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    @property
    def cuda(self) -> Path:
        """The CUDA toolkit: bin, include, lib64, nvvm."""
        return next(iter(self.root.glob("lib/python3.*/site-packages/nvidia/cu13")))

    def tool(self, name: str) -> Path:
        """
        Return the program *name* of the environment or of its CUDA toolkit; raise `tool-missing`
        where neither has it.
        """
        for folder in (self.root / "bin", self.cuda / "bin"):
            if (folder / name).exists():
                return folder / name
        raise CommandError(
            "tool-missing",
            f"{name} is not among the locked tools.",
            todo="Add it to requirements.in and run `sparkwright lock`.",
        )

    def environment(self, **extra: str) -> dict[str, str]:
        """Return the variables under which build programs run; *extra* ones come first."""
        path = os.pathsep.join(
            [str(self.root / "bin"), str(self.cuda / "bin"), os.environ.get("PATH", os.defpath)]
        )
        own = {
            **version.VARIABLES,
            "PATH": path,
            "CUDA_HOME": str(self.cuda),
            "CUDACXX": str(self.cuda / "bin" / "nvcc"),
        }
        return process.clean_environment(**{**own, **extra})


def python_header() -> Path:
    """Return where ``Python.h`` of this Python lies, or would."""
    return Path(sysconfig.get_path("include")) / "Python.h"


@functools.cache
def host_compiler(program: str = "c++") -> str:
    """
    Return version and target of the C++ compiler that nvcc will drive, such as ``12.2.0
    x86_64-linux-gnu``; empty without one.
    """
    try:
        # GCC answers only the first of such options.
        return " ".join(
            process.output([program, option]).strip()
            for option in ("-dumpfullversion", "-dumpmachine")
        )
    except CommandError:
        return ""


def spec(project: Project) -> EnvironmentSpec:
    """
    Return ``build/<stack>/environment.yaml``.

    Raises:
        file-invalid: It is not one, or asks for something that the fork's kind of build would pass
            over.
    """
    path = project.build_folder / "environment.yaml"
    read = strict_yaml.load(path, EnvironmentSpec)
    for fork, settings in read.forks.items():
        if settings.targets:
            raise FileError(
                "file-invalid",
                f"{path} names targets of {fork}, which stack.yaml or core_targets names.",
            )
        if settings.requires and project.fork(fork).build != "graft":
            raise FileError(
                "file-invalid",
                f"{path} changes requirements of {fork}, which is not grafted onto a wheel that "
                f"has any.",
            )
    return read


def settings(session: RunContext, fork: str) -> ForkEnvironment:
    """
    Return the settings of *fork* for this run: those of ``environment.yaml`` with the chosen
    targets.

    Raises:
        file-invalid: As `spec`.
    """
    own = spec(session.project).forks[fork]
    if session.project.fork(fork).build != "graft":
        return own
    targets = session.targets or session.project.fork(fork).targets or own.core_targets or ("all",)
    chosen = msgspec.structs.replace(
        own, targets=("all",) if "all" in targets else tuple(sorted(set(targets)))
    )
    if chosen.needs_vendored:
        return chosen
    return msgspec.structs.replace(chosen, defines={**own.defines, **own.core_defines})


def installed(session: RunContext) -> bool:
    """Are the stack's locked tools installed?"""
    return (_root(session, _key(pylock.wheels(session.project))) / "complete").exists()


def _key(wheels: tuple[tuple[str, str, str], ...]) -> str:
    inputs = {
        "wheels": wheels,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "additions": ADDITIONS,
    }
    return digest.key("environment", inputs)


def _root(session: RunContext, key: str) -> Path:
    return session.store.root / "environments" / key[:16]


def obtain(session: RunContext) -> Toolchain:
    """
    Return the stack's tools, installed.

    Raises:
        source-unreachable, source-mismatch, offline, disk-full: See there.
        command-failed: The installer failed.
    """
    wheels = pylock.wheels(session.project)
    key = _key(wheels)
    root = _root(session, key)
    if (root / "complete").exists():
        return Toolchain(key, root)
    with session.store.lock(f"environment-{key[:16]}"):
        if not (root / "complete").exists():
            with console.step(f"tools: {len(wheels)} locked wheels"):
                files = download(session, wheels)
                _install(session, root, files)
    return Toolchain(key, root)


def download(session: RunContext, wheels: tuple[tuple[str, str, str], ...]) -> list[Path]:
    """
    Return where each of *wheels* (project, file name, sha256) lies, downloaded where the store has
    it not.

    Raises:
        source-unreachable, source-mismatch, offline, disk-full: See
        `sparkwright.forks.download.obtain`.
    """

    def one(wheel: tuple[str, str, str]) -> Path:
        name, filename, sha256 = wheel
        return downloads.obtain(session.store, name, filename, sha256, offline=session.offline)

    with (
        concurrent.futures.ThreadPoolExecutor(4) as pool,
        console.progress("download", len(wheels)) as line,
    ):
        files = []
        for done, path in enumerate(pool.map(one, wheels), start=1):
            files.append(path)
            line.update(done, path.name)
    return files


def _install(session: RunContext, root: Path, files: list[Path]) -> None:
    install(session, root, files)
    complete_cuda(Toolchain("", root).cuda, session.store.folder("logs") / "environment.log")
    (root / "complete").write_text("made whole by sparkwright\n")


def install(session: RunContext, root: Path, files: list[Path]) -> None:
    """
    Make the environment *root* of exactly the wheels *files*.

    Raises:
        command-failed: The installer failed.
    """
    from uv import find_uv_bin

    uv = find_uv_bin()
    log = session.store.folder("logs") / "environment.log"
    # --offline and --no-deps: the lock is the whole truth, so nothing else may be resolved or
    # fetched.
    env = process.clean_environment(
        UV_CACHE_DIR=str(session.store.root / "cache" / "uv"),
        UV_NO_CONFIG="1",
        UV_OFFLINE="1",
        UV_FIND_LINKS="",
        UV_LINK_MODE="hardlink",
    )
    with console.step(f"install {len(files)} wheels"):
        process.run(
            [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(root)],
            log=log,
            env=env,
        )
        python = root / "bin" / "python"
        process.run(
            [
                uv,
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--no-index",
                "--python",
                str(python),
                *map(str, files),
            ],
            log=log,
            env=env,
        )


def complete_cuda(cuda: Path, log: Path, cc: str = "cc") -> None:
    """
    Add to the CUDA wheels in the folder *cuda* what a toolkit has and they lack (seen with CUDA
    13.0's).

    Args:
        cc: The C compiler of the machine that the libraries are for.
    """
    lib = cuda / "lib"
    for versioned in sorted(lib.glob("lib*.so.*")):
        plain = lib / (versioned.name.partition(".so")[0] + ".so")
        if not plain.exists():
            plain.symlink_to(versioned.name)
    if not (cuda / "lib64").exists():
        (cuda / "lib64").symlink_to("lib")
    stub = lib / "stubs" / "libcuda.so"
    if not stub.exists():
        stub.parent.mkdir(exist_ok=True)
        # CMake's CUDA::cuda_driver links against the driver, which a build machine need not have.
        # The linker leaves out a library that defines nothing of what is called, and then nobody
        # loads the driver before the one that calls it.
        source = stub.parent / "driver.c"
        source.write_text(
            "".join(f"void {name}(void) {{}}\n" for name in driver_functions(cuda / "include", cc))
        )
        process.run(
            [cc, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", stub, source], log=log
        )


def driver_functions(include: Path, cc: str = "cc") -> list[str]:
    """
    Return the names of the driver's functions as ``cuda.h`` in the folder *include* declares them,
    macros of versions replaced.

    Raises:
        command-failed: It cannot be read, or declares none.
    """
    declared = process.output([cc, "-E", "-P", "-x", "c", "-I", include, include / "cuda.h"])
    if names := sorted(set(re.findall(r"\bCUresult\s+(cu[A-Z]\w*)\s*\(", declared))):
        return names
    raise CommandError(
        "command-failed", f"{include / 'cuda.h'} declares no function of the driver."
    )
