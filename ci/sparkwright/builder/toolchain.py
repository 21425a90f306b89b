"""
The tools of a build: an environment made of exactly the wheels that ``pylock.toml`` names by hash
(PEP 751), the host compiler, and the libraries of the machine that wheels are made for.

A whole CUDA toolkit lies among the wheels. What they leave out (unversioned library names,
``lib64``, a stub of the driver to link against) is added here, once, when the environment is made.

For another machine, programs (cmake, ninja, nvcc, ptxas, Python) are this machine's. The headers
and libraries that are compiled and linked against are of the other machine's wheels, which the same
``pylock.toml`` names, unpacked and never run. Together they are a CUDA toolkit as NVIDIA lays one
out, so that nvcc and CMake find everything where they look for it. No wheel has the headers of
Python: x86-64 and aarch64 Linux have the same C types and byte order, so this machine's serve.
"""

import contextlib
import functools
import os
import platform
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from uv import find_uv_bin

from sparkwright.builder import pylock
from sparkwright.core import process, strict_yaml
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, FileError
from sparkwright.core.files import content_key
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project, SourceError

#: Version of `complete_cuda`; part of the addresses of environments.
ADDITIONS = 2
#: Projects that are compiled and linked against; the other wheels of the lock hold programs and
#: Python packages, which this machine runs.
LINKED = ("torch", "nvidia-", "apache-tvm-ffi")

#: Projects whose wheels make the code that nvcc writes.
GENERATORS = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")

#: CMake's toolchain file of a cross build. Paths are relative to it, because a build sees its
#: folders under other names (`sparkwright.builder.sandbox`).
_CROSS = """\
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR {machine})
set(CMAKE_C_COMPILER {triple}-gcc)
set(CMAKE_CXX_COMPILER {triple}-g++)
set(CMAKE_CUDA_HOST_COMPILER {triple}-g++)
set(CMAKE_CUDA_COMPILER "${{CMAKE_CURRENT_LIST_DIR}}/nvidia/cu13/bin/nvcc")
# For the FindCUDA that torch carries: it would look below targets/, which the wheels do not have.
set(CUDA_TOOLKIT_TARGET_DIR "${{CMAKE_CURRENT_LIST_DIR}}/nvidia/cu13")
# Libraries and headers are this folder's or the cross compiler's own;
# those in this machine's folders are for this machine.
set(CMAKE_FIND_ROOT_PATH "${{CMAKE_CURRENT_LIST_DIR}}")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
"""


class UnusedFiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    Files of the official wheel that no GPU of the stack uses.

    Attributes:
        glob: Matched against the whole member name; ``*`` also matches ``/``.
        reason: Why vLLM starts and selects without them.
    """

    glob: str
    reason: strict_yaml.Prose


class ExternalProject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A part of the fork's CMake that compiles vendored sources, and can be left out.

    Attributes:
        sources: The vendored sources, as the lock names them.
        targets: The CMake targets that hold their code.
    """

    sources: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    targets: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]


class ForkEnvironment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The build settings of a fork.

    Attributes:
        variables: Environment variables of its configure and build; they reach nothing else.
            ``{arch}`` stands for the architecture.
        defines: CMake cache entries. ``{python}``, ``{cuda}``, ``{build}`` and ``{source:FORK}``
            stand for folders.
        core_targets: For a graft: the CMake targets that need no vendored source; they are compiled
            unless stack.yaml or ``--targets`` names others.
        external: For a graft: the external projects whose targets are compiled besides, each if the
            lock resolves its sources; by CMake's name, in the order in which CMake includes them.
        core_defines: Cache entries that leave all other targets out; set unless such a one is asked
            for. ``{external}`` stands for the external projects that are compiled.
        targets: The targets to compile, as `settings` chooses them; refused in environment.yaml,
            as are `sources` and `unlocked`.
        sources: The vendored sources that they need.
        unlocked: External projects whose libraries stay the official wheel's, each with the
            reason.
        package: For a graft: the folder of the tree whose files are in the wheel at the same path.
        version_files: Python files of the wheel that state its version.
        requires: For a graft: normalised name of a project that the official wheel requires → its
            new requirement; empty to remove it (`archive.change_requirements`).
        unused: For a graft: files that it leaves out besides the libraries whose code the GPU does
            not load (`graft.omissions`).
        distribution: Name of the wheel's project.
    """

    variables: dict[str, str] = {}
    defines: dict[str, str] = {}
    core_targets: tuple[str, ...] = ()
    external: dict[str, ExternalProject] = {}
    core_defines: dict[str, str] = {}
    targets: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    unlocked: dict[str, str] = {}
    package: str = ""
    version_files: tuple[str, ...] = ()
    requires: dict[str, str] = {}
    unused: tuple[UnusedFiles, ...] = ()
    distribution: str = ""

    @property
    def named_targets(self) -> tuple[str, ...]:
        """The targets to compile by name; empty where all are compiled."""
        return () if "all" in self.targets else self.targets

    @property
    def needs_upstream_cmake(self) -> bool:
        """
        Whether a target is asked for that the series' option of CMake (`core_defines`) cannot
        compile: it needs CMake as upstream has it, with all sources.
        """
        offered = {*self.core_targets}
        for external in self.external.values():
            offered.update(external.targets)
        return not offered.issuperset(self.targets)

    def __post_init__(self) -> None:
        for project, text in self.requires.items():
            # An invalid requirement is a ValueError, too.
            requirement = Requirement(text or project)
            more = requirement.url or requirement.extras or requirement.marker
            if canonicalize_name(requirement.name) != project or more:
                raise ValueError(
                    f"requires: {text!r} is not a version of {project} on the package index, or "
                    f"{project!r} is not the normalised name"
                )


class EnvironmentSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``environment.yaml``: the settings of each fork of a stack."""

    forks: dict[str, ForkEnvironment] = {}

    def __post_init__(self) -> None:
        for fork, own in self.forks.items():
            if own.targets or own.sources or own.unlocked:
                raise ValueError(
                    f"{fork}: `targets`, `sources` and `unlocked` are not stated here; stack.yaml, "
                    "the lock and the options of a run choose them"
                )


def spec(project: Project) -> EnvironmentSpec:
    """
    Return ``build/<stack>/environment.yaml``.

    Raises:
        file-invalid: It is malformed, or names other forks than stack.yaml.
    """
    path = project.build_folder / "environment.yaml"
    read = strict_yaml.load(path, EnvironmentSpec)
    if read.forks.keys() != project.spec.forks.keys():
        raise FileError(
            "file-invalid",
            f"{path} and {project.stack_file} name different forks.",
            details=sorted(read.forks.keys() ^ project.spec.forks.keys()),
        )
    return read


def settings(context: RunContext, fork: str) -> ForkEnvironment:
    """
    Return the settings of *fork* for this run: those of ``environment.yaml`` with the chosen
    targets and architecture.

    Raises:
        file-invalid: As `spec`.
        source-unresolved: A target is asked for by name, and the lock does not resolve its sources.
    """
    project, own = context.project, spec(context.project).forks[fork]
    own = msgspec.structs.replace(
        own,
        variables={
            name: value.replace("{arch}", project.spec.arch)
            for name, value in own.variables.items()
        },
    )
    if project.fork(fork).build != "graft":
        return own
    locked, named = context.lock.forks[fork], named_targets(context, fork)
    targets, unlocked = {*(named or own.core_targets or ("all",))}, dict[str, str]()
    projects, sources = list[str](), list[str]()
    for name, external in own.external.items():
        if unresolved := locked.unresolved(external.sources):
            unlocked[name] = f"the lock does not resolve {', '.join(unresolved)}"
            # A target that belongs to the core as well is compiled without the external project.
            if required := named.intersection(external.targets).difference(own.core_targets):
                raise SourceError(
                    "source-unresolved",
                    f"{', '.join(sorted(required))} cannot be compiled: {unlocked[name]}.",
                    todo="Run `sparkwright lock` where the upstream host is reachable, or take the "
                    "official wheel's library: leave the target out.",
                )
        elif not named or not targets.isdisjoint(external.targets):
            projects.append(name)
            sources += external.sources
            targets |= set() if named else {*external.targets}
    chosen = msgspec.structs.replace(
        own, targets=("all",) if "all" in targets else tuple(sorted(targets))
    )
    if chosen.needs_upstream_cmake:
        return msgspec.structs.replace(chosen, sources=tuple(locked.fetched))
    defines = dict(own.defines)
    for name, value in own.core_defines.items():
        defines[name] = value.replace("{external}", ";".join(projects))
    return msgspec.structs.replace(
        chosen,
        defines=defines,
        sources=tuple(sources),
        unlocked=unlocked,
    )


def named_targets(context: RunContext, fork: str) -> frozenset[str]:
    """Return the targets of *fork* that ``--targets`` or stack.yaml names."""
    return frozenset(context.targets or context.project.fork(fork).targets)


# The host compiler.


def triple(machine: str) -> str:
    """Return the prefix of the names of Debian's cross compiler for *machine*."""
    return f"{machine}-linux-gnu"


def host_compiler() -> list[str]:
    """
    Return the command of this machine's C++ compiler, as CMake takes it: ``CXX``, else c++.

    Raises:
        tool-missing: ``CXX`` is no command.
    """
    try:
        return shlex.split(os.environ.get("CXX", "")) or ["c++"]
    except ValueError as error:
        raise CommandError(
            "tool-missing",
            f"The variable CXX is no command: {error}.",
            todo="Unset CXX, or set it to the command of a C++ compiler.",
        ) from error


def compiler_command(context: RunContext) -> list[str]:
    """Return the command of the C++ compiler that makes the libraries of this run."""
    return [f"{triple(context.machine)}-g++"] if context.cross else host_compiler()


@functools.cache
def compiler_version(*command: str) -> str:
    """Return the first line in which the compiler *command* states its version."""
    return process.output([*command, "--version"]).partition("\n")[0]


def compiler(context: RunContext) -> str:
    """
    Return the version of `compiler_command`, such as ``g++ (Debian 12.2.0-14) 12.2.0``, with the
    arguments that the command has.

    Raises:
        tool-missing: It is not installed.
    """
    command = compiler_command(context)
    try:
        return " ".join([compiler_version(*command), *command[1:]])
    except CommandError as error:
        package = f"g++-{triple(context.machine)}".replace("_", "-") if context.cross else "g++"
        raise CommandError(
            "tool-missing",
            f"{command[0]} is not installed; it compiles for {context.machine}.",
            details=error.details,
            todo=f"sudo apt-get install {package}",
        ) from error


# The locked tools.


class Toolchain(msgspec.Struct, frozen=True):
    """
    An installed environment.

    Attributes:
        key: Address of its content: the hashes of the wheels for this Python and machine, and of
            the libraries.
        root: The virtual environment.
        libraries: For another machine: the folder of the headers and libraries that wheels are
            compiled and linked against.
    """

    key: str
    root: Path
    libraries: Path | None = None

    @property
    def cuda(self) -> Path:
        """
        The CUDA toolkit: programs (bin, nvvm) for this machine; headers and libraries (include,
        lib64) for the one that wheels are made for.
        """
        if self.libraries:
            return self.libraries / "nvidia" / "cu13"
        return next(iter(self.root.glob("lib/python3.*/site-packages/nvidia/cu13")))

    @property
    def mounts(self) -> dict[Path, str]:
        """The folders that build programs read, each with its name in a sandbox."""
        return {self.root: "tools", **({self.libraries: "target"} if self.libraries else {})}

    def tool(self, name: str) -> Path:
        """Return the path of the program *name*."""
        return self.root / "bin" / name

    def environment(self, **extra: str) -> dict[str, str]:
        """Return the variables under which build programs run; *extra* ones come first."""
        folders = [self.root / "bin", self.cuda / "bin", os.environ.get("PATH", os.defpath)]
        # The toolchain file names the compiler for another machine, and CMake takes one word.
        command = [] if self.libraries else shlex.split(os.environ.get("CXX", ""))
        own = {
            # Neither the day nor the machine shows in the output. This is 1980-01-01, the earliest
            # day that a zip archive can state; with a source's own date, a commit without effect
            # would give another wheel.
            "SOURCE_DATE_EPOCH": "315532800",
            "PYTHONHASHSEED": "0",
            "TZ": "UTC",
            "PATH": os.pathsep.join(map(str, folders)),
            "CUDA_HOME": str(self.cuda),
            "CUDACXX": str(self.cuda / "bin" / "nvcc"),
            # nvcc would choose a host compiler by itself, and not the one that CMake uses.
            "CUDAHOSTCXX": command[0] if len(command) == 1 else "",
        }
        return process.clean_environment(**{**own, **extra})

    def defines(self) -> dict[str, str]:
        """Return the CMake cache entries for the libraries of another machine."""
        if not self.libraries:
            return {}
        return {
            "CMAKE_TOOLCHAIN_FILE": str(self.libraries / "toolchain.cmake"),
            # The Python that CMake asks is this machine's and names its own torch, of the same
            # version; a set folder comes before that.
            "Torch_DIR": str(self.libraries / "torch" / "share" / "cmake" / "Torch"),
            "Python_INCLUDE_DIR": str(self.libraries / "python"),
        }


def _tools(context: RunContext) -> Toolchain:
    """Return the stack's tools, installed or not."""
    key = content_key(
        "environment",
        {
            "wheels": pylock.wheels(context.project),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "additions": ADDITIONS,
        },
    )
    return Toolchain(key, context.store.root / "environments" / key[:16])


def installed(context: RunContext) -> bool:
    """Return whether the stack's locked tools are installed."""
    return (_tools(context).root / "complete").exists()


def obtain(context: RunContext) -> Toolchain:
    """
    Return the stack's tools, installed.

    Raises:
        source-unreachable, source-mismatch, offline, disk-full: As `download`.
        command-failed: The installer failed.
    """
    tools = _tools(context)
    with fill_once(context.store, tools.root) as lacking:
        if lacking:
            install(context, tools.root, pylock.wheels(context.project), "tools")
            complete_cuda(tools.cuda, context.store.folder("logs") / "environment.log")
    return tools


def disassembler(context: RunContext) -> Path:
    """
    Return the folder of nvdisasm, from its wheel.

    Raises:
        source-unreachable, source-mismatch, offline, disk-full, command-failed: As `install`.
    """
    wheels = pylock.named(context.project, pylock.NVDISASM)
    return locked_environment(context, "nvdisasm", wheels, platform.machine()) / "nvidia/cu13/bin"


def environment_folder(
    context: RunContext, title: str, wheels: Sequence[pylock.LockedWheel]
) -> Path:
    """Return the folder of the environment of exactly the *wheels*, which may not exist yet."""
    key = content_key(title, {"wheels": wheels, "python": platform.python_version()})
    return context.store.root / "environments" / f"{title}-{key[:16]}"


def locked_environment(
    context: RunContext, title: str, wheels: Sequence[pylock.LockedWheel], machine: str = ""
) -> Path:
    """
    Return the environment of exactly the *wheels*, which is made on first use.

    Takes and raises as `install`.
    """
    root = environment_folder(context, title, wheels)
    with fill_once(context.store, root) as lacking:
        if lacking:
            install(context, root, wheels, title, machine)
    return root


@contextlib.contextmanager
def fill_once(store: Store, root: Path) -> Iterator[bool]:
    """
    Yield True if the environment *root* has to be made, under its lock; a block that ends without
    an error has made it.
    """
    complete = root / "complete"
    with store.lock(f"environment-{root.name}"):
        lacking = not complete.exists()
        yield lacking
        if lacking:
            complete.write_text("made whole by sparkwright\n")


def install(
    context: RunContext,
    root: Path,
    wheels: Sequence[pylock.LockedWheel],
    title: str,
    machine: str = "",
) -> None:
    """
    Make the environment *root* of exactly the *wheels*.

    Args:
        title: The environment, for people.
        machine: If given, make a plain folder of wheels for that machine instead, which is not run.

    Raises:
        source-unreachable, source-mismatch, offline, disk-full: As `download`.
        command-failed: The installer failed.
    """
    log = context.store.folder("logs") / "environment.log"
    # Scripts name their Python by this path, and the demo reaches the user's store by a link.
    root = root.parent.resolve() / root.name
    # Offline and without dependencies: nothing but the lock may be resolved or fetched.
    env = process.uv_environment(
        UV_CACHE_DIR=str(context.store.root / "cache" / "uv"),
        UV_OFFLINE="1",
        UV_LINK_MODE="hardlink",
    )
    run = functools.partial(process.run, log=log, env=env)
    uv = find_uv_bin()
    with console.step(f"{title}: {len(wheels)} locked wheels"):
        files = pylock.download(context.store, wheels, offline=context.offline)
        if machine:
            tags = f"{machine}-manylinux_2_{pylock.GLIBC}"
            options = ["--target", str(root), "--python", sys.executable, "--python-platform", tags]
        else:
            run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, root])
            options = ["--python", str(root / "bin" / "python")]
        run([uv, "pip", "install", "--quiet", "--no-deps", "--no-index", *options, *files])


def complete_cuda(cuda: Path, log: Path, cc: str = "cc") -> None:
    """
    Add to the CUDA wheels in the folder *cuda* what a toolkit has and they lack (seen with CUDA
    13.0's).

    Args:
        cc: The C compiler of the machine that the libraries are for.

    Raises:
        command-failed: ``cuda.h`` cannot be read.
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
        names = set(re.findall(r"\bCUresult\s+(cu[A-Z]\w*)\s*\(", declared))
        stub.parent.mkdir(exist_ok=True)
        source = stub.parent / "driver.c"
        source.write_text("".join(f"void {name}(void) {{}}\n" for name in sorted(names)))
        process.run(
            [cc, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", stub, source],
            log=log,
        )


# The machine that wheels are made for.


def target(context: RunContext, tools: Toolchain) -> Toolchain:
    """
    Return *tools* with the headers and libraries of the machine that wheels are made for.

    Raises:
        tool-missing: The cross compiler is not installed.
        source-unreachable, source-mismatch, offline, disk-full, command-failed: As for the tools.
    """
    if not context.cross:
        return tools
    machine, key = context.machine, target_key(context, tools)
    root = context.store.root / "environments" / f"{key[:16]}-{machine}"
    crossed = msgspec.structs.replace(tools, key=key, libraries=root)
    with fill_once(context.store, root) as lacking:
        if lacking:
            shutil.rmtree(root, ignore_errors=True)
            install(context, root, linked_wheels(context), machine, machine)
            for name in ("bin", "nvvm"):
                # These hold programs: this machine's take their place.
                folder = crossed.cuda / name
                shutil.rmtree(folder, ignore_errors=True)
                shutil.copytree(tools.cuda / name, folder, copy_function=os.link)
            complete_cuda(
                crossed.cuda,
                context.store.folder("logs") / "environment.log",
                f"{triple(machine)}-gcc",
            )
            (root / "toolchain.cmake").write_text(
                _CROSS.format(machine=machine, triple=triple(machine))
            )
            include = Path(sysconfig.get_path("include"))
            # Debian's pyconfig.h includes the one of the machine, which has the values.
            machines = include.parent / str(sysconfig.get_config_var("MULTIARCH")) / include.name
            for folder in filter(Path.exists, (include, machines)):
                shutil.copytree(folder, root / "python", dirs_exist_ok=True)
    return crossed


def target_key(context: RunContext, tools: Toolchain) -> str:
    """
    Return the address of everything that the libraries of this run are compiled and linked against.

    Raises:
        tool-missing: The cross compiler is not installed.
    """
    if not context.cross:
        return tools.key
    return content_key(
        "target",
        {
            "tools": tools.key,
            "wheels": linked_wheels(context),
            "compiler": compiler(context),
            "machine": context.machine,
            "toolchain": _CROSS,
            "additions": ADDITIONS,
        },
    )


def linked_wheels(context: RunContext) -> tuple[pylock.LockedWheel, ...]:
    """Return the wheels that libraries for the machine of *context* are linked against."""
    chosen = pylock.selection(platform.python_version(), context.machine)
    wheels = pylock.wheels(context.project, **chosen)
    return tuple(wheel for wheel in wheels if wheel[0].startswith(LINKED))
