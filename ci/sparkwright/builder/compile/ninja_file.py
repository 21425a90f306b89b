"""
The order in which ninja compiles: compile edges longest first, large ones in a pool of their own.

Of the edges that are ready, ninja starts the one on the longest path first, and among equals the
one that stands first in the file (1.12 and later). CMake's ``build.ninja`` is left as it is: its
edges are written to a second file in another order, every command unchanged, so that both share one
log.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path, PurePath

import msgspec

from sparkwright.builder.compile.costs import Cost

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
_POOL = re.compile(r"^[ \t]+pool *=", re.MULTILINE)


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
    edges, files, costs = dict[int, float](), dict[int, float](), list[Cost]()
    for slot, statement in enumerate(statements):
        if unit := _unit(statement):
            costs.append(cost(unit))
            edges[slot] = costs[-1].seconds
            if costs[-1].megabytes > HEAVY and not _POOL.search(statement):
                statements[slot] += "  pool = heavy\n"
        elif match := _SUBNINJA.fullmatch(statement):
            nested = build / (inside / _unescaped(match[1])).relative_to(inside)
            text, nested_costs = _schedule(nested, build, inside, cost)
            target = nested.with_suffix(f".{SCHEDULE}")
            target.write_text(text, "utf-8")
            statements[slot] = f"subninja {inside / target.relative_to(build)}\n"
            files[slot] = max((unit.seconds for unit in nested_costs), default=0.0)
            costs += nested_costs
    # Every other statement keeps its place; rules stand before the edges that use them.
    result = list(statements)
    for seconds in (edges, files):
        ordered = sorted(seconds, key=lambda slot: -seconds[slot])
        for slot, source in zip(seconds, ordered, strict=True):
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
