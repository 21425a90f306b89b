"""The load that a generator makes on a server, and the result that it returns."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

#: Reason of a `LoadError` → what it means and what to do.
REASONS: Mapping[str, str] = {
    "generator-inaccurate": "The load generator does not report the delays of a server whose "
    "delays are known. End other programs, or check which release of vLLM it comes from.",
    "generator-failed": "The load generator ended with an error, or made another number of "
    "requests than ordered. Its last message is quoted.",
    "generator-late": "The load generator did not finish in time. The server hangs, streams "
    "without end, or is far too slow.",
    "generator-unreadable": "The result of the load generator has another format. Another release "
    "of it may have been put in its place.",
}


class LoadSpec(msgspec.Struct, frozen=True):
    """
    Describe the load of one measurement.

    Attributes:
        url: URL of the server. *model*: the name under which it serves the model.
        prompt_tokens: Tokens of each prompt; with a *prompt_file*, the maximum.
        output_tokens: Tokens of each answer; the maximum if lengths are natural.
        concurrency: Requests at a time; with a *request_rate*, the maximum.
        requests: Measured requests. *warmups*: requests before them, with other prompts.
        seed: Seed of the prompts.
        tokenizer: Folder of the model's tokenizer; None if the generator can do without it.
        prompt_file: JSON lines with a ``prompt`` each; None for random tokens.
        request_rate: Requests per second, Poisson arrivals; None for a closed loop.
        natural_length: Let answers end by themselves, instead of forcing their length.
        timeout_s: Seconds until the generator is killed.
    """

    url: str
    model: str
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    requests: int
    warmups: int = 2
    seed: int = 0
    tokenizer: Path | None = None
    prompt_file: Path | None = None
    request_rate: float | None = None
    natural_length: bool = False
    timeout_s: float = 3600.0


class Request(msgspec.Struct, frozen=True, gc=False):
    """
    One request as the client saw it.

    Attributes:
        start: Seconds since the first request began.
        ttft: Seconds to the first token. *latency*: seconds to the last one.
        prompt_tokens: Tokens of the prompt. *output_tokens*: of the answer, as the server counts.
        chunks: Events that brought tokens; fewer than tokens with speculation, 0 if not known.
        error: Error message; empty for success.
    """

    start: float
    ttft: float
    latency: float
    prompt_tokens: int
    output_tokens: int
    chunks: int = 0
    error: str = ""

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 for fewer than two tokens."""
        following = self.output_tokens - 1
        return (self.latency - self.ttft) / following if following > 0 else 0.0


class LoadResult(msgspec.Struct, frozen=True):
    """
    The result of one measurement.

    Attributes:
        generator: Name and version. *sha256*: digest of the program.
        seconds: From the start of the first measured request to the end of the last.
        requests: The measured requests, by start.
        itl_p50, itl_p99: Percentiles of the gaps between the events of all streams, in seconds.
            An event holds several tokens with speculation. 0 without gaps.
        request_rate: Requests per second that were ordered; None for a closed loop.
    """

    generator: str
    sha256: str
    seconds: float
    requests: tuple[Request, ...]
    itl_p50: float = 0.0
    itl_p99: float = 0.0
    request_rate: float | None = None

    @property
    def tpot(self) -> float:
        """Median over requests of the seconds per token."""
        return percentile([one.tpot for one in self.requests if one.output_tokens > 1], 50)

    @property
    def ttft(self) -> float:
        """Median over requests of the seconds to the first token."""
        return percentile([one.ttft for one in self.requests], 50)

    @property
    def ttft_p99(self) -> float:
        """99th percentile over requests of the seconds to the first token."""
        return percentile([one.ttft for one in self.requests], 99)

    @property
    def rate(self) -> float:
        """Output tokens per second, all requests together."""
        tokens = sum(one.output_tokens for one in self.requests)
        return tokens / self.seconds if self.seconds > 0 else 0.0


def percentile(values: list[float], percent: int) -> float:
    """Return a percentile by linear interpolation, 1 to 99 percent; 0 without values."""
    if len(values) < 2:
        return sum(values)
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


class LoadGenerator(Protocol):
    """A program that makes load."""

    @property
    def name(self) -> str:
        """Name and version."""
        ...

    def measure(self, spec: LoadSpec) -> LoadResult:
        """
        Make the load and return the result.

        Raises:
            LoadError: There is no result.
        """
        ...


class LoadError(Exception):
    """A load generator gave no usable result: the *reason*, of `REASONS`, and a message."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason, self.message = reason, message
        super().__init__(f"{reason}: {message}")
