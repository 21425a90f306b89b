"""
The conflict report: why a patch does not fit, in the order in which a maintainer asks.

Which patch of what, on which base; each hunk, and what stands there instead; what upstream did to those lines meanwhile, found by the
ids of the files in the base and in the patch, so that it works for a release archive, too; whether an earlier patch of ours did it.
"""

from __future__ import annotations

import difflib
import itertools
import posixpath
import textwrap
from collections.abc import Sequence
from typing import Literal

import msgspec

from sparkwright.cherry_picks import diff, history
from sparkwright.cherry_picks.already_upstream import Evidence
from sparkwright.cherry_picks.diff import Hunk, Section
from sparkwright.cherry_picks.errors import PatchError
from sparkwright.cherry_picks.history import Commit
from sparkwright.cherry_picks.patch import Patch
from sparkwright.core.console import console
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.git import REGULAR
from sparkwright.core.git_store import Objects
from sparkwright.forks.mirror import Mirror

#: Lines of a hunk, columns of a line, and upstream commits that a report shows; more help nobody.
SHOWN, COLUMNS, NAMED = 8, 96, 20
#: Lines of a hunk that are compared to find those.
COMPARED = 2000


class HunkState(msgspec.Struct, frozen=True):
    """
    How a hunk meets the tree.

    Attributes:
        state: ``fits``; ``moved`` (its lines stand at *line* instead); ``ambiguous`` (they stand at several places, none the named
            one); ``already`` (what it would write stands there); ``gone`` (its lines are nowhere).
        line: Where, from 1; 0 where there is no such place.
        expected, found: Of a hunk that is gone, the lines that differ: what it wants, and what stands at the likeliest place.
    """

    label: str
    heading: str
    state: Literal["fits", "moved", "ambiguous", "already", "gone"]
    line: int = 0
    expected: tuple[str, ...] = ()
    found: tuple[str, ...] = ()


class FileConflict(msgspec.Struct, frozen=True):
    """
    A file that a patch touches.

    Attributes:
        state: ``there``, ``missing``, ``exists`` (a new file that is there already), ``binary`` (another content than the patch is for).
        candidates: Files of the same name elsewhere, where it is missing.
        base_lacks: Upstream commits that the patch builds on and the base does not have, on the hunks' lines where that is known.
        base_has: Upstream commits that the base has and the patch was made before.
        ours: Earlier patches that touched the file.
        note: What could not be found out.
    """

    path: str
    state: Literal["there", "missing", "exists", "binary"]
    hunks: tuple[HunkState, ...] = ()
    candidates: tuple[str, ...] = ()
    base_lacks: tuple[Commit, ...] = ()
    base_has: tuple[Commit, ...] = ()
    ours: tuple[str, ...] = ()
    note: str = ""

    @property
    def fits(self) -> bool:
        return self.state == "there" and all(hunk.state in ("fits", "moved") for hunk in self.hunks)


class ConflictReport(msgspec.Struct, frozen=True):
    """A patch that does not apply; see the module."""

    fork: str
    base: str
    tree: str
    patch: str
    subject: str
    author: str
    page: str
    files: tuple[FileConflict, ...]
    evidence: tuple[Evidence, ...]
    commands: tuple[str, ...]


def hunk_state(text: bytes, hunk: Hunk) -> HunkState:
    """Return how *hunk* meets the file content *text*, the other hunks left aside."""
    if not text and not (hunk.before and hunk.after):
        # Of an empty file there is no line to look for.
        return HunkState(hunk.label, hunk.heading, "already" if hunk.before else "fits")
    at = diff.places(text, hunk)
    if hunk.start in at:
        return HunkState(hunk.label, hunk.heading, "fits", hunk.start)
    if at:
        nearest = min(at, key=lambda line: abs(line - hunk.start))
        return HunkState(hunk.label, hunk.heading, "moved" if len(at) == 1 else "ambiguous", nearest)
    if done := diff.places(text, hunk, done=True):
        return HunkState(hunk.label, hunk.heading, "already", min(done, key=lambda line: abs(line - hunk.new_start)))
    have = diff.lines_of(text)
    line = _likeliest(have, hunk)
    # Its first lines may be gone from the file's beginning.
    expected, found = _differing(hunk.before, have[max(line, 0) : max(line + len(hunk.before), 0)])
    return HunkState(hunk.label, hunk.heading, "gone", max(line, 0) + 1, _shown(expected), _shown(found))


def _differing(wanted: Sequence[bytes], have: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Return the lines of each side that the other lacks at that place."""
    # Its time grows with the square of their number.
    wanted, have = wanted[:COMPARED], have[:COMPARED]
    changed = [one for one in difflib.SequenceMatcher(None, wanted, have).get_opcodes() if one[0] != "equal"]
    return [line for one in changed for line in wanted[one[1] : one[2]]], [line for one in changed for line in have[one[3] : one[4]]]


def _likeliest(have: list[bytes], hunk: Hunk) -> int:
    """Return the index at which most of the hunk's lines stand, where it should be when none does."""
    scores: dict[int, float] = {}
    wanted = [(offset, line) for offset, line in enumerate(hunk.before) if line.strip()]
    index: dict[bytes, list[int]] = {}
    for number, line in enumerate(have):
        index.setdefault(line, []).append(number)
    for offset, line in wanted:
        # A line that stands everywhere (a closing bracket) says little of the place.
        standing = index.get(line, [])
        for number in standing[:20]:
            scores[number - offset] = scores.get(number - offset, 0.0) + 1 / len(standing)
    return max(scores, key=lambda at: (scores[at], -abs(at + 1 - hunk.start)), default=min(hunk.start, len(have)) - 1)


def _shown(lines: Sequence[bytes]) -> tuple[str, ...]:
    """Return the first lines for people: a file's bytes must not reach a terminal as commands, and a CR or no line end is to be seen."""
    texts = [line.decode("utf-8", "replace") for line in lines[:SHOWN]]
    ended = [text[:-1] if text.endswith("\n") else f"{text}␄" for text in texts]
    return tuple(_plain(text[:400]) for text in ended)


def _plain(text: str) -> str:
    """Return *text* with a sign in the place of whatever a terminal would take for a command."""
    return "".join(
        one if one.isprintable() or one == "\t" else chr(0x2400 + ord(one)) if ord(one) < 32 else "\N{REPLACEMENT CHARACTER}"
        for one in text
    )


def explain(
    objects: Objects, tree: str, one: Patch, *, fork: str, base: str, earlier: Sequence[Patch] = (), mirror: Mirror | None = None,
    tip: str = "", page: str = "", evidence: tuple[Evidence, ...] = (), commands: tuple[str, ...] = (), origin: str = "",
) -> ConflictReport:  # fmt: skip
    """
    Return why the patch *one* does not apply to *tree*.

    Args:
        base: What people call what the tree came from.
        earlier: The patches that were applied before it.
        mirror, tip: The upstream and the newest commit of its branch, where its history is in the store.
        origin: The tree that the base came with, before *earlier*; only its files are states of upstream's branch.
    """
    blobs = _regular(objects, tree)
    came = _regular(objects, origin) if origin else blobs
    files = tuple(_file(objects, tree, blobs, came, section, earlier, mirror, tip) for section in one.sections())
    return ConflictReport(fork, base, tree, one.name, one.subject, one.author, page, files, evidence, commands)


def _regular(objects: Objects, tree: str) -> dict[str, str]:
    return {path: blob for path, (mode, blob) in objects.paths(tree).items() if mode.startswith(REGULAR[:3])}


def _file(
    objects: Objects, tree: str, blobs: dict[str, str], came: dict[str, str], section: Section, earlier: Sequence[Patch],
    mirror: Mirror | None, tip: str,
) -> FileConflict:  # fmt: skip
    path = section.old or section.new
    ours = tuple(one.name for one in earlier if path in one.files)
    if not section.old:
        return FileConflict(path, "exists" if path in blobs else "there", ours=ours)
    if path not in blobs:
        name = posixpath.basename(path)
        return FileConflict(
            path, "missing", candidates=tuple(sorted(other for other in blobs if posixpath.basename(other) == name)[:3]), ours=ours
        )
    if section.binary:
        return FileConflict(path, "there" if section.blob and blobs[path].startswith(section.blob) else "binary", ours=ours)
    text = objects.blob(tree, path) or b""
    hunks = tuple(hunk_state(text, hunk) for hunk in section.hunks)
    made = FileConflict(path, "there", hunks, ours=ours)
    if made.fits:
        return made
    wrong = [hunk for hunk, state in zip(section.hunks, hunks, strict=True) if state.state not in ("fits", "moved")]
    return _with_upstream(objects, made, section, wrong, came.get(path, ""), mirror, tip)


def _with_upstream(
    objects: Objects, made: FileConflict, section: Section, wrong: Sequence[Hunk], blob: str, mirror: Mirror | None, tip: str
) -> FileConflict:
    """Place the base's file and the patch's file in upstream's history of it, and list what lies between."""
    if mirror is None or not tip:
        return msgspec.structs.replace(made, note="upstream's history is not in the store; `sparkwright drift` brings it")
    states = history.states(objects, made.path, tip)
    at = next((number for number, (_, one) in enumerate(states) if one == blob), None)
    of = next((number for number, (_, one) in enumerate(states) if section.blob and one.startswith(section.blob)), None)
    if at is None or of is None:
        whose = "base" if at is None else "patch"
        return msgspec.structs.replace(made, note=f"the {whose}'s {made.path} is no state of upstream's branch")
    newer, older = min(at, of), max(at, of)
    between = states[newer : older + 1]
    try:
        mirror.files({blob for _, blob in between if blob.strip("0")})
    except SparkwrightError as error:
        console.detail(f"not all states of {made.path} can be read: {error.what}")
    lines = [line for hunk in wrong for line in hunk.before]
    touched = [one for (one, after), (_, before) in itertools.pairwise(between) if history.touches(objects, before, after, lines)]
    found = tuple(history.commit(objects, one) for one in (touched or [commit for commit, _ in between[:-1]])[:NAMED])
    return msgspec.structs.replace(made, base_lacks=found) if of < at else msgspec.structs.replace(made, base_has=found)


def lines(report: ConflictReport) -> list[str]:
    """Return the report as people read it."""
    rows = [f"base: {report.base}", f"tree: {report.tree}", f"patch: {report.patch}  {report.subject}"]
    rows += [f"       {part}" for part in (report.author, report.page) if part]
    for file in report.files:
        if file.fits:
            rows.append(f"{file.path}: fits")
            continue
        rows += [f"{file.path}: {_FILE[file.state]}", *(f"  is it {name}?" for name in file.candidates)]
        for hunk in file.hunks:
            rows.append(f"  {hunk.label} {_cut(hunk.heading, 30)}".rstrip() + f": {_HUNK[hunk.state].format(line=hunk.line)}")
            rows += [_cut(f"    {verb}: {line}") for verb, each in (("wants", hunk.expected), ("finds", hunk.found)) for line in each]
        rows += [f"  the patch builds on, and the base lacks: {one.line()}" for one in file.base_lacks]
        rows += [f"  the base has, and the patch does not know: {one.line()}" for one in file.base_has]
        rows += [f"  touched by our {name} before" for name in file.ours]
        rows += [f"  ({file.note})"] if file.note else []
    for one in report.evidence:
        mark = "could not be tested" if one.holds is None else "yes" if one.holds else "no"
        rows.append(f"already upstream by {one.test}: {mark}, {one.says}")
    rows = [line for row in rows for line in _wrapped(_plain(row))]
    for command, _, why in (command.partition("    ") for command in report.commands):
        rows += [f"to go on: {command}", *([f"          {why.strip()}"] if why else [])]
    return rows


def _cut(text: str, columns: int = COLUMNS) -> str:
    return text if len(text) <= columns else f"{text[: columns - 1]}…"


def _wrapped(row: str) -> list[str]:
    """Return *row* as lines for a narrow terminal; what it quotes from files is cut already, and long names stay whole."""
    if len(row) <= COLUMNS:
        return [row]
    deeper = " " * (len(row) - len(row.lstrip()) + 4)
    return textwrap.wrap(row, COLUMNS, subsequent_indent=deeper, break_long_words=False, break_on_hyphens=False)


_FILE = {
    "there": "conflict",
    "missing": "not in the tree",
    "exists": "is there already",
    "binary": "has another content than the patch is for",
}
_HUNK = {
    "fits": "fits",
    "moved": "its lines stand at line {line}",
    "ambiguous": "its lines stand at several places, the nearest at line {line}",
    "already": "is there already, at line {line}",
    "gone": "its lines are not there; the likeliest place is line {line}",
}


def error(report: ConflictReport, says: Sequence[str] = ()) -> PatchError:
    """Return the failure that carries *report*, after what git *says*."""
    bad = [file.path for file in report.files if not file.fits]
    return PatchError(
        "patch-conflict",
        f"{report.patch} does not apply to {report.fork}{': ' + ', '.join(bad) if bad else ''}.",
        details=[*says, *lines(report)],
        data={"conflict": report},
    )
