"""``ci/gates/throughput.yaml``: margin, error rate, and how much is measured."""

from __future__ import annotations

import math

import msgspec


class ThroughputPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    How the throughput gate decides; the file says where each number comes from.

    Attributes:
        margin: A candidate that is slower by this share must not pass (0.02 is 2 %).
        alpha: The most that either error may happen: a pass of such a candidate, a fail of one that is not slower.
        least, most: Blocks before a decision, and blocks after which there is none.
        quads: A B B A rounds of each cell in a block.
        launches: Of a bench or a verification, which compare nothing.
        workloads: The set of ``workloads.yaml`` that decides.
        warmups: Requests before each leg that do not count.
        prefix_hits: Share of prompt tokens from a prefix cache from which on a leg is invalid.
        waits: Times to wait for the machine to calm down before a discarded leg is measured again, each as long as ``machine.yaml`` says.
        patience: Seconds of a leg.
        roofline_least: Bytes of a decode step below which caches may answer for memory, so that the ceiling says nothing.
        calibration: A/A blocks that a calibration needs.
        claim: How far a published figure may be off and still hold (0.05 is 5 %).
    """

    margin: float
    alpha: float
    least: int
    most: int
    quads: int
    launches: int
    workloads: str
    warmups: int
    prefix_hits: float
    waits: int
    patience: float
    roofline_least: float
    calibration: int
    claim: float

    def __post_init__(self) -> None:
        if not (0 < self.margin < 1 and 0 < self.alpha < 0.5):
            raise ValueError("margin is between 0 and 1, alpha between 0 and 0.5")
        counts = (self.least, self.quads, self.launches, self.waits, self.calibration)
        if self.least > self.most or min(counts) < 1 or self.warmups < 0:
            raise ValueError("least is at most most; counts are at least 1")
        if not (0 < self.prefix_hits <= 1 and 0 < self.claim < 1):
            raise ValueError("prefix_hits and claim are shares")
        if not (self.patience > 0 and math.isfinite(self.patience) and self.roofline_least >= 0):
            raise ValueError("patience and roofline_least are above 0")
