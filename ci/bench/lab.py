"""
A night of gates on a Spark in minutes, and how a lab of 1 to 20 Sparks waits for such gates: a queue simulated over years.

A step lasts as long as its gate estimates for the model's pace, or as docs/rehearsal recorded it on an H100; the pace and how often gates
are asked for are options, as they are a lab's own. Prints the tables of docs/explanation/scaling.md, the same every time.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

import measure
from sparkwright.bench.records import Metric
from sparkwright.core.console import console
from sparkwright.gates.core import policy
from sparkwright.gates.core.ladder import GATES
from sparkwright.gates.core.night import (
    ENVIRONMENTS_S,
    assumed_pace,
    gate_seconds,
    reference_seconds,
)

SPARKS = (1, 2, 4, 8, 20)
#: Days that are simulated, with a fixed seed.
DAYS = 20_000


class Waiting(msgspec.Struct, frozen=True):
    """
    One size of a lab.

    Attributes:
        share: Of the time that its Sparks are busy, 0 to 1; above 1 the queue grows without end.
        mean, late: Hours that a gate waits: on average, and 95 of 100 no longer than that; infinite where the queue grows.
    """

    sparks: int
    share: float
    mean: float
    late: float


def arrivals(random_: random.Random, nightly: int, daily: float, days: int) -> Iterator[float]:
    """Yield hours at which gates are asked for: *nightly* at two o'clock, and by people *daily* times, at any of eight hours of the day."""
    for day in range(days):
        hours = [2.0] * nightly
        asked = random_.expovariate(daily) if daily else 2.0
        while asked < 1:
            hours.append(9 + 8 * asked)
            asked += random_.expovariate(daily)
        yield from (24 * day + hour for hour in sorted(hours))


def waiting(
    sparks: int, gate: float, pair: float, nightly: int, daily: float, days: int = DAYS
) -> Waiting:
    """
    Return how gates of *gate* hours wait for one of *sparks*; the share *pair* of them takes two at once, where there are two.

    First come, first served: a gate for two that waits holds back those behind it, so that it is not overtaken for ever.
    """
    random_ = random.Random(12)
    free = [0.0] * sparks
    waits, busy, end = list[float](), 0.0, 0.0
    head = 0.0
    for asked in arrivals(random_, nightly, daily, days):
        takes = 2 if sparks > 1 and random_.random() < pair else 1
        taken = [heapq.heappop(free) for _ in range(takes)]
        began = head = max(asked, head, *taken)
        for _ in taken:
            heapq.heappush(free, began + gate)
        waits.append(began - asked)
        busy += takes * gate
        end = max(end, began + gate)
    waits.sort()
    share = busy / (sparks * 24 * days)
    grows = share >= 1
    return Waiting(
        sparks, round(share, 2), float("inf") if grows else round(sum(waits) / len(waits), 1),
        float("inf") if grows else round(waits[int(0.95 * len(waits))], 1),
    )  # fmt: skip


def carried(sparks: int, gate: float, pair: float, nightly: int) -> int:
    """Return how many gates a day people may ask for, at most 200, until 5 of 100 gates wait longer than one lasts."""
    low, high = 0, 200
    while low < high:
        middle = (low + high + 1) // 2
        found = waiting(sparks, gate, pair, nightly, middle, DAYS // 10)
        low, high = (middle, high) if found.late <= round(gate, 1) else (low, middle - 1)
    return low


def night(
    root: Path, weights_gb: float, disk: float, decode: float, prefill: float
) -> list[tuple[str, float]]:
    """
    Return the steps of a recipe's night and their hours: by the estimate of each gate, or as docs/rehearsal recorded it.

    Args:
        disk: GB of weights that are read in a second. *decode*, *prefill*: tokens in a second.
    """
    pace = assumed_pace(weights_gb, disk, decode, prefill)
    policies = policy.load(root)
    seconds = {name: gate_seconds(root, policies, pace, DECIDES, SEATS, name) for name in GATES}
    seconds["G7"] += policies.soak.shortest
    steps = {
        "both environments": ENVIRONMENTS_S,
        "stock wheel recorded": reference_seconds(policies, pace, SEATS, GATES),
        "server of ours": pace.start_s,
        **{f"{name}, {GATES[name]}": seconds[name] for name in GATES},
    }
    return [(name, value / 3600) for name, value in steps.items()]


def _hours(value: float) -> str:
    return "grows" if value == float("inf") else f"{value:.1f}"


#: Requests that a server takes at a time: as many as gates ask.
SEATS = 32
#: What the recipes with drafts add to the cells that decide.
DECIDES: dict[str, tuple[Metric, ...]] = {
    "1024/256 c1": ("drafts",),
    "8192/16 c1": ("ttft",),
    "32768/16 c1": ("ttft",),
}
GROUPS = 2
#: What docs/explanation/scaling.md assumes, and says that it does.
PAIR, DAILY = 0.1, 1.0


def main() -> None:
    """Print the steps of a night, and how gates of that length wait."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--weights", type=float, default=23.0, help="GB of the model")
        parser.add_argument(
            "--disk",
            type=float,
            default=1.0,
            help="GB that the disk reads in a second (not measured on a Spark)",
        )
        parser.add_argument(
            "--decode", type=float, default=40.0, help="tokens of an answer in a second"
        )
        parser.add_argument(
            "--prefill",
            type=float,
            default=4000.0,
            help="tokens of a prompt in a second (8192 in 2.07 s: seed report 000)",
        )
        parser.add_argument(
            "--pair", type=float, default=PAIR, help="share of gates that take two Sparks"
        )
        parser.add_argument(
            "--daily", type=float, default=DAILY, help="gates that people ask for in a working day"
        )

    options = measure.arguments(__doc__ or "", more)
    steps = night(options.root, options.weights, options.disk, options.decode, options.prefill)
    hours = sum(value for _, value in steps)
    console.json = options.json
    title = f"a recipe: {hours:.1f} h; a release of {GROUPS} groups: {GROUPS * hours:.1f} h"
    console.table(
        title,
        ["step", ">minutes"],
        [[name, f"{60 * value:.0f}"] for name, value in steps],
        result=True,
    )
    rows = [waiting(sparks, hours, options.pair, GROUPS, options.daily) for sparks in SPARKS]
    most = [carried(sparks, hours, options.pair, GROUPS) for sparks in SPARKS]
    lines = [
        [str(row.sparks), f"{row.share:.0%}", _hours(row.mean), _hours(row.late), str(count)]
        for row, count in zip(rows, most, strict=True)
    ]
    title = f"gates of {hours:.1f} h, {GROUPS} a night, {options.daily:g} a day"
    console.table(
        title,
        [">Sparks", ">busy", ">mean wait, h", ">95 of 100, h", ">gates a day"],
        lines,
        result=True,
    )
    console.document({"night": dict(steps), "hours": hours, "waiting": rows, "carried": most})
    console.finish()


if __name__ == "__main__":
    main()
