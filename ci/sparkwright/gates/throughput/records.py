"""The records of the throughput gate: its policy, measurements, series, and the result."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sparkwright.bench.load.vllm_bench import LoadResult
from sparkwright.bench.machine.state_checks import Snapshot
from sparkwright.bench.model.decode_bytes import Bandwidth
from sparkwright.bench.records import Metric, Reason, Side
from sparkwright.bench.statistics.eprocess import Bounds
from sparkwright.gates.core.verdict import State

FORMAT = 2

Kind = Literal["gate", "bench", "calibration", "verify"]
Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(gt=0, lt=1)]
Seconds = Annotated[float, Meta(gt=0, le=1e6)]


class ThroughputPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/throughput.yaml``, which gives the source of each number.

    Attributes:
        bounds: By metric: the margin that a pass excludes, and the slowdown that never fails.
        alpha: Probability of each kind of wrong verdict, over all gates of one wheel together.
        min_blocks, max_blocks: Blocks before a decision, and after which there is none.
        quads: A B B A rounds of each cell in a block whose two servers run at the same time.
        launches: Of a bench or a verification, which compare nothing.
        workloads: The set of ``workloads.yaml`` that decides.
        warmups: Requests before each measurement that do not count.
        prefix_hits: Share of prompt tokens from a prefix cache that makes a measurement invalid.
        cooldown_retries: Cool-downs before a discarded measurement is repeated.
        timeout_s: Of one measurement.
        ceiling_min_bytes: Bytes of a decode step below which caches may answer for memory.
        calibration_blocks: A/A blocks that a calibration measures.
        half_life_days: Age at which an A/A block weighs half.
        calibration_weight: Fresh blocks that all A/A blocks are worth together, at most.
        published_tolerance: Share by which a published figure may be off and still hold.
    """

    bounds: dict[Metric, Bounds]
    alpha: Annotated[float, Meta(gt=0, lt=0.5)]
    min_blocks: Count
    max_blocks: Count
    quads: Count
    launches: Count
    workloads: str
    warmups: Annotated[int, Meta(ge=0)]
    prefix_hits: Share
    cooldown_retries: Count
    timeout_s: Seconds
    ceiling_min_bytes: Annotated[float, Meta(ge=0)]
    calibration_blocks: Count
    half_life_days: Seconds
    calibration_weight: Annotated[float, Meta(ge=1)]
    published_tolerance: Share

    def __post_init__(self) -> None:
        if self.min_blocks > self.max_blocks or len(self.bounds) != 3:
            raise ValueError("min_blocks is at most max_blocks, and each metric has its bounds")


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


#: Number of the A/A block of a gate, which is measured first: baseline against control.
CONTROL_BLOCK = -1


class Measurement(msgspec.Struct, frozen=True):
    """
    One run of the load generator against one launch of one wheel.

    Attributes:
        cell: `CellResult.name`.
        block: From 0; `CONTROL_BLOCK` of the A/A block. *launch*: of that side, from 0.
        quad, position: Place in A B B A; both 0 without a baseline.
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
        metric: See `sparkwright.bench.records.METRICS`. *primary*: whether it decides.
        differences: ln(candidate / baseline) of each block, positive where the candidate is worse;
            empty without a baseline.
        pass_evidence, fail_evidence: e-values after each block, of a deciding series.
        state: ``pass``, ``fail``, ``inconclusive`` or ``not-run``.
        sigma: Spread of an A/A block's difference; None without A/A blocks.
        baseline, candidate: Median over the blocks, in s or tokens/s; None if not measured.
        low, high: 95 % interval of the ratio candidate / baseline (``bench``: of the value itself);
            None with too few blocks.
        launches: Of the candidate.
        margin, tolerated: Its bounds, as shares; 0 if it does not decide.
        conclusion: What was excluded, in words.
    """

    metric: Metric
    primary: bool
    differences: tuple[float, ...] = ()
    pass_evidence: tuple[float, ...] = ()
    fail_evidence: tuple[float, ...] = ()
    state: State = "not-run"
    sigma: float | None = None
    baseline: float | None = None
    candidate: float | None = None
    low: float | None = None
    high: float | None = None
    launches: int = 0
    margin: float = 0.0
    tolerated: float = 0.0
    conclusion: str = ""


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
    A/A blocks of this host, for one deciding metric of one cell.

    Attributes:
        differences: Of the blocks, oldest first. *days*: when each was measured (``2026-11-22``).
        sigma: Their spread, weighted by age.
        in_band: Whether the A/A block of this gate agrees with the earlier ones; otherwise it alone
            counts.
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
        margin: The widest margin of a deciding series. *alpha*: the error rate that this gate
            spends. *attempt*: the number of this gate of the wheel, from 1.
        blocks: The most that are measured. *quads*: in each.
        generator: Name and version. *qualified*: its accuracy on this host.
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
    attempt: int = 1
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
