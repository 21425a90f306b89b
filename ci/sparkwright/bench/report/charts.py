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
from sparkwright.bench.report.compare import Column, shape_of
from sparkwright.bench.report.view import Value, View, plausible, shift
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
#: Rows of a chart, and changes that its axis still shows.
MAX_ROWS, MAX_CHANGE = 36, 0.5
#: Charts of a load over time.
MAX_CURVES = 24

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
def drawing(height: float, rows: int = 1, **layout: Any) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a figure of *height* points and its axes, one below the other."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        # The reader has other fonts than this machine.
        warnings.simplefilter("ignore", UserWarning)
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        yield figure, list(figure.subplots(rows, 1, squeeze=False, **layout).flat)


def chart(figure: Figure, name: str, title: str, caption: str) -> Chart:
    """Return *figure* as a chart, whose *name* is unique in the page."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    out = io.StringIO()
    canvas: Any = FigureCanvasSVG(figure)
    canvas.print_svg(out, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    start = out.getvalue().index("<svg")
    head, _, body = out.getvalue()[start:].partition(">")
    box = re.search(r'viewBox="([^"]*)"', head)
    body = re.sub(r"<metadata>.*?</metadata>|<style\b.*?</style>|<!--.*?-->", "", body, flags=re.S)
    body = re.sub(r' xmlns(:\w+)?="[^"]*"', "", body)
    body = re.sub(r"(\bid=\"|href=\"#|url\(#)", rf"\g<1>{name}-", body)
    body = re.sub(r"#0101([0-9a-f]{2})\b", lambda m: f"var(--{_NAMES[int(m[1], 16) - 1]})", body)
    body = body.replace("'DejaVu Sans', sans-serif", "var(--sans)")
    head = (
        f'<svg class="plot" viewBox="{box[1] if box else ""}" role="img" '
        f'aria-labelledby="{name}-t {name}-d"><title id="{name}-t">{escape(clean(title))}</title>'
        f'<desc id="{name}-d">{escape(clean(caption))}</desc>'
    )
    # matplotlib escapes all text in it.
    svg = Markup(head + body)  # noqa: S704
    return Chart(title, svg, caption)


def legend(axes: Axes, columns: int = 3) -> None:
    """Put the legend above *axes*."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, 1.02), ncols=columns)


def errorbars(
    axes: Axes, points: Sequence[tuple[float, Value]], colour: str, mark: str, label: str
) -> None:
    """Draw the median and the interval of each of *points*."""
    medians = [value.median for _, value in points]
    spread = [
        [value.median - min(value.low or value.median, value.median) for _, value in points],
        [max(value.high or value.median, value.median) - value.median for _, value in points],
    ]
    if points:
        axes.errorbar(
            [at for at, _ in points], medians, spread, color=COLOURS[colour], marker=mark, ms=5,
            capsize=3, label=clean(label, 40),
        )  # fmt: skip


def forest(view: View, name: str) -> Chart | None:
    """Return the change of each series against the margin; None without a baseline."""
    rows = [
        (cell, series, moved)
        for cell in view.result.cells
        for series in cell.series
        if (moved := shift(series))
    ]
    rows = sorted(rows, key=lambda row: not row[1].primary)[:MAX_ROWS]
    if not rows:
        return None
    margin = 100 * min(MAX_CHANGE, max(0.0, view.result.margin))
    low, high = -margin, margin
    with drawing(64 + 19 * len(rows)) as (figure, (axes,)):
        axes.axvline(0, color=COLOURS["muted"], lw=1)
        axes.axvline(margin, color=COLOURS["bad"], lw=1.4, ls=(0, (4, 2)))
        for at, (_, series, moved) in enumerate(rows):
            colour = COLOURS[_STATES[series.state] if series.primary else "muted"]
            mean, *ends = (
                100 * max(-MAX_CHANGE, min(MAX_CHANGE, share))
                for share in (moved.mean, moved.low, moved.high)
                if share is not None
            )
            axes.plot(
                ends, [at] * len(ends), color=colour, lw=4 if series.primary else 2, alpha=0.5
            )
            axes.plot([mean], [at], "D" if series.primary else "o", color=colour, ms=5)
            low, high = min(low, mean, *ends), max(high, mean, *ends)
        axes.set_xlim(low - 0.06 * (high - low) - 0.1, high + 0.06 * (high - low) + 0.1)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        labels = [f"{clean(cell.name, 24)}, {METRICS[one.metric][0]}" for cell, one, _ in rows]
        axes.set_yticks(range(len(rows)), labels)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("← faster · candidate, % · slower →")
        caption = (
            "Mean of the paired blocks and its 95 % interval. Right of the dashed line "
            f"({margin:g} %) is slower than the margin allows. Diamonds decide, dots are reported."
        )
        return chart(figure, f"{name}-forest", "Change against the margin", caption)


def timeline(view: View, name: str) -> Chart | None:
    """Return each measurement over time."""
    legs = [leg for leg in view.result.legs if leg.run and plausible(leg.run.tpot)]
    start = min((leg.began for leg in legs), default=0.0)
    medians = {
        (cell.name, side): value.median
        for cell in view.result.cells
        for side in view.sides
        if (value := view.value(cell, "tpot", side))
    }
    points: dict[str, list[tuple[float, float]]] = {}
    for leg in legs:
        if leg.run and (median := medians.get((leg.cell, leg.side))):
            off = max(-100.0, min(100.0, 100 * (leg.run.tpot / median - 1)))
            kind = str(leg.side) if leg.counts else "does not count"
            points.setdefault(kind, []).append(((leg.began - start) / 60, off))
    if not points:
        return None
    looks = (("baseline", *SERIES[0]), ("candidate", *SERIES[1]), ("does not count", "bad", "x"))
    with drawing(200) as (figure, (axes,)):
        for kind, colour, mark in looks:
            if kind in points:
                minutes, offs = zip(*points[kind], strict=True)
                axes.plot(minutes, offs, mark, color=COLOURS[colour], ms=4, label=kind)
        axes.set_ylabel("time per token,\n% off the median")
        axes.set_xlabel("minutes since the beginning")
        legend(axes)
        caption = "Each measurement against the median of its workload and side."
        return chart(figure, f"{name}-timeline", "Measurements over time", caption)


def curves(view: View, name: str) -> list[Chart]:
    """Return tokens per second and requests in flight over the time of a load of each cell."""
    from matplotlib.ticker import MaxNLocator

    result = []
    for index, (cell, curve) in enumerate(list(view.curves.items())[:MAX_CURVES]):
        ends = [curve.seconds * at / len(curve.tokens) for at in range(len(curve.tokens) + 1)]
        panels = (("tok/s", curve.tokens, "one"), ("requests", curve.requests, "two"))
        with drawing(235, 2, sharex=True) as (figure, axes):
            for panel, (label, values, colour) in zip(axes, panels, strict=True):
                panel.stairs(values, ends, color=COLOURS[colour], lw=1.5)
                panel.set_ylim(0, 1.08 * max(*values, 1e-9))
                panel.set_ylabel(label)
            axes[-1].set_xlabel("seconds since the first request")
            axes[-1].yaxis.set_major_locator(MaxNLocator(3, integer=True))
            caption = "The last measurement that counts; tokens are spread evenly in a request."
            title = f"{cell}: tokens and requests over time"
            result.append(chart(figure, f"{name}-c{index}", title, caption))
    return result


def throughput(columns: Sequence[Column], name: str) -> list[Chart]:
    """Return the front of each configuration, and its throughput by concurrency."""
    if rest := columns[len(SERIES) :]:
        return [*throughput(columns[: len(SERIES)], name), *throughput(rest, f"{name}-more")]
    cells = {shape_of(cell) for column in columns for cell in column.view.result.cells}
    ladders = [
        sorted(cell for cell in cells if cell[:2] == shape)
        for shape in sorted({cell[:2] for cell in cells})
    ]
    charts = [_front(columns, sorted(cells), name)] if len(cells) > 1 else []
    charts += [_ladder(columns, ladder, name) for ladder in ladders[:4] if len(ladder) > 1]
    return [drawn for drawn in charts if drawn]


def _front(
    columns: Sequence[Column], shapes: Sequence[tuple[int, int, int]], name: str
) -> Chart | None:
    """Return what each user gets against what all users get together."""
    with drawing(275 + 15 * len(columns)) as (figure, (axes,)):
        for column, (colour, mark) in zip(columns, SERIES, strict=False):
            values = [(column.value(shape, None), column.value(shape, "rate")) for shape in shapes]
            points = sorted(((a.median, b.median) for a, b in values if a and b), reverse=True)
            best = [
                point for at, point in enumerate(points)
                if all(point[1] > faster[1] for faster in points[:at])
            ]  # fmt: skip
            if points:
                style: Any = {"color": COLOURS[colour], "marker": mark}
                axes.plot(*zip(*points, strict=True), ls="", ms=4, alpha=0.5, **style)
                axes.plot(*zip(*best, strict=True), ms=6, label=clean(column.name, 40), **style)
        if not axes.lines:
            return None
        _axes(axes, "tok/s of each user", len(columns))
        caption = (
            "Each point is a workload; the line joins those that no other beats in both. Medians."
        )
        return chart(
            figure, f"{name}-front", "Throughput of all users against that of each", caption
        )


def _ladder(
    columns: Sequence[Column], shapes: Sequence[tuple[int, int, int]], name: str
) -> Chart | None:
    """Return the throughput of one workload by concurrency."""
    prompt, answer, _ = shapes[0]
    with drawing(215 + 15 * len(columns)) as (figure, (axes,)):
        for column, (colour, mark) in zip(columns, SERIES, strict=False):
            values = [(shape[2], column.value(shape, "rate")) for shape in shapes]
            steps = [(float(users), value) for users, value in values if value]
            errorbars(axes, steps, colour, mark, column.name)
        if not axes.lines:
            return None
        axes.set_xscale("log", base=2)
        users = [shape[2] for shape in shapes]
        axes.set_xticks(users, [f"{count}" for count in users], minor=False)
        _axes(axes, "users at a time", len(columns))
        title = f"{prompt}/{answer}: throughput by concurrency"
        caption = "Tokens per second of all users together; bars are 95 % intervals over blocks."
        return chart(figure, f"{name}-{prompt}-{answer}", title, caption)


def _axes(axes: Axes, label: str, columns: int) -> None:
    axes.set_ylim(0, 1.08 * axes.dataLim.y1)
    axes.set_xlabel(label)
    axes.set_ylabel("tok/s of all users together")
    legend(axes, 1 if columns > 2 else 2)
