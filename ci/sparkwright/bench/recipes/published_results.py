"""Results of a recipe that someone published: their origin, and what they say in our units."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.records import Metric

#: Factor from a published unit to seconds or tokens per second.
FACTORS = {"ms": 0.001, "s": 1.0, "tok/s": 1.0}

Agreement = Literal["holds", "faster", "slower", "open"]


class PublishedFigure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    One published number.

    Attributes:
        cell: Name of the workload cell (``1024/1024 c8``) that comes nearest.
        metric: ``tpot`` may be published as tokens per second of one request.
        value: As published, in *unit*.
        low: Smallest of the runs or lower end of an interval, as published.
        high: Largest of the runs or upper end of an interval, as published.
    """

    cell: str
    metric: Metric
    value: Annotated[float, Meta(gt=0)]
    unit: Literal["ms", "s", "tok/s"]
    low: Annotated[float, Meta(gt=0)] | None = None
    high: Annotated[float, Meta(gt=0)] | None = None

    def __post_init__(self) -> None:
        WorkloadCell.parse(self.cell)
        units = {"rate": ("tok/s",), "ttft": ("ms", "s"), "tpot": ("ms", "s", "tok/s")}
        if self.unit not in units[self.metric]:
            raise ValueError(f"{self.metric} has no unit {self.unit}")
        if (self.low is None) != (self.high is None):
            raise ValueError(f"{self.cell}: an interval needs both ends")
        if not (self.low or self.value) <= self.value <= (self.high or self.value):
            raise ValueError(f"{self.cell}: the interval does not hold {self.value}")

    @property
    def native(self) -> float:
        """The value in seconds, or in tokens per second for ``rate``."""
        return self._native(self.value)

    @property
    def interval(self) -> tuple[float, float]:
        """The published interval in the unit of `native`; both ends are `native` if none was."""
        low, high = sorted(self._native(end or self.value) for end in (self.low, self.high))
        return low, high

    def _native(self, value: float) -> float:
        inverse = self.metric == "tpot" and self.unit == "tok/s"
        return 1 / value if inverse else value * FACTORS[self.unit]

    def agreement(self, low: float | None, high: float | None, margin: float) -> Agreement:
        """
        Return whether a measured 95 % interval bears the published figure out.

        It ``holds`` if the whole interval is within *margin* of the published one, is ``faster`` or
        ``slower`` if none of it is, and ``open`` if the measurement is too coarse to say.

        Args:
            low: Lower end, in the unit of `native`; None if too little was measured.
            high: Upper end.
            margin: The ratio that still agrees (0.05 is 5 %).
        """
        if low is None or high is None:
            return "open"
        least, most = self.interval[0] / (1 + margin), self.interval[1] * (1 + margin)
        if least <= low and high <= most:
            return "holds"
        if low <= most and high >= least:
            return "open"
        return "faster" if (low > most) == (self.metric == "rate") else "slower"


class PublishedReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    All figures of one source that share a machine, a stack and a method.

    Attributes:
        source: Where they stand.
        host: What they were measured on.
        stack: Versions that were measured.
        figures: The numbers.
        times: Runs behind each figure; None if the source does not say.
        differs: How the method differs from ours, and the effect; empty if nothing is known.
        wheel: The sha256 of the wheel of ours that was measured; empty for results of others.
    """

    source: str
    host: str
    stack: str
    figures: tuple[PublishedFigure, ...]
    times: Annotated[int, Meta(ge=1)] | None = None
    differs: str = ""
    wheel: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
