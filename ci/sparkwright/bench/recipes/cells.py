"""Shapes of load: what a cell is, how it is called, and how many requests a leg of it makes."""

from __future__ import annotations

import math
import re
from typing import Annotated

import msgspec
from msgspec import Meta

from sparkwright.bench.load.order import Prompts
from sparkwright.bench.records import Metric
from sparkwright.core.errors import UsageError

#: Tokens of the longest prompt or answer that a cell may have, and requests at a time.
MOST_TOKENS, MOST_CONCURRENT = 1 << 20, 1024

_NAME = re.compile(r"(?:(?P<texts>[a-z0-9-]{1,40}) )?(?P<prompt>\d{1,7})/(?P<answer>\d{1,7}) c(?P<concurrency>\d{1,4})")

Tokens = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    One shape of load.

    Attributes:
        prompt: Tokens of each prompt; of texts, the most. *answer*: tokens of each answer, exactly.
        concurrency: Requests at a time, each followed by the next.
        requests: How many in a leg; 0 leaves it to the `Rule`.
        texts: Name of the file of prompts (`Texts`); empty for random tokens.
        primary: Metrics that decide a gate; the others are reported.
    """

    prompt: Tokens
    answer: Tokens
    concurrency: Annotated[int, Meta(ge=1, le=MOST_CONCURRENT)] = 1
    requests: Annotated[int, Meta(ge=0, le=100_000)] = 0
    texts: str = ""
    primary: tuple[Metric, ...] = ()

    def __post_init__(self) -> None:
        if self.requests and self.requests < self.concurrency:
            raise ValueError(f"{self.name}: {self.requests} requests never are {self.concurrency} at a time")
        if len(set(self.primary)) != len(self.primary):
            raise ValueError(f"{self.name}: a metric decides twice")

    @property
    def name(self) -> str:
        """As `sparkwright.gates.throughput.records.CellResult` has it: ``1024/1024 c8``; texts have their name in front."""
        return f"{self.texts} ".lstrip() + f"{self.prompt}/{self.answer} c{self.concurrency}"

    @property
    def prompts(self) -> Prompts:
        """Where prompts come from."""
        return "texts" if self.texts else "random"

    @property
    def length(self) -> int:
        """Tokens that one request holds at its end."""
        return self.prompt + self.answer


def parse(name: str) -> Cell:
    """
    Return the cell of that *name*; nothing in it decides.

    Raises:
        UsageError: It is no name of a cell.
    """
    found = _NAME.fullmatch(name)
    try:
        if found is None:
            raise ValueError
        numbers = {part: int(found[part]) for part in ("prompt", "answer", "concurrency")}
        return msgspec.convert({**numbers, "texts": found["texts"] or ""}, Cell)
    except ValueError:
        todo = "Write it as tokens of prompt and answer, and concurrency: 1024/1024 c8."
        raise UsageError("usage", f"{name!r:.80} is no cell.", todo=todo) from None


def is_cell(name: str) -> bool:
    """Is it the name of a cell?"""
    try:
        return bool(parse(name))
    except UsageError:
        return False


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    How many requests a leg makes, where a cell does not say it.

    Attributes:
        least: Requests at any rate: a leg's figure is their median, which one or two slow ones must not be.
        rounds: Times the concurrency: the first and the last round of a closed loop are not full.
        seconds: A leg of short requests is made so long, to average over what the machine does in between.
        most: Requests at the most.
    """

    least: Annotated[int, Meta(ge=1)]
    rounds: Annotated[int, Meta(ge=1)]
    seconds: Annotated[float, Meta(ge=0)]
    most: Annotated[int, Meta(ge=1)]

    def requests(self, cell: Cell, each: float | None = None) -> int:
        """
        Return how many requests a leg of *cell* makes.

        Args:
            each: Seconds of one request at that concurrency, as the warm-up saw it; None where nobody knows, for the fewest that count.
        """
        if cell.requests:
            return cell.requests
        fewest = max(self.least, self.rounds * cell.concurrency)
        wanted = math.ceil(self.seconds * cell.concurrency / each) if each and each > 0 else 0
        # Whole rounds, so that the last one is as full as it can be.
        rounds = math.ceil(max(fewest, min(wanted, self.most)) / cell.concurrency)
        return rounds * cell.concurrency


def seconds(cell: Cell, requests: int, ttft: float, tpot: float) -> float:
    """Return how long a leg takes whose requests take *ttft* seconds and *tpot* for each further token."""
    return math.ceil(requests / cell.concurrency) * (ttft + (cell.answer - 1) * tpot)
