"""
The worktree of a rebase: a repository of its own in the checkout, where a maintainer works on the series with plain git.

It holds its own objects, since a cache may vanish and a person's work may not; it appears and vanishes by rename; and its configuration
outranks the maintainer's wherever that could change bytes.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sparkwright.cherry_picks import series_git
from sparkwright.cherry_picks.already_upstream import Base
from sparkwright.cherry_picks.patch import Patch
from sparkwright.core import git
from sparkwright.core.git_store import Objects
from sparkwright.forks.context import Session
from sparkwright.forks.errors import SourceError

#: The worktree's branch, and the ref of the base below it.
BRANCH, BASE = "series", "refs/sparkwright/base"

#: The worktree's own configuration, which outranks the maintainer's: what would change bytes, or keep git am from going on.
_CONFIG = {
    "am.keepcr": "true",
    "apply.ignoreWhitespace": "no",
    "apply.whitespace": "nowarn",
    "commit.gpgSign": "false",
    "core.autocrlf": "false",
    "core.hooksPath": "/dev/null",
    "i18n.commitEncoding": "UTF-8",
    "mailinfo.scissors": "false",
}


class State(msgspec.Struct, frozen=True):
    """
    What a worktree was made for.

    Attributes:
        dropped: Patches that the new base has already, each with the evidence.
        picks: Tree after each pick, by its number; an edit of a pick is none of the patch files'.
        files: Reviewed files to write together with the series (a bump's lock, say): path below the checkout → text.
        before: Digests of what it was made from, and of what *files* replaces, by name; see `export.pins`.
        said: Messages that a mail cannot carry, by what is left of them; see `commits.carried`.
    """

    fork: str
    stack: str
    base: Base
    dropped: dict[str, str]
    picks: dict[int, str]
    files: dict[str, str] = {}
    before: dict[str, str] = {}
    said: dict[str, str] = {}


def folder_of(session: Session, fork: str) -> Path:
    """Return where the worktree of *fork* lies: in the checkout, since a cache may vanish and a person's work may not."""
    return session.project.root / ".rebase" / session.project.stack / fork


def make(objects: Objects, folder: Path, base: str, tip: str, state: State) -> None:
    """Make the worktree beside its place and put it there as a whole."""
    scratch = _scratch(folder)
    scratch.mkdir(parents=True)
    git.run(["init", "-q", "."], cwd=scratch)
    for name, value in _CONFIG.items():
        git.run(["config", name, value], cwd=scratch)
    (scratch / ".git" / "objects" / "info" / "alternates").write_text(f"{objects.path / 'objects'}\n")
    (scratch / ".git" / "info" / "attributes").write_bytes((objects.path / "info" / "attributes").read_bytes())
    git.run(["update-ref", BASE, base], cwd=scratch)
    git.run(["checkout", "-q", "-B", BRANCH, tip], cwd=scratch)
    # Its own copy of what it is made of; beyond that the store is for merges only.
    git.run(["repack", "-q", "-a", "-d", "--window=0", "--threads=1"], cwd=scratch)
    (scratch / ".git" / "sparkwright.json").write_bytes(msgspec.json.encode(state))
    scratch.replace(folder)


def _scratch(folder: Path) -> Path:
    """Return the place beside *folder* for what is not a worktree yet, or no longer; what a killed run left there is removed."""
    scratch = folder.with_name(f".{folder.name}.half")
    shutil.rmtree(scratch, ignore_errors=True)
    return scratch


def am(folder: Path, rest: Sequence[Patch]) -> str:
    """Let git place the rest; where it cannot, it stops as it does for everybody. Return the patch at which it stopped."""
    box = folder / ".git" / "sparkwright-mails"
    box.mkdir()
    names = []
    for number, one in enumerate(rest):
        names.append(str(box / f"{number:04}.mail"))
        Path(names[-1]).write_bytes(series_git.mail(one))
    words = ["am", "--quiet", "--3way", "--keep", "--keep-cr", "--committer-date-is-author-date", *names]
    if not git.run(words, cwd=folder, env=series_git.COMMITTER, check=False)[0]:
        return ""
    at = folder / ".git" / "rebase-apply" / "next"
    return rest[int(at.read_text()) - 1 if at.exists() else 0].name


def unfinished(folder: Path) -> list[str]:
    """Return why the worktree cannot be exported yet."""
    why = ["a patch waits: resolve it, `git add` it, and `git am --continue`"] if (folder / ".git" / "rebase-apply").exists() else []
    why += ["git rebase is not done"] if (folder / ".git" / "rebase-merge").exists() else []
    changed = git.run(["status", "--porcelain", "--untracked-files=all"], cwd=folder)[1].decode().splitlines()
    return why + [f"not committed: {line}" for line in changed[:10]]


def state(folder: Path) -> State:
    """
    Return what the worktree in *folder* was made for.

    Raises:
        not-provided: There is none.
    """
    try:
        return msgspec.json.decode((folder / ".git" / "sparkwright.json").read_bytes(), type=State)
    except (OSError, msgspec.DecodeError):
        raise SourceError("not-provided", f"There is no worktree at {folder}.", todo="Make one with `sparkwright rebase`.") from None


def abort(session: Session, fork: str) -> None:
    """
    Remove the worktree of *fork*, and what was done in it.

    Raises:
        not-provided: There is none.
    """
    folder = folder_of(session, fork)
    if not folder.exists():
        state(folder)
    # Out of its place first: a folder that is removed by half would be neither a worktree nor none.
    scratch = _scratch(folder)
    folder.replace(scratch)
    shutil.rmtree(scratch)


def brought(objects: Objects, folder: Path) -> tuple[str, str]:
    """Bring what was committed in the worktree into the object database, and return its base and its tip."""
    base, tip = git.run(["rev-parse", BASE, "HEAD"], cwd=folder)[1].decode().split()
    # A store that vanished meanwhile gets the base as well.
    wanted = f"{tip}\n^{base}\n" if objects.has(f"{base}^{{tree}}") else f"{tip}\n"
    pack = git.run(["pack-objects", "--quiet", "--revs", "--stdout"], cwd=folder, stdin=wanted.encode())[1]
    objects.run(["unpack-objects", "-q"], stdin=pack)
    return base, tip
