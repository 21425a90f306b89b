"""How the reference server behaves: its true times, the noise on them, and what is wrong with it."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from sparkwright.bench.records import Side
from sparkwright.bench.statistics.noise import Noise

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
    A server's true figures.

    Attributes:
        ttft: Seconds from the whole question to the first token.
        tpot: Seconds from each token to the next.
        chunk: Tokens that go out together when the last of them is due; the first token goes alone, as it does in vLLM.
        drafted: Tokens that each step drafts, for the counters of speculative decoding; None for ``chunk - 1``, all of them accepted.
        faults: What is wrong → from which request on, the first being 1.
        noise: On all times; None for none. *seed*: of the machine that it models. *side*, *launch*: which launch on it this server is.
        origin: Seconds since 1970 at which the machine's time began; 0 for when the server starts.
        name: Of the model. *version*: of vLLM, as told. *limit*: ``max_model_len``. *vocabulary*: tokens are below that.
        loading: Seconds until it is healthy.
    """

    ttft: float = 0.05
    tpot: float = 0.01
    chunk: int = 1
    drafted: int | None = None
    faults: dict[Fault, int] = {}
    noise: Noise | None = None
    seed: int = 0
    side: Side = "candidate"
    launch: int = 0
    origin: float = 0.0
    name: str = "reference"
    version: str = "0.33.0"
    limit: int = 131072
    vocabulary: int = 32000
    loading: float = 0.0

    def __post_init__(self) -> None:
        if not all(math.isfinite(one) and one >= 0 for one in (self.ttft, self.tpot, self.loading, self.origin)):
            raise ValueError(f"a time is negative or no number: {self}")
        if self.chunk < 1 or self.limit < 2 or self.vocabulary < 300 or self.drafts < self.chunk - 1:
            raise ValueError(f"a chunk has at least a token, and a step accepts no more than it drafts: {self}")

    @property
    def drafts(self) -> int:
        """Tokens that a step drafts; 0 without speculation."""
        return self.chunk - 1 if self.drafted is None else self.drafted

    def wrong(self, fault: Fault, number: int) -> bool:
        """Is *fault* there at the request of this *number*?"""
        return number >= self.faults.get(fault, number + 1)

    def seconds(self, tokens: int) -> float:
        """Return when, after its question, the last token of an answer with *tokens* is due where there is no noise."""
        return self.ttft + (tokens - 1) * self.tpot


class Lateness(msgspec.Struct, frozen=True):
    """
    How late the server itself was since it was last asked; the machine's fault, not the generator's.

    Attributes:
        chunks, requests: How many are behind the figures.
        median, worst: Seconds from when a chunk was due until it was handed to the kernel.
        ttft, tpot: Medians over requests of what was sent, in seconds; 0 where there was none.
    """

    chunks: int
    requests: int
    median: float
    worst: float
    ttft: float
    tpot: float


class Listening(msgspec.Struct, frozen=True):
    """The line that the server prints when it can be reached."""

    url: str
