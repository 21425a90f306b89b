"""
The order in which ninja compiles: compile edges longest first, large ones in a pool of their own.

Of the edges that are ready, ninja starts the one on the longest path first, and among equals the
one that stands first in the file (1.12 and later). CMake's ``build.ninja`` is left as it is: its
edges are written to a second file in another order, every command unchanged, so that both share one
log.
"""

from __future__ import annotations

import heapq
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath

import msgspec

from sparkwright.builder.compile.costs import ExpectedCost

#: The file beside ``build.ninja`` that ninja is given.
SCHEDULE = "sparkwright.ninja"
#: Suffixes of translation units.
SUFFIXES = frozenset((".c", ".cc", ".cpp", ".cu", ".cxx"))
#: Units above so many megabytes get the pool ``heavy``.
HEAVY = 2000

#: A line with its continuations; a dollar escapes what follows it.
_LINE = r"(?:[^$\n]++|\$[\s\S])*+\n"
_STATEMENT = re.compile(rf"#.*\n|{_LINE}(?:[ \t]{_LINE})*")
_PATH = r"((?:\$.|[^$ :|\n]++)++)"
_BUILD = re.compile(rf"build +{_PATH}(?:\$.|[^$:\n]++)*+: *\S+ +{_PATH}")
_ESCAPE = re.compile(r"\$(?:([ :$])|\{([\w.-]+)\}|([\w-]+))")
_VARIABLE = re.compile(r"([\w.-]+) *= *(.*)\n")
_SUBNINJA = re.compile(r"subninja +(.+)\n")
_POOL = re.compile(r"^[ \t]+pool *=", re.MULTILINE)


class CompileEdge(msgspec.Struct, frozen=True):
    """
    An edge that compiles a unit.

    Attributes:
        unit: The source, as the compiler sees it.
        output: The object, as ninja names it.
    """

    unit: str
    output: str


class CompileOrder(msgspec.Struct, frozen=True):
    """How many edges run at once (``-j``), and how many of them in the pool ``heavy``."""

    jobs: int
    heavy: int


def order(units: Sequence[ExpectedCost], cores: int, megabytes: int) -> CompileOrder:
    """
    Return the fastest order of *units* that never holds more than *megabytes*.

    It is safe for the largest units that can meet, so that the peak holds whatever the real times
    are.
    """
    sizes = sorted((unit.megabytes for unit in units), reverse=True)
    heavy = [size for size in sizes if size > HEAVY]
    light = sizes[len(heavy) :]
    orders = []
    for depth in range(1 if heavy else 0, min(len(heavy), cores) + 1):
        left, beside = megabytes - sum(heavy[:depth]), light[: cores - depth]
        if left < 0 and depth > 1:
            break
        fitting = sum(total <= left for total in itertools.accumulate(beside))
        jobs = cores if fitting == len(beside) and left >= 0 else depth + fitting
        orders.append(CompileOrder(max(jobs, 1), max(depth, 1)))
    longest = sorted(units, key=lambda unit: -unit.seconds)
    return min(orders, key=lambda candidate: makespan(longest, candidate))


def makespan(units: Sequence[ExpectedCost], chosen: CompileOrder) -> float:
    """Return the seconds that ninja takes for *units* that stand in this order."""
    waiting, running = list(units), list[tuple[float, bool]]()
    now, heavy = 0.0, 0
    while waiting or running:
        position = 0
        while position < len(waiting) and len(running) < chosen.jobs:
            large = waiting[position].megabytes > HEAVY
            if large and heavy == chosen.heavy:
                position += 1
                continue
            heapq.heappush(running, (now + waiting.pop(position).seconds, large))
            heavy += large
        now, large = heapq.heappop(running)
        heavy -= large
    return now


def compile_edges(build: Path, inside: Path) -> list[CompileEdge]:
    """
    Return the compile edges of the build folder, those of ``subninja`` files too.

    Args:
        inside: The name that the folder has for ninja.
    """
    first = _statements(build / "build.ninja")
    files = [first, *(_statements(path) for path in _subninja(first, build, inside).values())]
    return [edge for statements in files for _, edge in statements if edge]


def write_schedule(
    build: Path, inside: Path, cost: Callable[[str], ExpectedCost], depth: int
) -> None:
    """
    Write the schedule of the build folder.

    Args:
        inside: The name that the folder has for ninja.
        cost: Returns the expected cost of a unit, by `CompileEdge.unit`.
        depth: Of the pool ``heavy``.
    """
    first = _statements(build / "build.ninja")
    result, _ = _sorted(first, cost)
    slots = _subninja(first, build, inside)
    longest: dict[Path, float] = {}
    for path in slots.values():
        statements, longest[path] = _sorted(_statements(path), cost)
        _replace(path.with_suffix(f".{SCHEDULE}"), "".join(statements))
    ordered = sorted(slots.values(), key=lambda path: -longest[path])
    for slot, path in zip(slots, ordered, strict=True):
        name = inside / path.relative_to(build).with_suffix(f".{SCHEDULE}")
        result[slot] = f"subninja {name}\n"
    _replace(build / SCHEDULE, f"pool heavy\n  depth = {depth}\n{''.join(result)}")


def _subninja(
    statements: Sequence[tuple[str, CompileEdge | None]], build: Path, inside: Path
) -> dict[int, Path]:
    """Return the paths of the files that ``subninja`` statements name, by their position."""
    matches = ((slot, _SUBNINJA.fullmatch(text)) for slot, (text, _) in enumerate(statements))
    return {
        slot: build / os.path.relpath(inside / _expanded(match[1], {}), inside)
        for slot, match in matches
        if match
    }


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)


def _sorted(
    statements: Sequence[tuple[str, CompileEdge | None]], cost: Callable[[str], ExpectedCost]
) -> tuple[list[str], float]:
    """Return the statements with compile edges in order, and the seconds of the longest unit."""
    costs = {slot: cost(edge.unit) for slot, (_, edge) in enumerate(statements) if edge}
    ordered = sorted(costs, key=lambda slot: -costs[slot].seconds)
    # Every other statement keeps its place; rules and variables stand before the edges that use
    # them.
    result = [text for text, _ in statements]
    for slot, source in zip(costs, ordered, strict=True):
        text = statements[source][0]
        large = costs[source].megabytes > HEAVY and not _POOL.search(text)
        result[slot] = f"{text}  pool = heavy\n" if large else text
    return result, max((unit.seconds for unit in costs.values()), default=0.0)


def _statements(path: Path) -> list[tuple[str, CompileEdge | None]]:
    """
    Return the statements of a ninja file with their lines, blank lines and comments among them, and
    the edge of each that compiles a unit.
    """
    text, variables = path.read_text("utf-8"), dict[str, str]()
    parts = _STATEMENT.findall(text if text.endswith("\n") else f"{text}\n")
    return [(part, _compile_edge(part, variables)) for part in parts]


def _compile_edge(statement: str, variables: dict[str, str]) -> CompileEdge | None:
    """Return the edge of *statement*, if it compiles a unit; add a variable that it sets."""
    head = re.sub(r"\$\n[ \t]*", "", statement)
    if match := _VARIABLE.fullmatch(head):
        variables[match[1]] = _expanded(match[2], variables)
    if (match := _BUILD.match(head)) is None:
        return None
    output, unit = (_expanded(path, variables) for path in match.groups())
    is_compiled = PurePath(unit).suffix in SUFFIXES and PurePath(output).suffix == ".o"
    return CompileEdge(unit, output) if is_compiled else None


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    return _ESCAPE.sub(lambda match: match[1] or variables.get(match[2] or match[3], ""), text)
