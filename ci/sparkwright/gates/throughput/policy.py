"""The policy of the throughput gate."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sparkwright.bench.records import Metric
from sparkwright.bench.statistics import Bounds

Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(gt=0, lt=1)]
Seconds = Annotated[float, Meta(gt=0, le=1e6)]


class ThroughputPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/throughput.yaml``, which gives the source of each number.

    Attributes:
        bounds: By metric: the margin that a pass excludes, and the slowdown that never fails.
        alpha: Probability of each kind of wrong verdict, over all gates of one wheel together.
        min_blocks, max_blocks: Blocks before a decision, and after which there is none.
        launches: Of a bench or a verification, which compare nothing.
        workloads: The set of ``workloads.yaml`` that decides.
        warmups: Requests before each measurement that do not count.
        prefix_hits: Share of prompt tokens from a prefix cache that makes a measurement invalid.
        cooldown_retries: Cool-downs before a discarded measurement is repeated.
        timeout_s: Of one measurement.
        ceiling_min_bytes: Bytes of a decode step below which caches may answer for memory.
        calibration_blocks: A/A blocks that a calibration measures.
        half_life_days: Age at which an A/A block weighs half.
        calibration_weight: Fresh blocks that all A/A blocks are worth together, at most.
        published_tolerance: Share by which a published figure may be off and still hold.
    """

    bounds: dict[Metric, Bounds]
    alpha: Annotated[float, Meta(gt=0, lt=0.5)]
    min_blocks: Count
    max_blocks: Count
    launches: Count
    workloads: str
    warmups: Annotated[int, Meta(ge=0)]
    prefix_hits: Share
    cooldown_retries: Count
    timeout_s: Seconds
    ceiling_min_bytes: Annotated[float, Meta(ge=0)]
    calibration_blocks: Count
    half_life_days: Seconds
    calibration_weight: Annotated[float, Meta(ge=1)]
    published_tolerance: Share

    def __post_init__(self) -> None:
        if self.min_blocks > self.max_blocks or len(self.bounds) != 3:
            raise ValueError("min_blocks is at most max_blocks, and each metric has its bounds")
