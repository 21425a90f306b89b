"""Several configurations side by side: tables, and what their intervals support."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sparkwright.bench.records import Metric, Side
from sparkwright.bench.report.view import FIGURES, Shift, Value, View
from sparkwright.bench.results import CellResult
from sparkwright.core.pages import Table

#: Prompt, answer and concurrency.
Shape = tuple[int, int, int]


class Column(msgspec.Struct, frozen=True):
    """A side of a result, and the name that distinguishes it from the other columns."""

    name: str
    view: View
    side: Side

    def cell(self, shape: Shape) -> CellResult | None:
        """Return the workload of that *shape*; None if it was not measured."""
        cells = (cell for cell in self.view.result.cells if shape_of(cell) == shape)
        return next(cells, None)

    def value(self, shape: Shape, metric: Metric) -> Value | None:
        """Return *metric* of the workload of that *shape*; None if it was not measured."""
        cell = self.cell(shape)
        return self.view.value(cell, metric, self.side) if cell else None


def shape_of(cell: CellResult) -> Shape:
    """Return what distinguishes the workload of *cell*."""
    return cell.prompt, cell.answer, cell.concurrency


def columns(views: Sequence[View]) -> list[Column]:
    """Return the configurations of *views*, each with its own name."""
    result = []
    for number, view in enumerate(views, 1):
        for side in view.sides:
            own = view.result.baseline if side == "baseline" else None
            label = (own or view.result.candidate).label
            mark = " (baseline)" if side == "baseline" else ""
            name = " ".join(filter(None, (f"#{number}", view.result.quantization, label)))
            result.append(Column(f"{name}{mark}", view, side))
    return result


def tables(views: Sequence[View]) -> list[Table]:
    """Return all configurations, and the candidate of the first result against each other."""
    configurations = columns(views)
    first, *others = (column for column in configurations if column.side == "candidate")
    return [_all(configurations), *(_pair(first, other) for other in others)]


def _all(configurations: Sequence[Column]) -> Table:
    """Return a row for each configuration that measured a workload, workload by workload."""
    cells = {shape_of(cell): cell.name for col in configurations for cell in col.view.result.cells}
    rows = []
    for shape, name in sorted(cells.items()):
        for column in configurations:
            cell = column.cell(shape)
            if cell and (figures := column.view.figures(cell, column.side)):
                rows.append((name, column.name, *figures))
    note = "Medians over blocks; of each user, and of all users together."
    return Table("All configurations", ("Workload", "Configuration", *FIGURES), rows, 5, note)


def _pair(ours: Column, theirs: Column) -> Table:
    """Return what the intervals of two results support, per token."""
    first, other = ours.view.result, theirs.view.result
    shifts = {}
    for cell in first.cells:
        a, b = (column.value(shape_of(cell), "tpot") for column in (ours, theirs))
        if a and b:
            shifts[cell.name] = _shift(a, b)
    faster = sum(each.high is not None and each.high < 0 for each in shifts.values())
    slower = sum(each.low is not None and each.low > 0 for each in shifts.values())
    note = (
        f"Per token, faster in {faster} and slower in {slower} of {len(shifts)} workloads; nothing "
        "is shown for the others. Sessions of their own: drift between them is not in the "
        "intervals."
    )
    names = ("gpu", "driver", "kernel", "memory")
    if differ := [name for name in names if first.host.get(name) != other.host.get(name)]:
        note += f" Not the same machine or software: {', '.join(differ)} differ."
    if first.model != other.model:
        note += f" Other checkpoints: {first.model} and {other.model}."
    rows = [(name, each.conclusion) for name, each in shifts.items()]
    title = f"{ours.name} against {theirs.name}"
    return Table(title, ("Workload", "What it supports"), rows, 2, note)


def _shift(ours: Value, theirs: Value) -> Shift:
    """Return how much slower *ours* is, with the farthest ends that both intervals allow."""
    mean = ours.median / theirs.median - 1
    if ours.low is None or ours.high is None or theirs.low is None or theirs.high is None:
        return Shift(mean)
    return Shift(mean, ours.low / theirs.high - 1, ours.high / theirs.low - 1)
