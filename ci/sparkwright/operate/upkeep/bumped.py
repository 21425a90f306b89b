"""A bump as a pull request: the files that it changed, and a text with all that a reviewer would ask for first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from sparkwright.cherry_picks.bump import Bump
from sparkwright.core import git
from sparkwright.core.console import markdown_block, markdown_table, markdown_text
from sparkwright.core.errors import UsageError
from sparkwright.core.github import Repository
from sparkwright.forks.stack import Project
from sparkwright.operate.upkeep import foreseen, proposal
from sparkwright.operate.upkeep.foreseen import Foreseen
from sparkwright.operate.upkeep.proposal import Proposed

#: Folders whose files a bump writes.
FOLDERS = ("forks", "cherry_picks")
#: Characters of the largest text; GitHub takes 65,536.
LONGEST = 60_000

_MEANS = {
    "applies": "applies", "moves": "applies at other lines, and is written anew", "already-upstream": "is upstream, and is dropped",
    "likely-upstream": "is upstream most likely", "empty": "changes nothing, and is dropped", "conflict": "conflicts",
}  # fmt: skip


def head(root: Path) -> str:
    """Return the commit that the checkout is at."""
    return git.run(["rev-parse", "--verify", "HEAD"], cwd=root)[1].decode().strip()


def changed(root: Path) -> dict[str, bytes | None]:
    """Return the files of `FOLDERS` that differ from the checkout's commit: path → bytes, None for one that is gone."""
    out = git.run(["status", "--porcelain", "-z", "--untracked-files=all", "--no-renames", "--", *FOLDERS], cwd=root)[1]
    paths = [row[3:] for row in out.decode("utf-8", "surrogateescape").split("\0") if row]
    return {path: (root / path).read_bytes() if (root / path).is_file() else None for path in paths}


def clean(root: Path) -> None:
    """
    Refuse to begin where there are changes that are not the bump's.

    Raises:
        UsageError: Files of `FOLDERS` differ from the checkout's commit.
    """
    if found := sorted(changed(root)):
        todo = "Commit them or take them back first; the pull request is to hold the bump and nothing else."
        raise UsageError("usage", "The checkout has changes of its own.", details=found[:20], todo=todo)


def branch(stack: str, made: Bump) -> str:
    """Return the name of the branch of a bump."""
    return "bump/" + "-".join(re.sub(r"[^A-Za-z0-9._]+", "-", part).strip("-.") for part in (stack, made.fork, made.base.name))


def title(stack: str, made: Bump) -> str:
    """Return the first line of the change."""
    return f"{made.fork} of {stack} to {made.base.name}"


def body(stack: str, made: Bump, range_diff: Sequence[str], units: Foreseen | None) -> str:
    """Return the text of the pull request."""
    rows = [[one.patch, _MEANS[one.state], made.gone.get(one.patch, "")] for one in made.trials]
    predicted = foreseen.lines(units) if units else ["nothing of this fork is compiled"]
    parts = [
        f"Made by `sparkwright patch bump`: {markdown_text(made.fork)} of {markdown_text(stack)} to {markdown_text(made.base.name)}. Nothing was built yet.", "",
        "### Patches", "", markdown_table(["patch", "on the new base it", "because"], rows),
        "### Range-diff of both series", "", markdown_block(range_diff or ["no patches"]),
        "### Predicted recompiles", "", *(f"- {markdown_text(line)}" for line in predicted),
    ]  # fmt: skip
    text = "\n".join(parts) + "\n"
    return text if len(text) <= LONGEST else text[:LONGEST].rpartition("\n")[0] + "\n```\n\n*Cut here; `git diff` has the rest.*\n"


def propose(
    repository: Repository, project: Project, made: Bump, range_diff: Sequence[str], units: Foreseen | None, *, base: str
) -> Proposed:
    """
    Open or update the pull request of a bump of *project* against the branch *base*.

    Raises:
        github-unreachable, github-refused, github-limited: It cannot be done.
    """
    root, stack = project.root, project.stack
    texts = {"title": title(stack, made), "body": body(stack, made, range_diff, units)}
    return proposal.propose(repository, base, head(root), branch(stack, made), changed(root), **texts)
