"""The facts of Results in short, as Markdown for the page of a release; every string of a Result is made harmless there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sparkwright.core.console import markdown_escape
from sparkwright.gates.throughput.records import Result
from sparkwright.release.report import compare, pairs, rows, words
from sparkwright.release.report.absent import absent
from sparkwright.release.report.view import View


def render(results: Sequence[Result]) -> str:
    """Return the Markdown of *results*: each with its verdict first, and then what they say side by side."""
    views = [View(result) for result in results]
    parts = [line for view in views for line in _result(view, alone=len(views) == 1)]
    if len(views) > 1:
        parts += ["## Side by side", "", *_beside(compare.columns(views), pairs.pairs(views))]
    return "\n".join(parts).rstrip() + "\n"


def text(value: str) -> str:
    """Return *value* as plain text of one line: no markup, no link, no mention."""
    return markdown_escape(words.clean(value))


def table(head: Sequence[str], body: Iterable[Sequence[str]], left: int = 1) -> Iterator[str]:
    """Yield the lines of a table whose columns line up, the first *left* of them at the left. The cells are Markdown already."""
    rows_ = [list(head), *map(list, body)]
    widths = [max(3, *(len(row[column]) for row in rows_)) for column in range(len(head))]
    for number, row in enumerate(rows_):
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"| {' | '.join(cells)} |"
        if number == 0:
            marks = ["-" * width if column < left else f"{'-' * (width - 1)}:" for column, width in enumerate(widths)]
            yield f"| {' | '.join(marks)} |"


def _result(view: View, *, alone: bool) -> Iterator[str]:
    result = view.result
    sign, word = words.verdict(result)
    yield from (f"## {sign} {word}: {text(result.recipe or result.model or result.candidate.label)}", "", f"**{text(result.says)}**", "")
    if result.culprits:
        yield from (f"Slower: {text('; '.join(result.culprits[:24]))}", "")
    known = [("candidate", result.candidate), *([("baseline", result.baseline)] if result.baseline else [])]
    yield from table(
        ("", "what"), [(name, text(", ".join(f"{key} {value}".strip() for key, value in rows.subject(one)))) for name, one in known], 2
    )
    yield ""
    yield from table(("fact", "value"), [(text(name), text(value)) for name, value in (*rows.facts(view), *rows.host(view))], 2)
    yield ""
    if gaps := absent(view):
        yield from ("Not measured, or not well enough:", "", *(f"- {text(gap)}" for gap in gaps), "")
    if view.result.cells:
        yield from _cells(view)
        yield ""
    if alone:
        yield from _beside(compare.columns([view]), pairs.pairs([view]))


def _cells(view: View) -> Iterator[str]:
    found = rows.rows(view)
    if view.result.baseline:
        head: tuple[str, ...] = ("workload", "metric", "baseline", "candidate", "change", "95 % interval", "state")
        body = [
            (row.cell, row.metric, _united(row.baseline, row.unit), _united(row.candidate, row.unit), row.change, row.interval, _state(row))
            for row in found
        ]
        yield from table(head, [tuple(map(text, row)) for row in body], 2)
        return
    head = ("workload", "metric", "measured", "95 % interval", "launches", "of the bandwidth")
    yield from table(
        head,
        [tuple(map(text, (row.cell, row.metric, _united(row.candidate, row.unit), row.interval, row.launches, row.used))) for row in found],
        2,
    )


def _united(value: str, unit: str) -> str:
    return value if value == words.NONE else f"{value} {unit}"


def _state(row: rows.Row) -> str:
    return f"{words.STATES[row.state][0]} {words.STATES[row.state][1]}" if row.primary else "reported"


def _beside(columns: Sequence[compare.Column], found: Iterable[pairs.Pair]) -> Iterator[str]:
    for pair in found:
        yield from (f"**{text(pair.title)}.** {text(pair.says)} {text(pair.how)}", "")
    for each in compare.tables(columns):
        yield from (f"### {text(each.title)}", "")
        body = [
            (text(name), *(f"**{text(entry.text)}**" if entry.best else text(entry.text) for entry in entries))
            for name, entries in each.rows
        ]
        yield from table((each.corner, *map(text, each.columns)), body)
        yield ""
    if len(columns) > 1:
        yield from (compare.BOLD, "")
