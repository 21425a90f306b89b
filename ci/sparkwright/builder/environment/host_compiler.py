"""The C++ compiler of this machine: its identity, and whether a source refuses it as too old."""

from __future__ import annotations

import os
import re
import shlex

from sparkwright.builder.errors import BuildError
from sparkwright.core import process
from sparkwright.core.errors import CommandError

#: The words in which projects refuse a compiler: vLLM, PyTorch, CUTLASS, oneDNN, CMake itself.
_REFUSED = re.compile(
    r"(?P<compiler>GCC|gcc|G\+\+|g\+\+|GNU|Clang|clang|compiler)\b[^.;\n]{0,60}?"
    r"(?:>=|at least|requires?|(?:newer|later|higher) than|minimum(?: version)?(?: "
    r"is)?)\s*(?:version\s*)?(?P<version>\d+(?:\.\d+)*)"
)
_FOUND = re.compile(r"\b(?:found|got|have|is|version)\b\D{0,20}(\d+(?:\.\d+)+)")


def program() -> list[str]:
    """Return the command of the C++ compiler that CMake takes: ``CXX``, else ``c++``."""
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def identity() -> str:
    """
    Return version and target of that compiler, and of the one that ``CUDAHOSTCXX`` names; empty
    without one.
    """
    commands = [
        program(),
        *([shlex.split(os.environ["CUDAHOSTCXX"])] if os.environ.get("CUDAHOSTCXX") else []),
    ]
    return " ".join(
        _asked(command, "-dumpfullversion", "-dumpmachine") for command in commands
    ).strip()


def _asked(command: list[str], *options: str) -> str:
    try:
        return " ".join(process.output([*command, *options]).split())
    except CommandError:
        return ""


def explained(error: BuildError) -> BuildError:
    """
    Return *error*, as `compiler-too-old` where CMake's own words say that this is what it is about.
    """
    # CMake breaks its messages into lines.
    words = " ".join(" ".join(error.details).split())
    refused = _REFUSED.search(words)
    if not refused:
        return error
    found = _FOUND.search(words, refused.end())
    here = found[1] if found else _asked(program(), "-dumpfullversion")
    if not _older(here, refused["version"]):
        return error
    what = (
        f"The sources need {refused['compiler']} {refused['version']} or newer; "
        f"{' '.join(program())} is {here}."
    )
    sentence = re.search(rf"[^.]*{re.escape(refused[0])}.{{0,400}}", words)
    details = [*([sentence[0].strip()] if sentence else []), *error.details]
    return BuildError(
        "compiler-too-old",
        what,
        details=details,
        todo=_todo(refused["version"]),
        data={"needed": refused["version"], "found": here},
    )


def _older(here: str, needed: str) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        return Version(here) < Version(needed)
    except InvalidVersion:
        return False


def _todo(version: str) -> str:
    major = version.partition(".")[0]
    return (
        f"Install a newer one beside it (sudo apt-get install g++-{major}, or a later one that "
        f"your system has) and name it: "
        f"CC=gcc-{major} CXX=g++-{major} CUDAHOSTCXX=g++-{major} sparkwright build …. "
        "The default targets need none of the vendored sources: leave --targets out."
    )
