"""From what is given to a folder of pages: read, draw, write what changed."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sparkwright.cherry_picks import drift
from sparkwright.core.console import console
from sparkwright.core.errors import SparkwrightError
from sparkwright.forks.context import RunContext, StandaloneContext
from sparkwright.forks.stack import Project, stack_names
from sparkwright.operate.site import (
    debt,
    drifts,
    history,
    nights,
    pages,
    policy,
    problems,
    releases,
    trends,
    writing,
)
from sparkwright.operate.site.drifts import Carried
from sparkwright.operate.site.found import Found
from sparkwright.operate.site.problems import Problem
from sparkwright.operate.site.releases import Books
from sparkwright.operate.site.writing import Written
from sparkwright.release.client.install import Wish
from sparkwright.release.errors import ReleaseError


class Asked(msgspec.Struct, frozen=True):
    """
    What the site is made from.

    Attributes:
        index: The index and whose signature counts; *wanted*: whether it has to be there.
        nights: Folder of the records of nights; None for none. *drift*: documents of ``drift --json``.
        status: Document of ``status --json``; None to ask here.
        day: Of which it tells (``2026-11-22``).
    """

    index: Wish
    wanted: bool
    day: str
    nights: Path | None = None
    drift: tuple[Path, ...] = ()
    status: Path | None = None


def read(context: RunContext, asked: Asked) -> Found:
    """
    Return everything that the site tells of.

    Raises:
        SparkwrightError: The index is not there, or its manifest is not to be believed. file-invalid: The policy cannot be read.
    """
    judged = policy.load(context.project.root)
    books = _books(context, asked)
    with console.step("nights, drift and history"):
        recorded = nights.read(asked.nights) if asked.nights else nights.Read()
        drifted = drifts.read(asked.drift)
        carried, wrong = _status(context, asked)
        owed = debt.history(context.project.root)
        shown = books.releases if books else ()
        told = history.of(shown, recorded.nights, judged.changes, pages.release_name, nights.places(recorded.nights))
    link = books.manifest.url if books else ""
    known = tuple(stack_names(context.project.root))
    return Found(
        asked.day, judged, link and link.rstrip("/") + "/", books, recorded, drifted, owed, carried, told, known, tuple(wrong)
    )  # fmt: skip


def _books(context: RunContext, asked: Asked) -> Books | None:
    try:
        with console.step("the index, its records and measurements"):
            return releases.read(StandaloneContext(context.store, context.offline, context.mirrors), asked.index)
    except ReleaseError as error:
        if error.reference != "index-missing":
            raise
        if asked.wanted:
            raise
        return None


def _status(context: RunContext, asked: Asked) -> tuple[Carried | None, list[Problem]]:
    """Return what the stacks carry: from the document, or as the store and the checkout tell."""
    try:
        if asked.status:
            return drifts.status(asked.status), []
        names = stack_names(context.project.root)
        made = {name: tuple(_lines(context, name, asked.day)) for name in names}
    except SparkwrightError as error:
        named = asked.status if error.reference == "record-damaged" else None
        return None, [problems.of(named.name if named else "status", error)]
    return Carried(made), []


def _lines(context: RunContext, stack: str, day: str) -> Iterator[drift.Line]:
    project = Project(context.project.root, stack)
    one = dataclasses.replace(context, project=project, forks=tuple(project.spec.forks))
    for fork in project.spec.forks:
        yield from drift.status(one, fork, datetime.date.fromisoformat(day))


def make(context: RunContext, found: Found, folder: Path) -> Written:
    """Write the site about *found* to *folder*; what did not change stays as it is. Raises as `writing.write`."""
    files: dict[str, bytes] = {pages.STYLE: pages.style()}
    total = len(found.releases) + len(found.histories)
    with console.progress("making pages and figures", total) as progress:
        done = itertools.count(1)

        def step() -> None:
            progress.update(min(next(done), total))

        for part in (pages.releases(found), trends.speeds(found, step), trends.debt(found), trends.drift(found), trends.nights(found)):
            for name, data in part:
                files[name] = data
                step()
        files["index.html"] = pages.overview(found)
    return writing.write(context.store, folder, files, pages.STYLE)
