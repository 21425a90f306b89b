"""Downloads from a real index that misbehaves on request: nothing unverified counts, and nothing that arrived is lost."""

from __future__ import annotations

import hashlib
import random
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.refusals import refusal
from tests.support.badserver import Listener, head
from tests.support.mounts import mounting_shell

from sparkwright.core.store import Store
from sparkwright.forks import package_index

#: Larger than what is read at once, and than the small disk below.
CONTENT = random.Random(7).randbytes(3_000_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
NAME = "mini-1.tar.gz"
PAGE, FILE = "/simple/mini/", f"/files/{NAME}"


class Index:
    """
    A package index with one file, which states its hash on its page.

    Attributes:
        faults: What the next requests get in place of the page or the file, by path: a status, or ``"truncate"`` for half of the bytes.
    """

    def __init__(self) -> None:
        self.faults: dict[str, list[int | str]] = {PAGE: [], FILE: []}
        self.content, self.stated = CONTENT, SHA256
        self.listener = Listener(self.say)

    def say(self, connection: socket.socket, path: str) -> None:
        faults = self.faults.get(path, [404])
        fault = faults.pop(0) if faults else None
        if isinstance(fault, int):
            connection.sendall(head(length=0, status=f"{fault} No"))
        elif path == PAGE:
            page = f'<!DOCTYPE html><a href="../..{FILE}#sha256={self.stated}">{NAME}</a>'.encode()
            connection.sendall(head("text/html", len(page)) + page)
        else:
            size, begin = len(self.content), int(re.sub(r"\D", "", self.ranges[-1]) or 0)
            status = "416 No" if begin >= size else "206 Part" if self.ranges[-1] else "200 OK"
            data = self.content[begin : size // 2 if fault else size]
            connection.sendall(head("application/gzip", size - begin, status, f"content-range: bytes {begin}-{size - 1}/{size}") + data)

    @property
    def ranges(self) -> list[str]:
        """What was asked of the file, in order; an empty text is the whole."""
        heads = [head.decode() for head in self.listener.heads if FILE in head.decode()]
        return ["".join(re.findall(r"(?im)^range: (\S+)", head)) for head in heads]


@pytest.fixture(name="index", autouse=True)
def _index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    index = Index()
    monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", f"{index.listener.url}/simple/")
    yield index
    index.listener.close()


def obtain(store: Store, *, offline: bool = False) -> Path:
    return package_index.obtain(store, "mini", NAME, SHA256, offline=offline)


def test_file_is_downloaded_once_and_goes_on_where_it_broke(store: Store, index: Index) -> None:
    """
    Only the rest is asked for, by the same run and by one that finds what a killed run left. What is in the store is not asked for again, not
    even its page; offline it is used.
    """
    with refusal("offline", match=NAME):
        obtain(store, offline=True)
    assert not index.listener.asked
    index.faults[FILE] = ["truncate"]
    path = obtain(store)
    assert path.read_bytes() == CONTENT
    first, second = index.ranges
    assert first == ""
    assert 1_400_000 < int(second.removeprefix("bytes=").removesuffix("-")) <= 1_500_000
    path.rename(path.with_name(path.name + ".part"))
    assert obtain(store).read_bytes() == CONTENT
    assert index.ranges[2:] == ["bytes=3000000-"]
    index.faults[PAGE] = [500] * 20
    assert obtain(store) == obtain(store, offline=True) == path
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"x", CONTENT + b"x", b"<html>Please log in</html>"], ids=["one", "more", "page"])
def test_other_bytes_are_a_mismatch_and_are_removed(store: Store, index: Index, content: bytes) -> None:
    """A replaced file, or a login page in its place, is an error with both hashes, and nothing of it stays."""
    index.content = content
    with refusal("source-mismatch", match=f"{NAME} arrived with other bytes") as caught:
        obtain(store)

    assert caught.value.details == (f"lock:    {SHA256}", f"arrived: {hashlib.sha256(content).hexdigest()}")
    assert not list((store.root / "downloads").rglob("*mini*"))


@pytest.mark.parametrize(
    ("trouble", "reference", "what"),
    [
        ("page", "source-unreachable", "does not answer for 'mini'"),
        ("project", "source-unreachable", "no project 'nothing'"),
        ("file", "source-unreachable", "cannot be downloaded"),
        ("hash", "source-mismatch", "not the file that the lock names"),
        ("name", "source-unreachable", r"does not offer gone\.tar\.gz"),
    ],
)
def test_credentials_are_used_and_never_shown(
    store: Store, index: Index, monkeypatch: pytest.MonkeyPatch, trouble: str, reference: str, what: str
) -> None:
    """A user and password in the index address are sent to it, and appear in no message of what it lacks, or states otherwise."""
    monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", f"{index.listener.url}/simple/".replace("://", "://user:s3cret@"))
    index.faults |= {PAGE: [403] if trouble == "page" else [], FILE: [403] if trouble == "file" else []}
    index.stated = "0" * 64 if trouble == "hash" else SHA256
    project, name = "nothing" if trouble == "project" else "mini", "gone.tar.gz" if trouble == "name" else NAME
    with refusal(reference, match=what) as caught:
        package_index.obtain(store, project, name, SHA256)

    assert all(b"Basic dXNlcjpzM2NyZXQ=" in head for head in index.listener.heads)
    assert "s3cret" not in str(caught.value.document())
    assert index.ranges == ([""] if trouble == "file" else [])


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
from sparkwright.core.store import Store
from sparkwright.forks import package_index

store = Store(Path(sys.argv[1]))
try:
    print(package_index.obtain(store, "mini", *sys.argv[2:]).name)
except SparkwrightError as error:
    print(error.reference, *(path.stat().st_size for path in store.root.rglob("*.part")))
"""


def test_a_full_disk_loses_nothing_that_arrived(index: Index, tmp_path: Path) -> None:
    """A download that fills the disk ends as disk-full; with more room, the next run asks only for the rest."""
    disk = tmp_path / "disk"
    disk.mkdir()
    words = [str(disk), sys.executable, "-c", OBTAIN, str(disk), NAME, SHA256]
    done = subprocess.run([*mounting_shell(), SMALL_DISK, *words], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    reference, kept, name = done.stdout.split()

    assert (reference, name) == ("disk-full", NAME)
    assert int(kept) > 1_500_000
    assert index.ranges == ["", f"bytes={kept}-"]
