"""
What a unit costs: seconds of CPU, and peak resident megabytes of one process of its compiler.

A cost is taken from this machine's record, else as the stack ships it, else guessed. The peak is
that of the largest process (``ru_maxrss`` of wait4(2)), not of all together: nvcc runs cicc and
ptxas one after the other.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import PurePath

import msgspec

from sparkwright.builder.environment import pylock, toolchain
from sparkwright.core import strict_yaml
from sparkwright.core.files import content_key
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project

#: Guessed seconds and megabytes of a unit. Typical CUDA units of vLLM 0.33.0 take 6-16 s and
#: 450-760 MB on one x86-64 core; a guess should rather be too large.
GUESS = (20.0, 1200)
#: Seconds that a graft onto a wheel of hundreds of megabytes takes beside compiling: two configures
#: of 20 s, comparing and packing, the audit; measured for vLLM 0.33.0 on two x86-64 cores.
OVERHEAD = 120.0


class Cost(msgspec.Struct, frozen=True):
    """
    The cost of a unit.

    Attributes:
        seconds: Of CPU: the time that it takes on an idle core.
        megabytes: Peak resident memory of the largest process of its compiler.
        measured: Here or elsewhere; else it is a guess.
    """

    seconds: float
    megabytes: int
    measured: bool = True


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
        store: Holds this machine's record under *key*.
        shipped: The costs that come with the stack: unit → seconds and megabytes.
        patterns: Path pattern → megabytes (`ForkEnvironment.memory`), for units without a record.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        shipped: Mapping[str, tuple[float, int]],
        patterns: Mapping[str, int],
    ) -> None:
        self._store, self._key, self._shipped, self._patterns = store, key, shipped, patterns
        #: Unit → its last cost on this machine.
        self.recorded = store.get("costs", key, dict[str, Cost]) or {}

    @classmethod
    def of(cls, context: RunContext, fork: str) -> Costs:
        """
        Return the costs of *fork* with this run's arch, compilers, host and target.

        A cross build may take a quarter of the time of a native one.

        Raises:
            file-invalid: The shipped file cannot be read.
        """
        wheels = pylock.wheels(context.project)
        parts = {
            "arch": context.project.spec.arch,
            "wheels": [name for project, name, _ in wheels if project in pylock.CODE_GENERATORS],
            "compiler": toolchain.compiler(context),
            "host": platform.machine(),
            "target": context.machine,
        }
        path = context.project.costs_file
        shipped = strict_yaml.load(path, ShippedFile).forks.get(fork) if path.is_file() else None
        return cls(
            context.store,
            f"{fork}-{content_key('costs', parts)[:16]}",
            shipped.units if shipped else {},
            toolchain.spec(context.project).forks[fork].memory,
        )

    def expected(self, unit: str) -> Cost:
        """Return the expected cost of *unit*."""
        if unit in self.recorded:
            return self.recorded[unit]
        if unit in self._shipped:
            return Cost(*self._shipped[unit])
        seconds, guess = GUESS
        sizes = [size for name, size in self._patterns.items() if PurePath(unit).match(name)]
        return Cost(seconds, (sizes or [guess])[0], measured=False)

    def add(self, costs: Mapping[str, Cost]) -> None:
        """Add *costs* to this machine's record."""
        self.recorded = {**self.recorded, **costs}
        self._store.put("costs", self._key, self.recorded)


def build_seconds(project: Project, fork: str, jobs: int) -> float:
    """Return the expected seconds of building *fork* with *jobs* units at once."""
    settings = toolchain.spec(project).forks[fork]
    overhead = OVERHEAD if settings.longest else 0
    return overhead + max(settings.longest, settings.seconds / jobs)
