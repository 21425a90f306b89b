"""Published figures of a recipe against what was measured here."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from sparkwright.bench.recipes.recipe import Agreement, PublishedFigure, PublishedReport, Recipe
from sparkwright.bench.records import METRICS
from sparkwright.gates.throughput.experiment import ExperimentSpec
from sparkwright.gates.throughput.records import Result, Series


class FigureComparison(Struct, frozen=True):
    """
    One figure that somebody published, and ours.

    Attributes:
        published, measured: As people read them, with unit and interval; ``not measured`` where nothing is.
        agreement: See `PublishedFigure.agreement`.
        says: It in a sentence.
        source: Where it was published.
    """

    cell: str
    metric: str
    published: str
    measured: str
    agreement: Agreement
    says: str
    source: str


def only(question: ExperimentSpec, recipe: Recipe) -> ExperimentSpec:
    """Return *question* for the cells that something was published of; as it is where it names workloads, or nothing was published."""
    cells = tuple(dict.fromkeys(figure.cell for _, figure in _figures(recipe)))
    return question if question.workloads or not cells else replace(question, workloads=cells)


def _figures(recipe: Recipe) -> list[tuple[PublishedReport, PublishedFigure]]:
    return [
        (report, figure)
        for report in (*recipe.published, *recipe.ours)
        for figure in report.figures
    ]


def held(recipe: Recipe, result: Result, margin: float) -> tuple[FigureComparison, ...]:
    """
    Return every published figure of *recipe* whose cell was asked for in *result*.

    Args:
        margin: The ratio that still agrees.
    """
    found = {(cell.name, series.metric): series for cell in result.cells for series in cell.series}
    asked = [(report, one) for report, one in _figures(recipe) if (one.cell, one.metric) in found]
    return tuple(_held(report, one, found[one.cell, one.metric], margin) for report, one in asked)


def _held(
    report: PublishedReport, one: PublishedFigure, series: Series, margin: float
) -> FigureComparison:
    title, unit, factor, _ = METRICS[one.metric]
    agreement = one.agreement(series.low, series.high, margin)
    ours = "not measured" if series.candidate is None else f"{series.candidate * factor:.4g} {unit}"
    if series.low is not None and series.high is not None:
        ours += f" ({series.low * factor:.4g} to {series.high * factor:.4g})"
    published = f"{one.native * factor:.4g} {unit}"
    words = {
        "holds": "holds here",
        "faster": "is exceeded here",
        "slower": "is not reached here",
        "open": "is undecided here",
    }
    says = f"{title} of {published} {words[agreement]}: {ours}" + (
        f"; {report.differs}" if report.differs else ""
    )
    return FigureComparison(one.cell, one.metric, published, ours, agreement, says, report.source)
