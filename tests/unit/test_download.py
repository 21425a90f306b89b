"""Downloads from a real index that misbehaves on request: nothing unverified counts, and nothing that arrived is lost."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.refusals import refusal
from tests.support import indexserver
from tests.support.mounts import mounting_shell

from sparkwright.core.errors import SparkwrightError
from sparkwright.core.store import Store
from sparkwright.forks import package_index

#: Larger than what is read at once, and than the small disk below.
CONTENT = random.Random(7).randbytes(3_000_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
NAME = "mini-1.tar.gz"


class Index:
    """
    A package index with one file.

    Attributes:
        page_faults, file_faults: What the next requests get in place of the page or the file (`indexserver.Fault`).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.page_faults: list[int | str] = []
        self.file_faults: list[int | str] = []
        self.offer()

    def offer(self, content: bytes = CONTENT, stated: str = SHA256) -> None:
        """Offer *content* under a page that states the hash *stated*."""
        page = self._folder / "simple" / "mini" / "index.html"
        for path in (page, self._folder / "files" / NAME):
            path.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(f'<!DOCTYPE html><a href="../../files/{NAME}#sha256={stated}">{NAME}</a>')
        (self._folder / "files" / NAME).write_bytes(content)

    def fault(self, path: str) -> int | str | None:
        faults = self.file_faults if path.startswith("/files/") else self.page_faults
        return faults.pop(0) if faults else None


@pytest.fixture(name="index")
def _index(tmp_path: Path) -> Index:
    return Index(tmp_path / "index")


@pytest.fixture(name="served", autouse=True)
def _served(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[indexserver.Served]:
    with indexserver.serve(tmp_path / "index", fault=index.fault) as served:
        monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", f"{served.url}simple/")
        yield served


def obtain(store: Store, *, offline: bool = False) -> Path:
    return package_index.obtain(store, "mini", NAME, SHA256, offline=offline)


def ranges(served: indexserver.Served) -> list[str]:
    return [one.headers.get("range", "") for one in served.asked if one.path.startswith("/files/")]


def partial(store: Store) -> Path:
    path = package_index.path_of(store, SHA256, NAME)
    return path.with_name(path.name + ".part")


def test_file_is_downloaded_once(store: Store, index: Index, served: indexserver.Served) -> None:
    """What is in the store is not asked for again, not even its page; offline it is used."""
    with refusal("offline", match=NAME):
        obtain(store, offline=True)
    assert not served.asked
    path = obtain(store)
    index.page_faults = [500] * 20

    assert path.read_bytes() == CONTENT
    assert obtain(store) == obtain(store, offline=True) == path
    assert not partial(store).exists()


def test_broken_download_goes_on_where_it_broke(store: Store, index: Index, served: indexserver.Served) -> None:
    """Only the rest is asked for, by the same run and by one that finds what a killed run left."""
    index.file_faults = ["truncate"]
    assert obtain(store).read_bytes() == CONTENT
    first, second = ranges(served)
    assert first == ""
    assert 1_400_000 < int(second.removeprefix("bytes=").removesuffix("-")) <= 1_500_000

    package_index.path_of(store, SHA256, NAME).rename(partial(store))
    assert obtain(store).read_bytes() == CONTENT
    assert ranges(served)[2:] == ["bytes=3000000-"]


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"x", CONTENT + b"x", b"<html>Please log in</html>"], ids=["one", "more", "page"])
def test_other_bytes_are_a_mismatch_and_are_removed(store: Store, index: Index, content: bytes) -> None:
    """A replaced file, or a login page in its place, is an error with both hashes, and nothing of it stays."""
    index.offer(content)
    with refusal("source-mismatch", match=f"{NAME} arrived with other bytes") as caught:
        obtain(store)

    assert caught.value.details == (f"lock:    {SHA256}", f"arrived: {hashlib.sha256(content).hexdigest()}")
    assert not list((store.root / "downloads").rglob("*mini*"))


def test_index_that_states_another_hash_is_a_mismatch(store: Store, index: Index, served: indexserver.Served) -> None:
    """The error comes before a byte is downloaded."""
    index.offer(stated="0" * 64)
    with refusal("source-mismatch", match="not the file that the lock names"):
        obtain(store)

    assert ranges(served) == []


def test_file_that_the_index_lacks_is_unreachable(store: Store) -> None:
    with refusal("source-unreachable", match=r"does not offer mini-2\.tar\.gz"):
        package_index.obtain(store, "mini", "mini-2.tar.gz", SHA256)
    with refusal("source-unreachable", match="no project 'nothing'"):
        package_index.obtain(store, "nothing", NAME, SHA256)


@pytest.mark.parametrize("trouble", ["page", "file", "hash", "name"])
def test_credentials_are_used_and_never_shown(
    store: Store, index: Index, served: indexserver.Served, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """A user and password in the index address are sent to it, and appear in no message."""
    monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", f"{served.url}simple/".replace("://", "://user:s3cret@"))
    index.page_faults = [403] if trouble == "page" else []
    index.file_faults = [403] if trouble == "file" else []
    index.offer(stated="0" * 64 if trouble == "hash" else SHA256)
    with pytest.raises(SparkwrightError) as caught:
        package_index.obtain(store, "mini", "gone.tar.gz" if trouble == "name" else NAME, SHA256)

    assert {one.headers["authorization"] for one in served.asked} == {"Basic dXNlcjpzM2NyZXQ="}
    assert "s3cret" not in str(caught.value.document())


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"UV_DEFAULT_INDEX": "https://b.example/", "PIP_INDEX_URL": "https://d.example/"}, "https://b.example/"),
        ({"UV_DEFAULT_INDEX": "lab=https://b.example/"}, "https://b.example/"),
        ({"UV_DEFAULT_INDEX": "https://b.example/?x=1"}, "https://b.example/?x=1"),
        ({"UV_INDEX_URL": "https://c.example/", "PIP_INDEX_URL": "https://d.example/"}, "https://c.example/"),
        ({"PIP_INDEX_URL": "https://d.example/"}, "https://d.example/"),
        ({"PIP_INDEX_URL": "https://d.example/", "SPARKWRIGHT_INDEX_URL": "https://a.example/"}, "https://a.example/"),
    ],
)
def test_the_users_own_index_is_asked(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str) -> None:
    """The index is the one that uv and pip of this user would ask; ours comes first."""
    for name in package_index.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert package_index.index_url() == expected


#: Downloads the file to a store on a disk of 2 MB, then again on the same disk, made larger.
SMALL_DISK = """\
mount -t tmpfs -o size=2m none "$0"
"$@" || true; echo
mount --options-mode ignore -o remount,size=40m "$0"
"$@"
umount "$0"
"""
OBTAIN = """\
import sys
from pathlib import Path
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.store import Store
from sparkwright.forks import package_index

store = Store(Path(sys.argv[1]))
try:
    print(package_index.obtain(store, "mini", *sys.argv[2:]).name)
except SparkwrightError as error:
    print(error.reference, *(path.stat().st_size for path in store.root.rglob("*.part")))
"""


def test_a_full_disk_loses_nothing_that_arrived(served: indexserver.Served, tmp_path: Path) -> None:
    """A download that fills the disk ends as disk-full; with more room, the next run asks only for the rest."""
    disk = tmp_path / "disk"
    disk.mkdir()
    words = [str(disk), sys.executable, "-c", OBTAIN, str(disk), NAME, SHA256]
    done = subprocess.run([*mounting_shell(), SMALL_DISK, *words], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    reference, kept, name = done.stdout.split()

    assert (reference, name) == ("disk-full", NAME)
    assert int(kept) > 1_500_000
    assert ranges(served) == ["", f"bytes={kept}-"]
