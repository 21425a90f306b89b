"""
The record of a workflow run, whatever its outcome: ``<day>-<stack>-<run>.json``.

A record is written once and never changed. It is not signed; it names files by their hashes.
"""

from __future__ import annotations

import datetime
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from sparkwright.bench.records import Metric
from sparkwright.client.records import Line, Name, Sha256, line
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.files import read_json
from sparkwright.core.states import State
from sparkwright.core.store import flush, translate_disk_full
from sparkwright.gates.core.verdict import worst
from sparkwright.operate.errors import LabError

FORMAT = 1

#: Bytes of the largest record; one with the figures of a large gate has 20 kB.
LARGEST = 4 << 20

#: UTC, to the second; empty if unknown.
Moment = Annotated[str, msgspec.Meta(pattern=r"\A(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)?\Z")]
Commit = Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{40})?\Z")]
#: The address of a run.
Page = Annotated[str, msgspec.Meta(max_length=500, pattern=r"\A(https?://[!-;=?-~]+)?\Z")]
Amount = Annotated[float, msgspec.Meta(gt=0)]


class Problem(msgspec.Struct, frozen=True):
    """What could not be read: its name, the reference of the failure, and a sentence."""

    name: str
    reference: str
    message: str

    @classmethod
    def of(cls, subject: Path | str, error: SparkwrightError) -> Problem:
        """Return *error* of the file or release *subject*, without the folder of a file."""
        name = Path(subject).name
        message = "; ".join((error.what, *error.details[:3])).replace(str(subject), name)
        return cls(line(name), error.reference, line(message))


class Stage(msgspec.Struct, frozen=True):
    """
    A stage of a run.

    Attributes:
        name: The command, or the job (``build``, ``gate``).
        state: ``invalid`` if it was cancelled, ``not-run`` if it was skipped.
        reference: Why it is not a pass; empty if that is unknown. *message*: the same in a sentence.
    """

    name: Name
    state: State
    reference: Line = ""
    message: Line = ""


class RunFile(msgspec.Struct, frozen=True):
    """
    A file that a run made, and that stays in its artifacts.

    Attributes:
        sha256: Empty if it could not be read; *message* says why.
        state: Of its verdicts together. *wheel*: the sha256 of the wheel that it is about.
    """

    name: Name
    kind: Literal["verdicts", "throughput", "document", "other"]
    sha256: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{64})?\Z")]
    size: int
    state: State = "not-run"
    wheel: Line = ""
    message: Line = ""


class Measured(msgspec.Struct, frozen=True):
    """
    One metric of one cell, as one session measured it of one wheel.

    Attributes:
        recipe: Its name, or the model's. *gpu*: of the machine.
        value: Median over *blocks*, in the unit of the record (s, or tokens/s).
        low, high: Its 95 % interval; None with fewer than three blocks.
        wheel: The sha256 of the wheel, or empty. *source*: of the file of the result.
        at: When it was measured.
    """

    recipe: Line
    gpu: Line
    cell: Line
    metric: Metric
    value: Amount
    low: Amount | None
    high: Amount | None
    blocks: int
    wheel: Line
    source: Sha256
    at: Moment = ""


class RunRecord(msgspec.Struct, frozen=True):
    """
    One run of a workflow.

    Attributes:
        run: Its number, with ``.2`` for the second attempt. *url*: its page.
        commit: Of this repository; empty if unknown.
        began: Empty if unknown.
        files: What it made. *measured*: the figures in them.
    """

    workflow: Line
    run: Name
    stack: Name
    ended: Moment
    stages: Annotated[tuple[Stage, ...], msgspec.Meta(min_length=1, max_length=100)]
    url: Page = ""
    commit: Commit = ""
    began: Moment = ""
    files: Annotated[tuple[RunFile, ...], msgspec.Meta(max_length=200)] = ()
    measured: Annotated[tuple[Measured, ...], msgspec.Meta(max_length=1000)] = ()
    format: int = FORMAT

    def __post_init__(self) -> None:
        if len({stage.name for stage in self.stages}) < len(self.stages):
            raise ValueError("a stage is there twice")
        if not self.ended or self.began > self.ended:
            raise ValueError(f"it ended ({self.ended or 'never'}) before it began ({self.began})")
        for moment in filter(None, (self.began, self.ended)):
            datetime.datetime.fromisoformat(moment)

    @property
    def state(self) -> State:
        """The worst state of its stages."""
        return worst(stage.state for stage in self.stages)

    @property
    def day(self) -> str:
        """The day (UTC) of its beginning, else of its end."""
        return (self.began or self.ended)[:10]

    @property
    def filename(self) -> str:
        """The name of its file."""
        return f"{self.day}-{self.stack}-{self.run}.json"


def write(folder: Path, record: RunRecord) -> Path:
    """
    Write *record* to *folder*, whole or not at all, and return its file; again changes nothing.

    Raises:
        night-taken: Another record has its name. disk-full: There is no room.
    """
    data = msgspec.json.format(msgspec.json.encode(record)) + b"\n"
    path = folder / record.filename
    with translate_disk_full(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".run.") as stream:
            stream.write(data)
            flush(Path(stream.name))
            Path(stream.name).chmod(0o644)
            try:
                # Unlike a rename, a link never replaces what another run wrote.
                os.link(stream.name, path)
                flush(folder)
            except FileExistsError as error:
                if path.is_symlink() or not path.is_file() or path.read_bytes() != data:
                    details = [f"file: {path}", f"run:  {record.workflow} {record.run}"]
                    what = f"There is another record {record.filename}."
                    raise LabError("night-taken", what, details=details) from error
    return path


def read(folder: Path) -> tuple[list[RunRecord], list[Problem]]:
    """Return the records in *folder*, oldest first, and the files that are not records."""
    records, problems = [], []
    failure = partial(LabError, "record-damaged")
    for path in sorted(folder.glob("[!.]*.json")):
        try:
            record = read_json(path, RunRecord, limit=LARGEST, failure=failure)
            if record.format != FORMAT or record.filename != path.name or path.is_symlink():
                raise failure(
                    f"It is of format {record.format}, and calls itself {record.filename}."
                )
            records.append(record)
        except LabError as error:
            problems.append(Problem.of(path, error))
    return sorted(records, key=lambda record: (record.began or record.ended, record.run)), problems
