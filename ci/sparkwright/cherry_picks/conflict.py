"""
The conflict report: why a patch does not apply, in the order in which a maintainer asks.

It names the patch and the base; each hunk, and what is in its place; the upstream commits that
changed those lines, which are found by the ids of the files in the base and in the patch, so that a
release archive will do; and the earlier patches of ours that changed the file.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher

from sparkwright.cherry_picks import apply
from sparkwright.cherry_picks.patch import Hunk, Patch, PatchError, Section, lines_of, sections
from sparkwright.cherry_picks.upstream import (
    Base,
    Upstream,
    changes,
    evidence,
    log,
    touches,
)
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.git import SUBMODULE

#: Lines of a hunk, columns of a line, and upstream commits that a report shows.
SHOWN, COLUMNS, NAMED = 8, 96, 20
#: Lines of a hunk that are compared, in a time that grows with the square of their number.
COMPARED = 2000

_NO_HISTORY = "upstream's history is not in the store; `sparkwright patch drift` gets it"
_HOLDS = {None: "could not be tested", True: "yes", False: "no"}


def explain(
    upstream: Upstream,
    base: Base,
    outcome: apply.Outcome,
    patch: Patch,
    earlier: Sequence[Patch],
    *,
    commands: Sequence[str] = (),
    todo: str = "",
) -> PatchError:
    """
    Return the error of *patch*, which does not apply, with the report: `patch-conflict`, or
    `patch-already-upstream` if the base has the change in another form.

    Args:
        base: The base of the series; only its files are states of upstream's branch.
        outcome: Of the patch, with the tree that it was tried on.
        earlier: The patches before it.
        commands: Command lines to go on with; none for those that mend a patch or leave a part of
            a pick out.
    """
    objects, fork = upstream.context.objects, upstream.fork
    options = f"--stack {upstream.context.project.stack} --fork {fork}"
    if not commands:
        commands = [f"sparkwright patch rebase {options}", f"sparkwright patch export {options}"]
        if patch.pick:
            exclude = f"sparkwright patch pick {patch.pick} {options} --exclude PATH=REASON"
            commands = [exclude, commands[0]]
    present, original = objects.paths(outcome.tree), objects.paths(base.tree)
    rows = [
        *(*outcome.says, f"fork: {fork}", f"base: {base.name}", f"tree: {outcome.tree}"),
        *(f"patch: {patch.name}", f"subject: {patch.subject}", f"author: {patch.author}"),
    ]
    if patch.pick:
        rows.append(f"page: {upstream.ledger.page(patch.pick)}")
    wrong = list[str]()
    for part in sections(patch.data):
        path = part.old or part.new
        blobs = {"base": original.get(path, ("", ""))[1], "patch": part.blob}
        if lines := [*_file(upstream, outcome.tree, present, blobs, part)]:
            wrong.append(path)
            rows += [f"{path}: {lines[0]}", *lines[1:]]
            rows += [f"  touched by our {own.name} before" for own in earlier if path in own.files]
        else:
            rows.append(f"{path}: fits")
    tried = apply.try_patches(objects, base.tree, [patch])[patch.name]
    reference, what = "patch-conflict", f"does not apply to {fork}"
    for test in evidence(upstream, base, patch, tried):
        rows.append(f"already upstream by {test.test}: {_HOLDS[test.holds]}, {test.says}")
        if test.holds:
            reference, what = "patch-already-upstream", f"is in {fork} already, and changed since"
            if patch.pick:
                commands = [f"sparkwright patch pick {patch.pick} {options} --drop", *commands[1:]]
    rows += map("to go on: {}".format, commands)
    what = f"{patch.name} {what}{': ' if wrong else ''}{', '.join(wrong)}."
    return PatchError(reference, what, details=rows, todo=todo)


def _file(
    upstream: Upstream,
    tree: str,
    present: Mapping[str, tuple[str, str]],
    blobs: Mapping[str, str],
    part: Section,
) -> Iterator[str]:
    """
    Yield the problem of the file that *part* changes, and the rows of its hunks and of upstream's
    commits; nothing if it fits.

    Args:
        present: The files of *tree*: path → mode and blob id.
        blobs: Ids of the file in the base of the series and in the patch, which may be abbreviated.
    """
    path = part.old or part.new
    if not part.old:
        if path in present:
            yield "is there already"
    elif f" {SUBMODULE}\n".encode() in part.data:
        yield "is a submodule, which no patch can change: leave it out"
    elif path not in present:
        yield "not in the tree"
    elif part.binary:
        if not (part.blob and present[path][1].startswith(part.blob)):
            yield "has another content than the patch is for"
    else:
        text, rows = upstream.context.objects.blob(tree, path) or b"", list[str]()
        unfitting = list[bytes]()
        for hunk in part.hunks:
            fits, lines = _hunk(text, hunk)
            rows += [f"  {hunk.label}: {lines[0]}", *lines[1:]]
            if not fits:
                unfitting += hunk.before
        if unfitting:
            yield "conflict"
            yield from rows
            yield from _between(upstream, path, unfitting, blobs)


def _hunk(text: bytes, hunk: Hunk) -> tuple[bool, list[str]]:
    """
    Return whether *hunk* fits the file content *text* without the other hunks, and its state; of
    one whose lines are nowhere also the differing lines that it replaces and those there.
    """
    for number, done in ((hunk.start, False), (hunk.new_start, True)):
        if fitting := hunk.fitting_lines(text, done=done):
            nearest = min(fitting, key=lambda line: abs(line - number))
            if done:
                return False, [f"is there already, at line {nearest}"]
            if nearest == number:
                return True, ["fits"]
            several = "at several places, the nearest " if len(fitting) > 1 else ""
            return not several, [f"its lines are {several}at line {nearest}"]
    wanted, have = hunk.before[:COMPARED], lines_of(text)
    block = SequenceMatcher(None, wanted, have).find_longest_match()
    line = max(block.b - block.a if block.size else min(hunk.start, len(have)) - 1, 0)
    there = have[line : line + len(wanted)]
    rows = [f"its lines are not there; the likeliest place is line {line + 1}"]
    for verb, lines, others in (("wants", wanted, there), ("finds", there, wanted)):
        for row in [row for row in lines if row not in others][:SHOWN]:
            text = row if row.endswith(b"\n") else row + "␄\n".encode()
            rows.append(f"    {verb}: {text[:-1].decode('utf-8', 'replace')}"[:COLUMNS])
    return False, rows


def _between(
    upstream: Upstream, path: str, lines: Sequence[bytes], blobs: Mapping[str, str]
) -> Iterator[str]:
    """
    Yield the commits of upstream's branch between the file of the base and that of the patch, found
    by their ids *blobs*, which change *lines*; or why they are not known.
    """
    objects = upstream.context.objects
    tip = upstream.mirror.fetched(upstream.ledger.branch) if upstream.mirror else ""
    if not tip:
        yield f"  ({_NO_HISTORY})"
        return
    listed, positions = changes(objects, tip, [path]), dict[str, int]()
    for whose, blob in blobs.items():
        for number, change in enumerate(listed):
            if blob and change.files[path][1].startswith(blob):
                positions.setdefault(whose, number)
        if whose not in positions:
            yield f"  (the {whose}'s {path} is no state of upstream's branch)"
            return
    between = listed[min(positions.values()) : max(positions.values())]
    # Offline, all commits between are listed.
    with contextlib.suppress(SparkwrightError):
        upstream.fetch_files(between, [path])
    touching = [change for change in between if touches(objects, *change.files[path], lines)]
    whose = "the base has, and the patch does not know"
    if positions["patch"] < positions["base"]:
        whose = "the patch builds on, and the base lacks"
    for change in (touching or between)[:NAMED]:
        yield f"  {whose}: {log(objects, '-1', change.commit)[0].line()}"
