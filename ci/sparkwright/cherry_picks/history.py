"""
Questions to the history of an upstream, whose mirror has all commits and trees, but only some of
the files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from sparkwright.cherry_picks import patch
from sparkwright.core.console import one_line
from sparkwright.core.git_store import Objects

#: The id of an empty tree, which git knows without having it.
_EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
_NUMBER = re.compile(r"\(#(\d+)\)\s*$")


class Commit(msgspec.Struct, frozen=True):
    """An upstream commit: its author, the day on which it reached the branch, and its subject."""

    commit: str
    author: str
    date: str
    subject: str

    @property
    def number(self) -> int:
        """Number of the pull request, which ends the subject of a squash; 0 if there is none."""
        match = _NUMBER.search(self.subject)
        return int(match[1]) if match else 0

    def line(self) -> str:
        """Return the commit as one line of text."""
        return f"{self.commit[:12]} {self.date} {self.subject}"


def _log(objects: Objects, *arguments: str) -> list[Commit]:
    words = ["log", "-z", "--date=format-local:%Y-%m-%d", "--format=%H%x00%an%x00%cd%x00%s"]
    parts = objects.run([*words, *arguments, "--"])[1].decode("utf-8", "replace").split("\0")
    # Names and subjects are untrusted text.
    return [
        Commit(*(one_line(part, 300) for part in parts[at : at + 4]))
        for at in range(0, len(parts) - 3, 4)
    ]


def commit(objects: Objects, name: str) -> Commit:
    """Return the commit that *name* means."""
    return _log(objects, "-1", name)[0]


def is_ancestor(objects: Objects, ancestor: str, descendant: str) -> bool | None:
    """
    Return whether *ancestor* is part of the history of *descendant*; None if that history is
    incomplete here.
    """
    status, _, errors = objects.run(
        ["merge-base", "--is-ancestor", ancestor, descendant], check=False
    )
    return None if errors or status > 1 else status == 0


def merge_base(objects: Objects, first: str, second: str) -> str | None:
    """Return the best common ancestor of two commits, or None if they have none."""
    status, out, _ = objects.run(["merge-base", first, second], check=False)
    return out.decode().split()[0] if status == 0 else None


def parents(objects: Objects, commit: str) -> list[str]:
    """Return the parents of *commit*, which themselves need not be there."""
    head = (
        objects.run(["cat-file", "commit", commit])[1]
        .decode("utf-8", "replace")
        .partition("\n\n")[0]
    )
    return [line.split()[1] for line in head.splitlines() if line.startswith("parent ")]


def before(objects: Objects, commit: str) -> str:
    """Return the first parent of *commit*, or the empty tree."""
    return next(iter(parents(objects, commit)), _EMPTY_TREE)


def revisions(objects: Objects, *arguments: str) -> list[str]:
    """Return the commits that ``git rev-list`` selects, oldest first."""
    return objects.run(["rev-list", "--reverse", *arguments, "--"])[1].decode().split()


def merged_as(objects: Objects, number: int, tip: str) -> Commit | None:
    """
    Return the squash of pull request *number* on the branch ending in *tip*: its subject ends with
    the number.
    """
    commits = _log(
        objects, "--first-parent", "--extended-regexp", f"--grep=\\(#{number}\\)[[:space:]]*$", tip
    )
    return next((squash for squash in reversed(commits) if squash.number == number), None)


def merged_with(objects: Objects, head: str, tip: str) -> Commit | None:
    """Return the merge that brought the commit *head* into the branch ending in *tip*."""
    merges = revisions(objects, "--first-parent", "--min-parents=2", tip, f"^{head}")
    merge = next((name for name in merges if head in parents(objects, name)[1:]), None)
    return commit(objects, merge) if merge else None


def authored(objects: Objects, *arguments: str) -> list[bytes]:
    """
    Return author, date and message, which a rebase keeps, of the commits that ``git log`` selects,
    newest first.
    """
    return objects.run(
        ["log", "-z", "--no-merges", "--format=%an%n%ae%n%at%n%B", *arguments, "--"]
    )[1].split(b"\0")[:-1]


def states(objects: Objects, path: str, tip: str) -> list[tuple[str, str]]:
    """
    Return the states of the file *path* on the branch ending in *tip*, newest first: commit and
    blob id (zeros: no file).
    """
    words = [
        "log",
        "--first-parent",
        "-m",
        "--raw",
        "--no-abbrev",
        "--no-renames",
        "-z",
        "--format=%x01%H",
    ]
    out = objects.run([*words, tip, "--", f":(literal){path}"])[1].decode(
        "utf-8", "surrogateescape"
    )
    entries = [entry.partition(":") for entry in out.split("\x01")[1:]]
    return [(name.strip("\0\n "), raw.split()[3] if raw else "") for name, _, raw in entries]


def touches(objects: Objects, old: str, new: str, lines: Sequence[bytes]) -> bool:
    """
    Return whether a change from blob *old* to blob *new* removes or adds one of *lines*; True if a
    blob is not there.
    """
    empty = objects.run(["hash-object", "-w", "--stdin"], stdin=b"")[1].decode().strip()
    sides = [blob if blob.strip("0") else empty for blob in (old, new)]
    words = ["diff", "--no-color", "--no-ext-diff", "--no-textconv", "-U0", *sides, "--"]
    status, out, _ = objects.run(words, check=False)
    wanted = {line for line in lines if line.strip()}
    parts = patch.sections(out)
    return status != 0 or any(
        part.binary or any(wanted & {*hunk.before, *hunk.after} for hunk in part.hunks)
        for part in parts
    )


def range_diff(objects: Objects, old: tuple[str, str], new: tuple[str, str]) -> list[str]:
    """
    Return git's comparison of two series of commits, each (base, tip), whose files must be there.
    """
    ranges = [f"{base}..{tip}" for base, tip in (old, new)]
    out = objects.run(["range-diff", "--no-color", "--creation-factor=80", *ranges])[1].decode(
        "utf-8", "replace"
    )
    # It quotes both series, whose control characters must not reach a terminal.
    return [
        "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in line)[
            :200
        ]
        for line in out.split("\n")[:-1]
    ]
