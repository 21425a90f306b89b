"""The figures that hold several configurations: Pareto front, ladder of concurrency, and decode speed against the ceiling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sparkwright.bench.report import plot, words
from sparkwright.bench.report.charts import Chart
from sparkwright.bench.report.compare import Column, Shape, shapes
from sparkwright.bench.report.plot import COLOURS, MARKS, SERIES
from sparkwright.bench.report.view import Value, sound
from sparkwright.bench.results import CellResult

#: Configurations that one figure holds before nobody tells them apart, and workloads that get one.
_MOST = len(SERIES)
_SHAPES = 4


def charts(found: Sequence[Column], name: str) -> tuple[Chart, ...]:
    """Return the figures of *found*, those that there are measurements for; *name* goes before theirs."""
    drawn = found[:_MOST]
    cells = {
        (cell.prompt, cell.answer, cell.concurrency)
        for column in drawn
        for cell in column.view.result.cells
    }
    made: list[Chart | None] = [
        points(drawn, sorted({one[:2] for one in cells if one[2] == 1})[:24], f"{name}-points")
    ]
    made.append(pareto(drawn, f"{name}-pareto") if len(cells) > 1 else None)
    for number, shape in enumerate(shapes(cells)[:_SHAPES]):
        made += [
            ladder(drawn, shape, f"{name}-ladder{number}"),
            users(drawn, shape, f"{name}-users{number}"),
        ]
    return tuple(one for one in made if one)


def _dress(index: int) -> dict[str, Any]:
    return {"color": COLOURS[SERIES[index]], "marker": MARKS[index]}


def _ends(value: Value, factor: float = 1.0) -> tuple[list[float], list[float]]:
    low, high = value.low or value.middle, value.high or value.middle
    return [max(0.0, factor * (value.middle - low))], [max(0.0, factor * (high - value.middle))]


def points(found: Sequence[Column], workloads: Sequence[Shape], name: str) -> Chart | None:
    """Return decode speed of one user by workload, with intervals and the ceiling that memory sets."""
    rows = [
        (
            shape,
            [
                (index, value)
                for index, column in enumerate(found)
                if (value := _speed(column, shape))
            ],
        )
        for shape in workloads
    ]
    rows = [row for row in rows if row[1]]
    if not rows:
        return None
    with plot.drawing(70 + 15 * len(found) + (16 + 9 * len(found)) * len(rows)) as (
        figure,
        (axes,),
    ):
        named: set[int | str] = set()
        for row, (shape, values) in enumerate(rows):
            tops = [
                cell.ceiling
                for column in found
                if (cell := column.cell(shape, 1)) and sound(cell.ceiling)
            ]
            for top in sorted({one for one in tops if one is not None}):
                axes.plot(
                    [top, top],
                    [row - 0.42, row + 0.42],
                    color=COLOURS["ink"],
                    lw=2,
                    label=None if "top" in named else "ceiling",
                )
                named.add("top")
            for index, value in values:
                at = row + (index - (len(found) - 1) / 2) * 0.62 / max(1, len(found))
                title = None if index in named else plot.label(found[index].name, 30)
                axes.errorbar(
                    [value.middle],
                    [at],
                    xerr=_ends(value),
                    ls="none",
                    ms=5,
                    elinewidth=2,
                    label=title,
                    **_dress(index),
                )
                named.add(index)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_yticks(range(len(rows)), [f"{prompt}/{answer}" for (prompt, answer), _ in rows])
        axes.set_xlim(left=0)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("tok/s of one user")
        plot.over(axes, 1 if len(found) > 2 else 2)
        says = "Median and 95 % interval over launches; the upright line is what the memory's bandwidth allows without speculation."
        uses = "; ".join(_uses(found, workloads))
        says += (
            f" Share of the bandwidth: {uses}."
            if uses
            else " Share of the bandwidth: not measured."
        )
        return Chart(
            "Decode speed and its ceiling",
            plot.svg(figure, name, "Decode speed of one user by workload", says),
            says,
        )


def _speed(column: Column, shape: Shape) -> Value | None:
    cell = column.cell(shape, 1)
    return column.view.speed(cell, column.side) if cell else None


def _uses(found: Sequence[Column], workloads: Sequence[Shape]) -> Iterator[str]:
    """Yield for each configuration which shares of the memory's bandwidth its workloads need."""
    for column in found:
        cells = [cell for shape in workloads if (cell := column.cell(shape, 1))]
        told = [used for cell in cells if (used := column.view.use(cell, column.side)) is not None]
        if told:
            least, most = words.percent(min(told), 0), words.percent(max(told), 0)
            yield f"{plot.label(column.name, 40)} {least}" + (
                f" to {most}" if most != least else ""
            )


def pareto(found: Sequence[Column], name: str) -> Chart | None:
    """Return what each user gets against what all get together; up and to the right is better."""
    with plot.drawing(275 + 15 * len(found)) as (figure, (axes,)):
        some = False
        for index, column in enumerate(found):
            told = sorted(
                (one for cell in column.view.result.cells if (one := _both(column, cell))),
                key=lambda one: -one[0],
            )
            if not told:
                continue
            some = True
            front = _front(told)
            axes.scatter(
                [one[0] for one in told],
                [one[1] for one in told],
                s=18,
                alpha=0.55,
                linewidths=0,
                **_dress(index),
            )
            axes.plot(
                [one[0] for one in front],
                [one[1] for one in front],
                ms=6,
                label=plot.label(column.name, 30),
                **_dress(index),
            )
            for x, y, concurrency in front if index == 0 else ():
                axes.annotate(
                    f"c{concurrency}",
                    (x, y),
                    xytext=(5, 4),
                    textcoords="offset points",
                    fontsize=9,
                    color=COLOURS[SERIES[index]],
                )
        if not some:
            return None
        plot.doubling(axes)
        axes.set_xlim(left=0)
        axes.margins(x=0.1)
        axes.set_xlabel("tok/s of each user")
        axes.set_ylabel("tok/s of all users together")
        plot.over(axes, 1 if len(found) > 2 else 2)
        says = "Each point is a workload at a concurrency (c8: eight users); the line joins those that no other beats in both. Medians."
        return Chart(
            "Pareto front",
            plot.svg(figure, name, "Throughput of all users against that of each", says),
            says,
        )


def _both(column: Column, cell: CellResult) -> tuple[float, float, int] | None:
    each, together = (
        column.view.speed(cell, column.side),
        column.view.value(cell, "rate", column.side),
    )
    return (each.middle, together.middle, cell.concurrency) if each and together else None


def _front(told: Sequence[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """Return the points, from the fastest user on, that none before them reaches in total."""
    front: list[tuple[float, float, int]] = []
    for one in told:
        if not front or one[1] > front[-1][1]:
            front.append(one)
    return front


def ladder(found: Sequence[Column], shape: Shape, name: str) -> Chart | None:
    """Return tokens per second of all users over the concurrency, with intervals."""
    title = f"Ladder {shape[0]}/{shape[1]}: all users"
    says = "Tokens per second of all users together over the number of users; bars are 95 % intervals over launches."
    return _steps(found, shape, name, (title, "tok/s of all users together", says), each=False)


def users(found: Sequence[Column], shape: Shape, name: str) -> Chart | None:
    """Return tokens per second of each user over the concurrency, with intervals and the ceiling."""
    title = f"Ladder {shape[0]}/{shape[1]}: each user"
    says = "Tokens per second of each user; bars are 95 % intervals over launches. Grey: what memory allows one request without speculation."
    return _steps(found, shape, name, (title, "tok/s of each user", says), each=True)


def _steps(
    found: Sequence[Column], shape: Shape, name: str, told: tuple[str, str, str], *, each: bool
) -> Chart | None:
    title, axis, says = told
    with plot.drawing(200 + 15 * len(found)) as (figure, (axes,)):
        seen: set[int] = set()
        for index, column in enumerate(found):
            cells = sorted(
                (
                    cell
                    for cell in column.view.result.cells
                    if (cell.prompt, cell.answer) == shape and cell.concurrency > 0
                ),
                key=lambda cell: cell.concurrency,
            )
            values = [
                (cell, value)
                for cell in cells
                if (
                    value := column.view.speed(cell, column.side)
                    if each
                    else column.view.value(cell, "rate", column.side)
                )
            ]
            if not values:
                continue
            seen |= {cell.concurrency for cell, _ in values}
            bars = [_ends(value) for _, value in values]
            spread = [[low[0] for low, _ in bars], [high[0] for _, high in bars]]
            axes.errorbar(
                [cell.concurrency for cell, _ in values],
                [value.middle for _, value in values],
                yerr=spread,
                capsize=3,
                ms=5,
                label=plot.label(column.name, 30),
                **_dress(index),
            )
        if len(seen) < 2:
            return None
        if each and (tops := _ceilings(found, shape)):
            axes.plot(
                *zip(*tops, strict=True),
                color=COLOURS["muted"],
                lw=2.4,
                alpha=0.6,
                label="ceiling",
                zorder=1,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(seen), [f"{one:g}" for one in sorted(seen)])
        axes.set_xticks([], minor=True)
        plot.doubling(axes)
        axes.set_xlabel("users at a time (concurrency)")
        axes.set_ylabel(axis)
        plot.over(axes, 1 if len(found) > 2 else 3)
        return Chart(title, plot.svg(figure, name, title, says), says)


def _ceilings(found: Sequence[Column], shape: Shape) -> list[tuple[int, float]]:
    """Return the ceilings where all configurations have the same; with several, a line for each would hide what was measured."""
    tops = {
        (cell.concurrency, cell.ceiling)
        for column in found
        for cell in column.view.result.cells
        if (cell.prompt, cell.answer) == shape and sound(cell.ceiling)
    }
    alone = len({concurrency for concurrency, _ in tops}) == len(tops)
    return (
        sorted(
            (concurrency, top) for concurrency, top in tops if top is not None and concurrency > 0
        )
        if alone
        else []
    )
