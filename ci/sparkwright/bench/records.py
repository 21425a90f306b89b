"""What all benchmarks share: kinds of numbers, the sides, the metrics and their units, reasons."""

from typing import Annotated, Literal

import msgspec

#: Numbers of a policy or a recipe.
Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Share = Annotated[float, msgspec.Meta(gt=0, lt=1)]

#: The wheel that is measured. Without a baseline it is the candidate. The control is a second
#: server of the baseline, for an A/A block.
Side = Literal["baseline", "candidate", "control"]
Metric = Literal["tpot", "ttft", "rate", "drafts"]

#: Metric that may decide → title, unit, the factor from the record's unit (s, s, tokens/s), and
#: whether more is better.
METRICS: dict[Metric, tuple[str, str, float, bool]] = {
    "tpot": ("time per token", "ms", 1000.0, False),
    "ttft": ("time to first token", "ms", 1000.0, False),
    "rate": ("throughput", "tok/s", 1.0, True),
    "drafts": ("tokens per step with drafts", "tokens", 1.0, True),
}

#: The same for figures that are only shown beside the metrics, and never decide.
SHOWN: dict[str, tuple[str, str, float, bool]] = {
    "tpot_p90": ("time per token, p90", "ms", 1000.0, False),
    "ttft_p90": ("time to first token, p90", "ms", 1000.0, False),
    "itl_p50": ("gap between events", "ms", 1000.0, False),
    "itl_p90": ("gap between events, p90", "ms", 1000.0, False),
    "requests_per_second": ("requests", "1/s", 1.0, True),
}

#: Every figure that has a title: those that may decide, and those that are only shown.
FIGURES: dict[str, tuple[str, str, float, bool]] = dict([*METRICS.items(), *SHOWN.items()])

#: Metrics that come from counters of the server, and not from the load generator.
COUNTED = ("drafts",)


class Reason(msgspec.Struct, frozen=True):
    """Why a measurement does not count: a stable reference, and a message."""

    reference: str
    message: str
