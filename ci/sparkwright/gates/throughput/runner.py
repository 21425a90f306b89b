"""
The run of an experiment: launches and measurements in A B B A order, repeated where the machine was
disturbed, until there is a decision.

A gate measures an A/A block first (baseline against a control of the same wheel), then blocks of
baseline against candidate. Every block has fresh launches, the unit of replication. Every
measurement is on the disk before the next begins, so that hours outlive a kill or a full disk.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from sparkwright.bench.load.vllm_bench import LoadError
from sparkwright.bench.machine import state_checks
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.records import Reason, Side
from sparkwright.bench.results import CONTROL_BLOCK, History, LaunchRecord, Measurement
from sparkwright.bench.statistics import Decision, DecisionRule, MetricSeries, decide
from sparkwright.core.console import console
from sparkwright.core.states import State
from sparkwright.core.store import append_line, read_lines
from sparkwright.gates.core.verdict import Check
from sparkwright.gates.throughput import paired_differences
from sparkwright.gates.throughput.measurement import MeasurementContext, RunningServer, measure

#: The reference of a run that the machine's own state spoiled again and again.
UNSTEADY = "machine-unsteady"
#: The reference of a candidate whose server ended after it had started.
CRASHED = "candidate-crashed"

#: Starts a fresh server for each side, all at the same time; leaving its ``with`` block ends them.
Launcher = Callable[[Sequence[Side]], contextlib.AbstractContextManager[dict[Side, RunningServer]]]


class ExperimentStart(msgspec.Struct, frozen=True):
    """
    An experiment.

    Attributes:
        about: What must be the same to continue, by name.
        seed: Of all orders and prompts.
        at: Seconds since 1970.
        attempt: Number of this gate of the wheel and recipe, from 1.
    """

    about: dict[str, str]
    seed: int
    at: float
    attempt: int = 1


class JournalLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line: the experiment (again each time it continues), a measurement, or a launch."""

    begun: ExperimentStart | None = None
    measurement: Measurement | None = None
    launch: LaunchRecord | None = None


class MeasurementJournal:
    """
    The journal at *path*.

    If its experiment is about *about* it is continued. Otherwise it is renamed to
    ``NAME.before``, and a new one begins.

    Args:
        about: See `ExperimentStart`.
        begin: Begins an experiment; called unless one continues.

    Attributes:
        begun: The experiment. *resumed*: how often it was continued.
        refused: Parts of *about* for which an unfinished journal was not continued.
        measurements, launches: Those on the disk.

    Raises:
        file-invalid: The file is no such journal.
        disk-full: There is no room; what was written stays. `add` raises it, too.
    """

    def __init__(
        self, path: Path, about: dict[str, str], begin: Callable[[], ExperimentStart]
    ) -> None:
        self._path, self.resumed = path, -1
        self.measurements: list[Measurement] = []
        self.launches: list[LaunchRecord] = []
        what = "journal of a throughput gate"
        lines = read_lines(path, JournalLine, what) if path.exists() else []
        earlier: ExperimentStart | None = lines[0].begun if lines else None
        then = earlier.about if earlier else about
        differing = (name for name in {*about, *then} if about.get(name) != then.get(name))
        self.refused = tuple(sorted(differing))
        if earlier and not self.refused:
            self.begun = earlier
            for line in lines:
                self._take(line)
        else:
            self.begun = begin()
            self.end()
        self.add(JournalLine(begun=self.begun))

    def add(self, line: JournalLine) -> None:
        """Write *line*; it is on the disk when this returns."""
        append_line(self._path, line)
        self._take(line)

    def end(self) -> None:
        """Keep the file beside, if there is one: nothing is left to continue."""
        if self._path.exists():
            self._path.replace(self._path.with_name(f"{self._path.name}.before"))

    def _take(self, line: JournalLine) -> None:
        self.resumed += line.begun is not None
        if line.launch:
            self.launches.append(line.launch)
        if (new := line.measurement) is not None:
            # A later launch at the same position shows that the earlier one was interrupted.
            place = (new.block, new.position)
            self.measurements = [
                _interrupted(old)
                if (old.block, old.position) == place and old.launch < new.launch
                else old
                for old in self.measurements
            ]
            self.measurements.append(new)


def _interrupted(measurement: Measurement) -> Measurement:
    if measurement.discarded:
        return measurement
    why = Reason("interrupted", "the launch was interrupted before it was complete")
    return replace(measurement, discarded=True, reasons=(*measurement.reasons, why))


class RunSpec(msgspec.Struct, frozen=True):
    """
    What is measured.

    Attributes:
        cells: Workloads, deciding ones and others.
        rule: The decision rule; None for a bench, which measures *blocks* launches of the
            candidate alone.
        blocks: The maximum.
        attempts: How often a measurement or a launch is tried before the run stops.
        at_once: Whether both servers run at the same time.
        history: Earlier A/A blocks, by series.
        control: Measure an A/A block first.
        whole: Measure all blocks even after a decision, as a calibration does.
        contract: Profiles a server at the end of its launch, and returns the check of the recipe's
            kernel contract that it breaks; None without a recipe.
    """

    cells: tuple[WorkloadCell, ...]
    rule: DecisionRule | None
    blocks: int
    attempts: int
    at_once: bool = False
    history: History = {}
    control: bool = False
    whole: bool = False
    contract: Callable[[Side, RunningServer], Check | None] | None = None


class RunOutcome(msgspec.Struct, frozen=True):
    """
    The outcome of a run.

    Attributes:
        blocks: Those that are complete, without the A/A block.
        decision: None for a bench, or before the first complete block.
        stopped: Why it was given up, and the verdict then; None if it was not.
        outlook: What the noise supports, as said before the first block.
        history: The A/A blocks of `RunSpec.history` and of this run.
        series: The deciding ones.
    """

    blocks: frozenset[int]
    decision: Decision | None
    stopped: tuple[State, Reason] | None
    outlook: str
    history: History
    series: Sequence[MetricSeries]


class _Stop(Exception):
    """A measurement ends the run."""

    def __init__(self, reason: Reason, state: State = "invalid") -> None:
        self.reason, self.state = reason, state
        super().__init__(reason.message)


class _ServerLost(Exception):
    """The server of a baseline or control ended; its launch is repeated."""


def sides(seed: int, block: int) -> tuple[Side, ...]:
    """Return the order in a block, A B B A or B A A B, by a coin that the seed decides."""
    other: Side = "control" if block == CONTROL_BLOCK else "candidate"
    if random.Random(f"{seed}/order/{block}").random() < 0.5:  # noqa: S311  fairness, not secrecy
        return "baseline", other, other, "baseline"
    return other, "baseline", "baseline", other


def prompts_seed(seed: int, place: Measurement) -> int:
    """Return the seed of a measurement's prompts: a new one, so that no cache has seen them."""
    text = f"{seed}/{place.launch}/{place.position}/{place.cell}/{place.attempt}"
    return random.Random(text).randrange(1, 2**31)  # noqa: S311


class Runner:
    """Measures *spec* on the servers of *launcher*, and continues what *journal* holds."""

    def __init__(
        self,
        spec: RunSpec,
        context: MeasurementContext,
        launcher: Launcher,
        journal: MeasurementJournal,
    ) -> None:
        self._spec, self._context, self._launcher = spec, context, launcher
        self._journal = journal
        counted = (one for one in journal.measurements if one.counts)
        self._sizes = {one.cell: len(one.run.requests) for one in counted if one.run}

    def run(self, hindrance: Reason | None = None) -> RunOutcome:
        """
        Measure until there is a decision, or the most blocks are complete.

        Args:
            hindrance: Why nothing may be measured now; the outcome is then that of the journal.
        """
        spec, cells, stopped, outlook = self._spec, self._spec.cells, None, ""
        decision: Decision | None = None
        try:
            if hindrance:
                raise _Stop(hindrance)
            if spec.control:
                self._block(CONTROL_BLOCK, [cell for cell in spec.cells if cell.primary])
            if spec.rule and spec.control:
                outlook = paired_differences.outlook(self._series(), spec.rule)
                console.note(outlook)
            for block in range(spec.blocks):
                self._block(block, cells)
                if spec.rule:
                    decision = decide(spec.rule, self._series())
                if decision and not spec.whole:
                    # A series that passed needs no further block.
                    open_series = set(decision.open)
                    cells = tuple(
                        cell
                        for cell in spec.cells
                        if open_series & set(paired_differences.series_names(cell))
                    )
                text = f": {decision.message}" if decision else ""
                console.note(f"block {block + 1} of at most {spec.blocks}{text}")
                if decision and decision.state and not spec.whole:
                    break
        except _Stop as stop:
            stopped = stop.state, stop.reason
        history, series = self._history(), self._series()
        return RunOutcome(self._complete(), decision, stopped, outlook, history, series)

    def _complete(self) -> frozenset[int]:
        """Return the numbers of the complete blocks."""
        need = 4 if self._spec.rule and not self._spec.at_once else 1
        launches = Counter(one.block for one in self._journal.launches)
        return frozenset(b for b, count in launches.items() if count == need) - {CONTROL_BLOCK}

    def _history(self) -> History:
        """Return the A/A blocks: the stored ones, and those of this run."""
        spec, history = self._spec, self._spec.history
        own: list[tuple[int, Side]] = [(CONTROL_BLOCK, "control")] if spec.control else []
        if spec.whole:
            own = [(block, "candidate") for block in sorted(self._complete())]
        for block, side in own:
            measurements = self._journal.measurements
            differences = paired_differences.aa_block(measurements, spec.cells, block, side)
            history = paired_differences.extended(history, self._journal.begun.at, differences)
        return history

    def _series(self) -> list[MetricSeries]:
        """Return the deciding series as far as they are measured."""
        return paired_differences.metric_series(
            self._spec.cells, self._journal.measurements, self._complete(), self._history(),
            self._context.policy, paired_differences.day(self._journal.begun.at),
        )  # fmt: skip

    def _block(self, block: int, cells: Sequence[WorkloadCell]) -> None:
        """Measure what the journal does not hold of *block*."""
        spec = self._spec
        order = sides(self._journal.begun.seed, block) if spec.rule else ("candidate",)
        launches = (
            [range(len(order))] if spec.at_once else [range(n, n + 1) for n in range(len(order))]
        )
        complete = {(one.block, one.position) for one in self._journal.launches}
        for positions in launches:
            if (block, positions[0]) not in complete:
                self._launch(block, order, positions, cells)

    def _launch(
        self,
        block: int,
        order: Sequence[Side],
        positions: Sequence[int],
        cells: Sequence[WorkloadCell],
    ) -> None:
        """Measure *cells* at *positions* on fresh servers, again if a baseline's server ends."""
        for _ in range(self._spec.attempts):
            number = 1 + max((one.launch for one in self._journal.measurements), default=-1)
            with (
                contextlib.suppress(_ServerLost),
                self._launcher(sorted({order[position] for position in positions})) as servers,
            ):
                for position in positions:
                    side = order[position]
                    for cell in cells:
                        blank = Measurement(cell.name, block, number, side, position)
                        self._measure(cell, blank, servers[side])
                other = self._profile(servers)
                profiled = tuple(servers) if self._spec.contract else ()
                launch = LaunchRecord(number, block, positions[0], profiled, other)
                self._journal.add(JournalLine(launch=launch))
                return
        raise _Stop(self._journal.measurements[-1].reasons[0])

    def _profile(self, servers: dict[Side, RunningServer]) -> str:
        """
        Profile the servers, and return how the baseline's kernels differ from the contract.

        A stock wheel may serve the recipe with other kernels; the candidate may not. The
        measurements are over by then.
        """
        other = ""
        if self._spec.contract is None:
            return other
        for side, server in servers.items():
            fault = self._spec.contract(side, server)
            if fault is None:
                continue
            message = f"{fault.name}: {fault.message}"
            if side == "candidate" or fault.state != "fail":
                verdict: State = "fail" if fault.state == "fail" else "invalid"
                raise _Stop(Reason(fault.reason, f"{side}: {message}"), verdict)
            other = message
        return other

    def _measure(self, cell: WorkloadCell, blank: Measurement, server: RunningServer) -> None:
        """Measure once, and again if the machine was disturbed or a request failed."""
        attempts, seed = self._spec.attempts, self._journal.begun.seed
        cell = self._sized(cell, server)
        for attempt in range(attempts):
            place = replace(blank, attempt=attempt)
            result = measure(self._context, server, cell, place, prompts_seed(seed, place))
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
        text = f"{attempts} times in a row: {reason.message} ({reason.reference})"
        passing = reason.reference in state_checks.REASONS
        raise _Stop(Reason(UNSTEADY if passing else reason.reference, text))

    def _lost(self, result: Measurement, reason: Reason) -> None:
        """
        Raise for a server that ended: a candidate fails if it had started.

        One that ended before its first answer may have been started wrongly, like the other.
        """
        if result.side != "candidate":
            raise _ServerLost
        own = (one for one in self._journal.measurements if one.launch == result.launch)
        if any(one.before and one.side == "candidate" for one in own):
            says = f"the candidate's server ended under load; {reason.message}"
            raise _Stop(Reason(CRASHED, says), "fail")
        raise _Stop(reason)

    def _sized(self, cell: WorkloadCell, server: RunningServer) -> WorkloadCell:
        """Return *cell* with its number of requests, which then holds for both sides."""
        if cell.name not in self._sizes:
            seconds = None
            # A server that does not answer is found by the measurement itself.
            with contextlib.suppress(LoadError):
                trial = replace(cell, requests=cell.concurrency)
                if not cell.requests and server.guard():
                    load = self._context.load(server.url, trial, 1)
                    seconds = self._context.generator.measure(load).seconds
            self._sizes[cell.name] = self._context.rule.requests(cell, seconds)
        return replace(cell, requests=self._sizes[cell.name])

    def _cool_down(self, reason: Reason) -> None:
        """Wait until the machine is as it should be again, or for all its cool-downs."""
        for _ in range(self._context.policy.cooldown_retries):
            with console.step(f"wait for the machine to settle ({reason.reference})"):
                self._context.wait(self._context.cooldown)
            snapshot = self._context.machine.snapshot()
            if not self._context.machine.disturbances(snapshot, snapshot):
                return
