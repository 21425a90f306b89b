"""
Check a load generator on this host against a server with known delays, before anything is measured.

The profiles differ in the ratio of their delays, so that no wrong factor fits both, and in the
tokens of an event, so that counting events is noticed. Results are compared with the times at which
the server really sent, so a busy machine delays both.
"""

from __future__ import annotations

import http.server
import json
import math
import statistics
import threading
import time
from typing import Annotated

import msgspec
from msgspec import Meta

from sparkwright.bench.load.vllm_bench import LoadError, LoadGenerator, LoadResult, LoadSpec
from sparkwright.bench.records import Count, Positive
from sparkwright.core.console import console

PROMPT_TOKENS = 128

#: Seconds by which a first token may seem to arrive before it was sent: two clocks are read.
CLOCK_SLACK = 0.0005


class DelayProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The delays of the server and the load on it.

    Attributes:
        ttft: Seconds to the first token. *tpot*: seconds per token after it.
        event_tokens: Tokens of an event after the first.
        output_tokens, concurrency: See `LoadSpec`; two rounds are made.
    """

    ttft: Positive
    tpot: Positive
    event_tokens: Count
    output_tokens: Annotated[int, Meta(ge=2)]
    concurrency: Count


class GeneratorPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/load_generator.yaml``, which has the source of each threshold.

    Attributes:
        stack: Stack whose official wheel of vLLM holds the generator.
        profiles: Delays that are tried.
        ttft_tolerance: Seconds by which the median time to the first token may be too long.
        tpot_tolerance, rate_tolerance: Relative error of the time per token and of the throughput.
        attempts: Attempts for each profile; a busy machine may spoil one.
    """

    stack: str
    profiles: Annotated[tuple[DelayProfile, ...], Meta(min_length=1)]
    ttft_tolerance: Positive
    tpot_tolerance: Positive
    rate_tolerance: Positive
    attempts: Count


class _DelayServer(http.server.ThreadingHTTPServer):
    """A server with the delays of *profile*; *sent* has the times of each request."""

    daemon_threads, request_queue_size = True, 128
    profile: DelayProfile
    sent: list[tuple[float, float, float]]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _DelayServer
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        received, profile = time.monotonic(), self.server.profile
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        if self.path == "/tokenize":
            self.wfile.write(b'{"count": 1, "tokens": [1], "max_model_len": 100000}')
            return
        following = range(1 + profile.event_tokens, profile.output_tokens, profile.event_tokens)
        sent = []
        for tokens in (1, *following, profile.output_tokens):
            due = received + profile.ttft + (tokens - 1) * profile.tpot
            time.sleep(max(0.0, due - time.monotonic()))
            self._event(choices=[{"index": 0, "text": " x", "finish_reason": None}])
            sent.append(time.monotonic())
        self.server.sent.append((received, sent[0], sent[-1]))
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": profile.output_tokens}
        total = PROMPT_TOKENS + profile.output_tokens
        self._event(choices=[], usage={**usage, "total_tokens": total})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, **fields: object) -> None:
        self.wfile.write(b"data: " + json.dumps({"id": "check", **fields}).encode() + b"\n\n")


def check_generator(generator: LoadGenerator, policy: GeneratorPolicy) -> str:
    """
    Return a sentence about the accuracy of *generator* on this host.

    Raises:
        LoadError: It is inaccurate (``generator-inaccurate``) or fails in every attempt.
    """
    errors = []
    with console.step(f"check {generator.name}"):
        for profile in policy.profiles:
            for attempts_left in reversed(range(policy.attempts)):
                try:
                    errors.append(_check_profile(generator, policy, profile, attempts_left))
                    break
                except LoadError:
                    if not attempts_left:
                        raise
    return f"{generator.name} is accurate on this host: {'; '.join(errors)}"


def _check_profile(
    generator: LoadGenerator, policy: GeneratorPolicy, profile: DelayProfile, seed: int
) -> str:
    with _DelayServer(("127.0.0.1", 0), _Handler) as server:
        server.profile, server.sent = profile, []
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            result = generator.measure(
                LoadSpec(
                    f"http://127.0.0.1:{server.server_port}",
                    "delays",
                    PROMPT_TOKENS,
                    profile.output_tokens,
                    profile.concurrency,
                    2 * profile.concurrency,
                    warmups=0,
                    seed=seed,
                    timeout_s=60.0,
                )
            )
        finally:
            server.shutdown()
    return compare(result, server.sent, profile, policy)


def compare(
    result: LoadResult,
    sent: list[tuple[float, float, float]],
    profile: DelayProfile,
    policy: GeneratorPolicy,
) -> str:
    """
    Return the errors of *result* in words.

    Args:
        sent: When each request was received, and its first and last token sent, in seconds.

    Raises:
        LoadError: A count is wrong, or an error is larger than *policy* allows.
    """
    following, count = profile.output_tokens - 1, 2 * profile.concurrency
    events = 1 + math.ceil(following / profile.event_tokens)
    counts = [
        (request.prompt_tokens, request.output_tokens, request.chunks, request.error)
        for request in result.requests
    ]
    expected = (PROMPT_TOKENS, profile.output_tokens, events, "")
    if counts != [expected] * count or len(sent) != count:
        wrong = next((count for count in counts if count != expected), expected)
        message = f"(prompt, output, events, error) are {wrong} instead of {expected}"
        raise LoadError("generator-inaccurate", f"{message}, in {len(counts)} of {count} requests")
    ttft = statistics.median(first - received for received, first, _ in sent)
    tpot = statistics.median((last - first) / following for _, first, last in sent)
    seconds = max(last for _, _, last in sent) - min(received for received, _, _ in sent)
    ttft_error = result.ttft - ttft
    tpot_error = result.tpot / tpot - 1
    rate_error = result.rate * seconds / (count * profile.output_tokens) - 1
    message = (
        f"TTFT {1000 * ttft_error:+.2f} ms of {1000 * ttft:.0f} ms, "
        f"TPOT {100 * tpot_error:+.2f} %, throughput {100 * rate_error:+.2f} %"
    )
    if (
        not -CLOCK_SLACK <= ttft_error <= policy.ttft_tolerance
        or abs(tpot_error) > policy.tpot_tolerance
        or abs(rate_error) > policy.rate_tolerance
    ):
        raise LoadError("generator-inaccurate", message)
    return message
