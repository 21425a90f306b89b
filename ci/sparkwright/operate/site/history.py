"""Histories: the figures of releases and nights by recipe, machine, cell and metric, in the order of time, and where they changed."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from sparkwright.bench.records import METRICS, Metric
from sparkwright.operate.site import changes
from sparkwright.operate.site.changes import Change, Found
from sparkwright.operate.site.policy import Changes
from sparkwright.operate.site.records import Measured, Night
from sparkwright.operate.site.releases import Shown


class Place(msgspec.Struct, frozen=True):
    """
    Where a figure comes from.

    Attributes:
        kind: Of a release, the figure follows from signed evidence; of a night, it is what an unsigned record says.
        name: Of the release, or the day of the night. *link*: below the root of the site. *at*: when it was measured, or recorded.
    """

    kind: Literal["release", "night"]
    name: str
    link: str
    at: str


class Spot(msgspec.Struct, frozen=True):
    """One point of a history."""

    place: Place
    figure: Measured


class History(msgspec.Struct, frozen=True):
    """
    One metric of one cell of one recipe on one kind of machine.

    Attributes:
        spots: Oldest first. *found*: where the level changed.
    """

    recipe: str
    gpu: str
    cell: str
    metric: Metric
    spots: tuple[Spot, ...]
    found: Found

    def between(self, change: Change) -> tuple[Spot, Spot]:
        """Return the last point before *change* and the first one after it."""
        return self.spots[change.at - 1], self.spots[change.at]


def of(
    releases: Sequence[Shown], nights: Sequence[Night], policy: Changes, page: Callable[[str], str], places: Mapping[str, str]
) -> tuple[History, ...]:
    """
    Return every history, by recipe, machine, cell and metric.

    Args:
        page: Gives the page of a release. *places*: where each record of a night is shown, by its file's name.
    """
    spots: dict[tuple[str, str, str, Metric], dict[str, Spot]] = {}
    for spot in (*_released(releases, page), *_nightly(nights, places)):
        figure = spot.figure
        # A measurement that was published and is a night's, too, counts once, and as the signed one.
        spots.setdefault((figure.recipe, figure.gpu, figure.cell, figure.metric), {}).setdefault(figure.source, spot)
    return tuple(_history(key, tuple(found.values()), policy) for key, found in sorted(spots.items(), key=_order))


def _order(item: tuple[tuple[str, str, str, Metric], object]) -> tuple[object, ...]:
    (recipe, gpu, cell, metric), _ = item
    numbers = [int(found[:18]) for found in re.findall(r"[0-9]+", cell)]
    return recipe, gpu, numbers, cell, list(METRICS).index(metric)


def _released(releases: Sequence[Shown], page: Callable[[str], str]) -> Iterator[Spot]:
    for one in releases:
        for figures in one.measured.values():
            for figure in figures:
                yield Spot(Place("release", one.entry.name, page(one.entry.name), figure.at or one.entry.made), figure)


def _nightly(nights: Sequence[Night], places: Mapping[str, str]) -> Iterator[Spot]:
    for night in nights:
        for figure in night.measured:
            place = Place("night", night.day, places[night.filename], figure.at or night.ended)
            yield Spot(place, figure)


def _history(key: tuple[str, str, str, Metric], spots: Sequence[Spot], policy: Changes) -> History:
    ordered = tuple(sorted(spots, key=lambda spot: (spot.place.at, spot.place.name, spot.figure.source)))
    found = changes.find([changes.Point(math.log(one.figure.value), _error(one.figure)) for one in ordered], policy)
    return History(*key, ordered, found)


def _error(one: Measured) -> float | None:
    """Return the standard error of the figure's logarithm: its interval was made with t, so it is undone with t."""
    if one.low is None or one.high is None or one.blocks < 2 or not 0 < one.low <= one.high < math.inf:
        return None
    return (math.log(one.high) - math.log(one.low)) / (2 * _quantile(one.blocks - 1))


@functools.cache
def _quantile(freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf(0.975, freedom))
