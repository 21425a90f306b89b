"""The HTTP reader against servers that misbehave byte for byte: every request ends in time, and nothing leaks."""

from __future__ import annotations

import importlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.badserver import Listener, Say, endless, silent, whole

from sparkwright.core import http
from sparkwright.core.http import HttpFailure

TOKEN = "github_pat_11SECRETSECRETSECRET"
OK = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use no proxy, and pause briefly."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(http, "PAUSE", 0.01)
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


@pytest.mark.parametrize("part", ENDLESS)
def test_request_ends_at_its_deadline(listen: Callable[[Say], Listener], part: str) -> None:
    """Whatever part of a reply never ends, the request fails at its deadline, all attempts together."""
    began = time.monotonic()
    with pytest.raises(HttpFailure):
        http.request("GET", listen(ENDLESS[part]).url, seconds=0.25)
    assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    ("method", "fault", "status"),
    [
        ("GET", b"HTTP/1.1 429 Busy\r\ncontent-length: 0\r\n\r\n", 200),
        ("GET", b"HTTP/1.1 429 Busy\r\nx-ratelimit-reset: 1\r\ncontent-length: 0\r\n\r\n", 429),
        ("GET", b"HTTP/1.1 520 Odd\r\ncontent-length: 0\r\n\r\n", 200),
        ("GET", OK + b"content-length: 20\r\n\r\nx", 200),
        ("PATCH", b"", 200),
        ("POST", b"HTTP/1.1 500 Broken\r\ncontent-length: 0\r\n\r\n", 500),
        ("GET", b"HTTP/1.1 503 Busy\r\nretry-after: 86400\r\ncontent-length: 0\r\n\r\n", 503),
    ],
)
def test_passing_fault_is_repeated(listen: Callable[[Say], Listener], method: str, fault: bytes, status: int) -> None:
    """A limit without an end, any fault of the server, and a broken body get another attempt; a POST, and a wait of hours, do not."""
    server = listen(lambda connection, _: connection.sendall(fault if len(server.asked) == 1 else whole({})))

    assert http.request(method, server.url, data=b"{}").status == status
    assert len(server.asked) == (2 if status == 200 else 1)


@pytest.mark.parametrize("length", ["\u00b2", "-1", "1_0", "+5", "9" * 5000, "5, 6"])
def test_content_length_is_read_strictly(listen: Callable[[Say], Listener], length: str) -> None:
    """What is no plain number breaks the reply, and never the program."""
    server = listen(says(OK + f"content-length: {length}\r\n\r\nhello".encode()))

    with pytest.raises(HttpFailure):
        http.request("GET", server.url, attempts=1)


def test_reply_is_bounded(listen: Callable[[Say], Listener]) -> None:
    """A larger body is refused, but that of an error has its own limit; a body that is cut off is broken."""
    with pytest.raises(HttpFailure, match="larger than 1000 bytes"):
        http.request("GET", listen(endless(b"x" * 65536, OK + b"\r\n")).url, limit=1000)
    error = listen(says(b"HTTP/1.1 404 No\r\ncontent-length: 2000\r\n\r\n" + b"x" * 2000))
    assert http.request("GET", error.url, limit=1000).status == 404
    cut = listen(says(OK + b"content-length: 100\r\n\r\nx"))
    with pytest.raises(HttpFailure) as caught:
        http.request("GET", cut.url, attempts=1)
    assert caught.value.kind == "broken"


def test_redirects_have_an_end(listen: Callable[[Say], Listener]) -> None:
    """A circle of redirects fails after a few; without permission none is followed."""
    server = listen(says(b"HTTP/1.1 302 On\r\nlocation: /again\r\ncontent-length: 0\r\n\r\n"))
    with pytest.raises(HttpFailure, match="5 redirects"):
        http.request("GET", server.url, redirects=True)

    assert len(server.asked) == 1 + http.REDIRECTS
    assert http.request("GET", server.url).status == 302


@pytest.mark.parametrize("location", ["file:///etc/passwd", f"ftp://127.0.0.1/{TOKEN}", "http://["])
def test_redirect_stays_with_http(listen: Callable[[Say], Listener], location: str) -> None:
    """A redirect to another scheme, or to no address, is not followed."""
    server = listen(says(f"HTTP/1.1 302 On\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n".encode()))
    with pytest.raises(HttpFailure) as caught:
        http.request("GET", server.url, redirects=True, token=TOKEN)
    assert caught.value.kind == "redirect"
    assert "SECRET" not in str(caught.value)


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
        with pytest.raises(HttpFailure) as caught:
            http.request("GET", address, token=TOKEN, attempts=1)
        assert "hush" not in str(caught.value)
        assert "SECRET" not in str(caught.value)
        assert str(caught.value).isprintable()


def test_stalled_download_stops_within_a_second(listen: Callable[[Say], Listener], tmp_path: Path) -> None:
    """The event that another download sets ends a transfer that stalls; what arrived is kept."""

    def stalled(connection: socket.socket, _: str) -> None:
        connection.sendall(OK + b"content-length: 1000\r\n\r\nhello")
        connection.recv(1)

    server, stopped = listen(stalled), threading.Event()
    threading.Timer(0.3, stopped.set).start()
    began = time.monotonic()
    with pytest.raises(HttpFailure):
        http.download(server.url, tmp_path / "a.part", stopped=stopped)
    assert time.monotonic() - began < 1.3
    assert (tmp_path / "a.part").read_bytes() == b"hello"
