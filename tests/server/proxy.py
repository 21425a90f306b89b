"""
A proxy that stands before a real server and spoils its completions in one way: ``with Proxy(url, "truncate") as proxy: Client(proxy.url)``.

All else passes as it is. The faults:

========================  ===========================================================================================
``none``                  nothing is changed
``truncate``              the connection ends in the middle of the reply
``html``                  a web page comes in its place
``abort``                 the server gave up in the middle of the answer
``other-model``           the reply names another model
``random-tokens``         each token is another one with the probability *rate*
``wrong-usage``           the count of tokens is one too low
``garbage``               the text is no UTF-8
========================  ===========================================================================================
"""

from __future__ import annotations

import http.client
import http.server
import json
import random
import threading
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

FAULTS = (
    "none",
    "truncate",
    "html",
    "abort",
    "other-model",
    "random-tokens",
    "wrong-usage",
    "garbage",
)


class Proxy(http.server.ThreadingHTTPServer):
    """
    A proxy of the server at *upstream*, open inside its ``with`` block.

    Args:
        fault: One of `FAULTS`; may be changed at any time.
        rate: Of ``random-tokens``.
        vocabulary: Its tokens are drawn below this number.
    """

    daemon_threads = True

    def __init__(
        self, upstream: str, fault: str = "none", *, rate: float = 0.01, vocabulary: int = 256
    ) -> None:
        assert fault in FAULTS
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream, self.fault, self.rate, self.vocabulary = (
            urlsplit(upstream),
            fault,
            rate,
            vocabulary,
        )
        self.draw = random.Random(1)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()
        self.server_close()

    def spoil(self, body: bytes) -> bytes:
        """Return the reply *body* with the fault."""
        reply: dict[str, Any] = json.loads(body)
        choice = reply["choices"][0]
        if self.fault == "abort":
            choice["finish_reason"] = "abort"
        if self.fault == "other-model":
            reply["model"] = "somebody-else"
        if self.fault == "wrong-usage":
            reply["usage"]["completion_tokens"] -= 1
        if self.fault == "random-tokens":
            tokens = choice["token_ids"]
            choice["token_ids"] = [
                self.draw.randrange(self.vocabulary) if self.draw.random() < self.rate else token
                for token in tokens
            ]
        data = json.dumps(reply).encode()
        return data.replace(b'"text": "', b'"text": "\xff\xfe') if self.fault == "garbage" else data


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Proxy

    def log_message(self, *_: object) -> None:
        """Say nothing; the test's output is for the test."""

    def do_GET(self) -> None:
        self._pass(None)

    def do_POST(self) -> None:
        self._pass(self.rfile.read(int(self.headers["content-length"])))

    def _pass(self, body: bytes | None) -> None:
        own = self.server
        connection = http.client.HTTPConnection(
            own.upstream.hostname or "", own.upstream.port, timeout=600
        )
        try:
            connection.request(
                self.command,
                self.path,
                body,
                {"Content-Type": "application/json", "Connection": "close"},
            )
            reply = connection.getresponse()
            data, kind = reply.read(), reply.headers.get("content-type", "")
        finally:
            connection.close()
        length = 0
        if own.fault != "none" and self.path == "/v1/completions" and reply.status == 200:
            data = own.spoil(data)
            length = 100 if own.fault == "truncate" else 0
            data, kind = (
                (b"<html>502 Bad Gateway</html>", "text/html")
                if own.fault == "html"
                else (data, kind)
            )
        self.send_response(reply.status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data) + length))
        self.end_headers()
        self.wfile.write(data)
