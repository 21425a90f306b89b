"""The cache directory: results and git trees, whole or not there whatever kills the writer, and nobody's configuration."""

import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from tests.refusals import refusal
from tests.support import mounts, processes
from tests.unit.conftest import Repository

from sparkwright.core import git
from sparkwright.core.store import Store, replacing

#: A record that a stage might keep.
Record = msgspec.defstruct("Record", [("name", str), ("count", int)], frozen=True)


def test_a_writer_killed_while_replacing_leaves_the_old_file(store: Store) -> None:
    """Until a file is whole, its name keeps the bytes that it had."""
    path = store.write("records/a", b"old")

    def write() -> None:
        with replacing(path) as fresh:
            fresh.write_bytes(b"half")
            time.sleep(60)

    assert processes.killed(write, lambda: len(list(path.parent.iterdir())) == 2)
    assert path.read_bytes() == b"old"


def test_a_builder_killed_leaves_no_folder(store: Store) -> None:
    """A folder that was being filled is not there under its name, and the next builder begins with an empty one."""
    final = store.folder("wheels") / "x"

    def build() -> None:
        with store.building(final) as folder:
            (folder / "half").touch()
            time.sleep(60)

    assert processes.killed(build, lambda: any(final.parent.rglob("half")))
    assert not final.exists()
    with store.building(final) as folder:
        assert not list(folder.iterdir())
        (folder / "whole").touch()
    assert [path.name for path in final.parent.rglob("*")] == ["x", "whole"]


@pytest.mark.parametrize("damage", [b"", b"{", b'{"name": "a"}', b'{"name": "a", "count": "1"}', b"\xff\xfe", b"\0" * 40, b"[" * 100_000])
def test_a_damaged_record_counts_as_absent(store: Store, damage: bytes) -> None:
    """A record that was cut off, overwritten or written by another version is made anew instead of believed."""
    store.put("stage", "key", Record("a", 1))
    (store.root / "records" / "stage" / "key.json").write_bytes(damage)

    assert store.get("stage", "key", Record) is None
    assert store.get("stage", "other", Record) is None


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


@pytest.mark.parametrize("name", ["file", "file/cache", "a:b", "a\nb"])
def test_a_cache_directory_that_cannot_be_one_is_refused(tmp_path: Path, name: str) -> None:
    """Nothing is made of a file in its place, or of a path that programs would take for two."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_text("kept")
    with refusal("cache-unusable", match=f"{name} cannot be used"):
        Store(folder / name)
    assert [path.read_text() for path in folder.iterdir()] == ["kept"]


# Trees.

FILES = {"a.txt": b"one\n", "src/b.c": b"int b;\r\n", "src/deep/c.h": b"\x00\x01", "run.sh": b"#!/bin/sh\n"}


def stored(objects: git.Objects, **changes: bytes) -> str:
    """Return a tree of `FILES`, where ``run.sh`` is executable, with *changes* (``__`` stands for a slash, ``_`` for a dot)."""
    files = FILES | {name.replace("__", "/").replace("_", "."): data for name, data in changes.items()}
    return objects.store_files((name, git.EXECUTABLE if name == "run.sh" else git.REGULAR, data) for name, data in files.items())


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_variables_and_configuration_of_the_user_have_no_effect(objects: git.Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    GIT_DIR and its like, which hooks and rebases leave in a shell, redirect nothing; autocrlf, attributes, hooks and filters of the home folder
    change no byte of what is stored and checked out.
    """
    attributes, other = b"* text eol=crlf filter=x\n", tmp_path / "other"
    expected = stored(objects, _gitattributes=attributes)
    for name, value in {
        "GIT_DIR": str(other),
        "GIT_INDEX_FILE": str(other / "index"),
        "GIT_OBJECT_DIRECTORY": str(other / "objects"),
        "GIT_WORK_TREE": str(other),
        "GIT_NAMESPACE": "x",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "core.autocrlf",
        "GIT_CONFIG_VALUE_0": "true",
        "GIT_LITERAL_PATHSPECS": "1",
        "GIT_TRACE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    processes.script(tmp_path / "post-checkout", f"touch '{tmp_path}/ran'")
    with (Path.home() / ".gitconfig").open("a") as stream:
        stream.write(f'[core]\n\thooksPath = {tmp_path}\n\teol = crlf\n[filter "x"]\n\tsmudge = tr a-z A-Z\n\trequired = true\n')
    (Path.home() / ".config" / "git").mkdir(parents=True)
    (Path.home() / ".config" / "git" / "attributes").write_text("* text filter=x\n")
    fresh = git.Objects(tmp_path / "fresh.git")
    tree = stored(fresh, _gitattributes=attributes)
    fresh.archive(tree, tmp_path / "out")

    assert tree == expected
    assert content(tmp_path / "out") == FILES | {".gitattributes": attributes}
    assert not other.exists()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("again", [False, True], ids=["back", "on"])
def test_a_killed_checkout_is_finished(objects: git.Objects, tmp_path: Path, again: bool) -> None:
    """`kill -9` on the way to another tree leaves a folder that the next checkout makes whole, of that tree or of the one before."""
    many = {f"d{number % 40}/f{number}.c": b"%d\n" % number * 400 for number in range(3000)}
    before, tree = stored(objects), objects.store_files((name, git.REGULAR, data) for name, data in many.items())
    folder, index = tmp_path / "src", tmp_path / "index"
    objects.checkout(before, folder, index)
    assert processes.killed(lambda: objects.checkout(tree, folder, index), (folder / "d20").exists)
    objects.checkout(tree if again else before, folder, index)
    # Nor is anything left that git does not track.
    assert content(folder) == (many if again else FILES)


def test_a_damaged_store_is_not_the_repository_around_it(tmp_path: Path) -> None:
    """Where the cache directory lies in somebody's repository, a store that lost its HEAD is an error, and that repository stays."""
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    objects = git.Objects(tmp_path / "objects.git")
    tree, before = stored(objects), sorted((tmp_path / ".git").rglob("*"))
    (objects.path / "HEAD").write_bytes(b"garbage")
    for use in (lambda: objects.paths(tree), lambda: stored(objects), lambda: objects.checkout(tree, tmp_path / "src", tmp_path / "index")):
        with refusal("git-failed"):
            use()

    assert sorted((tmp_path / ".git").rglob("*")) == before


# Full disks.

#: Runs the rest with ever more room below the folder $0.
GROWING_DISK = """\
mount -t tmpfs -o size=64k none "$0"
for size in 64k 192k 256k 384k 768k 64m; do
    mount --options-mode ignore -o remount,size=$size "$0"
    "$@"
done
umount "$0"
"""

WRITES = """\
import sys
from pathlib import Path
import msgspec
from sparkwright.core import process
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.git import REGULAR, Objects
from sparkwright.core.store import Store, append_line

root, upstream, data = Path(sys.argv[1]), sys.argv[2], bytes(range(256)) * 120

def build(store):
    with store.building(store.root / "built") as folder:
        (folder / "a").write_bytes(data)

try:
    store = Store(root)
    store.put("stage", "key", data.hex())
    build(store)
    with store.lock("a"):
        append_line(store.root / "lines", msgspec.defstruct("Line", [("text", str)])(data.hex()))
    objects = Objects(store.root / "objects.git")
    tree = objects.store_files((f"{number}.bin", REGULAR, bytes([number]) + data) for number in range(9))
    objects.checkout(tree, store.root / "src", store.root / "index")
    objects.archive(tree, store.root / "other")
    objects.run(["fetch", "-q", upstream, "main:main"])
    process.run(["dd", "if=/dev/zero", f"of={root}/zeros", "bs=100k", "count=4"], log=root / "logs" / "dd.log")
except SparkwrightError as error:
    sys.exit(f"error: {error.reference}: {error.what}")
assert store.get("stage", "key", str) == data.hex() and objects.is_complete(tree)
sys.exit("error: none")
"""

DEMO = f"""\
import sys
from sparkwright.cli import main
# With room, the package index is what it lacks.
main.main(["demo", "--root", {str(Path(__file__).parents[2])!r}, "--cache-dir", sys.argv[1]])
"""


@pytest.mark.parametrize(("program", "end"), [(WRITES, "none"), (DEMO, "source-unreachable")], ids=["store", "demo"])
def test_a_full_disk_is_disk_full_at_each_write(tmp_path: Path, repository: Repository, program: str, end: str) -> None:
    """Records, folders, locks, lines, trees, checkouts and fetches, and whole copies; the next run, with room, finishes them."""
    repository.commit({"big.bin": random.Random(1).randbytes(300_000)})
    disk = tmp_path / "disk"
    disk.mkdir()
    words = [str(disk), sys.executable, "-c", program, str(disk), repository.url]
    done = subprocess.run([*mounts.mounting_shell(), GROWING_DISK, *words], capture_output=True, text=True, check=False, timeout=300)
    references = re.findall(r"^error: ([a-z-]+)", done.stderr, re.MULTILINE)

    assert "Traceback" not in done.stderr
    assert (references[0], references[-1], set(references)) == ("disk-full", end, {"disk-full", end})
