"""HTTP requests as the reference server reads them, and its replies; as much of HTTP/1.1 as load generators speak."""

from __future__ import annotations

import msgspec

#: The most bytes of a request's head, and of its body: a prompt of 131,072 tokens has about a megabyte.
HEAD, BODY = 1 << 16, 32 << 20

REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 411: "Length Required", 413: "Content Too Large", 429: "Too Many Requests",
           503: "Service Unavailable"}  # fmt: skip


class Refused(Exception):
    """A request that is not answered as asked: the *status*, and why."""

    def __init__(self, status: int, says: str) -> None:
        self.status, self.says = status, says
        super().__init__(says)


class Question(msgspec.Struct, frozen=True, gc=False):
    """One request: what is asked, whether the connection stays, and the body."""

    method: str
    path: str
    stays: bool
    body: bytes


def read(buffer: bytearray) -> Question | None:
    """
    Take one request out of *buffer* and return it; None where it is not whole yet.

    Raises:
        Refused: It is none, or too large.
    """
    end = buffer.find(b"\r\n\r\n", 0, HEAD)
    if end < 0:
        if len(buffer) >= HEAD:
            raise Refused(413, "the head of the request is too large")
        return None
    first, *lines = bytes(buffer[:end]).decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise Refused(400, "not HTTP/1.1")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "transfer-encoding" in headers:
        raise Refused(411, "say Content-Length")
    told = headers.get("content-length", "0")
    if not told.isascii() or not told.isdigit() or len(told) > 12 or (length := int(told)) > BODY:
        raise Refused(413, "the length of the body is none that is taken")
    if len(buffer) < end + 4 + length:
        return None
    body = bytes(buffer[end + 4 : end + 4 + length])
    del buffer[: end + 4 + length]
    stays = headers.get("connection", "").lower() != "close" and words[2] == "HTTP/1.1"
    return Question(words[0], words[1].partition("?")[0], stays, body)


def whole(status: int, body: bytes, kind: str = "application/json") -> bytes:
    """Return a reply with all of its *body*."""
    return f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


#: The head of a reply whose events come one by one.
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
#: Its end.
STREAM_END = b"0\r\n\r\n"


def event(data: bytes) -> bytes:
    """Return one event of a stream, as a chunk of the transfer."""
    return b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data)


def refusal(refused: Refused) -> bytes:
    """Return the reply to what is refused, in the form of OpenAI's errors."""
    error = {"message": refused.says, "type": "invalid_request_error", "param": None, "code": refused.status}
    return whole(refused.status, msgspec.json.encode({"error": error}))
