"""The figures of the site: a history with its intervals, levels and changes, and the debt over time; small, as a page holds many."""

from __future__ import annotations

import datetime
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from sparkwright.bench.records import METRICS
from sparkwright.bench.report import plot, words
from sparkwright.bench.report.charts import Chart
from sparkwright.bench.report.plot import COLOURS
from sparkwright.operate.site.debt import Amount
from sparkwright.operate.site.history import History

#: Points that a figure shows, the newest ones: of more, nobody sees a single one.
MOST = 365

_NONE = float("nan")
_LONG = re.compile(r"(\d+\.\d)\d+")


def history(one: History, name: str) -> Chart:
    """Return the figures of *one* in the order of time, with 95 % intervals, levels, and a line where the level changed."""
    spots = one.spots[-MOST:]
    skipped = len(one.spots) - len(spots)
    title, unit, factor, more = METRICS[one.metric]
    with plot.drawing(190) as (figure, (axes,)):
        for kind, colour in (("release", "one"), ("night", "two")):
            drawn = [(at, spot.figure) for at, spot in enumerate(spots) if spot.place.kind == kind]
            if drawn:
                _points(axes, drawn, factor, colour, f"{kind}s", len(spots))
        _levels(axes, one, skipped, factor)
        _frame(axes, spots, factor)
        axes.set_ylabel(f"{title}, {unit}")
        plot.over(axes, 3)
        says = f"{len(one.spots)} measurements" + (f", the newest {MOST} of them drawn" if skipped else "") + "; bars: 95 % over launches."
        says += f" {'Higher' if more else 'Lower'} is better. {_said(one)}"
        return Chart(f"{one.cell}: {title}", _small(plot.svg(figure, name, f"{title} of {one.cell} over time", says), name), says)


def _points(axes: Any, drawn: Sequence[tuple[int, Any]], factor: float, colour: str, label: str, count: int) -> None:
    """Draw each figure as a dash on the bar of its interval: two paths for all, where markers would be an element each."""
    reach = max(0.12, 0.006 * count)
    bars = [part for at, one in drawn if one.low and one.high for part in ((at, one.low), (at, one.high), (_NONE, _NONE))]
    dashes = [part for at, one in drawn for part in ((at - reach, one.value), (at + reach, one.value), (_NONE, _NONE))]
    axes.plot([x for x, _ in bars], [factor * y for _, y in bars], color=COLOURS[colour], lw=1, alpha=0.55)
    axes.plot([x for x, _ in dashes], [factor * y for _, y in dashes], color=COLOURS[colour], lw=2.6, label=label)


def _levels(axes: Any, one: History, skipped: int, factor: float) -> None:
    """Draw the mean of each stretch, and the places where one ends."""
    ends = [0, *(change.at for change in one.found.changes), len(one.spots)]
    for first, last in itertools.pairwise(ends):
        values = [math.log(spot.figure.value) for spot in one.spots[first:last]]
        if one.found.looked and last > skipped:
            level = factor * math.exp(sum(values) / len(values))
            axes.plot([max(first - skipped, 0) - 0.4, last - skipped - 0.6], [level, level], color=COLOURS["muted"], lw=1)
    for number, change in enumerate(one.found.changes, 1):
        if change.at > skipped:
            at = change.at - skipped - 0.5
            axes.axvline(at, color=COLOURS["bad" if worse(one, change.ratio) else "good"], lw=1.4, ls=(0, (4, 2)))
            axes.annotate(
                f"{number}", (at, 1), xycoords=("data", "axes fraction"), xytext=(3, -11), textcoords="offset points", fontsize=10
            )  # fmt: skip


def _frame(axes: Any, spots: Sequence[Any], factor: float) -> None:
    """Keep the axis to what is known well: an interval of a few launches may be wider than all that is of interest."""
    values = [factor * spot.figure.value for spot in spots]
    low, high = min(values), max(values)
    reach = max(high - low, 0.02 * high)
    axes.set_ylim(low - 0.6 * reach, high + 0.6 * reach)
    axes.set_xlim(-0.8, max(len(spots) - 0.2, 3))
    shown = sorted({0, len(spots) // 2, len(spots) - 1}) if len(spots) > 2 else range(len(spots))
    axes.set_xticks(list(shown), [plot.label(spots[at].place.at[:10], 10) for at in shown])
    for text, at in zip(axes.get_xticklabels(), shown, strict=True):
        text.set(ha="left" if at == 0 else "right" if at == len(spots) - 1 else "center")
    axes.grid(axis="x", visible=False)


def worse(one: History, ratio: float) -> bool:
    """Is a change of the level by *ratio* one to the worse?"""
    return (ratio < 1) == METRICS[one.metric][3]


def _said(one: History) -> str:
    if not one.found.looked:
        return "Too few to look for changes of the level."
    count = len(one.found.changes)
    if not count:
        return "No change of the level was found."
    return "The level changed once, at the dashed line." if count == 1 else f"The level changed {count} times, at the dashed lines."


def debt(stack: str, amounts: Sequence[Amount], today: str, name: str) -> Chart:
    """Return what *stack* carried over time: how many picks and patches, the lines of our patches, and the median age of all."""
    days = [datetime.date.fromisoformat(one.day).toordinal() for one in amounts]
    end = max(datetime.date.fromisoformat(today).toordinal(), days[-1] + 1)
    with plot.drawing(330, 3, sharex=True, height_ratios=[1.3, 1, 1]) as (figure, (counts, lines, ages)):
        x = [*days, end]
        for title, colour, values in (
            ("picks", "two", [one.picks for one in amounts]),
            ("our patches", "one", [one.patches for one in amounts]),
        ):
            counts.step(x, [*values, values[-1]], where="post", color=COLOURS[colour], label=title)
        total = [one.lines for one in amounts]
        lines.fill_between(x, [*total, total[-1]], step="post", color=COLOURS["one"], alpha=0.35, lw=0)
        oldest = _aging(ages, amounts, x)
        _debt_frame(counts, "count", max(max(one.picks, one.patches) for one in amounts))
        _debt_frame(lines, "lines of ours", max(total))
        _debt_frame(ages, "age, days", oldest)
        ages.set_xlim(x[0], end)
        ages.set_xticks(sorted({x[0], end}), [_iso(at) for at in sorted({x[0], end})])
        for text, place in zip(ages.get_xticklabels(), ("left", "right"), strict=False):
            text.set(ha=place)
        plot.over(counts, 2)
        last = amounts[-1]
        age = last.age(today)
        says = f"On {today}: {last.picks} picks and {last.patches} patches of ours, which have {last.lines:,} lines of diff; median age "
        says += "not known." if age is None else f"{age:g} days."
        return Chart(f"Stack {words.clean(stack, 60)}", _small(plot.svg(figure, name, f"Patch debt of {stack}", says), name), says)


def _aging(axes: Any, amounts: Sequence[Amount], x: Sequence[int]) -> float:
    """Draw the median age, which grows by a day each day until the series changes; return the highest."""
    ends = [(begin, one.age(_iso(begin)), stop, one.age(_iso(stop))) for one, begin, stop in zip(amounts, x, x[1:], strict=False)]
    drawn = [part for begin, young, stop, old in ends if young is not None for part in ((begin, young), (stop, old), (_NONE, _NONE))]
    axes.plot([at for at, _ in drawn], [age for _, age in drawn], color=COLOURS["three"], lw=1.6)
    return max((old for _, _, _, old in ends if old is not None), default=0.0)


def _iso(day: int) -> str:
    return datetime.date.fromordinal(day).isoformat()


def _debt_frame(axes: Any, label: str, most: float) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_ylim(0, 1.15 * max(1, most))
    axes.set_ylabel(label)
    axes.grid(axis="x", visible=False)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))


def _small(drawn: Markup, name: str) -> Markup:
    """
    Return *drawn* with numbers of one decimal (tenths of a pixel, of which nobody sees more), and with its parts numbered.

    matplotlib names a clip path after the place of an object in memory, so that the same figure would have other bytes every time.
    """
    numbers: dict[str, str] = {}
    # Digits and points alone are changed; the texts in it went through the escaping of XML, and numbers in them have units of their own.
    parts = re.split(r"(<text\b.*?</text>|<title\b.*?</title>|<desc\b.*?</desc>)", drawn, flags=re.S)
    made = [part if index % 2 else _LONG.sub(r"\1", part) for index, part in enumerate(parts)]
    ids = re.compile(rf"\b{name}-[a-z][0-9a-f]{{10}}\b")
    for index in range(0, len(made), 2):
        made[index] = ids.sub(lambda found: numbers.setdefault(found[0], f"{name}-{len(numbers)}"), made[index])
    return Markup("".join(made))  # noqa: S704
