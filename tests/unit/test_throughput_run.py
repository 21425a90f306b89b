"""A whole throughput gate on simulated servers: its order, its journal, and what interrupts it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.mounts import mounting_shell
from tests.support.simulated_servers import (
    Noise,
    SimulatedLoad,
    SimulatedServer,
    SimulatedServers,
)

from sparkwright.bench.load.vllm_bench import LoadError, LoadResult, LoadSpec, Request
from sparkwright.bench.machine.state_checks import MachinePolicy
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.records import Reason, Side
from sparkwright.bench.statistics.eprocess import DecisionRule
from sparkwright.core import strict_yaml
from sparkwright.core.store import read_lines
from sparkwright.gates.throughput import journal, paired_differences, runner
from sparkwright.gates.throughput.journal import Begun, Journal
from sparkwright.gates.throughput.records import CONTROL_BLOCK, Measurement, ThroughputPolicy
from sparkwright.gates.throughput.runner import Runner, RunOutcome, RunSpec, ServerMode

GATES = Path(__file__).parents[2] / "ci" / "gates"
POLICY = strict_yaml.load(GATES / "throughput.yaml", ThroughputPolicy)
MACHINE = strict_yaml.load(GATES / "machine.yaml", MachinePolicy)
ALONE = WorkloadCell(1024, 1024, 1, 2, primary=("tpot",))
MANY = WorkloadCell(1024, 1024, 8, 8, primary=("rate",))
SLOWER = Noise(slowdown=math.log(1.05))
MODES = ("concurrent", "sequential")


def specified(**changes: object) -> RunSpec:
    rule = DecisionRule(POLICY.alpha, POLICY.min_blocks, POLICY.max_blocks)
    history = {
        name: [("2026-11-20", 0.004), ("2026-11-20", -0.004)] * 4
        for cell in (ALONE, MANY)
        for name in paired_differences.series_names(cell)
    }
    plain = RunSpec(
        (ALONE, MANY), rule, POLICY, "concurrent", 3, POLICY.max_blocks, 7, MACHINE.discards + 1,
        history, "2026-11-22", control=True,
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


def simulated(noise: Noise | None = None, seed: int = 1) -> SimulatedServers:
    return SimulatedServers(noise or Noise(), POLICY, MACHINE, seed)


def opened(path: Path, identity: str = "same") -> Journal:
    return Journal(path, Begun(identity, {"wheel": identity}, 7, 0.0))


def ran(path: Path, servers: SimulatedServers, spec: RunSpec | None = None) -> RunOutcome:
    log = opened(path)
    return Runner(spec or specified(), servers, log).run()


def state(outcome: RunOutcome) -> str | None:
    return outcome.decision.state if outcome.decision else None


class Killed(BaseException):
    """The end of a run in the middle, as by a kill."""


class FragileLoad(SimulatedLoad):
    """A load generator that is killed after some measurements."""

    def measure(self, spec: LoadSpec) -> LoadResult:
        servers = self._servers
        assert isinstance(servers, Fragile)
        if servers.measured == servers.limit:
            raise Killed
        return super().measure(spec)


class Fragile(SimulatedServers):
    """Servers that are killed after *limit* measurements; the next ones continue at *now*."""

    load = FragileLoad

    def __init__(self, limit: int, now: float = 0.0) -> None:
        noise = Noise(launch=0, run=0, slowdown=0.05)
        super().__init__(noise, POLICY, MACHINE, 3)
        self.limit, self.now = limit, now


def counted(outcome: RunOutcome) -> list[tuple[str, int, Side, int, int]]:
    counting = (one for one in outcome.measurements if one.counts)
    return sorted((one.cell, one.block, one.side, one.quad, one.position) for one in counting)


def test_a_slower_candidate_fails_and_is_named(tmp_path: Path) -> None:
    """Five percent are found within few blocks, and the slower series are named."""
    outcome = ran(tmp_path / "j", simulated(SLOWER))
    assert outcome.decision
    assert outcome.decision.state == "fail"
    assert "1024/1024 c1: time per token" in outcome.decision.culprits
    assert len(outcome.blocks) <= 4


def test_an_equal_candidate_passes_and_the_outlook_comes_first(tmp_path: Path) -> None:
    """On a quiet machine, after the fewest blocks; what the noise supports is said before them."""
    servers = simulated()
    outcome = ran(tmp_path / "j", servers)
    assert (state(outcome), len(outcome.blocks)) == ("pass", POLICY.min_blocks)
    assert servers.news[0] == outcome.outlook
    assert "an equal wheel passes after about 3 blocks" in outcome.outlook


def test_a_noise_that_cannot_support_the_margin_is_told_before_the_first_block(
    tmp_path: Path,
) -> None:
    """With a launch effect of 4 %, a margin of 2 % needs more than twelve blocks."""
    servers = simulated(Noise(launch=0.04))
    outcome = ran(tmp_path / "j", servers, specified(history={}, blocks=1))
    assert "does not support a margin of 2 % in 12 blocks" in outcome.outlook
    assert servers.news[0] == outcome.outlook


@pytest.mark.parametrize("mode", MODES)
def test_every_block_has_fresh_launches_in_abba(mode: ServerMode, tmp_path: Path) -> None:
    """The A/A block, too: two launches if both servers run at the same time, four if not."""
    spec = specified(mode=mode, quads=3 if mode == "concurrent" else 1, blocks=3, whole=True)
    outcome = ran(tmp_path / "j", simulated(), spec)
    numbers: set[tuple[Side, int]] = set()
    for block in (CONTROL_BLOCK, 0, 1, 2):
        legs = [x for x in outcome.measurements if x.block == block and x.cell == ALONE.name]
        launches = {(one.side, one.launch) for one in legs}
        assert len(launches) == (2 if mode == "concurrent" else 4)
        assert not launches & numbers
        numbers |= launches
        other = "control" if block == CONTROL_BLOCK else "candidate"
        for quad in {one.quad for one in legs}:
            order = [x.side for x in sorted(legs, key=lambda x: x.position) if x.quad == quad]
            assert order[0] == order[3] != order[1] == order[2]
            assert set(order) == {"baseline", other}


def test_both_orders_occur_and_no_two_measurements_share_prompts() -> None:
    """The first side is a fair coin for each block; every measurement has its own prompts."""
    firsts = [runner.sides(seed, block)[0] for seed in range(20) for block in range(10)]
    assert 60 < firsts.count("baseline") < 140
    seeds = [
        runner.prompts_seed(7, block, slot, attempt)
        for block in range(5)
        for attempt in range(2)
        for slot in runner.slots("concurrent", 0, range(4), 3)
    ]
    assert len(set(seeds)) == len(seeds)


def test_a_settled_cell_is_not_measured_again(tmp_path: Path) -> None:
    """Once its series have passed, later blocks spend their time on the others."""
    noisy = {
        **specified().history,
        paired_differences.series_names(MANY)[0]: [("2026-11-20", 0.03)] * 8,
    }
    outcome = ran(tmp_path / "j", simulated(), specified(history=noisy))
    blocks = {
        cell.name: {one.block for one in outcome.measurements if one.cell == cell.name}
        for cell in (ALONE, MANY)
    }
    assert blocks[ALONE.name] < blocks[MANY.name]


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=15, deadline=None)
@given(kills=st.lists(st.integers(0, 40), max_size=4))
def test_a_run_that_is_killed_anywhere_ends_with_the_same_verdict(
    mode: ServerMode, kills: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Killed between any two measurements, it continues, and each counts once in a launch."""
    folder = tmp_path_factory.mktemp("run")
    spec = specified(mode=mode, quads=3 if mode == "concurrent" else 1, cells=(ALONE,))
    whole = ran(folder / "whole", Fragile(-1), spec)
    now = 0.0
    for limit in [*kills, -1]:
        servers = Fragile(limit, now)
        try:
            ran(folder / "cut", servers, spec)
        except Killed:
            now = servers.now
        else:
            break
    log = opened(folder / "cut")
    cut = Runner(spec, Fragile(0), log).run()
    assert (state(cut), cut.blocks) == (state(whole), whole.blocks)
    assert counted(cut) == counted(whole)


def test_a_complete_sequential_launch_survives_a_kill(tmp_path: Path) -> None:
    """It is not measured again; one that was interrupted is."""
    spec = specified(mode="sequential", quads=1, control=False)
    with pytest.raises(Killed):
        ran(tmp_path / "j", Fragile(5), spec)
    outcome = ran(tmp_path / "j", Fragile(-1, 1000.0), spec)
    first = [one for one in outcome.measurements if one.block == 0]
    assert [one.counts for one in first] == [True] * 4 + [False] + [True] * 4
    assert first[4].reasons[0].reference == "interrupted"


def test_another_experiment_does_not_continue_a_journal(tmp_path: Path) -> None:
    """The journal of another wheel is kept beside, and the difference is told."""
    with pytest.raises(Killed):
        ran(tmp_path / "j", Fragile(5))
    log = opened(tmp_path / "j", "another")
    assert log.refused == ("wheel",)
    assert not log.past.measurements
    assert (tmp_path / "j.before").exists()


def test_a_journal_with_a_result_or_half_a_line_is_cut(tmp_path: Path) -> None:
    """The half of a line is cut off; after a result the next run measures anew."""
    with pytest.raises(Killed):
        ran(tmp_path / "j", Fragile(6))
    whole = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(whole + whole.splitlines()[-1][:40])
    log = opened(tmp_path / "j")
    assert len(log.past.measurements) == 6
    log.add(journal.Ended("pass"))
    assert (tmp_path / "j").read_bytes().startswith(whole)
    assert journal.read(tmp_path / "j") is None


def test_a_slow_state_is_waited_out_and_never_blamed(tmp_path: Path) -> None:
    """Measurements in a hidden slow state are repeated; the candidate passes."""
    noise = Noise(slow=lambda second: second % 900 < 120)
    outcome = ran(tmp_path / "j", simulated(noise, 5))
    assert state(outcome) == "pass"
    repeated = [one for one in outcome.measurements if one.discarded]
    assert {one.reasons[0].reference for one in repeated} == {"slow-state"}


def test_a_machine_that_stays_slow_is_given_up(tmp_path: Path) -> None:
    """After some discards in a row the run stops; that is no failure of the wheel."""
    outcome = ran(tmp_path / "j", simulated(Noise(slow=lambda _: True)))
    assert outcome.stopped
    assert outcome.stopped.reference == runner.UNSTEADY
    assert len(outcome.measurements) == MACHINE.discards + 1


def test_a_candidate_that_throttles_under_its_load_is_that_slow(tmp_path: Path) -> None:
    """Throttling that its own load causes is its result; nothing is repeated."""
    noise = Noise(slowdown=0.05, throttled={"candidate": ("hardware thermal slowdown",)})
    outcome = ran(tmp_path / "j", simulated(noise))
    assert state(outcome) == "fail"
    assert not [one for one in outcome.measurements if one.discarded]


class BreakingLoad(SimulatedLoad):
    """A load under which the server of a *side* ends once, or whose requests fail."""

    side: Side = "candidate"
    crashes, failures = 0, 0

    def measure(self, spec: LoadSpec) -> LoadResult:
        server = self._servers.at(spec.url)
        result = super().measure(spec)
        if server.side == self.side and self._servers.measured > 20:
            if self.crashes:
                self.crashes -= 1
                server.end()
                raise LoadError("generator-failed", "connection refused")
            if self.failures:
                self.failures -= 1
                broken = msgspec.structs.replace(result.requests[0], error="the stream ended")
                return msgspec.structs.replace(result, requests=(broken, *result.requests[1:]))
        return result


def breaking(**changes: object) -> SimulatedServers:
    load = type("Load", (BreakingLoad,), changes)
    servers = type("Servers", (SimulatedServers,), {"load": load})(Noise(), POLICY, MACHINE)
    assert isinstance(servers, SimulatedServers)
    return servers


def test_a_candidate_that_crashes_stops_the_gate(tmp_path: Path) -> None:
    """Its end under load is its own, and is not measured again."""
    outcome = ran(tmp_path / "j", breaking(crashes=1))
    assert outcome.stopped
    assert outcome.stopped.reference == "candidate-crashed"


@pytest.mark.parametrize("disturbed", [False, True])
def test_a_candidate_that_ends_between_two_measurements_crashed_too(tmp_path: Path, disturbed: bool) -> None:
    """It had answered in this launch; a disturbance of the machine beside it does not start it again in silence."""

    class Ending(SimulatedServers):
        def measure(self, cell: WorkloadCell, blank: Measurement, seed: int) -> Measurement:
            result = super().measure(cell, blank, seed)
            server = self._servers[blank.side]
            if (blank.side, blank.block, self.measured > 30) != ("candidate", 1, True):
                return result
            assert isinstance(server, SimulatedServer)
            server.end()
            why = (Reason("slow-state", "made up"),) if disturbed else ()
            return msgspec.structs.replace(result, reasons=(*result.reasons, *why), discarded=disturbed)

    outcome = ran(tmp_path / "j", Ending(Noise(), POLICY, MACHINE))
    assert outcome.stopped
    assert outcome.stopped.reference == "candidate-crashed"
    assert len({one.launch for one in outcome.measurements if (one.side, one.block) == ("candidate", 1)}) == 1


def test_a_launch_that_breaks_the_kernel_contract_stops_the_gate(tmp_path: Path) -> None:
    """It is not measured: its figures would be those of other kernels."""
    broken = Reason("candidate-contract", "moe-backend: MARLIN")
    servers = simulated(Noise(broken={"candidate": broken}))
    outcome = ran(tmp_path / "j", servers)
    assert outcome.stopped == broken
    assert not [one for one in outcome.measurements if one.side == "candidate" and one.run]


def test_a_baseline_that_crashes_is_started_again(tmp_path: Path) -> None:
    """The launches of that moment are measured anew; after several ends the run stops."""
    outcome = ran(tmp_path / "j", breaking(side="baseline", crashes=1))
    assert state(outcome) == "pass"
    assert {one.reasons[0].reference for one in outcome.measurements if one.discarded} == {
        "server-died",
        "interrupted",
    }
    again = ran(tmp_path / "k", breaking(side="baseline", crashes=99))
    assert again.stopped
    assert again.stopped.reference == "server-died"


def test_one_failed_request_is_repeated_and_several_end_the_gate(tmp_path: Path) -> None:
    """A failed request in hour fifteen does not discard everything; a broken server does."""
    assert state(ran(tmp_path / "j", breaking(failures=1))) == "pass"
    outcome = ran(tmp_path / "k", breaking(failures=99))
    assert outcome.stopped
    assert outcome.stopped.reference == "request-failed"


def test_a_bench_has_one_launch_a_block(tmp_path: Path) -> None:
    """Without a baseline, each block is one fresh launch of the candidate with all cells."""
    outcome = ran(tmp_path / "j", simulated(), specified(rule=None, control=False, blocks=4))
    legs = [one for one in outcome.measurements if one.cell == ALONE.name and one.quad == 0]
    assert [one.launch for one in legs] == [0, 1, 2, 3]
    assert {one.side for one in outcome.measurements} == {"candidate"}
    assert outcome.decision is None


def test_a_difference_has_the_sign_of_worse() -> None:
    """A longer time and a lower rate both make it positive."""

    def leg(side: Side, position: int, seconds: float) -> Measurement:
        run = LoadResult("g", "", seconds, (Request(0, seconds / 10, seconds, 8, 8),))
        return Measurement(ALONE.name, 0, 0, side, 0, position, 0, 0.0, run)

    times: Sequence[tuple[Side, float]] = (
        ("baseline", 1.0), ("candidate", 1.1), ("candidate", 1.1), ("baseline", 1.0),
    )  # fmt: skip
    legs = [leg(side, position, value) for position, (side, value) in enumerate(times)]
    for metric in ("tpot", "ttft", "rate"):
        found = paired_differences.difference(legs, ALONE.name, 0, metric)
        assert found == pytest.approx(math.log(1.1))
    assert paired_differences.difference(legs[:3], ALONE.name, 0, "tpot") is None


def test_a_machine_that_changed_counts_its_own_block_alone() -> None:
    """The gate's A/A block disagrees with the calibration, which then does not count."""
    earlier = [("2026-11-20", 0.002), ("2026-11-21", -0.002)] * 5
    noise, agrees = paired_differences.noise_of(
        [*earlier, ("2026-11-22", 0.002)], "2026-11-22", POLICY
    )
    assert agrees
    assert noise.freedom > 9
    noise, agrees = paired_differences.noise_of(
        [*earlier, ("2026-11-22", 0.05)], "2026-11-22", POLICY
    )
    assert (agrees, noise.freedom) == (False, 1.0)
    assert noise.sigma == pytest.approx(0.05)


def test_a_full_disk_loses_no_measurement(tmp_path: Path) -> None:
    """A journal that finds no room says so; what it had written stays whole, and the course goes on from there once there is room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    program = (
        "import sys; from pathlib import Path; from tests.unit.test_throughput_run import *\n"
        "ran(Path(sys.argv[1]) / 'j', Fragile(-1), specified(whole=True, blocks=12))\n"
    )
    once = f'"{sys.executable}" -c "$PROGRAM" "{disk}"'
    steps = (
        f'mount -t tmpfs -o size=32k none "{disk}" && {{ {once}; echo "first $?"; wc -l < "{disk}/j"; '
        f'mount --options-mode ignore -o remount,size=40m "{disk}"; {once}; echo "second $?"; '
        f'cp "{disk}/j" "{tmp_path}/after"; umount "{disk}"; }}'
    )
    isolated = [*mounting_shell(), steps]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        isolated,
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        env={**os.environ, "PROGRAM": program},
    )
    first, lines, second = done.stdout.split("\n")[:3]
    assert (first, second) == ("first 1", "second 0")
    assert "StoreError: " in done.stderr
    past = read_lines(tmp_path / "after", journal.Line, "journal")
    assert len(past) > int(lines) > 3
    assert any(isinstance(line, journal.Resumed) for line in past)
