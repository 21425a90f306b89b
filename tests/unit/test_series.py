"""The series: diffs are read without loss, patches apply at the very lines they name, a conflict is explained; picks, and their ledger."""

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st
from tests.refusals import allowed, refusal
from tests.unit.conftest import ROOT, TEXT, Host, edited

from sparkwright.cherry_picks import apply, ledger, patch, series
from sparkwright.cli import main
from sparkwright.core import git, strict_yaml
from sparkwright.core.files import sha256_bytes
from sparkwright.core.git import Objects, blob_id
from sparkwright.forks import fetch, stack

# Diffs.

HEADER = b"index 1111111..2222222 100644\n--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n-a\n+b\n c\n"
EDIT = b"diff --git a/x b/x\n" + HEADER


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b" c\n", b"", "cut off"),
        (b" c\n", b" c", "cut off"),
        (b"+b\n c\n", b"+b", "cut off"),
        (b" c\n", b" c\n+more\n", "more lines"),
        (b" c\n", b" c\n@@ -x +y @@\n", "does not say where"),
        (b"@@ -1,2 +1,2 @@", b"@@ -1,3 +1,3 @@", "cut off"),
        (b"@@ -1,2 +1,2 @@", b"@@ -1,1 +1,1 @@", "more lines"),
        (b"@@ -1,2 +1,2 @@", b"@@ -" + b"9" * 5000 + b",2 +1,2 @@", "does not say where"),
        (b"@@ -1,2 +1,2 @@", b"@@ -1," + b"9" * 9 + b" +1,2 @@", "cut off"),
        (b"-a\n", b"-a\n?\n", "cut off"),
        (b"+b\n c\n", b"+b\n\\ No newline at end of file\n c\n", "cut off"),
        (b"a/x b/x", b"", "outside the tree"),
        (b"a/x b/x", b"x x", "made without the prefixes a/ and b/"),
        (b"a/x b/x\n", b"a/x b/x\r\n", "names a path outside the tree, or none in plain UTF-8"),
        (b"@@ -1,2 +1,2 @@\n-a\n+b\n c\n", b"", "cut off"),
        (HEADER, b"", "cut off"),
        (HEADER, b"new file mode 100644\n", "cut off"),
        (HEADER, b"new file mode 100644\nindex 0000000..2222222\n--- /dev/null\n+++ b/x\n", "cut off"),
        (HEADER, b"old mode 100644\nnew mode 100755\nindex 1111111..2222222\n", "cut off"),
        (HEADER, b"rename from x\nrename to x\nindex 1111111..2222222 100644\n", "cut off"),
    ],
)
def test_a_damaged_diff_is_refused(old: bytes, new: bytes, words: str) -> None:
    """Hunks and headers that are cut off, or that hold more or less than they announce, are no diff; git would apply some of them."""
    assert EDIT.count(old) == 1
    with refusal("patch-invalid", match=words):
        patch.sections(EDIT.replace(old, new))


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/x", ".git/config", "a/.GIT/hooks/x", ".", "./x", "a/./x"])
@pytest.mark.parametrize("form", ["{side}/{name}", '"{side}/{name}"'], ids=["plain", "quoted"])
def test_a_path_outside_of_the_tree_is_refused(name: str, form: str) -> None:
    """Plain or quoted, a path that leaves the tree or enters a repository's own folder is refused."""
    paths = [form.format(side=side, name=name.replace(".", "\\056") if '"' in form else name).encode() for side in "ab"]
    with refusal("patch-invalid", match="outside the tree"):
        patch.sections(EDIT.replace(b"a/x", paths[0]).replace(b"b/x", paths[1]))


# Application.


def picked(data: bytes) -> patch.Patch:
    """Return the pull request whose diff *data* is."""
    files = tuple(section.path for section in patch.sections(data))
    return patch.Patch("#7", sha256_bytes(data), "Improve it", "why", "then", files, data, pick=7)


def mine(data: bytes) -> patch.Patch:
    """Return a patch of ours with the diff *data*."""
    return msgspec.structs.replace(picked(data), name="0.patch", pick=0)


def tried(objects: Objects, tree: str, one: patch.Patch, *, movable: bool = False) -> apply.Outcome:
    """Return the outcome of the patch on *tree*."""
    return apply.evaluate(objects, tree, [one], strict=not movable)[0]


#: A change of each kind: the files before and after it; a name with an exclamation mark is executable.
KINDS: dict[str, tuple[dict[str, bytes], dict[str, bytes]]] = {
    "an edit": ({"a": TEXT}, {"a": edited((7, "line seven\n"))}),
    "at the beginning": ({"a": TEXT}, {"a": edited((1, "line one\n"))}),
    "at the end": ({"a": TEXT}, {"a": edited((60, "line forty\n"))}),
    "CRLF": ({"a": TEXT.replace(b"\n", b"\r\n")}, {"a": edited((7, "x\n")).replace(b"\n", b"\r\n")}),
    "to CRLF": ({"a": TEXT}, {"a": TEXT.replace(b"\n", b"\r\n")}),
    "the last line end gone": ({"a": TEXT}, {"a": TEXT.rstrip()}),
    "a last line end": ({"a": TEXT.rstrip()}, {"a": TEXT}),
    "without a last line end": ({"a": TEXT.rstrip()}, {"a": edited((60, "x\n")).rstrip()}),
    "binary": ({"a": bytes(range(256))}, {"a": bytes(reversed(range(256)))}),
    "binary and text": ({"a": b"text\n"}, {"a": b"\0bin"}),
    "a new file": ({"a": b"a\n"}, {"a": b"a\n", "d/b": b"b\n"}),
    "a new executable": ({"a": b"a\n"}, {"a": b"a\n", "d/b!": b"b\n"}),
    "a new empty file": ({"a": b"a\n"}, {"a": b"a\n", "b": b""}),
    "a file gone": ({"a": b"a\n", "b": b"b\n"}, {"a": b"a\n"}),
    "an empty file gone": ({"a": b"a\n", "b": b""}, {"a": b"a\n"}),
    "a rename": ({"a": TEXT}, {"b": TEXT}),
    "a rename with an edit": ({"a": TEXT}, {"d/b": edited((7, "line seven\n"))}),
    "a mode": ({"a": b"a\n", "b": b"b\n"}, {"a!": b"a\n", "b": b"b\n"}),
    "a mode and an edit": ({"a": TEXT}, {"a!": edited((7, "line seven\n"))}),
    "a folder for a file": ({"a": b"a\n"}, {"a/b": b"a\n"}),
    "a file for a folder": ({"a/b": b"a\n"}, {"a": b"b\n"}),
    "strange names": ({'q"uo te': b"a\n", "tab\tü": b"b\n"}, {'q"uo te': b"A\n", "tab\tü": b"B\n"}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("make", "context"), [(picked, 3), (mine, 1)], ids=["pick", "ours"])
def test_every_kind_of_change_is_applied_once(objects: Objects, kind: str, make: Callable[[bytes], patch.Patch], context: int) -> None:
    """With the lines of context that each is rendered with, it gives the tree that it was made from, and on that tree it is no success."""
    before, after = (
        objects.store_files((name.rstrip("!"), git.EXECUTABLE if name.endswith("!") else git.REGULAR, data) for name, data in files.items())
        for files in KINDS[kind]
    )
    one = make(patch.render(objects, before, after, context=context))
    assert apply.apply_patches(objects, "mini", before, [one]).tree == after
    assert tried(objects, after, one).status == "already-upstream"
    with refusal("patch-already-upstream", match="is in mini already"):
        apply.apply_patches(objects, "mini", before, [one, one])


def test_a_pick_may_move_where_ours_may_not(objects: Objects) -> None:
    """The lines of a pull request may stand elsewhere in the base; how many hunks did is told. A patch of ours is made anew."""
    texts = (TEXT, edited((20, "line twenty\n")), b"new\n" * 5 + TEXT)
    base, after, other = (objects.store_files([("a", git.REGULAR, text)]) for text in texts)
    data = patch.render(objects, base, after)
    done = tried(objects, other, picked(data))

    assert (done.status, done.moved) == ("applied", 1)
    assert objects.blob(done.tree, "a") == b"new\n" * 5 + edited((20, "line twenty\n"))
    assert tried(objects, other, mine(data)).status == "conflict"
    assert tried(objects, other, mine(data), movable=True) == done


@pytest.mark.parametrize("rest", ["", "line 41\n", "line 41"])
def test_a_patch_that_ends_a_file_does_not_join_lines(objects: Objects, rest: str) -> None:
    """git takes a last line without its end for one with it, and would write two lines as one."""
    old, new = TEXT.rstrip(), edited((59, "x\n")).rstrip()
    before, after = (objects.store_files([("a", git.REGULAR, text)]) for text in (old, new))
    data = patch.render(objects, before, after)
    for one in (picked(data), mine(data)):
        assert tried(objects, before, one) == apply.Outcome("applied", after)
        for text in (old, new):
            longer = objects.store_files([("a", git.REGULAR, text + b"\n" + rest.encode())])
            assert tried(objects, longer, one).status == "conflict"


def test_a_patch_that_only_looks_is_empty(objects: Objects) -> None:
    """Context alone, equal lines for equal lines, and no diff at all change nothing, wherever they are tried."""
    base = objects.store_files([("x", git.REGULAR, b"a\n" + TEXT)])
    hunk = EDIT.replace(b"-a\n+b\n c\n", b"%b line 1\n")
    for data in (hunk % b" a\n", hunk % b"-a\n+a\n", b"", b"\n"):
        assert tried(objects, base, mine(data)).status == "empty"
        with refusal("patch-no-effect", match="#7 changes nothing in mini"):
            apply.apply_patches(objects, "mini", base, [picked(data)])


HIDDEN = b"--- /dev/null\n+++ b/.github/y\n@@ -0,0 +1 @@\n+y\n"


@pytest.mark.parametrize(
    "diff",
    [
        EDIT + b"\nbye\n" + HIDDEN,
        EDIT + b"-- \n2.47.0\n\n" + HIDDEN,
        b"diff --git a/x b/x\nold mode 100644\nnew mode 100755\n\n" + HIDDEN,
    ],
)
def test_a_diff_that_hides_behind_other_text_is_refused(objects: Objects, diff: bytes) -> None:
    """git applies it; no reader of the patch knows of its file."""
    base = objects.store_files([("x", git.REGULAR, b"a\nc\n")])
    with refusal("patch-invalid", match="a file that it does not name", details=(f"{mine(diff).name}: .github/y: 100644",)):
        apply.apply_patches(objects, "mini", base, [mine(diff)])


@pytest.mark.parametrize("mode", [git.LINK, git.SUBMODULE])
def test_links_and_submodules_are_refused(objects: Objects, mode: str) -> None:
    """Made, changed, in the place of a file; but a patch may remove one."""
    file = objects.store_files([("a", git.REGULAR, b"b"), ("x", git.REGULAR, b"c")])
    ids = [blob_id(b"b"), blob_id(b"c")] if mode == git.LINK else ["1" * 40, "2" * 40]
    trees = [objects._import("", [f"M {mode} {name} a\n".encode(), f"M 100644 {blob_id(b'c')} x\n".encode()]) for name in ids]
    for before, after in ((file, trees[0]), trees):
        with refusal("patch-invalid", match="a link, a submodule"):
            apply.apply_patches(objects, "mini", before, [mine(patch.render(objects, before, after))])

    removal = mine(patch.render(objects, trees[0], file))
    assert apply.apply_patches(objects, "mini", trees[0], [removal]).tree == file


def applied_by(host: Host) -> apply.PatchedTree:
    """Return the patched tree of a new run."""
    run = host.context()
    return series.apply_series(run, fetch.fetch(run, host.fork))


@pytest.mark.parametrize("lost", ["objects.git", "mirrors", "records"])
def test_picks_come_first_also_from_a_store_that_lost_a_part(host: Host, lost: str) -> None:
    """A pull request is applied before ours, less the files left out; a record is believed only while all that it names is there."""
    host.work.commit({"a.txt": TEXT, "b.txt": b"b\n", "c.txt": b"c\n"})
    host.lock()
    host.carry(7, host.pull(7, {"b.txt": b"picked\n", "c.txt": b"left out\n"}), excluded=("c.txt",))
    host.ours("ours.patch", {"a.txt": edited((1, "changed\n"))})
    first = applied_by(host)
    shutil.rmtree(host.cache / lost)
    files = dict(host.context().objects.files(applied_by(host).tree))

    assert applied_by(host) == first
    assert [step.name for step in first.steps] == ["#7", "ours.patch"]
    assert (files["b.txt"], files["c.txt"]) == (b"picked\n", b"c\n")
    # What a wheel says of a pick is what the ledger says now.
    host.write(*(msgspec.structs.replace(record, reason="another reason") for record in host.ledger.records))
    assert [step.reason for step in applied_by(host).steps] == ["another reason", first.steps[1].reason]


def test_a_patch_of_ours_that_conflicts_has_the_whole_report(host: Host) -> None:
    """apply names base, patch, hunk, both sides, upstream's commits, the three tests and the two commands."""
    later = edited((35, "line XXXV\n"))
    host.work.commit({"a.txt": TEXT}, "Begin")
    host.lock()
    host.work.commit({"a.txt": later}, "Last")
    host.work.git("branch", "ours")
    host.push()
    host.ours("ours.patch", {"a.txt": edited((34, "line thirty-four\n"), text=later)})
    host.context().mirror(host.url).history("main", newest=True)
    report = [
        "base: https://github.com/acme/widget.git @ ",
        "patch: ours.patch\nsubject: Change something",
        "a.txt: conflict",
        "    wants: line XXXV",
        "    finds: line 35",
        " Last\nalready upstream by ancestor: ",
        "  the patch builds on, and the base lacks: ",
        "already upstream by ancestor: could not be tested, the patch is ours",
        "already upstream by patch-id: no, ",
        "already upstream by reverse: no, ",
        "to go on: sparkwright patch rebase --stack test --fork widget",
        "to go on: sparkwright patch export --stack test --fork widget",
    ]
    with refusal("patch-conflict", match=r"ours\.patch does not apply to widget: a\.txt", says=report):
        applied_by(host)


# Picks that are carried in part, and the patches that stand in for the rest.

#: Of a pull request, in one file; the first does not apply to the release.
HUNKS = [(3, "LINE 3\n"), (20, "LINE 20\n"), (38, "LINE 38\n")]
AS_RELEASED, PICKED = edited((2, "line two\n")), edited((2, "line two\n"), *HUNKS[1:])


def text_of(host: Host, path: str = "a.txt") -> bytes | None:
    return host.context().objects.blob(applied_by(host).tree, path)


@pytest.fixture(name="record")
def _record(host: Host) -> ledger.PickRecord:
    """Return the record of a pull request with three hunks in one file and one in another; the first does not apply."""
    host.work.commit({"a.txt": AS_RELEASED, "b.txt": b"1\n"}, "Begin")
    host.lock()
    host.work.commit({"a.txt": TEXT}, "Meanwhile")
    head = host.pull(7, {"a.txt": edited(*HUNKS), "b.txt": b"2\n"})
    return host.carry(7, head, host.squash(7), excluded=["a.txt#1", "b.txt"])


def test_a_hunk_can_be_left_out_and_a_backport_stands_in_for_it(host: Host, record: ledger.PickRecord) -> None:
    """The other hunks of the file apply, at their own places."""
    assert text_of(host) == PICKED
    assert text_of(host, "b.txt") == b"1\n"
    host.work.git("checkout", "--quiet", "-b", "ours", "v1")
    host.work.commit({"a.txt": PICKED}, "The pick")
    host.work.git("checkout", "--quiet", "main")
    text = edited(*HUNKS, (2, "line two\n"), (5, "line 5.0\n"))
    host.ours("instead.patch", {"a.txt": text}, text=f"As told.\n\nBackport-Of: #7 {record.sha256}")
    assert text_of(host) == text


@pytest.mark.parametrize(
    ("path", "original", "fault"),
    [
        ("a.txt", "#7 " + "0" * 64, "it was made from the diff 0000000000000000…, pinned is"),
        ("a.txt", "#8 {sha256}", "the stack does not carry #8"),
    ],
)
def test_a_backport_that_does_not_correspond_is_refused(host: Host, record: ledger.PickRecord, path: str, original: str, fault: str) -> None:
    header = f"As told.\n\nBackport-Of: {original.format(sha256=record.sha256)}"
    host.ours("instead.patch", {path: edited(HUNKS[0])}, text=header)
    with refusal("backport-stale", says=fault):
        applied_by(host)


# Files.

#: A patch file that is complete.
MAIL = b"From x\nSubject: s\n\nUpstream-Status: Pending\nReason: r\nDrop-When: d\n---\n\n" + EDIT


def test_a_series_and_its_folder_must_agree(tmp_path: Path) -> None:
    """A patch listed twice, listed but missing, or there but not listed is an error that names each."""
    for name, data in {"0.patch": MAIL, "1.patch": MAIL, "series": b"0.patch\n0.patch\ngone.patch\n"}.items():
        (tmp_path / name).write_bytes(data)
    with refusal("patch-invalid", details=("listed twice: 0.patch", "listed, but not there: gone.patch", "there, but not listed: 1.patch")):
        patch.load_folder(tmp_path)


@pytest.mark.parametrize("trailer", patch.TRAILERS)
@pytest.mark.parametrize("line", [b"", b"\\1:   "])
def test_each_trailer_is_mandatory(trailer: str, line: bytes) -> None:
    """A patch without one of its trailers, or with an empty one, is an error that names the trailer."""
    with refusal("patch-invalid", details=(f"missing trailer: {trailer}",)):
        patch.parse("x.patch", re.sub(b"(?m)^(%s): .*$" % trailer.encode(), line, MAIL))


@given(st.binary(max_size=300), st.integers(0, 600))
def test_any_bytes_are_a_patch_or_refused(noise: bytes, place: int) -> None:
    """Whatever stands in a file, reading it gives a patch or `PatchInvalid`."""
    with allowed("patch-invalid"):
        assert patch.parse("x.patch", MAIL[:place] + noise + MAIL[place:]).reason


# Picks: a pull request becomes pins that hold for ever, or the run says why not; and the ledger that holds them.


WHY = ("--reason", "the test wants it", "--drop-when", "the test ends")


@pytest.fixture(name="upstream")
def _upstream(host: Host) -> Host:
    """Return the host with a first release, and a project that takes it."""
    host.work.commit({"a.txt": TEXT, "b.txt": b"one\n"}, "Begin")
    host.lock()
    return host


def run(host: Host, *words: str) -> ledger.PickRecord:
    """Run ``pick`` and return the record that it wrote last."""
    assert main.run(["patch", "pick", *host.words, "--fork", host.fork, *words]) == 0
    return host.ledger.records[-1]


# What is pinned.


def test_a_squash_is_pinned_as_what_came_to_the_branch(upstream: Host) -> None:
    """The pins of a merged pull request of several commits are its one commit on the branch and that commit's parent."""
    head = upstream.pull(7, {"a.txt": edited((3, "line three\n"))}, {"a.txt": edited((3, "line 3.0\n")), "c.txt": b"new\n"})
    before = upstream.work.commit({"b.txt": b"two\n"}, "Meanwhile")
    merge = upstream.squash(7)
    made = run(upstream, "7", *WHY)

    assert (made.state, made.head, made.base, made.merge) == ("merged", head, before, merge)
    assert (made.title, made.author, made.date, made.files) == ("Improve it", "T", "2026-11-01", ("a.txt", "c.txt"))
    options = ("--binary", "--full-index", "--no-renames", "--no-indent-heuristic")
    assert made.sha256 == hashlib.sha256(upstream.work.output("diff-tree", "-r", "-p", *options, before, merge)).hexdigest()


def test_an_open_one_is_pinned_as_what_its_branch_has(upstream: Host) -> None:
    """Its title and author are those of its last commit, and later those of the record, which a person may have corrected."""
    start = upstream.work.git("rev-parse", "HEAD")
    upstream.pull(7, {"a.txt": edited((3, "line three\n"))}, {"c.txt": b"new\n"})
    upstream.work.commit({"b.txt": b"two\n"}, "Meanwhile")
    upstream.push()
    made = run(upstream, "7", *WHY)
    assert (made.state, made.merge, made.base, made.files) == (stack.UNRESOLVED, "", start, ("a.txt", "c.txt"))
    upstream.write(msgspec.structs.replace(made, title="Improve it"))
    assert (made.title, run(upstream, "7").title) == ("pr7 2", "Improve it")
    with refusal("pull-request-gone"):
        run(upstream, "8", *WHY)


# What moved, went, or is not true.


def test_a_force_pushed_head_is_an_error_that_shows_both(upstream: Host) -> None:
    """The failure names both commits and the page that compares them, and the ledger stays as it was."""
    old = upstream.pull(7, {"a.txt": edited((3, "line three\n"))}, {"c.txt": b"new\n"})
    before = upstream.carry(7, old)
    upstream.work.commit({"b.txt": b"two\n"}, "Meanwhile")
    upstream.push()
    new = upstream.pull(7, {"a.txt": edited((3, "line III\n"))}, {"c.txt": b"new\n"})

    with refusal("pick-moved", match="head of #7 moved", says=f"difference: https://github.com/acme/widget/compare/{old}..{new}"):
        run(upstream, "7")
    assert upstream.ledger.records == (before,)


@pytest.mark.parametrize("field", ["sha256", "patch_id", "base", "merge", "files"])
def test_a_record_that_was_edited_by_hand_is_a_mismatch(upstream: Host, field: str) -> None:
    """Every pin is checked against the others, whatever the store has already."""
    head = upstream.pull(7, {"a.txt": edited((20, "line twenty\n"))}, {"c.txt": b"new\n"})
    upstream.work.commit({"a.txt": b"above\n" + TEXT}, "Meanwhile")
    record = upstream.carry(7, head, upstream.squash(7))
    wrong = {"sha256": "0" * 64, "patch_id": "0" * 40, "base": record.head, "merge": record.base, "files": ("a.txt",)}
    upstream.write(msgspec.structs.replace(record, **{field: wrong[field]}))
    with refusal("pick-mismatch") as caught:
        series.load_series(upstream.context(), upstream.fork)

    assert any(line.startswith(("sha256: ", "patch-id: ", "files: ")) for line in caught.value.details)


# What a stack carries.


@pytest.mark.parametrize(
    ("has", "reference", "what"),
    [(False, "patch-conflict", r"#7 does not apply to widget: a\.txt"), (True, "patch-already-upstream", "#7 is in widget already, and changed since")],
)
def test_carrying_what_does_not_apply_writes_nothing(upstream: Host, has: bool, reference: str, what: str) -> None:
    """The locked source may lack a commit before it, or have the merge and later changes: then the way on is to do without it."""
    if not has:
        upstream.work.commit({"a.txt": edited((3, "line 3 of main\n"))}, "Meanwhile")
    upstream.pull(7, {"a.txt": edited((3, "line three\n"))})
    merge = upstream.squash(7)
    if has:
        upstream.work.commit({"a.txt": edited((3, "line III\n"))}, "Change it")
        upstream.lock()
    with refusal(reference, match=what) as caught:
        run(upstream, "7", "--carry", *WHY)
    text = "\n".join(caught.value.details)

    assert upstream.ledger.records == ()
    assert ("to go on: sparkwright patch pick 7 --stack test --fork widget --exclude PATH=REASON" in text) is not has
    assert (f"already upstream by ancestor: yes, {merge[:12]} is part of" in text) is has


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["7", *WHY, "--exclude", "a.txt"], "PATH=REASON"),
        (["7", *WHY, "--exclude", "=why"], "PATH=REASON"),
        (["7", *WHY, "--drop", "--exclude", "a.txt=why"], "--drop goes alone"),
        ([*WHY, "--", "widget#"], "names no pull request"),
        ([*WHY, "--", "widget#0"], "names no pull request"),
        ([*WHY, "--", "9" * 5000], "names no pull request"),
        ([*WHY, "--", "https://x/pull/7"], "names no pull request"),
        (["7"], "needs a reason and a condition for dropping it"),
        (["7", "--reason", "why"], "needs a reason and a condition for dropping it"),
        (["7", "--reason", "why", "--drop-when", "  "], "needs a reason and a condition for dropping it"),
    ],
)
def test_words_that_cannot_be_meant_are_wrong_usage(upstream: Host, words: list[str], what: str) -> None:
    """Exclusions without a reason, options that contradict each other, names of no pull request, a record without a reason or an end."""
    with refusal("usage", match=what):
        run(upstream, *words)


# The ledger.

HEAD, BASE, MERGE, SHA256 = "a" * 40, "b" * 40, "c" * 40, "d" * 64
OPEN: dict[str, Any] = {
    "number": 7, "title": "Improve it", "author": "octocat", "state": "open", "seen": "2026-11-01", "date": "2026-10-31", "head": HEAD,
    "base": BASE, "sha256": SHA256, "patch_id": MERGE, "reason": "why", "drop_when": "then", "files": ["a.txt"],
}  # fmt: skip
MERGED = {**OPEN, "state": "merged", "merge": MERGE}


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([OPEN, {**OPEN, "number": 8}, MERGED, {**OPEN, "number": 8}], "listed twice: #7, #8"),
        ([{**OPEN, "head": stack.UNRESOLVED, "stacks": {"test": {}}}], "#7 is carried by test, but its diff is not pinned"),
        ([{**OPEN, "patch_id": stack.UNRESOLVED, "stacks": {"test": {}}}], "#7 is carried by test, but its diff is not pinned"),
        ([{**OPEN, "base": "a" * 39}], ".base`"),
        ([{**OPEN, "head": "main"}], ".head`"),
        ([OPEN, {**OPEN, "number": "8"}], "$.records[1].number"),
        ([{**OPEN, "seen": "2026-02-30"}], "day is out of range"),
        ([{**OPEN, "reason": "  \n"}], "reason"),
        ([{**OPEN, "stacks": {"test": {"a.txt": " "}}}], "stacks"),
        ([{**OPEN, "diff": "--- a"}], "diff"),
    ],
)
def test_a_ledger_that_cannot_be_meant_is_refused(records: list[dict[str, Any]], words: str) -> None:
    """The message names the record's place and the field."""
    with refusal("file-invalid", says=words):
        strict_yaml.parse(strict_yaml.dump({"url": Host.url, "records": records}), ledger.Ledger, "widget.yaml")


@pytest.mark.parametrize("fork", sorted(path.stem for path in (ROOT / "cherry_picks").glob("*.yaml") if path.stem not in ("effects", "ideas")))
def test_a_real_ledger_is_as_it_would_be_written(fork: str) -> None:
    """Byte for byte, so that the next pick changes its own record alone."""
    assert ledger.render(ledger.load_ledger(ROOT, fork)) == ledger.path_of(ROOT, fork).read_text("utf-8")
