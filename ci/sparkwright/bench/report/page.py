"""The page: a self-contained HTML file that runs nothing, and shows the verdict first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sparkwright import __version__
from sparkwright.bench.records import METRICS
from sparkwright.bench.report import charts, compare, text
from sparkwright.bench.report.view import View
from sparkwright.bench.results import CellResult, Result
from sparkwright.core import pages
from sparkwright.core.console import console

TITLES = {
    "gate": "Throughput gate",
    "bench": "Measurement",
    "calibration": "A/A calibration",
    "verify": "Verification of a recipe",
}


def render(results: Sequence[Result]) -> str:
    """Return the page of *results*."""
    views = [View(result) for result in results]
    sections = []
    with console.progress("charts", len(views)) as progress:
        for index, view in enumerate(views):
            progress.update(index)
            sections.append(_section(view, f"r{index + 1}"))
    columns = compare.columns(views)
    # Results of one model are told apart by what served it.
    for section in sections if len({view.title for view in views}) < len(views) else ():
        own = [column.name for column in columns if column.view is section["view"]]
        section["title"] = f"{section['title']}, {own[-1]}"
    several = len(views) > 1
    return pages.environment("sparkwright.bench.report").get_template("page.html").render(
        title=f"{len(views)} results" if several else f"{sections[0]['word']}: {views[0].title}",
        sections=sections, several=several, version=__version__, text=text, metrics=METRICS,
        charts=charts.throughput(columns, "all"), figures=compare.FIGURES,
        rows=compare.rows(columns) if several else [], pairs=compare.pairs(views),
    )  # fmt: skip


def _section(view: View, name: str) -> dict[str, Any]:
    """Return what the template needs of one result."""
    result = view.result
    sign, word = text.verdict(result)
    series = [(cell, series) for cell in result.cells for series in cell.series]
    history = [
        (f"{cell.name}: {METRICS[each.metric][0]}", each, blocks)
        for cell, each in series
        if (blocks := result.calibration.get(f"{cell.name}: {METRICS[each.metric][0]}"))
    ]
    return {
        "name": name, "title": view.title, "kind": TITLES[result.kind],
        "view": view, "result": result,
        "sign": sign, "word": word, "forest": charts.forest(view, name),
        "history": history, "curves": charts.curves(view, name),
        "timeline": charts.timeline(view, name),
        "legs": [(cell.name, list(_legs(view, cell))) for cell in result.cells],
    }  # fmt: skip


def _legs(view: View, cell: CellResult) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield for each measurement of *cell* how it stands, and a row of a table."""
    for leg in view.legs(cell):
        shot, run = leg.after or leg.before, leg.run
        figures = [
            text.quantity(getattr(run, metric) or None, metric) if run else "–"
            for metric in METRICS
        ]
        machine = [text.number(value) if value else "–" for value in (
            (shot.temperature, shot.sm_clock) if shot else (None, None)
        )]  # fmt: skip
        accepted = text.percent(leg.speculation.acceptance) if leg.speculation else "–"
        reasons = "; ".join(f"{reason.reference}: {reason.message}" for reason in leg.reasons)
        state = "counts" if leg.counts else "repeated" if leg.discarded else "does not count"
        place = (
            str(leg.block),
            leg.side,
            str(leg.launch),
            str(leg.attempt),
            text.moment(leg.began),
        )
        yield (
            state,
            (*place, *figures, *machine, accepted, f"{state}: {reasons}" if reasons else state),
        )
