"""
Guards: texts that the tree must not hold when it is compiled, as reviewed data.

Some code compiles for the requested arch and fails when it runs there: it tests for one arch by
number and traps on every other. Nothing in a configure shows that, so a guard looks for the text in
the final source tree, after picks, patches and rules. A guard that could never find anything would
look like one that is content; therefore it must find its texts in the source as it came, and use
every exemption.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from os.path import commonpath
from typing import Annotated

import msgspec

from sparkwright.builder.errors import BuildError
from sparkwright.core.errors import FileError
from sparkwright.core.git_store import Objects

#: Something that a person wrote; on one line, since lines are searched and shown.
Line = Annotated[str, msgspec.Meta(pattern=r"^[^\n]*\S[^\n]*$")]
Lines = Annotated[tuple[Line, ...], msgspec.Meta(min_length=1)]


class Guard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A text that must not occur.

    Attributes:
        files: Paths inside the source tree; ``*`` and ``?`` match as in a shell, ``*`` also across
            folders. patterns: Plain texts, none of which a line of these files may hold. reason:
            What goes wrong at run time where one does. todo: What to do about it. drop_when: What
            has to happen upstream for the guard to go. exempt: Files that may hold one, each with
            the reason.
    """

    name: str
    fork: str
    files: Lines
    patterns: Lines
    reason: Line
    todo: Line
    drop_when: Line
    exempt: dict[str, Line] = {}

    def covers(self, path: str) -> bool:
        return any(fnmatchcase(path, glob) for glob in self.files)

    def finds(self, text: bytes) -> list[int]:
        """Return the numbers, from 1, of the lines of *text* that hold a pattern."""
        patterns = [pattern.encode() for pattern in self.patterns]
        if not any(pattern in text for pattern in patterns):
            return []
        return [
            number
            for number, line in enumerate(text.split(b"\n"), start=1)
            if any(pattern in line for pattern in patterns)
        ]


def check(objects: Objects, source: str, tree: str, guards: Sequence[Guard]) -> None:
    """
    Raise unless *tree* is free of what *guards* look for.

    Args:
        source: The tree before picks, patches and rules, in which there must be something to find.

    Raises:
        arch-trap: It is not; the error lists every place, and the reason of each guard.
        rule-mismatch: A glob of a guard matches no file, a pattern nothing in *source*, or a file
            is exempt for nothing.
    """
    if not guards:
        return
    folder = _folder(guards)
    before, after = dict(objects.files(source, folder)), dict(objects.files(tree, folder))
    if idle := [line for guard in guards for line in _idle(guard, before, after)]:
        todo = (
            "See where upstream moved the code, and correct the guard; it may go when what "
            "its drop_when says has happened."
        )
        raise FileError(
            "rule-mismatch", "A guard of archs.yaml guards nothing.", details=idle, todo=todo
        )
    caught = [(guard, places) for guard in guards if (places := _places(guard, after))]
    if caught:
        fork, number = guards[0].fork, sum(len(places) for _, places in caught)
        raise BuildError(
            "arch-trap",
            f"{number} {'line' if number == 1 else 'lines'} of {fork} would fail at run time on "
            f"the arch that the stack is for.",
            details=[
                line
                for guard, places in caught
                for line in (f"{guard.name}: {guard.reason}", *(f"  {place}" for place in places))
            ],
            todo=" ".join(guard.todo for guard, _ in caught),
        )


def _folder(guards: Sequence[Guard]) -> str:
    """
    Return the deepest folder that holds all that the globs can match: its files are read by one
    call of git.
    """
    heads = [
        re.split(r"[*?[]", glob, maxsplit=1)[0].rpartition("/")[0]
        for guard in guards
        for glob in guard.files
    ]
    return commonpath(heads) if all(heads) else ""


def _idle(guard: Guard, before: Mapping[str, bytes], after: Mapping[str, bytes]) -> Iterator[str]:
    """Yield what in *guard* is without effect, a line each."""
    covered = {path: text for path, text in before.items() if guard.covers(path)}
    for glob in guard.files:
        if not all(any(fnmatchcase(path, glob) for path in texts) for texts in (before, after)):
            yield f"{guard.name}: no file matches {glob}"
    for pattern in guard.patterns:
        if not any(
            pattern.encode() in text for path, text in covered.items() if path not in guard.exempt
        ):
            yield f"{guard.name}: no line holds {pattern!r}"
    for path in guard.exempt:
        if not guard.finds(covered.get(path, b"")):
            yield f"{guard.name}: {path} needs no exemption"


def _places(guard: Guard, texts: Mapping[str, bytes]) -> list[str]:
    looked_at = sorted(path for path in texts if guard.covers(path) and path not in guard.exempt)
    return [f"{path}:{number}" for path in looked_at for number in guard.finds(texts[path])]
