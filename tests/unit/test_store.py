"""The store: whole results or none, whatever kills the writer; locks that die with their holder."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
import pytest
from tests.refusals import refusal
from tests.support import forked

from sparkwright.core.store import Store


class Record(msgspec.Struct, frozen=True):
    """What a stage might keep."""

    name: str
    count: int


def test_a_writer_killed_while_replacing_leaves_the_old_file(store: Store) -> None:
    """Until a file is whole, its name keeps the bytes that it had."""
    path = store.write("records/a", b"old")

    def write() -> None:
        with store.replacing(path) as fresh:
            fresh.write_bytes(b"half")
            time.sleep(60)

    assert forked.killed(write, lambda: len(list(path.parent.iterdir())) == 2)
    assert path.read_bytes() == b"old"


def test_a_builder_killed_leaves_no_folder(store: Store) -> None:
    """A folder that was being filled is not there under its name, and the next builder begins with an empty one."""
    final = store.folder("wheels") / "x"

    def build() -> None:
        with store.building(final) as folder:
            (folder / "half").touch()
            time.sleep(60)

    assert forked.killed(build, lambda: any(final.parent.rglob("half")))
    assert not final.exists()
    with store.building(final) as folder:
        assert not list(folder.iterdir())
        (folder / "whole").touch()
    assert [path.name for path in final.parent.rglob("*")] == ["x", "whole"]


# Records.


@pytest.mark.parametrize("damage", [b"", b"{", b'{"name": "a"}', b'{"name": "a", "count": "1"}', b"\xff\xfe", b"\0" * 40, b"[" * 100_000])
def test_a_damaged_record_counts_as_absent(store: Store, damage: bytes) -> None:
    """A record that was cut off, overwritten or written by another version is made anew instead of believed."""
    store.put("stage", "key", Record("a", 1))
    (store.root / "records" / "stage" / "key.json").write_bytes(damage)

    assert store.get("stage", "key", Record) is None
    assert store.get("stage", "other", Record) is None


# Locks.


def test_a_second_holder_waits_or_is_refused(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs at once take turns; the second says that it waits, unless its caller does not want to."""
    with store.lock("objects"):
        with refusal("store-busy"), store.lock("objects", wait=False):
            pass
        second = threading.Thread(target=lambda: store.lock("objects").__enter__())
        second.start()
        second.join(0.3)
        assert second.is_alive()
    second.join(30)

    assert not second.is_alive()
    assert "another sparkwright works on objects; waiting" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["file", "file/cache"])
def test_a_file_in_place_of_the_cache_directory_is_refused(tmp_path: Path, name: str) -> None:
    """It is named, and stays as it is."""
    (tmp_path / "file").write_text("kept")
    with refusal("cache-unusable", match=f"{name} cannot be used"):
        Store(tmp_path / name)
    assert (tmp_path / "file").read_text() == "kept"
