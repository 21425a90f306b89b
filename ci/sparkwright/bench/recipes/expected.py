"""Figures that somebody published of a recipe: whose they are, what they are worth, and what they say in our units."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sparkwright.bench.recipes.cells import is_cell
from sparkwright.bench.records import Metric

#: What has to be multiplied to get seconds or tokens per second; a time in tok/s is one of the tokens of one request, and is turned round.
UNITS: dict[str, float] = {"ms": 0.001, "s": 1.0, "tok/s": 1.0}

Digest = Annotated[str, Meta(pattern="^([0-9a-f]{64}|not measured)$")]
Agreement = Literal["holds", "faster", "slower", "open"]


class Expected(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    One figure.

    Attributes:
        cell: Its cell (``1024/1024 c8``), the one of ours that comes nearest.
        metric: ``tpot`` may be published as tokens per second of one request.
        value, unit: As published.
        low, high: The least and the greatest of the runs, or an interval, as published; ``unknown`` where nobody said.
        times: Runs behind it; ``unknown`` where nobody said.
        host, stack: What it was measured on.
        wheel: Its sha256; ``not measured`` where no wheel of ours was.
        source: Where it stands.
        differs: How it was measured otherwise than we do, and what that does; empty where nothing is known of the kind.
        verified: Whether it was measured again by this project's gate.
    """

    cell: str
    metric: Metric
    value: Annotated[float, Meta(gt=0)]
    unit: Literal["ms", "s", "tok/s"]
    host: str
    stack: str
    source: str
    low: float | Literal["unknown"] = "unknown"
    high: float | Literal["unknown"] = "unknown"
    times: Annotated[int, Meta(ge=1)] | Literal["unknown"] = "unknown"
    wheel: Digest = "not measured"
    differs: str = ""
    verified: bool = False

    def __post_init__(self) -> None:
        if not is_cell(self.cell):
            raise ValueError(f"{self.cell!r} is no cell; write it as 1024/1024 c8")
        if self.unit not in {"rate": ("tok/s",), "ttft": ("ms", "s"), "tpot": ("ms", "s", "tok/s")}[self.metric]:
            raise ValueError(f"{self.metric} is not told in {self.unit}")
        low, high = self.bounds
        if (low is None) != (high is None) or (low is not None and high is not None and not 0 < low <= self.native <= high):
            raise ValueError(f"{self.cell}: {self.low} to {self.high} is no interval around {self.value}")
        if self.verified and self.wheel == "not measured":
            raise ValueError(f"{self.cell}: a figure that this project verified names its wheel")

    def _native(self, value: float) -> float:
        return 1 / value if self.metric != "rate" and self.unit == "tok/s" else value * UNITS[self.unit]

    @property
    def native(self) -> float:
        """The value in the unit of the records: seconds, or tokens per second."""
        return self._native(self.value)

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """The interval in the unit of the records, the smaller number first; None where nobody said."""
        ends = sorted(self._native(end) for end in (self.low, self.high) if not isinstance(end, str) and end > 0)
        return (ends[0], ends[1]) if len(ends) == 2 else (None, None) if not ends else (ends[0], None)

    def agreement(self, low: float | None, high: float | None, margin: float) -> Agreement:
        """
        Return whether an interval that was measured bears the claim out.

        It ``holds`` where the whole interval is within *margin* of the claim or of its interval, is ``faster`` or ``slower`` where none of
        it is, and is ``open`` where the measurement is too coarse to say.

        Args:
            low, high: 95 % interval of our own value, in the unit of the records; None where too little was measured.
            margin: The ratio that still agrees (0.05 is 5 %).
        """
        if low is None or high is None:
            return "open"
        least, most = self.bounds
        least, most = (least or self.native) / (1 + margin), (most or self.native) * (1 + margin)
        if least <= low and high <= most:
            return "holds"
        more = self.metric == "rate"
        if high < least:
            return "slower" if more else "faster"
        if low > most:
            return "faster" if more else "slower"
        return "open"


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure of a `Report`; see `Expected`."""

    cell: str
    metric: Metric
    value: Annotated[float, Meta(gt=0)]
    unit: Literal["ms", "s", "tok/s"]
    low: float | Literal["unknown"] = "unknown"
    high: float | Literal["unknown"] = "unknown"


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    What one source published: all figures that share a machine, a stack and a way of measuring.

    Attributes:
        source, host, stack, times, differs: As in `Expected`.
    """

    source: str
    host: str
    stack: str
    figures: tuple[Figure, ...]
    times: Annotated[int, Meta(ge=1)] | Literal["unknown"] = "unknown"
    differs: str = ""

    def __post_init__(self) -> None:
        self.expected()

    def expected(self) -> tuple[Expected, ...]:
        """Return each figure with all that is known of it."""
        return tuple(
            Expected(
                one.cell, one.metric, one.value, one.unit, self.host, self.stack, self.source, one.low, one.high, self.times,
                differs=self.differs,
            )
            for one in self.figures
        )  # fmt: skip
