"""A result in a terminal of 80 columns: the verdict, what is missing, and a table."""

from __future__ import annotations

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
        [_name(cell), _PERCENTILES[title], *map(_short, values)]
        for cell, side, title, values in view.percentiles[: 2 * _ROWS]
        if side == "candidate"
    ]
    heads = ["candidate", "", ">median", ">p90", ">p99"]
    console.table("", heads, shown, result=True)
    _curves(view.curves)
    _ladder(view)


def show_quick(look: QuickLook, title: str, cell: str) -> None:
    """Print a quick look at *cell* under the *title*."""
    titles = [figure.name for figure in look.figures]
    # Percentiles stand below what they are of.
    rows = [
        [
            figure.name,
            text.number(figure.mean),
            "–"
            if figure.mean is None
            else f"{text.number(figure.low)} – {text.number(figure.high)}",
            figure.unit,
        ]
        for figure in sorted(
            look.figures, key=lambda figure: titles.index(figure.name.split(",")[0])
        )
    ]
    console.table(title, ["", ">mean", ">95 % interval", ""], rows, result=True)
    _curves({cell: look.curve} if look.curve else {})
    console.result(look.disclaimer)


def _curves(curves: Mapping[str, LoadCurve]) -> None:
    """Print tokens and requests over time, by workload."""
    rows = [
        [
            _name(cell),
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
    """Print the throughput of each workload, those that differ in concurrency side by side."""
    cells = sorted(view.result.cells, key=compare.shape_of)
    rates = {cell.name: rate.median for cell in cells if (rate := view.value(cell, "rate"))}
    rows = [
        [_name(cell), text.number(rate), "█" * round(_BARS * rate / max(rates.values()))]
        for cell, rate in list(rates.items())[:_ROWS]
    ]
    if len(rows) > 1:
        console.table("", ["all users", ">tok/s", ""], rows, result=True)


def compare_all(results: Sequence[Result]) -> None:
    """Print the configurations of several results side by side."""
    views = [View(result) for result in results]
    rows = [
        [_name(row.cell), clean(row.name, 28), *(entry.text for entry in row.entries)]
        for row in compare.rows(compare.columns(views))
    ]
    heads = ["workload", "configuration", ">tok/s each", ">tok/s all", ">TTFT ms"]
    console.table("", heads, rows, result=True)
    for pair in compare.pairs(views):
        console.result(f"{clean(pair.title)}: {clean(pair.conclusion)} {clean(pair.conditions)}")


def _name(cell: str) -> str:
    """Return the name of a workload, whose end distinguishes it from the others."""
    return name if len(name := clean(cell)) <= _NAME else f"…{name[1 - _NAME :]}"


def _short(value: str) -> str:
    return "–" if value in (text.NOT_MEASURED, text.NO_INTERVAL) else value


def _cells(row: Row, *, compared: bool) -> Iterator[str]:
    """Yield the cells of *row*, without units that the headings have."""
    yield _name(row.cell)
    yield f"{SIGNS[row.state] if row.primary else ' '} {_SHORT[row.metric]}"
    values = [row.baseline, row.candidate, row.change] if compared else [row.candidate]
    for value in (*values, row.interval):
        yield _short(value).replace(" %", "").replace(" to ", " … ")
    if not compared:
        yield str(row.launches or "–")
