"""
Python's own headers, for extension modules that are compiled for another machine.

No wheel of the package index has them. They are the same for every machine but for ``pyconfig.h``,
and what an extension reads there is sizes and alignments, the byte order, and what the C library
has, which is glibc on both sides. So this machine's headers serve, and that they do is not
believed: the cross compiler is given an assertion for each size.
"""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

from sparkwright.builder.environment import toolchain
from sparkwright.builder.errors import BuildError
from sparkwright.core import digest, process
from sparkwright.core.errors import CommandError

#: What pyconfig.h says of C types, and the type that each is about (CPython's configure.ac).
_TYPES = {
    "_BOOL": "_Bool",
    "VOID_P": "void *",
    "LONG_LONG": "long long",
    "LONG_DOUBLE": "long double",
    "MAX_ALIGN_T": "max_align_t",
    **{
        name.upper(): name
        for name in (
            "short",
            "int",
            "long",
            "float",
            "double",
            "size_t",
            "off_t",
            "time_t",
            "pid_t",
            "fpos_t",
        )
    },
    **{name.upper(): name for name in ("uintptr_t", "wchar_t", "pthread_t", "pthread_key_t")},
}
_OPERATORS = {"SIZEOF": "sizeof", "ALIGNOF": "_Alignof"}
_HEADERS = ("pthread.h", "stddef.h", "stdint.h", "stdio.h", "sys/types.h", "time.h", "wchar.h")


def config() -> Path:
    """
    Return the ``pyconfig.h`` that holds the values; Debian's own one only includes that of the
    machine, from another folder.
    """
    include = toolchain.python_header().parent
    debian = (
        include.parent / str(sysconfig.get_config_var("MULTIARCH")) / include.name / "pyconfig.h"
    )
    return debian if debian.exists() else include / "pyconfig.h"


def key() -> str:
    """
    Return the digest of what `copy_headers` would copy; empty where the headers of this Python are
    not installed.
    """
    return digest.sha256_file(config()) if toolchain.python_header().exists() else ""


def copy_headers(folder: Path, gcc: str, machine: str, log: Path) -> None:
    """
    Copy the headers of this Python to *folder*, for compiling with *gcc* for *machine*.

    Raises:
        target-mismatch: A size, an alignment or the byte order is another one there.
    """
    shutil.copytree(
        toolchain.python_header().parent, folder, ignore=shutil.ignore_patterns("pyconfig.h")
    )
    shutil.copyfile(config(), folder / "pyconfig.h")
    check = folder.parent / "pyconfig-check.c"
    check.write_text(assertions(), "utf-8")
    try:
        process.run([gcc, "-fsyntax-only", f"-I{folder}", check], log=log)
    except CommandError as error:
        if error.reference != "command-failed":
            raise
        what = (
            f"The headers of this Python do not describe {machine}: {config()} states other C "
            f"types."
        )
        todo = f"Build on a machine of {machine}, or on one with the same C types."
        raise BuildError("target-mismatch", what, details=error.details, todo=todo) from error


def assertions() -> str:
    """
    Return a C source that compiles where the ``pyconfig.h`` on its include path is right about the
    C types.
    """
    lines = [f"#include <{name}>" for name in ("pyconfig.h", *_HEADERS)]
    for prefix, operator in _OPERATORS.items():
        for name, kind in _TYPES.items():
            macro = f"{prefix}_{name}"
            lines += [
                f"#ifdef {macro}",
                f'_Static_assert({operator}({kind}) == {macro}, "{macro}");',
                "#endif",
            ]
    for condition, order in (("ifdef", "BIG"), ("ifndef", "LITTLE")):
        check = f'_Static_assert(__BYTE_ORDER__ == __ORDER_{order}_ENDIAN__, "WORDS_BIGENDIAN");'
        lines += [f"#{condition} WORDS_BIGENDIAN", check, "#endif"]
    return "\n".join([*lines, ""])
