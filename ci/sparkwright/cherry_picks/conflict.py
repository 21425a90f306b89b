"""
The conflict report: why a patch does not apply, in the order in which a maintainer asks.

It names the patch and the base; each hunk, and what is in its place; the upstream commits that
changed those lines, which are found by the ids of the files in the base and in the patch, so that a
release archive will do; and the earlier patches of ours that changed the file.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Literal

import msgspec

from sparkwright.cherry_picks import apply
from sparkwright.cherry_picks import upstream as history
from sparkwright.cherry_picks.apply import Outcome
from sparkwright.cherry_picks.patch import Hunk, Patch, PatchError, Section, lines_of
from sparkwright.cherry_picks.upstream import Base, Commit, Upstream, evidence
from sparkwright.core.console import console
from sparkwright.core.errors import SparkwrightError
from sparkwright.forks.fetch import FetchedSource

#: Lines of a hunk, columns of a line, and upstream commits that a report shows.
SHOWN, COLUMNS, NAMED = 8, 96, 20
#: Lines of a hunk that are compared, in a time that grows with the square of their number.
COMPARED = 2000

HunkFit = Literal["fits", "moved", "ambiguous", "already", "gone"]

_HUNK = {
    "fits": "fits",
    "moved": "its lines are at line {line}",
    "ambiguous": "its lines are at several places, the nearest at line {line}",
    "already": "is there already, at line {line}",
    "gone": "its lines are not there; the likeliest place is line {line}",
}


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
    state: HunkFit
    line: int = 0
    expected: tuple[str, ...] = ()
    found: tuple[str, ...] = ()


class FileConflict(msgspec.Struct, frozen=True):
    """
    A file that the patch changes.

    Attributes:
        problem: Why the change does not apply, apart from its hunks.
        base_lacks: Upstream commits that the patch builds on and the base lacks, on the hunks'
            lines if that is known.
        base_has: Upstream commits that the base has and that are newer than the patch.
        ours: Earlier patches that changed the file.
        note: What could not be determined.
    """

    path: str
    problem: str = ""
    hunks: tuple[HunkState, ...] = ()
    base_lacks: tuple[Commit, ...] = ()
    base_has: tuple[Commit, ...] = ()
    ours: tuple[str, ...] = ()
    note: str = ""

    @property
    def fits(self) -> bool:
        """Whether the change of the file applies."""
        return not self.problem and all(hunk.state in ("fits", "moved") for hunk in self.hunks)


def hunk_state(text: bytes, hunk: Hunk) -> HunkState:
    """Return the state of *hunk* on the file content *text*, without the other hunks."""
    if not text and not (hunk.before and hunk.after):
        return HunkState(hunk.label, "already" if hunk.before else "fits")
    for number, done in ((hunk.start, False), (hunk.new_start, True)):
        if places := hunk.places(text, done=done):
            nearest = min(places, key=lambda line: abs(line - number))
            moved: HunkFit = "moved" if len(places) == 1 else "ambiguous"
            state: HunkFit = "already" if done else "fits" if nearest == number else moved
            return HunkState(hunk.label, state, nearest)
    wanted, have = hunk.before[:COMPARED], lines_of(text)
    block = SequenceMatcher(None, wanted, have).find_longest_match()
    line = max(block.b - block.a if block.size else min(hunk.start, len(have)) - 1, 0)
    there = have[line : line + len(wanted)]
    codes = SequenceMatcher(None, wanted, there).get_opcodes()
    changes = [code for code in codes if code[0] != "equal"]
    expected = [text for _, start, end, _, _ in changes for text in wanted[start:end]]
    found = [text for _, _, _, start, end in changes for text in there[start:end]]
    shown = _shown(expected), _shown(found)
    return HunkState(hunk.label, "gone", line + 1, *shown)


def _shown(lines: Sequence[bytes]) -> tuple[str, ...]:
    """Return the first lines as text, with a sign for a missing line end."""
    texts = [line.decode("utf-8", "replace") for line in lines[:SHOWN]]
    return tuple((text[:-1] if text.endswith("\n") else f"{text}␄")[:400] for text in texts)


def error_with_report(
    upstream: Upstream,
    source: FetchedSource,
    patches: Sequence[Patch],
    outcomes: Sequence[Outcome],
) -> PatchError:
    """
    Return the error for the last of *outcomes*: a patch that was not applied to *source*. The error
    of a conflict holds the report.
    """
    patch, outcome = patches[len(outcomes) - 1], outcomes[-1]
    base = Base(source.origin, source.tree, source.pin if source.kind == "git" else "")
    if outcome.status != "conflict":
        return apply.error_of(upstream.fork, patches, outcomes)
    verb = f"--stack {upstream.context.project.stack} --fork {upstream.fork}"
    rebase, export = (f"sparkwright patch {name} {verb}" for name in ("rebase", "export"))
    exclude = f"sparkwright patch pick {patch.pick} {verb} --exclude PATH=REASON"
    commands = (exclude, rebase) if patch.pick else (rebase, export)
    earlier = patches[: len(outcomes) - 1]
    says = outcome.says
    return explain(upstream, base, outcome.tree, patch, earlier, says=says, commands=commands)


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
    Return the error of *patch*, which does not apply to *tree*, with the report.

    Args:
        base: The base of *tree*; only its files are states of upstream's branch.
        earlier: The patches between *base* and *tree*.
        says: git's messages.
        commands: Command lines to go on with.
    """
    objects, fork = upstream.context.objects, upstream.fork
    present, original = (
        {path: blob for path, (mode, blob) in objects.paths(name).items() if mode[:3] == "100"}
        for name in (tree, base.tree)
    )
    files = tuple(
        msgspec.structs.replace(
            _file(upstream, tree, present, original, part),
            ours=tuple(patch.name for patch in earlier if (part.old or part.new) in patch.files),
        )
        for part in patch.sections()
    )
    reverts = patch.name in apply.taken_away(objects, base.tree, [patch])
    tests = evidence(upstream, base, patch, reverts=reverts)
    report = {
        "fork": fork,
        "base": base.name,
        "tree": tree,
        "patch": patch.name,
        "subject": patch.subject,
        "author": patch.author,
        "page": upstream.book.page(patch.pick) if upstream.book and patch.pick else "",
    }
    rows = [f"{key}: {value}" for key, value in report.items() if value]
    rows += [row for file in files for row in _rows(file)]
    for test in tests:
        mark = {None: "could not be tested", True: "yes", False: "no"}[test.holds]
        rows.append(f"already upstream by {test.test}: {mark}, {test.says}")
    rows += [f"to go on: {command}" for command in commands]
    wrong = [file.path for file in files if not file.fits]
    what = f"{patch.name} does not apply to {fork}{': ' + ', '.join(wrong) if wrong else ''}."
    data = {"conflict": {**report, "files": files, "evidence": tests, "commands": commands}}
    return PatchError("patch-conflict", what, details=[*says, *rows], data=data, todo=todo)


def _file(
    upstream: Upstream,
    tree: str,
    present: dict[str, str],
    original: dict[str, str],
    part: Section,
) -> FileConflict:
    """
    Return the state of the file that *part* changes.

    Args:
        present, original: The files of the tree and of its base: path → blob id.
    """
    path = part.old or part.new
    if not part.old:
        return FileConflict(path, "is there already" if path in present else "")
    if path not in present:
        return FileConflict(path, "not in the tree")
    if part.binary:
        same = part.blob and present[path].startswith(part.blob)
        return FileConflict(path, "" if same else "has another content than the patch is for")
    text = upstream.context.objects.blob(tree, path) or b""
    states = tuple(hunk_state(text, hunk) for hunk in part.hunks)
    conflict = FileConflict(path, "", states)
    if conflict.fits:
        return conflict
    wanted = [
        line
        for hunk, state in zip(part.hunks, states, strict=True)
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
    objects, replace = upstream.context.objects, msgspec.structs.replace
    if upstream.mirror is None or not upstream.tip:
        note = "upstream's history is not in the store; `sparkwright patch drift` brings it"
        return replace(conflict, note=note)
    states = history.states(objects, conflict.path, upstream.tip)
    blobs = {"base": blob, "patch": part.blob}
    positions = {
        whose: number
        for whose, wanted_blob in blobs.items()
        for number, (_, state) in reversed([*enumerate(states)])
        if wanted_blob and state.startswith(wanted_blob)
    }
    if absent := [whose for whose in blobs if whose not in positions]:
        note = f"the {absent[0]}'s {conflict.path} is no state of upstream's branch"
        return replace(conflict, note=note)
    between = states[min(positions.values()) : max(positions.values()) + 1]
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
    field = "base_lacks" if positions["patch"] < positions["base"] else "base_has"
    return replace(conflict, **{field: commits})


def _rows(file: FileConflict) -> list[str]:
    """Return the state of a file as text."""
    if file.fits:
        return [f"{file.path}: fits"]
    rows = [f"{file.path}: {file.problem or 'conflict'}"]
    for hunk in file.hunks:
        rows.append(f"  {hunk.label}: {_HUNK[hunk.state].format(line=hunk.line)}")
        rows += [f"    wants: {line}"[:COLUMNS] for line in hunk.expected]
        rows += [f"    finds: {line}"[:COLUMNS] for line in hunk.found]
    lacks, has = (
        "the patch builds on, and the base lacks",
        "the base has, and the patch does not know",
    )
    rows += [f"  {lacks}: {commit.line()}" for commit in file.base_lacks]
    rows += [f"  {has}: {commit.line()}" for commit in file.base_has]
    rows += [f"  touched by our {name} before" for name in file.ours]
    return [*rows, *([f"  ({file.note})"] if file.note else [])]
