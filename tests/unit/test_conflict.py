"""The conflict report: what a hunk wants, what it finds, who changed it on either side; never a failure of its own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.refusals import refusal
from tests.support.texts import TEXT, edited

from sparkwright.cherry_picks import series
from sparkwright.forks import fetch

if TYPE_CHECKING:
    from tests.unit.conftest import Host

LAST = edited((5, "line V\n"), (20, "line XX\n"), (35, "line XXXV\n"))


@pytest.fixture(name="begun")
def _begun(host: Host) -> Host:
    """Return the host with a history of a.txt: begun, line 5, line 20, line 35; v1 is the third."""
    for text in (TEXT, edited((5, "line V\n")), edited((5, "line V\n"), (20, "line XX\n"))):
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
