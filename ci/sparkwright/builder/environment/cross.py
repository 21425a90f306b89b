"""
The machine that wheels are made for, which may be another than this one.

Programs (cmake, ninja, nvcc, ptxas, Python) are this machine's. The headers and libraries that are
compiled and linked against are of the other machine's wheels, which the same ``pylock.toml`` names
by hash, unpacked and never run. Together they are a CUDA toolkit as NVIDIA lays one out, so that
nvcc and CMake find everything where they look for it.

No wheel has the headers of Python. x86-64 and aarch64 Linux have the same C types and byte order, so
this machine's headers serve.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import msgspec

from sparkwright.builder.environment import pylock, toolchain
from sparkwright.builder.environment.pylock import LockedWheel
from sparkwright.builder.environment.toolchain import Toolchain
from sparkwright.core import digest
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError
from sparkwright.forks.context import RunContext

#: Projects that are compiled and linked against; the other wheels of the lock hold programs and
#: Python packages, which this machine runs.
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
# Libraries and headers are this folder's or the cross compiler's own; those in this machine's folders are for this machine.
set(CMAKE_FIND_ROOT_PATH "${{CMAKE_CURRENT_LIST_DIR}}")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
"""


class Target(msgspec.Struct, frozen=True):
    """
    The headers and libraries that wheels are compiled and linked against.

    Attributes:
        key: Their address.
        machine: ``x86_64`` or ``aarch64``.
        root: Their folder.
        cuda: The CUDA toolkit: programs for this machine, headers and libraries for that one.
        triple: The prefix of the cross compiler's names; empty for this machine.
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
        Return the CMake cache entries for the target's libraries; none for this machine's own.
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
    """Return the prefix of the names of Debian's cross compiler for *machine*."""
    return f"{machine}-linux-gnu"


def package(machine: str) -> str:
    """Return the package of Debian and Ubuntu that holds the cross compiler for *machine*."""
    return f"g++-{triple(machine).replace('_', '-')}"


def of(session: RunContext, tools: Toolchain) -> Target:
    """
    Return the session's target, its headers and libraries in place.

    Raises:
        tool-missing: The cross compiler is not installed.
        source-unreachable, source-mismatch, offline, disk-full, command-failed: As for the tools.
    """
    address = key(session, tools)
    if not session.cross:
        return Target(address, session.machine, tools.root, tools.cuda)
    root = session.store.root / "environments" / f"{address[:16]}-{session.machine}"
    cuda = root / "nvidia" / "cu13"
    target = Target(address, session.machine, root, cuda, triple(session.machine))
    if not root.exists():
        with session.store.lock(f"environment-{address[:16]}"):
            if not root.exists():
                _fill(session, tools, target)
    return target


def key(session: RunContext, tools: Toolchain) -> str:
    """
    Return the address of everything that the session's libraries are compiled and linked against.

    Raises:
        tool-missing: The cross compiler is not installed.
    """
    if not session.cross:
        return tools.key
    compiler = toolchain.compiler(session)
    if not compiler:
        what = (
            f"{triple(session.machine)}-g++ is not installed; it compiles for {session.machine} "
            f"on this machine."
        )
        todo = f"sudo apt-get install {package(session.machine)}"
        raise CommandError("tool-missing", what, todo=todo)
    header = toolchain.python_header()
    parts = {
        "tools": tools.key,
        "wheels": _linked_wheels(session),
        "compiler": compiler,
        "python": digest.sha256_file(_python_config()) if header.exists() else "",
        "machine": session.machine,
        "toolchain": _TOOLCHAIN,
        "additions": toolchain.ADDITIONS,
    }
    return digest.key("target", parts)


def _linked_wheels(session: RunContext) -> tuple[LockedWheel, ...]:
    wheels = pylock.wheels(session.project, session.machine)
    return tuple(wheel for wheel in wheels if wheel[0].startswith(LINKED))


def _fill(session: RunContext, tools: Toolchain, target: Target) -> None:
    wheels = _linked_wheels(session)
    log = session.store.folder("logs") / f"target-{target.machine}.log"
    with console.step(f"{target.machine}: {len(wheels)} locked wheels"):
        files = toolchain.download(session.store, wheels, offline=session.offline)
        with session.store.building(target.root) as root:
            toolchain.install(session.store, root, files, target.machine)
            cuda = root / target.cuda.relative_to(target.root)
            for name in PROGRAMS:
                shutil.rmtree(cuda / name, ignore_errors=True)
                shutil.copytree(tools.cuda / name, cuda / name, copy_function=os.link)
            toolchain.complete_cuda(cuda, log, f"{target.triple}-gcc")
            text = _TOOLCHAIN.format(machine=target.machine, triple=target.triple)
            (root / "toolchain.cmake").write_text(text)
            if toolchain.python_header().exists():
                shutil.copytree(toolchain.python_header().parent, root / "python")
                shutil.copyfile(_python_config(), root / "python" / "pyconfig.h")


def _python_config() -> Path:
    """
    Return the ``pyconfig.h`` that holds the values; Debian's own one only includes that of the
    machine, from another folder.
    """
    include = toolchain.python_header().parent
    multiarch = str(sysconfig.get_config_var("MULTIARCH"))
    debian = include.parent / multiarch / include.name / "pyconfig.h"
    return debian if debian.exists() else include / "pyconfig.h"
