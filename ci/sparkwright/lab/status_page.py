"""The status page of a lab: releases, speeds, patches, and the last runs of the pipeline."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec.structs import replace

from sparkwright import __version__
from sparkwright.bench.report import view
from sparkwright.bench.results import Result
from sparkwright.cherry_picks import drift as drifts
from sparkwright.cherry_picks.drift import Drift, PatchStatus
from sparkwright.cherry_picks.ledger import PickRecord, load_ledger
from sparkwright.client.index import Index, newest_first
from sparkwright.client.records import (
    LARGEST_EVIDENCE,
    Release,
    ReleaseState,
    ReleaseWheel,
    Time,
    Url,
)
from sparkwright.core.console import console
from sparkwright.core.errors import FileError, SparkwrightError
from sparkwright.core.github import Repository
from sparkwright.core.pages import Table, environment
from sparkwright.core.states import State
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project, stack_names
from sparkwright.gates.core.verdict import worst
from sparkwright.lab.upkeep import read_drift

#: Releases and runs on the page, the newest.
MAX_RELEASES, MAX_RUNS = 40, 20
#: The file of the workflow whose runs are shown.
WORKFLOW = "pipeline.yml"

#: GitHub's conclusion of a run or job → the state; others, and none yet, decide nothing.
CONCLUSIONS: Mapping[str | None, State] = {
    "success": "pass",
    "failure": "fail",
    "timed_out": "fail",
    "startup_failure": "fail",
    "cancelled": "invalid",
    "skipped": "not-run",
}


class Problem(msgspec.Struct, frozen=True):
    """A failure to read *subject*."""

    subject: str
    reference: str
    message: str


class PublishedRelease(msgspec.Struct, frozen=True):
    """A release of an index; without a *record* if that cannot be read."""

    name: str
    state: ReleaseState
    record: Release | None = None

    @property
    def gates(self) -> dict[str, State]:
        """The worst state of each gate over all wheels."""
        wheels = self.record.wheels if self.record else ()
        gates = [gate for wheel in wheels for gate in wheel.proof.gates]
        names = sorted({gate.name for gate in gates})
        return {name: worst(gate.state for gate in gates if gate.name == name) for name in names}


def _state(conclusion: str | None) -> State:
    return CONCLUSIONS.get(conclusion, "inconclusive")


class Job(msgspec.Struct, frozen=True):
    """A job of a run, by GitHub's words."""

    name: str
    conclusion: str | None = None

    @property
    def state(self) -> State:
        """The state of its conclusion."""
        return _state(self.conclusion)


class Run(msgspec.Struct, frozen=True):
    """A run of the workflow, by GitHub's words; *jobs* of its last attempt."""

    id: int
    run_number: int
    display_title: str
    html_url: Url
    created_at: Time
    head_sha: str
    conclusion: str | None = None
    jobs: tuple[Job, ...] = ()

    @property
    def state(self) -> State:
        """The worst state of the run and its jobs: a skipped job is no pass."""
        return worst((_state(self.conclusion), *(job.state for job in self.jobs)))


class _Runs(msgspec.Struct, frozen=True):
    workflow_runs: tuple[Run, ...]


class StatusPage:
    """
    The content of the page; sources that cannot be read are listed on it.

    Attributes:
        day: The day (UTC) on which it is made.
        releases: The newest, newest first; None without an index.
        patches: The patches and picks of each stack.
        pulls: Page of each pull request in the ledgers → the fork, and what `patch watch` saw.
        runs: Newest first; None without a repository.
    """

    def __init__(self, day: datetime.date) -> None:
        self.day = day
        self.problems: list[Problem] = []
        self.index = ""
        self.releases: list[PublishedRelease] | None = None
        self.patches: dict[str, list[PatchStatus]] = {}
        self.pulls: dict[str, tuple[str, PickRecord]] = {}
        self.runs: list[Run] | None = None
        self._speeds: dict[tuple[str, str], list[tuple[str, ...]]] = {}

    @contextmanager
    def _noting(self, subject: str | Path) -> Iterator[None]:
        """List a failure to read *subject* on the page, without the folder of a file."""
        try:
            yield
        except SparkwrightError as error:
            name = Path(subject).name
            message = " ".join((error.what, *error.details[:3])).replace(str(subject), name)
            self.problems.append(Problem(name, error.reference, message))

    def read_releases(self, index: Index) -> None:
        """Read the newest releases of *index*, and the speeds of their wheels."""
        # A folder is published with the page in a folder below it.
        self.index = url if (url := index.url).startswith("http") else "../"
        self.releases = []
        with console.progress("releases", MAX_RELEASES) as progress:
            for count, name in enumerate(newest_first(index.states)[:MAX_RELEASES]):
                progress.update(count, name)
                record = None
                with self._noting(name):
                    record = index.release(name)
                    for wheel in record.wheels:
                        self._read_speeds(index, name, wheel)
                self.releases.append(PublishedRelease(name, index.states[name], record))

    def _read_speeds(self, index: Index, release: str, wheel: ReleaseWheel) -> None:
        """Read the speeds of *wheel* from its throughput result, if it has one."""
        file = wheel.proof.throughput
        if file is None:
            return
        try:
            result = msgspec.json.decode(index.read(file, LARGEST_EVIDENCE), type=Result)
        except (ValueError, RecursionError) as error:
            what = f"{file.name} is not a result."
            raise FileError("file-invalid", what, details=[str(error)[:300]]) from error
        if result.candidate.sha256 != wheel.sha256:
            raise FileError("file-invalid", f"{file.name} is not about {wheel.name}.")
        key = (result.recipe or result.model, result.host.get("gpu", "unknown"))
        shown = view.figures({f"{release} {wheel.sha256[:12]}": result})
        self._speeds.setdefault(key, []).extend(shown.rows)

    @property
    def speeds(self) -> list[tuple[str, str, Table]]:
        """Recipe and kind of GPU, each with a table of its speeds, the newest release first."""
        tables = []
        for (recipe, gpu), rows in sorted(self._speeds.items()):
            by_figure = sorted(rows, key=lambda row: row[:2])
            tables.append((recipe, gpu, replace(view.figures({}), title="Speeds", rows=by_figure)))
        return tables

    def read_patches(self, context: RunContext, paths: Sequence[Path]) -> None:
        """
        Read what each stack carries, with the state of each patch by the newest of the reports at
        *paths*; see `read_drift`.
        """
        reports: list[Drift] = []
        for path in paths:
            with self._noting(path):
                reports += read_drift(path)
        reports.sort(key=lambda report: report.day)
        newest = {(report.stack, report.fork): report for report in reports}
        for stack in reversed(stack_names(context.project.root)):
            with self._noting(stack):
                project = Project(context.project.root, stack)
                own = dataclasses.replace(context, project=project)
                for fork in project.spec.forks:
                    ledger = load_ledger(project.root, fork)
                    pulls = {ledger.page(each.number): each for each in ledger.records}
                    self.pulls |= {page: (fork, pull) for page, pull in pulls.items()}
                self.patches[stack] = [
                    line
                    for fork in project.spec.forks
                    for line in drifts.status(own, fork, self.day, newest.get((stack, fork)))
                ]

    def read_runs(self, repository: Repository) -> None:
        """
        Read the last runs of the pipeline from GitHub.

        https://docs.github.com/en/rest/actions/workflow-runs
        """
        with self._noting(WORKFLOW):
            path, what = f"/actions/workflows/{WORKFLOW}/runs?per_page={MAX_RUNS}", "the runs"
            self.runs = []
            for run in repository.request("GET", path, _Runs, what).workflow_runs:
                path, what = f"/actions/runs/{run.id}/jobs", f"the jobs of run {run.id}"
                jobs = tuple(repository.pages(path, Job, what, key="jobs"))
                self.runs.append(replace(run, jobs=jobs))

    def render(self) -> str:
        """Return the page."""
        template = environment("sparkwright.lab").get_template("status.html")
        return template.render(page=self, version=__version__)
