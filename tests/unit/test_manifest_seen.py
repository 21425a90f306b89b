"""A machine remembers which manifest of each index it has seen, and goes back for nobody."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.refusals import refusal

from sparkwright.release.errors import ReleaseError
from sparkwright.release.manifest import change, seen, times
from sparkwright.release.manifest.records import Manifest

URL = "https://wheels.example/spark/"
INDEX = seen.index_id(URL)
NOW = "2026-11-10T00:00:00Z"


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKWRIGHT_STATE_DIR", str(tmp_path / "state"))


def numbered(serial: int) -> Manifest:
    made = change.refresh(change.first(URL, at=NOW), at=NOW, by="ed25519:0")
    return replace(made, serial=serial)


def sha(serial: int, kind: str = "a") -> str:
    return f"{kind}{serial:063x}"


def test_a_new_index_passes_and_is_remembered() -> None:
    """Nothing is known of an index at first; checking writes nothing, noting does."""
    seen.check(numbered(3), sha(3), INDEX, NOW)
    assert seen.recall(INDEX) is None
    seen.note(numbered(3), sha(3), INDEX)
    found = seen.recall(INDEX)
    assert found is not None
    assert (found.serial, found.sha256, found.url) == (3, sha(3), URL)


def test_newer_and_equal_pass_and_older_and_forked_do_not() -> None:
    """The same manifest passes again, a newer one passes, an older one is a replay, and another of the same serial is a fork."""
    seen.note(numbered(3), sha(3), INDEX)
    seen.check(numbered(3), sha(3), INDEX, NOW)
    seen.check(numbered(4), sha(4), INDEX, NOW)
    with refusal("manifest-replayed") as replayed:
        seen.check(numbered(2), sha(2), INDEX, NOW)
    assert "serial 3" in replayed.value.details[0]
    with refusal("manifest-forked") as forked:
        seen.check(numbered(3), sha(3, "b"), INDEX, NOW)
    assert [sha(3) in forked.value.details[0], sha(3, "b") in forked.value.details[1]] == [True, True]


def test_noting_never_goes_back() -> None:
    """Between check and note another run may have seen a newer one; then this one is refused, and the newer one stays."""
    seen.check(numbered(3), sha(3), INDEX, NOW)
    seen.note(numbered(5), sha(5), INDEX)
    with refusal("manifest-replayed"):
        seen.note(numbered(3), sha(3), INDEX)
    with refusal("manifest-forked"):
        seen.note(numbered(5), sha(5, "b"), INDEX)
    found = seen.recall(INDEX)
    assert found is not None
    assert found.serial == 5


def test_indexes_are_remembered_apart_and_by_one_spelling() -> None:
    """Another index may have any serial; the same one in another spelling is the same."""
    seen.note(numbered(9), sha(9), INDEX)
    seen.check(numbered(1), sha(1), seen.index_id("https://other.example/"), NOW)
    assert seen.index_id("HTTPS://wheels.example:443/spark") == INDEX


@given(st.lists(st.integers(1, 6), max_size=12))
def test_what_is_remembered_is_the_highest_that_passed(serials: list[int]) -> None:
    """In whatever order manifests are served, the record holds the highest, and exactly the lower ones are refused."""
    index, highest = seen.index_id(f"https://x/{len(serials)}-{'-'.join(map(str, serials))}/{os.urandom(4).hex()}/"), 0
    for serial in serials:
        try:
            seen.note(numbered(serial), sha(serial), index)
            assert serial >= highest
        except ReleaseError as error:
            if error.reference != "manifest-replayed":
                raise
            assert serial < highest
        highest = max(highest, serial)
    found = seen.recall(index)
    assert (found.serial if found else 0) == highest


def test_an_expired_manifest_is_refused_and_the_message_says_since_when() -> None:
    """It holds up to the second before it expires, and not from then on."""
    manifest = numbered(1)
    seen.check(manifest, sha(1), INDEX, "2026-12-09T23:59:59Z")
    for now in (manifest.expires, times.after(manifest.expires, 12)):
        with refusal("manifest-expired") as error:
            seen.check(manifest, sha(1), INDEX, now)
    assert "12.0 days ago" in error.value.what


def test_a_clock_far_behind_is_said() -> None:
    """A machine whose clock is days before the signature cannot know what has expired; some hours are forgiven."""
    seen.check(numbered(1), sha(1), INDEX, "2026-11-09T12:00:00Z")
    with refusal("clock-wrong", match=r"9\.0 days behind"):
        seen.check(numbered(1), sha(1), INDEX, "2026-11-01T00:00:00Z")


def test_an_old_manifest_is_a_replay_even_where_it_has_expired() -> None:
    """What the machine knows for sure is said before what depends on its clock."""
    seen.note(numbered(3), sha(3), INDEX)
    with refusal("manifest-replayed"):
        seen.check(numbered(2), sha(2), INDEX, "2030-01-01T00:00:00Z")


@pytest.mark.parametrize("data", [b"", b"{}", b"<html>", b"\xff", b'{"serial": "1"}', b"[" * 50_000, b" " * 100_000])
def test_a_damaged_record_is_an_error_and_not_a_fresh_start(tmp_path: Path, data: bytes) -> None:
    """Whoever could damage the record could otherwise replay old manifests; it is neither believed nor replaced."""
    seen.note(numbered(3), sha(3), INDEX)
    (path,) = (tmp_path / "state").rglob("*.json")
    path.write_bytes(data)
    with refusal("state-unusable") as error:
        seen.check(numbered(4), sha(4), INDEX, NOW)
    assert str(path) in error.value.what
    with refusal("state-unusable"):
        seen.note(numbered(4), sha(4), INDEX)
    assert path.read_bytes() == data


def test_a_state_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    """A file in the folder's place is an error of its own."""
    (tmp_path / "state").write_text("in the way")
    with refusal("state-unusable"):
        seen.note(numbered(1), sha(1), INDEX)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_leaves_the_record_as_it_was(tmp_path: Path) -> None:
    """Where the new record finds no room, the old one stays."""
    seen.note(numbered(3), sha(3), INDEX)
    (path,) = (tmp_path / "state").rglob("*.json")
    path.with_suffix(".new").symlink_to("/dev/full")
    with refusal("disk-full"):
        seen.note(numbered(4), sha(4), INDEX)
    found = seen.recall(INDEX)
    assert found is not None
    assert found.serial == 3


def _note(serial: int) -> int:
    try:
        seen.note(numbered(serial), sha(serial), INDEX)
    except ReleaseError as error:
        if error.reference != "manifest-replayed":
            raise
        return 0
    return serial


def test_many_runs_at_once_agree_on_the_highest() -> None:
    """Processes that note different manifests at the same time leave the highest behind, whole."""
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(4, mp_context=context) as pool:
        done = list(pool.map(_note, [7, 3, 9, 1, 8, 2, 9, 5]))
    found = seen.recall(INDEX)
    assert found is not None
    assert found.serial == max(done) == 9


def test_a_killed_run_leaves_the_old_record_or_the_new_one(tmp_path: Path) -> None:
    """A process that notes one manifest after the other is killed in the middle; what it leaves is read, and the next run goes on."""
    code = (
        "import sys\nfrom msgspec.structs import replace\nfrom sparkwright.release.manifest import change, seen\n"
        f"made = change.refresh(change.first({URL!r}, at={NOW!r}), at={NOW!r}, by='x')\n"
        f"for n in range(1, 10**9):\n    seen.note(replace(made, serial=n), f'{{n:064x}}', {INDEX!r})\n    print(n, flush=True)\n"
    )
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
            assert child.stdout is not None
            said = [child.stdout.readline() for _ in range(20)]
            child.send_signal(signal.SIGKILL)
            child.wait()
        found = seen.recall(INDEX)
        assert found is not None
        assert found.serial >= int(said[-1])
        seen.note(replace(numbered(1), serial=found.serial + 1), sha(1), INDEX)
        (tmp_path / "state" / "seen" / f"{INDEX}.json").unlink()
