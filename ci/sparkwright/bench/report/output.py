"""Results in a terminal of 80 columns, and on a self-contained page that runs nothing."""

from __future__ import annotations

from collections.abc import Sequence

from sparkwright import __version__
from sparkwright.bench.quick_look import QuickLook
from sparkwright.bench.records import SHOWN
from sparkwright.bench.report import view
from sparkwright.bench.results import Result
from sparkwright.core import pages
from sparkwright.core.console import console
from sparkwright.core.pages import Table


def show(results: Sequence[Result]) -> None:
    """Print *results* as the result of a command."""
    labelled = view.labelled(results)
    for label, result in labelled.items():
        console.result(" ".join((label, *view.verdict(result))).strip() + f": {result.says}")
        for gap in view.gaps(result):
            console.result(f"  - {gap}")
        _table(view.ratios(result))
    _table(view.figures(labelled))


def show_quick(look: QuickLook, title: str) -> None:
    """Print a quick look under the *title*."""
    rows = [view.figure_texts(figure) for figure in look.figures]
    console.table(title, view.FIGURE_HEADS, rows, result=True)
    console.result(look.disclaimer)


def _table(table: Table) -> None:
    if table.rows:
        rows = [row[: table.narrow] for row in table.rows]
        console.table(table.title, table.heads[: table.narrow], rows, result=True)
        console.result(table.note)


def render(results: Sequence[Result]) -> str:
    """Return the page of *results*."""
    labelled = view.labelled(results)
    return pages.environment("sparkwright.bench.report").get_template("page.html").render(
        results=labelled, view=view, version=__version__,
        tables=(view.figures(labelled), view.figures(labelled, SHOWN, "Beside them")),
    )  # fmt: skip
