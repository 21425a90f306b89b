"""Several configurations side by side: tables, and what their intervals support in a sentence."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from sparkwright.bench.records import METRICS, Metric, Side
from sparkwright.bench.report import text
from sparkwright.bench.report.view import Shift, Value, View
from sparkwright.bench.results import CellResult

#: Title, metric (None: tokens per second of each user), factor, and whether more is better.
FIGURES: tuple[tuple[str, Metric | None, float, bool], ...] = (
    ("each user, tok/s", None, 1.0, True),
    ("all users, tok/s", "rate", *METRICS["rate"][2:]),
    ("first token, ms", "ttft", *METRICS["ttft"][2:]),
)

#: Prompt, answer and concurrency.
Shape = tuple[int, int, int]


class Column(msgspec.Struct, frozen=True):
    """A side of a result, and the name that distinguishes it from the other columns."""

    name: str
    view: View
    side: Side

    def value(self, shape: Shape, metric: Metric | None) -> Value | None:
        """Return *metric* of a cell, or with None the tokens per second of each user."""
        for cell in self.view.result.cells:
            if shape_of(cell) == shape:
                value = self.view.value(cell, metric or "tpot", self.side)
                return value.inverse if value and metric is None else value
        return None


class Entry(msgspec.Struct, frozen=True):
    """A figure, its interval, and whether it is the best or not distinguishable from the best."""

    text: str
    interval: str = ""
    best: bool = False


class Row(msgspec.Struct, frozen=True):
    """A configuration in a workload: its figures in the order of `FIGURES`."""

    cell: str
    name: str
    entries: tuple[Entry, ...]


class Pair(msgspec.Struct, frozen=True):
    """
    Two results against each other.

    Attributes:
        conclusion: What the intervals support.
        conditions: How the two were measured.
        rows: Workload and what its interval supports.
    """

    title: str
    conclusion: str
    conditions: str
    rows: tuple[tuple[str, str], ...]


def shape_of(cell: CellResult) -> Shape:
    """Return what distinguishes the workload of *cell*."""
    return cell.prompt, cell.answer, cell.concurrency


def columns(views: Sequence[View]) -> tuple[Column, ...]:
    """Return the configurations of *views*, each with its own name."""
    sides = [(view, side) for view in views for side in view.sides]
    labels = [_label(view, side) for view, side in sides]
    formats = [view.result.quantization for view, _ in sides]
    both = [f"{name} {label}".strip() for name, label in zip(formats, labels, strict=True)]
    models = [view.result.model for view, _ in sides]
    numbered = [f"#{number} {label}" for number, label in enumerate(both, 1)]
    distinct = (
        names
        for names in (labels, formats, both, models)
        if all(names) and len({*names}) == len(names)
    )
    names = next(distinct, numbered)
    return tuple(Column(name, *side) for name, side in zip(names, sides, strict=True))


def _label(view: View, side: Side) -> str:
    subject = view.result.baseline if side == "baseline" else view.result.candidate
    return subject.label if subject else side


def rows(configurations: Sequence[Column]) -> list[Row]:
    """Return a row for each configuration that measured a workload, workload by workload."""
    cells = {shape_of(cell): cell.name for col in configurations for cell in col.view.result.cells}
    result = []
    for shape in sorted(cells):
        figures = []
        for _, metric, factor, more in FIGURES:
            values = [column.value(shape, metric) for column in configurations]
            figures.append(_entries(values, factor, more))
        for column, *entries in zip(configurations, *figures, strict=True):
            if any(entry.interval for entry in entries):
                result.append(Row(cells[shape], column.name, tuple(entries)))
    return result


def _entries(values: Sequence[Value | None], factor: float, more: bool) -> tuple[Entry, ...]:
    """Return *values* as text; best is each whose interval reaches that of the best."""
    ends = {
        at: (value.median, value.low, value.high)
        for at, value in enumerate(values)
        if value and value.low is not None and value.high is not None
    }
    best: set[int] = set()
    if len(ends) > 1:
        _, low, high = (max if more else min)(ends.values())
        best = {at for at, (_, a, b) in ends.items() if (b >= low if more else a <= high)}
    entries = []
    for at, value in enumerate(values):
        if value is None:
            entries.append(Entry(text.NOT_MEASURED))
            continue
        interval = f"{value.blocks} blocks, no interval"
        if at in ends:
            interval = " to ".join(text.number(factor * end) for end in ends[at][1:])
            interval += f", {value.blocks} blocks"
        entries.append(Entry(text.number(factor * value.median), interval, at in best))
    return tuple(entries)


def pairs(views: Sequence[View]) -> list[Pair]:
    """Return the candidate of the first result against that of each other."""
    first, *others = (column for column in columns(views) if column.side == "candidate")
    return [_pair(first, other) for other in others]


def _pair(ours: Column, theirs: Column) -> Pair:
    first, other = ours.view, theirs.view
    shifts = []
    for cell in first.result.cells:
        a, b = (column.value(shape_of(cell), "tpot") for column in (ours, theirs))
        if a and b:
            shifts.append((cell.name, _shift(a, b)))
    count, known = len(shifts), [each for _, each in shifts if each.low is not None]
    faster = [1 / (1 + each.high) - 1 for each in known if each.high is not None and each.high < 0]
    slower = [each.low for each in known if each.low is not None and each.low > 0]
    parts = [
        f"{word} in {len(ends)} of {count} workloads by at least {text.percent(min(ends))} to "
        f"{text.percent(max(ends))} (median {text.percent(statistics.median(ends))})"
        for word, ends in (("faster", faster), ("slower", slower))
        if ends
    ]
    if unclear := len(known) - len(faster) - len(slower):
        parts.append(f"in {unclear} of {count} the intervals show no difference")
    if few := count - len(known):
        parts.append(f"for {few} of {count} there are too few blocks for a statement")
    conditions = "In sessions of their own: drift between them is not in the intervals."
    hosts = first.result.host, other.result.host
    names = ("gpu", "driver", "kernel", "memory")
    if differ := [name for name in names if hosts[0].get(name) != hosts[1].get(name)]:
        conditions += f" Not the same machine or software: {', '.join(differ)} differ."
    if first.result.model != other.result.model:
        conditions += f" Other checkpoints: {first.result.model} and {other.result.model}."
    conclusion = "; ".join(parts) or "no workload was measured on both"
    rows = tuple((name, each.conclusion()) for name, each in shifts)
    title = f"{ours.name} against {theirs.name}"
    return Pair(title, f"Per token, {conclusion}.", conditions, rows)


def _shift(ours: Value, theirs: Value) -> Shift:
    """Return how much slower *ours* is, with the farthest ends that both intervals allow."""
    mean = ours.median / theirs.median - 1
    if ours.low is None or ours.high is None or theirs.low is None or theirs.high is None:
        return Shift(mean)
    return Shift(mean, ours.low / theirs.high - 1, ours.high / theirs.low - 1)
