"""A whole throughput gate on simulated servers: its order, its journal, and what interrupts it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.support.mounts import mounting_shell
from tests.support.simulated_servers import Noise, SimulatedServer, SimulatedServers

from sparkwright.bench.load.vllm_bench import LoadError, LoadResult, LoadSpec, Request
from sparkwright.bench.machine.state_checks import MachinePolicy
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.records import Side
from sparkwright.bench.results import CONTROL_BLOCK, Measurement
from sparkwright.bench.statistics.eprocess import DecisionRule
from sparkwright.core import strict_yaml
from sparkwright.core.store import read_lines
from sparkwright.gates.contract.policy import UNWANTED
from sparkwright.gates.core.verdict import failed, invalid
from sparkwright.gates.throughput import gate, paired_differences, runner
from sparkwright.gates.throughput.policy import ThroughputPolicy
from sparkwright.gates.throughput.runner import (
    ExperimentStart,
    JournalLine,
    MeasurementJournal,
    Runner,
    RunOutcome,
    RunSpec,
)

GATES = Path(__file__).parents[2] / "ci" / "gates"
POLICY = strict_yaml.load(GATES / "throughput.yaml", ThroughputPolicy)
MACHINE = strict_yaml.load(GATES / "machine.yaml", MachinePolicy)
ALONE = WorkloadCell(1024, 1024, 1, 2, primary=("tpot",))
MANY = WorkloadCell(1024, 1024, 8, 8, primary=("rate",))
SLOWER = Noise(slowdown=math.log(1.05))


def specified(**changes: object) -> RunSpec:
    rule = DecisionRule(POLICY.alpha, POLICY.min_blocks, POLICY.max_blocks)
    history = {
        name: [("1969-12-30", 0.004), ("1969-12-30", -0.004)] * 4
        for cell in (ALONE, MANY)
        for name in paired_differences.series_names(cell)
    }
    plain = RunSpec(
        (ALONE, MANY), rule, POLICY.max_blocks, MACHINE.discards + 1, True, history, control=True
    )
    return replace(plain, **changes)


def simulated(noise: Noise | None = None, seed: int = 1) -> SimulatedServers:
    return SimulatedServers(noise or Noise(), POLICY, MACHINE, seed)


def opened(path: Path, wheel: str = "same") -> MeasurementJournal:
    about = {"wheel": wheel}
    return MeasurementJournal(path, about, lambda: ExperimentStart(about, 7, 0.0))


def ran(path: Path, servers: SimulatedServers, spec: RunSpec | None = None) -> RunOutcome:
    return Runner(spec or specified(), servers.context, servers.launch, opened(path)).run()


def legs(path: Path) -> list[Measurement]:
    """Return the measurements of the journal at *path*."""
    return opened(path).measurements


def state(outcome: RunOutcome) -> str | None:
    return outcome.decision.state if outcome.decision else None


def stopped(outcome: RunOutcome) -> tuple[str, str]:
    assert outcome.stopped
    return outcome.stopped[0], outcome.stopped[1].reference


class Killed(BaseException):
    """The end of a run in the middle, as by a kill."""


class Fragile(SimulatedServers):
    """Servers that are killed after *limit* measurements; the next ones continue at *now*."""

    def __init__(self, limit: int, now: float = 0.0) -> None:
        super().__init__(Noise(launch=0, run=0, slowdown=0.05), POLICY, MACHINE, 3)
        self.limit, self.now = limit, now

    def measure(self, spec: LoadSpec) -> LoadResult:
        if self.measured == self.limit:
            raise Killed
        return super().measure(spec)


class Breaking(SimulatedServers):
    """A server of a *side* ends under load some times, or its requests fail."""

    def __init__(self, side: Side = "candidate", crashes: int = 0, failures: int = 0) -> None:
        super().__init__(Noise(), POLICY, MACHINE)
        self.side, self.crashes, self.failures = side, crashes, failures

    def measure(self, spec: LoadSpec) -> LoadResult:
        server, result = self.at(spec.url), super().measure(spec)
        if server.side == self.side and self.measured > 11:
            if self.crashes:
                self.crashes -= 1
                server.end()
                raise LoadError("generator-failed", "connection refused")
            if self.failures:
                self.failures -= 1
                broken = replace(result.requests[0], error="the stream ended")
                return replace(result, requests=(broken, *result.requests[1:]))
        return result


def test_a_slower_candidate_fails_and_is_named(tmp_path: Path) -> None:
    """Five percent are found within few blocks, and the slower series are named."""
    outcome = ran(tmp_path / "j", simulated(SLOWER))
    assert outcome.decision
    assert state(outcome) == "fail"
    assert "1024/1024 c1: time per token" in outcome.decision.culprits
    assert len(outcome.blocks) <= 4


def test_an_equal_candidate_passes_and_the_outlook_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a quiet machine, after the fewest blocks; what the noise supports is said before them."""
    outcome = ran(tmp_path / "j", simulated())
    assert (state(outcome), len(outcome.blocks)) == ("pass", POLICY.min_blocks)
    assert "an equal wheel passes after about 3 blocks" in outcome.outlook
    told = " ".join(capsys.readouterr().err.split())
    assert told.index("an equal wheel passes") < told.index("block 1 of at most")


def test_a_noise_that_cannot_support_the_margin_is_told_before_the_first_block(
    tmp_path: Path,
) -> None:
    """With a launch effect of 4 %, a margin of 2 % needs more than twelve blocks."""
    outcome = ran(tmp_path / "j", simulated(Noise(launch=0.04)), specified(history={}, blocks=0))
    assert "does not support a margin of 2 % in 12 blocks" in outcome.outlook


@pytest.mark.parametrize("at_once", [True, False])
def test_every_block_has_fresh_launches_in_abba(at_once: bool, tmp_path: Path) -> None:
    """The A/A block, too: one launch of both servers, or four of one."""
    ran(tmp_path / "j", simulated(), specified(at_once=at_once, blocks=3, whole=True))
    numbers: set[int] = set()
    for block in (CONTROL_BLOCK, 0, 1, 2):
        own = [one for one in legs(tmp_path / "j") if one.block == block and one.cell == ALONE.name]
        launches = {one.launch for one in own}
        assert len(launches) == (1 if at_once else 4)
        assert not launches & numbers
        numbers |= launches
        order = [one.side for one in sorted(own, key=lambda one: one.position)]
        assert order[0] == order[3] != order[1] == order[2]
        assert set(order) == {"baseline", "control" if block == CONTROL_BLOCK else "candidate"}


def test_both_orders_occur_and_no_two_measurements_share_prompts() -> None:
    """The first side is a fair coin for each block; every measurement has its own prompts."""
    firsts = [runner.sides(seed, block)[0] for seed in range(20) for block in range(10)]
    assert 60 < firsts.count("baseline") < 140
    seeds = [
        runner.prompts_seed(7, Measurement(cell, 0, launch, "candidate", position, attempt))
        for cell in ("a", "b")
        for launch in range(5)
        for position in range(4)
        for attempt in range(2)
    ]
    assert len(set(seeds)) == len(seeds)


def test_a_settled_cell_is_not_measured_again(tmp_path: Path) -> None:
    """Once its series have passed, later blocks spend their time on the others."""
    noisy = {**specified().history, paired_differences.series_names(MANY)[0]: [("1969-12-30", 0.03)] * 8}
    ran(tmp_path / "j", simulated(), specified(history=noisy))
    blocks = {
        cell.name: {one.block for one in legs(tmp_path / "j") if one.cell == cell.name}
        for cell in (ALONE, MANY)
    }
    assert blocks[ALONE.name] < blocks[MANY.name]


@pytest.mark.parametrize("at_once", [True, False])
@settings(max_examples=15, deadline=None)
@given(kills=st.lists(st.integers(0, 20), max_size=4))
def test_a_run_that_is_killed_anywhere_ends_with_the_same_verdict(
    at_once: bool, kills: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Killed between any two measurements, it continues, and each counts once in a launch."""
    folder = tmp_path_factory.mktemp("run")
    spec = specified(at_once=at_once, cells=(ALONE,))
    whole = ran(folder / "whole", Fragile(-1), spec)
    now = 0.0
    for limit in [*kills, -1]:
        servers = Fragile(limit, now)
        try:
            cut = ran(folder / "cut", servers, spec)
        except Killed:
            now = servers.now
        else:
            break
    assert (state(cut), cut.blocks) == (state(whole), whole.blocks)
    counted = [
        sorted((one.block, one.position, one.side) for one in legs(folder / name) if one.counts)
        for name in ("cut", "whole")
    ]
    assert counted[0] == counted[1]


def test_a_complete_launch_survives_a_kill_and_another_experiment_does_not_continue(
    tmp_path: Path,
) -> None:
    """An interrupted launch is measured again; the journal of another wheel is kept beside."""
    spec = specified(at_once=False, control=False)
    with pytest.raises(Killed):
        ran(tmp_path / "j", Fragile(5), spec)
    whole = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(whole + whole.splitlines()[-1][:40])  # half a line is cut
    ran(tmp_path / "j", Fragile(-1, 1000.0), spec)
    first = [one for one in legs(tmp_path / "j") if one.block == 0]
    assert [one.counts for one in first] == [True] * 4 + [False] + [True] * 4
    assert first[4].reasons[0].reference == "interrupted"
    another = opened(tmp_path / "j", "another")
    assert (another.refused, another.measurements) == (("wheel",), [])
    assert (tmp_path / "j.before").exists()
    another.end()
    assert not (tmp_path / "j").exists()


def test_a_slow_state_is_waited_out_and_never_blamed(tmp_path: Path) -> None:
    """Measurements in a hidden slow state are repeated, the candidate passes; one that stays is given up."""
    outcome = ran(tmp_path / "j", simulated(Noise(slow=lambda second: second % 900 < 120), 5))
    assert state(outcome) == "pass"
    repeated = [one for one in legs(tmp_path / "j") if one.discarded]
    assert {one.reasons[0].reference for one in repeated} == {"slow-state"}
    assert stopped(ran(tmp_path / "k", simulated(Noise(slow=lambda _: True)))) == ("invalid", runner.UNSTEADY)
    assert len(legs(tmp_path / "k")) == MACHINE.discards + 1


def test_a_candidate_that_throttles_under_its_load_is_that_slow(tmp_path: Path) -> None:
    """Throttling that its own load causes is its result; nothing is repeated."""
    noise = Noise(slowdown=0.05, throttled={"candidate": ("hardware thermal slowdown",)})
    assert state(ran(tmp_path / "j", simulated(noise))) == "fail"
    assert not [one for one in legs(tmp_path / "j") if one.discarded]


def test_a_candidate_that_crashes_fails(tmp_path: Path) -> None:
    """Its end under load is its own, and is not measured again."""
    assert stopped(ran(tmp_path / "j", Breaking(crashes=1))) == ("fail", runner.CRASHED)


@pytest.mark.parametrize("slow", [False, True])
def test_a_candidate_that_ends_between_two_measurements_crashed_too(tmp_path: Path, slow: bool) -> None:
    """It had answered in this launch; a disturbance of the machine beside it does not start it again in silence."""

    class Ending(SimulatedServers):
        def measure(self, spec: LoadSpec) -> LoadResult:
            result, server = super().measure(spec), self.servers.get("candidate")
            if self.measured > 12 and isinstance(server, SimulatedServer) and server.counts:
                server.end()
            return result

    noise = Noise(slow=lambda second: slow and second > 2500)
    assert stopped(ran(tmp_path / "j", Ending(noise, POLICY, MACHINE))) == ("fail", runner.CRASHED)


@pytest.mark.parametrize(("side", "make", "verdict"), [
    ("candidate", failed, "fail"), ("candidate", invalid, "invalid"), ("baseline", invalid, "invalid"),
])  # fmt: skip
@pytest.mark.parametrize("at_once", [True, False])
def test_a_launch_that_breaks_the_kernel_contract_stops_the_gate(
    side: Side, make: object, verdict: str, at_once: bool, tmp_path: Path
) -> None:
    """Every launch is profiled behind its measurements; only kernels of the candidate's that ran and should not fail it."""
    servers = simulated()
    outcome = ran(tmp_path / "s", servers, specified(contract=servers.profile, at_once=at_once))
    assert state(outcome) == "pass"
    assert servers.profiled.count("candidate") == POLICY.min_blocks * (1 if at_once else 2)
    assert all(one.profiled for one in opened(tmp_path / "s").launches)
    servers.faults[side] = make("kernels-moe", "Marlin", "kernel-forbidden")  # type: ignore[operator]
    outcome = ran(tmp_path / "j", servers, specified(contract=servers.profile, at_once=at_once))
    assert stopped(outcome) == (verdict, "kernel-forbidden")


@pytest.mark.parametrize("at_once", [True, False])
def test_baseline_may_have_other_kernels_which_the_journal_names(at_once: bool, tmp_path: Path) -> None:
    servers = simulated()
    servers.faults["baseline"] = failed("kernels-moe", "Marlin", "kernel-forbidden")
    assert state(ran(tmp_path / "j", servers, specified(contract=servers.profile, at_once=at_once))) == "pass"
    other = {one.baseline_kernels for one in opened(tmp_path / "j").launches if "baseline" in one.profiled}
    assert other == {"kernels-moe: Marlin"}


def test_every_reason_of_a_broken_contract_is_declared() -> None:
    """Those of the log's lines, too."""
    assert {reason for _, reason, _ in UNWANTED.values()} <= set(gate.REASONS)


def test_a_baseline_that_crashes_is_started_again(tmp_path: Path) -> None:
    """The launches of that moment are measured anew; after several ends the run stops."""
    assert state(ran(tmp_path / "j", Breaking("baseline", crashes=1))) == "pass"
    repeated = {one.reasons[0].reference for one in legs(tmp_path / "j") if one.discarded}
    assert repeated == {"server-died", "interrupted"}
    assert stopped(ran(tmp_path / "k", Breaking("baseline", crashes=99))) == ("invalid", "server-died")


def test_one_failed_request_is_repeated_and_several_end_the_gate(tmp_path: Path) -> None:
    """A failed request in hour fifteen does not discard everything; a broken server does."""
    assert state(ran(tmp_path / "j", Breaking(failures=1))) == "pass"
    assert stopped(ran(tmp_path / "k", Breaking(failures=99))) == ("invalid", "request-failed")


def test_a_bench_has_one_launch_a_block(tmp_path: Path) -> None:
    """Without a baseline, each block is one fresh launch of the candidate with all cells."""
    outcome = ran(tmp_path / "j", simulated(), specified(rule=None, control=False, blocks=4, at_once=False))
    own = legs(tmp_path / "j")
    assert [(one.launch, one.cell) for one in own] == [(n, c.name) for n in range(4) for c in (ALONE, MANY)]
    assert {one.side for one in own} == {"candidate"}
    assert outcome.decision is None
    assert sorted(outcome.blocks) == [0, 1, 2, 3]


def test_a_difference_has_the_sign_of_worse() -> None:
    """A longer time and a lower rate both make it positive."""
    own = []
    for position, seconds in enumerate((1.0, 1.1, 1.1, 1.0)):
        side: Side = "candidate" if position in (1, 2) else "baseline"
        run = LoadResult("g", "", seconds, (Request(0, seconds / 10, seconds, 8, 8),))
        own.append(Measurement(ALONE.name, 0, 0, side, position, run=run))
    for metric in ("tpot", "ttft", "rate"):
        found = paired_differences.difference(own, ALONE.name, 0, metric)
        assert found == pytest.approx(math.log(1.1))
    assert paired_differences.difference(own[:3], ALONE.name, 0, "tpot") is None


def test_a_machine_that_changed_counts_its_own_block_alone() -> None:
    """The gate's A/A block disagrees with the calibration, which then does not count."""
    earlier = [("2026-11-20", 0.002), ("2026-11-21", -0.002)] * 5
    noise = paired_differences.noise_of([*earlier, ("2026-11-22", 0.002)], "2026-11-22", POLICY)
    assert noise.agrees
    assert noise.freedom > 9
    noise = paired_differences.noise_of([*earlier, ("2026-11-22", 0.05)], "2026-11-22", POLICY)
    assert (noise.agrees, noise.freedom) == (False, 1.0)
    assert noise.sigma == pytest.approx(0.05)


def test_a_full_disk_loses_no_measurement(tmp_path: Path) -> None:
    """A journal that finds no room says so; what it had written stays whole, and the run goes on once there is room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    program = (
        "import sys; from pathlib import Path; from tests.unit.test_throughput_run import *\n"
        "ran(Path(sys.argv[1]) / 'j', Fragile(-1), specified(whole=True, blocks=12))\n"
    )
    once = f'"{sys.executable}" -c "$PROGRAM" "{disk}"'
    steps = (
        f'mount -t tmpfs -o size=16k none "{disk}" && {{ {once}; echo "first $?"; wc -l < "{disk}/j"; '
        f'mount --options-mode ignore -o remount,size=40m "{disk}"; {once}; echo "second $?"; '
        f'cp "{disk}/j" "{tmp_path}/after"; umount "{disk}"; }}'
    )
    done = subprocess.run(
        [*mounting_shell(), steps], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[2], env={**os.environ, "PROGRAM": program},
    )  # fmt: skip
    first, lines, second = done.stdout.split("\n")[:3]
    assert (first, second) == ("first 1", "second 0")
    assert "StoreError: " in done.stderr
    past = read_lines(tmp_path / "after", JournalLine, "journal")
    assert len(past) > int(lines) > 3
    assert sum(line.begun is not None for line in past) == 2
