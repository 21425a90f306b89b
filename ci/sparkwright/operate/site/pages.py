"""From an index, records of runs, and documents about patches to four pages."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sparkwright import __version__
from sparkwright.bench.records import METRICS
from sparkwright.bench.report import text
from sparkwright.bench.results import decode_result
from sparkwright.cherry_picks import drift
from sparkwright.cherry_picks.drift import Document, Drift, Line
from sparkwright.client.index import Index, newest_first
from sparkwright.client.records import LARGEST_EVIDENCE, Release, ReleaseState, ReleaseWheel
from sparkwright.core.console import console
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.files import read_json
from sparkwright.core.pages import environment
from sparkwright.core.states import State
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project, stack_names
from sparkwright.gates.core.verdict import worst
from sparkwright.operate.errors import LabError
from sparkwright.operate.site import speeds
from sparkwright.operate.site.records import Measured, Problem, RunRecord
from sparkwright.operate.site.speeds import Source

#: Bytes of a document about patches; a series over forty releases has some megabytes.
LARGEST_DOCUMENT = 64 << 20
#: Runs that are shown, the newest.
MAX_RUNS = 300
PAGES = {"index": "Overview", "speeds": "Speeds", "patches": "Patches", "runs": "Runs"}
#: Raised if the figures of a stored result are computed otherwise.
_FORMAT = 1


class PublishedRelease(msgspec.Struct, frozen=True):
    """A release of the index; without a *record* if that is damaged."""

    name: str
    state: ReleaseState
    record: Release | None = None

    @property
    def gates(self) -> dict[str, State]:
        """Gate → its worst state over all wheels."""
        states: dict[str, list[State]] = {}
        for wheel in self.record.wheels if self.record else ():
            for gate in wheel.proof.gates:
                states.setdefault(gate.name, []).append(gate.state)
        return {gate: worst(states[gate]) for gate in sorted(states)}


class SiteContent(msgspec.Struct, frozen=True):
    """
    What the pages show.

    Attributes:
        link: The address of the index's pages, seen from the site.
        releases: Newest first; None without an index.
        patches: Stack → its patches and picks. *drifts*: the newest of each stack and fork.
        runs: Newest first.
    """

    day: str
    link: str
    releases: list[PublishedRelease] | None
    runs: list[RunRecord]
    patches: Mapping[str, Sequence[Line]]
    drifts: list[Drift]
    figures: list[tuple[Source, Measured]]
    problems: list[Problem]


class _Patches(msgspec.Struct, frozen=True):
    """The document of ``patch status --json``."""

    stacks: dict[str, tuple[Line, ...]]


class _Figures(msgspec.Struct, frozen=True):
    figures: tuple[Measured, ...]
    format: int = 0


def read_releases(
    index: Index, store: Store, problems: list[Problem]
) -> tuple[list[PublishedRelease], list[tuple[Source, Measured]]]:
    """Return the releases of *index*, newest first, and the figures of their results."""
    releases, figures = [], list[tuple[Source, Measured]]()
    names = newest_first(index.states)
    with console.progress("releases", len(names)) as progress:
        for count, name in enumerate(names):
            progress.update(count, name)
            record = None
            try:
                record = index.release(name)
                for wheel in record.wheels:
                    measured = _measured(index, store, wheel)
                    figures += [(Source(name, True), figure) for figure in measured]
            except SparkwrightError as error:
                problems.append(Problem.of(name, error))
            releases.append(PublishedRelease(name, index.states[name], record))
    return releases, figures


def _measured(index: Index, store: Store, wheel: ReleaseWheel) -> tuple[Measured, ...]:
    """Return the figures of *wheel*; they are stored, since results are large."""
    file = wheel.proof.throughput
    if file is None:
        return ()
    stored = store.get("speeds", file.sha256, _Figures)
    if stored is None or stored.format != _FORMAT:
        try:
            result = decode_result(index.read(file, LARGEST_EVIDENCE))
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            what = f"{file.name} is not a result that this program reads."
            raise LabError("record-damaged", what, details=[str(error)[:300]]) from error
        stored = _Figures(speeds.figures(result, file.sha256), _FORMAT)
        store.put("speeds", file.sha256, stored)
    if any(figure.wheel != wheel.sha256 for figure in stored.figures):
        raise LabError("record-damaged", f"{file.name} is not about {wheel.name}.")
    return stored.figures


def read_drifts(paths: Sequence[Path], problems: list[Problem]) -> list[Drift]:
    """Return the newest drift of each stack and fork in the documents *paths*."""
    newest: dict[tuple[str, str], Drift] = {}
    for path in sorted(paths):
        try:
            document = read_json(path, Document, limit=LARGEST_DOCUMENT)
        except SparkwrightError as error:
            problems.append(Problem.of(path, error))
            continue
        if document.error or not document.drift:
            problems.append(Problem(path.name, "record-damaged", "It holds no drift."))
        for entry in document.drift:
            key = (entry.of.stack, entry.of.fork)
            if key not in newest or entry.of.day >= newest[key].day:
                newest[key] = entry.of
    return [newest[key] for key in sorted(newest)]


def read_patches(
    context: RunContext, path: Path | None, day: str, problems: list[Problem]
) -> Mapping[str, Sequence[Line]]:
    """Return what each stack carries: from the document at *path*, or as the checkout says."""
    try:
        if path:
            return read_json(path, _Patches, limit=LARGEST_DOCUMENT).stacks
        return {name: _carried(context, name, day) for name in stack_names(context.project.root)}
    except SparkwrightError as error:
        problems.append(Problem.of(path or "patches", error))
        return {}


def _carried(context: RunContext, stack: str, day: str) -> list[Line]:
    project = Project(context.project.root, stack)
    forks = tuple(project.spec.forks)
    own = dataclasses.replace(context, project=project, forks=forks)
    today = datetime.date.fromisoformat(day)
    return [row for fork in forks for row in drift.status(own, fork, today)]


def render(site: SiteContent) -> dict[str, bytes]:
    """Return the pages by their names."""
    figures = [
        *site.figures,
        *((Source(run.day, False), one) for run in site.runs for one in run.measured),
    ]
    last: dict[tuple[str, str], RunRecord] = {}
    for run in site.runs:
        last.setdefault((run.workflow, run.stack), run)
    stacks: dict[str, dict[str, PublishedRelease]] = {
        name: {} for name in sorted(site.patches, reverse=True)
    }
    for release in site.releases or ():
        if not release.state.yanked:
            stacks.setdefault(release.state.stack, {}).setdefault(release.state.channel, release)
    values: dict[str, Any] = {
        "site": site, "pages": PAGES, "version": __version__, "text": text, "metrics": METRICS,
        "histories": speeds.histories(figures), "last": list(last.values()), "stacks": stacks,
        "max_runs": MAX_RUNS,
    }  # fmt: skip
    templates = environment("sparkwright.operate.site")
    return {
        f"{name}.html": templates.get_template(f"{name}.html")
        .render(here=name, title=title, **values)
        .encode()
        for name, title in PAGES.items()
    }
