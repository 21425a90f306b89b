"""Configurations side by side, in the tables that people know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec

from sparkwright.bench.records import Side
from sparkwright.bench.report import words
from sparkwright.bench.report.view import Value, View
from sparkwright.bench.results import CellResult

#: Columns that one page holds.
MOST_COLUMNS = 12
ROWS = 60

#: What bold says in a table of several columns.
BOLD = "Bold: the best, and what its 95 % interval does not tell from the best; without an interval nothing is bold."

Shape = tuple[int, int]


class Column(msgspec.Struct, frozen=True):
    """A configuration: a side of a Result, and the name that tells it from the others."""

    name: str
    view: View
    side: Side

    def cell(self, shape: Shape, concurrency: int) -> CellResult | None:
        """Return the cell of that workload, if it was ordered."""
        cells = self.view.result.cells
        return next(
            (
                cell
                for cell in cells
                if (cell.prompt, cell.answer, cell.concurrency) == (*shape, concurrency)
            ),
            None,
        )


class Entry(msgspec.Struct, frozen=True):
    """A cell of a table: its text, whether it is the best or not told from the best, and its interval as a sentence."""

    text: str
    best: bool = False
    says: str = ""


class Table(msgspec.Struct, frozen=True):
    """A table as the seed reports have it: workloads down, configurations across."""

    title: str
    corner: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Entry, ...]], ...]


def columns(views: Sequence[View]) -> tuple[Column, ...]:
    """Return the configurations of *views*, each with a name of its own."""
    found = [(view, side) for view in views for side in view.sides if view.result.cells][
        :MOST_COLUMNS
    ]
    forms: tuple[Callable[[View, Side], str], ...] = (
        _label,
        lambda view, _: view.result.quantization,
        _form,
        lambda view, side: f"{_form(view, side)} {view.result.recipe}".strip(),
    )
    named = [
        next((form(view, side) for form in forms if _alone(form, view, side, found)), "")
        for view, side in found
    ]
    # What no name tells apart, its number does.
    names = [
        words.clean(name, 60) or f"#{number} {words.clean(_form(view, side), 50)}"
        for number, (name, (view, side)) in enumerate(zip(named, found, strict=True), 1)
    ]
    return tuple(Column(name, view, side) for name, (view, side) in zip(names, found, strict=True))


def _alone(
    form: Callable[[View, Side], str], view: View, side: Side, found: Sequence[tuple[View, Side]]
) -> bool:
    return Counter(form(*one) for one in found)[form(view, side)] == 1


def _label(view: View, side: Side) -> str:
    subject = view.result.baseline if side == "baseline" else view.result.candidate
    return subject.label if subject else side


def _form(view: View, side: Side) -> str:
    return f"{view.result.quantization} {_label(view, side)}".strip()


def tables(found: Sequence[Column]) -> Iterator[Table]:
    """Yield decode speed, time per token, time to the first token and the ladders of concurrency."""
    cells = {
        (cell.prompt, cell.answer, cell.concurrency)
        for column in found
        for cell in column.view.result.cells
    }
    alone = sorted({(prompt, answer) for prompt, answer, concurrency in cells if concurrency == 1})[
        :ROWS
    ]
    if alone:
        rows = [(f"{prompt}/{answer}", (prompt, answer), 1) for prompt, answer in alone]
        yield _table(
            "Decode, tok/s of one user",
            rows,
            found,
            lambda column, cell: column.view.speed(cell, column.side),
            1.0,
            True,
        )
        yield _table(
            "Time per token (TPOT), ms",
            rows,
            found,
            lambda column, cell: column.view.value(cell, "tpot", column.side),
            1e3,
            False,
        )
        yield _table(
            "Time to first token (TTFT), ms",
            rows,
            found,
            lambda column, cell: column.view.value(cell, "ttft", column.side),
            1e3,
            False,
        )
    for shape in shapes(cells)[:6]:
        ladder = sorted(
            concurrency for prompt, answer, concurrency in cells if (prompt, answer) == shape
        )
        rows = [(f"{shape[0]}/{shape[1]} c{each}", shape, each) for each in ladder[:ROWS]]
        yield _table(
            f"{shape[0]}/{shape[1]}: all users together, tok/s",
            rows,
            found,
            lambda column, cell: column.view.value(cell, "rate", column.side),
            1.0,
            True,
        )
        yield _table(
            f"{shape[0]}/{shape[1]}: each user, tok/s",
            rows,
            found,
            lambda column, cell: column.view.speed(cell, column.side),
            1.0,
            True,
        )


def shapes(cells: set[tuple[int, int, int]]) -> list[Shape]:
    """Return the workloads that were measured at more than one concurrency."""
    counts = Counter((prompt, answer) for prompt, answer, _ in cells)
    return sorted(shape for shape, count in counts.items() if count > 1)


def _table(
    title: str,
    rows: Sequence[tuple[str, Shape, int]],
    found: Sequence[Column],
    take: Callable[[Column, CellResult], Value | None],
    factor: float,
    more: bool,
) -> Table:
    made = []
    for name, shape, concurrency in rows:
        values = [
            take(column, cell) if (cell := column.cell(shape, concurrency)) else None
            for column in found
        ]
        best = _best(values, more) if len(found) > 1 else frozenset()
        made.append(
            (
                name,
                tuple(_entry(value, factor, index in best) for index, value in enumerate(values)),
            )
        )
    return Table(title, "Workload", tuple(column.name for column in found), tuple(made))


def _entry(value: Value | None, factor: float, best: bool) -> Entry:
    if value is None:
        return Entry(words.NONE)
    if value.low is None or value.high is None:
        return Entry(
            words.number(value.middle * factor, 4),
            False,
            f"{value.launches} launch(es): no interval",
        )
    ends = f"{words.number(value.low * factor, 4)} to {words.number(value.high * factor, 4)}, {value.launches} launches"
    return Entry(words.number(value.middle * factor, 4), best, ends)


def _best(values: Sequence[Value | None], more: bool) -> frozenset[int]:
    """Return the places of the best value and of those whose intervals reach into its own."""
    told = [
        (place, value.middle, value.low, value.high)
        for place, value in enumerate(values)
        if value and value.low is not None and value.high is not None
    ]
    if not told:
        return frozenset()
    _, _, low, high = (max if more else min)(told, key=lambda one: one[1])
    return frozenset(
        place
        for place, _, one_low, one_high in told
        if (one_high >= low if more else one_low <= high)
    )
