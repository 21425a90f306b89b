"""Downloads from a real server that misbehaves on request: nothing unverified counts, and nothing that arrived is lost."""

from __future__ import annotations

import hashlib
import http.server
import random
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.refusals import refusal
from tests.support.mounts import mounting_shell

from sparkwright.core.errors import SparkwrightError
from sparkwright.core.http import redact_credentials
from sparkwright.core.store import Store
from sparkwright.forks import package_index

#: Larger than what is read at once, and than the small disk below.
CONTENT = random.Random(7).randbytes(3_000_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
NAME = "mini-1.tar.gz"


class Index(http.server.ThreadingHTTPServer):
    """
    A package index with one file, which behaves as its fields say.

    Attributes:
        breaks: For each transfer to come, the place in the file after which the connection breaks.
        stops: The place that no transfer gets beyond.
        statuses: What the next requests for the file are answered with instead of the file.
        served: The number of bytes of the file that were sent.
        ranges: The Range header of each request for the file.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.stated = SHA256
        self.breaks: list[int] = []
        self.stops = 0
        self.statuses: list[int] = []
        self.page_statuses: list[int] = []
        self.knows_ranges = True
        self.says_length = True
        self.served = 0
        self.ranges: list[str] = []
        self.authorizations: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/simple/"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Index

    def log_message(self, *_: object) -> None:
        """Say nothing; the test's output is for the test."""

    def do_GET(self) -> None:
        self.server.authorizations.add(self.headers.get("Authorization", ""))
        if self.path == "/simple/mini/":
            self.page()
        elif self.path == f"/files/{NAME}":
            self.file()
        else:
            self.send_error(404)

    def page(self) -> None:
        if self.server.page_statuses:
            self.send_error(self.server.page_statuses.pop(0))
            return
        stated = f"#sha256={self.server.stated}" if self.server.stated else ""
        body = f'<!DOCTYPE html><a href="../../files/{NAME}{stated}">{NAME}</a><a href="../../files/other-2.tar.gz">other-2.tar.gz</a>'
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def file(self) -> None:
        index = self.server
        index.ranges.append(self.headers.get("Range", ""))
        if index.statuses:
            self.send_error(index.statuses.pop(0))
            return
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(asked[1]) if asked and index.knows_ranges else 0
        if asked and start >= len(index.content):
            self.send_error(416)
            return
        self.send_response(206 if asked and index.knows_ranges else 200)
        if asked and index.knows_ranges:
            self.send_header("Content-Range", f"bytes {start}-{len(index.content) - 1}/{len(index.content)}")
        if index.says_length:
            self.send_header("Content-Length", str(len(index.content) - start))
        self.end_headers()
        end = index.breaks.pop(0) if index.breaks else index.stops or len(index.content)
        body = index.content[start:end]
        self.wfile.write(body)
        index.served += len(body)
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_WR)


@pytest.fixture(name="index")
def _index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with Index() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", server.url)
        yield server
        server.shutdown()


def obtain(store: Store, *, offline: bool = False) -> Path:
    return package_index.obtain(store, "mini", NAME, SHA256, offline=offline)


def partial(store: Store) -> Path:
    path = package_index.path_of(store, SHA256, NAME)
    return path.with_name(path.name + ".part")


def said(error: SparkwrightError) -> str:
    return "\n".join([error.what, *error.details, error.todo])


def test_a_file_is_downloaded_once(store: Store, index: Index) -> None:
    """What is in the store is not asked for again, not even its place."""
    path = obtain(store)
    index.page_statuses = [500] * 20

    assert path.read_bytes() == CONTENT
    assert obtain(store) == path
    assert index.served == len(CONTENT)
    assert not partial(store).exists()


def test_a_connection_that_breaks_is_taken_up_where_it_broke(store: Store, index: Index) -> None:
    """Only the rest is asked for; no more than what was still in flight is sent twice."""
    index.breaks = [1_800_000]

    assert obtain(store).read_bytes() == CONTENT
    assert index.ranges[0] == ""
    assert 1_700_000 < int(index.ranges[1].removeprefix("bytes=").removesuffix("-")) <= 1_800_000
    assert index.served < len(CONTENT) + 100_000


def test_a_file_that_never_ends_is_unreachable_and_its_beginning_kept(store: Store, index: Index) -> None:
    """After some attempts the download fails and says what it keeps; the next run goes on from there."""
    index.stops = 2_500_000
    with refusal("source-unreachable", match=f"{NAME} cannot be downloaded") as caught:
        obtain(store)
    kept, served = partial(store).stat().st_size, index.served
    assert f"kept: {kept} bytes" in caught.value.details[-1]
    assert 2_400_000 < kept <= 2_500_000
    index.stops = 0

    assert obtain(store).read_bytes() == CONTENT
    assert index.served - served == len(CONTENT) - kept


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"x", CONTENT + b"x", b"<html>Please log in</html>"], ids=["one", "more", "page"])
def test_other_bytes_are_a_mismatch_and_are_removed(store: Store, index: Index, content: bytes) -> None:
    """A replaced file, or a login page in its place, is an error with both hashes, and nothing of it stays."""
    index.content = content
    with refusal("source-mismatch", match=f"{NAME} arrived with other bytes") as caught:
        obtain(store)

    assert caught.value.details == (f"lock:    {SHA256}", f"arrived: {hashlib.sha256(content).hexdigest()}")
    assert not list((store.root / "downloads").rglob("*mini*"))


def test_an_index_that_states_another_hash_is_a_mismatch(store: Store, index: Index) -> None:
    """The error comes before a byte is downloaded."""
    index.stated = "0" * 64
    with refusal("source-mismatch", match="not the file that the lock names") as caught:
        obtain(store)

    assert caught.value.details == (f"lock:  {SHA256}", f"index: {'0' * 64}")
    assert index.ranges == []


def test_a_file_that_the_index_lacks_is_unreachable(store: Store, index: Index) -> None:
    """A file, or a project, that the index does not have is named."""
    with refusal("source-unreachable", match=r"does not offer mini-2\.tar\.gz"):
        package_index.obtain(store, "mini", "mini-2.tar.gz", SHA256)
    with refusal("source-unreachable", match="no project 'nothing'"):
        package_index.obtain(store, "nothing", NAME, SHA256)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_is_busy_is_asked_again(store: Store, index: Index, status: int) -> None:
    """What servers answer in passing is waited out, for the page and for the file."""
    index.page_statuses, index.statuses = [status], [status]

    assert obtain(store).read_bytes() == CONTENT


def test_offline_asks_nobody(store: Store, index: Index) -> None:
    """Offline, what is not in the store is an error of its own, and what is there is used."""
    with refusal("offline", match=NAME):
        obtain(store, offline=True)
    assert index.authorizations == set()
    path = obtain(store)

    assert obtain(store, offline=True) == path


@pytest.mark.parametrize("trouble", ["page", "file", "content", "hash", "name"])
def test_credentials_are_used_and_never_shown(store: Store, index: Index, monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    """A user and password in the index address are sent to it, and appear in no message."""
    monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", index.url.replace("://", "://user:s3cret@"))
    index.page_statuses = [403] if trouble == "page" else []
    index.statuses = [403] if trouble == "file" else []
    index.content = b"x" if trouble == "content" else CONTENT
    index.stated = "0" * 64 if trouble == "hash" else SHA256
    with pytest.raises(SparkwrightError) as caught:
        package_index.obtain(store, "mini", "gone.tar.gz" if trouble == "name" else NAME, SHA256)

    assert index.authorizations == {"Basic dXNlcjpzM2NyZXQ="}
    assert "s3cret" not in said(caught.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:pass@host/simple/", "https://host/simple/"),
        ("https://host/a@b/", "https://host/a@b/"),
        ("403 for url: http://u:p@ss@host:80/x (https://t@h/)", "403 for url: http://host:80/x (https://h/)"),
        ("nothing", "nothing"),
    ],
)
def test_addresses_are_shown_without_credentials(text: str, shown: str) -> None:
    """Only what stands between :// and @ goes."""
    assert redact_credentials(text) == shown


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


# A full disk.

RUN = """\
import sys
from pathlib import Path
from sparkwright.core.errors import SparkwrightError
from sparkwright.forks import package_index
from sparkwright.core.store import Store

try:
    store = Store(Path(sys.argv[1]))
    print("done", package_index.obtain(store, "mini", sys.argv[2], sys.argv[3]).name)
except SparkwrightError as error:
    print(error.reference, *(f"{path.name}={path.stat().st_size}" for path in store.root.rglob("*.part")))
"""

SmallDisk = Callable[[], list[str]]


@pytest.fixture(name="small_disk")
def _small_disk(tmp_path: Path) -> SmallDisk:
    """
    Return a function that runs `RUN` on a disk of 2 MB, then again on the same disk, made larger.

    The disk is a tmpfs in a mount namespace: as root directly, else in a user namespace.
    """
    disk, script = tmp_path / "disk", tmp_path / "run.py"
    disk.mkdir()
    script.write_text(RUN)
    shell = mounting_shell()

    def run() -> list[str]:
        once = f'"{sys.executable}" "{script}" "{disk}" {NAME} {SHA256}'
        grow = f'mount --options-mode ignore -o remount,size=40m "{disk}"'
        steps = f'mount -t tmpfs -o size=2m none "{disk}" && {once} && {grow} && {once} && umount "{disk}"'
        done = subprocess.run([*shell, steps], capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_a_full_disk_loses_nothing_that_arrived(small_disk: SmallDisk, index: Index) -> None:
    """A download that fills the disk ends as disk-full; with more room, the next run asks only for the rest."""
    first, second = small_disk()
    reference, _, kept = re.split("[ =]", first)

    assert (reference, second) == ("disk-full", f"done {NAME}")
    assert int(kept) > 1_500_000
    assert index.ranges == ["", f"bytes={kept}-"]
