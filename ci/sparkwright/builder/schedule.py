"""
The schedule of a build: the cost of every unit, and the order in which ninja compiles them.

The cost of a unit is its seconds of CPU and the peak resident megabytes of one process of its
compiler (``ru_maxrss`` of wait4(2); nvcc runs cicc and ptxas one after the other). It is taken from
this machine's record, else as the stack ships it, else guessed.

Of the edges that are ready, ninja starts the one on the longest path first, and among equals the
one that stands first in the file (1.12 and later). So compile edges are written longest first, and
large ones in a pool of their own. CMake's ``build.ninja`` is left as it is: its edges are written
to a second file in another order, every command unchanged, so that both share one log.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path, PurePath
from typing import NamedTuple

import msgspec

from sparkwright.builder import toolchain
from sparkwright.core import strict_yaml
from sparkwright.core.files import content_key
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext


class Cost(NamedTuple):
    """
    The cost of a unit.

    Attributes:
        seconds: Of CPU: the time that it takes on an idle core.
        megabytes: Peak resident memory of the largest process of its compiler.
    """

    seconds: float
    megabytes: int


#: The cost of a unit that was never measured. Typical CUDA units of vLLM 0.33.0 take 6-16 s and
#: 450-760 MB on one x86-64 core; a guess should rather be too large.
GUESS = Cost(20, 1200)
#: The file beside ``build.ninja`` that ninja is given.
SCHEDULE = "sparkwright.ninja"
#: Suffixes of translation units.
SUFFIXES = frozenset((".c", ".cc", ".cpp", ".cu", ".cxx"))
#: Units above so many megabytes get the pool ``heavy``.
HEAVY = 2000
#: The share of the cores that large units at once must leave in use.
BUSY = 0.9

#: A line with its continuations; a dollar escapes what follows it.
_LINE = r"(?:[^$\n]++|\$[\s\S])*+\n"
_STATEMENT = re.compile(rf"#.*\n|{_LINE}(?:[ \t]{_LINE})*")
_PATH = r"((?:\$.|[^$ :|\n]++)++)"
_BUILD = re.compile(rf"build +{_PATH}(?:\$.|[^$:\n]++)*+: *\S+ +{_PATH}")
_SUBNINJA = re.compile(r"subninja +(.+)\n")


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
        shipped: The costs that come with the stack.
    """

    def __init__(self, store: Store, key: str, shipped: Mapping[str, Cost]) -> None:
        self._store, self._key, self._shipped = store, key, shipped
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
        parts = {
            "arch": context.project.spec.arch,
            "compilers": toolchain.code_generators(context),
            "host": platform.machine(),
            "target": context.machine,
        }
        path = context.project.build_folder / f"costs{context.project.suffix}.yaml"
        shipped = strict_yaml.load(path, ShippedFile).forks.get(fork) if path.is_file() else None
        key = f"{fork}-{content_key('costs', parts)[:16]}"
        units = shipped.units if shipped else {}
        return cls(context.store, key, {unit: Cost(*cost) for unit, cost in units.items()})

    def expected(self, unit: str) -> Cost:
        """Return the cost of *unit* on this machine, else as the stack ships it, else a guess."""
        return self.recorded.get(unit) or self._shipped.get(unit) or GUESS

    @property
    def total(self) -> float:
        """The seconds of CPU of all units that were ever measured."""
        return sum(self.expected(unit).seconds for unit in {**self._shipped, **self.recorded})

    def add(self, costs: Mapping[str, Cost]) -> None:
        """Add *costs* to this machine's record."""
        self.recorded |= costs
        self._store.put("costs", self._key, self.recorded)


# The order in build.ninja.


class CompileOrder(msgspec.Struct, frozen=True):
    """How many edges run at once (``-j``), and how many of them in the pool ``heavy``."""

    jobs: int
    heavy: int


def order(units: Sequence[Cost], cores: int, megabytes: int) -> CompileOrder:
    """
    Return an order of *units* that never holds more than *megabytes*, except for one unit alone.

    It is safe for the largest units that can meet, whatever the real times are: as many large units
    at once as leave nearly all cores busy.
    """
    sizes = sorted((unit.megabytes for unit in units), reverse=True)
    heavy = [size for size in sizes if size > HEAVY]
    light = sizes[len(heavy) :]
    jobs, left = cores, megabytes
    for depth in range(max(1, min(len(heavy), cores)), 0, -1):
        large = heavy[:depth]
        left, beside = megabytes - sum(large), light[: cores - len(large)]
        fitting = sum(total <= left for total in accumulate(beside))
        jobs = cores if fitting == len(beside) else len(large) + fitting
        if left >= 0 and jobs >= BUSY * cores:
            return CompileOrder(jobs, depth)
    return CompileOrder(max(jobs, 1) if left >= 0 else 1, 1)


def write_schedule(
    build: Path, inside: Path, cost: Callable[[str], Cost], cores: int, megabytes: int
) -> CompileOrder:
    """
    Write the schedule of the build folder, and return the order of its units.

    Args:
        inside: The name that the folder has for ninja.
        cost: Returns the expected cost of a unit, by its path as the compiler sees it.
    """
    text, costs = _schedule(build / "build.ninja", build, inside, cost)
    chosen = order(costs, cores, megabytes)
    (build / SCHEDULE).write_text(f"pool heavy\n  depth = {chosen.heavy}\n{text}", "utf-8")
    return chosen


def _schedule(
    path: Path, build: Path, inside: Path, cost: Callable[[str], Cost]
) -> tuple[str, list[Cost]]:
    """Return the text of a ninja file with its units longest first, and the costs of its units."""
    statements = _STATEMENT.findall(f"{path.read_text('utf-8')}\n")
    seconds, costs = dict[int, float](), list[Cost]()
    for slot, statement in enumerate(statements):
        if unit := _unit(statement):
            costs.append(cost(unit))
            seconds[slot] = costs[-1].seconds
            # Of two values for a variable, ninja takes the last.
            statements[slot] += "  pool = heavy\n" if costs[-1].megabytes > HEAVY else ""
        elif match := _SUBNINJA.fullmatch(statement):
            nested = build / (inside / _unescaped(match[1])).relative_to(inside)
            text, nested_costs = _schedule(nested, build, inside, cost)
            target = nested.with_suffix(f".{SCHEDULE}")
            target.write_text(text, "utf-8")
            statements[slot] = f"subninja {inside / target.relative_to(build)}\n"
            seconds[slot] = max((unit.seconds for unit in nested_costs), default=0.0)
            costs += nested_costs
    # Every other statement keeps its place; rules stand before the edges that use them.
    result = list(statements)
    for slot, source in zip(seconds, sorted(seconds, key=lambda slot: -seconds[slot]), strict=True):
        result[slot] = statements[source]
    return "".join(result), costs


def _unit(statement: str) -> str:
    """Return the source that *statement* compiles; empty if it is no compile edge."""
    match = _BUILD.match(re.sub(r"\$\n[ \t]*", "", statement))
    if match is None or PurePath(match[1]).suffix != ".o":
        return ""
    unit = _unescaped(match[2])
    return unit if PurePath(unit).suffix in SUFFIXES else ""


def _unescaped(text: str) -> str:
    return re.sub(r"\$(.)", r"\1", text)
