"""The OpenAI-shaped server: health, the model's name, and completions, whole or word by word."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

from ._version import __version__
from .model import Model

#: Bytes of the largest question.
_LARGEST = 1 << 20
#: Words of the longest answer.
_LONGEST = 4096


class Refused(Exception):
    """A question that cannot be answered, with its status."""

    def __init__(self, status: int, says: str) -> None:
        super().__init__(says)
        self.status = status


class Server(http.server.ThreadingHTTPServer):
    """A server of *model* under *name*, a thread for each connection; port 0 takes a free one."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], model: Model, name: str) -> None:
        super().__init__(address, _Handler)
        self.model, self.name = model, name
        self._lock, self._count = threading.Lock(), 0

    def number(self) -> int:
        """Return the number of a request, from 1."""
        with self._lock:
            self._count += 1
            return self._count


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class names it so
        """Say nothing; the base class writes to standard error."""

    def do_GET(self) -> None:
        """Answer what needs no question."""
        made: dict[str, Any] = {
            "/health": None,
            "/version": {"version": __version__},
            "/v1/models": {"object": "list", "data": [{"id": self.server.name, "object": "model", "owned_by": "mini-vllm"}]},
        }
        if self.path in made:
            self._reply(200, made[self.path])
        else:
            self._reply(404, _error(404, f"there is nothing at {self.path}"))

    def do_POST(self) -> None:
        """Answer a completion."""
        try:
            if self.path != "/v1/completions":
                raise Refused(404, f"there is nothing at {self.path}")
            asked = _Asked(self._body(), self.server)
        except Refused as refused:
            self.close_connection = True
            self._reply(refused.status, _error(refused.status, str(refused)))
            return
        if asked.stream:
            self._stream(asked)
        else:
            self._reply(200, asked.whole())

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit():
            raise Refused(411, "the length of the question is not given")
        if int(length) > _LARGEST:
            raise Refused(413, f"a question has at most {_LARGEST} bytes")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except ValueError as error:
            raise Refused(400, "the question is no JSON") from error
        if not isinstance(body, dict):
            raise Refused(400, "the question is no JSON object")
        return body

    def _reply(self, status: int, body: dict[str, Any] | None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, asked: _Asked) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in (*map(json.dumps, asked.pieces()), "[DONE]"):
            data = f"data: {piece}\n\n".encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")


class _Asked:
    """A question, checked, and its answer as it is written."""

    def __init__(self, body: dict[str, Any], server: Server) -> None:
        self.model, self.name = server.model, server.name
        if body.get("model", server.name) != server.name:
            raise Refused(404, f"the model {body['model']!r} is not served here")
        prompt, self.most = body.get("prompt"), body.get("max_tokens", 16)
        if not isinstance(prompt, str):
            raise Refused(400, "prompt is no text")
        if not isinstance(self.most, int) or isinstance(self.most, bool) or not 1 <= self.most <= _LONGEST:
            raise Refused(400, f"max_tokens is no number from 1 to {_LONGEST}")
        if body.get("temperature", 0) != 0:
            raise Refused(400, "only the most likely word is ever written: temperature must be 0")
        self.stream = body.get("stream", False) is True
        options = body.get("stream_options")
        self.counted = isinstance(options, dict) and options.get("include_usage") is True
        self.prompt = self.model.encode(prompt)
        self.id = f"cmpl-{server.number()}"
        self.written: list[int] = []
        self.reason = "length"

    def _words(self) -> Iterator[str]:
        """Yield the answer word by word, each with the space before it."""
        while len(self.written) < self.most:
            word = self.model.next([*self.prompt, *self.written])
            if word == self.model.end:
                self.reason = "stop"
                return
            self.written.append(word)
            yield f" {self.model.words[word]}"

    def _made(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": 0, "model": self.name, "choices": choices}

    def _usage(self) -> dict[str, int]:
        sizes = len(self.prompt), len(self.written)
        return {"prompt_tokens": sizes[0], "completion_tokens": sizes[1], "total_tokens": sum(sizes)}

    def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        text = "".join(self._words())
        return {**self._made([{"index": 0, "text": text, "logprobs": None, "finish_reason": self.reason}]), "usage": self._usage()}

    def pieces(self) -> Iterator[dict[str, Any]]:
        """Yield the answer in pieces: a word each, the reason of its end, and its size where that was asked for."""
        for text in self._words():
            yield self._made([{"index": 0, "text": text, "logprobs": None, "finish_reason": None}])
        yield self._made([{"index": 0, "text": "", "logprobs": None, "finish_reason": self.reason}])
        if self.counted:
            yield {**self._made([]), "usage": self._usage()}


def _error(status: int, says: str) -> dict[str, Any]:
    return {"error": {"message": says, "type": "invalid_request_error", "code": status}}
