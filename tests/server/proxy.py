"""
A proxy that stands before a real server and spoils its streams in one way: ``with Proxy(url, "truncate") as proxy: Client(proxy.url)``.

All that is not a stream passes as it is. The faults:

========================  ===========================================================================================
``none``                  nothing is changed
``truncate``              the connection ends after *after* events
``truncate-inside``       the connection ends in the middle of the event behind them
``html-after``            a web page comes in their place
``error-after``           an event with an error comes in their place, as a server sends it that breaks down
``other-model``           every event names another model
``random-tokens``         each token is another one with the probability *rate*
``drop-usage``            the events lose their count of tokens
``wrong-usage``           the count is one too high
``drop-done``             the last event is missing, and the connection ends well
``garbage``               the bytes of the event behind them are no UTF-8
========================  ===========================================================================================
"""

from __future__ import annotations

import http.client
import http.server
import json
import random
import socket
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

FAULTS = ("none", "truncate", "truncate-inside", "html-after", "error-after", "other-model", "random-tokens", "drop-usage", "wrong-usage",
          "drop-done", "garbage")  # fmt: skip


class Cut(Exception):
    """The connection ends here, without the end of the answer."""


class Proxy(http.server.ThreadingHTTPServer):
    """
    A proxy of the server at *upstream*, open inside its ``with`` block.

    Args:
        fault: One of `FAULTS`; may be changed at any time.
        after: How many events pass unchanged, where the fault comes in the middle.
        rate: Of ``random-tokens``.
        vocabulary: Its tokens are drawn below this number.
    """

    daemon_threads = True

    def __init__(self, upstream: str, fault: str = "none", *, after: int = 3, rate: float = 0.01, vocabulary: int = 256) -> None:
        assert fault in FAULTS
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream, self.fault, self.after, self.rate, self.vocabulary = upstream, fault, after, rate, vocabulary
        self.draw = random.Random(1)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()
        self.server_close()

    def spoil(self, events: Iterator[bytes]) -> Iterator[bytes]:
        """Yield *events*, lines with their ends, with the fault; raise `Cut` where the connection ends."""
        count = 0
        for line in events:
            count += line.startswith(b"data:")
            late = count > self.after
            if self.fault == "truncate" and late:
                raise Cut
            if self.fault == "truncate-inside" and late:
                yield line[: len(line) // 2]
                raise Cut
            if self.fault == "html-after" and late:
                yield b"<html><body><h1>502 Bad Gateway</h1></body></html>\n"
                return
            if self.fault == "error-after" and late:
                yield b'data: {"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}}\n\n'
                continue
            if self.fault == "garbage" and late:
                yield line.replace(b'"text":"', b'"text":"\xff\xfe')
                continue
            if self.fault == "drop-done" and line.startswith(b"data: [DONE]"):
                return
            yield self._changed(line)

    def _changed(self, line: bytes) -> bytes:
        if self.fault not in ("other-model", "random-tokens", "drop-usage", "wrong-usage") or not line.startswith(b"data: {"):
            return line
        event: dict[str, Any] = json.loads(line[6:])
        if self.fault == "other-model":
            event["model"] = "somebody-else"
        if self.fault == "drop-usage":
            event.pop("usage", None)
        if self.fault == "wrong-usage" and event.get("usage"):
            event["usage"]["completion_tokens"] += 1
        if self.fault == "random-tokens":
            for choice in event["choices"]:
                old = choice.get("token_ids") or []
                choice["token_ids"] = [self.draw.randrange(self.vocabulary) if self.draw.random() < self.rate else token for token in old]
        return b"data: " + json.dumps(event).encode() + b"\n"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing; the test's output is for the test."""

    def do_GET(self) -> None:
        self._pass(None)

    def do_POST(self) -> None:
        self._pass(self.rfile.read(int(self.headers["content-length"])))

    def _pass(self, body: bytes | None) -> None:
        where = urlsplit(self.server.upstream)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=600)
        self.close_connection = True
        try:
            connection.request(self.command, self.path, body, {"Content-Type": "application/json", "Connection": "close"})
            reply = connection.getresponse()
            kind = reply.headers.get("content-type", "")
            self.send_response(reply.status)
            self.send_header("content-type", kind)
            self.send_header("connection", "close")
            if kind.startswith("text/event-stream"):
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                self._stream(reply)
            else:
                data = reply.read()
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client has heard enough
        finally:
            connection.close()

    def _stream(self, reply: http.client.HTTPResponse) -> None:
        try:
            for line in self.server.spoil(iter(reply.readline, b"")):
                self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
        except Cut:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
