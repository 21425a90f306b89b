"""
Diffs as git writes them: rendered in one fixed way, taken apart into files and hunks, never interpreted further; git applies them.

The bytes of a ``.diff`` address change without notice (abbreviated ids, the reader's settings), so a diff is always rendered here.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterator

import msgspec

from sparkwright.cherry_picks.errors import PatchError
from sparkwright.core.git import LINK, SUBMODULE
from sparkwright.core.git_store import Objects

#: Every flag that a configuration or a newer git could set otherwise (git-diff(1)).
_FLAGS = (
    "-r", "-p", "--binary", "--full-index", "--no-renames", "--no-color", "--no-ext-diff", "--no-textconv", "--no-relative",
    "--src-prefix=a/", "--dst-prefix=b/", "--diff-algorithm=myers", "--no-indent-heuristic", "--inter-hunk-context=0",
    "--ignore-submodules=none", "--submodule=short",
)  # fmt: skip

_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@(.*)")
#: The last word is there where the mode stays.
_INDEX = re.compile(rb"index ([0-9a-f]{7,40})\.\.([0-9a-f]{7,40})(?: (\d{6}))?$")
#: The id of nothing as a file's content, as far as an abbreviated index line has it; of no file at all it is zeros.
_EMPTY = b"e69de29"
_ESCAPED = re.compile(rb'\\([0-7]{3}|["\\abfnrtv])')
_LETTERS = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}


class Hunk(msgspec.Struct, frozen=True):
    """
    A hunk.

    Attributes:
        start: The line, from 1, at which it says its lines stand before the change; 0 where there are none.
        new_start: The line at which they stand afterwards.
        heading: What git shows of the surrounding function.
        before, after: The lines that it replaces and their replacement, context included, with their line ends.
        last: No context follows the change, so git takes the hunk for the end of the file.
    """

    start: int
    new_start: int
    heading: str
    before: tuple[bytes, ...]
    after: tuple[bytes, ...]
    last: bool = False

    @property
    def label(self) -> str:
        return f"@@ -{self.start},{len(self.before)} +{self.new_start},{len(self.after)} @@"


class Section(msgspec.Struct, frozen=True):
    """
    What a diff does to one file.

    Attributes:
        old, new: Its path before and after; empty where there is no file.
        data: The section's own bytes.
        binary: The content is given as a binary delta instead of hunks.
        blob: Id of the content that it was made for, as far as the diff tells it; empty for a new file.
    """

    old: str
    new: str
    data: bytes
    hunks: tuple[Hunk, ...]
    binary: bool = False
    blob: str = ""

    @property
    def path(self) -> str:
        return self.new or self.old


def render(objects: Objects, before: str, after: str, *, context: int = 3) -> bytes:
    """Return the diff between two trees or commits in the one fixed form; what it reads must be in *objects*."""
    return objects.run(["diff-tree", *_FLAGS, f"-U{context}", before, after, "--"])[1]


def blobs(objects: Objects, before: str, after: str) -> set[str]:
    """Return the ids of the file contents that a diff between two trees or commits reads."""
    out = objects.run(["diff-tree", "-r", "-z", "--no-renames", "--no-abbrev", before, after, "--"])[1].decode()
    rows = (row.split() for row in out.split("\0") if row.startswith(":"))
    return {one for row in rows for mode, one in ((row[0][1:], row[2]), (row[1], row[3])) if mode != SUBMODULE and set(one) != {"0"}}


def patch_id(objects: Objects, diff: bytes) -> str:
    """Return git's stable patch-id of *diff*, the same for one change at different lines; empty for an empty diff."""
    return objects.run(["patch-id", "--stable"], stdin=diff)[1].decode().partition(" ")[0].strip()


def without(diff: bytes, paths: Collection[str]) -> bytes:
    """Return *diff* less the files *paths*."""
    return b"".join(section.data for section in sections(diff) if section.path not in paths) if paths else diff


def bare(diff: bytes) -> bytes:
    """Return *diff* without its context: only good for a patch-id, which ignores line numbers."""
    made: list[bytes] = []
    run: list[bytes] = []
    old = new = 0
    for line in [*lines_of(diff), b""]:
        mark = line[:1] if old or new else b""
        if mark in (b"-", b"+"):
            run.append(line)
        elif run and mark != b"\\":
            removed = sum(one.startswith(b"-") for one in run)
            made += [b"@@ -1,%d +1,%d @@\n" % (removed, len(run) - removed), *run]
            run = []
        if match := None if mark else _HUNK.match(line):
            old, new = (int(count) if count is not None else 1 for count in (match[2], match[4]))
        elif mark:
            old, new = old - (mark not in (b"+", b"\\")), new - (mark not in (b"-", b"\\"))
        elif not line.startswith(b"\\"):
            made.append(line)
    return b"".join(made)


def sections(diff: bytes) -> tuple[Section, ...]:
    """
    Return what *diff* does, file by file.

    Raises:
        patch-invalid: A header or a hunk is cut off, a path leaves the tree, or a link or submodule would be made.
    """
    starts = [match.start() for match in re.finditer(rb"^diff --git ", diff, re.MULTILINE)]
    return tuple(_section(diff[start:end]) for start, end in itertools.pairwise([*starts, len(diff)]))


def _section(data: bytes) -> Section:
    lines = data.split(b"\n")
    body = next(
        (number for number, line in enumerate(lines) if line.startswith((b"@@ ", b"GIT binary patch", b"Binary files "))), len(lines)
    )
    head = {key: line.removeprefix(key) for line in lines[1:body] for key in _KEYS if line.startswith(key)}
    index = next((match for line in lines[1:body] if (match := _INDEX.match(line.rstrip(b"\r")))), None)
    modes = {head.get(b"new mode ", b"").strip(), head.get(b"new file mode ", b"").strip(), index[3] if index else b""}
    if links := modes & {LINK.encode(), SUBMODULE.encode()}:
        what = "link" if LINK.encode() in links else "submodule"
        raise PatchError("patch-invalid", f"A patch makes a {what}, or changes one: {lines[0].decode('utf-8', 'replace')}")
    old, new = _paths(lines[0], head)
    for path in (old, new):
        _check(path)
    binary = body < len(lines) and not lines[body].startswith(b"@@ ")
    if body == len(lines) and not _complete(head, index):
        raise PatchError("patch-invalid", f"The header of {new or old} is cut off.")
    blob = index[1].decode() if index and index[1].strip(b"0") else ""
    return Section(old, new, data, () if binary else tuple(_hunks(lines[body:], new or old)), binary, blob)


def _check(path: str) -> None:
    if path.startswith("/") or {"..", ".git", "."} & set(path.lower().split("/")):
        raise PatchError("patch-invalid", f"A patch names a path outside the tree: {path!r}")
    if any((letter < " " and letter != "\t") or letter == "\x7f" or "\ud800" <= letter <= "\udfff" for letter in path):
        raise PatchError("patch-invalid", f"A patch names a path that is not plain UTF-8 text: {path!r}")


def _complete(head: dict[bytes, bytes], index: re.Match[bytes] | None) -> bool:
    """May the change be one without a body: of the mode, of the name, or of an empty file that comes or goes?"""
    if b"--- " in head or b"+++ " in head:
        return False
    if index:
        return all(one.startswith(_EMPTY) or not one.strip(b"0") for one in (index[1], index[2]))
    return b"new mode " in head or b"rename to " in head or b"copy to " in head


_KEYS = (
    b"--- ",
    b"+++ ",
    b"rename from ",
    b"rename to ",
    b"copy from ",
    b"copy to ",
    b"new file mode ",
    b"deleted file mode ",
    b"new mode ",
)


def _paths(first: bytes, head: dict[bytes, bytes]) -> tuple[str, str]:
    """Return both paths; where only the first line has them they are one and the same (git-diff(1), "Generating patch text")."""
    names = first.removeprefix(b"diff --git ")
    old = new = _unquoted(names[: len(names) // 2])[2:]
    if b"--- " in head and b"+++ " in head:
        old, new = _named(head[b"--- "], "a/"), _named(head[b"+++ "], "b/")
    for verb in (b"rename", b"copy"):
        if verb + b" from " in head:
            old, new = _unquoted(head[verb + b" from "]), _unquoted(head.get(verb + b" to ", b""))
    if not old and not new:
        raise PatchError("patch-invalid", f"A patch has a header without a path: {first.decode('utf-8', 'replace')}")
    return "" if b"new file mode " in head else old, "" if b"deleted file mode " in head else new


def _named(text: bytes, side: str) -> str:
    path = _unquoted(text.rstrip(b"\t\r"))
    return "" if path == "/dev/null" else path.removeprefix(side)


def _unquoted(text: bytes) -> str:
    if text.startswith(b'"') and text.endswith(b'"'):
        text = _ESCAPED.sub(
            lambda match: _LETTERS.get(match[1]) or (bytes([int(match[1], 8) & 255]) if len(match[1]) == 3 else match[1]), text[1:-1]
        )
    return text.decode("utf-8", "surrogateescape")


def _hunks(lines: list[bytes], path: str) -> Iterator[Hunk]:
    at = 0
    while at < len(lines) and (match := _HUNK.match(lines[at])):
        start, count, new_start, new_count = (int(part) if part is not None else 1 for part in match.groups()[:4])
        before: list[bytes] = []
        after: list[bytes] = []
        at += 1
        while at < len(lines) and (len(before) < count or len(after) < new_count or lines[at].startswith(b"\\")):
            mark, text = lines[at][:1] or b" ", lines[at][1:] + b"\n"
            if mark == b"\\":
                for side in (before, after) if lines[at - 1][:1] == b" " else (before,) if lines[at - 1][:1] == b"-" else (after,):
                    side[-1:] = [side[-1].removesuffix(b"\n")] if side else []
            elif mark in b" -+" and at < len(lines) - 1:
                before.extend([text] if mark in b" -" else [])
                after.extend([text] if mark in b" +" else [])
            else:
                break
            at += 1
        # The last of the lines is what follows the last line end: a line of a hunk that stands there was cut.
        if (len(before), len(after)) != (count, new_count) or any(not line.endswith(b"\n") for line in before[:-1] + after[:-1]):
            raise PatchError(
                "patch-invalid", f"A hunk of {path} is cut off.", details=[f"at its line {start}: {count} and {new_count} lines announced"]
            )
        end = lines[at - 2] if lines[at - 1].startswith(b"\\") else lines[at - 1]
        last = end.startswith((b"-", b"+"))
        yield Hunk(start, new_start, match[5].decode("utf-8", "replace").strip(), tuple(before), tuple(after), last)
    # git would take no notice of it. What follows a mail's patch is its signature.
    if at < len(lines) and lines[at].startswith((b"@", b"+", b"-", b" ")) and lines[at].rstrip() != b"--":
        raise PatchError(
            "patch-invalid", f"A hunk of {path} has more lines than it announces.", details=[lines[at].decode("utf-8", "replace")]
        )


def lines_of(text: bytes) -> list[bytes]:
    """Return the lines of *text* with their ends; only a line feed ends one, as git has it."""
    return re.findall(rb"[^\n]*\n|[^\n]+", text)


def standing(objects: Objects, tree: str, parts: Collection[Section]) -> tuple[int, int]:
    """Return how many of the lines that a diff adds stand in the same files of *tree*, and how many it adds; blank ones do not count."""
    there = total = 0
    for part in parts:
        added = Counter(line for hunk in part.hunks for line in (Counter(hunk.after) - Counter(hunk.before)).elements() if line.strip())
        have = Counter(lines_of(objects.blob(tree, part.new) or b"")) if added else Counter[bytes]()
        there += (added & have).total()
        total += added.total()
    return there, total


def places(text: bytes, hunk: Hunk, *, done: bool = False) -> list[int]:
    """
    Return every line number, from 1, at which git could apply *hunk* to *text* (apply.c: its rules for both ends of a file).

    Args:
        done: Look for the lines that it would write, instead.
    """
    have, lines = lines_of(text), hunk.after if done else hunk.before
    found = (number for number in range(len(have) - len(lines) + 1) if lines and have[number] == lines[0])
    fits = [number + 1 for number in found if tuple(have[number : number + len(lines)]) == lines]
    if (hunk.new_start if done else hunk.start) == 1:
        fits = [number for number in fits if number == 1]
    return [number for number in fits if number - 1 + len(lines) == len(have)] if hunk.last else fits
