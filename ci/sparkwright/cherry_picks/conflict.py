"""
The conflict report: why a patch does not apply, in the order in which a maintainer asks.

It names the patch and the base; each hunk, and what is in its place; the upstream commits that
changed those lines, which are found by the ids of the files in the base and in the patch, so that a
release archive will do; and the earlier patches of ours that changed the file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from sparkwright.cherry_picks import apply
from sparkwright.cherry_picks.patch import (
    Hunk,
    Patch,
    PatchError,
    Section,
    lines_of,
    sections,
)
from sparkwright.cherry_picks.upstream import (
    Base,
    Upstream,
    base_of,
    changes,
    evidence,
    log,
    touches,
)
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.git import SUBMODULE
from sparkwright.forks.fetch import FetchedSource

#: Lines of a hunk, columns of a line, and upstream commits that a report shows.
SHOWN, COLUMNS, NAMED = 8, 96, 20
#: Lines of a hunk that are compared, in a time that grows with the square of their number.
COMPARED = 2000

#: State of a hunk on the tree → its text. ``gone``: its lines are nowhere.
_HUNK = {
    "fits": "fits",
    "moved": "its lines are at line {line}",
    "ambiguous": "its lines are at several places, the nearest at line {line}",
    "already": "is there already, at line {line}",
    "gone": "its lines are not there; the likeliest place is line {line}",
}

_NO_HISTORY = "upstream's history is not in the store; `sparkwright patch drift` gets it"
_HOLDS = {None: "could not be tested", True: "yes", False: "no"}


def _hunk(text: bytes, hunk: Hunk) -> dict[str, Any]:
    """
    Return the report of *hunk* on the file content *text*, without the other hunks: its line there,
    from 1, and of a hunk that is gone, the differing lines that it replaces and those at that line.
    """
    report = {"label": hunk.label, "state": "gone", "line": 0, "expected": [], "found": []}
    for number, done in ((hunk.start, False), (hunk.new_start, True)):
        if fitting := hunk.fitting_lines(text, done=done):
            nearest = min(fitting, key=lambda line: abs(line - number))
            moved = "moved" if len(fitting) == 1 else "ambiguous"
            state = "already" if done else "fits" if nearest == number else moved
            return report | {"state": state, "line": nearest}
    wanted, have = hunk.before[:COMPARED], lines_of(text)
    block = SequenceMatcher(None, wanted, have).find_longest_match()
    line = max(block.b - block.a if block.size else min(hunk.start, len(have)) - 1, 0)
    there = have[line : line + len(wanted)]
    expected = _shown([line for line in wanted if line not in there])
    present = _shown([line for line in there if line not in wanted])
    return report | {"line": line + 1, "expected": expected, "found": present}


def _shown(lines: Sequence[bytes]) -> list[str]:
    """Return the first lines as text, with a sign for a missing line end."""
    texts = [line.decode("utf-8", "replace") for line in lines[:SHOWN]]
    return [(text[:-1] if text.endswith("\n") else f"{text}␄")[:400] for text in texts]


def _fits(report: Mapping[str, Any]) -> bool:
    """Return True if the change of the file, or the hunk, of *report* applies."""
    if "hunks" in report:
        return not report["problem"] and all(map(_fits, report["hunks"]))
    return report["state"] in ("fits", "moved")


def error_with_report(
    upstream: Upstream,
    source: FetchedSource,
    patches: Sequence[Patch],
    outcome: apply.Outcome,
) -> PatchError:
    """
    Return the error for the conflict *outcome* of the last of *patches* on *source*, with the
    report.
    """
    *earlier, patch = patches
    options = f"--stack {upstream.context.project.stack} --fork {upstream.fork}"
    commands = [f"sparkwright patch {name} {options}" for name in ("rebase", "export")]
    if patch.pick:
        exclude = f"sparkwright patch pick {patch.pick} {options} --exclude PATH=REASON"
        commands = [exclude, commands[0]]
    return explain(upstream, base_of(source), outcome, patch, earlier, commands=commands)


def explain(
    upstream: Upstream,
    base: Base,
    outcome: apply.Outcome,
    patch: Patch,
    earlier: Sequence[Patch],
    *,
    commands: Sequence[str],
    todo: str = "",
) -> PatchError:
    """
    Return the error of *patch*, which does not apply, with the report: `patch-conflict`, or
    `patch-already-upstream` if the base has the change in another form.

    Args:
        base: The base of the series; only its files are states of upstream's branch.
        outcome: Of the patch, with the tree that it was tried on.
        earlier: The patches before it.
        commands: Command lines to go on with.
    """
    objects, fork = upstream.context.objects, upstream.fork
    present, original = (
        {path: blob for path, (mode, blob) in objects.paths(name).items() if mode[:3] == "100"}
        for name in (outcome.tree, base.tree)
    )
    files = [
        _file(upstream, outcome.tree, present, original, part)
        | {"ours": [patch.name for patch in earlier if (part.old or part.new) in patch.files]}
        for part in sections(patch.data)
    ]
    tried = apply.try_patches(objects, base.tree, [patch])
    tests = evidence(upstream, base, [patch], tried)[patch.name]
    taken = any(test.holds for test in tests)
    report = {
        "fork": fork,
        "base": base.name,
        "tree": outcome.tree,
        "patch": patch.name,
        "subject": patch.subject,
        "author": patch.author,
        "page": upstream.ledger.page(patch.pick) if patch.pick else "",
    }
    rows = [f"{key}: {value}" for key, value in report.items() if value]
    rows += [row for file in files for row in _rows(file)]
    rows += [
        f"already upstream by {test.test}: {_HOLDS[test.holds]}, {test.says}" for test in tests
    ]
    if patch.pick and taken:
        stack = upstream.context.project.stack
        drop = f"sparkwright patch pick {patch.pick} --stack {stack} --fork {fork} --drop"
        commands = [drop, *[command for command in commands if "--exclude" not in command]]
    rows += [f"to go on: {command}" for command in commands]
    wrong = ", ".join(file["path"] for file in files if not _fits(file))
    what = f"is in {fork} already, and changed since" if taken else f"does not apply to {fork}"
    return PatchError(
        "patch-already-upstream" if taken else "patch-conflict",
        f"{patch.name} {what}{': ' if wrong else ''}{wrong}.",
        details=[*outcome.says, *rows],
        data={"conflict": {**report, "files": files, "evidence": tests, "commands": commands}},
        todo=todo,
    )


def _file(
    upstream: Upstream,
    tree: str,
    present: Mapping[str, str],
    original: Mapping[str, str],
    part: Section,
) -> dict[str, Any]:
    """
    Return the report of the file that *part* changes: the problem, apart from its hunks; the hunks;
    the upstream commits that the patch builds on and the base lacks, or that the base has and that
    are newer than the patch; and a note of what could not be determined.

    Args:
        present, original: The files of the tree and of its base: path → blob id.
    """
    path = part.old or part.new
    report: dict[str, Any] = {"path": path, "problem": "", "hunks": [], "note": ""}
    report |= {"base_lacks": [], "base_has": []}
    if not part.old:
        report["problem"] = "is there already" if path in present else ""
    elif f" {SUBMODULE}\n".encode() in part.data:
        report["problem"] = "is a submodule, which no patch can change: leave it out"
    elif path not in present:
        report["problem"] = "not in the tree"
    elif part.binary:
        same = part.blob and present[path].startswith(part.blob)
        report["problem"] = "" if same else "has another content than the patch is for"
    else:
        text = upstream.context.objects.blob(tree, path) or b""
        report["hunks"] = [_hunk(text, hunk) for hunk in part.hunks]
        pairs = zip(part.hunks, report["hunks"], strict=True)
        unfitting = [hunk for hunk, state in pairs if not _fits(state)]
        if lines := [line for hunk in unfitting for line in hunk.before]:
            blobs = {"base": original.get(path, ""), "patch": part.blob}
            report |= _between(upstream, path, lines, blobs)
    return report


def _between(
    upstream: Upstream, path: str, lines: Sequence[bytes], blobs: Mapping[str, str]
) -> dict[str, Any]:
    """
    Return what a file's report says of upstream: the commits of the branch between the file of the
    base and that of the patch, found by their ids *blobs*, which change *lines*.
    """
    objects = upstream.context.objects
    tip = upstream.mirror.fetched(upstream.ledger.branch) if upstream.mirror else ""
    if not tip:
        return {"note": _NO_HISTORY}
    listed, positions = changes(objects, tip, [path]), dict[str, int]()
    for whose, blob in blobs.items():
        for number, change in enumerate(listed):
            if blob and change.files[path][1].startswith(blob):
                positions.setdefault(whose, number)
        if whose not in positions:
            return {"note": f"the {whose}'s {path} is no state of upstream's branch"}
    between = listed[min(positions.values()) : max(positions.values())]
    # Offline, all commits between are listed.
    with contextlib.suppress(SparkwrightError):
        upstream.fetch_files(between, [path])
    touching = [change for change in between if touches(objects, *change.files[path], lines)]
    field = "base_lacks" if positions["patch"] < positions["base"] else "base_has"
    shown = (touching or between)[:NAMED]
    return {field: [log(objects, "-1", change.commit)[0] for change in shown]}


def _rows(file: Mapping[str, Any]) -> list[str]:
    """Return the report of a file as text."""
    if _fits(file):
        return [f"{file['path']}: fits"]
    rows = [f"{file['path']}: {file['problem'] or 'conflict'}"]
    for hunk in file["hunks"]:
        rows.append(f"  {hunk['label']}: {_HUNK[hunk['state']].format(line=hunk['line'])}")
        rows += [f"    wants: {line}"[:COLUMNS] for line in hunk["expected"]]
        rows += [f"    finds: {line}"[:COLUMNS] for line in hunk["found"]]
    return [
        *rows,
        *(
            f"  the patch builds on, and the base lacks: {commit.line()}"
            for commit in file["base_lacks"]
        ),
        *(
            f"  the base has, and the patch does not know: {commit.line()}"
            for commit in file["base_has"]
        ),
        *(f"  touched by our {name} before" for name in file["ours"]),
        *([f"  ({file['note']})"] if file["note"] else []),
    ]
