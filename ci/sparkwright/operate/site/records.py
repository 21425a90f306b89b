"""
What a night leaves behind: one record for each run of a workflow, whatever came of it, in ``nights/<day>-<stack>-<run>.json``.

A record is written once and never again. It is not signed: it says what a run saw, and names by sha256 the files that show it.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

import msgspec

from sparkwright.bench.records import Metric
from sparkwright.core.states import State
from sparkwright.gates.core.verdict import worst
from sparkwright.release.manifest.records import Line, Name, Sha256

FORMAT = 1

#: UTC, to the second, as in the manifest; empty where nobody knows.
Moment = Annotated[str, msgspec.Meta(pattern=r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)?$")]
Commit = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{40})?$")]
#: An address that people follow: a page of ours links nowhere else.
Page = Annotated[str, msgspec.Meta(max_length=500, pattern=r"^(https?://[!-;=?-~]+)?$")]
#: Seconds, or tokens per second: whatever is measured lies in here, and what is drawn has to.
Amount = Annotated[float, msgspec.Meta(gt=1e-9, lt=1e9)]
#: What a file holds: ``verdicts`` and ``throughput`` as `sparkwright gate` writes them, a document of ``--json``, or something else.
Kind = Literal["verdicts", "throughput", "document", "other"]


class Stage(msgspec.Struct, frozen=True):
    """
    A stage of a run.

    Attributes:
        name: The verb, or the job (``build``, ``gate``).
        state: As of a verdict: ``invalid`` for one that was cancelled, ``not-run`` for one that was skipped.
        reference: Why it is not a pass (``arch-mismatch``); empty for a pass, and where nobody said.
        says: The failure in a sentence, where the verb's ``--json`` gave one.
    """

    name: Name
    state: State
    reference: Line = ""
    says: Line = ""


class File(msgspec.Struct, frozen=True):
    """
    A file that a run made; it stays where the run keeps its artifacts.

    Attributes:
        sha256: Empty for one that is not there or cannot be read, and *says* tells why.
        state: What its verdicts come to; ``not-run`` for a file that holds none.
        wheel: sha256 of the wheel that it is about; empty where it says nothing of one.
    """

    name: Name
    kind: Kind
    sha256: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?$")]
    size: int
    state: State = "not-run"
    wheel: Line = ""
    says: Line = ""


class Measured(msgspec.Struct, frozen=True):
    """
    One metric of one cell, as one session measured it on one wheel.

    Attributes:
        recipe: Its name; the model's where there is no recipe. *gpu*: of the machine.
        value: Median over *blocks* of launches, in the unit of the record (s, or tokens/s).
        low, high: 95 % interval of it over the blocks; None with fewer than three.
        launches: Starts of the server behind it.
        wheel: sha256 of the wheel; empty where none is known. *source*: sha256 of the file of the measurement.
        at: When it was measured; empty where the file does not say.
    """

    recipe: Line
    gpu: Line
    cell: Line
    metric: Metric
    value: Amount
    low: Amount | None
    high: Amount | None
    blocks: int
    launches: int
    wheel: Line
    source: Sha256
    at: Moment = ""


class Night(msgspec.Struct, frozen=True):
    """
    One run of a workflow.

    Attributes:
        workflow: ``pipeline``, ``drift``, … *run*: its number there, with ``.2`` for the second attempt. *url*: where people see it.
        stack: The one that it worked on. *commit*: of this repository; empty where it is not known.
        began, ended: UTC; *began* is empty where the run did not tell.
        stages: In their order. *files*: what it made, by digest. *measured*: what its measurements say.
    """

    workflow: Line
    run: Name
    stack: Name
    ended: Moment
    stages: Annotated[tuple[Stage, ...], msgspec.Meta(max_length=100)]
    url: Page = ""
    commit: Commit = ""
    began: Moment = ""
    files: Annotated[tuple[File, ...], msgspec.Meta(max_length=200)] = ()
    measured: Annotated[tuple[Measured, ...], msgspec.Meta(max_length=1000)] = ()
    format: int = FORMAT

    def __post_init__(self) -> None:
        names = [one.name for one in self.stages]
        if not names or len(set(names)) != len(names):
            raise ValueError("a night has stages, each once")
        if not self.ended:
            raise ValueError("a night has an end")
        for moment in (self.began, self.ended):
            if moment:
                datetime.datetime.fromisoformat(moment)
        if self.began > self.ended:
            raise ValueError(f"it ended ({self.ended}) before it began ({self.began})")

    @property
    def state(self) -> State:
        """The worst state of its stages."""
        return worst(one.state for one in self.stages)

    @property
    def day(self) -> str:
        """The day (UTC) that it counts as: that of its beginning, else of its end."""
        return (self.began or self.ended)[:10]

    @property
    def filename(self) -> str:
        return f"{self.day}-{self.stack}-{self.run}.json"


def schema() -> dict[str, Any]:
    """Return the JSON schema of a `Night`."""
    made = msgspec.json.schema(Night)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "sparkwright lab record",
        **made,
    }
