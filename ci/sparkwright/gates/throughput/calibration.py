"""
A/A blocks of a host: one environment measured against itself, so that what differs is noise. Kept with the machine's driver and firmware,
for one model and one way of measuring it; of another machine, or after an update, they say nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.records import Metric
from sparkwright.bench.statistics import calibration as aa
from sparkwright.bench.statistics.decision import Rule
from sparkwright.core.files import canonical, sha256_bytes
from sparkwright.core.store import Store
from sparkwright.gates.throughput import paired_differences
from sparkwright.gates.throughput.abba_schedule import Resident
from sparkwright.gates.throughput.paired_differences import NoiseModel
from sparkwright.gates.throughput.records import Calibrated, Measurement

#: Series beyond the calibration's own blocks that are looked at as the newest ones.
NEWEST = 5


class Day(msgspec.Struct, frozen=True):
    """The difference of one A/A block, and the day when it was measured (``2026-11-22``)."""

    day: str
    difference: float


class Calibration(msgspec.Struct, frozen=True):
    """
    A/A blocks.

    Attributes:
        host: The machine's fingerprint. *about*: model, server and way of measuring.
        series: By name, oldest block first.
    """

    host: dict[str, str]
    about: dict[str, str]
    series: dict[str, tuple[Day, ...]] = {}

    def with_(self, cells: Sequence[WorkloadCell], legs: Sequence[Measurement], closed: Sequence[int], day: str) -> Calibration:
        """Return this calibration and the blocks *closed* of an A/A course."""
        made = {name: list(days) for name, days in self.series.items()}
        for cell, metric in _series(cells):
            found = [paired_differences.difference(legs, cell.name, block, metric) for block in closed]
            made.setdefault(paired_differences.name(cell.name, metric), []).extend(Day(day, one) for one in found if one is not None)
        return msgspec.structs.replace(self, series={name: tuple(days) for name, days in made.items()})


def _series(cells: Sequence[WorkloadCell]) -> list[tuple[WorkloadCell, Metric]]:
    return [(cell, metric) for cell in cells for metric in cell.primary]


def key(host: Mapping[str, str], about: Mapping[str, str]) -> str:
    """Return the key under which a calibration is kept."""
    return sha256_bytes(canonical({"host": dict(host), "about": dict(about)}))


def about(model: str, version: str, resident: Resident, quads: int, generator: str) -> dict[str, str]:
    """Return what a calibration is about, beside the machine: whatever the noise of a block depends on."""
    return {"model": model, "vllm": version, "resident": resident, "quads": str(quads), "generator": generator}


def stored(store: Store, host: Mapping[str, str], what: Mapping[str, str]) -> Calibration:
    """Return the A/A blocks of this host, none where it has none."""
    return store.get("calibrations", key(host, what), Calibration) or Calibration(dict(host), dict(what))


def keep(store: Store, made: Calibration) -> None:
    """Keep *made* for the gates of this host."""
    store.put("calibrations", key(made.host, made.about), made)


def known(made: Calibration, enough: int) -> dict[str, NoiseModel]:
    """Return what the calibration says of each series that has *enough* blocks; the first of them make the spread, the newest watch it."""
    found = {}
    for name, days in made.series.items():
        values = [one.difference for one in days]
        if len(values) >= enough:
            newest = values[enough:][-NEWEST:]
            holds = aa.band(values[:enough], newest).holds if newest else True
            found[name] = NoiseModel(aa.upper_sigma(values[:enough]), holds)
    return found


def supports(said: Mapping[str, NoiseModel], rule: Rule) -> str:
    """Return, in a sentence, which margin a machine with that noise decides for equal wheels within the most blocks."""
    widest = max((one.sigma for one in said.values()), default=0.0)
    if not widest:
        return "The machine is not calibrated for this; signs decide, which takes more blocks."
    margin = aa.smallest_margin(widest, rule.alpha, rule.most, least=rule.least, series=len(said))
    words = f"A/A blocks of this machine support a margin of {100 * margin:.2g} % and more"
    return f"{words}; at {100 * rule.margin:g} %, equal wheels may stay undecided." if margin > rule.margin else f"{words}."


def shown(made: Calibration, cells: Sequence[WorkloadCell], said: Mapping[str, NoiseModel]) -> tuple[Calibrated, ...]:
    """Return the A/A history for the report."""
    found = []
    for cell, metric in _series(cells):
        name = paired_differences.name(cell.name, metric)
        if name in said:
            days = made.series[name]
            values, when = tuple(one.difference for one in days), tuple(one.day for one in days)
            found.append(Calibrated(cell.name, metric, values, when, said[name].sigma, said[name].in_band))
    return tuple(found)
