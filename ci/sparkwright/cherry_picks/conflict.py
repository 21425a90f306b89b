"""
The conflict report: why a patch does not apply, in the order in which a maintainer asks.

It names the patch and the base; each hunk, and what is in its place; the upstream commits that
changed those lines, which are found by the ids of the files in the base and in the patch, so that a
release archive will do; and the earlier patches of ours that changed the file.
"""

from __future__ import annotations

import difflib
import itertools
import posixpath
from collections.abc import Sequence
from typing import Literal

import msgspec

from sparkwright.cherry_picks import apply
from sparkwright.cherry_picks import upstream as history
from sparkwright.cherry_picks.apply import Explain
from sparkwright.cherry_picks.patch import Hunk, Patch, PatchError, Section, lines_of
from sparkwright.cherry_picks.upstream import Base, Commit, Evidence, Upstream, evidence
from sparkwright.core.console import console
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.git import REGULAR
from sparkwright.core.git_store import Objects

#: Lines of a hunk, columns of a line, and upstream commits that a report shows.
SHOWN, COLUMNS, NAMED = 8, 96, 20
#: Lines of a hunk that are compared, in a time that grows with the square of their number.
COMPARED = 2000


State = Literal["fits", "moved", "ambiguous", "already", "gone"]


class HunkState(msgspec.Struct, frozen=True):
    """
    A hunk on the tree.

    Attributes:
        state: ``fits``; ``moved`` (fits at *line* instead); ``ambiguous`` (fits at several other
            lines); ``already`` (its replacement is there); ``gone`` (its lines are nowhere).
        line: Its line in the tree, from 1; 0 if there is none.
        expected, found: Of a hunk that is gone, the lines that differ: those it replaces, and those
            at the likeliest line.
    """

    label: str
    heading: str
    state: State
    line: int = 0
    expected: tuple[str, ...] = ()
    found: tuple[str, ...] = ()


class FileConflict(msgspec.Struct, frozen=True):
    """
    A file that the patch changes.

    Attributes:
        state: ``exists``: a new file that the tree has; ``binary``: its content is not the one that
            the patch changes.
        candidates: Files of the same name elsewhere, if the tree lacks the file.
        base_lacks: Upstream commits that the patch builds on and the base lacks, on the hunks'
            lines if that is known.
        base_has: Upstream commits that the base has and that are newer than the patch.
        ours: Earlier patches that changed the file.
        note: What could not be determined.
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
        """Whether the change of the file applies."""
        return self.state == "there" and all(hunk.state in ("fits", "moved") for hunk in self.hunks)


class ConflictReport(msgspec.Struct, frozen=True):
    """The report of one patch; see the module."""

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
    """Return the state of *hunk* on the file content *text*, without the other hunks."""
    if not text and not (hunk.before and hunk.after):
        return HunkState(hunk.label, hunk.heading, "already" if hunk.before else "fits")
    for number, done in ((hunk.start, False), (hunk.new_start, True)):
        if places := hunk.places(text, done=done):
            nearest = min(places, key=lambda line: abs(line - number))
            moved: State = "moved" if len(places) == 1 else "ambiguous"
            state: State = "already" if done else "fits" if nearest == number else moved
            return HunkState(hunk.label, hunk.heading, state, nearest)
    have = lines_of(text)
    line = _likeliest(have, hunk)
    wanted = hunk.before[:COMPARED]
    there = have[max(line, 0) : max(line + len(hunk.before), 0)][:COMPARED]
    codes = difflib.SequenceMatcher(None, wanted, there).get_opcodes()
    changes = [code for code in codes if code[0] != "equal"]
    expected = [text for _, start, end, _, _ in changes for text in wanted[start:end]]
    found = [text for _, _, _, start, end in changes for text in there[start:end]]
    shown = (_shown(expected), _shown(found))
    return HunkState(hunk.label, hunk.heading, "gone", max(line, 0) + 1, *shown)


def _likeliest(have: list[bytes], hunk: Hunk) -> int:
    """Return the index at which most of the hunk's lines are; its own if there are none."""
    scores: dict[int, float] = {}
    index: dict[bytes, list[int]] = {}
    for number, line in enumerate(have):
        index.setdefault(line, []).append(number)
    for offset, line in enumerate(hunk.before):
        # A frequent line (a closing bracket) is weak evidence.
        numbers = index.get(line, []) if line.strip() else []
        for number in numbers[:20]:
            scores[number - offset] = scores.get(number - offset, 0.0) + 1 / len(numbers)
    return max(
        scores,
        key=lambda at: (scores[at], -abs(at + 1 - hunk.start)),
        default=min(hunk.start, len(have)) - 1,
    )


def _shown(lines: Sequence[bytes]) -> tuple[str, ...]:
    """Return the first lines as text, with a sign for a missing line end."""
    texts = [line.decode("utf-8", "replace") for line in lines[:SHOWN]]
    return tuple(_plain((text[:-1] if text.endswith("\n") else f"{text}␄")[:400]) for text in texts)


def _plain(text: str) -> str:
    """
    Return *text* with control characters, which a terminal would obey, replaced by their symbols.
    """
    return "".join(
        c
        if c.isprintable() or c == "\t"
        else chr(0x2400 + ord(c))
        if ord(c) < 32
        else "\N{REPLACEMENT CHARACTER}"
        for c in text
    )


def explain(
    upstream: Upstream,
    base: Base,
    tree: str,
    patch: Patch,
    earlier: Sequence[Patch],
    *,
    says: Sequence[str] = (),
    commands: Sequence[str] = (),
    todo: str = "",
) -> PatchError:
    """
    Return the failure of *patch*, which does not apply to *tree*, with its report.

    Args:
        base: The base of *tree*; only its files are states of upstream's branch.
        earlier: The patches between *base* and *tree*.
        says: git's messages.
        commands: Command lines to go on with, each with its reason after four blanks.
    """
    objects, fork = upstream.session.objects, upstream.fork
    present, original = (_regular(objects, name) for name in (tree, base.tree))
    files = tuple(
        _file(upstream, tree, present, original, part, earlier) for part in patch.sections()
    )
    reverts = patch.name in apply.taken_away(objects, base.tree, [patch])
    tests = evidence(upstream, base, patch, reverts=reverts)
    page = upstream.book.page(patch.pick) if upstream.book and patch.pick else ""
    names = (fork, base.name, tree, patch.name, patch.subject, patch.author, page)
    report = ConflictReport(*names, files, tests, tuple(commands))
    wrong = [file.path for file in files if not file.fits]
    what = f"{patch.name} does not apply to {fork}{': ' + ', '.join(wrong) if wrong else ''}."
    return PatchError(
        "patch-conflict",
        what,
        details=[*says, *lines(report)],
        data={"conflict": report},
        todo=todo,
    )


def explainer(upstream: Upstream, base: Base) -> Explain:
    """
    Return the function that explains a conflict while the series is applied to the locked source
    *base*.
    """
    verb = f"--stack {upstream.session.project.stack} --fork {upstream.fork}"

    def failure(
        tree: str, patch: Patch, earlier: Sequence[Patch], says: Sequence[str]
    ) -> PatchError:
        why = "leave a file out, and carry it as a patch of ours"
        exclude = f"sparkwright patch pick {patch.pick} {verb} --exclude PATH=REASON    ({why})"
        commands = (
            exclude if patch.pick else "",
            f"sparkwright patch rebase {verb}",
            "" if patch.pick else f"sparkwright patch export {verb}",
        )
        return explain(
            upstream, base, tree, patch, earlier, says=says, commands=[*filter(None, commands)]
        )

    return failure


def _regular(objects: Objects, tree: str) -> dict[str, str]:
    return {
        path: blob
        for path, (mode, blob) in objects.paths(tree).items()
        if mode.startswith(REGULAR[:3])
    }


def _file(
    upstream: Upstream,
    tree: str,
    present: dict[str, str],
    original: dict[str, str],
    part: Section,
    earlier: Sequence[Patch],
) -> FileConflict:
    path = part.old or part.new
    ours = tuple(patch.name for patch in earlier if path in patch.files)
    if not part.old:
        return FileConflict(path, "exists" if path in present else "there", ours=ours)
    if path not in present:
        name = posixpath.basename(path)
        candidates = sorted(other for other in present if posixpath.basename(other) == name)
        return FileConflict(path, "missing", candidates=tuple(candidates[:3]), ours=ours)
    if part.binary:
        return FileConflict(
            path,
            "there" if part.blob and present[path].startswith(part.blob) else "binary",
            ours=ours,
        )
    text = upstream.session.objects.blob(tree, path) or b""
    conflict = FileConflict(
        path, "there", tuple(hunk_state(text, hunk) for hunk in part.hunks), ours=ours
    )
    if conflict.fits:
        return conflict
    pairs = zip(part.hunks, conflict.hunks, strict=True)
    wanted = [
        line
        for hunk, state in pairs
        if state.state not in ("fits", "moved")
        for line in hunk.before
    ]
    return _with_upstream(upstream, conflict, part, wanted, original.get(path, ""))


def _with_upstream(
    upstream: Upstream, conflict: FileConflict, part: Section, wanted: Sequence[bytes], blob: str
) -> FileConflict:
    """
    Find the file of the base and the file of the patch in upstream's history, and list the commits
    between them.
    """
    objects, replace = upstream.session.objects, msgspec.structs.replace
    if upstream.mirror is None or not upstream.tip:
        note = "upstream's history is not in the store; `sparkwright patch drift` brings it"
        return replace(conflict, note=note)
    states = history.states(objects, conflict.path, upstream.tip)
    numbers = [
        next(
            (number for number, (_, state) in enumerate(states) if id_ and state.startswith(id_)),
            -1,
        )
        for id_ in (blob, part.blob)
    ]
    if min(numbers) < 0:
        whose = "base" if numbers[0] < 0 else "patch"
        note = f"the {whose}'s {conflict.path} is no state of upstream's branch"
        return replace(conflict, note=note)
    between = states[min(numbers) : max(numbers) + 1]
    try:
        upstream.mirror.files({state for _, state in between if state.strip("0")})
    except SparkwrightError as error:
        console.detail(f"not all states of {conflict.path} can be read: {error.what}")
    touching = [
        commit
        for (commit, after), (_, before) in itertools.pairwise(between)
        if history.touches(objects, before, after, wanted)
    ]
    names = (touching or [commit for commit, _ in between[:-1]])[:NAMED]
    commits = tuple(history.commit(objects, name) for name in names)
    newer = numbers[1] < numbers[0]
    return replace(conflict, **{"base_lacks" if newer else "base_has": commits})


def lines(report: ConflictReport) -> list[str]:
    """Return the report as text."""
    rows = [
        f"base: {report.base}",
        f"tree: {report.tree}",
        f"patch: {report.patch}  {report.subject}",
    ]
    rows += [f"       {part}" for part in (report.author, report.page) if part]
    for file in report.files:
        if file.fits:
            rows.append(f"{file.path}: fits")
            continue
        rows += [
            f"{file.path}: {_FILE[file.state]}",
            *(f"  is it {name}?" for name in file.candidates),
        ]
        for hunk in file.hunks:
            rows.append(
                f"  {hunk.label} {_cut(hunk.heading, 30)}".rstrip()
                + f": {_HUNK[hunk.state].format(line=hunk.line)}"
            )
            rows += [
                _cut(f"    {verb}: {line}")
                for verb, each in (("wants", hunk.expected), ("finds", hunk.found))
                for line in each
            ]
        rows += [
            f"  the patch builds on, and the base lacks: {commit.line()}"
            for commit in file.base_lacks
        ]
        rows += [
            f"  the base has, and the patch does not know: {commit.line()}"
            for commit in file.base_has
        ]
        rows += [f"  touched by our {name} before" for name in file.ours]
        rows += [f"  ({file.note})"] if file.note else []
    for test in report.evidence:
        mark = "could not be tested" if test.holds is None else "yes" if test.holds else "no"
        rows.append(f"already upstream by {test.test}: {mark}, {test.says}")
    rows = [_plain(row) for row in rows]
    for command, _, why in (command.partition("    ") for command in report.commands):
        rows += [f"to go on: {command}", *([f"          {why.strip()}"] if why else [])]
    return rows


def _cut(text: str, columns: int = COLUMNS) -> str:
    return text if len(text) <= columns else f"{text[: columns - 1]}…"


_FILE = {
    "there": "conflict",
    "missing": "not in the tree",
    "exists": "is there already",
    "binary": "has another content than the patch is for",
}
_HUNK = {
    "fits": "fits",
    "moved": "its lines are at line {line}",
    "ambiguous": "its lines are at several places, the nearest at line {line}",
    "already": "is there already, at line {line}",
    "gone": "its lines are not there; the likeliest place is line {line}",
}
