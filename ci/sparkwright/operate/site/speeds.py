"""Speeds over time: the figures of results, and a chart of each recipe on each machine."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from sparkwright.bench.records import METRICS
from sparkwright.bench.report import charts
from sparkwright.bench.report.charts import Chart
from sparkwright.bench.report.view import Value, View
from sparkwright.bench.results import Result
from sparkwright.client.records import line
from sparkwright.operate.site.records import Measured

#: Cells of a chart, and figures of each, the newest.
MAX_CELLS, MAX_FIGURES = 6, 365


class Source(msgspec.Struct, frozen=True):
    """Where figures come from: a release, signed, or the day of a run, which is not."""

    name: str
    signed: bool


class History(msgspec.Struct, frozen=True):
    """
    The figures of one recipe on one kind of machine.

    Attributes:
        cells: Cell → its figures, oldest first.
        newest: Cell → the newest figure of each metric.
    """

    recipe: str
    gpu: str
    cells: dict[str, list[tuple[Source, Measured]]]
    newest: dict[str, dict[str, tuple[Source, Measured]]]
    chart: Chart | None = None


def figures(result: Result, source: str) -> tuple[Measured, ...]:
    """Return the figures of the candidate in *result*; *source*: the sha256 of its file."""
    view = View(result)
    recipe = line(result.recipe or result.model or "no recipe")
    gpu, wheel = line(result.host.get("gpu", "") or "unknown"), line(result.candidate.sha256)
    known = 0 < result.began < 253_402_300_800
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(result.began)) if known else ""
    return tuple(
        Measured(
            recipe, gpu, line(cell.name), metric, value.median, value.low, value.high,
            value.blocks, wheel, source, at,
        )
        for cell in result.cells
        for metric in METRICS
        if (value := view.value(cell, metric))
    )  # fmt: skip


def histories(measured: Sequence[tuple[Source, Measured]]) -> list[History]:
    """Return the history of each recipe and machine; a file counts once, as the first source."""
    groups: dict[tuple[str, str], dict[tuple[str, str, str], tuple[Source, Measured]]] = {}
    for source, figure in measured:
        group = groups.setdefault((figure.recipe, figure.gpu), {})
        group.setdefault((figure.cell, figure.metric, figure.source), (source, figure))
    result = []
    for number, ((recipe, gpu), group) in enumerate(sorted(groups.items())):
        cells: dict[str, list[tuple[Source, Measured]]] = {}
        newest: dict[str, dict[str, tuple[Source, Measured]]] = {}
        for source, figure in sorted(group.values(), key=lambda pair: (pair[1].at, pair[0].name)):
            newest.setdefault(figure.cell, {})[figure.metric] = (source, figure)
            if figure.metric == "tpot":
                cells.setdefault(figure.cell, []).append((source, figure))
        chart = _chart(cells, f"h{number}")
        result.append(History(recipe, gpu, cells, newest, chart))
    return result


def _chart(cells: dict[str, list[tuple[Source, Measured]]], name: str) -> Chart | None:
    """Return the tokens per second of each user over the sessions, with 95 % intervals."""
    moments = sorted({figure.at for pairs in cells.values() for _, figure in pairs})[-MAX_FIGURES:]
    if not moments:
        return None
    with charts.drawing(260) as (figure, (axes,)):
        drawn = sorted(cells.items())[:MAX_CELLS]
        for (cell, pairs), (colour, mark) in zip(drawn, charts.SERIES, strict=False):
            points = [
                (moments.index(each.at), Value(each.value, each.low, each.high).inverse)
                for _, each in pairs
                if each.at in moments
            ]
            charts.errorbars(axes, points, colour, mark, cell)
        axes.set_ylim(0, 1.08 * axes.dataLim.y1)
        axes.set_xlim(-0.5, max(len(moments) - 0.5, 3))
        axes.set_xticks([0, len(moments) - 1], [moments[0][:10], moments[-1][:10]])
        axes.set_ylabel("tok/s of each user")
        charts.legend(axes, 2)
        caption = f"{len(moments)} sessions, oldest first; bars are 95 % intervals over blocks."
        return charts.chart(figure, name, "Decode speed over time", caption)
