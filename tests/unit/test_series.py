"""The series: patches apply at the very lines they name, each has an effect, and the result is what `git am` gives."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refusal
from tests.support.texts import TEXT, edited
from tests.unit.conftest import Host, Repository

from sparkwright.cherry_picks import apply, patch, series
from sparkwright.cherry_picks.apply import Outcome, PatchedTree
from sparkwright.cherry_picks.patch import Patch, PatchError
from sparkwright.core import git
from sparkwright.core.files import sha256_bytes
from sparkwright.core.git import Objects, blob_id
from sparkwright.forks import fetch


@pytest.fixture(name="objects")
def _objects(tmp_path: Path) -> Objects:
    return Objects(tmp_path / "objects.git")


def written(folder: Path, *patches: bytes, listing: str | None = None) -> Path:
    """Write *patches* as 0.patch, 1.patch … and a series that lists them."""
    folder.mkdir(exist_ok=True)
    for number, data in enumerate(patches):
        (folder / f"{number}.patch").write_bytes(data)
    names = "".join(f"{number}.patch\n" for number in range(len(patches)))
    (folder / "series").write_text(names if listing is None else listing)
    return folder


def applied(objects: Objects, base: str, *patches: bytes) -> PatchedTree:
    return apply.apply_patches(objects, "mini", base, tuple(patch.parse(f"{number}.patch", data) for number, data in enumerate(patches)))


def fetched(objects: Objects, repository: Repository, revision: str = "HEAD") -> str:
    """Bring a revision into *objects* and return its tree id."""
    objects.run(["fetch", "-q", "--depth=1", "--no-write-fetch-head", repository.url, repository.git("rev-parse", revision)])
    return repository.tree(revision)


# Application.


def test_a_series_gives_the_tree_that_git_am_gives(objects: Objects, repository: Repository, tmp_path: Path) -> None:
    """Edits, new, removed, renamed, executable, binary and CRLF files come out as in a real clone with `git am`."""
    repository.commit(
        {"a.txt": TEXT, "b.txt": b"b\n", "gone.txt": b"g\n", "crlf.txt": b"x\r\ny\r\nz\r\n", "logo": bytes(range(256))}
    )
    repository.git("tag", "base")
    base = fetched(objects, repository)
    patches = [
        repository.change({"a.txt": edited((7, "line seven\n"), (30, "line thirty\n"))}),
        repository.change(
            {"a.txt": edited((7, "line seven\n"), (30, "line 30\nline 30.5\n")), "new/c.txt": b"no newline at end"}
        ),
        repository.change({"gone.txt": None, "moved.txt": b"b\n", "b.txt": None}),
        repository.change({"crlf.txt": b"x\r\nY\r\nz\r\n", "logo": bytes(reversed(range(256)))}),
    ]
    (repository.path / "moved.txt").chmod(0o755)
    patches.append(repository.change({}, "Make it executable"))
    done = applied(objects, base, *patches)

    clone = tmp_path / "clone"
    repository.git("clone", "--quiet", "--branch", "base", ".", str(clone))
    mails = [str(path) for path in sorted(written(tmp_path / "mails", *patches).glob("*.patch"))]
    person = ["-c", "user.name=T", "-c", "user.email=t@t.example"]
    plain = ["-c", "core.autocrlf=false", "-c", "apply.whitespace=nowarn", "-c", "diff.noprefix=false"]
    subprocess.run(["git", *person, *plain, "am", "--quiet", "--keep-cr", *mails], cwd=clone, check=True, capture_output=True)
    tree = subprocess.run(["git", "rev-parse", "HEAD^{tree}"], cwd=clone, check=True, capture_output=True, text=True).stdout.strip()

    assert (done.base, done.tree) == (base, tree)
    assert [step.tree for step in done.steps] == [repository.tree(f"HEAD~{number}") for number in (4, 3, 2, 1, 0)]


def test_a_binary_patch_that_is_cut_off_is_a_conflict(objects: Objects, repository: Repository) -> None:
    """git skips a damaged binary change and calls the rest a success; here it is an error."""
    repository.commit({"a.txt": TEXT, "logo": bytes(range(256))})
    made = repository.change({"a.txt": edited((7, "line seven\n")), "logo": bytes(reversed(range(256)))})

    with refusal("patch-conflict") as caught:
        applied(objects, fetched(objects, repository, "HEAD~1"), made.rstrip())
    assert "error: corrupt binary patch" in caught.value.details[0]


def test_a_killed_git_applies_nothing(objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A git apply that the kernel ends for want of memory says nothing; the patch counts as one that does not apply."""
    base, program = objects.store_files([("a.txt", git.REGULAR, TEXT)]), tmp_path / "git"
    program.write_text(f'#!/bin/sh\ncase "$*" in *" apply "*) kill -9 $$;; esac\nexec {shutil.which("git")} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    diff = b"diff --git a/n b/n\nnew file mode 100644\nindex 0000000..1111111\n--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n+x\n"

    with refusal("patch-conflict"):
        apply.apply_patches(objects, "widget", base, [mine(diff)])


# Picks, and what is unusual.


def picked(data: bytes, number: int = 7) -> Patch:
    """Return the pull request whose diff *data* is."""
    sections = patch.sections(data)
    return Patch(
        f"#{number}", sha256_bytes(data), "Improve it", "Backport", "why", "then", tuple(one.path for one in sections), data, pick=number
    )


def mine(data: bytes) -> Patch:
    """Return a patch of ours with the diff *data*."""
    return msgspec.structs.replace(picked(data), name="0.patch", pick=0)


def tried(objects: Objects, tree: str, one: Patch, *, movable: bool = False) -> Outcome:
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
@pytest.mark.parametrize("context", [1, 3])
def test_every_kind_of_change_is_applied_once(objects: Objects, kind: str, context: int) -> None:
    """As a pick and as a patch of ours it gives the tree that it was made from, and on that tree it is no success."""
    before, after = (
        objects.store_files((name.rstrip("!"), git.EXECUTABLE if name.endswith("!") else git.REGULAR, data) for name, data in files.items())
        for files in KINDS[kind]
    )
    data = patch.render(objects, before, after, context=context)
    for one in (picked(data), mine(data)):
        assert tried(objects, before, one) == Outcome("applied", after)
        assert tried(objects, after, one).status == "already-upstream"
        assert apply.apply_patches(objects, "mini", before, [one]).tree == after
        with refusal("patch-already-upstream"):
            apply.apply_patches(objects, "mini", after, [one])
        with refusal("patch-already-upstream", match="is in mini already"):
            apply.apply_patches(objects, "mini", before, [one, one])


def moved_base(objects: Objects) -> tuple[str, str, bytes]:
    """Return a tree, one in which five lines stand above, and a diff for the first one."""
    base, after = (objects.store_files([("a", git.REGULAR, text)]) for text in (TEXT, edited((20, "line twenty\n"))))
    other = objects.store_files([("a", git.REGULAR, b"new\n" * 5 + TEXT)])
    return base, other, patch.render(objects, base, after)


def test_a_pick_may_move_where_ours_may_not(objects: Objects) -> None:
    """The lines of a pull request may stand elsewhere in the base; how many hunks did is told. A patch of ours is made anew."""
    _, other, data = moved_base(objects)
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
        assert tried(objects, before, one) == Outcome("applied", after)
        for text in (old, new):
            longer = objects.store_files([("a", git.REGULAR, text + b"\n" + rest.encode())])
            assert tried(objects, longer, one).status == "conflict"


def test_a_patch_that_only_looks_is_empty(objects: Objects) -> None:
    """Context alone, equal lines for equal lines, and no diff at all change nothing, wherever they are tried."""
    base, other, data = moved_base(objects)
    context = data.replace(b"-line 20\n+line twenty\n", b" line 20\n")
    for one in (context, data.replace(b"+line twenty", b"+line 20"), b"", b"\n"):
        for tree in (base, other):
            assert tried(objects, tree, picked(one)).status == tried(objects, tree, mine(one)).status == "empty"
        with refusal("patch-no-effect", match="#7 changes nothing in mini"):
            apply.apply_patches(objects, "mini", base, [picked(one)])


EDIT = b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n-a\n+b\n c\n"
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
    with refusal("patch-invalid", match="a file that it does not name") as caught:
        apply.apply_patches(objects, "mini", base, [mine(diff)])
    assert caught.value.details == (f"{mine(diff).name}: .github/y: 100644",)


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


@pytest.fixture(name="stack")
def _stack(host: Host) -> Host:
    """Return a stack that carries a pull request, part of which it leaves out, and five patches of ours."""
    host.work.commit({"a.txt": TEXT, "b.txt": b"b\n", "c.txt": b"c\n"})
    host.lock()
    host.carry(7, host.pull(7, {"b.txt": b"picked\n", "c.txt": b"left out\n"}), excluded=("c.txt",))
    for number in range(5):
        host.ours(f"{number}.patch", {"a.txt": edited(*((4 * one + 1, f"changed {one}\n") for one in range(number + 1)))})
    return host


def applied_by(host: Host, *words: str) -> PatchedTree:
    """Return the patched tree of a new run."""
    run = host.context(*words)
    return series.apply_series(run, fetch.fetch(run, host.fork))


def test_picks_come_first_and_what_is_left_out_stays(stack: Host) -> None:
    """The pull request is applied before ours, less the file that the stack leaves out."""
    done = applied_by(stack)
    objects = stack.context().objects

    assert [step.name for step in done.steps] == ["#7", *(f"{number}.patch" for number in range(5))]
    assert (objects.blob(done.tree, "b.txt"), objects.blob(done.tree, "c.txt")) == (b"picked\n", b"c\n")


@pytest.mark.parametrize("lost", ["objects.git", "mirrors", "records"])
def test_a_store_that_lost_a_part_gives_the_same(stack: Host, lost: str) -> None:
    """A record is believed only while everything that it names is there."""
    first = applied_by(stack)
    shutil.rmtree(stack.cache / lost)

    assert applied_by(stack) == first
    assert stack.context().objects.whole(first.tree)


#: A patch file that is complete.
MAIL = (
    b"From x\nSubject: s\n\nUpstream-Status: Pending\nReason: r\nDrop-When: d\n---\n\n"
    b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"
)

# The list.


def test_a_series_and_its_folder_must_agree(tmp_path: Path) -> None:
    """A patch listed twice, listed but missing, or there but not listed is an error that names each."""
    with refusal("patch-invalid") as caught:
        series.load(written(tmp_path / "s", MAIL, MAIL, listing="0.patch\n0.patch\ngone.patch\n"))

    assert caught.value.details == ("listed twice: 0.patch", "listed, but not there: gone.patch", "there, but not listed: 1.patch")


# The header.


@pytest.mark.parametrize("trailer", patch.TRAILERS)
@pytest.mark.parametrize("line", [b"", b"\\1:   "])
def test_each_trailer_is_mandatory(trailer: str, line: bytes) -> None:
    """A patch without one of its trailers, or with an empty one, is an error that names the trailer."""
    with refusal("patch-invalid") as caught:
        patch.parse("x.patch", re.sub(b"(?m)^(%s): .*$" % trailer.encode(), line, MAIL))
    assert caught.value.details == (f"missing trailer: {trailer}",)


@given(st.binary(max_size=300), st.integers(0, 600))
def test_any_bytes_are_a_patch_or_refused(noise: bytes, place: int) -> None:
    """Whatever stands in a file, reading it gives a patch or `PatchInvalid`."""
    try:
        made = patch.parse("x.patch", MAIL[:place] + noise + MAIL[place:])
    except PatchError as error:
        if error.reference != "patch-invalid":
            raise
        return

    assert made.reason
