"""
The machine that wheels are made for, which may be another than this one.

Programs that run (cmake, ninja, nvcc, ptxas, Python) are this machine's, as always. What is
compiled and linked against is the other
machine's: headers and libraries of its wheels, which the same ``pylock.toml`` names by hash,
    unpacked and never run. Together they are a CUDA toolkit as NVIDIA lays one out, so that nvcc
    and CMake find everything where they look for it anyway.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

from sparkwright.builder.environment import pylock, python_headers, toolchain
from sparkwright.builder.environment.toolchain import Toolchain
from sparkwright.builder.wheel.archive import members
from sparkwright.core import digest
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, WheelError
from sparkwright.forks.archive import MOST_BYTES, zip_file
from sparkwright.forks.context import RunContext

#: What is compiled and linked against; the other wheels of the lock hold programs and Python
#: packages, which this machine runs.
LINKED = ("torch", "nvidia-")
#: Folders of the toolkit that hold programs: this machine's take their place.
PROGRAMS = ("bin", "nvvm")

#: Paths are relative to the file, because a build sees its folders under other names
#: (`sparkwright.builder.environment.sandbox`).
_TOOLCHAIN = """\
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR {machine})
set(CMAKE_C_COMPILER {triple}-gcc)
set(CMAKE_CXX_COMPILER {triple}-g++)
set(CMAKE_CUDA_HOST_COMPILER {triple}-g++)
set(CMAKE_CUDA_COMPILER "${{CMAKE_CURRENT_LIST_DIR}}/nvidia/cu13/bin/nvcc")
# For the FindCUDA that torch carries: it would look below targets/, which the wheels do not have.
set(CUDA_TOOLKIT_TARGET_DIR "${{CMAKE_CURRENT_LIST_DIR}}/nvidia/cu13")
# Libraries and headers are this folder's or the cross compiler's own; what lies in this machine's folders is for this machine.
set(CMAKE_FIND_ROOT_PATH "${{CMAKE_CURRENT_LIST_DIR}}")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
"""


class Target(msgspec.Struct, frozen=True):
    """
    What wheels are made for, and against.

    Attributes:
        key: Address of everything that is compiled and linked against.
        machine: ``x86_64`` or ``aarch64``.
        root: Where that lies.
        cuda: The CUDA toolkit: programs for this machine, headers and libraries for that one.
        triple: What the names of the cross compiler begin with; empty where the machine is this
            one.
    """

    key: str
    machine: str
    root: Path
    cuda: Path
    triple: str = ""

    @property
    def cross(self) -> bool:
        return bool(self.triple)

    def defines(self) -> dict[str, str]:
        """
        Return the CMake cache entries that make the target's libraries; none where this machine's
        own are made.
        """
        if not self.cross:
            return {}
        entries = {"CMAKE_TOOLCHAIN_FILE": str(self.root / "toolchain.cmake")}
        if (self.root / "torch").exists():
            # The Python that CMake asks is this machine's and names its own torch, of the same
            # version; a set folder comes before that.
            entries["Torch_DIR"] = str(self.root / "torch" / "share" / "cmake" / "Torch")
        if (self.root / "python").exists():
            entries["Python_INCLUDE_DIR"] = str(self.root / "python")
        return entries

    def environment(self, tools: Toolchain) -> dict[str, str]:
        """
        Return the variables in which configure and compile for the target differ from those of
        *tools*.
        """
        if not self.cross:
            return {}
        path = os.pathsep.join([str(self.cuda / "bin"), tools.environment()["PATH"]])
        return {
            "PATH": path,
            "CUDA_HOME": str(self.cuda),
            "CUDACXX": str(self.cuda / "bin" / "nvcc"),
        }


def triple(machine: str) -> str:
    """Return what the names of Debian's cross compiler for *machine* begin with."""
    return f"{machine}-linux-gnu"


def package(machine: str) -> str:
    """Return the package of Debian and Ubuntu that holds the cross compiler for *machine*."""
    return f"g++-{triple(machine).replace('_', '-')}"


def compiler(session: RunContext) -> str:
    """
    Return version and target of the C++ compiler that makes the session's libraries, as
    `toolchain.host_compiler` does.
    """
    return toolchain.host_compiler(driver(session))


def driver(session: RunContext) -> str:
    """Return the name of the C++ compiler that makes the session's libraries."""
    return f"{triple(session.machine)}-g++" if session.cross else "c++"


def of(session: RunContext, tools: Toolchain) -> Target:
    """
    Return what the session makes wheels for, its headers and libraries in place.

    Raises:
        tool-missing: The cross compiler is not installed.
        target-mismatch: The C types of this machine's Python are not the target's.
        source-unreachable, source-mismatch, offline, disk-full, wheel-invalid: As for the tools.
    """
    address = key(session, tools)
    if not session.cross:
        return Target(address, session.machine, tools.root, tools.cuda)
    root = session.store.root / "environments" / f"{address[:16]}-{session.machine}"
    made = Target(address, session.machine, root, root / "nvidia" / "cu13", triple(session.machine))
    if not root.exists():
        with session.store.lock(f"environment-{address[:16]}"):
            if not root.exists():
                _make(session, tools, made)
    return made


def key(session: RunContext, tools: Toolchain) -> str:
    """
    Return the address of what the session's libraries are compiled and linked against; raise as
    `of`, less what downloads raise.
    """
    if not session.cross:
        return tools.key
    parts = {
        "tools": tools.key,
        "wheels": _linked_wheels(session),
        "compiler": _require(session),
        "python": python_headers.key(),
        "machine": session.machine,
        "toolchain": _TOOLCHAIN,
        "additions": toolchain.ADDITIONS,
    }
    return digest.key("target", parts)


def _linked_wheels(session: RunContext) -> tuple[tuple[str, str, str], ...]:
    return tuple(
        wheel
        for wheel in pylock.wheels(session.project, session.machine)
        if wheel[0].startswith(LINKED)
    )


def _require(session: RunContext) -> str:
    if found := compiler(session):
        return found
    what = (
        f"{triple(session.machine)}-g++ is not installed; it compiles for {session.machine} "
        f"on this machine."
    )
    raise CommandError(
        "tool-missing", what, todo=f"sudo apt-get install {package(session.machine)}"
    )


def _make(session: RunContext, tools: Toolchain, target: Target) -> None:
    wheels = _linked_wheels(session)
    with console.step(f"{target.machine}: {len(wheels)} locked wheels"):
        files = toolchain.download(session, wheels)
        with (
            session.store.building(target.root) as root,
            console.progress("unpack", len(files)) as line,
        ):
            cuda = root / target.cuda.relative_to(target.root)
            for done, path in enumerate(files, start=1):
                unpack(
                    path, root, skip=tuple(f"{cuda.relative_to(root)}/{name}/" for name in PROGRAMS)
                )
                line.update(done, path.name)
            for name in PROGRAMS:
                shutil.copytree(tools.cuda / name, cuda / name, copy_function=_linked)
            log = session.store.folder("logs") / f"target-{target.machine}.log"
            toolchain.complete_cuda(cuda, log, f"{target.triple}-gcc")
            (root / "toolchain.cmake").write_text(
                _TOOLCHAIN.format(machine=target.machine, triple=target.triple)
            )
            if toolchain.python_header().exists():
                python_headers.copy_headers(
                    root / "python", f"{target.triple}-gcc", target.machine, log
                )


def unpack(wheel: Path, folder: Path, *, skip: tuple[str, ...] = ()) -> None:
    """
    Write the members of *wheel* below *folder*, less those whose name begins with one of *skip*.

    Raises:
        wheel-invalid: It is damaged, or holds more than any wheel of a toolkit.
        archive-unsafe: A member would leave the folder.
    """
    with zip_file(wheel) as source:
        found = {
            name: info
            for name, info in members(source, wheel.name).items()
            if not name.startswith(skip)
        }
        if (declared := sum(info.file_size for info in found.values())) > MOST_BYTES:
            raise WheelError(
                "wheel-invalid",
                f"{wheel.name} would unpack to {declared} bytes, more than {MOST_BYTES}.",
            )
        for name, info in found.items():
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            # A link would be written as a file that holds its target: nothing here follows what an
            # archive says.
            with source.open(info) as data, place.open("wb") as sink:
                shutil.copyfileobj(data, sink, 1 << 20)


def _linked(source: str, place: str) -> None:
    """Make *place* the file *source*, without a second copy where the file system can do that."""
    try:
        os.link(source, place)
    except OSError:
        shutil.copy2(source, place)
