"""
The shared compiler cache: what one machine compiled, another one takes.

A build runs without a network, so ccache does not speak to the server itself. It finds a Unix socket in the launch folder, behind which
this process answers as a Redis server would, from Redis, S3 or a web server. So the address and the secrets of the cache stay outside of
what the build's programs can see, and of what they print.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import os
import socket
import socketserver
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol, Self
from urllib.parse import parse_qs, quote, urlsplit

from sparkwright.core.console import console
from sparkwright.core.errors import FileError

#: Name of the socket in the launch folder.
SOCKET = "cache"
#: Password of a Redis server, or of a web server's user; an address in a file must not hold one.
PASSWORD = "SPARKWRIGHT_CACHE_PASSWORD"  # noqa: S105  a name, not a password
#: A result of the compiler is some megabytes; a larger word is not one of ccache's.
LARGEST = 1 << 30
#: Seconds for one answer of the server, and how many failures it takes not to ask it again in this build.
PATIENCE, FAILURES = 20.0, 3


class Shelf(Protocol):
    """Where results lie, by key."""

    def get(self, key: str) -> bytes | None:
        """Return a result, or None where there is none; raise `OSError` where it cannot be asked for."""

    def put(self, key: str, value: bytes) -> None:
        """Keep a result; raise `OSError` where that is impossible."""


class RedisShelf:
    """A Redis server, by a new connection for each question: a build asks for hundreds of results, not for thousands a second."""

    def __init__(self, url: str, password: str) -> None:
        parts = urlsplit(url)
        self._place = (parts.hostname or "localhost", parts.port or 6379)
        self._user, self._password, self._database = parts.username or "", password, parts.path.strip("/")

    def get(self, key: str) -> bytes | None:
        return self._ask(b"GET", key.encode())

    def put(self, key: str, value: bytes) -> None:
        self._ask(b"SET", key.encode(), value)

    def _ask(self, *words: bytes) -> bytes | None:
        greeting = [] if not self._password else [[b"AUTH", *([self._user.encode()] if self._user else []), self._password.encode()]]
        if self._database:
            greeting.append([b"SELECT", self._database.encode()])
        with socket.create_connection(self._place, timeout=PATIENCE) as link, link.makefile("rb") as stream:
            answer: bytes | None = None
            for command in (*greeting, words):
                link.sendall(b"*%d\r\n" % len(command) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in command))
                answer = _answer(stream)
        return answer


def _answer(stream: BinaryIO) -> bytes | None:
    line = stream.readline(LARGEST).rstrip(b"\r\n")
    if line.startswith(b"$"):
        return None if line == b"$-1" else _bulk(stream, line)
    if not line.startswith((b"+", b":")):
        raise OSError(f"Redis answers {line[:80].decode('utf-8', 'replace')!r}")
    return line[1:]


def _bulk(stream: BinaryIO, line: bytes) -> bytes:
    size = int(line[1:])
    if not 0 <= size <= LARGEST:
        raise OSError(f"a word of {size} bytes")
    data = stream.read(size + 2)
    if len(data) != size + 2:
        raise OSError("the connection ended within a word")
    return data[:-2]


class WebShelf:
    """A web server that takes PUT and GET below an address, or an S3 service, whose requests are signed."""

    def __init__(self, base: str, sign: Signer | None = None, password: str = "") -> None:
        import requests

        parts = urlsplit(base)
        self._base = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
        self._sign, self._session = sign, requests.Session()
        self._session.trust_env = sign is None
        if password and not sign:
            self._session.auth = (parts.username or "", password)

    def get(self, key: str) -> bytes | None:
        return self._ask("GET", key, b"")

    def put(self, key: str, value: bytes) -> None:
        self._ask("PUT", key, value)

    def _ask(self, method: str, key: str, body: bytes) -> bytes | None:
        url = f"{self._base}/{quote(key, safe='')}"
        headers = self._sign.headers(method, url, body, datetime.datetime.now(datetime.UTC)) if self._sign else {}
        answer = self._session.request(method, url, data=body or None, headers=headers, timeout=PATIENCE, allow_redirects=False)
        if answer.status_code == 404 and method == "GET":
            return None
        if not answer.ok:
            raise OSError(f"{urlsplit(url).hostname} answers {answer.status_code}")
        return answer.content


class Signer:
    """Signs requests to S3, by AWS Signature Version 4 (docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html)."""

    def __init__(self, region: str, environment: Mapping[str, str]) -> None:
        self._region, self._key = region, environment.get("AWS_ACCESS_KEY_ID", "")
        self._secret, self._token = environment.get("AWS_SECRET_ACCESS_KEY", ""), environment.get("AWS_SESSION_TOKEN", "")

    def headers(self, method: str, url: str, body: bytes, now: datetime.datetime, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the headers of a request to *url*; none without a key, for buckets that anybody may read."""
        if not self._key:
            return {}
        parts, day = urlsplit(url), now.strftime("%Y%m%d")
        signed = {name.lower(): value for name, value in (extra or {}).items()}
        signed |= {"host": parts.netloc, "x-amz-content-sha256": hashlib.sha256(body).hexdigest()}
        signed["x-amz-date"] = now.strftime("%Y%m%dT%H%M%SZ")
        if self._token:
            signed["x-amz-security-token"] = self._token
        names = ";".join(sorted(signed))
        lines = [method, parts.path, parts.query, *(f"{name}:{signed[name]}" for name in sorted(signed)), "", names]
        request = "\n".join([*lines, signed["x-amz-content-sha256"]])
        scope = f"{day}/{self._region}/s3/aws4_request"
        text = "\n".join(["AWS4-HMAC-SHA256", signed["x-amz-date"], scope, hashlib.sha256(request.encode()).hexdigest()])
        key = f"AWS4{self._secret}".encode()
        for word in (day, self._region, "s3", "aws4_request"):
            key = hmac.digest(key, word.encode(), "sha256")
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        authorization = f"AWS4-HMAC-SHA256 Credential={self._key}/{scope},SignedHeaders={names},Signature={signature}"
        return {**{name: value for name, value in signed.items() if name != "host"}, "authorization": authorization}


def shelf(url: str) -> Shelf:
    """
    Return where the results of the remote *url* lie.

    Raises:
        file-invalid: It is no such address, or holds a password.
    """
    parts, password = urlsplit(url), os.environ.get(PASSWORD, "")
    if parts.password:
        raise FileError(
            "file-invalid", "compiler_cache: the address of the remote holds a password.", todo=f"Put it into the variable {PASSWORD}."
        )
    if parts.scheme == "redis" and parts.hostname:
        return RedisShelf(url, password)
    if parts.scheme in ("http", "https") and parts.hostname:
        return WebShelf(url, password=password)
    if parts.scheme == "s3" and parts.netloc:
        options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        region = options.get("region", "us-east-1")
        endpoint = options.get("endpoint", f"https://s3.{region}.amazonaws.com").rstrip("/")
        if unknown := sorted(options.keys() - {"region", "endpoint"}):
            raise FileError("file-invalid", f"compiler_cache: the address of the remote has an unknown option {unknown[0]!r}.")
        return WebShelf("/".join([endpoint, parts.netloc, *filter(None, [parts.path.strip("/")])]), Signer(region, os.environ))
    raise FileError("file-invalid", f"compiler_cache: the remote {url!r} is none of redis://HOST, http(s)://HOST/…, s3://BUCKET/PREFIX?endpoint=…&region=….")


class Door:
    """
    The socket at which ccache asks, open inside its ``with`` block.

    Args:
        folder: Where the socket is made.
    """

    def __init__(self, folder: Path, shelf: Shelf) -> None:
        self._folder, self._shelf, self._failures, self._lock = folder, shelf, 0, threading.Lock()

    def __enter__(self) -> Self:
        door = self

        class Visitor(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError, ValueError):
                    door.serve(self.rfile, self.wfile)  # type: ignore[arg-type]  # a socket's file reads and writes bytes

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True

        (self._folder / SOCKET).unlink(missing_ok=True)
        place = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._server = Server(f"/proc/self/fd/{place}/{SOCKET}", Visitor)
        finally:
            os.close(place)
        threading.Thread(target=self._server.serve_forever, name="compiler cache", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        (self._folder / SOCKET).unlink(missing_ok=True)

    def serve(self, reading: BinaryIO, writing: BinaryIO) -> None:
        """Answer the commands of one connection, as Redis does."""
        for name, *words in _commands(reading):
            writing.write(self._reply(name.upper(), words))
            writing.flush()

    def _reply(self, name: bytes, words: list[bytes]) -> bytes:
        if name in (b"GET", b"EXISTS") and len(words) == 1:
            value = self._kept(words[0].decode())
            if name == b"EXISTS":
                return b":%d\r\n" % (value is not None)
            return b"$-1\r\n" if value is None else b"$%d\r\n%s\r\n" % (len(value), value)
        if name == b"SET" and len(words) >= 2:
            self._keep(words[0].decode(), words[1])
            return b"+OK\r\n"
        return b"+OK\r\n" if name in (b"SELECT", b"PING", b"AUTH") else b"-ERR unknown command\r\n"

    def _kept(self, key: str) -> bytes | None:
        found: list[bytes | None] = []
        with self._failing():
            found.append(self._shelf.get(key) if self._failures < FAILURES else None)
        return found[0] if found else None

    def _keep(self, key: str, value: bytes) -> None:
        with self._failing():
            if self._failures < FAILURES:
                self._shelf.put(key, value)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Let a failure of the server be a miss: a build must not depend on it. After some of them it is not asked any more."""
        import requests

        try:
            yield
        except (OSError, ValueError, requests.RequestException) as error:
            with self._lock:
                self._failures += 1
                if self._failures == FAILURES:
                    console.warn(f"the shared compiler cache does not answer ({type(error).__name__}); the build goes on without it")


def _commands(stream: BinaryIO) -> Iterator[list[bytes]]:
    """Yield the commands that arrive, each a list of words; raise `OSError` for what is none."""
    while line := stream.readline(64):
        count = int(line[1:]) if line.startswith(b"*") else 0
        if not 1 <= count <= 16:
            raise OSError("no command")
        yield [_bulk(stream, stream.readline(64)) for _ in range(count)]
