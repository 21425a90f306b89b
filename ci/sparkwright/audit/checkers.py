"""
Others' tools, each as a process of its own with an end in time and in memory: abi3audit, torch-abi-audit (`abi`), auditwheel (`tags`).

They read only what the host loads, so the first two are given the libraries without their device code (`half`). A tool that is not
installed, does not end, or answers something else than expected is reported as not run, with the reason; it is never a pass.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from sparkwright.audit.elf_sections import Buffer
from sparkwright.core import process

#: Seconds for one tool; on two cores each takes some seconds for a vLLM wheel.
PATIENCE = 300.0

Name = Literal["abi3audit", "torch-abi-audit", "auditwheel"]
ALL: tuple[Name, ...] = ("abi3audit", "torch-abi-audit", "auditwheel")

#: Bytes of address space for one tool; those of the tests need 0.2 GB.
MOST_MEMORY = 2 * 1024**3
#: An answer names each library and some symbols.
_LONGEST_ANSWER = 64 * 1024**2

T = TypeVar("T")


class Checker(msgspec.Struct, frozen=True):
    """
    One tool's part in an audit.

    Attributes:
        state: ``ran``; ``not-run`` where it should have; ``not-needed`` where the wheel promises nothing that it could check.
        says: What it found in a few words, or why it did not run.
    """

    name: str
    state: Literal["ran", "not-run", "not-needed"]
    says: str
    version: str = ""


class Outcome(msgspec.Struct, frozen=True):
    """A tool's part, and its findings: member (empty for the wheel), rule, message."""

    checker: Checker
    findings: tuple[tuple[str, str, str], ...] = ()


class Half(msgspec.Struct, frozen=True):
    """A library without its device code: its name in the wheel, where the copy lies, and what it needs."""

    name: str
    path: Path
    needed: tuple[str, ...]


class NotRun(Exception):
    """The tool gave no answer; the text says why."""


def half(data: Buffer, fatbins: Sequence[tuple[int, int]], target: Path) -> Path:
    """Write the library in *data* to *target* with holes in place of its *fatbins* (offset, size), and return *target*."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as out, memoryview(data) as view:
        out.truncate(len(data))
        position = 0
        for offset, size in [*sorted(fatbins), (len(data), 0)]:
            if offset > position:
                out.seek(position)
                out.write(view[position:offset])
            position = max(position, offset + size)
    return target


def answer(name: str, words: Sequence[str | Path], scratch: Path, kind: type[T], patience: float) -> T:
    """Return what the console script of the distribution *name* answers to *words* as JSON; its status may be 0 or 1."""
    found = [entry for entry in importlib.metadata.entry_points(group="console_scripts") if entry.name == name]
    if not found:
        raise NotRun(f"{name} is not installed")
    module, _, function = found[0].value.partition(":")
    call = f"import sys; from {module} import {function}; sys.argv[0] = {name!r}; sys.exit({function}())"
    command = [sys.executable, "-P", "-c", call, *map(str, words)]
    place = scratch / f"{name}.json"
    environment = process.clean_environment(XDG_CACHE_HOME=str(scratch), TMPDIR=str(scratch), NO_COLOR="1")
    with place.open("wb") as out:
        try:
            done = subprocess.run(
                process.leashed(command, memory=MOST_MEMORY), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE,
                env=environment, cwd=scratch, timeout=patience, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise NotRun(f"{name} did not end within {patience:g} s") from error
    if place.stat().st_size > _LONGEST_ANSWER:
        raise NotRun(f"{name} answered with {place.stat().st_size} bytes")
    try:
        return msgspec.json.decode(place.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise NotRun(f"{name} ended with status {done.returncode} and no answer: {''.join(last)[:200] or error}") from error


def outcome(name: Name, why_not: str, work: Callable[[], tuple[str, list[tuple[str, str, str]]]]) -> Outcome:
    """
    Return the outcome of *work*, which answers with what it found in words and with its findings.

    Args:
        why_not: Why the tool need not be asked, if so.
    """
    if why_not:
        return Outcome(Checker(name, "not-needed", why_not))
    try:
        says, findings = work()
    except NotRun as error:
        return Outcome(Checker(name, "not-run", str(error)))
    return Outcome(Checker(name, "ran", says, importlib.metadata.version(name)), tuple(findings))
