"""
Charts as SVG elements of a page: without colours of their own, and the same for the same data.

matplotlib draws in placeholder colours, which become the names of the page's colours, so that one
drawing serves light and dark.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from markupsafe import Markup, escape

from sparkwright.bench.records import METRICS
from sparkwright.bench.report.view import Column, Value, View, shift
from sparkwright.core.pages import clean
from sparkwright.core.states import State

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colours of the page's style, and the placeholders with which matplotlib draws.
_NAMES = (
    "ink", "muted", "grid", "one", "two", "three", "four", "five", "six",
    "good", "bad", "unsure", "void", "idle",
)  # fmt: skip
COLOURS = {name: f"#0101{index:02x}" for index, name in enumerate(_NAMES, 1)}
#: Colours of configurations, each with its own mark.
SERIES = tuple(zip(("one", "two", "three", "four", "five", "six"), "os^DvP", strict=True))
_STATES: dict[State, str] = {
    "pass": "good", "fail": "bad", "inconclusive": "unsure", "invalid": "void", "not-run": "idle",
}  # fmt: skip

#: Points of width; the page shows a point as one pixel or a little more.
WIDTH = 405

_STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "sparkwright", "text.parse_math": False,
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 11,
    "xtick.labelsize": 10, "ytick.labelsize": 10, "legend.fontsize": 10,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "axes.grid": True, "grid.linewidth": 0.8, "axes.linewidth": 0.8, "legend.frameon": False,
    "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
    "axes.labelcolor": COLOURS["muted"], "axes.edgecolor": COLOURS["muted"],
    "xtick.color": COLOURS["muted"], "ytick.color": COLOURS["muted"],
    "grid.color": COLOURS["grid"], "text.color": COLOURS["ink"],
    "legend.labelcolor": COLOURS["ink"],
}  # fmt: skip


class Chart(msgspec.Struct, frozen=True):
    """A heading, a drawing, and a sentence about it."""

    title: str
    svg: Markup
    caption: str


@contextmanager
def drawing(height: float) -> Iterator[tuple[Figure, Axes]]:
    """Yield a figure of *height* points and its axes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        # The reader has other fonts than this machine.
        warnings.simplefilter("ignore", UserWarning)
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        yield figure, figure.subplots()


def chart(figure: Figure, name: str, title: str, caption: str) -> Chart:
    """Return *figure* as a chart, whose *name* is unique in the page."""
    out = io.StringIO()
    figure.savefig(out, format="svg")
    body = out.getvalue().partition("<svg")[2].partition(">")[2]
    unused = r'<metadata>.*?</metadata>|<style\b.*?</style>|<!--.*?-->| xmlns(:\w+)?="[^"]*"'
    body = re.sub(unused, "", body, flags=re.S)
    body = re.sub(r"(\bid=\"|href=\"#|url\(#)", rf"\g<1>{name}-", body)
    body = re.sub(r"#0101([0-9a-f]{2})\b", lambda m: f"var(--{_NAMES[int(m[1], 16) - 1]})", body)
    width, height = 72 * figure.get_size_inches()
    head = (
        f'<svg class="plot" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-labelledby="{name}-t {name}-d"><title id="{name}-t">{escape(clean(title))}</title>'
        f'<desc id="{name}-d">{escape(clean(caption))}</desc>'
    )
    # matplotlib escapes all text in it.
    svg = Markup(head + body)  # noqa: S704
    return Chart(title, svg, caption)


def medians(axes: Axes, points: Sequence[tuple[float, Value]], series: int, label: str) -> None:
    """Draw the median and the interval of each of *points* in the look of that *series*."""
    # Beyond the last colour they begin again, each with another mark.
    cycle, index = divmod(series, len(SERIES))
    colour, mark = SERIES[index][0], SERIES[(index + cycle) % len(SERIES)][1]
    style: Any = {"color": COLOURS[colour], "lw": 1.5}
    if points:
        places, values = zip(*points, strict=True)
        middle = [value.median for value in values]
        axes.plot(places, middle, marker=mark, ms=5, label=clean(label, 40), **style)
        ends = [(value.low or value.median, value.high or value.median) for value in values]
        axes.vlines(places, *zip(*ends, strict=True), **style)


def finish(axes: Axes, label: str) -> None:
    """Let the axis of *axes* begin at 0, and put the legend above it."""
    axes.set_ylim(0, 1.08 * axes.dataLim.y1)
    axes.set_ylabel(label)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.02))


def forest(view: View, name: str) -> Chart | None:
    """Return the change of each series against the margin; None without a baseline."""
    rows = [
        (cell, series, moved)
        for cell in view.result.cells
        for series in cell.series
        if (moved := shift(series))
    ]
    if not rows:
        return None
    margin = 100 * view.result.margin
    with drawing(64 + 19 * len(rows)) as (figure, axes):
        axes.axvline(0, color=COLOURS["muted"], lw=1)
        axes.axvline(margin, color=COLOURS["bad"], lw=1.4, ls=(0, (4, 2)))
        for at, (_, series, moved) in enumerate(rows):
            colour = COLOURS[_STATES[series.state] if series.primary else "muted"]
            mean, low, high = (100 * share for share in moved)
            axes.hlines(at, low, high, color=colour, lw=3, alpha=0.5)
            axes.plot([mean], [at], "D" if series.primary else "o", color=colour, ms=5)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        labels = [
            f"{clean(cell.name, 24)}, {METRICS[series.metric][0]}" for cell, series, _ in rows
        ]
        axes.set_yticks(range(len(rows)), labels)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("← faster · candidate, % · slower →")
        caption = (
            "Mean of the paired blocks and its 95 % interval. Right of the dashed line "
            f"({margin:g} %) is slower than the margin allows. Diamonds decide, dots are reported."
        )
        return chart(figure, f"{name}-forest", "Change against the margin", caption)


def throughput(columns: Sequence[Column], name: str) -> list[Chart]:
    """Return the throughput by concurrency of each kind of prompt and answer."""
    cells = [cell for column in columns for cell in column.view.result.cells]
    shapes = sorted({(cell.prompt, cell.answer) for cell in cells})
    charts = (_by_concurrency(columns, *shape, name) for shape in shapes)
    return [drawn for drawn in charts if drawn]


def _by_concurrency(columns: Sequence[Column], prompt: int, answer: int, name: str) -> Chart | None:
    """Return the throughput of one kind; None unless it was measured at several concurrencies."""
    with drawing(215 + 15 * len(columns)) as (figure, axes):
        users = set()
        for series, column in enumerate(columns):
            values = {
                cell.concurrency: column.view.value(cell, "rate", column.side)
                for cell in column.view.result.cells
                if (cell.prompt, cell.answer) == (prompt, answer)
            }
            points = [(count, value) for count, value in sorted(values.items()) if value]
            users |= {count for count, _ in points}
            medians(axes, points, series, column.name)
        if len(users) < 2:
            return None
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(users), [f"{count}" for count in sorted(users)], minor=False)
        axes.set_xlabel("users at a time")
        finish(axes, "tok/s of all users together")
        title = f"{prompt}/{answer}: throughput by concurrency"
        caption = "Tokens per second of all users together; bars are 95 % intervals over blocks."
        return chart(figure, f"{name}-{prompt}-{answer}", title, caption)
