"""The page: a self-contained HTML file that runs nothing, and shows the verdict first."""

from __future__ import annotations

from collections.abc import Sequence

from sparkwright import __version__
from sparkwright.bench.report import charts, compare
from sparkwright.bench.report.view import View
from sparkwright.bench.results import Result
from sparkwright.core import pages

TITLES = {
    "gate": "Throughput gate",
    "bench": "Measurement",
    "calibration": "A/A calibration",
    "verify": "Verification of a recipe",
}


def render(results: Sequence[Result]) -> str:
    """Return the page of *results*."""
    views = [View(result) for result in results]
    several = len(views) > 1
    sections = []
    for number, view in enumerate(views, 1):
        name, mark = f"r{number}", f"#{number} " if several else ""
        sections.append((name, f"{mark}{view.title}", view, charts.forest(view, name)))
    return pages.environment("sparkwright.bench.report").get_template("page.html").render(
        title=f"{len(views)} results" if several else f"{views[0].verdict[1]}: {views[0].title}",
        sections=sections, several=several, version=__version__, kinds=TITLES,
        charts=charts.throughput(compare.columns(views), "all"),
        tables=compare.tables(views) if several else [],
    )  # fmt: skip
