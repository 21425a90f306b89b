"""
The machine that wheels are made for, which may be another than this one.

Programs (cmake, ninja, nvcc, ptxas, Python) are this machine's. The headers and libraries that are
compiled and linked against are of the other machine's wheels, which the same ``pylock.toml`` names
by hash, unpacked and never run. Together they are a CUDA toolkit as NVIDIA lays one out, so that
nvcc and CMake find everything where they look for it.

No wheel has the headers of Python. They are the same for every machine but for ``pyconfig.h``,
which states sizes and alignments of C types and the byte order. So this machine's headers serve,
and the cross compiler is given an assertion for each statement.
"""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sparkwright.builder.environment import pylock, toolchain
from sparkwright.builder.environment.pylock import LockedWheel
from sparkwright.builder.environment.toolchain import Toolchain
from sparkwright.builder.errors import BuildError
from sparkwright.builder.wheel.archive import members
from sparkwright.core import digest, process
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, WheelError
from sparkwright.forks.archive import MOST_BYTES, zip_file
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
        target-mismatch: The C types of this machine's Python are not the target's.
        source-unreachable, source-mismatch, offline, disk-full, wheel-invalid: As for the tools.
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
    cuda = target.cuda.relative_to(target.root)
    with console.step(f"{target.machine}: {len(wheels)} locked wheels"):
        files = toolchain.download(session, wheels)
        with session.store.building(target.root) as root:
            for path in files:
                unpack(path, root, skip=tuple(f"{cuda}/{name}/" for name in PROGRAMS))
            for name in PROGRAMS:
                shutil.copytree(tools.cuda / name, root / cuda / name, copy_function=_link)
            toolchain.complete_cuda(root / cuda, log, f"{target.triple}-gcc")
            text = _TOOLCHAIN.format(machine=target.machine, triple=target.triple)
            (root / "toolchain.cmake").write_text(text)
            if toolchain.python_header().exists():
                gcc = f"{target.triple}-gcc"
                copy_python_headers(root / "python", gcc, target.machine, log)


def unpack(wheel: Path, folder: Path, *, skip: tuple[str, ...] = ()) -> None:
    """
    Write the members of *wheel* below *folder*, without those whose name begins with one of *skip*.

    Raises:
        wheel-invalid: It is damaged, or holds more than any wheel of a toolkit.
        archive-unsafe: A member would leave the folder.
    """
    with zip_file(wheel) as source:
        wanted = {
            name: info
            for name, info in members(source, wheel.name).items()
            if not name.startswith(skip)
        }
        if (size := sum(info.file_size for info in wanted.values())) > MOST_BYTES:
            what = f"{wheel.name} would unpack to {size} bytes, more than {MOST_BYTES}."
            raise WheelError("wheel-invalid", what)
        for name, info in wanted.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            # A link would be written as a file that holds its target: no link is followed.
            with source.open(info) as data, path.open("wb") as sink:
                shutil.copyfileobj(data, sink, 1 << 20)


def _link(source: str, path: str) -> None:
    """Make *path* a hard link of *source*, or a copy if the file system has no links."""
    try:
        os.link(source, path)
    except OSError:
        shutil.copy2(source, path)


# Python's headers.

#: The names of C types in pyconfig.h, if they are not the type in capitals (CPython's
#: configure.ac).
_TYPES = {
    "_BOOL": "_Bool",
    "VOID_P": "void *",
    "LONG_LONG": "long long",
    "LONG_DOUBLE": "long double",
}
_OPERATORS = {"SIZEOF": "sizeof", "ALIGNOF": "_Alignof"}
_HEADERS = ("pthread.h", "stddef.h", "stdint.h", "stdio.h", "sys/types.h", "time.h", "wchar.h")


def _python_config() -> Path:
    """
    Return the ``pyconfig.h`` that holds the values; Debian's own one only includes that of the
    machine, from another folder.
    """
    include = toolchain.python_header().parent
    multiarch = str(sysconfig.get_config_var("MULTIARCH"))
    debian = include.parent / multiarch / include.name / "pyconfig.h"
    return debian if debian.exists() else include / "pyconfig.h"


def copy_python_headers(folder: Path, gcc: str, machine: str, log: Path) -> None:
    """
    Copy the headers of this Python to *folder*, for compiling with *gcc* for *machine*.

    Raises:
        target-mismatch: A size, an alignment or the byte order differs there.
    """
    shutil.copytree(
        toolchain.python_header().parent, folder, ignore=shutil.ignore_patterns("pyconfig.h")
    )
    config = _python_config()
    shutil.copyfile(config, folder / "pyconfig.h")
    check = folder.parent / "pyconfig-check.c"
    check.write_text("\n".join(_assertions(config.read_text("utf-8"))), "utf-8")
    try:
        process.run([gcc, "-fsyntax-only", f"-I{folder}", check], log=log)
    except CommandError as error:
        if error.reference != "command-failed":
            raise
        what = (
            f"The headers of this Python do not describe {machine}: {config} states other C types."
        )
        todo = f"Build on a machine of {machine}, or on one with the same C types."
        raise BuildError("target-mismatch", what, details=error.details, todo=todo) from error


def _assertions(config: str) -> Iterator[str]:
    """Yield a C source that compiles only if the ``pyconfig.h`` *config* is right about C types."""
    yield from (f"#include <{name}>" for name in ("pyconfig.h", *_HEADERS))
    stated = re.compile(r"^#\s*define (SIZEOF|ALIGNOF)_(\w+) \d+", re.MULTILINE)
    for operator, name in stated.findall(config):
        macro, c_type = f"{operator}_{name}", _TYPES.get(name, name.lower())
        yield f'_Static_assert({_OPERATORS[operator]}({c_type}) == {macro}, "{macro}");'
    yield "#ifdef WORDS_BIGENDIAN\n#define STATED __ORDER_BIG_ENDIAN__"
    yield "#else\n#define STATED __ORDER_LITTLE_ENDIAN__\n#endif"
    yield '_Static_assert(__BYTE_ORDER__ == STATED, "WORDS_BIGENDIAN");\n'
