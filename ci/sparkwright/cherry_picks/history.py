"""Questions to an upstream's history: what is an ancestor, what was merged, which commits touched these lines."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from sparkwright.cherry_picks import diff
from sparkwright.core.git_store import Objects
from sparkwright.core.github import one_line

_FORMAT = "--format=%H%x00%an%x00%cd%x00%s"
#: The id of an empty tree, which git knows without having it.
_NOTHING = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
_NUMBER = re.compile(r"\(#(\d+)\)\s*$")


class Commit(msgspec.Struct, frozen=True):
    """An upstream commit: who, on which day it reached the branch, and its subject."""

    commit: str
    author: str
    date: str
    subject: str

    @property
    def number(self) -> int:
        """Number of the pull request that it was, by the habit of squash merges; 0 where the subject has none."""
        found = _NUMBER.search(self.subject)
        return int(found[1]) if found else 0

    def line(self) -> str:
        return f"{self.commit[:12]} {self.date} {self.subject}"


def _log(objects: Objects, *arguments: str) -> list[Commit]:
    out = objects.run(["log", "-z", "--date=format-local:%Y-%m-%d", _FORMAT, *arguments])[1].decode("utf-8", "replace")
    parts = out.removesuffix("\0").split("\0") if out else []
    # Names and subjects are anybody's words.
    return [Commit(*(one_line(part, 300) for part in parts[at : at + 4])) for at in range(0, len(parts) - 3, 4)]


def commit(objects: Objects, name: str) -> Commit:
    """Return the commit that *name* means."""
    return _log(objects, "-1", name, "--")[0]


def is_ancestor(objects: Objects, commit: str, of: str) -> bool | None:
    """Is *commit* part of the history of the commit *of*? None where a part of that history is not there."""
    status, _, said = objects.run(["merge-base", "--is-ancestor", commit, of], check=False)
    # git says no, too, where it could not read on; then it complains.
    return None if said or status > 1 else status == 0


def merge_base(objects: Objects, one: str, other: str) -> str | None:
    """Return the best common ancestor of two commits, or None when they have none."""
    status, out, _ = objects.run(["merge-base", one, other], check=False)
    return out.decode().split()[0] if status == 0 else None


def parents(objects: Objects, commit: str) -> list[str]:
    """Return the parents of *commit*, which themselves need not be there."""
    head = objects.run(["cat-file", "commit", commit])[1].decode("utf-8", "replace").partition("\n\n")[0]
    return [line.split()[1] for line in head.splitlines() if line.startswith("parent ")]


def parent(objects: Objects, commit: str) -> str:
    """Return the first parent of *commit*; empty when it has none."""
    return next(iter(parents(objects, commit)), "")


def before(objects: Objects, commit: str) -> str:
    """Return what *commit* is a change of: its first parent, or the empty tree."""
    return parent(objects, commit) or _NOTHING


def first_parents(objects: Objects, after: str, upto: str) -> list[str]:
    """Return the commits of the branch that ends in *upto*, from the first that *after* lacks to *upto* itself."""
    return objects.run(["rev-list", "--first-parent", "--reverse", upto, f"^{after}", "--"])[1].decode().split()


def merged_as(objects: Objects, number: int, tip: str) -> Commit | None:
    """Return the squash that brought pull request *number* into the branch ending in *tip*: its subject ends with the number."""
    found = _log(objects, "--first-parent", "--extended-regexp", f"--grep=\\(#{number}\\)[[:space:]]*$", tip, "--")
    return next((one for one in reversed(found) if one.number == number), None)


def merged_with(objects: Objects, head: str, tip: str) -> Commit | None:
    """Return the merge that brought the commit *head*, as its author made it, into the branch ending in *tip*."""
    rows = objects.run(["rev-list", "--first-parent", "--min-parents=2", "--parents", tip, f"^{head}", "--"])[1].decode().splitlines()
    found = [row.split()[0] for row in rows if head in row.split()[2:]]
    return commit(objects, found[-1]) if found else None


def own(objects: Objects, base: str, head: str) -> list[str]:
    """Return the commits of a pull request, oldest first: what *head* has and *base* lacks, merges aside."""
    return objects.run(["rev-list", "--reverse", "--topo-order", "--no-merges", head, f"^{base}", "--"])[1].decode().split()


def same_words(objects: Objects, one: str, other: str) -> bool:
    """Have two commits author, time of writing and message in common, as a commit and its rebased self do?"""
    said = [objects.run(["show", "-s", "--format=%an%x00%ae%x00%at%x00%B", name, "--"])[1] for name in (one, other)]
    return said[0] == said[1]


def touching(objects: Objects, paths: Sequence[str], after: str, upto: str) -> list[Commit]:
    """Return the commits between two points that touched any of *paths*, newest first; trees suffice for that."""
    return _log(objects, "--first-parent", "--no-renames", upto, f"^{after}", "--", *(f":(literal){path}" for path in paths))


def states(objects: Objects, path: str, tip: str) -> list[tuple[str, str]]:
    """
    Return the states of the file *path* on the branch ending in *tip*, newest first: (commit, blob id); trees suffice for that.

    The id of a state without the file is all zeros.
    """
    words = ["log", "--first-parent", "-m", "--raw", "--no-abbrev", "--no-renames", "-z", "--format=%x01%H", tip, "--", f":(literal){path}"]
    out = objects.run(words)[1].decode("utf-8", "surrogateescape")
    found = []
    for entry in out.split("\x01")[1:]:
        commit, _, raw = entry.partition(":")
        found.append((commit.strip("\0\n "), raw.split()[3] if raw else ""))
    return found


def touches(objects: Objects, before: str, after: str, lines: Sequence[bytes]) -> bool:
    """
    Does going from the file content (blob) *before* to *after* remove or add one of *lines*?

    What is not there, because the host may not be asked, counts as touched: a report may name too much, not too little.
    """
    sides = [
        one if one.strip("0") else objects.run(["hash-object", "-w", "--stdin"], stdin=b"")[1].decode().strip() for one in (before, after)
    ]
    status, out, _ = objects.run(["diff", "--no-color", "--no-ext-diff", "--no-textconv", "-U0", *sides, "--"], check=False)
    wanted = {line for line in lines if line.strip()}
    parts = diff.sections(out)
    return status != 0 or any(part.binary or any(wanted & {*hunk.before, *hunk.after} for hunk in part.hunks) for part in parts)


def range_diff(objects: Objects, old: tuple[str, str], new: tuple[str, str]) -> list[str]:
    """Return git's comparison of two series of commits, each given as (base, tip); their files must be there."""
    ranges = [f"{base}..{tip}" for base, tip in (old, new)]
    out = objects.run(["range-diff", "--no-color", "--creation-factor=80", *ranges])[1].decode("utf-8", "replace")
    # It quotes both states, and what a terminal takes for a command must not get there.
    plain = "".join(one if one.isprintable() or one in "\t\n" else "\N{REPLACEMENT CHARACTER}" for one in out)
    return [line[:200] for line in plain.split("\n")[:-1]]
