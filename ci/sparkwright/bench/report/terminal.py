"""A result in a terminal of 80 columns: the verdict, what is missing, and a table."""

from __future__ import annotations

from collections.abc import Iterator

from sparkwright.bench.records import Metric
from sparkwright.bench.report import text
from sparkwright.bench.report.view import Row, View
from sparkwright.bench.results import Result
from sparkwright.core.console import console
from sparkwright.core.pages import clean
from sparkwright.core.states import SIGNS

#: Columns of a workload's name, and rows of a table.
_NAME, _ROWS = 16, 120
_SHORT: dict[Metric, str] = {"tpot": "TPOT ms", "ttft": "TTFT ms", "rate": "tok/s"}


def show(result: Result) -> None:
    """Print *result* as the result of a command."""
    view = View(result)
    sign, word = text.verdict(result)
    console.result(f"{sign} {word}: {clean(result.says)}")
    for gap in view.gaps:
        console.result(f"  - {clean(gap)}")
    if not result.cells:
        return
    values = [">baseline", ">candidate", ">change %"] if result.baseline else [">median"]
    last = [] if result.baseline else [">launches"]
    rows = [list(_cells(row, compared=bool(result.baseline))) for row in view.rows[:_ROWS]]
    console.table("", ["workload", "", *values, ">95 % interval", *last], rows, result=True)
    if result.baseline:
        signs = "  ".join(f"{sign} {state}" for state, sign in SIGNS.items())
        console.result(f"{signs}  no sign: reported only")


def _cells(row: Row, *, compared: bool) -> Iterator[str]:
    """Yield the cells of *row*, without units that the headings have."""
    yield clean(row.cell, _NAME)
    yield f"{SIGNS[row.state] if row.primary else ' '} {_SHORT[row.metric]}"
    values = [row.baseline, row.candidate, row.change] if compared else [row.candidate]
    for value in (*values, row.interval):
        short = value.replace(" %", "").replace(" to ", " … ")
        yield "–" if value in (text.NOT_MEASURED, text.NO_INTERVAL) else short
    if not compared:
        yield str(row.launches or "–")
