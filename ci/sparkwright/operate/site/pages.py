"""The pages: each a template and what goes into it. Nothing but the day's pages holds the day, so that the others stay as they are."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from sparkwright import __version__
from sparkwright.bench.records import METRICS
from sparkwright.bench.report import words
from sparkwright.core import console
from sparkwright.core.states import State
from sparkwright.gates.core.verdict import ORDER
from sparkwright.operate.site import nights as calendars
from sparkwright.operate.site.found import Found
from sparkwright.operate.site.records import Measured, Night
from sparkwright.operate.site.releases import Shown
from sparkwright.release import frame
from sparkwright.release.index.pages import standing
from sparkwright.release.manifest import places
from sparkwright.release.manifest.records import Missing, Proved, Speed, Wheel

ROOM = "sparkwright.operate.site"
STYLE = "style.css"

#: Releases on a page; a page of them has some thirty kilobytes.
RELEASES = 100
#: Evidence that a release's page links.
LINKED = ("verdicts", "throughput")
#: Nights that the overview and the first page of nights show as a calendar.
DAYS = 60


def style() -> bytes:
    """Return the style of all pages."""
    return frame.style(ROOM).encode()


def release_name(name: str) -> str:
    """Return the file of a release's page."""
    return f"releases/{name}.html"


def listing_name(number: int) -> str:
    """Return the file of the *number*-th page of releases, from 0."""
    return "releases/index.html" if number == 0 else f"releases/page-{number + 1}.html"


def render(name: str, template: str, title: str, **fields: Any) -> bytes:
    """Return the page *name*, of which a link to another one is relative, so that the site may lie anywhere."""
    made: str = _template(template).render(up="../" * name.count("/"), here=name, title=title, program=__version__, **fields)
    return made.encode()


def overview(found: Found) -> bytes:
    """Return the first page."""
    rows = list(calendars.calendar(found.nights.nights, found.day, found.policy.nights.on_demand, DAYS))
    last, where = {(one.workflow, one.stack): one for one in found.nights.nights}, calendars.places(found.nights.nights)
    return render(
        "index.html", "overview.html", "sparkwright, night by night",
        found=found, manifest=found.books.manifest if found.books else None,
        stacks=[_stack(stack, found) for stack in found.stacks],
        last=[(one, where[one.filename], _not_passed(one)) for _, one in sorted(last.items())],
        lacking={(row.workflow, row.stack): row.lacking for row in rows},
        drifts=[reports[0] for reports in found.drifted.reports.values()],
        changed=list(_newest_changes(found, 8)), histories=len(found.histories),
        measured=sum(len(one.spots) for one in found.histories),
    )  # fmt: skip


def _stack(stack: str, found: Found) -> dict[str, Any]:
    own = [one for one in found.releases if one.entry.stack == stack and not one.entry.yanked]
    newest = {channel: next((one for one in reversed(own) if one.entry.channel == channel), None) for channel in ("verified", "candidate")}
    debt = found.debt.stacks.get(stack, ())
    return {"name": stack, "newest": newest, "count": len(own), "debt": debt[-1] if debt else None, "lacks": lacks}


def lacks(one: Shown) -> int:
    """Return how many things are not proved of *one*."""
    return sum(len(proved.missing) for _, proved in one.wheels)


def _not_passed(night: Night) -> str:
    told = [f"{one.name}: {one.reference or words.STATES[one.state][1]}" for one in night.stages if one.state != "pass"]
    return "; ".join(told) or "every stage passed"


def releases(found: Found) -> Iterator[tuple[str, bytes]]:
    """Yield the table of releases, newest first, in pages, and the page of each release."""
    newest = list(reversed(found.releases))
    count = max(1, -(-len(newest) // RELEASES))
    for number in range(count):
        name = listing_name(number)
        rows = [(one, standing(one.entry), _versions(one), _unproved(one)) for one in newest[number * RELEASES : (number + 1) * RELEASES]]
        pages = [(listing_name(at), at + 1, at == number) for at in range(count)]
        yield name, render(name, "releases.html", "Releases", rows=rows, pages=pages, found=found, total=len(newest))
    for one in newest:
        name = release_name(one.entry.name)
        yield name, _release(name, one, found)


def _versions(one: Shown) -> str:
    # Upstream's: the label behind it is the release's own name.
    told = {wheel.fork: wheel.version.partition("+")[0] for wheel, _ in one.wheels if wheel.fork != "sparkwright"}
    return ", ".join(f"{fork} {version}" for fork, version in sorted(told.items()))


def _unproved(one: Shown) -> str:
    """Return what is not proved of *one*: the gates by their states, the worst first."""
    told: dict[State, list[str]] = {}
    for _, proved in one.wheels:
        for lack in proved.missing:
            told.setdefault(lack.state, []).append(lack.gate)
    parts = [f"{words.STATES[state][1]}: {', '.join(dict.fromkeys(told[state]))}" for state in ORDER if state in told]
    return words.clean("; ".join(parts), 300) or "nothing"


def _release(name: str, one: Shown, found: Found) -> bytes:
    gates = list({gate.name: gate.title for _, proved in one.wheels for gate in proved.gates}.items())
    wheels = [_wheel(wheel, proved, one, gates, found.link) for wheel, proved in one.wheels]
    return render(
        name, "release.html", one.entry.name, one=one, standing=standing(one.entry), gates=gates, wheels=wheels, link=found.link,
        reasons=list(_reasons(one)), metrics=list(METRICS.values()), checked=found.books.checked if found.books else False,
    )  # fmt: skip


def _reasons(one: Shown) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield everything that is not a pass, once for all wheels and gates of which it is said: projects, gates, state, reference, why."""
    told: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for wheel, proved in one.wheels:
        missing = {lack.gate: lack for lack in proved.missing}
        for gate in proved.gates:
            if gate.state != "pass":
                lack = missing.pop(gate.name, Missing(gate.name, gate.state, "", gate.says))
                told.setdefault((gate.state, lack.reference, gate.says or lack.says), {}).setdefault(wheel.project, []).append(gate.name)
        for lack in missing.values():
            told.setdefault((lack.state, lack.reference, lack.says), {}).setdefault(wheel.project, []).append(lack.gate)
    for key, projects in told.items():
        gates = dict.fromkeys(name for names in projects.values() for name in names)
        yield (", ".join(projects), ", ".join(gates), *key)


def _wheel(wheel: Wheel, proved: Proved, one: Shown, gates: Sequence[tuple[str, str]], link: str) -> dict[str, Any]:
    states = {gate.name: gate.state for gate in proved.gates}
    seen = [states.get(name) for name, _ in gates]
    while seen and seen[-1] is None:
        seen.pop()
    # A page links what people read first; the index's own page of the release has all of it.
    linked = [(kind, link + places.evidence(sha256)) for kind in LINKED for sha256 in _kinds(proved, kind)]
    return {
        "wheel": wheel,
        "proved": proved,
        "size": console.size(wheel.size),
        "states": seen,
        "without": len(gates) - len(seen),
        "evidence": linked,
        "further": [evidence.kind for evidence in proved.evidence if evidence.kind not in LINKED],
        "speeds": list(_speeds(proved.speeds, one.measured.get(wheel.sha256, ()))),
        "host": ", ".join(f"{key} {value}" for key, value in sorted(proved.host.items()) if not key.startswith("content ")),
    }


def _kinds(proved: Proved, kind: str) -> list[str]:
    return [one.sha256 for one in proved.evidence if one.kind == kind]


def _speeds(speeds: Sequence[Speed], figures: Sequence[Measured]) -> Iterator[dict[str, Any]]:
    """Yield a row for each workload: each metric as it was measured, and what of it was held against the baseline."""
    for cell in dict.fromkeys([*(one.cell for one in speeds), *(one.cell for one in figures)]):
        known = {one.metric: one for one in figures if one.cell == cell}
        yield {
            "cell": cell,
            "figures": [bare(known.get(metric)) for metric in METRICS],
            "launches": max((one.launches for one in known.values()), default=0),
            "speeds": [(one, metric_title(one.metric)) for one in speeds if one.cell == cell and one.ratio is not None],
        }


def metric_title(metric: str) -> str:
    """Return what people call *metric*, which a newer program may have added."""
    return next((title for name, (title, *_) in METRICS.items() if name == metric), metric)


def bare(one: Measured | None) -> str:
    """Return a figure with its interval, in the unit that its column names."""
    if one is None:
        return words.NONE
    interval = f" ({words.quantity(one.low, one.metric)} to {words.quantity(one.high, one.metric)})" if one.low and one.high else ""
    return f"{words.quantity(one.value, one.metric)}{interval}"


def measured(one: Measured) -> str:
    """Return a figure with its interval and its unit."""
    return f"{bare(one)} {METRICS[one.metric][1]}"


def _newest_changes(found: Found, most: int) -> Iterator[dict[str, Any]]:
    every = [(one, change, *one.between(change)) for one in found.histories for change in one.found.changes]
    for one, change, before, after in sorted(every, key=lambda row: row[3].place.at, reverse=True)[:most]:
        yield {"history": one, "change": change, "before": before, "after": after, **_effect(one.metric, change.ratio)}


def _effect(metric: str, ratio: float) -> dict[str, Any]:
    better = (ratio > 1) == next((more for name, (*_, more) in METRICS.items() if name == metric), True)
    return {"shade": "pass" if better else "fail", "sign": "▲" if better else "▼", "word": "better" if better else "worse"}


@functools.cache
def _template(name: str) -> Any:
    made = frame.environment(ROOM, _finalized)
    made.filters.update(percent=words.signed, span=words.span, title=metric_title, measured=measured, effect=_effect)
    made.filters.update(short=lambda text: text[:12], day=lambda text: text[:10], cut=lambda text: words.clean(text, 300))
    made.globals.update(signs=words.STATES, page=release_name)
    return made.get_template(name)


def _finalized(value: Any) -> Any:
    """Return *value* as it may be written: strings that are no markup of ours, without what turns the direction of writing."""
    return words.clean(value, 4000) if type(value) is str else value
