"""The report of a night's drift as the text of an issue: which patches need a person, on which base, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from sparkwright.cherry_picks.drift import Document, Drift, Trial
from sparkwright.core import files
from sparkwright.core.console import markdown_block, markdown_table, markdown_text
from sparkwright.core.errors import FileError
from sparkwright.core.github import Repository
from sparkwright.operate.upkeep import issue
from sparkwright.operate.upkeep.issue import Kept

#: Bytes of the largest report that is read; one of every release of vLLM since the lock has some hundred thousand.
LARGEST = 16 * 1024 * 1024
#: Characters of the largest issue; GitHub takes 65,536.
LONGEST = 60_000
#: States that ask for a person: the patch has to be mended, or can go.
ASKING = ("conflict", "likely-upstream", "already-upstream", "empty")

_MEANS = {
    "conflict": "conflicts",
    "likely-upstream": "is upstream most likely",
    "already-upstream": "is upstream",
    "empty": "changes nothing",
}


def read(path: Path) -> tuple[Drift, ...]:
    """
    Return the drifts in the file at *path*, the JSON document of ``sparkwright patch drift``.

    Raises:
        file-invalid: It is not one, or tells of a drift that failed.
    """

    def no_report(what: str, details: Sequence[str] = ()) -> FileError:
        return FileError("file-invalid", f"{path} is no report of drift.", details=[what, *details])

    made = files.read_json(path, Document, limit=LARGEST, failure=no_report)
    if made.error:
        raise FileError(
            "file-invalid", f"{path} tells of a drift that failed.", details=[f"{made.error.get('reference')}: {made.error.get('what')}"]
        )
    return tuple(one.of for one in made.drift)


def asking(drifts: Sequence[Drift]) -> list[tuple[Drift, Trial]]:
    """Return what needs a person: the state of each patch on the newest base, where that is one of `ASKING`."""
    return [(one, trial) for one in drifts for trial in one.trials if trial.base == one.bases[-1] and trial.state in ASKING]


def body(drifts: Sequence[Drift], *, run: str = "") -> str:
    """
    Return the text of the issue, which depends on nothing but the arguments.

    Args:
        run: Where the night's log is; empty where it is nowhere.
    """
    found = asking(drifts)
    lines = [_first(drifts, len(found)), ""]
    if found:
        rows = [[one.stack, one.fork, trial.patch, trial.base, _MEANS[trial.state]] for one, trial in found]
        lines += [markdown_table(["stack", "fork", "patch", "on", "what"], rows)]
    for one, trial in found:
        lines += list(_patch(one, trial))
    lines += [f"All patches of {markdown_text(one.stack)}, {markdown_text(one.fork)}: {_counts(one)}." for one in drifts if one.trials]
    lines += ["", f"The night's log: <{run}>"] if run else []
    text = "\n".join(lines).rstrip() + "\n"
    return text if len(text) <= LONGEST else text[:LONGEST].rpartition("\n")[0] + "\n```\n\n*Cut here; the night's log has the rest.*\n"


def _first(drifts: Sequence[Drift], count: int) -> str:
    days = max((one.day for one in drifts), default="")
    newest = ", ".join(f"{markdown_text(one.fork)} {markdown_text(one.bases[-1])}" for one in drifts if one.bases)
    what = f"{count} of the patches ask for a person" if count else "every patch applies"
    return f"As of {markdown_text(days)}, on the newest of each upstream ({newest or 'none was reached'}), {what}."


def _patch(one: Drift, trial: Trial) -> Iterator[str]:
    yield f"### {markdown_text(trial.patch)} of {markdown_text(one.stack)} {_MEANS[trial.state]}"
    yield ""
    if trial.state == "conflict":
        yield markdown_block(trial.says or ("git does not say where",))
        yield f"To mend it: `sparkwright patch rebase --stack {markdown_text(one.stack)} --fork {markdown_text(one.fork)} --onto NAME`, then `sparkwright patch export`."
    else:
        yield f"Because: {markdown_text(trial.proof)}. The next bump drops it, or `patch export --drop` does."
    yield ""


def _counts(one: Drift) -> str:
    newest = [trial for trial in one.trials if trial.base == one.bases[-1]]
    return f"{sum(trial.state in ('applies', 'moves') for trial in newest)} of {len(newest)} apply on {markdown_text(one.bases[-1])}"


def keep_issue(repository: Repository, drifts: Sequence[Drift], *, author: str, run: str = "") -> Kept:
    """
    Open, update or close the issue about *drifts*; see `issue.keep` and `body`.

    Raises:
        github-unreachable, github-refused, github-limited: It cannot be done.
    """
    found = asking(drifts)
    stacks = ", ".join(dict.fromkeys(one.stack for one, _ in found))
    count = f"{len(found)} patches of {stacks} ask" if len(found) != 1 else f"a patch of {stacks} asks"
    title = f"Drift: {count} for a person" if found else "Drift"
    return issue.keep(repository, "drift", title, body(drifts, run=run), author=author, wanted=bool(found))
