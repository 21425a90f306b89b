"""
The course of a gate: launches and legs in their order, again where the machine was disturbed, until a decision.

What is measured with is a `Servers`: servers, a load generator and the machine's state. It is real on a Spark and a model in simulations; the
course, the journal, the validity of legs and the decision are the same code in both.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.records import Reason, Side
from sparkwright.bench.statistics.decision import Decision, Rule, decide
from sparkwright.gates.throughput import abba_schedule, paired_differences
from sparkwright.gates.throughput.abba_schedule import Resident, Slot
from sparkwright.gates.throughput.journal import Closed, Discarded, Journal, Measured, Sized, aside
from sparkwright.gates.throughput.paired_differences import NoiseModel
from sparkwright.gates.throughput.records import Measurement

#: The reference of a course that was given up as the machine spoiled one leg again and again.
UNSTEADY = "machine-unsteady"


class Servers(Protocol):
    """What a course measures with."""

    def launch(self, sides: Sequence[Side]) -> contextlib.AbstractContextManager[None]:
        """Start fresh servers for *sides* at the same time, and end them behind the block."""
        ...

    def size(self, cell: WorkloadCell, side: Side) -> int:
        """Return how many requests a leg of *cell* makes, from how long some take at the server of *side*."""
        ...

    def leg(self, cell: WorkloadCell, blank: Measurement, seed: int) -> Measurement:
        """Measure *cell* at the server of ``blank.side`` and return *blank* filled in; a server that died is a reason, no exception."""
        ...

    def cool(self, reasons: Sequence[Reason]) -> bool:
        """Wait a while, and return whether the machine is as it should be again."""
        ...

    def tell(self, news: str) -> None:
        """Say something in passing."""
        ...


class RunSpec(msgspec.Struct, frozen=True):
    """
    What is to be measured.

    Attributes:
        cells: Workloads, the deciding ones and others.
        rule: When it is decided; None for a bench, which measures ``blocks`` launches of the candidate alone.
        resident: See `places`. *quads*: of each cell in a block. *blocks*: the most.
        seed: Of orders and prompts.
        attempts: At a leg, before the machine is given up. *waits*: for it to calm down, between two of them.
        known: What a calibration says of each series, by name.
        whole: Measure every block of ``blocks``, whatever is decided; a calibration does.
    """

    cells: tuple[WorkloadCell, ...]
    rule: Rule | None
    resident: Resident
    quads: int
    blocks: int
    seed: int
    attempts: int
    known: Mapping[str, NoiseModel] = {}
    waits: int = 1
    whole: bool = False


class RunOutcome(msgspec.Struct, frozen=True):
    """
    What a course came to.

    Attributes:
        legs: All of them. *blocks*: those that are whole.
        decision: None for a bench, or before the first whole block.
        stopped: Why it was given up; None where it was not.
    """

    legs: tuple[Measurement, ...]
    blocks: frozenset[int]
    decision: Decision | None
    stopped: Reason | None = None


class _Stop(Exception):
    """A leg that ends the course."""

    def __init__(self, reason: Reason) -> None:
        self.reason = reason
        super().__init__(reason.says)


def run(course: RunSpec, world: Servers, journal: Journal) -> RunOutcome:
    """Measure until there is a decision, or the most blocks are there; continue what the journal holds."""
    return _Run(course, world, journal).run()


class _Run:
    def __init__(self, course: RunSpec, world: Servers, journal: Journal) -> None:
        self._course, self._world, self._journal = course, world, journal
        self._legs, self._closed = list(journal.past.legs), set(journal.past.closed)
        self._starts: dict[Side, int] = defaultdict(int)
        self._sizes = dict(journal.past.sizes)
        for leg in self._legs:
            self._starts[leg.side] = max(self._starts[leg.side], leg.launch + 1)

    def run(self) -> RunOutcome:
        stopped, decision = None, self._decide()
        block = 0
        try:
            while block < self._course.blocks and not (decision and decision.state and not self._course.whole):
                if block not in self._closed:
                    self._block(block, self._open(decision))
                    self._journal.add(Closed(block))
                    self._closed.add(block)
                    decision = self._decide()
                    self._tell(block, decision)
                block += 1
        except _Stop as stop:
            stopped = stop.reason
        return RunOutcome(tuple(self._legs), frozenset(self._closed), decision, stopped)

    def _decide(self) -> Decision | None:
        rule = self._course.rule
        if rule is None or not self._closed:
            return None
        return decide(rule, paired_differences.of(self._course.cells, self._legs, self._closed, self._course.known))

    def _open(self, decision: Decision | None) -> list[int]:
        """Return the cells that need another block: those with an open series, or all before the first decision."""
        cells = range(len(self._course.cells))
        if decision is None or self._course.whole:
            return list(cells)
        names = set(decision.open)
        return [cell for cell in cells if names & set(paired_differences.names(self._course.cells[cell]))]

    def _block(self, block: int, cells: list[int]) -> None:
        course = self._course
        turns = abba_schedule.launches(course.resident, course.seed, block) if course.rule else (("candidate",),)
        here = [leg for leg in self._legs if leg.block == block and not leg.discarded]
        for turn, sides in enumerate(turns):
            wanted = [one for one in self._places(turn) if one.cell in cells]
            # Taking turns, a launch that was whole before the interruption stays; with both servers at once, all begins anew.
            mine = [leg for leg in here if len(turns) == 1 or leg.position == turn]
            if len(turns) > 1 and {leg.cell for leg in mine if leg.counts} == {course.cells[one.cell].name for one in wanted}:
                continue
            self._set_aside(mine)
            numbers = {side: self._next(side) for side in sides}
            with self._world.launch(sides):
                for place in wanted:
                    side = abba_schedule.sides(course.seed, block)[place.position] if course.rule else "candidate"
                    self._measure(block, place, side, numbers[side])

    def _places(self, turn: int) -> list[Slot]:
        course = self._course
        if course.rule is None:
            return [Slot(0, cell, quad, 0) for cell in range(len(course.cells)) for quad in range(course.quads)]
        return abba_schedule.legs(course.resident, turn, len(course.cells), course.quads)

    def _next(self, side: Side) -> int:
        number = self._starts[side]
        self._starts[side] = number + 1
        return number

    def _set_aside(self, legs: Sequence[Measurement]) -> None:
        """Let *legs*, whose launches were broken off, no longer count."""
        gone = {(leg.side, leg.launch) for leg in legs}
        for side, launch in sorted(gone):
            self._journal.add(Discarded(side, launch))
        self._legs = [aside(leg) if (leg.side, leg.launch) in gone and not leg.discarded else leg for leg in self._legs]

    def _measure(self, block: int, place: Slot, side: Side, launch: int) -> None:
        """Measure one leg, again where the machine was disturbed; a leg that is invalid by itself ends the course."""
        course = self._course
        cell = self._sized(course.cells[place.cell], side)
        for attempt in range(course.attempts):
            blank = Measurement(cell.name, block, launch, side, place.quad, place.position, attempt, 0.0)
            leg = self._world.leg(cell, blank, abba_schedule.prompts_seed(course.seed, block, place, attempt))
            self._legs.append(leg)
            self._journal.add(Measured(leg))
            if leg.counts:
                return
            if not leg.discarded:
                raise _Stop(leg.reasons[0])
            self._world.tell(f"{cell.name}, {side}: measured again, {leg.reasons[0].says}")
            for _ in range(course.waits):
                if self._world.cool(leg.reasons):
                    break
        last = self._legs[-1].reasons[0]
        raise _Stop(Reason(UNSTEADY, f"{course.attempts} times in a row: {last.says} ({last.reference})"))

    def _sized(self, cell: WorkloadCell, side: Side) -> WorkloadCell:
        """Return *cell* with its number of requests, which is found once and then holds for both sides."""
        if cell.name not in self._sizes:
            self._sizes[cell.name] = cell.requests or self._world.size(cell, side)
            self._journal.add(Sized(cell.name, self._sizes[cell.name]))
        return msgspec.structs.replace(cell, requests=self._sizes[cell.name])

    def _tell(self, block: int, decision: Decision | None) -> None:
        course = self._course
        kind = "block" if course.rule else "launch"
        self._world.tell(f"{kind} {block + 1} of at most {course.blocks}" + (f": {decision.says}" if decision else ""))
