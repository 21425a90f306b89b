"""Servers that answer what a test wants, over real connections: the bad thing itself, byte for byte."""

import contextlib
import json
import re
import socket
import socketserver
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


class Listener(socketserver.ThreadingTCPServer):
    """A server that reads each request and then does what *say* does with the connection and the path, until `close`."""

    daemon_threads, request_queue_size = True, 128

    def __init__(self, say: Say) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.say = say
        self.asked: list[str] = []
        self.heads: list[bytes] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(socketserver.StreamRequestHandler):
    server: Listener

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            head = b""
            while (line := self.rfile.readline()).strip():
                head += line
            if not head:  # a client that left before it asked
                return
            length = re.search(rb"(?i)^content-length: *(\d+)", head, re.MULTILINE)
            self.rfile.read(int(length[1]) if length else 0)
            path = head.split()[1].decode()
            self.server.asked.append(path)
            self.server.heads.append(head)
            self.server.say(self.connection, path)
            # Closing with unread bytes would reset the connection before the client has read all.
            self.connection.shutdown(socket.SHUT_WR)


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
