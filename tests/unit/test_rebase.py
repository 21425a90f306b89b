"""Upkeep: rebase and export, where a maintainer works with plain git under a configuration of the worst kind; drift, and the bump to a release."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.refusals import refusal
from tests.support import processes, wheels
from tests.unit.conftest import TEXT, TRAILERS, Host, Index, Repository, edited

from sparkwright.cherry_picks import patch, rebase
from sparkwright.cli import main
from sparkwright.core.files import sha256_file
from sparkwright.core.git import Objects
from sparkwright.forks import resolve
from sparkwright.forks.stack import UNRESOLVED, FileLock, render_lock

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
    _, _, subjects = work(made, "git log --reverse --format=%s").partition("\n")
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
    with refusal("rebase-unfinished", says="git am --continue"):
        do(made, "export")
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


# Later revisions of an upstream: the state of each patch, with the evidence; and the bump to a release.


BLOCK = [f"    block {number}\n" for number in range(1, 6)]
#: What our patches do, in their order.
OURS = {
    "taken": (5, "line five\n"),
    "kept": (20, "line twenty\n"),
    "lost": (35, "line thirty-five\n"),
    "altered": (28, "".join(["line 28\n", *BLOCK])),
}
#: What upstream did, by release.
RELEASED = {
    "1.1": [OURS["taken"]],
    "1.2": [OURS["taken"], (1, "above\nline 1\n"), (35, "line XXXV\n"), (28, "".join(["line 28\n", *BLOCK[:4], "    another\n"]))],
}


@pytest.fixture(name="stack")
def _stack(host: Host, offered: Index) -> Host:
    """
    Return a project on release 1.0 with four patches of ours and two picks, whose diffs came to the branch after its release 1.2 and were
    changed later: 7 was merged, and 8 is open.
    """
    path = offered.release("1.0", {"a.txt": TEXT, "b.txt": b"one\n"})
    offered.release("2.0rc1", {"a.txt": TEXT})
    host.work.commit({"a.txt": TEXT, "b.txt": b"one\n"}, "Release 1.0")
    host.lock(sdist=FileLock(offered.project, "1.0", path.name, sha256_file(path), path.stat().st_size))
    for count, name in enumerate(OURS, 1):
        host.ours(f"{name}.patch", {"a.txt": edited(*list(OURS.values())[:count])}, name)
    heads = [host.pull(7, {"b.txt": b"two\n"}), host.pull(8, {"c.txt": TEXT})]
    for version, changes in RELEASED.items():
        host.work.commit({"a.txt": edited(*changes)}, f"Release {version}")
        offered.release(version, {"a.txt": edited(*changes), "b.txt": b"one\n"})
    host.carry(7, heads[0], host.squash(7))
    host.carry(8, heads[1])
    host.squash(8)
    host.work.commit({"b.txt": b"three\n", "c.txt": TEXT[:200]}, "Change both")
    host.push()
    return host


def document(host: Host, capsys: pytest.CaptureFixture[str], verb: str, *words: str) -> Any:
    """Return the document that a command prints."""
    capsys.readouterr()
    assert main.main(["patch", verb, *host.words, "--json", *words]) == 0
    return msgspec.json.decode(capsys.readouterr().out)


def states(report: Any) -> dict[str, list[str]]:
    """Return the states of each patch in the order of the bases."""
    found: dict[str, list[str]] = {}
    for trial in report["trials"]:
        found.setdefault(trial["patch"].removesuffix(".patch"), []).append(trial["state"])
    return found


def test_every_patch_is_tried_on_every_base(stack: Host, capsys: pytest.CaptureFixture[str]) -> None:
    """
    Upstream took one as it was, moved one, changed two, and has both picks; each test finds what the others miss. By default the newest
    release is tried, and the branch; or a base is named: a release, a branch, a tag, and a commit, in the order in which they are named.
    """
    [report] = document(stack, capsys, "drift")["drift"]
    proofs = {trial["patch"]: [f"{test['test']}: {test['says']}" for test in trial["evidence"] if test["holds"]] for trial in report["trials"]}
    merge, landed = stack.ledger.by_number[7].merge[:12], stack.work.git("rev-parse", "main~1")[:12]

    assert report["bases"] == ["1.2", "main 2026-11-01"]
    assert states(report) == {
        "#7": ["applies", "already-upstream"],
        "#8": ["applies", "already-upstream"],
        "taken": ["already-upstream", "already-upstream"],
        "kept": ["moves", "moves"],
        "lost": ["conflict", "conflict"],
        "altered": ["conflict", "conflict"],
    }
    assert proofs["#7"][0] == f"ancestor: {merge} is part of main 2026-11-01"
    assert proofs["#7"][1].startswith(f"patch-id: {merge} ")
    assert proofs["#8"][0].startswith(f"patch-id: {landed} 2026-11-01 Improve it (#8) has patch-id ")
    assert proofs["taken.patch"][1:] == ["reverse: main 2026-11-01 holds the whole change"]
    assert proofs["altered.patch"] == []

    names = ["1.1", "main", "v1", stack.work.git("rev-parse", "main~1")]
    [report] = document(stack, capsys, "drift", *(word for name in names for word in ("--to", name)))["drift"]

    assert report["bases"] == names
    assert states(report)["#7"] == ["applies", "already-upstream", "applies", "already-upstream"]
    assert states(report)["kept"] == ["applies", "moves", "applies", "moves"]
    with refusal("not-provided", match="v9 is neither"):
        main.run(["patch", "drift", *stack.words, "--to", "v9"])


def test_a_pick_that_was_merged_and_taken_back_is_not_upstream(stack: Host, capsys: pytest.CaptureFixture[str]) -> None:
    """By its lines, whatever its message says and however the lines went on; only when it landed again is it upstream again."""
    merge = stack.ledger.by_number[7].merge
    stack.work.git("reset", "--quiet", "--hard", merge)
    revert = stack.work.commit({"b.txt": b"one\n", "a.txt": b"\n"}, "Take it back")
    stack.work.commit({"b.txt": b"four\n"}, "Go on")
    stack.push()
    [report] = document(stack, capsys, "drift", *(word for name in (merge, revert, "main") for word in ("--to", name)))["drift"]
    ancestor, same, _ = report["trials"][-len(OURS) - 2]["evidence"]

    assert states(report)["#7"] == ["already-upstream", "applies", "conflict"]
    assert [test["says"].partition(", but ")[2] for test in (ancestor, same)] == [f"{revert[:12]} 2026-11-01 Take it back takes it back"] * 2
    for text in (b"one\n", b"two\n", b"five\n"):
        stack.work.commit({"b.txt": text}, "Land it again")
    stack.push()
    assert states(document(stack, capsys, "drift", "--to", "main")["drift"][0])["#7"] == ["already-upstream"]


# Bump: to another release, with everything that hangs on it, or not at all.

STACK = """# What people wrote here stays.
stack: "test"
arch: "12.1f"
label: "spark.test"
forks:
  widget:
    build: graft
    sources:
      # The commit stands in the release.
      git: {{url: "https://github.com/acme/widget.git", ref: "v{version}"}}
      sdist: {{name: "widget-kit", version: "{version}"}}  # the release
    bases:
      x86_64: {{name: "widget-kit", version: "{version}", tag: "{tag}"}}
"""
#: Of the official wheels; a release may name another glibc.
TAG, OTHER_TAG = "cp38-abi3-manylinux_2_28_x86_64", "cp38-abi3-manylinux_2_35_x86_64"
OLD = STACK.format(version="1.0.0", tag=TAG)


class Upstream:
    """An upstream whose releases are tags at its host and sdists on the index, and the stack that takes it."""

    def __init__(self, host: Host, offered: Index) -> None:
        self.host, self.offered = host, offered
        self.stack = host.root / "forks" / host.stack / "stack.yaml"

    def release(self, version: str, files: Mapping[str, bytes | None], tag: str = TAG, marks: str = "") -> str:
        """Commit *files*, tag them, and offer the sdist, which states the commit, and a wheel."""
        commit = self.host.work.commit(files, f"Release {version}")
        self.host.work.git("tag", f"v{version}")
        self.host.push("main", f"v{version}")
        tree = {path: (self.host.work.path / path).read_bytes() for path in self.host.work.git("ls-files").splitlines()}
        self.offered.release(version, {**tree, "_meta.py": f'commit = "{commit}"\n'.encode()}, marks)
        self.offered.add(wheels.plain(self.offered.root, "widget-kit", version, tag=tag).name)
        return commit

    def lock(self, text: str) -> None:
        """Write the stack as *text*, and lock it."""
        self.stack.write_text(text)
        context = self.host.context()
        context.project.lock_file.write_text(render_lock(resolve.resolve(context)))

    def bump(self, version: str, *words: str) -> int:
        return main.run(["patch", "bump", *self.host.words, "--to", version, *words])


@pytest.fixture(name="upstream")
def _upstream(host: Host, offered: Index) -> Upstream:
    """Return an upstream with the release 1.0.0, a stack on it, a pick, and two patches of ours."""
    made = Upstream(host, offered)
    host.work.commit({"a.txt": TEXT, "b.txt": TEXT}, "Begin")
    host.lock()
    made.release("1.0.0", {"version": b"1.0.0\n"})
    host.work.git("tag", "--force", "v1", "v1.0.0")
    made.lock(OLD)
    host.carry(7, host.pull(7, {"c.txt": b"picked\n"}, start="v1.0.0"), stacks=("other",))
    host.ours("first.patch", {"a.txt": edited((10, "first\n"))}, "Do the first")
    host.ours("second.patch", {"b.txt": edited((30, "second\n"))}, "Do the second")
    return made


@pytest.mark.parametrize("answers", [True, False])
def test_a_bump_to_a_release_that_changed_nothing_of_ours(upstream: Upstream, answers: bool) -> None:
    """
    stack.yaml, with the tag of the official wheel, and lock.yaml name the release; people's comments stay, and no patch changes a byte. The old
    commit goes; the lock has the new one as soon as the host answers.
    """
    first = upstream.host.work.git("rev-parse", "v1.0.0")
    upstream.lock(OLD.replace('ref: "v1.0.0"', f'ref: "v1.0.0", commit: "{first}"').replace('"1.0.0"}  #', '"1.0.0", generated: ["_meta.py"]}  #'))
    commit, before = upstream.release("1.1.0", {"version": b"1.1.0\n"}, OTHER_TAG), upstream.host.files()
    if not answers:
        upstream.host.path.rename(upstream.host.path.with_suffix(".gone"))
        commit = UNRESOLVED
    assert upstream.bump("1.1.0") == 0
    after, locked = upstream.host.files(), upstream.host.context().project.lock_file.read_text()

    assert {path for path in after if after[path] != before.get(path)} == {"forks/test/stack.yaml", "forks/test/lock.yaml"}
    assert upstream.stack.read_text() == OLD.replace('"1.0.0"}  #', '"1.0.0", generated: ["_meta.py"]}  #').replace("1.0.0", "1.1.0").replace(TAG, OTHER_TAG)
    assert f"ref: v1.1.0\n      commit: {commit}\n" in locked
    assert f"filename: widget_kit-1.1.0-{OTHER_TAG}.whl" in locked


def test_a_bump_drops_what_upstream_took(upstream: Upstream, capsys: pytest.CaptureFixture[str]) -> None:
    """
    A pick and a patch that the release holds go, each with its evidence; the ledger keeps the record, less this stack.
    """
    upstream.release("1.1.0", {"c.txt": b"picked\n", "a.txt": b"new\n" + edited((10, "first\n"))})
    assert main.main(["patch", "bump", *upstream.host.words, "--to", "1.1.0", "--json"]) == 0
    told = capsys.readouterr()

    assert patch.series_names(upstream.host.series) == ["second.patch"]
    assert [dict(record.stacks) for record in upstream.host.ledger.records] == [{"other": {}}]
    assert "dropped: first.patch, " in told.err
    assert "reverse: 1.1.0 holds the whole change" in told.err.partition("dropped: #7, ")[2].partition("\n")[0]
    changed = {line.partition(": ")[2] for line in json.loads(told.out)["changed"]}
    assert {"cherry_picks/widget.yaml", "forks/test/stack.yaml", "forks/test/lock.yaml", "forks/test/widget/first.patch"} <= changed


def test_a_fork_without_releases_is_bumped_to_a_tag(upstream: Upstream) -> None:
    """Its git ref says which one it is at."""
    text = "".join(line for line in OLD.splitlines(keepends=True) if "widget-kit" not in line and "bases:" not in line)
    upstream.lock(text)
    commit = upstream.release("1.1.0", {"version": b"1.1.0\n"})
    with refusal("not-provided", match="is at 1.0.0 already"):
        upstream.bump("1.0.0")
    with refusal("source-unresolved", match="commit of v1.2.0 of"):
        upstream.bump("1.2.0")
    assert upstream.bump("1.1.0") == 0
    assert upstream.stack.read_text() == text.replace("1.0.0", "1.1.0")
    assert f"commit: {commit}\n" in upstream.host.context().project.lock_file.read_text()


@pytest.mark.parametrize("reverted", [False, True])
def test_a_pick_that_conflicts_stops_before_anything_is_written(upstream: Upstream, reverted: bool) -> None:
    """A pull request cannot be mended here: the error names it and what can be done, and the checkout is as it was; a reverted merge counts for nothing."""
    if reverted:
        upstream.host.squash(7)
        upstream.host.work.commit({"c.txt": None}, 'Revert "Improve it (#7)"')
    upstream.release("1.1.0", {"c.txt": b"theirs\n"})
    before = upstream.host.files()

    with refusal("patch-conflict", match=r"#7 of widget do not apply to 1\.1\.0", says="`patch bump --drop '#NUMBER'`"):
        upstream.bump("1.1.0")
    assert upstream.host.files() == before
    assert not list(upstream.host.root.glob(".rebase/test/*"))
    with refusal("not-provided", match="no patch '#9'"):
        upstream.bump("1.1.0", "--drop", "#9")
    upstream.bump("1.1.0", "--drop", "#7")
    assert not upstream.host.ledger.carried("test")


def test_a_killed_export_of_a_bump_is_finished_by_the_next(upstream: Upstream) -> None:
    """Stack, lock, ledger and series change together: what a killed export leaves is the old, the new, or refused by every reader."""
    upstream.release("1.1.0", {"c.txt": b"picked\n", "b.txt": edited((30, "theirs\n"))})
    with refusal("patch-conflict", match=r"second\.patch does not apply to widget"):
        upstream.bump("1.1.0")
    root, old = upstream.host.root, upstream.host.files()
    folder, backup, seen = root / ".rebase" / "test" / "widget", root.parent / "backup", set()
    (folder / "b.txt").write_bytes(edited((30, "theirs, and ours\n")))
    for words in (["add", "b.txt"], ["am", "--continue"]):
        upstream.host.work.git("-C", str(folder), *words)
    shutil.copytree(root, backup, symlinks=True)
    main.run(["patch", "export", *upstream.host.words])
    new = upstream.host.files()
    for after in range(1, 40):
        shutil.rmtree(root)
        shutil.copytree(backup, root, symlinks=True)
        if not upstream.host.killed(str(root), after, "patch export"):
            break
        state = {name: data for name, data in upstream.host.files().items() if ".unfinished-" not in name}
        seen.add("old" if state == old else "new" if state == new else "refused")
        if state not in (old, new):
            with refusal("patch-invalid", match="disagree"):
                main.run(["apply", *upstream.host.words])
        if folder.exists():
            main.run(["patch", "export", *upstream.host.words])
        assert upstream.host.files() == new
    assert seen == {"old", "refused", "new"}


@pytest.mark.parametrize(
    "text",
    [
        OLD.replace('version: "1.0.0"}', "version: 1.0.0}"),
        OLD.replace('ref: "v1.0.0"', "ref: v1.0.0"),
        OLD.replace("    bases:", '      wheel: {name: "widget-kit", version: 1.0.0, tag: "py3-none-any"}\n    bases:'),
        re.sub(r'\{(url: .*), (ref: "v1.0.0")\}', r"\n        \1\n        \2\n        commit: 0123456789abcdef", OLD),
        OLD.replace("{url:", '{commit: "0123456789abcdef", url:'),
    ],
    ids=["no quotes", "a ref without quotes", "a wheel without quotes", "a commit in a block", "a commit before its ref"],
)
def test_an_unusual_form_is_refused_with_advice(upstream: Upstream, text: str) -> None:
    """What the program cannot rewrite without doubt it leaves alone, and says what to do by hand."""
    upstream.release("1.1.0", {"version": b"1.1.0\n"})
    upstream.stack.write_text(text)
    before = upstream.host.files()

    with refusal("file-invalid", match="not written in the form that bump rewrites", says="sparkwright lock"):
        upstream.bump("1.1.0")
    assert upstream.host.files() == before
