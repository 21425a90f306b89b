"""Results of experiments as tables and sentences, for pages and terminals."""

import itertools
import math

from sparkwright.bench.records import COUNTED, METRICS, Side
from sparkwright.bench.results import LoadFigure, Result
from sparkwright.core.pages import Table
from sparkwright.core.states import SIGNS

#: Stands where a record holds no number, or one that no machine gives.
NOT_MEASURED = "not measured"
#: Headings of a figure, as `figure_texts` gives it.
FIGURE_HEADS = ("Figure", ">Median", ">95 % interval", ">Samples")


def number(value: float | None) -> str:
    """Return *value* with four significant digits, and thousands apart."""
    if value is None or not 0 < value < math.inf:
        return NOT_MEASURED
    decimals = max(0, 3 - math.floor(math.log10(value)))
    return f"{value:,.{decimals}f}"


def interval(low: float | None, high: float | None) -> str:
    """Return an interval as text; a dash if it is unknown."""
    return "–" if low is None or high is None else f"{number(low)} … {number(high)}"


def ratios(result: Result) -> Table:
    """Return the candidate against the baseline: a ratio and its interval for each series."""
    pairs = [(cell, series) for cell in result.cells for series in cell.series if result.baseline]
    rows = []
    for cell, series in pairs:
        sign, says = "", "does not decide"
        if series.primary:
            sign, says = f"{SIGNS[series.state]} ", f"{series.state}: {series.conclusion}"
        ratio = (series.candidate or 0.0) / (series.baseline or math.inf)
        rows.append(
            (
                cell.name, sign + METRICS[series.metric][0], number(ratio),
                interval(series.low, series.high), f"{len(series.differences)}",
                says.removesuffix(": "),
            )
        )  # fmt: skip
    heads = ("Workload", "Metric", ">Ratio", ">95 % interval", ">Blocks", "Says")
    note = (
        "Candidate by baseline, of the medians over the blocks of launches. Times below 1 and "
        "rates above 1 are better. Rows with a sign decide."
    )
    return Table("Candidate against baseline", heads, rows, note)


def figure_texts(figure: LoadFigure) -> tuple[str, str, str, str]:
    """Return *figure* as `FIGURE_HEADS` name its texts."""
    title, ends = f"{figure.name}, {figure.unit}", interval(figure.low, figure.high)
    return title, number(figure.median), ends, f"{figure.samples}"


def figures(result: Result) -> Table:
    """Return the deciding figures of each workload and side of *result*."""
    rows = []
    sides: tuple[Side, ...] = ("candidate", "baseline") if result.baseline else ("candidate",)
    for cell, name, side in itertools.product(result.cells, METRICS, sides):
        figure = result.figure(cell, name, side)
        text, *numbers = figure_texts(figure)
        if figure.samples or name not in COUNTED:
            rows.append((cell.name, text, side, *numbers))
    heads = ("Workload", "Figure", "Of", *FIGURE_HEADS[1:])
    note = "Medians over the blocks of launches. Drift between sessions is not in the intervals."
    return Table("Absolute figures", heads, rows, note)
