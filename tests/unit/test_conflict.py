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
from sparkwright.cherry_picks.apply import Outcome
from sparkwright.cherry_picks.ledger import Ledger
from sparkwright.cherry_picks.patch import Patch
from sparkwright.cherry_picks.upstream import Base
from sparkwright.core.git import Objects
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


def tree_of(objects: Objects, files: Files) -> str:
    return objects.store_files((path, "100644", data) for path, data in files.items())


LAST = edited(("line 5", "line V"), ("line 20", "line XX"), ("line 35", "line XXXV"))


@pytest.fixture(name="begun")
def _begun(host: Host) -> Host:
    """Return the host with a history of a.txt: begun, line 5, line 20, line 35; v1 is the third."""
    for text in (TEXT.encode(), edited(("line 5", "line V")), edited(("line 5", "line V"), ("line 20", "line XX"))):
        host.work.commit({"a.txt": text}, f"State {text.count(b'V') + text.count(b'X')}")
    host.lock()
    host.work.commit({"a.txt": LAST}, "Last")
    host.push()
    return host


def test_a_patch_of_ours_that_conflicts_has_the_whole_report(begun: Host) -> None:
    """apply names base, patch, hunk, both sides, upstream's commits, the three tests and the two commands, in text and as data."""
    begun.work.git("checkout", "--quiet", "-b", "ours", "main")
    mail = begun.work.change({"a.txt": LAST.replace(b"line 34\n", b"line thirty-four\n")})
    begun.work.git("checkout", "--quiet", "main")
    (begun.series / "ours.patch").write_bytes(mail)
    (begun.series / "series").write_text("ours.patch\n")
    context = begun.context()
    context.mirror(begun.url).history("main", newest=True)
    with refusal("patch-conflict", match=r"ours\.patch does not apply to widget: a\.txt") as caught:
        series.apply_series(context, fetch.fetch(context, "widget"))
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
    data = patch.render(objects, tree_of(objects, before), tree_of(objects, after), context=context)
    one = Patch("0.patch", "0" * 64, "Change it", "Pending", "why", "then", tuple(before), data)
    upstream: Any = SimpleNamespace(context=SimpleNamespace(objects=objects), fork="widget", book=Ledger(""), mirror=None)
    tree = tree_of(objects, base)
    error = conflict.explain(upstream, Base("1.1", tree), Outcome("conflict", tree), one, [one])
    document = msgspec.json.decode(msgspec.json.encode(error.document()))["conflict"]
    done = apply.evaluate(objects, tree, [one])[0]

    assert [file["path"] for file in document["files"]] == [section.old or section.new for section in one.sections()]
    assert all("\n" not in row for row in error.details)
    if done.status == "applied" and context:
        assert ": " not in error.what
