"""The pages of what moves: speeds, patch debt, drift, and nights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sparkwright.bench.report.charts import Chart
from sparkwright.core.files import sha256_bytes
from sparkwright.operate.site import charts
from sparkwright.operate.site import nights as calendars
from sparkwright.operate.site.drifts import Report
from sparkwright.operate.site.found import Found
from sparkwright.operate.site.history import History
from sparkwright.operate.site.pages import DAYS, render
from sparkwright.operate.site.records import Night

#: Bytes of figures on a page, so that a page with its style stays well below a megabyte.
ROOM = 600_000
#: Measurements that a figure's table lists, the newest ones. *REPORTS*: earlier reports of drift.
ROWS, REPORTS = 20, 60
#: Stages, files and figures of one night that are shown.
STAGES = 40


def speeds(found: Found, step: Callable[[], object] = bool) -> Iterator[tuple[str, bytes]]:
    """Yield the list of recipes, and for each recipe its histories, on as many pages as they need; *step* after each figure."""
    recipes: dict[str, list[History]] = {}
    for one in found.histories:
        recipes.setdefault(one.recipe, []).append(one)
    rows = []
    for recipe, histories in recipes.items():
        drawn = []
        for number, one in enumerate(histories):
            drawn.append((one, charts.history(one, f"h{number}")))
            step()
        parts = list(_parts(drawn))
        names = [f"speeds/{slug(recipe)}{f'-{at + 1}' if at else ''}.html" for at in range(len(parts))]
        for at, (name, part) in enumerate(zip(names, parts, strict=True)):
            pages = [(other, number + 1, number == at) for number, other in enumerate(names)]
            yield name, render(name, "recipe.html", recipe, part=part, pages=pages, rows=ROWS, policy=found.policy.changes)
        rows.append((recipe, names[0], histories))
    yield "speeds/index.html", render("speeds/index.html", "speeds.html", "Speeds", recipes=rows, found=found, policy=found.policy.changes)


def _parts(drawn: Sequence[tuple[History, Chart]]) -> Iterator[list[tuple[History, Chart]]]:
    """Yield the figures in groups that fit on a page."""
    part, size = list[tuple[History, Chart]](), 0
    for one in drawn:
        more = len(one[1].drawn) + 12_000
        if part and size + more > ROOM:
            yield part
            part, size = [], 0
        part.append(one)
        size += more
    yield part


def slug(text: str) -> str:
    """Return *text* as a part of a file name, another one for another text."""
    plain = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:60]
    return plain if plain == text and plain != "index" else f"{plain or 'recipe'}-{sha256_bytes(text.encode())[:8]}"


def debt(found: Found) -> Iterator[tuple[str, bytes]]:
    """Yield the page of what the stacks carry."""
    name = "debt/index.html"
    drawn = [
        (stack, amounts, charts.debt(stack, amounts, found.day, f"d{number}"))
        for number, (stack, amounts) in enumerate(sorted(found.debt.stacks.items(), reverse=True))
    ]
    carried = sorted(found.status.stacks.items(), reverse=True) if found.status else []
    yield name, render(name, "debt.html", "Patch debt", drawn=drawn, found=found, carried=carried)


def drift(found: Found) -> Iterator[tuple[str, bytes]]:
    """Yield the page of drift."""
    name = "drift/index.html"
    rows = [(reports[0], list(_earlier(reports)), max(0, len(reports) - 1 - REPORTS)) for reports in found.drifted.reports.values()]
    yield name, render(name, "drift.html", "Drift", rows=rows, found=found)


def _earlier(reports: Sequence[Report]) -> Iterator[tuple[Report, str]]:
    for one in reports[1 : REPORTS + 1]:
        yield one, ", ".join(ended.patch for ended in one.conflicts) or "none"


def nights(found: Found) -> Iterator[tuple[str, bytes]]:
    """Yield the calendar of the newest nights, and pages for each month with everything that is recorded."""
    every, where = found.nights.nights, calendars.places(found.nights.nights)
    pages: dict[str, list[Night]] = {}
    for one in reversed(every):
        pages.setdefault(where[one.filename].partition("#")[0], []).append(one)
    told = [(name, name[7:-5], len(own), sum(one.state != "pass" for one in own)) for name, own in pages.items()]
    rows = [_shown(row, where) for row in calendars.calendar(every, found.day, found.policy.nights.on_demand, DAYS)]
    name = "nights/index.html"
    yield name, render(name, "nights.html", "Nights", rows=rows, months=told, found=found, days=DAYS, total=len(every))
    published = _published(found)
    for name, own in pages.items():
        yield name, render(name, "month.html", f"Nights of {own[0].day[:7]}", nights=own, published=published, most=STAGES)


def _shown(row: calendars.Row, where: Mapping[str, str]) -> dict[str, Any]:
    cells = [(day, runs, where[runs[-1].filename] if runs else "") for day, runs in row.days]
    return {"workflow": row.workflow, "stack": row.stack, "cells": cells[::-1], "lacking": row.lacking}


def _published(found: Found) -> dict[str, str]:
    """Return the releases by the wheels that they have: sha256 → name, the newest where several have it."""
    return {wheel.sha256: one.entry.name for one in found.releases for wheel, _ in one.wheels}
