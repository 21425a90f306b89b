"""The store: whole results or none, whatever kills the writer; locks that die with their holder."""

from __future__ import annotations

import os
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.refusals import refusal

from sparkwright.core.files import content_key
from sparkwright.core.store import Store

HEAD = "import sys, time\nfrom pathlib import Path\nfrom sparkwright.core.store import Store\nstore = Store(Path(sys.argv[1]))\n"
SLEEP = "    print('ready', flush=True)\n    time.sleep(60)\n"


class Process:
    """A real process that works on a store and can be killed."""

    def __init__(self, root: Path, script: str) -> None:
        command = [sys.executable, "-c", HEAD + script, str(root)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(name="spawn")
def _spawn(tmp_path: Path) -> Iterator[type[Process]]:
    made: list[Process] = []

    class Kept(Process):
        def __init__(self, root: Path, script: str) -> None:
            super().__init__(root, script)
            made.append(self)

    yield Kept
    for one in made:
        one.kill()
        one.process.communicate()


class Record(msgspec.Struct, frozen=True):
    """What a stage might keep."""

    name: str
    count: int


def test_a_writer_killed_while_replacing_leaves_the_old_file(store: Store, spawn: type[Process]) -> None:
    """Until a file is whole, its name keeps the bytes that it had."""
    path = store.write("records/a", b"old")
    process = spawn(
        store.root,
        "with store.replacing(store.root / 'records' / 'a') as fresh:\n    fresh.write_bytes(b'half')\n" + SLEEP,
    )
    assert process.read() == "ready"
    process.kill()

    assert path.read_bytes() == b"old"


def test_a_builder_killed_leaves_no_folder(store: Store, spawn: type[Process]) -> None:
    """A folder that was being filled is not there under its name, and the next builder begins with an empty one."""
    final = store.root / "wheels" / "x"
    process = spawn(
        store.root,
        "with store.building(store.root / 'wheels' / 'x') as folder:\n    (folder / 'half').write_bytes(b'')\n" + SLEEP,
    )
    assert process.read() == "ready"
    process.kill()
    assert not final.exists()

    with store.building(final) as folder:
        assert not list(folder.iterdir())
        (folder / "whole").touch()

    assert [path.name for path in final.iterdir()] == ["whole"]


def test_results_have_the_modes_of_the_users_umask(store: Store) -> None:
    """A shared cache can be shared, and a private one is private."""
    modes = []
    for mask in (0o027, 0o022):
        before = os.umask(mask)
        try:
            file = store.write("a", b"")
            with store.building(store.root / "wheels" / "x") as folder:
                (folder / "y").touch()
        finally:
            os.umask(before)
        places = (file, store.root / "wheels" / "x", store.root / "wheels" / "x" / "y")
        modes.append([stat.S_IMODE(path.stat().st_mode) for path in places])

    assert modes == [[0o640, 0o750, 0o640], [0o644, 0o755, 0o644]]


# Records.


@settings(max_examples=20)
@given(st.text(), st.integers(-(2**63), 2**63 - 1))
def test_a_record_is_read_back(tmp_path_factory: pytest.TempPathFactory, name: str, count: int) -> None:
    """What was put under a key is what is got from it."""
    store = Store(tmp_path_factory.getbasetemp() / "store")
    record = Record(name, count)
    store.put("stage", content_key("stage", record), record)

    assert store.get("stage", content_key("stage", record), Record) == record


@pytest.mark.parametrize("damage", [b"", b"{", b'{"name": "a"}', b'{"name": "a", "count": "1"}', b"\xff\xfe", b"\0" * 40, b"[" * 100_000])
def test_a_damaged_record_counts_as_absent(store: Store, damage: bytes) -> None:
    """A record that was cut off, overwritten or written by another version is made anew instead of believed."""
    store.put("stage", "key", Record("a", 1))
    (store.root / "records" / "stage" / "key.json").write_bytes(damage)

    assert store.get("stage", "key", Record) is None
    assert store.get("stage", "other", Record) is None


# Locks.

HOLD = "with store.lock('objects'):\n" + SLEEP


def test_a_lock_in_use_can_be_refused(store: Store, spawn: type[Process]) -> None:
    """A caller that does not wait is refused."""
    assert spawn(store.root, HOLD).read() == "ready"
    with refusal("store-busy"), store.lock("objects", wait=False):
        pass


def test_a_second_process_waits_for_the_first(store: Store, spawn: type[Process]) -> None:
    """Two runs at once take turns; the second says that it waits, and goes on when the first has ended."""
    second = "with store.lock('objects'):\n    print('mine', flush=True)\n"
    with store.lock("objects"):
        process = spawn(store.root, second).process
        assert process.stderr is not None
        assert process.stdout is not None
        waits = process.stderr.readline()
        early = select.select([process.stdout], [], [], 0.3)[0]
    out, _ = process.communicate(timeout=30)

    assert "another sparkwright works on objects; waiting" in waits
    assert (early, out, process.returncode) == ([], "mine\n", 0)


@pytest.mark.parametrize("name", ["file", "file/cache"])
def test_a_file_in_place_of_the_cache_directory_is_refused(tmp_path: Path, name: str) -> None:
    """It is named, and stays as it is."""
    (tmp_path / "file").write_text("kept")
    with refusal("cache-unusable", match=f"{name} cannot be used"):
        Store(tmp_path / name)
    assert (tmp_path / "file").read_text() == "kept"


def test_read_only_store_is_refused(tmp_path: Path) -> None:
    """A store on a disk that is mounted read-only is `cache-unusable`, before a stage begins and while one writes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = (
        "import subprocess, sys\nfrom pathlib import Path\nfrom sparkwright.core.errors import StoreError\n"
        "from sparkwright.core.store import Store\nstore = Store(Path(sys.argv[1]))\n"
        "subprocess.run(['mount', '-o', 'remount,ro', sys.argv[1]], check=True)\n"
        "for use in (lambda: Store(store.root), lambda: store.put('a', 'b', {}), lambda: store.folder('a')):\n"
        "    try:\n        use()\n    except StoreError as error:\n        print(error.reference)\n"
    )
    unshare = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--mount", "--propagation", "unchanged"]
    steps = 'mount -t tmpfs none "$1" && "$2" -c "$3" "$1" && umount "$1"'
    command = [*unshare, "sh", "-c", steps, "sh", str(disk), sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    if "unshare failed" in done.stderr:
        pytest.skip("no namespaces here")
    assert done.stdout.split() == ["cache-unusable"] * 3, done.stderr
