"""A result in a terminal of 80 columns: the verdict, what is missing, and tables."""

from __future__ import annotations

from collections.abc import Sequence

from sparkwright.bench.quick_look import QuickLook
from sparkwright.bench.report import compare, text
from sparkwright.bench.report.view import View, over_time
from sparkwright.bench.results import Result
from sparkwright.core.console import console
from sparkwright.core.pages import Table

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
    cells = sorted(result.cells, key=compare.shape_of)
    rates = {cell.name: rate.median for cell in cells if (rate := view.value(cell, "rate"))}
    rows = [
        (cell, text.number(rate), "█" * round(_BARS * rate / max(rates.values())))
        for cell, rate in rates.items()
    ]
    if len(rows) > 1:
        console.table("All users together", ("Workload", ">tok/s", ""), rows, result=True)


def show_quick(look: QuickLook, title: str, cell: str) -> None:
    """Print a quick look at *cell* under the *title*."""
    rows = [
        (
            figure.name, text.number(figure.mean),
            text.interval((figure.low, figure.high), text.number), figure.unit,
        )
        for figure in look.figures
    ]  # fmt: skip
    console.table(title, ("", ">mean", ">95 % interval", ""), rows, result=True)
    if look.curve:
        _table(over_time({cell: look.curve}))
    console.result(look.disclaimer)


def compare_all(results: Sequence[Result]) -> None:
    """Print the configurations of several results side by side."""
    for table in compare.tables([View(result) for result in results]):
        _table(table)


def _table(table: Table) -> None:
    rows = [row[: table.narrow] for row in table.rows]
    console.table(table.title, table.heads[: table.narrow], rows, result=True)
    console.result(table.note)
