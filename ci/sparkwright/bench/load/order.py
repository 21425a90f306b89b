"""What a load generator is asked to do, and what it gives back; the same for each generator."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Literal, Protocol

import msgspec

#: Where prompts come from: random tokens of exact number, or texts of a file (one JSON object with ``prompt`` in each line).
Prompts = Literal["random", "texts"]


class Order(msgspec.Struct, frozen=True):
    """
    A leg's load.

    Attributes:
        url: Of the server. *model*: the name under which it serves.
        tokenizer: Folder of the model's tokenizer; None where the generator can do without.
        prompt: Tokens of each prompt; of texts, the most.
        answer: Tokens of each answer, exactly (``ignore_eos``).
        concurrency: Requests at a time, each followed by the next (closed loop).
        requests: That count.
        warmups: Made before, and not counted.
        seed: Of the prompts; a new one for each leg.
        prompts: Where they come from. *texts*: the file.
        patience: Seconds after which the generator is ended, however far it is.
    """

    url: str
    model: str
    prompt: int
    answer: int
    concurrency: int
    requests: int
    warmups: int = 2
    seed: int = 0
    tokenizer: Path | None = None
    prompts: Prompts = "random"
    texts: Path | None = None
    patience: float = 3600.0


class Request(msgspec.Struct, frozen=True, gc=False):
    """
    One request as the client saw it.

    Attributes:
        began: Seconds since the leg began.
        ttft: Seconds until the first token came.
        seconds: Until the last one came.
        prompt: Tokens of the prompt, as the server counts or as the client sent.
        tokens: Of the answer, as the server's usage says.
        chunks: Events of the stream that brought tokens; 0 where the generator does not tell. Fewer than tokens with speculation.
        error: What went wrong; empty where nothing did.
    """

    began: float
    ttft: float
    seconds: float
    prompt: int
    tokens: int
    chunks: int = 0
    error: str = ""

    @property
    def tpot(self) -> float:
        """Seconds per token behind the first: (seconds - ttft) / (tokens - 1); 0 with fewer than two tokens."""
        return (self.seconds - self.ttft) / (self.tokens - 1) if self.tokens > 1 else 0.0


class Run(msgspec.Struct, frozen=True):
    """
    What a generator measured.

    Attributes:
        generator: Its name and version (``vllm-rs 0.33.0``). *sha256*: of the program that ran, or of what it was installed from.
        seconds: From the first counted request to the end of the last.
        requests: The counted ones.
    """

    generator: str
    sha256: str
    seconds: float
    requests: tuple[Request, ...]

    @property
    def tpot(self) -> float:
        """The median over requests, in seconds per token; 0 where no request has two tokens."""
        return statistics.median([one.tpot for one in self.requests if one.tokens > 1] or [0.0])

    @property
    def ttft(self) -> float:
        """The median over requests, in seconds; 0 without requests."""
        return statistics.median([one.ttft for one in self.requests] or [0.0])

    @property
    def rate(self) -> float:
        """Tokens of all answers per second."""
        return sum(one.tokens for one in self.requests) / self.seconds if self.seconds > 0 else 0.0


class Generator(Protocol):
    """A program that makes load; see `sparkwright.bench.load.vllmrs`."""

    @property
    def name(self) -> str:
        """Its name and version."""
        ...

    def measure(self, order: Order) -> Run:
        """
        Make the load and return what was measured.

        Raises:
            LoadInvalid: It ended without a measurement: the server died, refused or went on for ever, or the output is none.
        """
        ...


class LoadInvalid(Exception):
    """
    A load generator gave no measurement.

    Args:
        reference: Why, stable and in kebab-case (``generator-failed``, ``generator-late``, ``generator-unreadable``).
        says: What was seen, in one printable sentence.
    """

    def __init__(self, reference: str, says: str) -> None:
        self.reference, self.says = reference, says
        super().__init__(f"{reference}: {says}")
