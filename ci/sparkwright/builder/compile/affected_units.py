"""
Which units lie nearest to our patches: those whose text we change, and those that include a header whose text we change.

They are compiled first, since what we changed is what is most likely to be refused. Nothing is preprocessed, so a conditional include
counts: a unit too many costs no time, only its place in the queue.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from sparkwright.builder import source_tree
from sparkwright.builder.preprocessor import SUFFIXES
from sparkwright.builder.source_tree import SourceTree
from sparkwright.forks.context import Session

#: Files that a compiler is called for.
UNITS = frozenset((".c", ".cc", ".cpp", ".cu", ".cxx"))

_INCLUDE = re.compile(rb"^[ \t]*#[ \t]*include[ \t]*[<\"]([^>\"\n]+)[>\"]", re.MULTILINE)


def units(session: Session, source: SourceTree) -> frozenset[str]:
    """Return the units of *source*, relative to its tree, that the series and the rules change, or change a header of."""
    needs = [source_tree.make(session, need) for need in session.project.fork(source.fork).needs]
    changed = {path for one in (source, *needs) for path in _changed(session, one)}
    if not changed:
        return frozenset()
    texts = {path: text for path, text in session.objects.files(source.tree) if PurePosixPath(path).suffix in SUFFIXES}
    for need in needs:
        # A header of ours may reach the changed one through others of that fork.
        if _changed(session, need):
            texts |= {path: text for path, text in session.objects.files(need.tree) if PurePosixPath(path).suffix in SUFFIXES}
    mine = session.objects.paths(source.tree)
    return frozenset(path for path in reached(texts, changed) if path in mine and PurePosixPath(path).suffix in UNITS)


def _changed(session: Session, source: SourceTree) -> list[str]:
    changes = session.objects.changes(source.source.tree, source.tree)
    return [change.path for change in changes if PurePosixPath(change.path).suffix in SUFFIXES]


def reached(texts: Mapping[str, bytes], changed: Iterable[str]) -> set[str]:
    """
    Return *changed* and every file of *texts* that includes one of them, directly or through others.

    A name behind ``#include`` counts as the file beside the including one, else as every file whose path ends with it, for the folders
    that the compiler searches are not known.
    """
    by_name: dict[str, list[str]] = defaultdict(list)
    for path in {*texts, *changed}:
        by_name[posixpath.basename(path)].append(path)
    including: dict[str, set[str]] = defaultdict(set)
    for path, text in texts.items():
        for name in _INCLUDE.findall(text):
            for included in _meant(path, name.decode("utf-8", "replace"), by_name):
                including[included].add(path)
    found, waiting = set[str](), list(changed)
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting.extend(including[path])
    return found


def _meant(path: str, name: str, by_name: Mapping[str, list[str]]) -> list[str]:
    candidates = by_name.get(posixpath.basename(name), [])
    beside = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
    if beside in candidates:
        return [beside]
    tail = posixpath.normpath(name).removeprefix("../")
    while tail.startswith("../"):
        tail = tail.removeprefix("../")
    return [candidate for candidate in candidates if f"/{candidate}".endswith(f"/{tail}")]
