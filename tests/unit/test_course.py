"""The course of a throughput gate: its order, its journal, what interrupts it, and how often it errs, on a simulated machine."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.mounts import mounting_shell

from sparkwright.bench.load.load_spec import LoadResult, LoadSpec, Request
from sparkwright.bench.machine.state_checks import MachinePolicy
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.records import Side
from sparkwright.bench.statistics.decision import Rule
from sparkwright.bench.statistics.noise import Machine, Noise
from sparkwright.core import strict_yaml
from sparkwright.gates.core import journal as journal_file
from sparkwright.gates.throughput import abba_schedule, journal, paired_differences, runner
from sparkwright.gates.throughput.journal import Begun, Journal
from sparkwright.gates.throughput.paired_differences import NoiseModel
from sparkwright.gates.throughput.policy import ThroughputPolicy
from sparkwright.gates.throughput.records import Measurement
from sparkwright.gates.throughput.runner import RunOutcome, RunSpec
from sparkwright.gates.throughput.simulated import Simulated

GATES = Path(__file__).parents[2] / "ci" / "gates"
POLICY = strict_yaml.load(GATES / "throughput.yaml", ThroughputPolicy)
STATES = strict_yaml.load(GATES / "machine.yaml", MachinePolicy)
ONE, MANY = WorkloadCell(1024, 1024, 1, 2, primary=("tpot", "ttft")), WorkloadCell(1024, 1024, 8, 8, primary=("rate",))
QUIET = Noise(run=0.002, launch=0.003, drift=0.003, tail=0.0)
KNOWN = {name: NoiseModel(0.006) for cell in (ONE, MANY) for name in paired_differences.names(cell)}


def asked(**changes: object) -> RunSpec:
    rule = Rule(POLICY.margin, POLICY.alpha, POLICY.least, POLICY.most)
    plain = RunSpec((ONE, MANY), rule, "both", 3, POLICY.most, 7, STATES.discards + 1, KNOWN)
    return msgspec.structs.replace(plain, **changes)


def simulated(noise: Noise = QUIET, seed: int = 1) -> Simulated:
    return Simulated(Machine(noise, seed), POLICY, STATES)


def opened(path: Path, identity: str = "same") -> Journal:
    return Journal(path, Begun(identity, {"wheel": identity}, 7, 0.0))


def ran(path: Path, world: runner.Servers, plan: RunSpec) -> RunOutcome:
    with opened(path) as kept:
        return runner.run(plan, world, kept)


class Killed(BaseException):
    """What ends a course in the middle, as a kill does."""


class Fragile(Simulated):
    """A world that dies after so many legs; the next one goes on with the same machine."""

    def __init__(self, left: int, now: float = 0.0) -> None:
        super().__init__(Machine(Noise(run=0, launch=0, drift=0, tail=0, slowdown=0.05), 3), POLICY, STATES)
        self.left, self.now = left, now

    def measure(self, order: LoadSpec) -> LoadResult:
        if self.left == 0:
            raise Killed
        self.left -= 1
        return super().measure(order)


def counted(legs: Sequence[Measurement]) -> list[tuple[str, int, Side, int, int, float]]:
    return [(leg.cell, leg.block, leg.side, leg.quad, leg.position, round(leg.run.tpot, 9)) for leg in legs if leg.counts and leg.run]


def test_a_slower_candidate_fails_and_is_named(tmp_path: Path) -> None:
    """Five percent are found within few blocks, and the cells that are slower are named."""
    found = ran(tmp_path / "j", simulated(msgspec.structs.replace(QUIET, slowdown=math.log(1.05))), asked())
    assert found.decision
    assert found.decision.state == "fail"
    assert "1024/1024 c1: time per token" in found.decision.culprits
    assert len(found.blocks) <= 4


def test_an_equal_candidate_passes(tmp_path: Path) -> None:
    """On a quiet machine an equal candidate passes, after at least the blocks that the policy wants."""
    found = ran(tmp_path / "j", simulated(), asked())
    assert found.decision
    assert found.decision.state == "pass"
    assert POLICY.least <= len(found.blocks) < POLICY.most


@pytest.mark.parametrize("resident", ["both", "turns"])
def test_every_block_has_fresh_launches_in_abba(resident: abba_schedule.Resident, tmp_path: Path) -> None:
    """A quad is A B B A or B A A B; with both servers up they are two launches a block, taking turns they are four."""
    found = ran(tmp_path / "j", simulated(), asked(resident=resident, blocks=3, whole=True))
    for block in range(3):
        legs = [leg for leg in found.legs if leg.block == block and leg.cell == ONE.name]
        assert len({(leg.side, leg.launch) for leg in legs}) == (2 if resident == "both" else 4)
        for quad in {leg.quad for leg in legs}:
            order = [leg.side for leg in sorted(legs, key=lambda one: one.position) if leg.quad == quad]
            assert order in (["baseline", "candidate", "candidate", "baseline"], ["candidate", "baseline", "baseline", "candidate"])
    launched = [(leg.side, leg.launch) for leg in found.legs if leg.cell == ONE.name]
    assert len(set(launched)) == (6 if resident == "both" else 12)


def test_both_orders_come_up() -> None:
    """Which side is first is a fair coin for each block, decided by the seed."""
    firsts = [abba_schedule.sides(seed, block)[0] for seed in range(20) for block in range(10)]
    assert 60 < firsts.count("baseline") < 140


def test_no_two_legs_have_the_same_prompts() -> None:
    """The seed of the prompts is another one for each leg and attempt."""
    every = [
        abba_schedule.prompts_seed(7, block, place, attempt)
        for block in range(5) for attempt in range(2) for place in abba_schedule.legs("both", 0, 4, 3)
    ]  # fmt: skip
    assert len(set(every)) == len(every)


def test_a_settled_cell_is_not_measured_again(tmp_path: Path) -> None:
    """Once all series of a cell have passed, later blocks spend their time on the others."""
    noisy = {**KNOWN, paired_differences.names(MANY)[0]: NoiseModel(0.03)}
    found = ran(tmp_path / "j", simulated(), asked(known=noisy))
    blocks = {cell.name: {leg.block for leg in found.legs if leg.cell == cell.name} for cell in (ONE, MANY)}
    assert blocks[ONE.name] < blocks[MANY.name]


@pytest.mark.parametrize("resident", ["both", "turns"])
@settings(max_examples=25, deadline=None)
@given(kills=st.lists(st.integers(0, 40), max_size=4))
def test_a_course_that_is_killed_anywhere_ends_with_the_same_verdict(
    resident: abba_schedule.Resident, kills: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Killed between any two legs and gone on with, it decides as undisturbed, from the same places, each measured once in a launch."""
    folder = tmp_path_factory.mktemp("course")
    plan = asked(resident=resident, cells=(ONE,))
    whole = ran(folder / "whole", Fragile(-1), plan)
    now = 0.0
    for kill in kills:
        world = Fragile(kill, now)
        try:
            ran(folder / "cut", world, plan)
        except Killed:
            now = world.now
        else:
            break
    else:
        world = Fragile(-1, now)
        ran(folder / "cut", world, plan)
    with opened(folder / "cut") as kept:
        cut = runner.run(plan, Fragile(0), kept)
    assert whole.decision
    assert cut.decision
    assert (cut.decision.state, cut.blocks) == (whole.decision.state, whole.blocks)
    assert sorted(counted(cut.legs)) == sorted(counted(whole.legs))


def test_taking_turns_a_whole_launch_survives(tmp_path: Path) -> None:
    """With one server at a time, what a whole launch measured before a kill is not measured again; a cut one is."""
    plan = asked(resident="turns")
    with pytest.raises(Killed):
        ran(tmp_path / "j", Fragile(5), plan)
    found = ran(tmp_path / "j", Fragile(-1, 1000.0), plan)
    first = [leg for leg in found.legs if leg.block == 0]
    assert [leg.counts for leg in first] == [True] * 4 + [False] + [True] * 4
    assert first[4].reasons[0].reference == "interrupted"


def test_another_question_does_not_continue_a_journal(tmp_path: Path) -> None:
    """A journal of another wheel or machine is kept beside, and what differs is told."""
    with pytest.raises(Killed):
        ran(tmp_path / "j", Fragile(5), asked())
    with opened(tmp_path / "j", "another") as kept:
        assert kept.refused == ("wheel",)
        assert not kept.past.legs
    assert (tmp_path / "j.before").exists()


def test_a_journal_with_a_result_is_not_continued(tmp_path: Path) -> None:
    """After a result the next run measures anew."""
    with opened(tmp_path / "j") as kept:
        kept.add(journal.Ended("pass"))
    assert journal.read(tmp_path / "j") is None


def test_a_half_written_line_is_nobodys(tmp_path: Path) -> None:
    """What a kill left of a line is cut off, and the journal goes on behind the whole ones."""
    with pytest.raises(Killed):
        ran(tmp_path / "j", Fragile(6), asked())
    whole = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(whole + whole.splitlines()[-1][:40])
    with opened(tmp_path / "j") as kept:
        assert len(kept.past.legs) == 6
    assert (tmp_path / "j").read_bytes().startswith(whole)
    past = journal.read(tmp_path / "j")
    assert past
    assert past.resumed == 1


def test_a_slow_state_is_waited_out_and_never_blamed(tmp_path: Path) -> None:
    """Legs in the hidden slow state are discarded and measured again; the candidate passes although they fell on it."""
    found = ran(tmp_path / "j", simulated(msgspec.structs.replace(QUIET, flips=4.0), 5), asked(waits=POLICY.waits))
    assert found.decision
    assert found.decision.state == "pass"
    again = [leg for leg in found.legs if leg.discarded]
    assert again
    assert {leg.reasons[0].reference for leg in again} == {"slow-state"}


def test_a_machine_that_stays_slow_is_given_up(tmp_path: Path) -> None:
    """After some discards in a row the course stops; that is no failure of the wheel."""
    stuck = Noise(run=0.002, launch=0.003, drift=0.003, tail=0, flips=3600.0, flip_seconds=1e6)
    found = ran(tmp_path / "j", simulated(stuck), asked())
    assert found.stopped
    assert found.stopped.reference == runner.UNSTEADY
    assert len(found.legs) == STATES.discards + 1


class Broken(Simulated):
    """A server whose answers break off from the third leg on."""

    legs = 0

    def measure(self, order: LoadSpec) -> LoadResult:
        run = super().measure(order)
        self.legs += 1
        broken = tuple(msgspec.structs.replace(one, error="the stream ended") for one in run.requests)
        return msgspec.structs.replace(run, requests=broken) if self.legs > 2 else run


def test_an_invalid_leg_ends_the_course(tmp_path: Path) -> None:
    """A leg that is wrong by itself is never averaged nor tried again: the course stops at it, and says why."""
    found = ran(tmp_path / "j", Broken(Machine(QUIET, 1), POLICY, STATES), asked())
    assert found.stopped
    assert found.stopped.reference == "request-failed"
    assert len(found.legs) == 3
    assert found.decision is None


def test_a_bench_has_one_launch_a_block(tmp_path: Path) -> None:
    """Without a baseline, each block is one fresh launch of the candidate with all cells."""
    found = ran(tmp_path / "j", simulated(), asked(rule=None, blocks=4))
    assert [leg.launch for leg in found.legs if leg.cell == ONE.name and leg.quad == 0] == [0, 1, 2, 3]
    assert {leg.side for leg in found.legs} == {"candidate"}
    assert found.decision is None


def gates(slowdown: float, count: int, folder: Path) -> Iterator[str]:
    """Yield the verdicts of *count* whole gates through the real course, journal on disk included."""
    for seed in range(count):
        noise = msgspec.structs.replace(QUIET, slowdown=slowdown)
        found = ran(folder / f"{slowdown}-{seed}", simulated(noise, seed), asked(cells=(ONE,)))
        yield str(found.decision and found.decision.state)


def test_whole_gates_rarely_err(tmp_path: Path) -> None:
    """Sixty whole gates: equal wheels never fail, those slower by 1.5 margins never pass (the benchmark has thousands, with bounds)."""
    assert "fail" not in set(gates(0.0, 30, tmp_path))
    assert "pass" not in set(gates(1.5 * math.log1p(POLICY.margin), 30, tmp_path))


def test_a_difference_has_the_sign_of_worse() -> None:
    """A longer time and a lower rate both make d positive."""
    def leg(side: Side, position: int, seconds: float) -> Measurement:
        run = LoadResult("g", "", seconds, (Request(0, seconds / 10, seconds, 8, 8),))
        return Measurement(ONE.name, 0, 0, side, 0, position, 0, 0.0, run)

    legs = [leg("baseline", 0, 1.0), leg("candidate", 1, 1.1), leg("candidate", 2, 1.1), leg("baseline", 3, 1.0)]
    for metric in ("tpot", "ttft", "rate"):
        assert paired_differences.difference(legs, ONE.name, 0, metric) == pytest.approx(math.log(1.1))
    assert paired_differences.difference(legs[:3], ONE.name, 0, "tpot") is None


def test_a_full_disk_loses_no_leg(tmp_path: Path) -> None:
    """A journal that finds no room says so; what it had written stays whole, and the course goes on from there once there is room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    program = (
        "import sys; from pathlib import Path; from tests.unit.test_course import *\n"
        "ran(Path(sys.argv[1]) / 'j', Fragile(-1), asked(whole=True, blocks=12))\n"
    )
    once = f'"{sys.executable}" -c "$PROGRAM" "{disk}"'
    steps = (
        f'mount -t tmpfs -o size=32k none "{disk}" && {{ {once}; echo "first $?"; wc -l < "{disk}/j"; '
        f'mount --options-mode ignore -o remount,size=40m "{disk}"; {once}; echo "second $?"; '
        f'cp "{disk}/j" "{tmp_path}/after"; umount "{disk}"; }}'
    )
    isolated = [*mounting_shell(), steps]
    root = Path(__file__).parents[2]
    done = subprocess.run(isolated, capture_output=True, text=True, check=False, cwd=root, env={**os.environ, "PROGRAM": program})
    first, lines, second = done.stdout.split("\n")[:3]
    assert (first, second) == ("first 1", "second 0")
    assert "StoreError: " in done.stderr
    past = journal_file.read(tmp_path / "after", journal.Line, largest=journal.LARGEST, what="journal")
    assert len(past) > int(lines) > 3
    assert any(isinstance(line, journal.Resumed) for line in past)
