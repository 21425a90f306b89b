"""What the throughput gate writes down: legs, cells, and the result with its verdict, for the journal, the report and publishing."""

from __future__ import annotations

from typing import Literal

import msgspec

from sparkwright.bench.load.load_spec import LoadResult
from sparkwright.bench.machine.state_checks import Snapshot
from sparkwright.bench.model.decode_bytes import Bandwidth
from sparkwright.bench.records import Metric, Reason, Side
from sparkwright.gates.core.verdict import State

FORMAT = 1

Kind = Literal["gate", "bench", "calibration", "verify"]

class Speculation(msgspec.Struct, frozen=True):
    """
    What the server's counters say of speculative decoding in a leg.

    Attributes:
        steps: Verification steps per second, over all requests.
        length: Tokens that a step gives on average: one, and the drafts that were accepted.
        acceptance: Share of the drafted tokens that were accepted.
    """

    steps: float
    length: float
    acceptance: float


class Measurement(msgspec.Struct, frozen=True):
    """
    One run of the load generator against one launch of one wheel.

    Attributes:
        cell: `CellResult.name`.
        block: From 0. *launch*: of that side, from 0 on. *quad*, *position*: where in A B B A it stands; both 0 without a baseline.
        attempt: From 0; more where an earlier leg at this place was discarded.
        began: Seconds since 1970.
        run: What was measured; None where nothing was.
        before, after: The machine's state around it.
        speculation: None where the server does not speculate.
        prefix_hits: Share of prompt tokens that a prefix cache answered; None where the server does not count.
        roofline: Share of the memory's bandwidth that the measured rate needs (1.0 is the ceiling); None where not known.
        reasons: Why it does not count; empty for a leg that does.
        discarded: Whether it is measured again because of a passing state of the machine; such a leg says nothing of a wheel.
    """

    cell: str
    block: int
    launch: int
    side: Side
    quad: int
    position: int
    attempt: int
    began: float
    run: LoadResult | None = None
    before: Snapshot | None = None
    after: Snapshot | None = None
    speculation: Speculation | None = None
    prefix_hits: float | None = None
    roofline: float | None = None
    reasons: tuple[Reason, ...] = ()
    discarded: bool = False

    @property
    def counts(self) -> bool:
        """Does it count as a measurement?"""
        return self.run is not None and not self.reasons and not self.discarded


class Series(msgspec.Struct, frozen=True):
    """
    One metric of one cell, block by block.

    Attributes:
        metric: See `METRICS`. *primary*: whether it decides.
        differences: One number for each block: ln(candidate / baseline), positive where the candidate is worse; empty without a baseline.
        pass_evidence, fail_evidence, sign_evidence: e-values after each block; empty without a baseline.
        state: ``pass``, ``fail``, ``inconclusive`` or ``not-run``.
        sigma: The calibrated spread of a block's difference; None where it was not calibrated, and the signs decide.
        baseline, candidate: Median over the blocks, in the unit of the record (s or tokens/s); None where not measured.
        low, high: 95 % interval of the ratio candidate / baseline (``bench``: of the value itself); None where too few blocks are there.
        launches: Of the candidate, behind these figures.
    """

    metric: Metric
    primary: bool
    differences: tuple[float, ...] = ()
    pass_evidence: tuple[float, ...] = ()
    fail_evidence: tuple[float, ...] = ()
    sign_evidence: tuple[float, ...] = ()
    state: State = "not-run"
    sigma: float | None = None
    baseline: float | None = None
    candidate: float | None = None
    low: float | None = None
    high: float | None = None
    launches: int = 0


class CellResult(msgspec.Struct, frozen=True):
    """
    A workload and what came of it.

    Attributes:
        name: ``1024/1024 c8``: tokens of prompt and answer, and concurrency.
        prompt, answer, concurrency: As ordered.
        series: By metric.
        step_bytes: Bytes that a decode step reads for one request at this length; None where the checkpoint is not known.
        ceiling: Tokens per second of one request that memory allows; None where not known.
    """

    name: str
    prompt: int
    answer: int
    concurrency: int
    series: tuple[Series, ...]
    step_bytes: float | None = None
    ceiling: float | None = None


class Subject(msgspec.Struct, frozen=True):
    """
    A wheel that was measured, or a server of which no wheel is known.

    Attributes:
        label: For people: ``vllm 0.33.0+spark.202611``, ``stock vllm 0.33.0``, or a URL.
        wheel: The file's name. *sha256*: of the wheel; both empty where no wheel is known.
        version: Of vLLM, as the server says.
        stack: The stack that it was built from; empty for a stock wheel.
    """

    label: str
    wheel: str = ""
    sha256: str = ""
    version: str = ""
    stack: str = ""


class Calibrated(msgspec.Struct, frozen=True):
    """
    A/A blocks of this host, for one metric of one cell.

    Attributes:
        differences: Of the blocks, oldest first. *days*: when each was measured (``2026-11-22``).
        sigma: The upper bound of their spread that the gate uses.
        in_band: Whether the newest blocks agree with the older ones.
    """

    cell: str
    metric: Metric
    differences: tuple[float, ...]
    days: tuple[str, ...]
    sigma: float
    in_band: bool


class Result(msgspec.Struct, frozen=True):
    """
    A gate, a bench, a calibration or a verification, whole.

    Attributes:
        kind: Which of them. *format*: of this record.
        state: The verdict; ``not-run`` for a bench, which judges nothing. *says*: it in a sentence.
        culprits: Cells that e-BH names as slower, by name and metric (``1024/1024 c8: time per token``).
        recipe: Its name, or empty. *model*: its name. *quantization*: as the recipe says (``NVFP4``, ``AWQ``), or empty.
        host: Facts of the machine (`sparkwright.gates.core.ladder.machine_facts`).
        margin: The ratio that still passes (0.02 is 2 %). *alpha*: the error rate. *blocks*: the most that are measured. *quads*: in each.
        generator: Name and version. *qualified*: its accuracy on this host, as sentences.
        bandwidth: Of the memory, measured in the same session; None where it was not.
        began, seconds: When, and how long.
        resumed: How often it was continued after an interruption.
        legs: Every leg, those that do not count included.
    """

    kind: Kind
    state: State
    says: str
    candidate: Subject
    cells: tuple[CellResult, ...]
    legs: tuple[Measurement, ...]
    baseline: Subject | None = None
    culprits: tuple[str, ...] = ()
    recipe: str = ""
    model: str = ""
    quantization: str = ""
    stack: str = ""
    host: dict[str, str] = {}
    margin: float = 0.0
    alpha: float = 0.0
    blocks: int = 0
    quads: int = 0
    generator: str = ""
    qualified: tuple[str, ...] = ()
    bandwidth: Bandwidth | None = None
    calibration: tuple[Calibrated, ...] = ()
    policy: str = ""
    began: float = 0.0
    seconds: float = 0.0
    resumed: int = 0
    format: int = FORMAT
