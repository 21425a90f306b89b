"""
What compiling a unit should cost: as this machine recorded it, else as the stack ships it, else by pattern, else by kind.

A record is appended when the unit ends, so a build that is killed loses nothing of what it learnt.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path, PurePath
from typing import Literal

import msgspec

from sparkwright.builder.environment import cross, pylock, toolchain
from sparkwright.core import digest, strict_yaml
from sparkwright.forks.context import Session

#: Seconds and megabytes of a unit of which nothing is known but its suffix. Typical CUDA units of vLLM 0.33.0 take 6-16 s and 450-760 MB on
#: one x86-64 core; a guess should be too large rather than too small, since the watchdog corrects it at the price of a compile.
KINDS: Mapping[str, tuple[float, int]] = {".cu": (20, 1200), ".c": (3, 300)}
OTHERS = (30.0, 1200)
#: How many of the newest records of a unit count: its largest peak, its last time.
NEWEST = 3


class Expected(msgspec.Struct, frozen=True):
    """
    What a unit should cost.

    Attributes:
        seconds: Of CPU: what it takes on a core that does nothing else.
        origin: ``record`` and ``shipped`` were measured, ``pattern`` and ``kind`` are guesses.
    """

    seconds: float
    megabytes: int
    origin: Literal["record", "shipped", "pattern", "kind"]

    @property
    def measured(self) -> bool:
        return self.origin in ("record", "shipped")


class Cost(msgspec.Struct, frozen=True):
    """A line of the record: seconds of CPU and peak megabytes that a unit cost once. *stack* says whose source it was."""

    unit: str
    seconds: float
    megabytes: int
    stack: str = ""


class Shipped(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The measured costs of a fork's units that come with the stack (``traces.yaml``).

    Attributes:
        host, toolchain, arch, date: Where, with what, for what and when they were measured.
        units: Source → seconds of CPU, and peak resident megabytes of its compiler.
    """

    host: str
    toolchain: str
    arch: str
    date: str
    units: dict[str, tuple[float, int]]


class ShippedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``build/<stack>/traces.yaml``."""

    forks: dict[str, Shipped] = {}


def compiler_key(session: Session) -> str:
    """Return the address of what decides a unit's cost beside its source: arch, CUDA compiler, host compiler, machine."""
    decisive = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")
    wheels = [filename for name, filename, _ in pylock.wheels(session.project) if name in decisive]
    parts = {"arch": session.project.spec.arch, "wheels": wheels, "host": cross.compiler(session), "machine": session.machine}
    return digest.key("traces", parts)


class Traces:
    """
    The costs of one fork's units.

    Args:
        file: This machine's record, a JSON object a line.
        shipped: What the stack ships, if anything.
        patterns: Path pattern → megabytes (`ForkEnvironment.memory`), for units that nobody measured.
    """

    def __init__(self, file: Path, shipped: Shipped | None, patterns: Mapping[str, int], stack: str = "") -> None:
        self._file, self._shipped, self._patterns, self._stack = file, shipped.units if shipped else {}, patterns, stack

    @classmethod
    def of(cls, session: Session, fork: str) -> Traces:
        """
        Return the costs of *fork* with this run's arch and compilers.

        Raises:
            file-invalid: The shipped file cannot be read.
        """
        path = session.project.build_folder / "traces.yaml"
        shipped = strict_yaml.load(path, ShippedFile).forks.get(fork) if path.is_file() else None
        file = session.store.folder("records", "traces") / f"{fork}-{compiler_key(session)[:16]}.jsonl"
        return cls(file, shipped, toolchain.spec(session.project).forks[fork].memory, session.project.stack)

    @cached_property
    def _recorded(self) -> dict[str, list[Cost]]:
        found: dict[str, list[Cost]] = {}
        for line in self._file.read_bytes().splitlines() if self._file.exists() else ():
            try:
                cost = msgspec.json.decode(line, type=Cost)
            except msgspec.DecodeError:  # the line at which a run was killed
                continue
            found[cost.unit] = [*found.get(cost.unit, [])[1 - NEWEST :], cost]
        return found

    @property
    def recorded(self) -> tuple[str, ...]:
        """The units that this machine has a record of."""
        return tuple(sorted(self._recorded))

    def expected(self, unit: str) -> Expected:
        """Return what *unit* should cost."""
        if costs := self._recorded.get(unit):
            return Expected(costs[-1].seconds, max(cost.megabytes for cost in costs), "record")
        if unit in self._shipped:
            return Expected(*self._shipped[unit], "shipped")
        seconds, megabytes = KINDS.get(PurePath(unit).suffix, OTHERS)
        for pattern, size in self._patterns.items():
            if PurePath(unit).match(pattern):
                return Expected(seconds, size, "pattern")
        return Expected(seconds, megabytes, "kind")

    def add(self, unit: str, seconds: float, megabytes: int) -> None:
        """Write down what *unit* cost, at once."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("ab") as stream:
            # Another build may append too, and a killed one may have left half a line: a line of its own, in one write.
            stream.write(b"\n" * self._torn() + msgspec.json.encode(Cost(unit, round(seconds, 2), megabytes, self._stack)) + b"\n")

    def _torn(self) -> bool:
        with self._file.open("rb") as stream:
            if not stream.seek(0, 2):
                return False
            stream.seek(-1, 2)
            return stream.read() != b"\n"
