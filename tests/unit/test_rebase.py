"""
Rebase and export: a maintainer works with plain git in a real worktree, under a configuration of the worst kind.

What is written is what was committed there, or nothing; no patch is ever lost without a word.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from sparkwright.cherry_picks import pick, rebase, series
from sparkwright.cherry_picks.ledger import Record
from sparkwright.cherry_picks.pick import Seen
from sparkwright.cli import main
from sparkwright.errors import (
    ExportMismatch,
    NotProvided,
    PatchConflict,
    PatchInvalid,
    PatchLost,
    RebaseUnfinished,
    UsageError,
)

if TYPE_CHECKING:
    from tests.unit.conftest import Host

LINES = [f"line {number}\n" for number in range(1, 61)]
TEXT = "".join(LINES).encode()
TRAILERS = "Upstream-Status: Pending\nReason: the test wants it\nDrop-When: the test ends"

#: What a maintainer may have in a configuration file; each would break or change something, if it got through.
WORST = """
[user]
    name = Maintainer
    email = m@m.example
[commit]
    gpgsign = true
[gpg]
    program = /bin/false
[core]
    hooksPath = {hooks}
    autocrlf = true
    whitespace = trailing-space,cr-at-eol
[diff]
    noprefix = true
    algorithm = patience
    context = 7
[apply]
    whitespace = fix
[am]
    threeWay = false
[mailinfo]
    scissors = true
[i18n]
    commitEncoding = ISO-8859-1
[status]
    showUntrackedFiles = no
[format]
    subjectPrefix = OURS
    signature = me
[rebase]
    autoSquash = true
"""


def edited(*changes: tuple[int, str], text: bytes = TEXT) -> bytes:
    """Return *text* with other lines in place of some, by their number in the original."""
    made = text.decode()
    for number, line in changes:
        assert made.count(f"line {number}\n") == 1
        made = made.replace(f"line {number}\n", line)
    return made.encode()


class Maintainer:
    """Somebody with git, and with a configuration, in the worktree of the host's fork."""

    def __init__(self, host: Host) -> None:
        self.folder = host.root / ".rebase" / host.stack / host.fork

    def git(self, *words: str, check: bool = True, **env: str) -> str:
        """Run git as people do."""
        environment = {**os.environ, "GIT_EDITOR": "true", "LC_ALL": "C.UTF-8", **env}
        done = subprocess.run(["git", *words], cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout.rstrip("\n")

    def write(self, name: str, data: bytes) -> None:
        (self.folder / name).write_bytes(data)

    def commit(self, name: str, data: bytes, message: str) -> None:
        """Commit a new content of one file."""
        self.write(name, data)
        self.git("add", "--force", name)
        self.git("commit", "--quiet", "-m", message)

    def subjects(self) -> list[str]:
        return self.git("log", "--reverse", "--format=%s", "refs/sparkwright/base..HEAD").splitlines()


@pytest.fixture(name="maintainer")
def _maintainer(host: Host, tmp_path: Path) -> Maintainer:
    """Return a maintainer whose every hook fails and whose signatures do, too."""
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in ("applypatch-msg", "pre-applypatch", "pre-commit", "commit-msg", "prepare-commit-msg", "post-checkout", "pre-rebase", "post-applypatch"):
        (hooks / name).write_text("#!/bin/sh\nexit 1\n")
        (hooks / name).chmod(0o755)
    (Path(os.environ["HOME"]) / ".gitconfig").write_text(WORST.format(hooks=hooks))
    return Maintainer(host)


@pytest.fixture(name="made")
def _made(host: Host) -> Host:
    """Return the host with a release and three patches of ours on it; one touches a file with CRLF line ends and trailing blanks."""
    host.work.commit({"a.txt": TEXT, "b.txt": TEXT, "dos.txt": b"one\r\ntwo  \r\nthree\r\n", ".gitattributes": b"*.txt text=auto\n"}, "Release 1")
    host.lock()
    host.ours("first.patch", {"a.txt": edited((10, "first\n"))}, "Do the first")
    host.ours("second.patch", {"a.txt": edited((10, "first\n"), (30, "second\n")), "dos.txt": b"one\r\ntwo  \r\nthree\r\nfour  \r\n"}, "Größe: the second")
    host.ours("third.patch", {"b.txt": edited((50, "third  \n")), "new file.txt": b"no newline"}, "[Misc] The third")
    return host


def do(host: Host, verb: str, *words: str) -> int:
    """Run the command line on the host's project."""
    return main.run([verb, *host.words, *words])


def folder(host: Host) -> dict[str, bytes]:
    """Return every file of the checkout but those of worktrees: path → bytes."""
    paths = (path for path in host.root.rglob("*") if path.is_file() and ".rebase" not in path.relative_to(host.root).parts)
    return {str(path.relative_to(host.root)): path.read_bytes() for path in paths}


def patches(host: Host) -> dict[str, bytes]:
    """Return the series as a reader sees it, in order."""
    return {name: (host.series / name).read_bytes() for name in series.names(host.series)}


def later(host: Host, *changes: tuple[int, str], top: bytes = b"", **more: bytes) -> str:
    """Let upstream go on: other lines in a.txt, and new ones on top of both files. Return the commit."""
    files = {"a.txt": top + edited(*changes), "b.txt": top + TEXT}
    commit = host.work.commit({**files, **{name.replace("_", "."): data for name, data in more.items()}}, "Go on")
    host.push()
    return commit


def carry(host: Host, number: int, *changes: dict[str, bytes | None], excluded: Sequence[str] = ()) -> Record:
    """Open a pull request and let the stack carry it."""
    head = host.pull(number, *changes, start="v1")
    seen = Seen("api", f"Improve number {number}", "octocat", "open", head, "", "main")
    record = pick.record(host.session(), host.ledger, seen, number, "the test wants it", "the test ends")
    record = msgspec.structs.replace(record, stacks={host.stack: dict.fromkeys(excluded, "the test leaves it out")})
    host.write(*host.ledger.records, record)
    return record


# On the locked source.


def test_a_rebase_onto_the_locked_source_exports_the_same_bytes(made: Host, maintainer: Maintainer) -> None:
    """The worktree holds the series as commits; exported unchanged, every reviewed file is as it was, and the worktree is gone."""
    before = folder(made)
    assert do(made, "rebase") == 0
    assert maintainer.subjects() == ["Do the first", "Größe: the second", "[Misc] The third"]
    assert maintainer.git("status", "--porcelain", "--untracked-files=all") == ""
    assert do(made, "export") == 0

    assert folder(made) == before
    assert not maintainer.folder.exists()


def test_an_amended_commit_becomes_its_file(made: Host, maintainer: Maintainer) -> None:
    """What a maintainer amends changes that patch, and no other byte, although every hook and signature of hers would fail."""
    before = patches(made)
    do(made, "rebase")
    maintainer.write("b.txt", edited((50, "the third\n")))
    maintainer.git("commit", "--quiet", "--all", "--amend", "--no-edit")
    do(made, "export")
    after = patches(made)

    assert {**after, "third.patch": b""} == {**before, "third.patch": b""}
    assert unindexed(after["third.patch"]) == unindexed(before["third.patch"]).replace(b"+third  \n", b"+the third\n")
    assert list(after) == list(before)


def unindexed(data: bytes) -> bytes:
    """Return a patch without the ids of its files."""
    return re.sub(rb"(?m)^index .*\n", b"", data)
