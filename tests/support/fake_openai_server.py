"""
An OpenAI-compatible server in a process of its own, with faults.

It answers as vLLM does: completions, streamed or whole, token ids, usage, counters, tokenizer. One thread serves each connection.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from tests.support import loopback

#: What may be wrong, each from a request of a given number on:
#: ``dies``: the process ends in the middle of an answer. ``refuses``: status 429.
#: ``closes``: the connection ends in mid-stream. ``error-event``: the stream ends with an error, and its status is 200.
#: ``short``: a token fewer than ordered. ``usage-more``: usage counts one token more than was sent. ``prefix-hits``: the counters say
#: that a prefix cache answered.
Fault = Literal["dies", "refuses", "closes", "error-event", "short", "usage-more", "prefix-hits"]
VERSION, LIMIT, VOCABULARY = "0.33.0", 131072, 32000
#: Seconds of a token.
STEP = 0.0002


class Behaviour(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    Describe a server.

    Attributes:
        faults: Fault → number of the request from which on it is there, from 1.
        name: Of the model.
    """

    faults: dict[Fault, int] = {}
    name: str = "reference"


class FakeServer(loopback.Server):
    """A server with *behaviour* on *port* of this machine, or on a free one."""

    daemon_threads, request_queue_size = True, 1024

    def __init__(self, behaviour: Behaviour, port: int = 0) -> None:
        super().__init__(Handler, port)
        self.behaviour = behaviour
        self.lock, self.counts, self.requests = threading.Lock(), Counter[str](), itertools.count(1)

    def count(self, **changes: int) -> None:
        """Add to the counters."""
        with self.lock:
            self.counts.update(changes)

    def metrics(self) -> str:
        """Return the counters in Prometheus' text form, under vLLM's names."""
        counts = self.counts
        values = {
            "generation_tokens_total": counts["tokens"], "prefix_cache_queries_total": counts["prompt"], "prefix_cache_hits_total": counts["hits"],
            **{f'request_success_total{{finished_reason="{reason}"}}': counts[reason] for reason in ("length", "abort", "error")},
        }  # fmt: skip
        return "".join(f"vllm:{name} {value}\n" for name, value in values.items())


class Handler(loopback.Handler):
    """Answer the requests of one connection."""

    server: FakeServer
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def do_GET(self) -> None:  # noqa: N802  http.server calls it so
        self._answer({})

    def do_POST(self) -> None:  # noqa: N802  http.server calls it so
        self._answer(json.loads(self.body()))

    def _answer(self, body: dict[str, Any]) -> None:
        own = self.server
        # A word is a token.
        tokens = [zlib.crc32(word.encode()) % VOCABULARY for word in str(body.get("prompt", "")).split()]
        records = {
            "/health": b"", "/metrics": own.metrics().encode(), "/version": {"version": VERSION},
            "/v1/models": {"data": [{"id": own.behaviour.name, "max_model_len": LIMIT}]}, "/tokenize": {"max_model_len": LIMIT, "tokens": tokens},
        }  # fmt: skip
        with contextlib.suppress(OSError):
            if self.path == "/v1/completions":
                self._complete(body, tokens if isinstance(body["prompt"], str) else body["prompt"])
            else:
                self.answer(200 if self.path in records else 404, records.get(self.path), Content_Type="application/json")

    def _complete(self, body: dict[str, Any], prompt: list[int]) -> None:
        """Send the answer to *prompt*, which decides its tokens, and count it."""
        own, number, count = self.server, next(self.server.requests), body["max_tokens"]
        faults = {fault for fault, first in own.behaviour.faults.items() if number >= first}
        if "refuses" in faults:
            return self.answer(429, {"error": {"message": "it is refused", "code": 429}})
        seed = zlib.crc32(repr(prompt).encode())
        tokens = [256 + (seed + at * 7919) % (VOCABULARY - 256) for at in range(count - ("short" in faults))]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens) + ("usage-more" in faults)}
        broken = faults & {"dies", "closes", "error-event"}
        own.count(prompt=len(prompt), hits=len(prompt) * ("prefix-hits" in faults))
        if body.get("stream"):
            self.send_response(200)
            self.send_header("content-type", "text/event-stream; charset=utf-8")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
        for token in tokens[: count // 2] if broken else tokens:
            time.sleep(STEP)
            own.count(tokens=1)
            self._event(body, choices=[self._choice([token], None)])
        if "dies" in faults:
            os._exit(1)
        own.count(**{"abort" if "closes" in faults else "error" if broken else "length": 1})
        if "closes" in faults:
            self.close_connection = True
        elif not body.get("stream"):
            record = {"model": own.behaviour.name, "choices": [{**self._choice(tokens, "length"), "prompt_token_ids": prompt}], "usage": usage}
            self.answer(200, record, Content_Type="application/json")
        else:
            self._event(body, **{"error": {"message": "the engine died", "code": 500}} if broken else {"choices": [], "usage": usage})
            self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        return None

    def _choice(self, tokens: list[int], finish: str | None) -> dict[str, Any]:
        return {"index": 0, "text": "".join(f" t{token}" for token in tokens), "token_ids": tokens, "finish_reason": finish}

    def _event(self, body: dict[str, Any], **record: object) -> None:
        """Send a part of a stream, if *body* asks for one."""
        if body.get("stream"):
            data = f"data: {json.dumps({'model': self.server.behaviour.name, **record})}\n\n".encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))


@contextlib.contextmanager
def started(behaviour: Behaviour) -> Iterator[FakeServer]:
    """Yield a server with *behaviour* that runs in the block, in a copy of this process, which a fault may end."""
    server = FakeServer(behaviour)
    child = multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True)
    child.start()
    server.socket.close()
    try:
        yield server
    finally:
        child.kill()
        child.join()
