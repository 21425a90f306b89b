"""
An OpenAI-compatible server in a process of its own, with settable delays and faults.

It answers as vLLM does: completions, streamed or whole, token ids, usage, counters, tokenizer. One thread serves each connection. Tokens go
out on a schedule that lateness does not move.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import re
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


class Behaviour(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    Describe a server.

    Attributes:
        ttft: Seconds from the whole request to the first token. *tpot*: seconds from each token to the next.
        faults: Fault → number of the request from which on it is there, from 1.
        name: Of the model.
    """

    ttft: float = 0.05
    tpot: float = 0.01
    faults: dict[Fault, int] = {}
    name: str = "reference"


def text_of(tokens: list[int]) -> str:
    """Return the text of *tokens*."""
    return "".join(f" t{token}" for token in tokens)


def tokenized(text: str) -> list[int]:
    """Return the tokens of *text*, one for each word; those of `text_of` come back as they were."""
    own = re.compile(r"t[0-9]{1,9}")
    return [int(part[1:]) if own.fullmatch(part) else zlib.crc32(part.encode()) % VOCABULARY for part in text.split()] or [0]


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
            "num_requests_running": counts["running"], "num_requests_waiting": 0, "kv_cache_usage_perc": 0.0,
            "prompt_tokens_total": counts["prompt"], "generation_tokens_total": counts["tokens"],
            "prefix_cache_queries_total": counts["prompt"], "prefix_cache_hits_total": counts["hits"],
        }  # fmt: skip
        model = f'model_name="{self.behaviour.name}"'
        lines = [f'vllm:{name}{{engine="0",{model}}} {float(value)}' for name, value in values.items()]
        for reason in ("stop", "length", "abort", "error"):
            lines.append(f'vllm:request_success_total{{engine="0",finished_reason="{reason}",{model}}} {float(counts[reason])}')
        return "\n".join(lines) + "\n"


class Handler(loopback.Handler):
    """Answer the requests of one connection."""

    server: FakeServer
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def do_GET(self) -> None:  # noqa: N802  http.server calls it so
        self._answer({})

    def do_POST(self) -> None:  # noqa: N802  http.server calls it so
        self._answer(json.loads(self.body()))

    def _answer(self, body: dict[str, Any]) -> None:
        received, path, own = time.monotonic(), self.path.partition("?")[0], self.server.behaviour
        records = {
            "/health": "", "/metrics": self.server.metrics(), "/version": {"version": VERSION},
            "/v1/models": {"object": "list", "data": [{"id": own.name, "object": "model", "root": own.name, "max_model_len": LIMIT}]},
            "/tokenize": {"max_model_len": LIMIT, "tokens": tokenized(str(body.get("prompt", "")))},
        }  # fmt: skip
        with contextlib.suppress(OSError):
            if path == "/v1/completions":
                Completion(self, body, received).send()
            elif path in records:
                self.whole(records[path])
            else:
                self.refuse(404)

    def refuse(self, status: int) -> None:
        """Refuse the request."""
        self.whole({"error": {"message": "it is refused", "type": "invalid_request_error", "code": status}}, status)

    def whole(self, record: object, status: int = 200) -> None:
        """Send *record* as JSON, or text as it is."""
        data = record.encode() if isinstance(record, str) else record
        self.answer(status, data, Content_Type="application/json" if data is record else "text/plain; charset=utf-8")


class Completion:
    """The answer of tokens to the request *body*, which was *received* at a time of the monotonic clock."""

    def __init__(self, handler: Handler, body: dict[str, Any], received: float) -> None:
        self.handler, self.body, self.received, self.server = handler, body, received, handler.server
        self.own, self.number = self.server.behaviour, next(self.server.requests)
        self.faults = {fault for fault, first in self.own.faults.items() if self.number >= first}
        self.prompt = tokenized(body["prompt"]) if isinstance(body["prompt"], str) else body["prompt"]
        self.tokens, self.stream = body.get("max_tokens") or 16, bool(body.get("stream"))

    def _choice(self, place: int, size: int, finish: str | None) -> dict[str, Any]:
        # The tokens are a function of the prompt.
        seed = zlib.crc32(repr(self.prompt).encode())
        codes = [256 + (seed + at * 7919) % (VOCABULARY - 256) for at in range(place, place + size)]
        choice = {"index": 0, "text": text_of(codes), "logprobs": None, "finish_reason": finish}
        ids = {"token_ids": codes, **({} if place else {"prompt_token_ids": self.prompt})}
        return choice | (ids if self.body.get("return_token_ids") else {})

    def _record(self, choices: list[dict[str, Any]], **more: object) -> dict[str, Any]:
        return {"id": f"cmpl-{self.number}", "object": "text_completion", "created": 0, "model": self.own.name, "choices": choices, **more}

    def _event(self, record: dict[str, Any] | str) -> None:
        data = f"data: {record if isinstance(record, str) else json.dumps(record)}\n\n".encode()
        self.handler.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def send(self) -> None:
        """Send the answer on its schedule, and count it."""
        if "refuses" in self.faults or len(self.prompt) + self.tokens > LIMIT:
            self.handler.refuse(429 if "refuses" in self.faults else 400)
            return
        self.server.count(running=1, prompt=len(self.prompt), hits=len(self.prompt) if "prefix-hits" in self.faults else 0)
        reason = "abort"
        try:
            reason = self._send()
        finally:
            self.server.count(running=-1, **{reason: 1})

    def _send(self) -> str:
        if self.stream:
            self.handler.send_response(200)
            self.handler.send_header("content-type", "text/event-stream; charset=utf-8")
            self.handler.send_header("transfer-encoding", "chunked")
            self.handler.end_headers()
        total = max(1, self.tokens - ("short" in self.faults))
        for place in range(total):
            due = self.received + self.own.ttft + place * self.own.tpot
            time.sleep(max(0.0, due - time.monotonic()))
            if self.stream:
                self._event(self._record([self._choice(place, 1, "length" if place + 1 == total else None)]))
            self.server.count(tokens=1)
            if place + 1 >= total // 2 and (reason := self._broken()):
                return reason
        counted = total + ("usage-more" in self.faults)
        usage = {"prompt_tokens": len(self.prompt), "completion_tokens": counted, "total_tokens": len(self.prompt) + counted}
        if not self.stream:
            self.handler.whole(self._record([self._choice(0, total, "length")], usage=usage))
            return "length"
        if (self.body.get("stream_options") or {}).get("include_usage"):
            self._event(self._record([], usage=usage))
        self._end()
        return "length"

    def _end(self) -> None:
        self._event("[DONE]")
        self.handler.wfile.write(b"0\r\n\r\n")

    def _broken(self) -> str:
        """Break off if that is the fault; return how the request ended, or an empty text."""
        if "dies" in self.faults:
            os._exit(1)
        if "closes" in self.faults:
            self.handler.close_connection = True
            return "abort"
        if "error-event" in self.faults and self.stream:
            self._event({"error": {"message": "the engine died", "type": "InternalServerError", "param": None, "code": 500}})
            self._end()
            return "error"
        return ""


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
