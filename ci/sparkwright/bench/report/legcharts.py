"""The figures of a session: legs over time with what the driver told, the legs of a cell, and speculation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from sparkwright.bench.report import plot, words
from sparkwright.bench.report.charts import MOST_ROWS, Chart
from sparkwright.bench.report.plot import COLOURS
from sparkwright.bench.report.view import View, sound
from sparkwright.bench.results import CellResult, Measurement

#: How a leg is drawn → colour, mark and area.
_LOOKS = {
    "baseline": ("one", "o", 16),
    "candidate": ("two", "s", 16),
    "discarded": ("unsure", "x", 34),
    "invalid": ("bad", "X", 40),
}


def speculation(view: View, name: str) -> Chart | None:
    """Return tokens per second, verification steps per second and acceptance apart, by cell."""
    rows = [
        (cell.name, told)
        for cell in view.result.cells[:MOST_ROWS]
        if (told := _speculated(view, cell))
    ]
    if not rows:
        return None
    with plot.drawing(66 + 22 * len(rows), 1, 3, sharey=True) as (figure, panels):
        for column, (axes, title, colour) in enumerate(
            zip(panels, ("tok/s", "steps/s", "accepted, %"), ("one", "two", "three"), strict=True)
        ):
            values = [min(1e9, max(0.0, told[column])) for _, told in rows]
            axes.barh(range(len(rows)), values, color=COLOURS[colour], height=0.6)
            for row, value in enumerate(values):
                axes.annotate(
                    words.number(value, 3),
                    (value, row),
                    xytext=(3, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=9,
                )
            axes.set_xlim(0, max([*values, 1e-6]) * 1.35)
            axes.set_title(title, fontsize=11, color=COLOURS["ink"], loc="left")
            axes.grid(axis="y", visible=False)
            axes.set_xticks([])
        panels[0].set_yticks(range(len(rows)), [plot.label(cell, 22) for cell, _ in rows])
        panels[0].set_ylim(len(rows) - 0.5, -0.5)
        says = "Tokens per second of all users, verification steps per second, and the share of drafted tokens that were accepted."
        says += " Medians: over launches, and over legs."
        return Chart(
            "Speculative decoding, apart",
            plot.svg(figure, f"{name}-speculation", "Speculative decoding", says),
            says,
        )


def _speculated(view: View, cell: CellResult) -> tuple[float, float, float] | None:
    legs_ = (
        leg
        for leg in view.result.legs
        if leg.cell == cell.name and leg.side == "candidate" and leg.counts
    )
    told = [leg.speculation for leg in legs_ if leg.speculation]
    rate = view.value(cell, "rate")
    if not told or not rate:
        return None
    steps = rate.middle / statistics.median(one.length for one in told)
    return rate.middle, steps, 100 * statistics.median(one.acceptance for one in told)


def timeline(view: View, name: str) -> Chart | None:
    """Return every leg over time against the median of its cell and side, and below it temperature and clock where they were read."""
    start = min((leg.began for leg in view.result.legs), default=0.0)
    points = _points(view, start)
    if not points:
        return None
    # What a passing state slowed by half would press the others flat.
    edge = max(
        [
            1.0,
            *(
                1.4 * abs(off)
                for kind in ("baseline", "candidate")
                for _, off in points.get(kind, ())
            ),
        ]
    )
    panels = [(title, read) for title, read in _readings(view.result.legs, start) if read]
    with plot.drawing(
        210 + 85 * len(panels),
        1 + len(panels),
        sharex=True,
        height_ratios=[2.2, *([1.0] * len(panels))],
    ) as (figure, axes):
        for kind, (colour, mark, area) in _LOOKS.items():
            if found := points.get(kind):
                x, y = [at for at, _ in found], [max(-edge, min(edge, off)) for _, off in found]
                axes[0].scatter(
                    x,
                    y,
                    s=area,
                    marker=mark,
                    color=COLOURS[colour],
                    label=kind,
                    linewidths=1.3 if mark == "x" else 0,
                )
        axes[0].axhline(0, color=COLOURS["muted"], lw=1)
        axes[0].set_ylabel("time per token,\n% off the median")
        plot.over(axes[0], 4)
        for panel, (title, read) in zip(axes[1:], panels, strict=True):
            panel.plot(
                [at for at, _ in read], [value for _, value in read], color=COLOURS["three"], lw=1
            )
            panel.set_ylabel(title)
        axes[-1].set_xlabel("minutes since the beginning")
        says = "Each leg against the median of its cell and side; discarded and invalid ones are marked, at the edge where they lie beyond."
        says += (
            " Below, what the driver told beside the legs."
            if panels
            else " Clocks and temperature: not read."
        )
        return Chart(
            "Legs over time", plot.svg(figure, f"{name}-timeline", "Legs over time", says), says
        )


def _points(view: View, start: float) -> dict[str, list[tuple[float, float]]]:
    """Return minute and distance from the median in per cent of each leg, by what it is shown as."""
    counted: dict[tuple[str, str], list[float]] = {}
    points: dict[str, list[tuple[float, float]]] = {}
    for leg, figures in zip(view.result.legs, view.figures, strict=True):
        if leg.counts:
            counted.setdefault((leg.cell, leg.side), []).append(figures["tpot"])
    centres = {key: statistics.median(values) for key, values in counted.items()}
    for leg, figures in zip(view.result.legs, view.figures, strict=True):
        centre = centres.get((leg.cell, leg.side), 0.0)
        if figures and sound(centre) and sound(figures["tpot"]):
            kind = "discarded" if leg.discarded else "invalid" if leg.reasons else str(leg.side)
            points.setdefault(kind, []).append(
                (_minutes(leg.began, start), min(1e6, 100 * (figures["tpot"] / centre - 1)))
            )
    return points


def _minutes(second: float, start: float) -> float:
    return max(-1e6, min(1e6, (second - start) / 60))


def _readings(
    legs: Sequence[Measurement], start: float
) -> list[tuple[str, list[tuple[float, float]]]]:
    shots = sorted(
        (shot for leg in legs for shot in (leg.before, leg.after) if shot),
        key=lambda shot: shot.time,
    )
    kinds = (("GPU, °C", "temperature"), ("clock, MHz", "sm_clock"))
    return [
        (
            title,
            [
                (_minutes(shot.time, start), getattr(shot, name))
                for shot in shots
                if sound(getattr(shot, name))
            ],
        )
        for title, name in kinds
    ]


def legs(view: View, cell: CellResult, name: str) -> Chart | None:
    """Return the time per token of each leg of a cell, in the order of measuring."""
    found = [
        (leg, figures["tpot"])
        for _, leg, figures in view.legs(cell.name)
        if figures and sound(figures["tpot"])
    ]
    if not found:
        return None
    with plot.drawing(170) as (figure, (axes,)):
        sound_ = [tpot for leg, tpot in found if leg.counts] or [tpot for _, tpot in found]
        low, high = min(sound_), max(sound_)
        low, high = low - 0.3 * (high - low), high + 0.3 * (high - low)
        for kind, colour, mark in (("baseline", "one", "o"), ("candidate", "two", "s")):
            for counts in (True, False):
                own = [
                    (at, 1000 * max(low, min(high, tpot)))
                    for at, (leg, tpot) in enumerate(found)
                    if leg.side == kind and leg.counts == counts
                ]
                if own:
                    x, y = zip(*own, strict=True)
                    look: dict[str, Any] = (
                        {"color": COLOURS[colour]}
                        if counts
                        else {"facecolors": "none", "edgecolors": COLOURS["bad"]}
                    )
                    axes.scatter(
                        x,
                        y,
                        s=16 if counts else 44,
                        marker=mark,
                        label=kind if counts else "does not count" if kind == "candidate" else None,
                        **look,
                    )
        axes.set_xlabel("leg")
        axes.set_ylabel("time per token, ms")
        plot.over(axes, 2)
        says = f"{len(found)} legs of {words.clean(cell.name, 60)}; what does not count is hollow, and at the edge where it lies beyond."
        return Chart(cell.name, plot.svg(figure, name, f"Legs of {cell.name}", says), says)
