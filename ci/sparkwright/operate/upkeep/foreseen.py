"""
Which units another upstream release would compile anew, told from two trees before anything is built.

A unit counts when its file, or a file that it includes by a quoted name, directly or through others, is not the same in both trees. What
macros include, and what the compiler's flags change, is not seen: the list is the least that is compiled, and `plan` knows the flags.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from sparkwright.core.git import Objects

#: Files that a compiler is started on, and files that those include.
UNITS, HEADERS = (".cu", ".cpp", ".cc", ".c", ".cxx"), (".h", ".hpp", ".cuh", ".inc", ".inl")
#: Files that decide flags: a change may compile everything anew.
DECIDING = re.compile(r"(^|/)(CMakeLists\.txt|[^/]+\.cmake|setup\.py|pyproject\.toml)$")
#: Bytes of the largest source that is read for its includes.
LARGEST = 8 * 1024 * 1024

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]{1,300})"', re.MULTILINE)


class Foreseen(msgspec.Struct, frozen=True):
    """
    What a step from one tree to another compiles anew, at least.

    Attributes:
        units: Files that would be compiled anew, new ones among them; *of*: all units of the later tree.
        gone: Units that the later tree lacks.
        headers: Included files that differ, with how many units each reaches; the farthest reaching first.
        deciding: Files that differ and decide flags.
    """

    units: tuple[str, ...]
    of: int
    gone: tuple[str, ...]
    headers: tuple[tuple[str, int], ...]
    deciding: tuple[str, ...]


def foresee(objects: Objects, before: str, after: str) -> Foreseen:
    """Return what a step from the tree *before* to the tree *after* compiles anew; both are whole in *objects*."""
    changed = objects.changes(before, after).keys()
    there = objects.paths(after)
    sources = {path: blob for path, (mode, blob) in there.items() if path.endswith((*UNITS, *HEADERS)) and mode.startswith("100")}
    reached = _reached(dict(objects.contents(sources)))
    units = [path for path in sources if path.endswith(UNITS)]
    anew = sorted(unit for unit in units if changed & {unit, *reached[unit]})
    reach: dict[str, int] = defaultdict(int)
    for unit in units:
        for header in reached[unit] & changed:
            reach[header] += 1
    gone = sorted(path for path in changed if path.endswith(UNITS) and path not in there)
    headers = tuple(sorted(reach.items(), key=lambda one: (-one[1], one[0])))
    return Foreseen(tuple(anew), len(units), tuple(gone), headers, tuple(sorted(path for path in changed if DECIDING.search(path))))


def _reached(texts: Mapping[str, bytes]) -> dict[str, frozenset[str]]:
    """Return, for each file, all that it includes, directly or not, as far as it lies in the tree."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for path in texts:
        by_name[posixpath.basename(path)].append(path)
    direct = {path: _direct(path, text, texts, by_name) for path, text in texts.items()}
    return {path: _all(path, direct) for path in texts}


def _direct(path: str, text: bytes, texts: Mapping[str, bytes], by_name: Mapping[str, list[str]]) -> frozenset[str]:
    found: set[str] = set()
    for match in _INCLUDE.finditer(text[:LARGEST]):
        name = match[1].decode("utf-8", "replace")
        beside = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
        if beside in texts:
            found.add(beside)
        else:
            # Which of the include folders holds it, the flags would say; all that fit count, so that none is missed.
            tail = posixpath.normpath(name).lstrip("./")
            found.update(one for one in by_name.get(posixpath.basename(tail), ()) if one == tail or one.endswith(f"/{tail}"))
    return frozenset(found)


def _all(path: str, direct: Mapping[str, Iterable[str]]) -> frozenset[str]:
    seen: set[str] = set()
    waiting = list(direct[path])
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            waiting += direct[one]
    return frozenset(seen - {path})


def lines(found: Foreseen) -> list[str]:
    """Return what was foreseen, for people, a sentence a line."""
    said = [f"at least {len(found.units)} of {found.of} units are compiled anew, or come from the compiler cache"]
    if found.headers:
        said.append("farthest reach: " + ", ".join(f"{path} ({count} units)" for path, count in found.headers[:5]))
    if found.gone:
        said.append(f"{len(found.gone)} units are gone: {', '.join(found.gone[:5])}{', …' if len(found.gone) > 5 else ''}")
    if found.deciding:
        named = ", ".join([*found.deciding[:6], *(["…"] if len(found.deciding) > 6 else [])])
        said.append(f"{len(found.deciding)} files that decide flags differ, so it may be all of them: {named}")
    return said
