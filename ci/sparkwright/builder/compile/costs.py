"""
What a unit costs: seconds of CPU, and peak resident megabytes of one process of its compiler.

A cost is taken from this machine's record, else as the stack ships it, else guessed by pattern,
else by the suffix of the unit. The peak is that of the largest process (``ru_maxrss`` of wait4(2)),
not of
all together: nvcc runs cicc and ptxas one after the other.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path, PurePath
from typing import Literal

import msgspec

from sparkwright.builder.environment import pylock, toolchain
from sparkwright.builder.environment.toolchain import ForkEnvironment
from sparkwright.core import digest, strict_yaml
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project

#: Seconds and megabytes of a unit by its suffix alone. Typical CUDA units of vLLM 0.33.0 take 6-16
#: s and 450-760 MB on one x86-64 core; a guess should rather be too large.
KINDS: Mapping[str, tuple[float, int]] = {".cu": (20, 1200), ".c": (3, 300)}
OTHERS = (30.0, 1200)
#: How many of the newest records of a unit count: its largest peak, its last time.
NEWEST = 3
#: Seconds that a graft onto a wheel of hundreds of megabytes takes beside compiling: two configures
#: of 20 s, comparing and packing, the audit; measured for vLLM 0.33.0 on two x86-64 cores.
OVERHEAD = 120.0


class Expected(msgspec.Struct, frozen=True):
    """
    The expected cost of a unit.

    Attributes:
        seconds: Of CPU: the time that it takes on an idle core.
        origin: ``record`` and ``shipped`` were measured, ``pattern`` and ``kind`` are guesses.
    """

    seconds: float
    megabytes: int
    origin: Literal["record", "shipped", "pattern", "kind"]

    @property
    def measured(self) -> bool:
        """Was it measured, here or elsewhere?"""
        return self.origin in ("record", "shipped")


class Cost(msgspec.Struct, frozen=True):
    """
    A line of the record: the cost of a unit, once.

    Attributes:
        stack: Whose source was compiled.
    """

    unit: str
    seconds: float
    megabytes: int
    stack: str = ""


class Shipped(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The measured costs of a fork's units that come with the stack.

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
    """``build/<stack>/costs.yaml``."""

    forks: dict[str, Shipped] = {}


def compiler_key(session: RunContext) -> str:
    """
    Return the address of everything beside its source that decides a unit's cost.

    These are the arch, the CUDA compiler, the host compiler, the host and the target: a cross build
    may take a quarter of the time of a native one.
    """
    decisive = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")
    wheels = [name for project, name, _ in pylock.wheels(session.project) if project in decisive]
    parts = {
        "arch": session.project.spec.arch,
        "wheels": wheels,
        "compiler": toolchain.compiler(session),
        "host": platform.machine(),
        "target": session.machine,
    }
    return digest.key("costs", parts)


class Costs:
    """
    The costs of one fork's units.

    Args:
        file: This machine's record, a JSON object a line.
        shipped: The costs that come with the stack, if any.
        patterns: Path pattern → megabytes (`ForkEnvironment.memory`), for units without a record.
    """

    def __init__(
        self, file: Path, shipped: Shipped | None, patterns: Mapping[str, int], stack: str = ""
    ) -> None:
        self._file, self._shipped = file, shipped.units if shipped else {}
        self._patterns, self._stack = patterns, stack

    @classmethod
    def of(cls, session: RunContext, fork: str) -> Costs:
        """
        Return the costs of *fork* with this run's arch and compilers.

        Raises:
            file-invalid: The shipped file cannot be read.
        """
        path = session.project.build_folder / "costs.yaml"
        shipped = strict_yaml.load(path, ShippedFile).forks.get(fork) if path.is_file() else None
        name = f"{fork}-{compiler_key(session)[:16]}.jsonl"
        patterns = toolchain.spec(session.project).forks[fork].memory
        folder = session.store.folder("records", "costs")
        return cls(folder / name, shipped, patterns, session.project.stack)

    @cached_property
    def _recorded(self) -> dict[str, list[Cost]]:
        costs: dict[str, list[Cost]] = {}
        for line in self._file.read_bytes().splitlines() if self._file.exists() else ():
            try:
                cost = msgspec.json.decode(line, type=Cost)
            except msgspec.DecodeError:  # the line at which a run was killed
                continue
            costs[cost.unit] = [*costs.get(cost.unit, [])[1 - NEWEST :], cost]
        return costs

    @property
    def recorded(self) -> tuple[str, ...]:
        """The units that this machine has a record of."""
        return tuple(sorted(self._recorded))

    def expected(self, unit: str) -> Expected:
        """Return the expected cost of *unit*."""
        if costs := self._recorded.get(unit):
            peak = max(cost.megabytes for cost in costs)
            return Expected(costs[-1].seconds, peak, "record")
        if unit in self._shipped:
            return Expected(*self._shipped[unit], "shipped")
        seconds, megabytes = KINDS.get(PurePath(unit).suffix, OTHERS)
        for pattern, size in self._patterns.items():
            if PurePath(unit).match(pattern):
                return Expected(seconds, size, "pattern")
        return Expected(seconds, megabytes, "kind")

    def add(self, costs: Iterable[tuple[str, float, int]]) -> None:
        """Append *costs* to the record: units, with their seconds and megabytes."""
        lines = [
            msgspec.json.encode(Cost(unit, round(seconds, 2), megabytes, self._stack)) + b"\n"
            for unit, seconds, megabytes in costs
        ]
        if lines:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("ab") as stream:
                # Another build may append too, and a killed one may have left half a line.
                stream.write(b"\n" * self._torn() + b"".join(lines))
            self.__dict__.pop("_recorded", None)

    def _torn(self) -> bool:
        with self._file.open("rb") as stream:
            if not stream.seek(0, 2):
                return False
            stream.seek(-1, 2)
            return stream.read() != b"\n"


def build_seconds(project: Project, fork: str, jobs: int) -> float:
    """Return the expected seconds of building *fork* with *jobs* units at once."""
    settings = toolchain.spec(project).forks[fork]
    if not settings.core_targets:
        return settings.seconds
    overhead = OVERHEAD if settings.longest else 0
    return overhead + max(settings.longest, settings.seconds / jobs)


def parallel_units(settings: ForkEnvironment, cores: int, memory: int) -> int:
    """Return how many of the fork's largest units can compile at once with *memory* bytes."""
    largest = max(settings.memory.values(), default=1) * 1_000_000
    return max(1, min(cores, memory // largest))
