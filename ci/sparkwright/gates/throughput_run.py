"""
The policy and the run of an experiment: launches and measurements in A B B A order, repeated where
the machine was disturbed, until there is a decision.

A gate measures an A/A block first (baseline against a control of the same wheel), then blocks of
baseline against candidate. Every block has fresh launches, the unit of replication. Before a side's
turn the run waits for a random time, and each turn has the cells in another order, so that nothing
periodic keeps step with a side. Every launch is on the disk before the next begins, so that hours
outlive a kill or a full disk.

The series that decide have one paired difference per block, metric and cell, which is held against
the machine's noise in A/A blocks.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Annotated

import msgspec
import numpy as np
from msgspec.structs import replace

from sparkwright.bench.machine import monitor
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.records import METRICS, Count, Metric, Reason, Share, Side
from sparkwright.bench.results import (
    CONTROL_BLOCK,
    CellResult,
    Measurement,
    Series,
    block_medians,
)
from sparkwright.bench.server.client import ServerInvalid
from sparkwright.bench.server.server_process import Server
from sparkwright.bench.statistics import (
    MIN_INTERVAL,
    Bounds,
    Decision,
    DecisionRule,
    MetricSeries,
    SeriesDecision,
    attempt_alpha,
    decide,
    mean_interval,
)
from sparkwright.bench.vllm_bench import LoadError, LoadGenerator, LoadResult, LoadSpec
from sparkwright.core.console import console
from sparkwright.core.states import State
from sparkwright.core.store import append_line, read_lines
from sparkwright.gates.core.ladder import BUDGET_SPENT
from sparkwright.gates.core.server_under_test import CACHE_HITS, CACHE_QUERIES, DRAFTS
from sparkwright.gates.core.verdict import Check, worst_check

#: Reasons for which a measurement does not count → what each means, and what to do.
REASONS: Mapping[str, str] = {
    "answer-other": (
        "Answers are shorter or longer than ordered, or ended before their "
        "length: the server ended them early, or it does not know ignore_eos."
    ),
    "prompt-other": "Prompts have another number of tokens than ordered, so another workload than "
    "the named one was measured.",
    "request-failed": (
        "A request failed, or its stream broke; a rate over the others would "
        "be too good. Look at the server's log."
    ),
    "usage-mismatch": "The server's metrics do not agree with the token counts of its answers, so "
    "the tok/s is not known.",
    "prefix-cached": "A prefix cache answered prompts; elsewhere that made the first token come up "
    "to 49 times sooner (vllm #54227). Serve with --no-enable-prefix-caching.",
    "stream-merged": (
        "Tokens arrived together, as on a machine that is too busy to send or "
        "read them one by one, so their times are not the wheel's. The "
        "measurement is repeated."
    ),
    "times-impossible": (
        "A time is not above zero, or the first token came after the last: a "
        "clock was set, or the generator has a fault."
    ),
    "counters-missing": "The server does not give the metrics that the check needs, or they go "
    "backwards, as after a restart.",
}
#: Reasons that are repeated: a single failed request says little, a repeated one ends the gate.
REPEATED = frozenset({"request-failed", "stream-merged"})
#: States of the machine that the load of the measurement itself may cause; those are its result.
OWN_LOAD = frozenset({"throttled", "too-hot"})
#: Seconds after its last answer within which the end of a server's process is noticed.
NOTICED_S = 3.0
#: Seconds within which a server answers with its counters.
COUNTERS_TIMEOUT_S = 30.0
#: Seconds after which a server has counted the requests that it answered.
SETTLE_S = 0.5
#: Seconds that every decode step exceeds: a kernel launch takes microseconds, a step has dozens.
SHORTEST_STEP_S = 50e-6

_FINISHED = "vllm:request_success_total"
_GIVEN = "vllm:generation_tokens_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
#: Seconds that every time of a request exceeds.
SHORTEST_S = 1e-9


class ThroughputPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/throughput.yaml``, which gives the source of each number.

    Attributes:
        bounds: By metric: the margin that a pass excludes, and the slowdown that never fails.
        alpha: Probability of each kind of wrong verdict, over all gates of one wheel together.
        min_blocks, max_blocks: Blocks before a decision, and after which there is none.
        workloads: The set of ``workloads.yaml`` that decides.
        generator: Stack whose official wheel of vLLM holds the load generator.
        warmups: Requests before each measurement that do not count. Without any, the generator
            would send one of its own, whose single token `invalid_reasons` takes for a fault.
        prefix_hits: Share of prompt tokens from a prefix cache that makes a measurement invalid.
        cooldown_retries: Cool-downs before a discarded measurement is repeated.
        timeout_s: Of one measurement.
        lag: Longest wait before a side's turn, in lengths of the turn before.
        own_error: A measurement is long enough when its own standard error is at most this share of
            the margin.
        longest_s: Seconds of a load that has more than the fewest requests.
        fewest_requests, most_requests: Of a load whose cell states none.
        slim_share: Of the gain that the bytes of a slimmer copy predict for one request, the share
            that has to be there.
    """

    bounds: Annotated[dict[Metric, Bounds], msgspec.Meta(min_length=len(METRICS))]
    alpha: Annotated[float, msgspec.Meta(gt=0, lt=0.5)]
    min_blocks: Count
    max_blocks: Count
    workloads: str
    generator: str
    warmups: Count
    prefix_hits: Share
    cooldown_retries: Count
    timeout_s: Seconds
    lag: Annotated[float, msgspec.Meta(ge=0, le=4)]
    own_error: Share
    longest_s: Seconds
    fewest_requests: Count
    most_requests: Count
    slim_share: Share

    def requests(self, cell: WorkloadCell, needed: float = 0.0) -> int:
        """Return the requests of a load of *cell*: those *needed*, in whole rounds."""
        if cell.requests:
            return cell.requests
        least = max(self.fewest_requests, cell.concurrency, min(needed, self.most_requests))
        return cell.concurrency * math.ceil(least / cell.concurrency)

    def needed(
        self, loads: Sequence[LoadResult], metrics: Sequence[Metric], *, paired: bool
    ) -> float:
        """
        Return how many requests a load of a cell needs, so that its standard error of each of
        *metrics* is small enough (`own_error`).

        The spread of single requests is that in *loads*, which all have the same number of them.
        The standard error of a mean is that spread divided by the square root of the number of
        requests; that of a median is 1.25 times as large.

        Args:
            paired: Whether all loads have the same prompts. What a prompt changes is then the same
                in each load and on both sides, and is left out of the spread.
        """
        most, sets = 0.0, len(loads) - paired
        for metric in metrics:
            time = metric if metric in ("tpot", "ttft") else "latency"
            times = [[getattr(request, time) for request in load.requests] for load in loads]
            logarithms = np.log(np.maximum(times, SHORTEST_S))
            rest = logarithms - logarithms.mean(axis=1, keepdims=True)
            if paired:
                rest -= rest.mean(axis=0)
            freedom = max(1, sets * (rest.shape[1] - 1))
            target = self.own_error * math.log1p(self.bounds[metric].margin) / 1.25
            most = max(most, float((rest**2).sum()) / freedom / target**2)
        return min(most, self.longest_s * len(times[0]) / max(load.seconds for load in loads))


class RunSpec(msgspec.Struct, frozen=True):
    """
    What is measured, and with what.

    Attributes:
        contract: Profiles a server at the end of its launch, and returns the checks of the recipe's
            kernel contract.
        tokenizer: Folder of the model that is served.
        texts: File of real prompts of each cell that has them, by its name.
        resident: Whether both servers stay, and take turns in one launch.
        deadline: As of `time.monotonic`; no block begins that would end later.
    """

    cells: tuple[WorkloadCell, ...]
    generator: LoadGenerator
    machine: monitor.MachineMonitor
    policy: ThroughputPolicy
    contract: Callable[[Side, Server], tuple[Check, ...]]
    tokenizer: Path | None = None
    texts: Mapping[str, Path] = {}
    resident: bool = False
    deadline: float = math.inf

    def load(self, server: Server, cell: WorkloadCell, seed: int) -> LoadSpec:
        """Return the load of a measurement of *cell* on *server*."""
        return LoadSpec(
            server.url, server.plan.name, cell.prompt, cell.answer, cell.concurrency,
            cell.requests, self.policy.warmups, seed, self.tokenizer, self.texts.get(cell.name),
            timeout_s=self.policy.timeout_s,
        )  # fmt: skip


class CounterChange(msgspec.Struct, frozen=True):
    """How the server's counters changed in a measurement; *drafts* as in `Measurement`."""

    finished: int
    tokens: int
    hits: float = 0.0
    drafts: float | None = None


def measure(
    run_spec: RunSpec,
    server: Server,
    cell: WorkloadCell,
    blank: Measurement,
    seed: int,
    before: monitor.Snapshot | None = None,
) -> Measurement:
    """
    Return *blank* with the result of a load on *server*, and the reasons if it does not count.

    If the server ended, its reason is the first; `before` is None if it ended before the load.

    Args:
        before: The state of the machine now; None if it is to be seen.
    """
    blank = replace(blank, began=time.time())
    if not server.guard():
        return _ended(server, blank)
    spec = run_spec.load(server, cell, seed)
    client = server.client(deadline=COUNTERS_TIMEOUT_S)
    before = before or run_spec.machine.snapshot()
    started = replace(blank, before=before)
    try:
        counters = client.metrics()
        with console.progress(f"{cell.name}, {blank.side}", 0) as line:
            line.update(0, f"{spec.requests} requests")
            run = run_spec.generator.measure(spec)
        change = counter_change(counters, client.metrics())
        if change and change.tokens != change.finished * spec.output_tokens:
            # The client may have the last token before the server has counted the request.
            time.sleep(SETTLE_S)
            change = counter_change(counters, client.metrics())
    except (LoadError, ServerInvalid) as error:
        time.sleep(NOTICED_S)
        if not server.guard():
            return _ended(server, started)
        return replace(started, reasons=(Reason(error.reason, error.message),))
    after = run_spec.machine.snapshot()
    wrong = invalid_reasons(spec, run, change, run_spec.policy.prefix_hits)
    earlier = {reason.reference for reason in run_spec.machine.disturbances(before, before)}
    disturbed = [
        reason
        for reason in run_spec.machine.disturbances(before, after)
        if reason.reference not in OWN_LOAD or reason.reference in earlier
    ]
    result = replace(
        started, run=run, after=after,
        drafts=change.drafts if change else None,
        reasons=(*wrong, *disturbed),
        discarded=bool(wrong or disturbed) and {each.reference for each in wrong} <= REPEATED,
    )  # fmt: skip
    if any(request.error for request in run.requests):
        time.sleep(NOTICED_S)
    return result if server.guard() else _ended(server, result)


def _ended(server: Server, measurement: Measurement) -> Measurement:
    """Return *measurement* of a server that ended."""
    reasons = (Reason(server.reason, server.failure), *measurement.reasons)
    return replace(measurement, reasons=reasons, discarded=measurement.side != "candidate")


def counter_change(before: Mapping[str, float], after: Mapping[str, float]) -> CounterChange | None:
    """
    Return how the server's counters changed; None if they are missing or went backwards.

    Every step of speculative decoding gives one token and the accepted drafts, so a step has
    1 + accepted / drafts tokens.
    """
    change = {name: value - before.get(name, 0.0) for name, value in after.items()}
    finished, tokens = change.get(_FINISHED, -1.0), change.get(_GIVEN, -1.0)
    if min(finished, tokens) < 0:
        return None
    hits = change.get(CACHE_HITS, 0.0) / max(change.get(CACHE_QUERIES, 0.0), 1)
    drafts, accepted = change.get(DRAFTS, 0.0), change.get(_ACCEPTED, 0.0)
    yielded = 1 + accepted / drafts if drafts > 0 else None
    return CounterChange(round(finished), round(tokens), hits, yielded)


def invalid_reasons(
    spec: LoadSpec, run: LoadResult, change: CounterChange | None, prefix_hits: float
) -> tuple[Reason, ...]:
    """
    Return why a measurement does not count; nothing for one that does.

    Args:
        prefix_hits: The share of cached prompt tokens that makes it invalid.
    """
    if change is None:
        return (Reason("counters-missing", f"{_FINISHED} or {_GIVEN} is missing or went back"),)
    errors, answers, prompts = list[str](), list[int](), list[int]()
    lumps, impossible, shortest = 0, False, SHORTEST_STEP_S / (change.drafts or 1.0)
    for request in run.requests:
        if request.error:
            errors.append(request.error)
            continue
        if request.output_tokens != spec.output_tokens:
            answers.append(request.output_tokens)
        if request.prompt_tokens != spec.prompt_tokens:
            prompts.append(request.prompt_tokens)
        lumps += request.output_tokens > 1 and 0 <= request.tpot < shortest
        impossible |= not 0 < request.ttft <= request.latency
    # The server counts warm-ups, too, whose answers are as long as those that are measured.
    counted = change.tokens == change.finished * spec.output_tokens
    # A busy machine merges parts of a stream of which the server counts every token.
    short = "stream-merged" if counted else "answer-other"
    mismatch = not counted or change.finished < spec.requests
    tokens = f"{change.tokens} tokens in {change.finished} answers of {spec.output_tokens}"
    faults = (
        (
            errors,
            "request-failed",
            f"{len(errors)} of {spec.requests} failed: {errors[:1]}"[:300],
        ),
        (
            answers,
            short,
            f"answers of {answers[:3]} tokens, not {spec.output_tokens}",
        ),
        (
            prompts and spec.prompt_file is None,
            "prompt-other",
            f"prompts of {prompts[:3]} tokens, not {spec.prompt_tokens}",
        ),
        (lumps, "stream-merged", f"the tokens of {lumps} answers came at once"),
        (impossible, "times-impossible", "a request or its first token has no possible time"),
        (mismatch, "usage-mismatch", f"the server counts {tokens}"),
        (
            change.hits >= prefix_hits,
            "prefix-cached",
            f"{100 * change.hits:.1f} % of the prompt tokens",
        ),
    )
    return tuple(Reason(reference, text) for fault, reference, text in faults if fault)


def series_name(cell: str, metric: Metric) -> str:
    """Return the name of a series."""
    return f"{cell}: {METRICS[metric][0]}"


def series_names(cell: WorkloadCell) -> list[str]:
    """Return the names of the deciding series of *cell*."""
    return [series_name(cell.name, metric) for metric in cell.primary]


def difference(
    measurements: Iterable[Measurement], cell: str, block: int, metric: Metric
) -> float | None:
    """
    Return ln(other side / baseline) of a block, positive where the other side is worse.

    It is (B1 + B2 - A1 - A2) / 2 in logarithms, in which a linear drift cancels. None if the cell
    was not measured in that block, since it was settled before.
    """
    baseline, other = list[float](), list[float]()
    for leg in measurements:
        own = leg.cell == cell and leg.block == block and leg.counts
        if own and (value := leg.value(metric)) is not None:
            (baseline if leg.side == "baseline" else other).append(math.log(value))
    if len(baseline) != 2 or len(other) != 2:
        return None
    sign = -1 if METRICS[metric][3] else 1
    return sign * (sum(other) - sum(baseline)) / 2


def metric_series(
    cells: Iterable[WorkloadCell],
    measurements: Sequence[Measurement],
    blocks: Collection[int],
    policy: ThroughputPolicy,
) -> list[MetricSeries]:
    """Return the deciding series over complete *blocks*, beside the A/A block."""
    result = []
    for cell in cells:
        for metric in cell.primary:
            values = _differences(measurements, cell.name, blocks, metric)
            aa = difference(measurements, cell.name, CONTROL_BLOCK, metric)
            name = series_name(cell.name, metric)
            result.append(MetricSeries(name, values, policy.bounds[metric], aa))
    return result


def _differences(
    measurements: Sequence[Measurement], cell: str, blocks: Collection[int], metric: Metric
) -> tuple[float, ...]:
    differences = list[float]()
    for block in sorted(blocks):
        if (value := difference(measurements, cell, block, metric)) is not None:
            differences.append(value)
    return tuple(differences)


def cell_results(
    cells: Iterable[WorkloadCell],
    measurements: Iterable[Measurement],
    blocks: Collection[int],
    series: Sequence[MetricSeries],
    decision: Decision | None,
) -> tuple[CellResult, ...]:
    """Return each cell with the metrics that were compared over complete *blocks*, or decide."""
    counted: dict[str, list[Measurement]] = defaultdict(list)
    for leg in measurements:
        if leg.counts and leg.block in blocks:
            counted[leg.cell].append(leg)
    decided, results = dict[str, tuple[MetricSeries, SeriesDecision]](), []
    for each, verdict in zip(series, decision.series, strict=True) if decision else ():
        decided[each.name] = each, verdict
    for cell in cells:
        own, rows = counted[cell.name], []
        for metric in METRICS:
            name, row = series_name(cell.name, metric), _series(own, cell.name, blocks, metric)
            if not row.differences and metric not in cell.primary:
                continue
            if name in decided:
                own_series, verdict = decided[name]
                row = replace(
                    row, pass_evidence=verdict.pass_evidence, fail_evidence=verdict.fail_evidence,
                    state=verdict.state, conclusion=verdict.conclusion,
                    margin=own_series.bounds.margin,
                )  # fmt: skip
            rows.append(replace(row, primary=metric in cell.primary))
        results.append(CellResult(cell.name, cell.concurrency, tuple(rows)))
    return tuple(results)


def _series(
    own: Sequence[Measurement], cell: str, blocks: Collection[int], metric: Metric
) -> Series:
    """Return the series of *metric* in *own*, the measurements of *cell*, without a decision."""
    theirs = block_medians(own, cell, metric, "baseline")
    ours = block_medians(own, cell, metric, "candidate")
    differences, low, high = _differences(own, cell, blocks, metric), None, None
    if len(differences) >= MIN_INTERVAL:
        sign = -1 if METRICS[metric][3] else 1
        low, high = sorted(math.exp(sign * end) for end in mean_interval(differences))
    return Series(
        metric, False, differences, low=low, high=high,
        baseline=statistics.median(theirs) if theirs else None,
        candidate=statistics.median(ours) if ours else None,
    )  # fmt: skip


#: The reference of a candidate whose server ended after it had started.
CRASHED = "candidate-crashed"

#: Starts a fresh server for each side, all at the same time; leaving its ``with`` block ends them.
Launcher = Callable[[Sequence[Side]], contextlib.AbstractContextManager[dict[Side, Server]]]


class ExperimentStart(msgspec.Struct, frozen=True):
    """
    An experiment.

    Attributes:
        seed: Of all orders, waits and prompts.
        at: Seconds since 1970.
        attempt: Number of this gate of the wheel and recipe, from 1.
    """

    seed: int
    at: float
    attempt: int = 1


class JournalLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    A line: the experiment, or a complete launch with all measurements since the one before.

    Attributes:
        launch: The block, and its first position.
        seconds: That the launch took.
    """

    begun: ExperimentStart | None = None
    launch: tuple[int, int] | None = None
    measurements: tuple[Measurement, ...] = ()
    seconds: float = 0.0


class MeasurementJournal:
    """
    The journal at *path*, whose experiment is continued; *start* begins if there is none.

    Attributes:
        begun: The experiment.
        launches: `JournalLine.launch` of the complete ones → their seconds.
        measurements: Those of these launches, and what was repeated.

    Raises:
        file-invalid: The file is no such journal.
        disk-full: There is no room; what was written stays. `add` raises it, too.
    """

    def __init__(self, path: Path, start: ExperimentStart) -> None:
        self._path, kind = path, "journal of a throughput gate"
        lines = read_lines(path, JournalLine, kind) if path.exists() else []
        if not lines:
            lines = [JournalLine(begun=start)]
            append_line(path, lines[0])
        self.begun = lines[0].begun or start
        self.launches, self.measurements = dict[tuple[int, int], float](), list[Measurement]()
        for line in lines:
            self.measurements += line.measurements
            if line.launch:
                self.launches[line.launch] = line.seconds

    def add(
        self, launch: tuple[int, int], measurements: Sequence[Measurement], seconds: float
    ) -> None:
        """Write a launch that took *seconds*; it is on the disk when this returns."""
        append_line(self._path, JournalLine(None, launch, tuple(measurements), seconds))
        self.launches[launch] = seconds
        self.measurements += measurements

    def seconds(self, block: int) -> float:
        """Return what the launches of *block* took."""
        return sum(seconds for (own, _), seconds in self.launches.items() if own == block)

    def end(self) -> None:
        """Keep the file beside: nothing is left to continue."""
        self._path.replace(self._path.with_name(f"{self._path.name}.before"))


class _Stop(Exception):
    """A measurement ends the run."""

    def __init__(self, reason: Reason, state: State = "invalid") -> None:
        self.reason, self.state = reason, state


class _ServerLost(Exception):
    """The server of a baseline or control ended; its launch is repeated."""


def sides(seed: int, block: int) -> tuple[Side, ...]:
    """Return the order in a block, A B B A or B A A B, by a coin that the seed decides."""
    other: Side = "control" if block == CONTROL_BLOCK else "candidate"
    if random.Random(f"{seed}/order/{block}").random() < 0.5:  # noqa: S311  fairness, not secrecy
        return "baseline", other, other, "baseline"
    return other, "baseline", "baseline", other


def prompts_seed(seed: int, leg: Measurement, *, texts: bool = False) -> int:
    """
    Return the seed of a measurement's prompts: a new one, so that no cache has seen them.

    Of real *texts* a block has the same ones on both sides, as they differ in what is accepted.
    """
    own = f"{leg.launch}/{leg.position}/{leg.attempt}"
    text = f"{seed}/{leg.cell}/{leg.block if texts else own}"
    return random.Random(text).randrange(1, 2**31)  # noqa: S311


class Runner:
    """
    Measures *spec* on the servers of *launcher*, and continues what *journal* holds.

    Attributes:
        rule: The decision rule.
        decision: None before the first complete block.
        stopped: Why the run was given up, and the verdict then; None if it was not.
    """

    def __init__(self, spec: RunSpec, launcher: Launcher, journal: MeasurementJournal) -> None:
        self._spec, self._launcher, self._journal = spec, launcher, journal
        self._attempts = spec.machine.policy.discards + 1
        #: Measurements since the last complete launch.
        self._legs: list[Measurement] = []
        self._turn_seconds = self._measured_at = 0.0
        self.decision: Decision | None = None
        self.stopped: tuple[State, Reason] | None = None
        policy = spec.policy
        alpha = attempt_alpha(policy.alpha, journal.begun.attempt)
        self.rule = DecisionRule(alpha, policy.min_blocks, policy.max_blocks)

    def run(self) -> None:
        """
        Measure until there is a decision, the most blocks are complete, or the run stops.

        The first block has no other to be judged by; a night begins no gate that does not fit.
        """
        spec, cells, block_seconds = self._spec, self._spec.cells, 0.0
        try:
            for block in range(CONTROL_BLOCK, self.rule.max_blocks):
                began = monotonic()
                # What the journal has of a block takes no time.
                if block not in self.blocks and began + block_seconds > spec.deadline:
                    text = f"block {block + 1} would end after the gate's time"
                    raise _Stop(Reason(BUDGET_SPENT, text), "not-run")
                self._block(block, cells)
                block_seconds = max(monotonic() - began, self._journal.seconds(block))
                if block == CONTROL_BLOCK:
                    continue
                self.decision = decision = decide(self.rule, self.series)
                blocks = f"block {block + 1} of at most {self.rule.max_blocks}"
                console.note(f"{blocks}: {decision.message}")
                # A series that passed needs no further block, and a decision needs none at all.
                cells = tuple(
                    cell for cell in spec.cells if set(decision.open) & set(series_names(cell))
                )
                if not cells:
                    break
        except _Stop as stop:
            self.stopped = stop.state, stop.reason

    @property
    def measurements(self) -> list[Measurement]:
        """All measurements, those of an incomplete launch included."""
        return [*self._journal.measurements, *self._legs]

    @property
    def blocks(self) -> frozenset[int]:
        """The numbers of the complete blocks, without the A/A block."""
        need = 1 if self._spec.resident else 4
        launches = Counter(block for block, _ in self._journal.launches)
        return frozenset(b for b, count in launches.items() if count == need) - {CONTROL_BLOCK}

    @property
    def series(self) -> list[MetricSeries]:
        """The deciding series as far as they are measured."""
        return metric_series(
            self._spec.cells, self._journal.measurements, self.blocks, self._spec.policy
        )

    def _block(self, block: int, cells: Sequence[WorkloadCell]) -> None:
        """Measure what the journal does not hold of *block*."""
        turns = list(enumerate(sides(self._journal.begun.seed, block)))
        size = len(turns) if self._spec.resident else 1
        for first in range(0, len(turns), size):
            if (block, first) not in self._journal.launches:
                self._launch(block, turns[first : first + size], cells)

    def _launch(
        self, block: int, turns: Sequence[tuple[int, Side]], cells: Sequence[WorkloadCell]
    ) -> None:
        """
        Measure *cells* on fresh servers, again if a baseline's server ends.

        Args:
            turns: Positions in the block, and the side of each.
        """
        launched = monotonic()
        for _ in range(self._attempts):
            number = 1 + self.measurements[-1].launch if self.measurements else 0
            with (
                contextlib.suppress(_ServerLost),
                self._launcher(sorted({side for _, side in turns})) as servers,
            ):
                for position, side in turns:
                    seed = f"{self._journal.begun.seed}/turn/{block}/{position}"
                    draw = random.Random(seed)  # noqa: S311
                    sleep(draw.uniform(0, self._spec.policy.lag * self._turn_seconds))
                    began = monotonic()
                    for cell in draw.sample(cells, len(cells)):
                        blank = Measurement(cell.name, block, number, side, position)
                        self._measure(cell, blank, servers[side])
                    self._turn_seconds = monotonic() - began
                self._profile(servers)
                self._journal.add((block, turns[0][0]), self._legs, monotonic() - launched)
                self._legs = []
                return
            # Nothing counts of a launch that is not whole.
            reasons = self._legs[-1].reasons
            self._legs = [
                replace(leg, discarded=True, reasons=leg.reasons or reasons) for leg in self._legs
            ]
        raise _Stop(reasons[0])

    def _profile(self, servers: Mapping[Side, Server]) -> None:
        """
        Profile the servers, and end the run if the candidate breaks the contract.

        A stock wheel may serve the recipe with other kernels, but they have to be seen. The
        measurements are over by then.
        """
        for side, server in servers.items():
            checks = self._spec.contract(side, server)
            if side != "candidate":
                checks = tuple(check for check in checks if check.state != "fail")
            if fault := worst_check(checks):
                verdict: State = "fail" if fault.state == "fail" else "invalid"
                raise _Stop(Reason(fault.reason, f"{side}: {fault.name}: {fault.message}"), verdict)

    def _measure(self, cell: WorkloadCell, blank: Measurement, server: Server) -> None:
        """
        Measure once, and again if the machine was disturbed or a request failed.

        A candidate whose server ends after it had started fails.
        """
        cell = self._sized(cell, blank.block)
        for attempt in range(self._attempts):
            leg = replace(blank, attempt=attempt)
            texts = cell.name in self._spec.texts
            seed = prompts_seed(self._journal.begun.seed, leg, texts=texts)
            result = measure(self._spec, server, cell, leg, seed, self._state_before())
            self._legs.append(result)
            self._measured_at = monotonic()
            if result.counts:
                return
            reason = result.reasons[0]
            if not server.guard():
                if blank.side != "candidate":
                    raise _ServerLost
                # One that ended before its first answer may have been started wrongly, like the
                # other.
                own = (each for each in self._legs if each.launch == result.launch)
                if any(each.before and each.side == "candidate" for each in own):
                    says = f"the candidate's server ended under load; {reason.message}"
                    raise _Stop(Reason(CRASHED, says), "fail")
            if not result.discarded:
                raise _Stop(reason)
            console.note(f"{cell.name}, {blank.side}: measured again, {reason.message}")
            if reason.reference in monitor.REASONS:
                self._cool_down(reason)
        text = f"{self._attempts} times in a row: {reason.message} ({reason.reference})"
        passing = reason.reference in monitor.REASONS
        raise _Stop(Reason(monitor.UNSTEADY if passing else reason.reference, text))

    def _state_before(self) -> monitor.Snapshot | None:
        """
        Return the state after the last measurement of this launch, if that is recent and nothing is
        wrong with it: a probe takes seconds, of two hundred in a night.
        """
        machine = self._spec.machine
        after = self._legs[-1].after if self._legs else None
        recent = monotonic() - self._measured_at < machine.policy.recent
        return after if after and recent and not machine.disturbances(after, after) else None

    def _sized(self, cell: WorkloadCell, block: int) -> WorkloadCell:
        """
        Return *cell* with its number of requests, which is the same for both sides of *block*.

        The first block has the fewest. It tells how many make a standard error that is small
        against the margin.
        """
        spec, needed = self._spec, 0.0
        if block != CONTROL_BLOCK and cell.primary:
            key = (cell.name, CONTROL_BLOCK)
            loads = list[LoadResult]()
            for leg in self._journal.measurements:
                if leg.run and leg.counts and (leg.cell, leg.block) == key:
                    loads.append(leg.run)
            paired = len(loads) > 1 and cell.name in spec.texts
            needed = spec.policy.needed(loads, cell.primary, paired=paired)
        return replace(cell, requests=spec.policy.requests(cell, needed))

    def _cool_down(self, reason: Reason) -> None:
        """Wait until the machine is as it should be again, or for all its cool-downs."""
        machine = self._spec.machine
        for _ in range(self._spec.policy.cooldown_retries):
            with console.step(f"wait for the machine to settle ({reason.reference})"):
                sleep(machine.policy.cooldown)
            snapshot = machine.snapshot()
            if not machine.disturbances(snapshot, snapshot):
                return
