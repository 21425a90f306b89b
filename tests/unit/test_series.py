"""The series: patches apply at the very lines they name, each has an effect, and the result is what `git am` gives."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkwright.cherry_picks import patch, series
from sparkwright.cherry_picks.series import PatchedTree
from sparkwright.errors import PatchConflict, PatchInvalid, PatchNoEffect, PatchUpstream
from sparkwright.git import Objects

if TYPE_CHECKING:
    from tests.unit.conftest import Repository

TEXT = "".join(f"line {number}\n" for number in range(1, 41))


def edited(*changes: tuple[str, str]) -> bytes:
    text = TEXT
    for old, new in changes:
        text = text.replace(f"{old}\n", f"{new}\n", 1)
    return text.encode()


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
    return series.apply_to(objects, "mini", base, tuple(patch.parse(f"{number}.patch", data) for number, data in enumerate(patches)))


def fetched(objects: Objects, repository: Repository, revision: str = "HEAD") -> str:
    """Bring a revision into *objects* and return its tree id."""
    objects.fetch(repository.url, repository.git("rev-parse", revision))
    return repository.tree(revision)


# Application.


def test_a_series_gives_the_tree_that_git_am_gives(objects: Objects, repository: Repository, tmp_path: Path) -> None:
    """Edits, new, removed, renamed, executable, binary and CRLF files come out as in a real clone with `git am`."""
    repository.commit(
        {"a.txt": TEXT.encode(), "b.txt": b"b\n", "gone.txt": b"g\n", "crlf.txt": b"x\r\ny\r\nz\r\n", "logo": bytes(range(256))}
    )
    repository.git("tag", "base")
    base = fetched(objects, repository)
    patches = [
        repository.change({"a.txt": edited(("line 7", "line seven"), ("line 30", "line thirty"))}),
        repository.change(
            {"a.txt": edited(("line 7", "line seven"), ("line 30", "line 30\nline 30.5")), "new/c.txt": b"no newline at end"}
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


def test_an_empty_series_is_the_source_itself(objects: Objects, repository: Repository) -> None:
    """A fork without patches keeps its tree."""
    repository.commit({"a": b"1"})
    base = fetched(objects, repository)

    assert applied(objects, base) == PatchedTree("mini", base, base, ())


def test_a_patch_that_does_not_fit_is_a_conflict(objects: Objects, repository: Repository) -> None:
    """A conflict names the patch, the fork and the tree before it, in git's own words."""
    repository.commit({"a.txt": TEXT.encode()})
    made = repository.change({"a.txt": edited(("line 7", "line seven"))})
    repository.git("reset", "--quiet", "--hard", "HEAD~1")
    repository.commit({"a.txt": edited(("line 7", "line VII"))})
    base = fetched(objects, repository)
    with pytest.raises(PatchConflict, match=r"0\.patch does not apply to mini") as caught:
        applied(objects, base, made)

    assert "error: patch failed: a.txt:6" in caught.value.details
    assert "error: a.txt: patch does not apply" in caught.value.details
    assert caught.value.details[-1] == f"tree before it: {base}"


def test_a_patch_for_a_missing_file_is_a_conflict(objects: Objects, repository: Repository) -> None:
    """A file that upstream removed or renamed is named."""
    repository.commit({"a.txt": TEXT.encode(), "b": b""})
    made = repository.change({"a.txt": edited(("line 7", "line seven"))})
    repository.git("reset", "--quiet", "--hard", "HEAD~1")
    repository.commit({"a.txt": None})

    with pytest.raises(PatchConflict) as caught:
        applied(objects, fetched(objects, repository), made)
    assert "error: a.txt: does not exist in index" in caught.value.details


@pytest.mark.parametrize("shift", [1, 3, -2])
def test_a_patch_that_fits_at_other_lines_is_a_conflict(objects: Objects, repository: Repository, shift: int) -> None:
    """Where upstream moved the lines, the patch is refused, because one line of context is too little to be sure."""
    repository.commit({"a.txt": TEXT.encode()})
    made = repository.change({"a.txt": edited(("line 20", "line twenty"))})
    repository.git("reset", "--quiet", "--hard", "HEAD~1")
    moved = "added\n" * shift + TEXT if shift > 0 else "".join(TEXT.splitlines(keepends=True)[-shift:])
    repository.commit({"a.txt": moved.encode()})
    with pytest.raises(PatchConflict, match="does not apply to mini") as caught:
        applied(objects, fetched(objects, repository), made)

    assert f"offset {shift} line" in caught.value.details[1]


def test_no_whitespace_is_repaired(objects: Objects, repository: Repository) -> None:
    """A patch whose context differs in white space alone is a conflict; one that adds trailing blanks keeps them."""
    repository.commit({"a.txt": b"one\n\ttwo\nthree\n"})
    made = repository.change({"a.txt": b"one\n\ttwo\nthree  \n\n\n"})
    base = repository.tree("HEAD~1")
    objects.fetch(repository.url, repository.git("rev-parse", "HEAD~1"))
    done = applied(objects, base, made)
    spaces = objects.with_files(base, {"a.txt": b"one\n        two\nthree\n"})

    assert objects.blob(done.tree, "a.txt") == b"one\n\ttwo\nthree  \n\n\n"
    with pytest.raises(PatchConflict):
        applied(objects, spaces, made)


def test_nothing_is_half_applied(objects: Objects, repository: Repository) -> None:
    """A patch of two files of which one does not fit changes neither, and the first patch's tree is the one that is named."""
    repository.commit({"a.txt": TEXT.encode(), "b.txt": TEXT.encode()})
    base = fetched(objects, repository)
    first = repository.change({"a.txt": edited(("line 2", "line two"))})
    repository.change({"b.txt": edited(("line 9", "line nine"))})
    both = repository.change({"a.txt": edited(("line 3", "line three")), "b.txt": edited(("line 9", "line NINE"))})

    with pytest.raises(PatchConflict, match=r"1\.patch") as caught:
        applied(objects, base, first, both)
    assert caught.value.details[-1] == f"tree before it: {repository.tree('HEAD~2')}"


def test_a_binary_patch_that_is_cut_off_is_a_conflict(objects: Objects, repository: Repository) -> None:
    """git skips a damaged binary change and calls the rest a success; here it is an error."""
    repository.commit({"a.txt": TEXT.encode(), "logo": bytes(range(256))})
    made = repository.change({"a.txt": edited(("line 7", "line seven")), "logo": bytes(reversed(range(256)))})

    with pytest.raises(PatchConflict) as caught:
        applied(objects, fetched(objects, repository, "HEAD~1"), made.rstrip())
    assert "error: corrupt binary patch" in caught.value.details[0]


def test_a_patch_that_is_there_already_is_no_success(objects: Objects, repository: Repository) -> None:
    """A patch that upstream took is refused as such, and not as a conflict."""
    repository.commit({"a.txt": TEXT.encode()})
    made = repository.change({"a.txt": edited(("line 7", "line seven"))})

    with pytest.raises(PatchUpstream, match=r"0\.patch is in mini already"):
        applied(objects, fetched(objects, repository), made)


def test_a_patch_without_effect_is_an_error(objects: Objects, repository: Repository) -> None:
    """A patch that replaces lines by the same lines leaves the tree as it was, and is refused for it."""
    repository.commit({"a.txt": TEXT.encode()})
    made = repository.change({"a.txt": edited(("line 7", "line seven"))}).replace(b"+line seven", b"+line 7")

    with pytest.raises(PatchNoEffect, match=r"0\.patch changes nothing in mini"):
        applied(objects, repository.tree("HEAD~1") and fetched(objects, repository, "HEAD~1"), made)


@pytest.mark.parametrize("path", ["../evil", "/etc/evil", ".git/hooks/post-checkout"])
def test_a_patch_cannot_write_outside(objects: Objects, repository: Repository, tmp_path: Path, path: str) -> None:
    """A patch that names a path outside of the tree, or inside of a repository's own folder, is refused."""
    repository.commit({"a": b""})
    made = repository.change({"evil": b"x\n"})
    with pytest.raises(PatchInvalid, match="outside the tree"):
        applied(
            objects,
            fetched(objects, repository, "HEAD~1"),
            made.replace(b"a/evil", b"a/" + path.encode()).replace(b"b/evil", b"b/" + path.encode()),
        )

    assert not list(tmp_path.rglob("evil*")) or {item.parent for item in tmp_path.rglob("evil*")} == {repository.path}


def test_a_patch_cannot_write_through_a_link(objects: Objects, repository: Repository) -> None:
    """A patch that makes a link, behind which the next could write, is refused."""
    repository.commit({"a": b""})
    (repository.path / "link").symlink_to("/tmp")
    first = repository.change({})

    with pytest.raises(PatchInvalid, match="makes a link"):
        applied(objects, fetched(objects, repository, "HEAD~1"), first)


def test_a_patch_cannot_write_behind_a_link_of_the_tree(objects: Objects, repository: Repository) -> None:
    """A patch that names a file behind a link that upstream has is a conflict."""
    repository.commit({"a": b""})
    (repository.path / "link").symlink_to("/tmp")
    repository.commit({})
    made = repository.change({"evil": b"x\n"}).replace(b"a/evil", b"a/link/evil").replace(b"b/evil", b"b/link/evil")

    with pytest.raises(PatchConflict):
        applied(objects, fetched(objects, repository, "HEAD~1"), made)


# The list.


def wrong(folder: Path) -> str:
    with pytest.raises(PatchInvalid) as caught:
        series.load(folder)
    return "\n".join(caught.value.details)


@pytest.fixture(name="made")
def _made(repository: Repository) -> bytes:
    repository.commit({"a.txt": TEXT.encode()})
    return repository.change({"a.txt": edited(("line 7", "line seven"))})


def test_patches_are_loaded_in_the_order_of_the_series(tmp_path: Path, made: bytes) -> None:
    """The file `series` decides the order; comments and empty lines do not count."""
    listing = "# quilt's format\n1.patch\n\n0.patch  # why\n"

    assert [one.name for one in series.load(written(tmp_path / "s", made, made, listing=listing))] == ["1.patch", "0.patch"]
    assert series.load(tmp_path / "none") == ()


def test_a_series_and_its_folder_must_agree(tmp_path: Path, made: bytes) -> None:
    """A patch listed twice, listed but missing, or there but not listed is an error that names each."""
    said = wrong(written(tmp_path / "s", made, made, listing="0.patch\n0.patch\ngone.patch\n"))

    assert said.splitlines() == ["listed twice: 0.patch", "listed, but not there: gone.patch", "there, but not listed: 1.patch"]


@pytest.mark.parametrize("name", ["../s/0.patch", "/etc/passwd", "sub/0.patch"])
def test_a_series_lists_files_of_its_own_folder(tmp_path: Path, made: bytes, name: str) -> None:
    """A path in the series is not followed."""
    assert f"listed, but not there: {name}" in wrong(written(tmp_path / "s", made, listing=f"0.patch\n{name}\n"))


def test_a_series_that_is_not_text_is_refused(tmp_path: Path, made: bytes) -> None:
    """A list in another encoding is an error like any other."""
    folder = written(tmp_path / "s", made)
    (folder / "series").write_bytes(b"\xff\xfe0.patch\n")

    assert wrong(folder)


# The header.


def test_the_header_is_read(made: bytes) -> None:
    """Subject, trailers and touched files come from the mail as git format-patch writes it."""
    one = patch.parse("x.patch", made)

    assert (one.subject, one.status, one.reason, one.drop_when) == ("Change something", "Pending", "the test wants it", "the test ends")
    assert one.files == ("a.txt",)
    assert one.data.startswith(b"diff --git a/a.txt b/a.txt")


def test_a_subject_reads_as_it_was_written(repository: Repository) -> None:
    """Long subjects and those beyond ASCII, which git encodes and folds, are shown as their author wrote them."""
    subject = "Größe der Blöcke: nimm die kleinste, die für jede Ebene und für jede Anzahl von Experten genügt – immer"
    repository.commit({"a": b""})

    assert patch.parse("x.patch", repository.change({"b": b"x\n"}, subject)).subject == subject


@pytest.mark.parametrize("trailer", patch.TRAILERS)
@pytest.mark.parametrize("value", ["", "   "])
def test_each_trailer_is_mandatory(made: bytes, trailer: str, value: str) -> None:
    """A patch without one of its trailers, or with an empty one, is an error that names the trailer."""
    lines = [line for line in made.split(b"\n") if not line.startswith(trailer.encode())]
    for lacking in (lines, [f"{trailer}: {value}".encode() if line.startswith(trailer.encode()) else line for line in made.split(b"\n")]):
        with pytest.raises(PatchInvalid) as caught:
            patch.parse("x.patch", b"\n".join(lacking))
        assert caught.value.details == (f"missing trailer: {trailer}",)


def test_the_status_is_one_of_a_few(made: bytes) -> None:
    """An Upstream-Status that nobody knows is refused with those that are known; words after a known one may explain it."""
    with pytest.raises(PatchInvalid, match="unknown Upstream-Status") as caught:
        patch.parse("x.patch", made.replace(b"Pending", b"pending"))

    assert "Pending, Submitted" in caught.value.details[1]
    assert patch.parse("x.patch", made.replace(b"Pending", b"Submitted [#44740]")).status == "Submitted [#44740]"


@pytest.mark.parametrize(
    "data", [b"", b"diff --git a/x b/x\n--- a/x\n+++ b/x\n", b"Subject: x\n\nUpstream-Status: Pending\n", b"\xff" * 50]
)
def test_what_is_no_mail_with_a_diff_is_refused(data: bytes) -> None:
    """A bare diff says neither why nor until when; a mail without a diff changes nothing."""
    with pytest.raises(PatchInvalid, match=r"x\.patch is not a patch"):
        patch.parse("x.patch", data)


@given(st.binary(max_size=300), st.integers(0, 600))
def test_any_bytes_are_a_patch_or_refused(noise: bytes, place: int) -> None:
    """Whatever stands in a file, reading it gives a patch or `PatchInvalid`."""
    whole = b"From x\nSubject: s\n\nUpstream-Status: Pending\nReason: r\nDrop-When: d\n---\n\ndiff --git a/x b/x\n--- a/x\n+++ b/x\n"
    try:
        made = patch.parse("x.patch", whole[:place] + noise + whole[place:])
    except PatchInvalid:
        return

    assert made.reason
