"""
What a unit costs: seconds of CPU, and peak resident megabytes of one process of its compiler.

A cost is taken from this machine's record, else as the stack ships it, else guessed. The peak is
that of the largest process (``ru_maxrss`` of wait4(2)), not of all together: nvcc runs cicc and
ptxas one after the other.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath

import msgspec

from sparkwright.builder.environment import pylock, toolchain
from sparkwright.builder.environment.toolchain import ForkEnvironment
from sparkwright.core import digest, strict_yaml
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project

#: Guessed seconds and megabytes of a unit. Typical CUDA units of vLLM 0.33.0 take 6-16 s and
#: 450-760 MB on one x86-64 core; a guess should rather be too large.
GUESS = (20.0, 1200)
#: How many of the newest records of a unit count: its largest peak, its last time.
NEWEST = 3
#: Seconds that a graft onto a wheel of hundreds of megabytes takes beside compiling: two configures
#: of 20 s, comparing and packing, the audit; measured for vLLM 0.33.0 on two x86-64 cores.
OVERHEAD = 120.0


class ExpectedCost(msgspec.Struct, frozen=True):
    """
    The expected cost of a unit.

    Attributes:
        seconds: Of CPU: the time that it takes on an idle core.
        measured: Here or elsewhere; else it is a guess.
    """

    seconds: float
    megabytes: int
    measured: bool = True


class Cost(msgspec.Struct, frozen=True):
    """A line of the record: the cost of a unit, once."""

    unit: str
    seconds: float
    megabytes: int


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


class Costs:
    """
    The costs of one fork's units.

    Args:
        file: This machine's record, a JSON object a line.
        shipped: The costs that come with the stack: unit → seconds and megabytes.
        patterns: Path pattern → megabytes (`ForkEnvironment.memory`), for units without a record.
    """

    def __init__(
        self, file: Path, shipped: Mapping[str, tuple[float, int]], patterns: Mapping[str, int]
    ) -> None:
        self._file, self._shipped, self._patterns = file, shipped, patterns
        #: Unit → its newest costs on this machine.
        self.recorded: dict[str, list[Cost]] = {}
        for line in file.read_bytes().splitlines() if file.exists() else ():
            try:
                self._remember(msgspec.json.decode(line, type=Cost))
            except msgspec.DecodeError:  # a line at which a run was killed, or the next one's break
                continue

    @classmethod
    def of(cls, session: RunContext, fork: str) -> Costs:
        """
        Return the costs of *fork* with this run's arch, compilers, host and target.

        A cross build may take a quarter of the time of a native one.

        Raises:
            file-invalid: The shipped file cannot be read.
        """
        wheels = pylock.wheels(session.project)
        parts = {
            "arch": session.project.spec.arch,
            "wheels": [name for project, name, _ in wheels if project in pylock.CODE_GENERATORS],
            "compiler": toolchain.compiler(session),
            "host": platform.machine(),
            "target": session.machine,
        }
        path = session.project.build_folder / "costs.yaml"
        shipped = strict_yaml.load(path, ShippedFile).forks.get(fork) if path.is_file() else None
        file = f"{fork}-{digest.key('costs', parts)[:16]}.jsonl"
        return cls(
            session.store.folder("records", "costs") / file,
            shipped.units if shipped else {},
            toolchain.spec(session.project).forks[fork].memory,
        )

    def _remember(self, cost: Cost) -> None:
        self.recorded[cost.unit] = [*self.recorded.get(cost.unit, [])[1 - NEWEST :], cost]

    def expected(self, unit: str) -> ExpectedCost:
        """Return the expected cost of *unit*."""
        if costs := self.recorded.get(unit):
            return ExpectedCost(costs[-1].seconds, max(cost.megabytes for cost in costs))
        if unit in self._shipped:
            return ExpectedCost(*self._shipped[unit])
        seconds, megabytes = GUESS
        for pattern, size in self._patterns.items():
            if PurePath(unit).match(pattern):
                return ExpectedCost(seconds, size, measured=False)
        return ExpectedCost(seconds, megabytes, measured=False)

    def add(self, costs: Iterable[Cost]) -> None:
        """Append *costs* to the record."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("ab") as stream:
            for cost in costs:
                self._remember(cost)
                # Another build may append too, and a killed one may have left half a line.
                stream.write(b"\n" + msgspec.json.encode(cost) + b"\n")


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
