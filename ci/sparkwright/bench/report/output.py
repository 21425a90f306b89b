"""
Results in a terminal of 80 columns, and on a self-contained page that runs nothing: the verdict,
what is missing, and tables.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparkwright import __version__
from sparkwright.bench.quick_look import QuickLook
from sparkwright.bench.report import charts
from sparkwright.bench.report.view import (
    View,
    columns,
    comparison,
    interval,
    number,
    over_time,
)
from sparkwright.bench.results import Result
from sparkwright.core import pages
from sparkwright.core.console import console
from sparkwright.core.pages import Table

#: Kind of a result → what the page calls it.
TITLES = {
    "gate": "Throughput gate",
    "bench": "Measurement",
}
#: Columns of the longest bar.
_BARS = 30


def show(result: Result) -> None:
    """Print *result* as the result of a command."""
    view = View(result)
    console.result(f"{' '.join(view.verdict)}: {result.says}")
    for gap in view.gaps:
        console.result(f"  - {gap}")
    for table in view.tables:
        _table(table)
    rates = {c.name: rate.median for c in result.cells if (rate := view.value(c, "rate"))}
    rows = [
        (cell, number(rate), "█" * round(_BARS * rate / max(rates.values())))
        for cell, rate in rates.items()
    ]
    if len(rows) > 1:
        console.table("All users together", ("Workload", ">tok/s", ""), rows, result=True)


def show_quick(look: QuickLook, title: str, cell: str) -> None:
    """Print a quick look at *cell* under the *title*."""
    rows = [
        (
            figure.name, number(figure.mean),
            interval((figure.low, figure.high), number), figure.unit,
        )
        for figure in look.figures
    ]  # fmt: skip
    console.table(title, ("", ">mean", ">95 % interval", ""), rows, result=True)
    if look.curve:
        _table(over_time({cell: look.curve}))
    console.result(look.disclaimer)


def show_compared(results: Sequence[Result]) -> None:
    """Print the configurations of several results side by side."""
    _table(comparison([View(result) for result in results]))


def _table(table: Table) -> None:
    rows = [row[: table.narrow] for row in table.rows]
    console.table(table.title, table.heads[: table.narrow], rows, result=True)
    console.result(table.note)


def render(results: Sequence[Result]) -> str:
    """Return the page of *results*."""
    views = [View(result) for result in results]
    several = len(views) > 1
    mark = "#{} " if several else ""
    sections = [
        (
            f"r{position}",
            mark.format(position) + view.title,
            view,
            charts.forest(view, f"r{position}"),
        )
        for position, view in enumerate(views, 1)
    ]
    return pages.environment("sparkwright.bench.report").get_template("page.html").render(
        title=f"{len(views)} results" if several else f"{views[0].verdict[1]}: {views[0].title}",
        sections=sections, several=several, version=__version__, kinds=TITLES,
        charts=charts.throughput(columns(views), "all"),
        compared=comparison(views),
    )  # fmt: skip
