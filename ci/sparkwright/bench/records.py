"""Words that all benchmarks share: which side is measured, metrics with their units, and why a measurement does not count."""

from __future__ import annotations

from typing import Literal

import msgspec

#: Which wheel a leg measures. Without a baseline (``bench``, ``verify``) all legs are the candidate's. The control is
#: a second server of the baseline, for an A/A block.
Side = Literal["baseline", "candidate", "control"]
Metric = Literal["tpot", "ttft", "rate"]

#: How people say and write each metric: title, unit, the factor from the record's unit (s, s, tokens/s), and whether more is better.
METRICS: dict[Metric, tuple[str, str, float, bool]] = {
    "tpot": ("time per token", "ms", 1000.0, False),
    "ttft": ("time to first token", "ms", 1000.0, False),
    "rate": ("throughput", "tok/s", 1.0, True),
}


class Reason(msgspec.Struct, frozen=True):
    """Why a leg does not count: a stable reference, and what was seen."""

    reference: str
    says: str
