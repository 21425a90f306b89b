"""The conflict report: what a hunk wants, what it finds, who changed it on either side; never a failure of its own."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.refusals import refusal

from sparkwright.cherry_picks import apply, conflict, patch, series
from sparkwright.cherry_picks.conflict import FileConflict, HunkState
from sparkwright.cherry_picks.patch import Hunk, Patch, PatchError
from sparkwright.cherry_picks.upstream import Base, Upstream
from sparkwright.core.git_store import Objects
from sparkwright.forks import fetch

if TYPE_CHECKING:
    from tests.unit.conftest import Host

TEXT = "".join(f"line {number}\n" for number in range(1, 41))
Files = dict[str, bytes]


def edited(*changes: tuple[str, str], text: str = TEXT) -> bytes:
    for old, new in changes:
        assert f"{old}\n" in text
        text = text.replace(f"{old}\n", f"{new}\n", 1)
    return text.encode()


@pytest.fixture(name="objects")
def _objects(tmp_path: Path) -> Objects:
    return Objects(tmp_path / "objects.git")


def tree_of(objects: Objects, files: Files) -> str:
    return objects.store_files((path, "100644", data) for path, data in files.items())


def made(objects: Objects, before: Files, after: Files, name: str = "0.patch", *, context: int = 3) -> Patch:
    """Return the patch that makes *after* of *before*."""
    data = patch.render(objects, tree_of(objects, before), tree_of(objects, after), context=context)
    paths = tuple(dict.fromkeys(section.path for section in patch.sections(data)))
    return Patch(name, "0" * 64, "Change it", "Pending", "why", "then", paths, data)


def hunk(before: bytes, after: bytes, *, context: int = 3) -> Hunk:
    """Return the only hunk of a change of one file."""
    with tempfile.TemporaryDirectory() as folder:
        objects = Objects(Path(folder) / "objects.git")
        [found] = made(objects, {"a": before}, {"a": after}, context=context).sections()[0].hunks
    return found


def failure(objects: Objects, files: Files, one: Patch, *earlier: Patch, upstream: Upstream | None = None, origin: str = "") -> PatchError:
    """Explain a patch on *files*, which came from the tree *origin*, with an upstream of which nothing is known."""
    nothing: Any = SimpleNamespace(session=SimpleNamespace(objects=objects), fork="widget", book=None, mirror=None, tip="")
    tree = tree_of(objects, files)
    return conflict.explain(upstream or nothing, Base("1.1", origin or tree), tree, one, earlier)


# Hunks.

LINE_20 = (TEXT.encode(), edited(("line 20", "line twenty")))


def test_a_hunk_whose_lines_are_gone() -> None:
    """The lines that differ are shown, those that both sides have are not."""
    text = b"added\nadded\n" + edited(("line 19", "line XIX"), ("line 21", "line 21\nline 21.5"))

    assert conflict.hunk_state(text, hunk(*LINE_20)) == HunkState(
        "@@ -17,7 +17,7 @@ line 16", "gone", 19, ("line 19", "line 23"), ("line XIX", "line 21.5")
    )


# Files.


def file_of(objects: Objects, base: Files, before: Files, after: Files, **more: Any) -> FileConflict:
    [found] = failure(objects, base, made(objects, before, after), **more).data["conflict"]["files"]  # type: ignore[index]
    assert isinstance(found, FileConflict)
    return found


# Upstream's part.


@pytest.fixture(name="begun")
def _begun(host: Host) -> Host:
    """Return the host with a history of a.txt: begun, line 5, line 20, line 35; v1 is the third."""
    for text in (TEXT.encode(), edited(("line 5", "line V")), edited(("line 5", "line V"), ("line 20", "line XX"))):
        host.work.commit({"a.txt": text}, f"State {text.count(b'V') + text.count(b'X')}")
    host.lock()
    host.work.commit({"a.txt": edited(("line 5", "line V"), ("line 20", "line XX"), ("line 35", "line XXXV"))}, "Last")
    host.push()
    return host


def upstream_of(host: Host, base: bytes, before: bytes, after: bytes, **more: Any) -> FileConflict:
    """Explain a patch from *before* to *after* on a tree that has no commit."""
    upstream = Upstream(host.session(), "widget")
    upstream.session.mirror(host.url).history("main", newest=True)
    return file_of(upstream.session.objects, {"a.txt": base}, {"a.txt": before}, {"a.txt": after}, upstream=upstream, **more)


STATES = (
    TEXT.encode(),
    edited(("line 5", "line V")),
    edited(("line 5", "line V"), ("line 20", "line XX")),
    edited(("line 5", "line V"), ("line 20", "line XX"), ("line 35", "line XXXV")),
)


def test_a_file_that_ours_changed_is_placed_by_what_the_base_came_with(begun: Host) -> None:
    """After a patch of ours the file is no state of upstream's; the base's own file is."""
    ours = edited(("line 1", "ours"), text=STATES[0].decode())
    patch = STATES[3].replace(b"line XX\n", b"line XX and more\n")
    session = begun.session()
    origin = tree_of(session.objects, {"a.txt": STATES[0]})

    assert upstream_of(begun, ours, STATES[3], patch).note == "the base's a.txt is no state of upstream's branch"
    assert [one.subject for one in upstream_of(begun, ours, STATES[3], patch, origin=origin).base_lacks] == ["State 3"]


def test_offline_it_names_too_much_rather_than_too_little(begun: Host) -> None:
    """The files of the commits between are not in the store: all of these commits are named."""
    begun.session().mirror(begun.url).history("main", newest=True)
    session = begun.session("--offline")
    after = STATES[3].replace(b"line XX\n", b"line XX and more\n")
    upstream = Upstream(session, "widget")
    found = file_of(session.objects, {"a.txt": STATES[0]}, {"a.txt": STATES[3]}, {"a.txt": after}, upstream=upstream)

    assert [commit.subject for commit in found.base_lacks] == ["Last", "State 3", "State 1"]


def test_a_patch_of_ours_that_conflicts_has_the_whole_report(begun: Host) -> None:
    """apply names base, patch, hunk, both sides, upstream's commits, the three tests and the two commands, in text and as data."""
    begun.work.git("checkout", "--quiet", "-b", "ours", "main")
    mail = begun.work.change({"a.txt": STATES[3].replace(b"line 34\n", b"line thirty-four\n")})
    begun.work.git("checkout", "--quiet", "main")
    (begun.series / "ours.patch").write_bytes(mail)
    (begun.series / "series").write_text("ours.patch\n")
    session = begun.session()
    session.mirror(begun.url).history("main", newest=True)
    with refusal("patch-conflict", match=r"ours\.patch does not apply to widget: a\.txt") as caught:
        series.apply_series(session, fetch.fetch(session, "widget"))
    text = "\n".join(caught.value.details)
    report = json.loads(msgspec.json.encode(caught.value.document()))["conflict"]

    for wanted in (
        "base: https://github.com/acme/widget.git @ ",
        "patch: ours.patch\nsubject: Change something",
        "a.txt: conflict",
        "    wants: line XXXV",
        "    finds: line 35",
        "  the patch builds on, and the base lacks: ",
        "already upstream by ancestor: could not be tested, the patch is ours",
        "already upstream by patch-id: no, ",
        "already upstream by reverse: no, ",
        "to go on: sparkwright patch rebase --stack test --fork widget",
        "to go on: sparkwright patch export --stack test --fork widget",
    ):
        assert wanted in text
    assert [one["subject"] for one in report["files"][0]["base_lacks"]] == ["Last"]
    assert report["evidence"][0]["test"] == "ancestor"


# Whatever comes.

SCRATCH = tempfile.TemporaryDirectory()
POOL = st.sampled_from([b"a\n", b"b\n", b"c\n", b"\n", b"}\n", b"a\r\n", b"\x1b[2J\n", b"\xff\n", b"\x00\n", b"end"])
TEXTS = st.lists(POOL, max_size=12).map(b"".join)
FILES = st.dictionaries(st.sampled_from(["a", "b", "dir/a", "dir/b", "ä x", "dir2"]), TEXTS, max_size=4)


@settings(max_examples=15)
@given(before=FILES, after=FILES, base=FILES, context=st.integers(0, 3))
def test_explaining_never_fails(before: Files, after: Files, base: Files, context: int) -> None:
    """Any patch on any tree gives a report with a row for each file, and its text and its data are made."""
    objects = Objects(Path(SCRATCH.name) / "objects.git")
    one = made(objects, before, after, context=context)
    error = failure(objects, base, one, one)
    document = msgspec.json.decode(msgspec.json.encode(error.document()))["conflict"]
    done = apply.evaluate(objects, tree_of(objects, base), [one])[0]

    assert [file["path"] for file in document["files"]] == [section.old or section.new for section in one.sections()]
    assert all("\n" not in row for row in error.details)
    if done.status == "applied" and context:
        assert ": " not in error.what
