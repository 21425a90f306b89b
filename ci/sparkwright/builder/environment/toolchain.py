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
import shlex
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sparkwright.builder.environment import pylock
from sparkwright.builder.environment.pylock import LockedWheel, uv_program
from sparkwright.builder.wheel import version
from sparkwright.core import digest, process, strict_yaml
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, FileError
from sparkwright.core.store import Store
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project

#: Version of the additions below; part of the environment's address.
ADDITIONS = 2


class ForkEnvironment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The build settings of a fork.

    Attributes:
        variables: Environment variables of its configure and build; they reach nothing else.
        defines: CMake cache entries. ``{python}``, ``{cuda}``, ``{build}`` and ``{source:FORK}``
            stand for folders.
        core_targets: For a graft: the CMake targets that need no vendored source; they are compiled
            unless stack.yaml or ``--targets`` names others.
        core_defines: Cache entries that leave all other targets out; set if only core targets are
            compiled.
        targets: The targets to compile, as `settings` chooses them; not read from environment.yaml.
        package: For a graft: the folder of the tree whose files are in the wheel at the same path.
        version_files: Python files of the wheel that state its version.
        requires: For a graft: normalised name of a project that the official wheel requires → its
            new requirement; empty to remove it (`archive.change_requirements`).
        distribution: Name of the wheel's project.
        memory: Path pattern of a unit → megabytes that its compiler may hold, if this machine has
            no record of it yet.
        disk: Kind of build → megabytes that it takes in the cache directory, without tools and
            downloads.
        seconds: Measured work of a whole build on one core; for the first estimate.
        longest: Measured work of its longest unit.
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
        """Whether the targets to compile need the vendored sources."""
        return not set(self.targets) <= set(self.core_targets)

    def deciding(self) -> ForkEnvironment:
        """
        Return the settings that decide the bytes of a wheel, without those about time, memory and
        disk.
        """
        return msgspec.structs.replace(self, seconds=0, longest=0, memory={}, disk={})

    def __post_init__(self) -> None:
        from packaging.requirements import InvalidRequirement, Requirement
        from packaging.utils import canonicalize_name

        for project, text in self.requires.items():
            try:
                requirement = Requirement(text or project)
            except InvalidRequirement as error:
                raise ValueError(f"requires: {text or project!r} is not a requirement") from error
            if canonicalize_name(requirement.name) != project or requirement.url:
                raise ValueError(
                    f"requires: {text!r} is not a version of {project} on the package index, or "
                    f"{project!r} is not the normalised name"
                )


class EnvironmentSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``environment.yaml``: tools and per-fork settings of a stack.

    Attributes:
        image: Base of the builder image, ``name@sha256:…``; ``name@unresolved`` if no registry
            could be asked for its digest.
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
        Return the program *name* of the environment or of its CUDA toolkit.

        Raises:
            tool-missing: Neither has it.
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
        folders = [self.root / "bin", self.cuda / "bin", os.environ.get("PATH", os.defpath)]
        own = {
            **version.VARIABLES,
            "PATH": os.pathsep.join(map(str, folders)),
            "CUDA_HOME": str(self.cuda),
            "CUDACXX": str(self.cuda / "bin" / "nvcc"),
        }
        return process.clean_environment(**{**own, **extra})


def python_header() -> Path:
    """Return the path of ``Python.h`` of this Python, installed or not."""
    return Path(sysconfig.get_path("include")) / "Python.h"


def host_compiler() -> list[str]:
    """Return the command of this machine's C++ compiler, as CMake takes it: ``CXX``, else c++."""
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def compilers(session: RunContext) -> list[list[str]]:
    """Return the commands of the C++ compilers that make the session's libraries."""
    if session.cross:
        return [[f"{session.machine}-linux-gnu-g++"]]
    cuda = shlex.split(os.environ.get("CUDAHOSTCXX", ""))
    return [host_compiler(), *([cuda] if cuda else [])]


def compiler(session: RunContext) -> str:
    """
    Return version and target of `compilers`, such as ``12.2.0 x86_64-linux-gnu``; empty if one is
    not installed.
    """
    versions = [compiler_version(*command) for command in compilers(session)]
    return " ".join(versions) if all(versions) else ""


@functools.cache
def compiler_version(*command: str) -> str:
    """Return version and target of the compiler *command*; empty if it is not installed."""
    try:
        # GCC answers only the first of such options.
        answers = [
            process.output([*command, option]) for option in ("-dumpfullversion", "-dumpmachine")
        ]
    except CommandError:
        return ""
    return " ".join(answer.strip() for answer in answers)


def spec(project: Project) -> EnvironmentSpec:
    """
    Return ``build/<stack>/environment.yaml``.

    Raises:
        file-invalid: It is malformed, or has a setting that the fork's kind of build ignores.
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


def _root(session: RunContext, wheels: Sequence[LockedWheel]) -> tuple[str, Path]:
    """Return the address of the environment made of *wheels*, and its folder."""
    inputs = {
        "wheels": wheels,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "additions": ADDITIONS,
    }
    key = digest.key("environment", inputs)
    return key, session.store.root / "environments" / key[:16]


def installed(session: RunContext) -> bool:
    """Return whether the stack's locked tools are installed."""
    return (_root(session, pylock.wheels(session.project))[1] / "complete").exists()


def obtain(session: RunContext) -> Toolchain:
    """
    Return the stack's tools, installed.

    Raises:
        source-unreachable, source-mismatch, offline, disk-full: As `download`.
        command-failed: The installer failed.
    """
    wheels = pylock.wheels(session.project)
    tools = Toolchain(*_root(session, wheels))
    complete = tools.root / "complete"
    if not complete.exists():
        with session.store.lock(f"environment-{tools.key[:16]}"):
            if not complete.exists():
                with console.step(f"tools: {len(wheels)} locked wheels"):
                    files = download(session.store, wheels, offline=session.offline)
                    install(session.store, tools.root, files)
                    log = session.store.folder("logs") / "environment.log"
                    complete_cuda(tools.cuda, log)
                    complete.write_text("made whole by sparkwright\n")
    return tools


def download(store: Store, wheels: Sequence[LockedWheel], *, offline: bool = False) -> list[Path]:
    """
    Return the files of *wheels*, downloaded if the store does not have them.

    Raises:
        source-unreachable, source-mismatch, offline, disk-full: As
            `sparkwright.forks.package_index.obtain`.
    """

    def file(wheel: LockedWheel) -> Path:
        return package_index.obtain(store, *wheel, offline=offline)

    files = []
    with (
        concurrent.futures.ThreadPoolExecutor(4) as pool,
        console.progress("download", len(wheels)) as line,
    ):
        for count, path in enumerate(pool.map(file, wheels), start=1):
            files.append(path)
            line.update(count, path.name)
    return files


def install(store: Store, root: Path, files: list[Path], machine: str = "") -> None:
    """
    Make the environment *root* of exactly the wheels *files*.

    Args:
        machine: If given, make a plain folder of wheels for that machine instead, which is not run.

    Raises:
        command-failed: The installer failed.
    """
    log = store.folder("logs") / "environment.log"
    # Offline and without dependencies: nothing but the lock may be resolved or fetched.
    env = process.clean_environment(
        UV_CACHE_DIR=str(store.root / "cache" / "uv"),
        UV_NO_CONFIG="1",
        UV_OFFLINE="1",
        UV_FIND_LINKS="",
        UV_LINK_MODE="hardlink",
    )
    uv, options = uv_program(), ["--python", str(root / "bin" / "python")]
    with console.step(f"install {len(files)} wheels"):
        if machine:
            tags = f"{machine}-manylinux_2_{pylock.GLIBC}"
            options = ["--target", str(root), "--python", sys.executable, "--python-platform", tags]
        else:
            venv = [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(root)]
            process.run(venv, log=log, env=env)
        command = [uv, "pip", "install", "--quiet", "--no-deps", "--no-index", *options]
        process.run([*command, *map(str, files)], log=log, env=env)


def complete_cuda(cuda: Path, log: Path, cc: str = "cc") -> None:
    """
    Add to the CUDA wheels in the folder *cuda* what a toolkit has and they lack (seen with CUDA
    13.0's).

    Args:
        cc: The C compiler of the machine that the libraries are for.

    Raises:
        command-failed: ``cuda.h`` cannot be read, or declares no function of the driver.
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
        # CMake's CUDA::cuda_driver links against the driver, which a build machine need not have.
        # The linker drops a library that defines none of the called functions, and the driver would
        # not be loaded; so the stub defines every function.
        header = cuda / "include" / "cuda.h"
        declared = process.output([cc, "-E", "-P", "-x", "c", "-I", header.parent, header])
        names = sorted(set(re.findall(r"\bCUresult\s+(cu[A-Z]\w*)\s*\(", declared)))
        if not names:
            raise CommandError("command-failed", f"{header} declares no function of the driver.")
        stub.parent.mkdir(exist_ok=True)
        source = stub.parent / "driver.c"
        source.write_text("".join(f"void {name}(void) {{}}\n" for name in names))
        options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(stub)]
        process.run([cc, *options, str(source)], log=log)
