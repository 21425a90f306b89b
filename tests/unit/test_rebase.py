"""
Rebase and export: a maintainer works with plain git in a real worktree, under a configuration of the worst kind.

The series is what was committed there, byte for byte, or nothing is written; no patch is ever lost without a word.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.refusals import refusal
from tests.support import processes
from tests.support.texts import TEXT, edited
from tests.unit.conftest import TRAILERS, Host, Repository

from sparkwright.cherry_picks import patch, rebase
from sparkwright.cli import main
from sparkwright.core.git import Objects

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



@pytest.fixture(autouse=True)
def _maintainer(tmp_path: Path) -> None:
    """Let every hook of the maintainer fail, and the signatures, too."""
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
        processes.script(tmp_path / "hooks" / name, "exit 1")
    (Path(os.environ["HOME"]) / ".gitconfig").write_text(WORST.format(hooks=tmp_path / "hooks"))


@pytest.fixture(name="made")
def _made(host: Host) -> Host:
    """Return the host with a release, a pick, and three patches of ours; one touches a file with CRLF line ends and trailing blanks."""
    host.work.commit({"a.txt": TEXT, "b.txt": TEXT, "dos.txt": b"one\r\ntwo  \r\nthree\r\n"}, "Begin")
    # What upstream says of its files must not change them, either.
    host.work.commit({".gitattributes": b"*.txt text=auto eol=crlf\n"}, "Release 1")
    host.lock()
    host.carry(7, host.pull(7, {"picked.txt": TEXT}))
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


def worktree(host: Host) -> Path:
    return host.root / ".rebase" / host.stack / host.fork


def work(host: Host, script: str) -> str:
    """Run a shell script in the worktree, as its maintainer does, and return its output."""
    environment = {**os.environ, "GIT_EDITOR": "true", "LC_ALL": "C.UTF-8"}
    return subprocess.run(["sh", "-ec", script], cwd=worktree(host), env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def patches(host: Host) -> dict[str, bytes]:
    """Return the series as a reader sees it, in order, without the ids of files."""
    return {name: re.sub(rb"(?m)^index .*\n", b"", (host.series / name).read_bytes()) for name in patch.series_names(host.series)}



# On the locked source.


def test_a_rebase_onto_the_locked_source_exports_the_same_bytes(made: Host) -> None:
    """The worktree holds the series as commits; exported unchanged, every patch has its exact form again, and the worktree is gone."""
    before, path = made.files(), made.series / "first.patch"
    path.write_bytes(path.read_bytes().replace(b"\n---\n", b"\n---\n a.txt | 2 +-\n\n"))
    assert do(made, "rebase") == 0
    subjects = work(made, "git log --reverse --format=%s refs/sparkwright/base..HEAD")
    assert subjects == "Improve number 7 (#7)\nDo the first\nGröße: the second\n[Misc] The third\n"
    assert do(made, "export") == 0

    assert made.files() == before
    assert not worktree(made).exists()


@pytest.mark.parametrize(
    ("script", "reference", "what", "detail"),
    [
        ("echo > a.txt", "rebase-unfinished", "is not ready", "not committed:  M a.txt"),
        ("echo > left.orig", "rebase-unfinished", "is not ready", "not committed: ?? left.orig"),
        (
            f"git checkout -q -b side HEAD~1; echo mine > mine.txt; git add -f mine.txt; git commit -q -m 'Mine\n\n{TRAILERS}'\n"
            "git checkout -q series; git merge -q --no-commit --no-ff side; echo more > mine.txt; git add -f mine.txt; git commit -q -m Merge",
            "export-mismatch",
            "another tree than the worktree",
            "",
        ),
        (
            "git checkout -q HEAD~3; echo edited > picked.txt; git commit -q -a --amend --no-edit; git cherry-pick series~3..series",
            "patch-invalid",
            "is incomplete",
            "",
        ),
        ("sed -i s/told/said/ $SERIES/second.patch", "export-mismatch", "changed since the worktree was made", ""),
        ("sed -i 's/test: {}/test: {picked.txt: why}/' $SERIES/../../../cherry_picks/widget.yaml", "export-mismatch", "changed since", ""),
        ("cp $SERIES/second.patch $SERIES/came.patch", "patch-lost", "lost 1 patches", "came.patch"),
    ],
    ids=["a change", "a new file", "a merge", "an edited pick", "a patch edited", "a pick changed", "another patch"],
)  # fmt: skip
def test_an_export_that_would_lose_something_is_refused(made: Host, script: str, reference: str, what: str, detail: str) -> None:
    """Lost commits, uncommitted and merged changes, edits of a pick, and changes of the series meanwhile are named; nothing is written."""
    do(made, "rebase")
    work(made, f"SERIES={made.series}; {script}")
    before = made.files()
    with refusal(reference, match=what) as caught:
        do(made, "export")

    assert detail in {*caught.value.details, ""}
    assert made.files() == before


def test_a_patch_without_a_commit_goes_if_that_is_meant(made: Host) -> None:
    """A name that was mistyped means no patch."""
    before = patches(made)
    do(made, "rebase")
    work(made, "git reset --quiet --hard HEAD~1")
    with refusal("patch-lost", match="lost 1 patches"):
        do(made, "export", "--drop", "fourth.patch")
    do(made, "export", "--drop", "third.patch")

    assert patches(made) == {name: before[name] for name in ("first.patch", "second.patch")}


# The worktree.


def test_there_is_one_worktree_at_a_time(made: Host) -> None:
    """A second rebase is refused, so that no work is overwritten; --abort removes the first, also after a killed one, and changes nothing."""
    before = made.files()
    do(made, "rebase")
    with refusal("rebase-unfinished", match="There is a worktree of widget already"):
        do(made, "rebase")
    assert made.killed(".removed", 1, "patch rebase", "--abort")
    do(made, "rebase", "--abort")
    with refusal("not-provided", match="There is no worktree"):
        do(made, "export")

    assert made.files() == before
    assert not list((made.root / ".rebase" / made.stack).iterdir())


def test_runs_that_write_into_a_checkout_take_turns(made: Host, tmp_path: Path) -> None:
    """Whatever their caches: each says that it waits while another one holds the checkout, and changes nothing meanwhile."""
    before, commands = made.files(), (["rebase"], ["export"], ["pick", "7"], ["bump", "--to", "2"])
    made.cache = tmp_path / "another"
    with made.context().project.editing():
        for command in commands:
            words = [sys.executable, "-m", "sparkwright", "patch", *command, *made.words]
            with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as child:
                assert "waiting for it to end" in (child.stderr.readline() if child.stderr else "")
                child.kill()
    assert made.files() == before


# On another base.


def test_a_conflict_waits_in_the_worktree_and_its_resolution_is_exported(made: Host) -> None:
    """The failure has the report, and says how to go on; what the maintainer commits is the patch, and the others keep their texts."""
    before = patches(made)
    made.work.commit({"a.txt": edited((30, "theirs\n"))}, "Go on")
    made.push()
    with refusal("patch-conflict", match=r"second\.patch does not apply to widget: a\.txt") as caught:
        do(made, "rebase", "--onto", "main")
    assert "tree: " + work(made, "git rev-parse HEAD^{tree}").strip() in caught.value.details
    with refusal("rebase-unfinished") as unfinished:
        do(made, "export")
    assert "git am --continue" in unfinished.value.details
    assert patches(made) == before
    (worktree(made) / "a.txt").write_bytes(edited((10, "first\n"), (30, "theirs, and ours\n")))
    work(made, "git add a.txt; git am --continue")
    do(made, "export")
    after = patches(made)

    assert b"-theirs\n+theirs, and ours\n" in after["second.patch"]
    assert {**after, "second.patch": b""} == {**before, "second.patch": b""}


def told(objects: Objects, repository: Repository, message: str) -> dict[str, bytes]:
    """Return the export of a commit with *message*."""
    commits = [repository.commit({"a.txt": text}, message) for text in (TEXT, edited((7, "line seven\n")))]
    objects.borrow(repository.path)
    return rebase.exported(objects, *commits)


@pytest.mark.parametrize("end", ["", "\nSigned-off-by: T <t@t.example>"])
def test_our_trailer_names_the_file_and_is_never_exported(objects: Objects, repository: Repository, end: str) -> None:
    """The last Patch-File of the last paragraph counts, also when git put another trailer behind it."""
    files = told(objects, repository, f"Subject\n\nPatch-File: no.patch\n\n{TRAILERS}\nPatch-File: the name.patch{end}\n")

    assert [patch.parse(*item).text for item in files.items()] == [f"Patch-File: no.patch\n\n{TRAILERS}{end}"]
    assert list(files) == ["the name.patch"]


@pytest.mark.parametrize(
    "message",
    [
        *(
            f"Subject\n\n{TRAILERS}\nPatch-File: {name}"
            for name in ("../x.patch", "/etc/x.patch", ".x.patch", "series", "-x.patch", "a#b.patch", "x\x07.patch", "ü" * 120 + ".patch")
        ),
        "Only a subject", "Subject\n\nNo trailers.", f"Subject\n{TRAILERS}", f"Subject\n\n{TRAILERS.replace('Pending', 'Perhaps')}",
        f"Subject\n\nText\n---\nmore\n\n{TRAILERS}",
    ],
)  # fmt: skip
def test_a_commit_that_is_no_patch_is_refused(objects: Objects, repository: Repository, message: str) -> None:
    """A Patch-File that is a path, hidden, quilt's comment, unprintable or too long, and a message that lacks what a patch must have."""
    with refusal("patch-invalid"):
        assert [patch.parse(*item) for item in told(objects, repository, message).items()]
