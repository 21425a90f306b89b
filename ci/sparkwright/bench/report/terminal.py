"""A result in a terminal of 80 columns: the verdict, what is missing, and a table."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from sparkwright.bench.load.load_curve import LoadCurve
from sparkwright.bench.quick_look import QuickLook
from sparkwright.bench.records import Metric
from sparkwright.bench.report import compare, text
from sparkwright.bench.report.view import Row, View
from sparkwright.bench.results import Result
from sparkwright.core.console import console
from sparkwright.core.pages import clean
from sparkwright.core.states import SIGNS

#: Columns of a workload's name, and rows of a table.
_NAME, _ROWS = 16, 120
_PERCENTILES = {
    "time per token, ms": "TPOT ms", "time to first token, ms": "TTFT ms",
    "gap between events, ms": "ITL ms", "requests, 1/s": "req/s",
}  # fmt: skip
#: Columns of the longest bar.
_BARS = 30
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
    shown = [
        [clean(cell, _NAME), _PERCENTILES[title], *map(_short, values)]
        for cell, side, title, values in view.percentiles[: 2 * _ROWS]
        if side == "candidate"
    ]
    heads = ["candidate", "", ">median", ">p90", ">p99"]
    console.table("", heads, shown, result=True)
    _curves(view.curves)
    _ladder(view)


def show_quick(look: QuickLook, title: str, cell: str) -> None:
    """Print a quick look at *cell* under the *title*."""
    rows = [
        [figure.name, f"{figure.mean:.4g}", f"{figure.low:.4g} – {figure.high:.4g}", figure.unit]
        for figure in look.figures
    ]
    console.table(title, ["", ">mean", ">95 % interval", ""], rows, result=True)
    _curves({cell: look.curve} if look.curve else {})
    console.result(look.disclaimer)


def _curves(curves: Mapping[str, LoadCurve]) -> None:
    """Print tokens and requests over time, by workload."""
    rows = [
        [
            clean(cell, _NAME),
            f"{curve.seconds:,.0f} s",
            text.blocks(curve.tokens),
            f"{max(curve.tokens):,.0f}",
            text.blocks(curve.requests),
        ]
        for cell, curve in list(curves.items())[:_ROWS]
    ]
    if rows:
        heads = ["over time", ">", "tok/s", ">most", "requests"]
        console.table("", heads, rows, result=True)


def _ladder(view: View) -> None:
    """Print the throughput of each workload by concurrency."""
    shapes = [cell for cell in view.result.cells if view.value(cell, "rate")]
    shapes.sort(key=lambda cell: (cell.prompt, cell.answer, cell.concurrency))
    for _, group in itertools.groupby(shapes, lambda cell: (cell.prompt, cell.answer)):
        rates = [(cell, value.median) for cell in group if (value := view.value(cell, "rate"))]
        most = max(rate for _, rate in rates)
        rows = [
            [clean(cell.name, _NAME), text.number(rate), "█" * round(_BARS * rate / most)]
            for cell, rate in rates
        ]
        if len(rows) > 1:
            console.table("", ["all users", ">tok/s", ""], rows, result=True)


def compare_all(results: Sequence[Result]) -> None:
    """Print the configurations of several results side by side."""
    views = [View(result) for result in results]
    rows = [
        [clean(row.cell, _NAME), clean(row.name, 28), *(entry.text for entry in row.entries)]
        for row in compare.rows(compare.columns(views))
    ]
    heads = ["workload", "configuration", *(f">{title}" for title, *_ in compare.FIGURES)]
    console.table("", heads, rows, result=True)
    for pair in compare.pairs(views):
        console.result(f"{clean(pair.title)}: {clean(pair.conclusion)} {clean(pair.conditions)}")


def _short(value: str) -> str:
    return "–" if value in (text.NOT_MEASURED, text.NO_INTERVAL) else value


def _cells(row: Row, *, compared: bool) -> Iterator[str]:
    """Yield the cells of *row*, without units that the headings have."""
    yield clean(row.cell, _NAME)
    yield f"{SIGNS[row.state] if row.primary else ' '} {_SHORT[row.metric]}"
    values = [row.baseline, row.candidate, row.change] if compared else [row.candidate]
    for value in (*values, row.interval):
        yield _short(value).replace(" %", "").replace(" to ", " … ")
    if not compared:
        yield str(row.launches or "–")
