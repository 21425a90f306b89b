"""The figures of one Result: changes against the margin, evidence, and A/A history."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from markupsafe import Markup

from sparkwright.bench.records import METRICS
from sparkwright.bench.report import plot, words
from sparkwright.bench.report.plot import COLOURS
from sparkwright.bench.report.view import View, shift, sound
from sparkwright.bench.results import CellResult, Result, Series
from sparkwright.core.states import State

#: State → colour of the page's style.
SHADE: dict[State, str] = {
    "pass": "good",
    "fail": "bad",
    "inconclusive": "unsure",
    "invalid": "void",
    "not-run": "idle",
}
#: Rows, figures and points that a page stays usable with.
MOST_ROWS = 36
_FARTHEST = 0.5


class Chart(msgspec.Struct, frozen=True):
    """A figure, its heading, and the sentence below it."""

    title: str
    drawn: Markup
    says: str


def forest(view: View, name: str) -> Chart | None:
    """Return the intervals of every series against the margin, the deciding ones first; None without a baseline."""
    rows = [
        (cell, one, found)
        for cell in view.result.cells
        for one in cell.series
        if (found := shift(one))
    ]
    rows = sorted(rows, key=lambda row: not row[1].primary)[:MOST_ROWS]
    if not rows:
        return None
    margin = 100 * min(_FARTHEST, max(0.0, view.result.margin))
    with plot.drawing(64 + 19 * len(rows)) as (figure, (axes,)):
        axes.axvspan(margin, 100 * 10, color=COLOURS["bad"], alpha=0.09, lw=0)
        axes.axvline(0, color=COLOURS["muted"], lw=1)
        axes.axvline(margin, color=COLOURS["bad"], lw=1.4, ls=(0, (4, 2)))
        for row, (_, one, found) in enumerate(rows):
            colour = COLOURS[SHADE[one.state]] if one.primary else COLOURS["muted"]
            if found.low is not None and found.high is not None:
                axes.plot(
                    [_pc(found.low), _pc(found.high)],
                    [row, row],
                    color=colour,
                    lw=4 if one.primary else 2,
                    alpha=0.55,
                    solid_capstyle="butt",
                )
            axes.plot(
                [_pc(found.middle)],
                [row],
                "D" if one.primary else "o",
                color=colour,
                ms=6 if one.primary else 4,
            )
        ends = [
            _pc(end)
            for *_, found in rows
            for end in (found.low, found.middle, found.high)
            if end is not None
        ]
        low, high = min(*ends, 0, -margin), max(*ends, margin)
        axes.set_xlim(low - 0.06 * (high - low) - 0.1, high + 0.06 * (high - low) + 0.1)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_yticks(
            range(len(rows)),
            [
                plot.label(
                    f"{cell.name}, {METRICS[one.metric][0] if one.metric != 'tpot' else 'per token'}",
                    40,
                )
                for cell, one, _ in rows
            ],
        )
        axes.tick_params(axis="y", length=0, labelcolor=COLOURS["ink"])
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("← faster · the candidate, in % · slower →")
        axes.annotate(
            f"margin {margin:g} %",
            (margin, 1),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            fontsize=9,
            color=COLOURS["bad"],
        )
        says = (
            f"Points are the mean of the paired blocks, bars its 95 % interval; right of the dashed line ({margin:g} %) is slower than the"
            " margin allows. Diamonds decide, small dots are reported."
        )
        return Chart(
            "Change against the margin",
            plot.svg(figure, f"{name}-forest", "Change of each cell against the margin", says),
            says,
        )


def _pc(share: float) -> float:
    return 100 * max(-_FARTHEST, min(_FARTHEST * 2, share))


def evidence(result: Result, cell: CellResult, one: Series, name: str) -> Chart | None:
    """Return the e-values of a series after each block, with the line at which they decide."""
    if not one.pass_evidence and not one.fail_evidence:
        return None
    paths = (
        ("not slower", one.pass_evidence, "good", "o"),
        ("slower", one.fail_evidence, "bad", "s"),
    )
    from matplotlib.ticker import MaxNLocator

    limit = 1 / result.alpha if sound(result.alpha) and result.alpha < 1 else None
    with plot.drawing(190) as (figure, (axes,)):
        low, high = _window([value for _, values, *_ in paths for value in values], limit or 1.0)
        for title, values, colour, mark in paths:
            shown = [min(high, max(low, value)) for value in values[:200]]
            axes.plot(
                range(1, len(shown) + 1),
                shown,
                color=COLOURS[colour],
                label=title,
                marker=mark,
                ms=4,
            )
        if limit:
            axes.axhline(limit, color=COLOURS["ink"], lw=1.2, ls=(0, (4, 2)))
            axes.annotate(
                f"1/α = {limit:g}",
                (1, limit),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="bottom",
                fontsize=9,
                color=COLOURS["ink"],
            )
        axes.set_yscale("log")
        axes.set_ylim(low / 1.3, high * 1.3)
        plot.plain(axes.yaxis)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("block")
        axes.set_ylabel("evidence (e-value)")
        plot.over(axes)
        title = f"{cell.name}: {METRICS[one.metric][0]}"
        last = [f"{what} {words.evidence(values[-1])}" for what, values, *_ in paths if values]
        says = (
            f"{words.STATES[one.state][1]} after {len(one.differences)} blocks: {', '.join(last)}."
        )
        return Chart(title, plot.svg(figure, name, f"Evidence of {title}", says), says)


def _window(values: Sequence[float], limit: float) -> tuple[float, float]:
    """Return the ends of the axis: the line that decides is inside, and what is far beyond it runs along the edge."""
    return max(1e-3, min([*values, 0.5])), min(limit * 100, max([*values, limit * 3]))


def history(title: str, one: Series, blocks: Sequence[tuple[str, float]], name: str) -> Chart:
    """Return the A/A blocks of this host over time, with the spread that the gate uses."""
    values = [100 * max(-_FARTHEST, min(_FARTHEST, value)) for _, value in blocks[-400:]]
    sigma = 100 * min(_FARTHEST, max(0.0, one.sigma or 0.0))
    with plot.drawing(170) as (figure, (axes,)):
        axes.axhspan(-2 * sigma, 2 * sigma, color=COLOURS["one"], alpha=0.10, lw=0)
        axes.axhspan(-sigma, sigma, color=COLOURS["one"], alpha=0.12, lw=0)
        axes.axhline(0, color=COLOURS["muted"], lw=1)
        axes.plot(
            range(len(values)), values, "o", color=COLOURS["one" if one.in_band else "bad"], ms=4
        )
        days = [plot.label(day, 12) for day, _ in blocks[-400:]]
        shown = sorted({0, len(days) // 2, len(days) - 1}) if days else []
        axes.set_xticks(shown, [days[at] for at in shown])
        for text, place in zip(axes.get_xticklabels(), ("left", "center", "right"), strict=False):
            text.set(ha=place)
        axes.set_ylabel("difference, %")
        band = (
            "the newest agrees with the earlier ones"
            if one.in_band
            else "the newest does not agree with the earlier ones"
        )
        says = f"{len(blocks)} blocks of the same wheel against itself; bands: one and two times the spread of {sigma:.2f} %"
        says += f" that the gate uses; {band}."
        return Chart(title, plot.svg(figure, name, f"A/A history of {title}", says), says)
