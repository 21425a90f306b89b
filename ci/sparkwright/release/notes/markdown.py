"""Markdown of text from outside, every string made harmless, and its tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sparkwright.core.console import markdown_escape
from sparkwright.release.notes import words


def text(value: str) -> str:
    """Return *value* as plain text of one line: no markup, no link, no mention."""
    return markdown_escape(words.clean(value))


def table(head: Sequence[str], body: Iterable[Sequence[str]], left: int = 1) -> Iterator[str]:
    """Yield the lines of a table whose columns line up, the first *left* of them at the left. The cells are Markdown already."""
    rows_ = [list(head), *map(list, body)]
    widths = [max(3, *(len(row[column]) for row in rows_)) for column in range(len(head))]
    for number, row in enumerate(rows_):
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"| {' | '.join(cells)} |"
        if number == 0:
            marks = [
                "-" * width if column < left else f"{'-' * (width - 1)}:"
                for column, width in enumerate(widths)
            ]
            yield f"| {' | '.join(marks)} |"
