"""
An OpenAI-compatible server in a process of its own, with settable delays and faults.

It answers as vLLM does: completions and chats, streamed or whole, token ids, usage, counters, tokenizer. One thread serves each
connection. Tokens go out on a schedule that lateness does not move.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from sparkwright.core import process

#: What may be wrong, each from a request of a given number on:
#: ``dies``: the process ends in the middle of an answer. ``not-ready``: it never gets healthy. ``refuses``: status 429.
#: ``silent``: no answer. ``endless``: tokens without end. ``trickles``: an answer byte by byte, one a second.
#: ``closes``: the connection ends in mid-stream. ``error-event``: the stream ends with an error, and its status is 200.
#: ``short``: a token fewer than ordered. ``usage-more``: usage counts one token more than was sent. ``usage-none``: no usage.
#: ``finish-reason``: ``stop`` for an answer that ended for its length. ``prefix-hits``: the counters say that a prefix cache answered.
Fault = Literal[
    "dies", "not-ready", "refuses", "silent", "endless", "trickles", "closes", "error-event", "short", "usage-more", "usage-none",
    "finish-reason", "prefix-hits",
]  # fmt: skip


class Behaviour(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    Describe a server.

    Attributes:
        ttft: Seconds from the whole request to the first token. *tpot*: seconds from each token to the next.
        chunk: Tokens that go out together when the last of them is due; the first token goes alone, as it does in vLLM.
        drafted: Tokens that each step drafts, for the counters of speculative decoding; None for ``chunk - 1``, all of them accepted.
        faults: Fault → number of the request from which on it is there, from 1.
        name: Of the model. *version*: of vLLM. *limit*: ``max_model_len``. *vocabulary*: tokens are below that.
        loading: Seconds until it is healthy.
    """

    ttft: float = 0.05
    tpot: float = 0.01
    chunk: int = 1
    drafted: int | None = None
    faults: dict[Fault, int] = {}
    name: str = "reference"
    version: str = "0.33.0"
    limit: int = 131072
    vocabulary: int = 32000
    loading: float = 0.0

    @property
    def drafts(self) -> int:
        """Tokens that a step drafts; 0 without speculation."""
        return self.chunk - 1 if self.drafted is None else self.drafted


class Refused(Exception):
    """A request that is refused with a status."""

    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message
        super().__init__(message)


def word(token: int) -> str:
    """Return the text of *token*."""
    return f" t{token}"


def tokenized(text: str, vocabulary: int) -> list[int]:
    """Return the tokens of *text*, one for each word; those of `word` come back as they were."""
    own = re.compile(r"t[0-9]{1,9}")
    return [int(part[1:]) if own.fullmatch(part) else zlib.crc32(part.encode()) % vocabulary for part in text.split()] or [0]


class FakeServer(http.server.ThreadingHTTPServer):
    """A server with *behaviour* on *port* of this machine, or on a free one."""

    daemon_threads, request_queue_size = True, 1024

    def __init__(self, behaviour: Behaviour, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.behaviour, self.url = behaviour, f"http://127.0.0.1:{self.server_port}"
        self.lock, self.counts, self.requests, self.started = threading.Lock(), Counter[str](), 0, time.monotonic()

    @property
    def ready(self) -> bool:
        """Is it healthy?"""
        return "not-ready" not in self.behaviour.faults and time.monotonic() >= self.started + self.behaviour.loading

    def count(self, **changes: int) -> None:
        """Add to the counters."""
        with self.lock:
            self.counts.update(changes)

    def metrics(self) -> str:
        """Return the counters in Prometheus' text form, under vLLM's names."""
        counts, drafts = self.counts, self.behaviour.drafts
        values = {
            "vllm:num_requests_running": counts["running"], "vllm:num_requests_waiting": 0, "vllm:kv_cache_usage_perc": 0.0,
            "vllm:prompt_tokens_total": counts["prompt"], "vllm:generation_tokens_total": counts["tokens"],
            "vllm:prefix_cache_queries_total": counts["prompt"], "vllm:prefix_cache_hits_total": counts["hits"],
        }  # fmt: skip
        if drafts:
            values |= {
                "vllm:spec_decode_num_drafts_total": counts["steps"],
                "vllm:spec_decode_num_draft_tokens_total": counts["steps"] * drafts,
                "vllm:spec_decode_num_accepted_tokens_total": counts["accepted"],
            }
        model = f'model_name="{self.behaviour.name}"'
        lines = [f'{name}{{engine="0",{model}}} {float(value)}' for name, value in values.items()]
        for reason in ("stop", "length", "abort", "error"):
            lines.append(f'vllm:request_success_total{{engine="0",finished_reason="{reason}",{model}}} {float(counts[reason])}')
        return "\n".join(lines) + "\n"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answer the requests of one connection."""

    server: FakeServer
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        try:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        except (ValueError, RecursionError, TypeError):
            body = None
        self._answer(body)

    def _answer(self, body: Any) -> None:
        received = time.monotonic()
        with contextlib.suppress(OSError):
            try:
                if not isinstance(body, dict):
                    raise Refused(400, "the request is no object of JSON")
                if self.path in ("/v1/completions", "/v1/chat/completions"):
                    with self.server.lock:
                        self.server.requests += 1
                        number = self.server.requests
                    Completion(self, body, number, received).send()
                else:
                    self._plain(body)
            except Refused as refused:
                self.whole({"error": {"message": refused.message, "type": "invalid_request_error", "code": refused.status}}, refused.status)

    def whole(self, record: object, status: int = 200) -> None:
        """Send *record* as JSON, or text as it is."""
        data = record.encode() if isinstance(record, str) else json.dumps(record).encode()
        self.send_response(status)
        self.send_header("content-type", "text/plain; charset=utf-8" if isinstance(record, str) else "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _plain(self, body: dict[str, Any]) -> None:
        server, own = self.server, self.server.behaviour
        path = self.path.partition("?")[0]
        if path == "/health":
            self.whole("", 200 if server.ready else 503)
        elif path == "/metrics":
            self.whole(server.metrics())
        elif not server.ready:
            raise Refused(503, "the model is being loaded")
        elif path == "/v1/models":
            self.whole({"object": "list", "data": [{"id": own.name, "object": "model", "root": own.name, "max_model_len": own.limit}]})
        elif path == "/version":
            self.whole({"version": own.version})
        elif path == "/tokenize":
            codes = tokenized(str(body.get("prompt", "")), own.vocabulary)
            self.whole({"count": len(codes), "max_model_len": own.limit, "tokens": codes})
        elif path == "/detokenize":
            self.whole({"prompt": "".join(map(word, body.get("tokens", []))).strip()})
        else:
            raise Refused(404, "there is nothing at this path")


class Completion:
    """One answer of tokens to the request *body*, the one of that *number*, which was *received* at a time of the monotonic clock."""

    def __init__(self, handler: Handler, body: dict[str, Any], number: int, received: float) -> None:
        server = handler.server
        self.handler, self.server, self.own, self.received = handler, server, server.behaviour, received
        self.faults = {fault for fault, first in self.own.faults.items() if number >= first}
        if not server.ready:
            raise Refused(503, "the model is being loaded")
        if "refuses" in self.faults:
            raise Refused(429, "too many requests")
        self.chat, self.number = "messages" in body, number
        if body.get("model") not in (None, "", self.own.name):
            raise Refused(404, f"The model `{body['model']}` does not exist.")
        self.prompt = self._prompt(body)
        self.tokens = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        if len(self.prompt) + self.tokens > self.own.limit:
            raise Refused(400, f"{len(self.prompt)} tokens and {self.tokens} more do not fit into {self.own.limit}")
        self.stream, self.ids = bool(body.get("stream")), bool(body.get("return_token_ids"))
        self.usage = (body.get("stream_options") or {}).get("include_usage", False)
        self.seed = zlib.crc32(repr(self.prompt).encode())
        self.finish = "stop" if "finish-reason" in self.faults else "length"

    def _prompt(self, body: dict[str, Any]) -> list[int]:
        prompt = body.get("prompt")
        if self.chat:
            prompt = "\n".join(str(message.get("content")) for message in body["messages"])
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str) and prompt:
            return tokenized(prompt, self.own.vocabulary)
        if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
            return prompt
        raise Refused(400, "the prompt is empty, or several")

    def token(self, place: int) -> int:
        """Return the token at *place* of the answer, a function of the prompt."""
        return 256 + (self.seed + place * 7919) % (self.own.vocabulary - 256)

    def _choice(self, place: int, size: int, finish: str | None) -> dict[str, Any]:
        codes = [self.token(place + one) for one in range(size)]
        text = "".join(map(word, codes))
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
        message = {"role": "assistant", "content": text}
        choice |= {"delta" if self.stream else "message": message} if self.chat else {"text": text}
        return choice | ({"token_ids": codes, **({} if place else {"prompt_token_ids": self.prompt})} if self.ids else {})

    def _record(self, choices: list[dict[str, Any]], **more: object) -> dict[str, Any]:
        kind = ("chat.completion" if self.chat else "text_completion") + (".chunk" if self.chat and self.stream else "")
        return {"id": f"cmpl-{self.number}", "object": kind, "created": 0, "model": self.own.name, "choices": choices, **more}

    def _used(self, tokens: int) -> dict[str, int]:
        counted = tokens + ("usage-more" in self.faults)
        return {"prompt_tokens": len(self.prompt), "completion_tokens": counted, "total_tokens": len(self.prompt) + counted}

    def _event(self, record: dict[str, Any] | str) -> None:
        data = f"data: {record if isinstance(record, str) else json.dumps(record)}\n\n".encode()
        self.handler.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def send(self) -> None:
        """Send the answer on its schedule, and count it."""
        if "silent" in self.faults:
            time.sleep(3600)
        hits = len(self.prompt) if "prefix-hits" in self.faults else 0
        self.server.count(running=1, prompt=len(self.prompt), hits=hits)
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
        total = 10**9 if "endless" in self.faults else max(1, self.tokens - ("short" in self.faults))
        place, due = 0, self.received + self.own.ttft
        while place < total:
            size = min(self.own.chunk, total - place) if place else 1
            due += size * self.own.tpot if place else 0.0
            time.sleep(max(0.0, due - time.monotonic()))
            if self.stream and "trickles" in self.faults:
                self._trickle()
            if self.stream:
                self._event(self._record([self._choice(place, size, self.finish if place + size == total else None)]))
            self.server.count(tokens=size, **({"steps": 1, "accepted": size - 1} if place and self.own.drafts else {}))
            place += size
            if place >= total // 2 and (reason := self._broken()):
                return reason
        if self.stream:
            if self.usage and "usage-none" not in self.faults:
                self._event(self._record([], usage=self._used(total)))
            self._event("[DONE]")
            self.handler.wfile.write(b"0\r\n\r\n")
        else:
            self.handler.whole(self._record([self._choice(0, total, self.finish)], usage=self._used(total)))
        return self.finish

    def _broken(self) -> str:
        """Break off if that is the fault; return how the request ended, or an empty text."""
        if "dies" in self.faults:
            os._exit(1)
        if "closes" in self.faults:
            self.handler.close_connection = True
            return "abort"
        if "error-event" in self.faults and self.stream:
            self._event({"error": {"message": "the engine died", "type": "InternalServerError", "param": None, "code": 500}})
            self._event("[DONE]")
            self.handler.wfile.write(b"0\r\n\r\n")
            return "error"
        return ""

    def _trickle(self) -> None:
        while True:
            self.handler.wfile.write(b"1\r\nd\r\n")
            time.sleep(1.0)


class Running:
    """A server that runs in a process of its own: its *url*, *pid* and *behaviour*."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        command = [sys.executable, str(Path(__file__)), msgspec.json.encode(behaviour).decode()]
        # The signal comes when the thread ends that starts it, so start it in one that stays.
        self._process = subprocess.Popen(
            process.wrap_with_limits(command, by=signal.SIGKILL), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        assert self._process.stdout
        ready = select.select([self._process.stdout], [], [], 60.0)[0]
        self.url, self.pid = (self._process.stdout.readline().decode().strip() if ready else ""), self._process.pid
        if not self.url:
            self.stop()
            raise RuntimeError("the fake server did not start")

    @property
    def running(self) -> bool:
        """Whether its process is there."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End it; harmless when repeated."""
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def started(behaviour: Behaviour) -> Iterator[Running]:
    """Yield a server with *behaviour* that runs in the block."""
    server = Running(behaviour)
    try:
        yield server
    finally:
        server.stop()


def main() -> None:
    """Serve until the process ends; the first line of the output is the URL."""
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour")
    server = FakeServer(msgspec.json.decode(parser.parse_args().behaviour, type=Behaviour))
    sys.stdout.write(server.url + "\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
