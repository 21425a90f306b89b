"""
The run of an experiment: launches and measurements in A B B A order, repeated where the machine was
disturbed, until there is a decision.

A gate measures an A/A block first (baseline against a control of the same wheel), then blocks of
baseline against candidate. Every block has fresh launches, the unit of replication. Every
measurement is on the disk before the next begins, so that hours outlive a kill or a full disk.

A measurement is a load on a server, with the machine's state and the server's counters around it.
It counts if every answer is as long as ordered, nothing came from a cache, and the counters agree
with the answers.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec.structs import replace

from sparkwright.bench.load.vllm_bench import LoadError, LoadGenerator, LoadResult, LoadSpec
from sparkwright.bench.machine import state_checks
from sparkwright.bench.machine.monitor import MachineMonitor
from sparkwright.bench.recipes.workloads import RequestRule, WorkloadCell
from sparkwright.bench.records import Reason, Side
from sparkwright.bench.results import (
    CONTROL_BLOCK,
    History,
    Kind,
    LaunchRecord,
    Measurement,
    Speculation,
)
from sparkwright.bench.server.client import ServerInvalid
from sparkwright.bench.server.launch import Server
from sparkwright.bench.statistics import (
    Decision,
    DecisionRule,
    MetricSeries,
    attempt_alpha,
    decide,
)
from sparkwright.core.console import console
from sparkwright.core.states import State
from sparkwright.core.store import append_line, read_lines
from sparkwright.gates.core.verdict import Check
from sparkwright.gates.throughput import paired_differences
from sparkwright.gates.throughput.paired_differences import ThroughputPolicy

#: The reference of a run that the machine's own state spoiled again and again.
UNSTEADY = "machine-unsteady"
#: The reference of a candidate whose server ended after it had started.
CRASHED = "candidate-crashed"

#: Why a measurement does not count → what it means and what to do.
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
#: Seconds within which the end of a server's process is noticed.
NOTICED_S = 3.0
#: Seconds after which a server has counted the requests that it answered.
SETTLE_S = 0.5
#: Seconds that every decode step exceeds: a kernel launch takes microseconds, a step has dozens.
SHORTEST_STEP_S = 50e-6

_FINISHED = "vllm:request_success_total"
_GIVEN = "vllm:generation_tokens_total"


class ExternalServer:
    """A server at *url* that was not started here; nothing is known of its processes."""

    failure = reason = ""

    def __init__(self, url: str) -> None:
        self.url = url

    def guard(self) -> bool:
        return True


RunningServer = Server | ExternalServer


class MeasurementContext(msgspec.Struct, frozen=True):
    """
    What measurements are made with.

    Attributes:
        counters: Returns the metrics of the server at a URL; raises `ServerInvalid` without them.
        model: The name under which the model is served. *tokenizer*: its folder.
        texts: File of real prompts, for the cells that want them.
        rule: How many requests a measurement makes.
    """

    generator: LoadGenerator
    machine: MachineMonitor
    policy: ThroughputPolicy
    counters: Callable[[str], Mapping[str, float]]
    model: str
    tokenizer: Path | None = None
    texts: Path | None = None
    rule: RequestRule = RequestRule(5, 3, 0.0, 512)

    def load(self, url: str, cell: WorkloadCell, seed: int) -> LoadSpec:
        """Return the load of a measurement of *cell*."""
        return LoadSpec(
            url, self.model, cell.prompt, cell.answer, cell.concurrency, cell.requests,
            self.policy.warmups, seed, self.tokenizer, self.texts if cell.texts else None,
            timeout_s=self.policy.timeout_s,
        )  # fmt: skip


class CounterChange(msgspec.Struct, frozen=True):
    """How the server's counters changed in a measurement, warm-ups included."""

    finished: int
    by_length: int
    tokens: int
    hits: float = 0.0
    speculation: Speculation | None = None


def measure(
    context: MeasurementContext,
    server: RunningServer,
    cell: WorkloadCell,
    blank: Measurement,
    seed: int,
) -> Measurement:
    """
    Return *blank* with the result of a load on *server*, and the reasons if it does not count.

    If the server ended, its reason is the first; `before` is None if it ended before the load.
    """
    if not server.guard():
        return _ended(server, replace(blank, began=time.time()))
    spec = context.load(server.url, cell, seed)
    before = context.machine.snapshot()
    started = replace(blank, began=before.time, before=before)
    try:
        counters = context.counters(server.url)
        with console.progress(f"{cell.name}, {blank.side}", 0) as line:
            line.update(0, f"{spec.requests} requests")
            run = context.generator.measure(spec)
        change = counter_change(counters, context.counters(server.url))
        if change and change.tokens != change.finished * spec.output_tokens:
            # The client may have the last token before the server has counted the request.
            time.sleep(SETTLE_S)
            change = counter_change(counters, context.counters(server.url))
    except (LoadError, ServerInvalid) as error:
        if _has_ended(server):
            return _ended(server, started)
        return replace(started, reasons=(Reason(error.reason, error.message),))
    after = context.machine.snapshot()
    wrong = invalid_reasons(spec, run, change, context.policy.prefix_hits)
    earlier = {reason.reference for reason in context.machine.disturbances(before, before)}
    disturbed = [
        reason
        for reason in context.machine.disturbances(before, after)
        if reason.reference not in OWN_LOAD or reason.reference in earlier
    ]
    result = replace(
        started, run=run, after=after,
        speculation=change.speculation if change else None,
        reasons=(*wrong, *disturbed),
        discarded=bool(wrong or disturbed) and {each.reference for each in wrong} <= REPEATED,
    )  # fmt: skip
    failed = any(request.error for request in run.requests)
    ended = _has_ended(server) if failed else not server.guard()
    return _ended(server, result) if ended else result


def _ended(server: RunningServer, measurement: Measurement) -> Measurement:
    """Return *measurement* of a server that ended."""
    reasons = (Reason(server.reason, server.failure), *measurement.reasons)
    return replace(measurement, reasons=reasons, discarded=measurement.side != "candidate")


def _has_ended(server: RunningServer) -> bool:
    """Return whether *server* has ended; that is noticed a moment after its last answer."""
    until = time.monotonic() + NOTICED_S
    while server.guard():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def counter_change(before: Mapping[str, float], after: Mapping[str, float]) -> CounterChange | None:
    """
    Return how the server's counters changed; None if they are missing or went backwards.

    Every step of speculative decoding gives one token and the accepted drafts, so a step has
    1 + accepted / drafts tokens.
    """
    change = {name: value - before.get(name, 0.0) for name, value in after.items()}
    finished, tokens = change.get(_FINISHED, -1.0), change.get(_GIVEN, -1.0)
    by_length = sum(
        value
        for name, value in change.items()
        if name.startswith(f"{_FINISHED}{{") and '"length"' in name
    )
    if min(finished, tokens, by_length) < 0:
        return None
    queries, hits, drafts, drafted, accepted = (
        change.get(f"vllm:{name}_total", 0.0)
        for name in (
            "prefix_cache_queries", "prefix_cache_hits", "spec_decode_num_drafts",
            "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
        )
    )  # fmt: skip
    speculation = None
    if drafts > 0:
        speculation = Speculation(1 + accepted / drafts, accepted / drafted if drafted else 0.0)
    share = hits / queries if queries > 0 else 0.0
    return CounterChange(round(finished), round(by_length), round(tokens), share, speculation)


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
    errors = [request.error for request in run.requests if request.error]
    whole = [request for request in run.requests if not request.error]
    answers = [each.output_tokens for each in whole if each.output_tokens != spec.output_tokens]
    prompts = [each.prompt_tokens for each in whole if each.prompt_tokens != spec.prompt_tokens]
    other = change.finished - change.by_length
    # Warm-ups and the generator's own trial have the same length.
    counted = change.tokens == change.finished * spec.output_tokens
    impossible = any(not 0 < request.ttft <= request.latency for request in whole)
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
            "answer-other",
            f"answers of {answers[:3]} tokens, not {spec.output_tokens}",
        ),
        (other, "answer-other", f"{other} of {change.finished} requests ended otherwise"),
        (
            prompts and spec.prompt_file is None,
            "prompt-other",
            f"prompts of {prompts[:3]} tokens, not {spec.prompt_tokens}",
        ),
        (impossible, "times-impossible", "a request or its first token has no possible time"),
        (mismatch, "usage-mismatch", f"the server counts {tokens}"),
        (
            change.hits >= prefix_hits,
            "prefix-cached",
            f"{100 * change.hits:.1f} % of the prompt tokens",
        ),
    )
    wrong = tuple(Reason(reference, text) for fault, reference, text in faults if fault)
    if counted and not other and {reason.reference for reason in wrong} <= {"answer-other"}:
        return merged_stream(spec, run, change) or wrong
    return wrong


def merged_stream(spec: LoadSpec, run: LoadResult, change: CounterChange) -> tuple[Reason, ...]:
    """
    Return a reason if a busy machine merged a stream of which the server counts every token.

    The generator then receives the tokens in one piece at the end, or counts fewer pieces than
    tokens, never none and never more (seen with a vLLM on two busy cores).
    """
    limit = SHORTEST_STEP_S / (change.speculation.length if change.speculation else 1.0)
    pieces = [request.output_tokens for request in run.requests]
    if not all(0 < count <= spec.output_tokens for count in pieces):
        return ()
    merged = sum(
        each.output_tokens < spec.output_tokens or (each.output_tokens > 1 and each.tpot < limit)
        for each in run.requests
    )
    text = f"the tokens of {merged} of {len(pieces)} answers came in fewer pieces, or at once"
    return (Reason("stream-merged", text),) if merged else ()


# The run.

#: Starts a fresh server for each side, all at the same time; leaving its ``with`` block ends them.
Launcher = Callable[[Sequence[Side]], contextlib.AbstractContextManager[dict[Side, RunningServer]]]


class ExperimentStart(msgspec.Struct, frozen=True):
    """
    An experiment.

    Attributes:
        seed: Of all orders and prompts.
        at: Seconds since 1970.
        attempt: Number of this gate of the wheel and recipe, from 1.
        conditions: The sha256 of policies, recipe, machine and load generator; measurements that
            were made under other ones do not count.
    """

    seed: int
    at: float
    attempt: int = 1
    conditions: str = ""


class JournalLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line: the experiment (again each time it continues), a measurement, or a launch."""

    begun: ExperimentStart | None = None
    measurement: Measurement | None = None
    launch: LaunchRecord | None = None


class MeasurementJournal:
    """
    The journal of an experiment at *path*, which is continued if it has the conditions of *start*;
    else *start* begins, and the file of other conditions is kept as `end` does.

    Attributes:
        begun: The experiment.

    Raises:
        file-invalid: The file is no such journal.
        disk-full: There is no room; what was written stays. `add` raises it, too.
    """

    def __init__(self, path: Path, start: ExperimentStart) -> None:
        self._path, self._lines = path, list[JournalLine]()
        if path.exists():
            self._lines = read_lines(path, JournalLine, "journal of a throughput gate")
        self.begun = (self._lines[0].begun if self._lines else None) or start
        if self.begun.conditions != start.conditions:
            console.note(
                "beginning anew: a policy, the recipe, the load generator, or the machine's "
                "kernel, driver or firmware changed"
            )
            self.end()
            self._lines, self.begun = [], start
        self.add(JournalLine(begun=self.begun))

    @property
    def resumed(self) -> int:
        """How often the experiment was continued."""
        return sum(line.begun is not None for line in self._lines) - 1

    @property
    def launches(self) -> list[LaunchRecord]:
        """The complete launches."""
        return [line.launch for line in self._lines if line.launch]

    @property
    def measurements(self) -> list[Measurement]:
        """All measurements; those of an incomplete launch do not count after a later launch."""
        written = [line.measurement for line in self._lines if line.measurement]
        whole = {launch.number for launch in self.launches}
        newest = max((leg.launch for leg in written), default=0)
        why = Reason("interrupted", "the launch was interrupted before it was complete")
        return [
            leg
            if leg.launch == newest or leg.launch in whole or leg.discarded
            else replace(leg, discarded=True, reasons=(*leg.reasons, why))
            for leg in written
        ]

    def add(self, line: JournalLine) -> None:
        """Write *line*; it is on the disk when this returns."""
        append_line(self._path, line)
        self._lines.append(line)

    def end(self) -> None:
        """Keep the file beside, if there is one: nothing is left to continue."""
        if self._path.exists():
            self._path.replace(self._path.with_name(f"{self._path.name}.before"))


class RunSpec(msgspec.Struct, frozen=True):
    """
    What is measured.

    Attributes:
        kind: A gate measures an A/A block first, and then until there is a decision; a calibration
            measures A/A blocks alone; any other kind measures launches of the candidate alone.
        cells: Workloads, deciding ones and others.
        blocks: The maximum.
        at_once: Whether both servers run at the same time.
        history: Earlier A/A blocks, by series.
        contract: Profiles a server at the end of its launch, and returns the check of the recipe's
            kernel contract that it breaks; None without a recipe.
    """

    kind: Kind
    cells: tuple[WorkloadCell, ...]
    blocks: int
    at_once: bool = False
    history: History = {}
    contract: Callable[[Side, RunningServer], Check | None] | None = None


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


def prompts_seed(seed: int, leg: Measurement) -> int:
    """Return the seed of a measurement's prompts: a new one, so that no cache has seen them."""
    text = f"{seed}/{leg.launch}/{leg.position}/{leg.cell}/{leg.attempt}"
    return random.Random(text).randrange(1, 2**31)  # noqa: S311


class Runner:
    """
    Measures *spec* on the servers of *launcher*, and continues what *journal* holds.

    Attributes:
        rule: The decision rule; None if nothing is compared.
        decision: None before the first complete block.
        stopped: Why the run was given up, and the verdict then; None if it was not.
        outlook: What the noise supports, in words, before the first block.
    """

    def __init__(
        self,
        spec: RunSpec,
        context: MeasurementContext,
        launcher: Launcher,
        journal: MeasurementJournal,
    ) -> None:
        self._spec, self._context, self._launcher = spec, context, launcher
        self._journal, self._attempts = journal, context.machine.policy.discards + 1
        counted = (leg for leg in journal.measurements if leg.counts)
        self._sizes = {leg.cell: len(leg.run.requests) for leg in counted if leg.run}
        self.rule: DecisionRule | None = None
        self.decision: Decision | None = None
        self.stopped: tuple[State, Reason] | None = None
        self.outlook = ""
        if spec.kind in ("gate", "calibration"):
            policy = context.policy
            alpha = attempt_alpha(policy.alpha, journal.begun.attempt)
            self.rule = DecisionRule(alpha, policy.min_blocks, policy.max_blocks)

    def run(self) -> None:
        """Measure until there is a decision, the most blocks are complete, or the run stops."""
        try:
            self._measure_blocks()
        except _Stop as stop:
            self.stopped = stop.state, stop.reason

    def _measure_blocks(self) -> None:
        spec, cells = self._spec, self._spec.cells
        if self.rule and spec.kind == "gate":
            self._block(CONTROL_BLOCK, [cell for cell in cells if cell.primary])
            self.outlook = paired_differences.outlook(self.series, self.rule)
            console.note(self.outlook)
        for block in range(spec.blocks):
            self._block(block, cells)
            text = ""
            if self.rule:
                self.decision = decision = decide(self.rule, self.series)
                text = f": {decision.message}"
                if spec.kind == "gate":
                    # A series that passed needs no further block, and a decision needs none at all.
                    cells = tuple(
                        cell
                        for cell in spec.cells
                        if set(decision.open) & set(paired_differences.series_names(cell))
                    )
            console.note(f"block {block + 1} of at most {spec.blocks}{text}")
            if not cells:
                break

    @property
    def blocks(self) -> frozenset[int]:
        """The numbers of the complete blocks, without the A/A block."""
        need = 4 if self.rule and not self._spec.at_once else 1
        launches = Counter(launch.block for launch in self._journal.launches)
        return frozenset(b for b, count in launches.items() if count == need) - {CONTROL_BLOCK}

    @property
    def history(self) -> History:
        """The A/A blocks: the stored ones, and those of this run."""
        spec, history = self._spec, self._spec.history
        own = {"gate": [CONTROL_BLOCK], "calibration": sorted(self.blocks)}
        for block in own.get(spec.kind, ()):
            measurements = self._journal.measurements
            differences = paired_differences.aa_block(measurements, spec.cells, block)
            history = paired_differences.extended(history, self._journal.begun.at, differences)
        return history

    @property
    def series(self) -> list[MetricSeries]:
        """The deciding series as far as they are measured."""
        return paired_differences.metric_series(
            self._spec.cells, self._journal.measurements, self.blocks, self.history,
            self._context.policy, paired_differences.day(self._journal.begun.at),
        )  # fmt: skip

    def _block(self, block: int, cells: Sequence[WorkloadCell]) -> None:
        """Measure what the journal does not hold of *block*."""
        order = sides(self._journal.begun.seed, block) if self.rule else ("candidate",)
        size = len(order) if self._spec.at_once else 1
        complete = {(launch.block, launch.position) for launch in self._journal.launches}
        for first in range(0, len(order), size):
            if (block, first) not in complete:
                positions = range(first, first + size)
                self._launch(block, {position: order[position] for position in positions}, cells)

    def _launch(
        self, block: int, positions: Mapping[int, Side], cells: Sequence[WorkloadCell]
    ) -> None:
        """Measure *cells* at *positions* on fresh servers, again if a baseline's server ends."""
        for _ in range(self._attempts):
            number = 1 + max((leg.launch for leg in self._journal.measurements), default=-1)
            with (
                contextlib.suppress(_ServerLost),
                self._launcher(sorted(set(positions.values()))) as servers,
            ):
                for position, side in positions.items():
                    for cell in cells:
                        blank = Measurement(cell.name, block, number, side, position)
                        self._measure(cell, blank, servers[side])
                other = self._profile(servers)
                profiled = tuple(servers) if self._spec.contract else ()
                launch = LaunchRecord(number, block, min(positions), profiled, other)
                self._journal.add(JournalLine(launch=launch))
                return
        raise _Stop(self._journal.measurements[-1].reasons[0])

    def _profile(self, servers: Mapping[Side, RunningServer]) -> str:
        """
        Profile the servers, and return how the baseline's kernels differ from the contract.

        A stock wheel may serve the recipe with other kernels; the candidate may not. The
        measurements are over by then.
        """
        other = ""
        for side, server in servers.items():
            fault = self._spec.contract(side, server) if self._spec.contract else None
            if fault is None:
                continue
            other = f"{fault.name}: {fault.message}"
            if side == "candidate" or fault.state != "fail":
                verdict: State = "fail" if fault.state == "fail" else "invalid"
                raise _Stop(Reason(fault.reason, f"{side}: {other}"), verdict)
        return other

    def _measure(self, cell: WorkloadCell, blank: Measurement, server: RunningServer) -> None:
        """Measure once, and again if the machine was disturbed or a request failed."""
        cell = self._sized(cell, server)
        for attempt in range(self._attempts):
            leg = replace(blank, attempt=attempt)
            seed = prompts_seed(self._journal.begun.seed, leg)
            result = measure(self._context, server, cell, leg, seed)
            self._journal.add(JournalLine(measurement=result))
            if result.counts:
                return
            reason = result.reasons[0]
            if not server.guard():
                self._lost(result, reason)
            if not result.discarded:
                raise _Stop(reason)
            console.note(f"{cell.name}, {blank.side}: measured again, {reason.message}")
            if reason.reference in state_checks.REASONS:
                self._cool_down(reason)
        text = f"{self._attempts} times in a row: {reason.message} ({reason.reference})"
        passing = reason.reference in state_checks.REASONS
        raise _Stop(Reason(UNSTEADY if passing else reason.reference, text))

    def _lost(self, result: Measurement, reason: Reason) -> NoReturn:
        """
        Raise for a server that ended: a candidate fails if it had started.

        One that ended before its first answer may have been started wrongly, like the other.
        """
        if result.side != "candidate":
            raise _ServerLost
        own = (leg for leg in self._journal.measurements if leg.launch == result.launch)
        if any(leg.before and leg.side == "candidate" for leg in own):
            says = f"the candidate's server ended under load; {reason.message}"
            raise _Stop(Reason(CRASHED, says), "fail")
        raise _Stop(reason)

    def _sized(self, cell: WorkloadCell, server: RunningServer) -> WorkloadCell:
        """Return *cell* with its number of requests, which then holds for both sides."""
        if cell.name not in self._sizes:
            seconds = None
            # A server that does not answer is found by the measurement itself.
            with contextlib.suppress(LoadError):
                if not cell.requests and server.guard():
                    trial = replace(cell, requests=cell.concurrency)
                    load = self._context.load(server.url, trial, 1)
                    seconds = self._context.generator.measure(load).seconds
            self._sizes[cell.name] = self._context.rule.requests(cell, seconds)
        return replace(cell, requests=self._sizes[cell.name])

    def _cool_down(self, reason: Reason) -> None:
        """Wait until the machine is as it should be again, or for all its cool-downs."""
        machine = self._context.machine
        for _ in range(self._context.policy.cooldown_retries):
            with console.step(f"wait for the machine to settle ({reason.reference})"):
                time.sleep(machine.policy.cooldown)
            snapshot = machine.snapshot()
            if not machine.disturbances(snapshot, snapshot):
                return
