"""
The page: one HTML file that needs nothing else, runs nothing, and shows the verdict first.

Every string of a Result passes through the template's escaping and `words.clean`; the page's own policy forbids scripts and addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sparkwright import __version__
from sparkwright.bench.records import METRICS
from sparkwright.bench.report import across, charts, compare, legcharts, pairs, raw, rows, words
from sparkwright.bench.report.absent import absent
from sparkwright.bench.report.charts import Chart
from sparkwright.bench.report.view import View
from sparkwright.bench.results import Result
from sparkwright.core import pages

ROOM = "sparkwright.bench.report"

#: Figures of one kind that a page holds.
_EVIDENCE = 24
_HISTORY = 24
_LEGS = 48


def render(results: Sequence[Result], step: Callable[[float], object] = bool) -> str:
    """Return the page of *results*; *step* is told the share of it that is done."""
    views = [View(result) for result in results]
    many, several = raw.crowded(views), len(views) > 1
    sections = []
    for index, view in enumerate(views):
        sections.append(_section(view, f"r{index + 1}", many=many, alone=not several))
        step((index + 1) / (len(views) + several))
    columns = compare.columns(views) if several else ()
    page: str = (
        pages.environment(ROOM)
        .get_template("page.html")
        .render(
            title=f"{len(views)} results"
            if several
            else f"{sections[0]['word']}: {sections[0]['heading']}",
            contents=_contents(sections, several=several),
            results=sections,
            across=across.charts(columns, "all"),
            tables=tuple(compare.tables(columns)),
            pairs=tuple(pairs.pairs(views)) if several else (),
            **_words(),
        )
    )
    return page


def _words() -> dict[str, Any]:
    """Return what is the same on every page."""
    return {
        "foot": f"Made by sparkwright {__version__}. Each figure carries its unit and how often it was measured.",
        "signs": words.STATES,
        "bold": compare.BOLD,
        "none_": words.NONE,
        "machine": raw.MACHINE,
        "request": raw.REQUEST,
        "quantile": ("", *raw.REQUEST[1:-1]),
        "leg_head": raw.SUMMARY,
    }


def _heading(result: Result) -> str:
    about = result.recipe or result.model or result.candidate.label
    return words.clean(about, 120) or "no name"


def _contents(sections: Sequence[dict[str, Any]], *, several: bool) -> list[tuple[str, str]]:
    if several:
        return [
            ("overview", "Verdicts"),
            ("compared", "Side by side"),
            *((one["name"], one["heading"][:40]) for one in sections),
        ]
    one, parts = (
        sections[0],
        [
            ("cells", "Cells", "rows"),
            ("evidence", "Evidence", "evidence"),
            ("speed", "Throughput and latency", "tables"),
        ],
    )
    parts += [
        ("speculation", "Speculation", "speculation"),
        ("history", "A/A history", "history"),
        ("legs", "Legs", "legs"),
        ("host", "Machine", "kind"),
    ]
    return [
        (one["name"], "Verdict"),
        *((f"{one['name']}-{anchor}", text) for anchor, text, field in parts if one[field]),
    ]


def _section(view: View, name: str, *, many: bool, alone: bool) -> dict[str, Any]:
    """Return what the template of a Result reads."""
    result = view.result
    sign, word = words.verdict(result)
    own = compare.columns([view])
    return {
        "name": name,
        "kind": words.TITLES[result.kind],
        "heading": _heading(result),
        "state": result.state,
        "shade": "measured" if word == "measured" else result.state,
        "sign": sign,
        "word": word,
        "says": words.clean(result.says),
        "culprits": [words.clean(one, 120) for one in result.culprits[:24]],
        "facts": tuple(rows.facts(view)),
        "candidate": rows.subject(result.candidate),
        "baseline": rows.subject(result.baseline) if result.baseline else (),
        "absent": absent(view),
        "paired": result.baseline is not None,
        "rows": rows.rows(view),
        "forest": charts.forest(view, name),
        "across": across.charts(own, name) if alone else (),
        "tables": tuple(compare.tables(own)) if alone else (),
        "pairs": tuple(pairs.pairs([view])) if alone else (),
        "speculation": legcharts.speculation(view, name),
        "timeline": legcharts.timeline(view, name),
        "reasons": view.reasons,
        "many": many,
        "requests": f"{sum(len(leg.run.requests) for leg in result.legs if leg.run):,}",
        "host": rows.host(view),
        "policy": words.clean(result.policy, 80),
        "qualified": [words.clean(one, 200) for one in result.qualified[:20]],
        **_paths(view, name),
        **_history(view, name),
        **_legs(view, name, many=many),
    }


def _paths(view: View, name: str) -> dict[str, Any]:
    named = [
        (cell, one, f"{name}-e{index}-{one.metric}")
        for index, cell in enumerate(view.result.cells)
        for one in cell.series
        if one.differences
    ]
    primary = [
        chart
        for cell, one, which in named[: 10 * _EVIDENCE]
        if one.primary
        if (chart := charts.evidence(view.result, cell, one, which))
    ]
    left = len(primary) - _EVIDENCE
    return {
        "evidence": primary[:_EVIDENCE],
        "blocks": [
            (f"{cell.name}: {METRICS[one.metric][0]}", tuple(rows.blocks(one)))
            for cell, one, _ in named
        ],
        "left_out": f"{left} more cells have their evidence in numbers below." if left > 0 else "",
    }


def _history(view: View, name: str) -> dict[str, Any]:
    known = view.result.calibration
    found = [
        (title, one, known[title])
        for cell in view.result.cells
        for one in cell.series
        if known.get(title := f"{cell.name}: {METRICS[one.metric][0]}") and one.sigma
    ]
    drawn: list[Chart] = [
        charts.history(*row, f"{name}-h{index}") for index, row in enumerate(found[:_HISTORY])
    ]
    told = []
    for title, one, values in found:
        pairs = tuple((words.clean(day, 12), words.signed(value)) for day, value in values)
        told.append((f"{title}, spread {words.percent(one.sigma or 0.0, 2)}", pairs))
    return {"history": drawn, "history_rows": told}


def _legs(view: View, name: str, *, many: bool) -> dict[str, Any]:
    made = []
    for index, cell in enumerate(raw.unique(view.result.cells)):
        found = list(raw.legs(view, cell.name, many=many))
        off = sum(one.mark != "counts" for one in found)
        note = f"{len(found)} legs" + (f", {off} of which do not count" if off else "")
        if found:
            made.append(
                (
                    cell.name,
                    note,
                    legcharts.legs(view, cell, f"{name}-l{index}") if index < _LEGS else None,
                    found,
                )
            )
    return {"legs": made, "strays": raw.strays(view, many=many)}
