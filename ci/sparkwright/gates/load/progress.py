"""llama-benchy's stream of progress, as requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from sparkwright.core.console import one_line
from sparkwright.gates.load.order import LoadInvalid, Request

#: Bytes of one line; a line holds the text of a few tokens.
LINE = 1 << 20

Seconds = Annotated[float, msgspec.Meta(ge=0)]


class _Event(msgspec.Struct):
    """A line; fields by kind."""

    type: Literal["header", "request_start", "request_first_response", "request_first_token", "latency_measured", "tokens", "request_end",
                  "bench_complete"]  # fmt: skip
    ts: Seconds
    request_id: int = -1
    ttft_s: Seconds = 0.0
    total_tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""
    status: str = ""


class _Seen:
    """One request whose events are still coming."""

    def __init__(self, began: float) -> None:
        self.began, self.ttft, self.first, self.last, self.chunks = began, 0.0, 0.0, 0.0, 0
        self.end: _Event | None = None

    def add(self, event: _Event) -> None:
        if event.type == "request_first_token":
            self.ttft = event.ttft_s
        elif event.type == "tokens":
            self.first, self.last, self.chunks = self.first or event.ts, event.ts, self.chunks + 1
        elif event.type == "request_end":
            self.end = event

    def request(self, zero: float) -> Request:
        end = self.end or _Event("request_end", 0.0, error="it never ended")
        seconds = self.ttft + self.last - self.first
        return Request(self.began - zero, self.ttft, seconds, end.prompt_tokens, end.total_tokens, self.chunks, one_line(end.error, 300))


def requests(path: Path) -> tuple[Request, ...]:
    """Return the requests of the progress at *path*; raise `LoadInvalid` where it is none, or breaks off."""
    decoder, seen, status = msgspec.json.Decoder(_Event), dict[int, _Seen](), ""
    try:
        with path.open("rb") as stream:
            while line := stream.readline(LINE):
                event = decoder.decode(line)
                if event.type == "request_start":
                    seen[event.request_id] = _Seen(event.ts)
                elif event.type == "bench_complete":
                    status = event.status
                elif event.request_id in seen:
                    seen[event.request_id].add(event)
    except (OSError, ValueError, RecursionError) as error:
        raise LoadInvalid("generator-unreadable", f"its progress cannot be read: {error!s:.200}") from None
    if status != "ok" or not seen:
        raise LoadInvalid("generator-failed", f"it ended as {status or 'nothing'} after {len(seen)} requests")
    zero = min(one.began for one in seen.values())
    return tuple(one.request(zero) for one in seen.values())
