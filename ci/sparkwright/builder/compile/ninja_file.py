"""
The order in which ninja compiles: compile edges longest first, large ones in a pool of their own.

Of the edges that are ready, ninja starts the one on the longest path first, and among equals the
one that stands first in the file (1.12 and later). CMake's ``build.ninja`` is left as it is: its
edges are
written to a second file in another order, every command unchanged, so that both share one log.
"""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath

import msgspec

from sparkwright.builder.compile.costs import Expected

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


class Order(msgspec.Struct, frozen=True):
    """How many edges run at once (``-j``), and how many of them in the pool ``heavy``."""

    jobs: int
    heavy: int


def order(units: Sequence[Expected], cores: int, megabytes: int) -> Order:
    """
    Return the fastest order of *units* that never holds more than *megabytes*.

    It is safe for the largest units that can meet, so that the peak holds whatever the real times
    are.
    """
    heavy, light = (
        sorted(
            (unit.megabytes for unit in units if (unit.megabytes > HEAVY) == large), reverse=True
        )
        for large in (True, False)
    )
    longest = sorted(units, key=lambda unit: -unit.seconds)
    best, shortest = Order(1, 1), float("inf")
    for depth in range(1 if heavy else 0, min(len(heavy), cores) + 1):
        left, jobs = megabytes - sum(heavy[:depth]), depth
        beside = [*light, 0][: cores - depth]
        while jobs < cores and (jobs - depth >= len(beside) or beside[jobs - depth] <= left):
            left -= beside[jobs - depth] if jobs - depth < len(beside) else 0
            jobs += 1
        if left < 0 and depth > 1:
            break
        candidate = Order(max(jobs, 1), max(depth, 1))
        if (seconds := makespan(longest, candidate)) < shortest:
            best, shortest = candidate, seconds
    return best


def makespan(units: Sequence[Expected], chosen: Order) -> float:
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
    edges = []
    for path in _files(build, inside):
        variables: dict[str, str] = {}
        for statement in statements(path.read_text("utf-8")):
            if edge := compile_edge(statement, variables):
                edges.append(edge)
    return edges


def write_schedule(build: Path, inside: Path, cost: Callable[[str], Expected], depth: int) -> None:
    """
    Write the schedule of the build folder.

    Args:
        inside: The name that the folder has for ninja.
        cost: Returns the expected cost of a unit, by `CompileEdge.unit`.
        depth: Of the pool ``heavy``.
    """
    first, *others = _files(build, inside)
    longest: dict[str, float] = {}
    for path in others:
        text, longest[str(path)] = _sorted(path.read_text("utf-8"), cost)
        _replace(path.with_suffix(f".{SCHEDULE}"), text)
    text, _ = _sorted(first.read_text("utf-8"), cost)
    parts = statements(text)
    slots = [number for number, part in enumerate(parts) if _SUBNINJA.fullmatch(part)]
    paths = sorted(
        (_outside(parts[slot], build, inside) for slot in slots),
        key=lambda path: -longest[str(path)],
    )
    for slot, path in zip(slots, paths, strict=True):
        parts[slot] = f"subninja {inside / path.relative_to(build).with_suffix(f'.{SCHEDULE}')}\n"
    _replace(build / SCHEDULE, f"pool heavy\n  depth = {depth}\n{''.join(parts)}")


def _files(build: Path, inside: Path) -> list[Path]:
    """Return ``build.ninja`` and the files that it names as ``subninja``."""
    first = build / "build.ninja"
    parts = statements(first.read_text("utf-8"))
    return [first, *(_outside(part, build, inside) for part in parts if _SUBNINJA.fullmatch(part))]


def _outside(statement: str, build: Path, inside: Path) -> Path:
    match = _SUBNINJA.fullmatch(statement)
    assert match
    return build / os.path.relpath(inside / _expanded(match[1], {}), inside)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)


def _sorted(text: str, cost: Callable[[str], Expected]) -> tuple[str, float]:
    """Return *text* with its compile edges in order, and the seconds of the longest unit."""
    parts, variables = statements(text), dict[str, str]()
    units = {}
    for number, part in enumerate(parts):
        if edge := compile_edge(part, variables):
            units[number] = cost(edge.unit)
    ordered = sorted(units, key=lambda number: -units[number].seconds)
    # Every other statement keeps its place; rules and variables stand before the edges that use
    # them.
    result = list(parts)
    for slot, number in zip(units, ordered, strict=True):
        large = units[number].megabytes > HEAVY and not _POOL.search(parts[number])
        result[slot] = parts[number] + ("  pool = heavy\n" if large else "")
    return "".join(result), max((unit.seconds for unit in units.values()), default=0.0)


def statements(text: str) -> list[str]:
    """Return the statements of a ninja file with their lines; blank lines and comments are some."""
    return _STATEMENT.findall(text if text.endswith("\n") else f"{text}\n")


def compile_edge(statement: str, variables: dict[str, str]) -> CompileEdge | None:
    """
    Return the edge of *statement*, or None if it compiles no unit.

    Args:
        variables: Those of the file so far; a statement that sets one is added.
    """
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
