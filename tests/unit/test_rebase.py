"""
Rebase and export: a maintainer works with plain git in a real worktree, under a configuration of the worst kind.

What is written is what was committed there, or nothing; no patch is ever lost without a word.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import msgspec
import pytest
from tests.refusals import refusal
from tests.support.texts import TEXT, edited
from tests.unit.conftest import Host

from sparkwright.cherry_picks import series
from sparkwright.cli import main

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

    def commit(self, name: str, data: bytes, message: str) -> None:
        """Commit a new content of one file."""
        (self.folder / name).write_bytes(data)
        self.git("add", "--force", name)
        self.git("commit", "--quiet", "-m", message)

    def subjects(self) -> list[str]:
        return self.git("log", "--reverse", "--format=%s", "refs/sparkwright/base..HEAD").splitlines()


@pytest.fixture(name="maintainer")
def _maintainer(host: Host, tmp_path: Path) -> Maintainer:
    """Return a maintainer whose every hook fails and whose signatures do, too."""
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in (
        "applypatch-msg",
        "pre-applypatch",
        "pre-commit",
        "commit-msg",
        "prepare-commit-msg",
        "post-checkout",
        "pre-rebase",
        "post-applypatch",
    ):
        (hooks / name).write_text("#!/bin/sh\nexit 1\n")
        (hooks / name).chmod(0o755)
    (Path(os.environ["HOME"]) / ".gitconfig").write_text(WORST.format(hooks=hooks))
    return Maintainer(host)


@pytest.fixture(name="made")
def _made(host: Host) -> Host:
    """Return the host with a release and three patches of ours on it; one touches a file with CRLF line ends and trailing blanks."""
    host.work.commit({"a.txt": TEXT, "b.txt": TEXT, "dos.txt": b"one\r\ntwo  \r\nthree\r\n"}, "Begin")
    # What upstream says of its files must not change them, either.
    host.work.commit({".gitattributes": b"*.txt text=auto eol=crlf\n"}, "Release 1")
    host.lock()
    host.ours("first.patch", {"a.txt": edited((10, "first\n"))}, "Do the first")
    host.ours(
        "second.patch",
        {"a.txt": edited((10, "first\n"), (30, "second\n")), "dos.txt": b"one\r\ntwo  \r\nthree\r\nfour  \r\n"},
        "Größe: the second",
    )
    host.ours("third.patch", {"b.txt": edited((50, "third  \n")), "new file.txt": b"no newline"}, "[Misc] The third")
    return host


def do(host: Host, verb: str, *words: str) -> int:
    """Run the command line on the host's project."""
    return main.run(["patch", verb, *host.words, *words])


def folder(host: Host) -> dict[str, bytes]:
    """Return every file of the checkout but those of worktrees: path → bytes."""
    paths = (path for path in host.root.rglob("*") if path.is_file() and ".rebase" not in path.relative_to(host.root).parts)
    return {str(path.relative_to(host.root)): path.read_bytes() for path in paths}


def patches(host: Host) -> dict[str, bytes]:
    """Return the series as a reader sees it, in order."""
    return {name: (host.series / name).read_bytes() for name in series.names(host.series)}


# On the locked source.


def test_a_rebase_onto_the_locked_source_exports_the_same_bytes(made: Host, maintainer: Maintainer) -> None:
    """The worktree holds the series as commits; exported unchanged, every patch has its exact form again, and the worktree is gone."""
    before, path = folder(made), made.series / "first.patch"
    path.write_bytes(path.read_bytes().replace(b"\n---\n", b"\n---\n a.txt | 2 +-\n\n"))
    assert do(made, "rebase") == 0
    assert maintainer.subjects() == ["Do the first", "Größe: the second", "[Misc] The third"]
    assert do(made, "export") == 0

    assert folder(made) == before
    assert not maintainer.folder.exists()


def unindexed(data: bytes) -> bytes:
    """Return a patch without the ids of its files."""
    return re.sub(rb"(?m)^index .*\n", b"", data)


def test_a_patch_without_a_commit_is_lost_unless_that_is_meant(made: Host, maintainer: Maintainer) -> None:
    """A deleted commit is an error that names its patch; with --drop the patch goes, also by a second run after a killed one."""
    before = patches(made)
    do(made, "rebase")
    maintainer.git("reset", "--quiet", "--hard", "HEAD~1")
    with refusal("patch-lost") as caught:
        do(made, "export")
    assert caught.value.details == ("third.patch",)
    assert patches(made) == before
    assert made.killed(str(made.series), 5, "patch export", "--drop", "third.patch")
    assert not (made.series / "third.patch").exists()
    do(made, "export", "--drop", "third.patch")

    assert patches(made) == {name: before[name] for name in ("first.patch", "second.patch")}


def test_a_name_to_drop_that_no_patch_has_is_refused(made: Host) -> None:
    """Also where no patch is missing: who mistypes a name means another patch."""
    before = folder(made)
    do(made, "rebase")
    with refusal("not-provided", match=r"widget has no patch typo\.patch to drop"):
        do(made, "export", "--drop", "typo.patch", "--drop", "first.patch")
    assert folder(made) == before


def test_a_change_that_only_a_merge_has_is_refused(made: Host, maintainer: Maintainer) -> None:
    """A series is linear: what no commit has but the merge would be lost."""
    before = patches(made)
    do(made, "rebase")
    maintainer.git("checkout", "--quiet", "-b", "side", "HEAD~1")
    maintainer.commit("mine.txt", b"mine\n", f"Mine\n\n{TRAILERS}")
    maintainer.git("checkout", "--quiet", "series")
    maintainer.git("merge", "--quiet", "--no-commit", "--no-ff", "side")
    maintainer.commit("mine.txt", b"mine, and a change of the merge\n", "Merge")
    with refusal("export-mismatch", match="another tree than the worktree"):
        do(made, "export")
    assert patches(made) == before


def test_what_is_not_committed_is_refused(made: Host, maintainer: Maintainer) -> None:
    """A changed file and one that git does not track are named, and nothing is written."""
    before = folder(made)
    do(made, "rebase")
    for name in ("a.txt", "left.orig"):
        (maintainer.folder / name).write_bytes(TEXT)
    with refusal("rebase-unfinished") as caught:
        do(made, "export")

    assert {"not committed:  M a.txt", "not committed: ?? left.orig"} <= set(caught.value.details)
    assert folder(made) == before


# The worktree.


def test_there_is_one_worktree_at_a_time(made: Host, maintainer: Maintainer) -> None:
    """A second rebase is refused, so that no work is overwritten; --abort removes the first, and changes nothing reviewed."""
    before = folder(made)
    do(made, "rebase")
    with refusal("rebase-unfinished", match="There is a worktree of widget already"):
        do(made, "rebase")
    do(made, "rebase", "--abort")
    for words in (["rebase", "--abort"], ["export"]):
        with refusal("not-provided", match="There is no worktree"):
            do(made, *words)

    assert folder(made) == before


# On another base.


def test_a_conflict_waits_in_the_worktree_and_its_resolution_is_exported(made: Host, maintainer: Maintainer) -> None:
    """The failure has the report, and says how to go on; what the maintainer commits is the patch, and the others keep their texts."""
    before = patches(made)
    made.work.commit({"a.txt": edited((30, "theirs\n"))}, "Go on")
    made.push()
    with refusal("patch-conflict", match=r"second\.patch does not apply to widget: a\.txt") as caught:
        do(made, "rebase", "--onto", "main")
    assert "tree: " + maintainer.git("rev-parse", "HEAD^{tree}") in caught.value.details
    with refusal("rebase-unfinished") as unfinished:
        do(made, "export")
    assert "git am --continue" in unfinished.value.details
    assert patches(made) == before
    (maintainer.folder / "a.txt").write_bytes(edited((10, "first\n"), (30, "theirs, and ours\n")))
    maintainer.git("add", "a.txt")
    maintainer.git("am", "--continue")
    do(made, "export")
    after = patches(made)

    assert {name: unindexed(after[name]) for name in ("first.patch", "third.patch")} == {
        name: unindexed(before[name]) for name in ("first.patch", "third.patch")
    }
    assert b"-theirs\n+theirs, and ours\n" in after["second.patch"]


# Picks.


@pytest.fixture(name="picked")
def _picked(made: Host) -> Host:
    """Return the host with a pick before the patches of ours."""
    made.carry(7, made.pull(7, {"picked.txt": TEXT}, start="v1"))
    return made


def test_an_edited_pick_is_refused(picked: Host, maintainer: Maintainer) -> None:
    """What a pull request changes is pinned by the ledger; an edit in its commit belongs into a patch of ours."""
    before = folder(picked)
    do(picked, "rebase")
    tip = maintainer.git("rev-parse", "HEAD")
    maintainer.git("checkout", "--quiet", "HEAD~3")
    (maintainer.folder / "picked.txt").write_bytes(edited((3, "picked, and edited\n")))
    maintainer.git("commit", "--quiet", "--all", "--amend", "--no-edit")
    maintainer.git("cherry-pick", f"{tip}~3..{tip}")

    with refusal("export-mismatch", match="other picks than the ledger pins"):
        do(picked, "export")
    assert folder(picked) == before


# What others do meanwhile.


@pytest.mark.parametrize("name", ["second.patch", "came.patch", "#7"])
def test_what_changed_meanwhile_is_not_overwritten(picked: Host, name: str) -> None:
    """A patch that was edited or came since the worktree was made, or a pick that was pinned anew, is an error, not lost."""
    do(picked, "rebase")
    if name == "#7":
        picked.write(msgspec.structs.replace(picked.ledger.records[0], stacks={picked.stack: {"picked.txt": "not today"}}))
    else:
        edited_patch = (picked.series / "second.patch").read_bytes().replace(b"As told.", b"As told by somebody else.")
        (picked.series / name).write_bytes(edited_patch)
    before = folder(picked)

    with refusal("patch-lost" if name == "came.patch" else "export-mismatch"):
        do(picked, "export")
    assert folder(picked) == before


# Killed.


def test_a_killed_rebase_leaves_no_half_worktree(made: Host, maintainer: Maintainer) -> None:
    """Wherever a rebase or an abort dies: there is a whole worktree, or none; and the next run makes or removes one."""
    for after in range(1, 20):
        if not made.killed(".rebase", after, "patch rebase"):
            break
        if maintainer.folder.exists():
            assert maintainer.subjects() == ["Do the first", "Größe: the second", "[Misc] The third"]
        else:
            do(made, "rebase")
        do(made, "rebase", "--abort")
    assert after > 3
    assert made.killed(".removed", 1, "patch rebase", "--abort")
    assert do(made, "rebase", "--abort") == 0
    assert not list((made.root / ".rebase" / made.stack).iterdir())
