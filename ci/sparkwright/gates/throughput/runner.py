"""
The run of an experiment: launches and measurements in A B B A order, repeated where the machine was
disturbed, until there is a decision.

A gate measures an A/A block first (baseline against a control of the same wheel), then blocks of
baseline against candidate. Every block has fresh launches, the unit of replication.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

from sparkwright.bench.machine import state_checks
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.records import Reason, Side
from sparkwright.bench.statistics.eprocess import Decision, DecisionRule, MetricSeries, decide
from sparkwright.gates.throughput import paired_differences
from sparkwright.gates.throughput.journal import (
    Closed,
    Discarded,
    Journal,
    Measured,
    Sized,
    discarded,
)
from sparkwright.gates.throughput.measurement import CRASHED
from sparkwright.gates.throughput.paired_differences import History
from sparkwright.gates.throughput.records import CONTROL_BLOCK, Measurement, ThroughputPolicy
from sparkwright.gates.throughput.server_pair import ServerPair

#: The reference of a run that the machine's own state spoiled again and again.
UNSTEADY = "machine-unsteady"

#: ``concurrent``: both servers run at the same time. ``sequential``: one at a time, and each launch
#: makes one measurement of each cell.
ServerMode = Literal["concurrent", "sequential"]


class Slot(msgspec.Struct, frozen=True):
    """The place of a measurement in a block: index of its cell, and where in A B B A it stands."""

    cell: int
    quad: int
    position: int


class RunSpec(msgspec.Struct, frozen=True):
    """
    What is measured.

    Attributes:
        cells: Workloads, deciding ones and others.
        rule: When it is decided; None for a bench, which measures *blocks* launches of the
            candidate alone.
        mode: See `ServerMode`. *quads*: of each cell in a concurrent block. *blocks*: the most.
        control: Measure an A/A block first.
        seed: Of orders and prompts.
        attempts: At a measurement, before the run is given up.
        history: Earlier A/A blocks, by series. *today*: the day from which their age counts.
        whole: Measure every block, whatever is decided; a calibration does.
    """

    cells: tuple[WorkloadCell, ...]
    rule: DecisionRule | None
    policy: ThroughputPolicy
    mode: ServerMode
    quads: int
    blocks: int
    seed: int
    attempts: int
    history: History = {}
    today: str = "1970-01-01"
    control: bool = False
    whole: bool = False


class RunOutcome(msgspec.Struct, frozen=True):
    """
    What a run came to.

    Attributes:
        measurements: All of them. *blocks*: those that are complete.
        decision: None for a bench, or before the first complete block.
        stopped: Why it was given up; None if it was not.
        outlook: What the noise supports, as said before the first block.
    """

    measurements: tuple[Measurement, ...]
    blocks: frozenset[int]
    decision: Decision | None
    stopped: Reason | None = None
    outlook: str = ""


class _Stop(Exception):
    """A measurement that ends the run."""

    def __init__(self, reason: Reason) -> None:
        self.reason = reason
        super().__init__(reason.says)


class _ServerLost(Exception):
    """The server of a baseline or control ended; its launch is repeated."""


def sides(seed: int, block: int) -> tuple[Side, Side, Side, Side]:
    """Return the order in a block, A B B A or B A A B, by a coin that the seed decides."""
    other: Side = "control" if block == CONTROL_BLOCK else "candidate"
    heads = random.Random(f"{seed}/order/{block}").random() < 0.5  # noqa: S311  fairness, not secrecy
    outer, inner = ("baseline", other) if heads else (other, "baseline")
    return outer, inner, inner, outer  # type: ignore[return-value]  # mypy widens the literals of a conditional tuple


def prompts_seed(seed: int, block: int, slot: Slot, attempt: int) -> int:
    """Return the seed of a measurement's prompts: a new one each time, so no cache has seen them."""
    place = f"{seed}/{block}/{slot.cell}/{slot.quad}/{slot.position}/{attempt}"
    return random.Random(place).randrange(1, 2**31)  # noqa: S311


def slots(mode: ServerMode, launch: int, cells: Sequence[int], quads: int) -> list[Slot]:
    """Return the measurements of the launch number *launch* of a block, in their order."""
    if mode == "sequential":
        return [Slot(cell, 0, launch) for cell in cells]
    return [
        Slot(cell, quad, place) for cell in cells for quad in range(quads) for place in range(4)
    ]


class Runner:
    """Measures *spec* on *servers* with `run`, and continues what *journal* holds."""

    def __init__(self, spec: RunSpec, servers: ServerPair, journal: Journal) -> None:
        self._spec, self._servers, self._journal = spec, servers, journal
        self._measurements, self._closed = list(journal.past.measurements), set(journal.past.closed)
        self._sizes = dict(journal.past.sizes)
        self._launches: dict[Side, int] = defaultdict(int)
        for one in self._measurements:
            self._launches[one.side] = max(self._launches[one.side], one.launch + 1)

    def run(self) -> RunOutcome:
        """Measure until there is a decision, or the most blocks are complete."""
        spec, decision, stopped, outlook = self._spec, None, None, ""
        try:
            if spec.control and CONTROL_BLOCK not in self._closed:
                self._block(CONTROL_BLOCK, [i for i, cell in enumerate(spec.cells) if cell.primary])
            if spec.rule and spec.control:
                outlook = paired_differences.outlook(self.series(), spec.rule)
                self._servers.tell(outlook)
            decision = self._decide()
            for block in range(spec.blocks):
                if decision and decision.state and not spec.whole:
                    break
                if block not in self._closed:
                    self._block(block, self._open_cells(decision))
                    decision = self._decide()
                    text = f": {decision.message}" if decision else ""
                    self._servers.tell(f"block {block + 1} of at most {spec.blocks}{text}")
        except _Stop as stop:
            stopped = stop.reason
        complete = frozenset(self._closed - {CONTROL_BLOCK})
        return RunOutcome(tuple(self._measurements), complete, decision, stopped, outlook)

    def series(self) -> list[MetricSeries]:
        """Return the deciding series as far as they are measured."""
        spec, blocks = self._spec, self._closed - {CONTROL_BLOCK}
        history = spec.history
        if spec.control:
            history = paired_differences.control_history(
                history, self._measurements, spec.cells, spec.mode
            )
        return paired_differences.metric_series(
            spec.cells, self._measurements, blocks, history, spec.policy, spec.today
        )

    def _decide(self) -> Decision | None:
        rule = self._spec.rule
        return decide(rule, self.series()) if rule and self._closed - {CONTROL_BLOCK} else None

    def _open_cells(self, decision: Decision | None) -> list[int]:
        """Return the cells that need another block; all before the first decision."""
        cells = self._spec.cells
        if decision is None or self._spec.whole:
            return list(range(len(cells)))
        names = set(decision.open)
        return [
            index
            for index, cell in enumerate(cells)
            if names & set(paired_differences.series_names(cell))
        ]

    def _block(self, block: int, cells: Sequence[int]) -> None:
        spec = self._spec
        order = sides(spec.seed, block)
        launches: Sequence[Sequence[Side]] = [(side,) for side in order]
        if spec.rule is None:
            launches = [("candidate",)]
        elif spec.mode == "concurrent":
            launches = [order[:2]]
        for number, together in enumerate(launches):
            if spec.rule is None:
                wanted = [Slot(cell, quad, 0) for cell in cells for quad in range(spec.quads)]
            else:
                wanted = slots(spec.mode, number, cells, spec.quads)
            own = [
                one
                for one in self._measurements
                if one.block == block and not one.discarded
                and (len(launches) == 1 or one.position == number)
            ]  # fmt: skip
            names = {spec.cells[slot.cell].name for slot in wanted}
            # A sequential launch that was complete before an interruption stays; others are redone.
            if len(launches) > 1 and {one.cell for one in own if one.counts} == names:
                continue
            self._discard(own)
            self._launch(block, wanted, together)
        self._closed.add(block)
        self._journal.add(Closed(block))

    def _launch(self, block: int, wanted: Sequence[Slot], together: Sequence[Side]) -> None:
        """Measure *wanted* on fresh servers, again if a server of the baseline ends."""
        order = sides(self._spec.seed, block)
        for _ in range(self._spec.attempts):
            numbers = {side: self._launches[side] for side in together}
            for side, number in numbers.items():
                self._launches[side] = number + 1
            try:
                with self._servers.launch(together):
                    for slot in wanted:
                        side = order[slot.position] if self._spec.rule else "candidate"
                        self._measure(block, slot, side, numbers[side])
            except _ServerLost:
                own = [one for one in self._measurements if numbers.get(one.side) == one.launch]
                self._discard(own)
            else:
                return
        raise _Stop(self._measurements[-1].reasons[0])

    def _discard(self, measurements: Collection[Measurement]) -> None:
        """Discard *measurements*, whose launches were interrupted."""
        gone = {(one.side, one.launch) for one in measurements}
        for side, launch in sorted(gone):
            self._journal.add(Discarded(side, launch))
        self._measurements = [
            discarded(one) if (one.side, one.launch) in gone and not one.discarded else one
            for one in self._measurements
        ]

    def _measure(self, block: int, slot: Slot, side: Side, launch: int) -> None:
        """Measure once, and again where the machine was disturbed or a request failed."""
        spec = self._spec
        cell = self._sized(spec.cells[slot.cell], side)
        for attempt in range(spec.attempts):
            place = slot.quad, slot.position, attempt
            blank = Measurement(cell.name, block, launch, side, *place, 0.0)
            seed = prompts_seed(spec.seed, block, slot, attempt)
            result = self._servers.measure(cell, blank, seed)
            self._measurements.append(result)
            self._journal.add(Measured(result))
            if result.counts:
                return
            reason = result.reasons[0]
            if side == "candidate" and not self._servers.alive(side) and self._answered(launch):
                says = f"its server ended after it had answered; {reason.says}"
                raise _Stop(Reason(CRASHED, says))
            if not result.discarded:
                raise _Stop(reason)
            self._servers.tell(f"{cell.name}, {side}: measured again, {reason.says}")
            if not self._servers.alive(side):
                raise _ServerLost
            if reason.reference in state_checks.REASONS:
                for _ in range(spec.policy.cooldown_retries):
                    if self._servers.cool_down(reason):
                        break
        text = f"{spec.attempts} times in a row: {reason.says} ({reason.reference})"
        reference = UNSTEADY if reason.reference in state_checks.REASONS else reason.reference
        raise _Stop(Reason(reference, text))

    def _answered(self, launch: int) -> bool:
        """Return whether the candidate gave a measurement in *launch* before it ended."""
        own = (one for one in self._measurements if (one.side, one.launch) == ("candidate", launch))
        return any(one.run for one in own)

    def _sized(self, cell: WorkloadCell, side: Side) -> WorkloadCell:
        """Return *cell* with its number of requests, which then holds for both sides."""
        if cell.name not in self._sizes:
            self._sizes[cell.name] = cell.requests or self._servers.requests(cell, side)
            self._journal.add(Sized(cell.name, self._sizes[cell.name]))
        return msgspec.structs.replace(cell, requests=self._sizes[cell.name])
