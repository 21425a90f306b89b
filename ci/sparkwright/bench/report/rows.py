"""The tables of one Result as text, row by row, the same on the page, in Markdown and in a terminal."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from sparkwright.bench.records import METRICS
from sparkwright.bench.report import words
from sparkwright.bench.report.view import View, change, shift
from sparkwright.bench.results import CellResult, Series, Subject
from sparkwright.core.console import duration
from sparkwright.core.states import State


class Row(msgspec.Struct, frozen=True):
    """
    One metric of one cell.

    Attributes:
        low, high: Of the change (of the value itself without a baseline), as text in *interval*. *says*: what it supports.
        evidence: For not slower, for slower, and of the signs; empty where there is none.
        used: Share of the memory's bandwidth. *ceiling*: what memory allows one request, in tokens per second.
    """

    cell: str
    metric: str
    unit: str
    primary: bool
    state: State
    culprit: bool
    baseline: str
    candidate: str
    change: str
    interval: str
    says: str
    evidence: tuple[str, ...]
    sigma: str
    launches: str
    used: str
    ceiling: str


def rows(view: View) -> tuple[Row, ...]:
    """Return a row for each series, in the order of the cells."""
    return tuple(_row(view, cell, one) for cell in view.result.cells for one in cell.series)


def _row(view: View, cell: CellResult, one: Series) -> Row:
    title, unit, _, _ = METRICS[one.metric]
    found = shift(one)
    paths = (one.pass_evidence, one.fail_evidence)
    better, worse = ("more", "less") if one.metric == "rate" else ("faster", "slower")
    used = view.use(cell)
    return Row(
        cell=words.clean(cell.name, 80),
        metric=title,
        unit=unit,
        primary=one.primary,
        state=one.state,
        culprit=f"{cell.name}: {title}" in view.result.culprits,
        baseline=words.quantity(one.baseline, one.metric),
        candidate=words.quantity(one.candidate, one.metric),
        change=words.signed(change(one)),
        interval=_interval(view, one),
        says=one.conclusion or (found.says(better, worse) if found else ""),
        evidence=tuple(words.evidence(path[-1]) for path in paths if path),
        sigma=words.percent(one.sigma, 2)
        if one.sigma is not None
        else "no A/A block"
        if one.differences
        else "",
        launches=str(one.launches) if one.launches else "",
        used=words.percent(used, 1) if used is not None and one.metric == "tpot" else "",
        ceiling=f"{words.number(cell.ceiling, 4)} tok/s"
        if cell.ceiling is not None and one.metric == "tpot"
        else "",
    )


def _interval(view: View, one: Series) -> str:
    if one.low is None or one.high is None:
        return "too few blocks" if one.candidate is not None else ""
    if view.result.baseline:
        return words.span(one.low, one.high)
    factor = METRICS[one.metric][2]
    return f"{words.number(one.low * factor)} to {words.number(one.high * factor)}"


def blocks(one: Series) -> Iterator[tuple[str, ...]]:
    """Yield for each block: its number, the difference, and the evidence after it."""
    for index, difference in enumerate(one.differences):
        paths = (one.pass_evidence, one.fail_evidence)
        yield (
            str(index + 1),
            words.signed(difference),
            *(words.evidence(path[index]) if index < len(path) else "" for path in paths),
        )


def subject(one: Subject | None) -> tuple[tuple[str, str], ...]:
    """Return what is known of a wheel, by name."""
    if one is None:
        return (("", "none"),)
    variables = " ".join(f"{name}={value}" for name, value in one.variables.items())
    known = (
        ("wheel", one.wheel), ("sha256", one.sha256), ("version", one.version), ("stack", one.stack),
        ("flags", " ".join(one.flags)), ("variables", variables),
    )  # fmt: skip
    return (
        ("", words.clean(one.label, 120)),
        *((name, words.clean(text, 200)) for name, text in known if text),
    )


def facts(view: View) -> Iterator[tuple[str, str]]:
    """Yield what the verdict rests on, by name."""
    result, (counted, discarded, invalid) = view.result, view.tally
    told = {
        "Model": result.model,
        "Quantisation": result.quantization,
        "Recipe": result.recipe,
        "Stack": result.stack,
    }
    yield from ((name, words.clean(text, 160)) for name, text in told.items() if text)
    if result.baseline:
        yield "Margin", f"a pass excludes slowdowns of {words.percent(result.margin)}"
        yield (
            "Error rate α",
            f"{words.percent(result.alpha)}, of gate number {result.attempt} of this wheel and recipe",
        )
    if result.added:
        yield "Beside the recipe", words.clean(" ".join(result.added))
    most = f" of at most {result.blocks}" if result.blocks else ""
    yield "Blocks", f"{view.blocks}{most}"
    yield (
        "Legs",
        f"{counted} count"
        + (f", {discarded} discarded, {invalid} invalid" if discarded or invalid else ""),
    )
    if result.generator:
        yield "Load", words.clean(result.generator, 120)
    band = result.bandwidth
    yield (
        "Read bandwidth",
        f"{words.number(band.gigabytes)} GB/s ({band.origin}{f', {words.clean(band.device, 60)}' if band.device else ''})"
        if band
        else words.NONE,
    )
    if begun := words.moment(result.began):
        again = f", continued {result.resumed}×" if result.resumed else ""
        yield "Measured", f"{begun}, {duration(max(0.0, min(result.seconds, 1e9)))}{again}"


def host(view: View) -> tuple[tuple[str, str], ...]:
    """Return the facts of the machine."""
    return tuple(
        (words.clean(name, 40), words.clean(text, 160))
        for name, text in list(view.result.host.items())[:40]
    )
