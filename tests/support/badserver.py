"""Servers that answer what a test wants, over real connections: the bad thing itself, byte for byte."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

Say = Callable[[socket.socket, str], None]

MODELS = {"object": "list", "data": [{"id": "toy", "object": "model", "max_model_len": 64}]}


def head(kind: str = "application/json", length: int | None = None, status: str = "200 OK", *more: str) -> bytes:
    """Return the beginning of a reply."""
    lines = [f"HTTP/1.1 {status}", f"content-type: {kind}", *([] if length is None else [f"content-length: {length}"]), *more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def whole(body: object, status: str = "200 OK") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(length=len(data), status=status) + data


def completion(**choice: Any) -> dict[str, Any]:
    """Return the reply to a completion of two tokens after a prompt of two, as vLLM 0.32.0 sends it; *choice* changes its only choice."""
    sound = {
        "index": 0, "text": "<5><6>", "logprobs": None, "finish_reason": "length", "token_ids": [5, 6], "prompt_token_ids": [7, 8],
        "prompt_logprobs": None,
    }  # fmt: skip
    usage = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    return {"id": "cmpl-1", "object": "text_completion", "model": "toy", "choices": [sound | choice], "usage": usage}


class Listener:
    """A server that reads each request and then does what *say* does with the connection and the path."""

    def __init__(self, say: Say) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._say = say
        self.over = threading.Event()
        self.asked: list[str] = []
        self.heads: list[bytes] = []
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._serve, daemon=True)
        self._accepting.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._one, args=(connection,), daemon=True).start()

    def _one(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            data = b""
            while b"\r\n\r\n" not in data:
                data += connection.recv(65536)
            begin, _, body = data.partition(b"\r\n\r\n")
            length = next((int(line.split(b":")[1]) for line in begin.split(b"\r\n") if line.lower().startswith(b"content-length")), 0)
            while len(body) < length:
                body += connection.recv(65536)
            path = begin.split()[1].decode()
            self.asked.append(path)
            self.heads.append(begin)
            self._say(connection, path)
            # Closing with unread bytes would reset the connection before the client has read all.
            connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.over.set()
        # A thread that is left in accept() takes the connections of whichever socket gets this one's number next: when the machine stands
        # still for a moment, the kernel begins such calls anew, by number.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._accepting.join(60)
        assert not self._accepting.is_alive()
        self._socket.close()


def completing(reply: bytes | Say) -> Say:
    """Return a server that lists its model properly and answers a completion with *reply*."""

    def say(connection: socket.socket, path: str) -> None:
        if path == "/v1/models":
            connection.sendall(whole(MODELS))
        elif callable(reply):
            reply(connection, path)
        else:
            connection.sendall(reply)

    return say


def endless(piece: bytes, begin: bytes = b"") -> Say:
    """Return a server that never stops."""

    def say(connection: socket.socket, _: str) -> None:
        connection.sendall(begin)
        while True:
            connection.sendall(piece)

    return say


def silent(connection: socket.socket, _: str) -> None:
    connection.recv(1)  # until the client goes


def trickling(data: bytes, whole: int = 0) -> Say:
    """Return a server that sends the first bytes of *data* as a *whole*, and the others one by one, with a pause."""

    def say(connection: socket.socket, _: str) -> None:
        connection.sendall(data[:whole])
        for place in range(whole, len(data)):
            connection.sendall(data[place : place + 1])
            time.sleep(0.05)

    return say
