"""
What a build backend did, looked at before it is believed: what its compilers were told, and what is in the wheel.

Upstream marks libraries as optional, so that a build goes on without them, and configures with options of its own.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from sparkwright.build import wheelfile
from sparkwright.build.configure import gencode
from sparkwright.build.graft import Transplant
from sparkwright.build.toolchain import FullEnvironment
from sparkwright.build.wheelfile import WheelName
from sparkwright.errors import ArchMismatch, ExtensionMissing
from sparkwright.forks.archive import zip_file

#: A source, and the code that is made of it.
Command = tuple[str, tuple[str, ...]]

#: Lines of a failed step that are shown.
_MOST = 25
_STEP = re.compile(r"\[\d+/\d+\] ")
_COMMAND = re.compile(r"\s*\S*(?:/|\b)(?:g\+\+|c\+\+|nvcc|python[\d.]*|ccache|cmake) |.*&& ")
_LOST = re.compile(r"error|failed|skip|not (?:be )?(?:built|compil)", re.IGNORECASE)


def commands(build: Path) -> Counter[Command]:
    """Return every source that CMake compiles in the folder *build*, with its gencode, as often as it does."""
    path = build / "compile_commands.json"
    entries = msgspec.json.decode(path.read_bytes(), type=list[dict[str, str]]) if path.exists() else []
    return Counter((entry["file"], gencode(shlex.split(entry["command"]))) for entry in entries)


def check_commands(fork: str, planned: Counter[Command], real: Counter[Command]) -> None:
    """
    Require that the backend compiled what was planned.

    Raises:
        ArchMismatch: It compiled other sources, or for another arch.
    """
    if planned != real:
        lines = [f"planned: {file} {' '.join(code)}" for file, code in sorted((planned - real).elements())]
        lines += [f"compiled: {file} {' '.join(code)}" for file, code in sorted((real - planned).elements())]
        todo = "Find the option that the backend gives to CMake, and set it under `full` in environment.yaml as well."
        what = f"{fork}'s backend configured otherwise than the plan: {len(lines)} units differ."
        raise ArchMismatch(what, details=lines[:_MOST], todo=todo)


def check_extensions(wheel: Path, settings: FullEnvironment, log: Path) -> None:
    """
    Require that *wheel* has every member that ``extensions`` names.

    Raises:
        ExtensionMissing: One is not there; the error holds the last words of what should have made it, as the log has them.
    """
    with zip_file(wheel) as archive:
        names = list(wheelfile.members(archive, wheel.name))
    missing = [pattern for pattern in settings.extensions if not any(fnmatchcase(name, pattern) for name in names)]
    if missing:
        text = log.read_text("utf-8", "replace").splitlines()
        lines = [line for pattern in missing for line in (f"missing: {pattern}", *last_words(text, pattern))]
        what = f"{wheel.name} was built without {', '.join(missing)}."
        raise ExtensionMissing(what, details=[*lines, f"full log: {log}"], data={"missing": missing})


def last_words(log: Sequence[str], pattern: str) -> list[str]:
    """Return the last failure in *log* that names the library of *pattern*, without its command; nothing where none does."""
    target = re.sub(r"[.*?[].*", "", pattern.rpartition("/")[2])
    starts = [number for number, line in enumerate(log) if line.startswith("FAILED:") and target in line]
    if not starts:
        named = [line.strip() for line in log if target in line and _LOST.search(line)]
        return [f"  {line}" for line in named[-5:]]
    block: list[str] = []
    for line in log[starts[-1] :]:
        if block and (_STEP.match(line) or line.startswith(("FAILED:", "ninja: "))):
            break
        # The command itself is long, and says less than what the compiler answers.
        if not _COMMAND.match(line):
            block.append(f"  {line}")
    return block[:_MOST]


def account(wheel: Path, requires: Mapping[str, str]) -> Transplant:
    """Return the account of the libraries of *wheel*: all of them were compiled here."""
    with zip_file(wheel) as archive:
        record = wheelfile.records(archive, WheelName.of(wheel.name).info, wheel.name)
        names = [name for name in record if name.endswith(".so") or ".so." in name]
        libraries = {name: hashlib.sha256(archive.read(name)).hexdigest() for name in sorted(names)}
    return Transplant(libraries=libraries, replaced=(), removed=(), base={}, requires=dict(requires))
