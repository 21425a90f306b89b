"""A Result in a terminal of 80 columns: verdict, table, bars with their intervals, and the ladder as a small plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sparkwright.bench.records import METRICS
from sparkwright.bench.report import compare, rows, words
from sparkwright.bench.report.absent import absent
from sparkwright.bench.report.view import Value, View
from sparkwright.bench.results import Result
from sparkwright.core.console import console

#: Columns of the bars and plots; with names and figures they stay below 80.
_BAR = 30
_NAME = 16
_EIGHTHS = " ▏▎▍▌▋▊▉"
_SHOWN = 40
_SHORT = {METRICS["tpot"][0]: "TPOT ms", METRICS["ttft"][0]: "TTFT ms", METRICS["rate"][0]: "tok/s"}


def show(result: Result) -> None:
    """Print *result* as what the verb was asked for."""
    view = View(result)
    sign, word = words.verdict(result)
    console.result(f"{sign} {word}: {words.clean(result.says)}")
    for line in absent(view):
        console.result(f"  - {line}")
    if result.cells:
        head, body = _table(view)
        console.table("", head, body[: 3 * _SHOWN], result=True)
        if result.baseline:
            console.result(
                "  ".join(f"{sign} {word}" for sign, word in words.STATES.values())
                + "  no sign: reported only"
            )
        for line in (*bars(view), *ladder(view)):
            console.result(line)


def _table(view: View) -> tuple[list[str], list[list[str]]]:
    found = rows.rows(view)
    if view.result.baseline:
        body = [
            [_cut(row.cell), _metric(row), row.baseline, row.candidate, row.change, row.interval]
            for row in found
        ]
        return ["workload", "", ">baseline", ">candidate", ">change %", ">95 % interval"], [
            list(map(_short, row)) for row in body
        ]
    body = [
        [_cut(row.cell), _metric(row), row.candidate, row.interval, row.launches] for row in found
    ]
    return ["workload", "", ">median", ">95 % interval", ">launches"], [
        list(map(_short, row)) for row in body
    ]


def _short(cell: str) -> str:
    """Return *cell* without the units that the heading has, so that the table is as narrow as a terminal."""
    return (
        "–"
        if cell in (words.NONE, "too few blocks")
        else cell.replace(" % to ", " … ").removesuffix(" %").replace(" to ", " … ")
    )


def _metric(row: rows.Row) -> str:
    return f"{words.STATES[row.state][0] if row.primary else ' '} {_SHORT[row.metric]}"


def _cut(text: str) -> str:
    return words.clean(text, _NAME)


def bars(view: View) -> Iterator[str]:
    """Yield a bar for each cell and side: tokens per second of one user, and its interval."""
    found = [
        (cell.name, side, value)
        for cell in view.result.cells[:_SHOWN]
        for side in view.sides
        if (value := view.speed(cell, side))
    ]
    if not found:
        return
    top = max(value.middle for *_, value in found)
    yield "tokens per second of each user"
    for name, side, value in found:
        letter = f" {side[0]}" if len(view.sides) > 1 else ""
        yield f"{_cut(name):<{_NAME}}{letter} {bar(value.middle / top):<{_BAR}} {words.number(value.middle):>6} {_ends(value)}".rstrip()
    if len(view.sides) > 1:
        yield "b: baseline, c: candidate"


def _ends(value: Value) -> str:
    return (
        f"[{words.number(value.low)} … {words.number(value.high)}]"
        if value.low and value.high
        else ""
    )


def bar(share: float, width: int = _BAR) -> str:
    """Return a bar of *share* of *width* columns, to an eighth of a column."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def ladder(view: View) -> Iterator[str]:
    """Yield a column for each concurrency: tokens per second of all users together, of each workload that has more than one."""
    cells = view.result.cells
    for shape in compare.shapes({(cell.prompt, cell.answer, cell.concurrency) for cell in cells})[
        :3
    ]:
        own = sorted(
            (cell for cell in cells if (cell.prompt, cell.answer) == shape),
            key=lambda cell: cell.concurrency,
        )[:9]
        values = [
            (cell.concurrency, value.middle) for cell in own if (value := view.value(cell, "rate"))
        ]
        if len(values) > 1:
            yield ""
            yield f"{shape[0]}/{shape[1]}: {METRICS['rate'][1]} of all users together, over the number of users"
            yield from plot(values)


def plot(values: Sequence[tuple[int, float]], height: int = 8) -> Iterator[str]:
    """Yield the lines of upright bars, with the values above and the concurrencies below."""
    top = max(value for _, value in values)
    levels = [round(value / top * height * 8) for _, value in values]
    figures = [words.number(value, 3) for _, value in values]
    width = max(8, *(len(figure) + 1 for figure in figures))
    for row in range(height, -1, -1):
        yield "".join(
            f"{_block(level, row, figure):^{width}}"
            for level, figure in zip(levels, figures, strict=True)
        ).rstrip()
    yield "".join(f"{f'c{concurrency}':^{width}}" for concurrency, _ in values).rstrip()


def _block(level: int, row: int, figure: str) -> str:
    """Return what stands at *row*, from the bottom, of a bar of *level* eighths: filled, its end, its figure above it, or nothing."""
    full, part = divmod(level, 8)
    if row < full:
        return "████"
    if row == full and part:
        return " ▁▂▃▄▅▆▇"[part] * 4
    return figure if row == full + bool(part) else ""
