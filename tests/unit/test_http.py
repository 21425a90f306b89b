"""Requests and downloads from servers that misbehave byte for byte: every request ends in time, and nothing leaks."""

import hashlib
import importlib
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.refusals import refusal
from tests.support.badserver import Listener, Say, endless, head, silent, whole
from tests.support.processes import mounting_shell

from sparkwright.core import http
from sparkwright.core.store import Store
from sparkwright.forks import package_index

TOKEN = "github_pat_11SECRETSECRETSECRET"
OK = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use no proxy."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    importlib.import_module("requests")  # which may take seconds on a busy machine


def drip(begin: bytes, piece: bytes = b"1") -> Say:
    """Return a server that sends *begin*, and then *piece* again and again, each within the limit of one wait."""

    def say(connection: socket.socket, _: str) -> None:
        connection.sendall(begin)
        while True:
            time.sleep(0.02)
            connection.sendall(piece)

    return say


def says(data: bytes) -> Say:
    return lambda connection, _: connection.sendall(data)


ENDLESS = {
    "silent": silent,
    "status line": drip(b"HTTP/1.1 200 "),
    "headers": drip(OK, b"x: y\r\n"),
    "header": drip(OK + b"x: "),
    "body": drip(OK + b"content-length: 99999\r\n\r\n"),
    "body without a length": drip(OK + b"\r\n"),
    "chunk size": drip(OK + b"transfer-encoding: chunked\r\n\r\n", b"0"),
    "chunks": drip(OK + b"transfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    "trailer": drip(OK + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"x: y\r\n"),
    "100 Continue": endless(b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "slow 100 Continue": drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
}
#: What is no plain number breaks the reply, and never the program.
LENGTHS = {length[:4]: says(OK + f"content-length: {length}\r\n\r\nhello".encode()) for length in ("\u00b2", "-1", "1_0", "+5", "9" * 5000, "5, 6")}


@pytest.mark.parametrize("say", [*ENDLESS.values(), *LENGTHS.values()], ids=[*ENDLESS, *LENGTHS])
def test_request_ends_at_its_deadline(listen: Callable[[Say], Listener], say: Say) -> None:
    """Whatever part of a reply never ends, or states no length, the request fails at its deadline, all attempts together."""
    began = time.monotonic()
    with pytest.raises(http.HttpFailure):
        http.request("GET", listen(say).url, seconds=0.25)
    assert time.monotonic() - began < 3


def test_request_whose_time_is_over_is_not_sent_again(listen: Callable[[Say], Listener]) -> None:
    server = listen(lambda *_: time.sleep(2))
    with pytest.raises(http.HttpFailure, match=r"in [0-9]"):
        http.request("GET", server.url, seconds=0.8)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("method", "fault", "status"),
    [
        ("GET", b"HTTP/1.1 429 Busy\r\ncontent-length: 0\r\n\r\n", 200),
        ("GET", b"HTTP/1.1 520 Odd\r\ncontent-length: 0\r\n\r\n", 200),
        ("GET", OK + b"content-length: 20\r\n\r\nx", 200),
        ("PATCH", b"", 200),
        ("POST", b"HTTP/1.1 500 Broken\r\ncontent-length: 0\r\n\r\n", 500),
    ],
)
def test_passing_fault_is_repeated(listen: Callable[[Say], Listener], method: str, fault: bytes, status: int) -> None:
    """A limit without an end, any fault of the server, and a broken body get another attempt; a POST, and a limit of hours, do not."""
    server = listen(lambda connection, _: connection.sendall(fault if len(server.asked) == 1 else whole({})))

    assert http.request(method, server.url, data=b"{}").status == status
    assert len(server.asked) == (2 if status == 200 else 1)


def test_reply_is_bounded(listen: Callable[[Say], Listener]) -> None:
    """A larger body is refused, but that of an error has its own limit."""
    with pytest.raises(http.HttpFailure, match="larger than 1000 bytes"):
        http.request("GET", listen(endless(b"x" * 65536, OK + b"\r\n")).url, limit=1000)
    error = listen(says(b"HTTP/1.1 404 No\r\ncontent-length: 2000\r\n\r\n" + b"x" * 2000))
    assert http.request("GET", error.url, limit=1000).status == 404


@pytest.mark.parametrize("location", ["/again", "file:///etc/passwd", f"ftp://127.0.0.1/{TOKEN}", "http://["])
def test_redirects_end_and_stay_with_http(listen: Callable[[Say], Listener], location: str) -> None:
    """A circle of redirects fails after a few, and one to another scheme or to no address at once; without permission none is followed."""
    server = listen(says(f"HTTP/1.1 302 On\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n".encode()))
    with pytest.raises(http.HttpFailure) as caught:
        http.request("GET", server.url, redirects=True, token=TOKEN)

    assert caught.value.kind == "redirect"
    assert "SECRET" not in str(caught.value)
    assert len(server.asked) == (1 + http.REDIRECTS if location == "/again" else 1)
    assert http.request("GET", server.url).status == 302


def test_credentials_stay_with_their_host(
    listen: Callable[[Say], Listener], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the token nor a password goes along to another host; ~/.netrc is read where there is no token."""
    netrc = tmp_path / "netrc"
    netrc.write_text("default login me password hush\n", "utf-8")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    target = listen(says(whole({})))
    moved = f"HTTP/1.1 302 On\r\nlocation: {target.url.replace('127.0.0.1', 'localhost')}\r\ncontent-length: 0\r\n\r\n"
    http.request("GET", listen(says(moved.encode())).url, token=TOKEN, redirects=True)
    http.request("GET", listen(says(moved.encode())).url.replace("://", "://me:word@"), redirects=True)
    http.request("GET", target.url)
    http.request("GET", target.url, token=TOKEN)

    assert [b"authorization" in head.lower() for head in target.heads] == [False, False, True, True]
    assert b"Basic" in target.heads[2]
    assert f"Bearer {TOKEN}".encode() in target.heads[3]


def test_failure_shows_no_credentials(listen: Callable[[Say], Listener]) -> None:
    """A password in the address, and a token that the server sends back, are in no message."""
    port = listen(says(f"HTTP/1.1 {TOKEN} \x9b2J\r\n\r\n".encode())).url.rpartition(":")[2]
    for address in (f"http://me:hush@127.0.0.1:{port}", "git://me:hush@127.0.0.1", "http://me:hush@[", "somewhere"):
        with pytest.raises(http.HttpFailure) as caught:
            http.request("GET", address, token=TOKEN)
        assert "hush" not in str(caught.value)
        assert "SECRET" not in str(caught.value)
        assert str(caught.value).isprintable()


# Downloads from an index: nothing unverified counts, and nothing that arrived is lost.

#: Larger than what is read at once, and than the small disk below.
CONTENT = random.Random(7).randbytes(3_000_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
NAME = "mini-1.tar.gz"
PAGE, FILE = "/simple/mini/", f"/files/{NAME}"


class Index:
    """
    A package index with one file, which states its hash on its page.

    Attributes:
        faults: What the next requests get in place of the page or the file, by path: a status.
    """

    def __init__(self) -> None:
        self.faults: dict[str, list[int]] = {PAGE: [], FILE: []}
        self.content, self.stated = CONTENT, SHA256
        self.listener = Listener(self.say)

    def say(self, connection: socket.socket, path: str) -> None:
        faults = self.faults.get(path, [404])
        fault = faults.pop(0) if faults else None
        if fault:
            connection.sendall(head(length=0, status=f"{fault} No"))
        elif path == PAGE:
            page = f'<!DOCTYPE html><a href="../..{FILE}#sha256={self.stated}">{NAME}</a>'.encode()
            connection.sendall(head("text/html", len(page)) + page)
        else:
            size, begin = len(self.content), int(re.sub(r"\D", "", self.ranges[-1]) or 0)
            status = "416 No" if begin >= size else "206 Part" if self.ranges[-1] else "200 OK"
            data = self.content[begin:]
            connection.sendall(head("application/gzip", size - begin, status, f"content-range: bytes {begin}-{size - 1}/{size}") + data)

    @property
    def ranges(self) -> list[str]:
        """What was asked of the file, in order; an empty text is the whole."""
        heads = [head.decode() for head in self.listener.heads if FILE in head.decode()]
        return ["".join(re.findall(r"(?im)^range: (\S+)", head)) for head in heads]


@pytest.fixture(name="index")
def _index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """Return the index, which the environment names."""
    index = Index()
    monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", f"{index.listener.url}/simple/")
    yield index
    index.listener.close()


def obtain(store: Store, *, offline: bool = False) -> Path:
    return package_index.obtain(store, "mini", NAME, SHA256, offline=offline)


def test_file_is_downloaded_once_and_goes_on_where_it_broke(store: Store, index: Index) -> None:
    """
    Only the rest is asked for by a run that finds what a killed one left. What is in the store is not asked for again, not even its page;
    offline it is used.
    """
    with refusal("offline", match=NAME):
        obtain(store, offline=True)
    assert not index.listener.asked
    path = obtain(store)
    path.rename(path.with_name(path.name + ".part"))
    assert obtain(store).read_bytes() == CONTENT
    assert index.ranges == ["", "bytes=3000000-"]
    index.faults[PAGE] = [500] * 20
    assert obtain(store) == obtain(store, offline=True) == path
    assert list(path.parent.iterdir()) == [path]


def test_damaged_file_in_the_store_is_fetched_again(store: Store, index: Index, capsys: pytest.CaptureFixture[str]) -> None:
    """Its bytes are compared with the hash each time; offline the error names it."""
    path = obtain(store)
    path.write_bytes(CONTENT[:-1] + b"x")
    with refusal("offline", match=f"{NAME} is damaged: {path}"):
        obtain(store, offline=True)

    assert obtain(store).read_bytes() == CONTENT
    assert f"{path} is damaged, and fetched again" in capsys.readouterr().err


def test_a_damaged_part_of_a_download_is_fetched_from_the_beginning(store: Store, index: Index) -> None:
    """What an earlier run left is no reason to accuse the index."""
    part = store.folder("downloads", SHA256) / f"{NAME}.part"
    part.write_bytes(CONTENT[1000::-1])
    assert obtain(store).read_bytes() == CONTENT
    assert index.ranges == ["bytes=1001-", ""]


def test_a_page_in_the_place_of_a_file_costs_no_part_of_it(listen: Callable[[Say], Listener], tmp_path: Path) -> None:
    """A proxy that wants a login answers a range with the whole of its page."""
    (part := tmp_path / "part").write_bytes(CONTENT[:1000])
    server = listen(lambda connection, _: connection.sendall(whole({"please": "log in"})))
    with pytest.raises(http.HttpFailure, match="are expected"):
        http.download(server.url, part, SHA256, size=len(CONTENT))
    assert part.read_bytes() == CONTENT[:1000]


def test_a_file_of_another_size_than_the_lock_states_is_not_downloaded(store: Store, index: Index) -> None:
    with refusal("source-mismatch", match="not the file that the lock names", details=("3000000 bytes are served, and 5 are expected",)):
        package_index.obtain(store, "mini", NAME, SHA256, size=5)


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"x", CONTENT + b"x", b"<html>Please log in</html>"], ids=["one", "more", "page"])
def test_other_bytes_are_a_mismatch_and_are_removed(store: Store, index: Index, content: bytes) -> None:
    """A replaced file, or a login page in its place, is an error with both hashes, and nothing of it stays."""
    index.content = content
    hashes = [f"lock:    {SHA256}", f"arrived: {hashlib.sha256(content).hexdigest()}"]
    with refusal("source-mismatch", match=f"{NAME} arrived with other bytes", details=hashes):
        obtain(store)
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


PIP_CONF = "[global]\nindex-url = https://e.example/\n"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"UV_DEFAULT_INDEX": "https://b.example/", "PIP_INDEX_URL": "https://d.example/"}, "https://b.example/"),
        ({"UV_DEFAULT_INDEX": "lab=https://b.example/"}, "https://b.example/"),
        ({"UV_DEFAULT_INDEX": "https://b.example/?x=1"}, "https://b.example/?x=1"),
        ({"UV_INDEX_URL": "https://c.example/", "PIP_INDEX_URL": "https://d.example/"}, "https://c.example/"),
        ({"PIP_INDEX_URL": "https://d.example/"}, "https://d.example/"),
        ({"PIP_INDEX_URL": "https://d.example/", "SPARKWRIGHT_INDEX_URL": "https://a.example/"}, "https://a.example/"),
        ({"PIP_INDEX_URL": "https://d.example/", "pip/pip.conf": PIP_CONF}, "https://d.example/"),
        ({"pip/pip.conf": PIP_CONF}, "https://e.example/"),
        ({"pip/pip.conf": PIP_CONF.replace("-", "_")}, "https://e.example/"),
    ],
)
def test_the_users_own_index_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], expected: str
) -> None:
    """The index is the one that uv and pip of this user would ask; ours comes first, and variables before files."""
    for name in package_index.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name, value in variables.items():
        if name.isupper():
            monkeypatch.setenv(name, value)
        else:
            (tmp_path / "config" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "config" / name).write_text(value)
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


def test_a_file_that_may_not_grow_is_no_fault_of_ours(index: Index, tmp_path: Path) -> None:
    """A limit of the size of files ends a download as a full disk does."""
    words = ["prlimit", "--fsize=1000000", sys.executable, "-c", OBTAIN, str(tmp_path), NAME, SHA256]
    assert subprocess.check_output(words, text=True, timeout=100).split() == ["disk-full", "1000000"]


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
