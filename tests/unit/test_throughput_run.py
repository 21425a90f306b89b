"""
A throughput gate: its order, its journal and what interrupts it; experiments on real launches of servers with known times; and each reason for which a
measurement does not count.

In the first part servers, load generator and machine are simulated with known noise and a virtual clock, so that no second passes. The order of
launches, the validity of measurements, the journal and the decision are the real ones.
"""

import contextlib
import errno
import functools
import math
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest.mock import Mock, patch

import msgspec
import pytest
from msgspec.structs import replace
from tests.refusals import refusal
from tests.support import fake_openai_server, processes, refserved, thread_load

from sparkwright.bench import results
from sparkwright.bench.machine import monitor
from sparkwright.bench.recipes import preflight, recipe as recipes, workloads
from sparkwright.bench.records import METRICS, Reason, Side
from sparkwright.bench.server.client import Client
from sparkwright.bench.server.launch import LaunchPlan
from sparkwright.bench.server.server_process import Server
from sparkwright.bench.vllm_bench import LoadError, LoadResult, LoadSpec, Request
from sparkwright.cli import main, options
from sparkwright.core import strict_yaml
from sparkwright.forks.context import RunContext
from sparkwright.gates import throughput, throughput_run
from sparkwright.gates.core import ladder, policy, server_under_test
from sparkwright.gates.core.verdict import Check, failed, invalid, worst_check

GATES = Path(__file__).parents[2] / "ci" / "gates"
POLICY = strict_yaml.load(GATES / "throughput.yaml", throughput_run.ThroughputPolicy)
MACHINE = strict_yaml.load(GATES / "machine.yaml", monitor.MachinePolicy)
ALONE = workloads.WorkloadCell(1024, 1024, 1, 2, primary=("tpot",))
MANY = workloads.WorkloadCell(1024, 1024, 8, 8, primary=("rate",))


#: Seconds of a decode step, of a first token, of a launch and of a measurement.
TPOT, TTFT, LAUNCH, MEASURE = 0.015, 0.25, 120.0, 60.0
#: Seconds of the probe's GEMV and copy.
GEMV, COPY = 0.004, 0.008


class Noise(msgspec.Struct, frozen=True):
    """
    Spreads of logarithms: of a launch and of a measurement in it, and the candidate's slowdown.

    Attributes:
        slow: Whether the machine is in its hidden slow state at a second.
        throttled: Sides whose load leaves the GPU throttled.
        cells: Concurrency of a cell → its own spread of a launch.
    """

    launch: float = 0.003
    run: float = 0.002
    slowdown: float = 0.0
    slow: Callable[[float], bool] = lambda _: False
    throttled: tuple[Side, ...] = ()
    cells: dict[int, float] = {}


class SimulatedServer(Server):
    """A launch; its counters grow with what it answers."""

    def __init__(self, side: Side, number: int, effect: float) -> None:
        self.url, self.failure, self.reason = f"http://{side}.{number}.invalid", "", ""
        self.side, self.effect, self.plan = side, effect, LaunchPlan(Path(), Path())
        self.counts: Counter[str] = Counter()

    def guard(self) -> bool:
        return not self.failure

    def client(self, *, deadline: float = 0.0) -> Client:
        client = Client("http://127.0.0.1:9", deadline=deadline)
        client.metrics = lambda: dict(self.counts)  # type: ignore[method-assign]
        return client

    def crash(self) -> None:
        """End as a crashed server does."""
        self.failure, self.reason = "it ended with status -11", "server-died"


class SimulatedServers(monitor.MachineMonitor):
    """
    Servers, load generator and machine in one; *seed* decides every draw.

    Attributes:
        seeds: Of the prompts of each measurement.
        profiled: Sides whose servers were profiled, in order.
        faults: By side: what a profile of its server shows.
        spoil: What becomes of the result of a measurement, and of its server.
    """

    name = "simulated"

    def __init__(self, noise: Noise = Noise(), seed: int = 1) -> None:  # noqa: B008  frozen
        self.noise, self.now, self.seed, self.policy = noise, 0.0, seed, MACHINE
        self.seeds: list[int] = []
        self.numbers = Counter[Side]()
        self.throttled: tuple[str, ...] = ()
        self.profiled: list[Side] = []
        self.faults: dict[Side, Check] = {}
        self.spoil: Callable[[SimulatedServer, LoadResult], LoadResult] = lambda _, result: result
        self.spread = 0.0
        self.servers: dict[Side, SimulatedServer] = {}
        self.spec = throughput_run.RunSpec((ALONE, MANY), self, self, POLICY, self.profile, resident=True)

    def snapshot(self) -> monitor.Snapshot:
        self.now += 1
        gemv = GEMV * (1.5 if self.noise.slow(self.now) else 1.0)
        reasons, self.throttled = self.throttled, ()
        return monitor.Snapshot(gemv=gemv, throttle_reasons=reasons)

    def disturbances(self, before: monitor.Snapshot, after: monitor.Snapshot) -> tuple[Reason, ...]:
        return monitor.disturbances(before, after, [monitor.Reading(GEMV, COPY)], MACHINE)

    def wait(self, seconds: float) -> None:
        """Let the virtual clock run."""
        self.now += seconds

    def at(self, url: str) -> SimulatedServer:
        """Return the server at *url*."""
        return next(one for one in self.servers.values() if one.url == url)

    @contextlib.contextmanager
    def launch(self, sides: Sequence[Side]) -> Iterator[dict[Side, Server]]:
        """Start servers for *sides*."""
        self.now += LAUNCH
        self.numbers.update(sides)
        self.servers = {
            side: SimulatedServer(
                side, self.numbers[side], random.Random(f"{self.seed}/{side}/{self.numbers[side]}").gauss(0, self.noise.launch)
            )
            for side in sides
        }
        yield {**self.servers}

    def profile(self, side: Side, server: Server) -> tuple[Check, ...]:
        """Return the check of the kernel contract that *server* breaks."""
        self.profiled.append(side)
        return tuple(check for name, check in self.faults.items() if name == side)

    def measure(self, spec: LoadSpec) -> LoadResult:
        """Make the load, as a generator does."""
        server, noise = self.at(spec.url), self.noise
        self.seeds.append(spec.seed)
        draw = random.Random(f"{self.seed}/{spec.seed}").gauss(0, noise.cells.get(spec.concurrency, noise.run))
        slowdown = noise.slowdown if server.side == "candidate" else 0.0
        factor = math.exp(server.effect + draw + slowdown) * (1.5 if noise.slow(self.now) else 1)
        latency = factor * (TTFT + TPOT * (spec.output_tokens - 1))
        request = Request(0.0, factor * TTFT, latency, spec.prompt_tokens, spec.output_tokens)
        self.now += MEASURE
        self.throttled = ("hardware thermal slowdown",) * (server.side in noise.throttled)
        server.counts += Counter({
            "vllm:request_success_total": spec.requests,
            "vllm:generation_tokens_total": spec.requests * spec.output_tokens,
        })  # fmt: skip
        seconds = -(-spec.requests // spec.concurrency) * latency
        # Spread evenly, so that a trial of three sees exactly this standard deviation.
        requests = tuple(
            replace(request, latency=request.ttft + (latency - request.ttft) * math.exp(self.spread * (number % 3 - 1)))
            for number in range(spec.requests)
        )
        return self.spoil(server, LoadResult(self.name, seconds, requests))


def opened(path: Path) -> throughput_run.MeasurementJournal:
    return throughput_run.MeasurementJournal(path, throughput_run.ExperimentStart(7, 0.0))


def ran(path: Path, servers: SimulatedServers, **changes: object) -> throughput_run.Runner:
    outcome = throughput_run.Runner(replace(servers.spec, **changes), servers.launch, opened(path))
    with patch.object(throughput_run, "sleep", servers.wait), patch.object(throughput_run, "monotonic", lambda: servers.now):
        outcome.run()
    return outcome


def legs(path: Path) -> list[results.Measurement]:
    """Return the measurements of the journal at *path*."""
    return opened(path).measurements


def state(outcome: throughput_run.Runner) -> str | None:
    return outcome.decision.state if outcome.decision else None


def stopped(outcome: throughput_run.Runner) -> tuple[str, str]:
    assert outcome.stopped
    return outcome.stopped[0], outcome.stopped[1].reference


Event = Callable[[SimulatedServer, LoadResult], LoadResult]


def breaking(event: Event, side: str = "candidate", times: int = 1, servers: SimulatedServers | None = None, first: int = 12) -> SimulatedServers:
    """Return servers to which *event* happens, from measurement number *first* on, in that many measurements of *side* or of any."""
    servers, left = servers or SimulatedServers(), iter(range(times))

    def spoil(server: SimulatedServer, result: LoadResult) -> LoadResult:
        due = len(servers.seeds) >= first and side in ("any", server.side) and next(left, None) is not None
        return event(server, result) if due else result

    servers.spoil = spoil
    return servers


def end(server: SimulatedServer, result: LoadResult) -> LoadResult:
    server.crash()
    return result


def crash(server: SimulatedServer, _: LoadResult) -> LoadResult:
    server.crash()
    raise LoadError("generator-failed", "connection refused")


def spoiled(_: SimulatedServer, result: LoadResult, **changes: object) -> LoadResult:
    """Return *result* with *changes* of its first request."""
    return replace(result, requests=(replace(result.requests[0], **changes), *result.requests[1:]))


def kill(_: SimulatedServer, __: LoadResult) -> LoadResult:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def fragile(limit: int | None = None, now: float = 0.0) -> SimulatedServers:
    """Return servers without noise that are killed in the measurement after *limit* ones, and begin at *now*."""
    servers = SimulatedServers(Noise(launch=0, run=0, slowdown=0.05), 3)
    servers.now = now
    return servers if limit is None else breaking(kill, "any", 1, servers, limit + 1)


@pytest.mark.parametrize(("slowdown", "verdict", "culprit"), [(0.0, "pass", False), (math.log(1.05), "fail", True)])
def test_an_equal_candidate_passes_and_a_slower_one_fails_and_is_named(slowdown: float, verdict: str, culprit: bool, tmp_path: Path) -> None:
    """On a quiet machine within few blocks, five percent are found, and the slower series are named."""
    outcome = ran(tmp_path / "j", SimulatedServers(Noise(slowdown=slowdown)))
    assert (state(outcome), len(outcome.blocks) <= 4) == (verdict, True)
    assert outcome.decision
    assert ("1024/1024 c1: time per token" in outcome.decision.message) == culprit


def test_a_block_is_a_ratio_as_the_whole_is() -> None:
    """A block of 3.5 times the time says +250 %, not its logarithm."""
    series = results.Series("tpot", True, (math.log(3.5),), state="fail", baseline=0.01, candidate=0.035)
    found = throughput.checks(results.Result("fail", "", results.Subject("ours"), (results.CellResult("c8", 8, (series,)),), (), alpha=0.03))
    row = next(check for check in found if check.name == "tpot-c8")
    assert row.message.startswith("time per token +250.0 % in 1 blocks")
    assert row.samples[0].actual == "+250.00 %"


@pytest.mark.parametrize("resident", [True, False])
def test_every_block_has_fresh_launches_in_abba(resident: bool, tmp_path: Path) -> None:
    """The A/A block, too: one launch of both servers, or four of one."""
    ran(tmp_path / "j", SimulatedServers(), resident=resident, policy=replace(POLICY, max_blocks=3))
    alone = sorted((leg for leg in legs(tmp_path / "j") if leg.cell == ALONE.name), key=lambda leg: leg.position)
    assert len({(leg.block, leg.launch) for leg in alone}) == len({leg.launch for leg in alone}) == 4 * (1 if resident else 4)
    for block in (results.CONTROL_BLOCK, 0, 1, 2):
        order = [leg.side for leg in alone if leg.block == block]
        assert order[0] == order[3] != order[1] == order[2]
        assert set(order) == {"baseline", "control" if block == results.CONTROL_BLOCK else "candidate"}


def test_both_orders_occur_and_no_two_measurements_share_prompts(tmp_path: Path) -> None:
    """The first side is a fair coin for each block; every measurement has its own prompts."""
    firsts = [throughput_run.sides(seed, block)[0] for seed in range(20) for block in range(10)]
    assert 60 < firsts.count("baseline") < 140
    servers = SimulatedServers()
    ran(tmp_path / "j", servers)
    assert len(servers.seeds) == len(set(servers.seeds)) == len(legs(tmp_path / "j"))


@pytest.mark.parametrize(("recent", "first"), [(0.0, 2), (1e4, 1)])
def test_a_recent_state_after_a_measurement_is_that_before_the_next_one(recent: float, first: int, tmp_path: Path) -> None:
    """Only the first measurement of a launch then has a probe before it; one that found the machine slow is not that before the next."""
    servers = SimulatedServers(Noise(slow=lambda now: 300 < now < 340))
    servers.policy, probes = replace(MACHINE, recent=recent), list[monitor.Snapshot]()
    seen = servers.snapshot

    def counted() -> monitor.Snapshot:
        probes.append(seen())
        return probes[-1]

    with patch.object(servers, "snapshot", counted):
        outcome = ran(tmp_path / "j", servers)
    measured = legs(tmp_path / "j")
    assert (state(outcome), any(leg.discarded for leg in measured)) == ("pass", True)
    repeated = sum(leg.discarded for leg in measured)
    launches = len({leg.launch for leg in measured})
    expected = 2 * len(measured) if first == 2 else len(measured) + launches + repeated
    assert expected <= len(probes) <= expected + 4 * repeated


def test_a_settled_cell_is_not_measured_again(tmp_path: Path) -> None:
    """Once its series have passed, later blocks spend their time on the others."""
    ran(tmp_path / "j", SimulatedServers(Noise(cells={MANY.concurrency: 0.012})))
    blocks = {
        cell.name: {one.block for one in legs(tmp_path / "j") if one.cell == cell.name}
        for cell in (ALONE, MANY)
    }
    assert blocks[ALONE.name] < blocks[MANY.name]


@pytest.mark.parametrize("resident", [True, False])
def test_turns_wait_at_random_by_the_seed_and_order_their_cells_anew(resident: bool, tmp_path: Path) -> None:
    """A wait is at most half a turn long and another one each time; a journal of the same seed has the same ones."""
    waits: dict[str, list[float]] = {}
    for name in ("one", "two"):
        servers = SimulatedServers()
        with patch.object(servers, "wait", lambda seconds, name=name: waits.setdefault(name, []).append(seconds)):
            ran(tmp_path / name, servers, resident=resident, policy=replace(POLICY, max_blocks=3))
    longest = POLICY.lag * 2 * (MEASURE + 2)  # of two cells, each with two looks at the machine
    assert waits["one"] == waits["two"]
    assert len(set(waits["one"])) == len(waits["one"]) == 4 * 4
    assert longest / 2 < max(waits["one"]) <= longest
    measured = [leg.cell for leg in legs(tmp_path / "one")]
    assert {tuple(measured[first : first + 2]) for first in range(0, len(measured), 2)} == {
        (ALONE.name, MANY.name), (MANY.name, ALONE.name),
    }  # fmt: skip


@pytest.mark.parametrize(("deadline", "begun"), [(-1.0, False), (2000.0, True)])
def test_no_block_begins_that_would_end_after_the_time_of_the_gate(deadline: float, begun: bool, tmp_path: Path) -> None:
    """Not even the A/A block does; the gate is not-run, for want of time."""
    servers = SimulatedServers()
    outcome = ran(tmp_path / "j", servers, deadline=deadline)
    assert (state(outcome), bool(outcome.blocks)) == (None, begun)
    assert outcome.stopped
    assert (outcome.stopped[0], outcome.stopped[1].reference) == ("not-run", ladder.BUDGET_SPENT)
    assert len(outcome.blocks) < POLICY.min_blocks
    # Its waits are random.
    assert servers.now <= 1.05 * max(0, deadline)


@pytest.mark.parametrize("resident", [True, False])
def test_a_continued_run_begins_no_block_that_would_end_after_its_time(resident: bool, tmp_path: Path) -> None:
    """The blocks of the journal take no time, and still tell how long one takes; they count, however little time is left."""
    servers = SimulatedServers()
    ran(tmp_path / "j", servers, resident=resident, policy=replace(POLICY, max_blocks=2))
    before = servers.now
    outcome = ran(tmp_path / "j", servers, resident=resident, deadline=before + 300)
    assert (servers.now, len(outcome.blocks)) == (before, 2)
    assert outcome.decision is not None


@pytest.mark.parametrize(
    ("spread", "paired", "requests"), [(0.0, False, 3), (0.002, False, 3), (0.004, False, 7), (0.004, True, 3), (1.0, False, 14)]
)
def test_a_measurement_is_as_long_as_its_own_error_asks_for(spread: float, paired: bool, requests: int, tmp_path: Path) -> None:
    """
    By the A/A block, which has the fewest requests; the number then holds for all measurements of the cell, also after a kill. How prompts differ
    that both sides have does not count, and no load takes much longer than it may.
    """
    policy = replace(POLICY, min_blocks=1, max_blocks=1, most_requests=64)
    cell = workloads.WorkloadCell(64, 128, 1, primary=("tpot",))
    for kills in ([8], []):
        servers = fragile(now=1000.0) if not kills else fragile(kills[0])
        servers.spec = replace(servers.spec, policy=policy, texts={cell.name: tmp_path} if paired else {})
        servers.spread = spread
        work = functools.partial(ran, tmp_path / "j", servers, cells=(cell,))
        processes.killed(work) if kills else work()
    sizes = {(leg.block, len(leg.run.requests)) for leg in legs(tmp_path / "j") if leg.run}
    assert sizes == {(results.CONTROL_BLOCK, 3), (0, requests)}


@pytest.mark.parametrize("resident", [True, False])
def test_a_run_that_is_killed_anywhere_ends_with_the_same_verdict(resident: bool, tmp_path: Path) -> None:
    """Killed between any two measurements of a launch, before the first and behind the last, it continues, and each counts once in a launch."""
    now, changes = 0.0, {"resident": resident, "cells": (ALONE,)}
    for limit in (0, 1, 2, 3, 4):
        assert processes.killed(functools.partial(ran, tmp_path / "cut", fragile(limit, now), **changes))
        now += 100_000
    cut, whole = ran(tmp_path / "cut", fragile(now=now), **changes), ran(tmp_path / "whole", fragile(), **changes)
    assert (state(cut), cut.blocks) == (state(whole), whole.blocks)
    counted = [
        sorted((leg.block, leg.position, leg.side) for leg in legs(tmp_path / name) if leg.counts)
        for name in ("cut", "whole")
    ]
    assert counted[0] == counted[1]


def test_a_slow_state_is_waited_out_and_never_blamed(tmp_path: Path) -> None:
    """
    Measurements in a hidden slow state are repeated, the candidate passes; one that stays is given up. One that is wrong by itself is not
    repeated, whatever the machine did.
    """
    outcome = ran(tmp_path / "j", SimulatedServers(Noise(slow=lambda second: second % 900 < 120), 5))
    assert state(outcome) == "pass"
    assert {leg.reasons[0].reference for leg in outcome.measurements if leg.discarded} == {"slow-state"}
    slow = SimulatedServers(Noise(slow=lambda _: True))
    assert stopped(ran(tmp_path / "k", slow)) == ("invalid", monitor.UNSTEADY)
    assert len(slow.seeds) == MACHINE.discards + 1
    assert stopped(ran(tmp_path / "l", breaking(functools.partial(spoiled, prompt_tokens=9), "any", 1, slow, 1))) == ("invalid", "prompt-other")


def test_a_candidate_that_throttles_under_its_load_is_that_slow(tmp_path: Path) -> None:
    """Throttling that its own load causes is its result; nothing is repeated."""
    assert state(ran(tmp_path / "j", SimulatedServers(Noise(slowdown=0.05, throttled=("candidate",))))) == "fail"
    assert not [leg for leg in legs(tmp_path / "j") if leg.discarded]


@pytest.mark.parametrize(
    ("event", "slow"), [(crash, False), (end, False), (end, True)], ids=["under load", "between", "beside a disturbance"]
)
def test_a_candidate_that_ends_crashed(event: Event, slow: bool, tmp_path: Path) -> None:
    """Its end is its own, and is not measured again; a disturbance of the machine beside it does not start it again in silence."""
    servers = SimulatedServers(Noise(slow=lambda second: slow and second > 2500))
    assert stopped(ran(tmp_path / "j", breaking(event, times=99, servers=servers))) == ("fail", throughput_run.CRASHED)


@pytest.mark.parametrize(
    ("event", "side", "reference"),
    [(crash, "baseline", "server-died"), (functools.partial(spoiled, error="the stream ended"), "candidate", "request-failed")],
    ids=["crash", "request"],
)
def test_a_baseline_that_crashes_and_a_failed_request_are_repeated_and_many_end_the_gate(
    event: Event, side: str, reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed request in hour fifteen does not discard everything; a broken server does."""
    monkeypatch.setattr(throughput_run, "NOTICED_S", 0.0)
    assert state(ran(tmp_path / "j", breaking(event, side))) == "pass"
    assert reference in {leg.reasons[0].reference for leg in legs(tmp_path / "j") if leg.discarded}
    assert stopped(ran(tmp_path / "k", breaking(event, side, 99))) == ("invalid", reference)


@pytest.mark.parametrize(("side", "make", "verdict"), [
    ("candidate", failed, "fail"), ("candidate", invalid, "invalid"), ("baseline", invalid, "invalid"),
])  # fmt: skip
@pytest.mark.parametrize("resident", [True, False])
def test_a_launch_that_breaks_the_kernel_contract_stops_the_gate(
    side: Side, make: Callable[..., Check], verdict: str, resident: bool, tmp_path: Path
) -> None:
    """Only kernels of the candidate's that ran and should not fail it."""
    servers = SimulatedServers()
    servers.faults[side] = make("kernels-moe", "Marlin", "kernel-forbidden")
    outcome = ran(tmp_path / "j", servers, resident=resident)
    assert stopped(outcome) == (verdict, "kernel-forbidden")


@pytest.mark.parametrize("resident", [True, False])
def test_every_launch_is_profiled_and_a_baseline_may_have_other_kernels(resident: bool, tmp_path: Path) -> None:
    """A candidate may not."""
    servers = SimulatedServers()
    servers.faults["baseline"] = failed("kernels-moe", "Marlin", "kernel-forbidden")
    assert state(ran(tmp_path / "j", servers, resident=resident)) == "pass"
    assert servers.profiled.count("candidate") == POLICY.min_blocks * (1 if resident else 2)
    assert set(servers.profiled) == {"baseline", "candidate", "control"}


def test_a_difference_has_the_sign_of_worse() -> None:
    """A longer time and a lower rate both make it positive."""
    own = [
        results.Measurement(
            ALONE.name, 0, 0, "baseline" if seconds == 1 else "candidate", position,
            run=LoadResult("g", seconds, (Request(0, seconds / 10, seconds, 8, 8),)),
            drafts=2 / seconds,
        )
        for position, seconds in enumerate((1.0, 1.1, 1.1, 1.0))
    ]  # fmt: skip
    found = [throughput_run.difference(own, ALONE.name, 0, metric) for metric in METRICS]
    assert found == pytest.approx([math.log(1.1)] * len(METRICS))
    assert throughput_run.difference(own[:3], ALONE.name, 0, "tpot") is None


def test_a_full_disk_loses_no_complete_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal that finds no room says so; what it had written stays whole, and the run goes on once there is room."""
    with monkeypatch.context() as full, refusal("disk-full"):
        full.setattr(os, "fsync", Mock(side_effect=[*[None] * 3, OSError(errno.ENOSPC, "No space left on device")]))
        ran(tmp_path / "j", fragile())
    written = [leg.run for leg in legs(tmp_path / "j")]
    assert state(ran(tmp_path / "j", fragile(now=100_000.0))) == "fail"
    assert [leg.run for leg in legs(tmp_path / "j")][: len(written)] == written
    assert len(written) >= 2 * 4 * 2  # two launches, beside the beginning


CELLS = ("8/16 c1",)


@pytest.fixture(name="place")
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose gates do not mind a busy machine, nor what memory and checkpoint are."""
    monkeypatch.setattr(preflight, "check", lambda *_, **__: ())
    monkeypatch.setattr(preflight, "both_fit", lambda *_: True)
    model = tmp_path / "toy"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return refserved.project(tmp_path / "project", min_blocks=1, max_blocks=1)


def context(place: Path) -> RunContext:
    words = ["--root", str(place), "--cache-dir", str(place.parent / "cache"), "--output", str(place.parent / "out")]
    return options.checkout(main.parse(["bench", *words]))


def environment(place: Path, name: str, faults: dict[fake_openai_server.Fault, int] | None = None) -> Path:
    return refserved.environment(place.parent / name, fake_openai_server.Behaviour(faults=faults or {}))


def question(place: Path, python: Path | None = None, **changes: object) -> server_under_test.GateOptions:
    python, base = python or environment(place, "candidate"), environment(place, "base")
    return replace(server_under_test.GateOptions(python=python, baseline_python=base, serve=place.parent / "toy", recipe="toy-cpu", workload=CELLS), **changes)


def answered(place: Path, asked: server_under_test.GateOptions, seconds: float = math.inf) -> results.Result:
    return throughput.Experiment(context(place), asked, policy.load(place), recipes.load(place, asked.recipe), thread_load.ThreadLoad()).result(seconds)


@pytest.mark.parametrize(
    ("faults", "variables", "state", "reference"),
    [
        ({"dies": 2}, {}, "fail", "candidate-crashed"),
        ({"prefix-hits": 2}, {}, "invalid", "prefix-cached"),
        ({}, {"REFERENCE": "starts-never"}, "invalid", "server-died"),
    ],
    ids=["dies", "prefix-hits", "starts-never"],
)
def test_a_candidate_that_is_wrong_never_passes(
    place: Path, faults: dict[fake_openai_server.Fault, int], variables: dict[str, str], state: str, reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash under load fails the gate; wrong answers, and a server that does not start, make it invalid."""
    monkeypatch.setattr(throughput.Experiment, "_contract", lambda *_: ())
    candidate = environment(place, "wrong", faults)
    result = answered(place, question(place, candidate, variable=tuple(variables.items())))
    stopped = throughput.checks(result)[0]
    assert (stopped.name, stopped.state, stopped.reason) == ("measured", state, reference)


def test_a_recipe_counts_only_as_it_is_served_and_profiled(place: Path) -> None:
    """
    A launch of which there is no profile does not count, as nothing shows its kernels, not even a
    baseline's, which may have others; flags that the recipe does not have are recorded, and then
    nothing is shown for the recipe.
    """
    result = answered(place, question(place, flag=("--seed=7",)))
    states = {check.name: (check.state, check.reason) for check in throughput.checks(result)}
    assert (states["measured"], states["flags"]) == (("invalid", "profile-missing"), ("invalid", "flags-added")), result.says
    assert result.baseline
    assert "--seed=7" in result.baseline.flags
    assert result.candidate.variables["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_only_the_same_experiment_is_continued(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill, or a lack of time, the measurements of the same wheels, flags, workloads and policies count, and no others; a result can be read again."""
    monkeypatch.setattr(throughput.Experiment, "_contract", lambda *_: ())
    asked = question(place)
    with patch.object(throughput_run.MeasurementJournal, "end", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        answered(place, asked)
    journals = place.parent / "cache" / "logs" / "throughput"
    assert len(list(journals.glob("*.jsonl"))) == 1
    now = time.time()
    again, other = answered(place, asked), answered(place, replace(asked, flag=("--seed=7",)), 0.0)
    assert again.began < now < other.began
    assert len(again.legs) == 2 * 4
    assert results.read(throughput.write_result(context(place).store, place, again)) == again
    late = answered(place, asked, 0.0)
    worst = worst_check(throughput.checks(late))
    assert worst
    assert (worst.state, worst.reason) == ("not-run", ladder.BUDGET_SPENT)
    assert late.began == answered(place, asked, 0.0).began > now
    refserved.edit(place / "ci" / "gates" / "throughput.yaml", warmups=3)
    assert answered(place, asked, 0.0).began > now


def test_cells_that_are_measured_are_those_that_the_preflight_judges(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It judged the workloads of the recipe, which G8 does not measure; cells have no more requests at a time than the server takes."""
    judged = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(preflight, "check", judged)
    with pytest.raises(KeyboardInterrupt):
        answered(place, question(place, workload=("8/16 c64", "8/16 c16", "8/16 c1")))
    assert [(cell.name, cell.primary) for cell in judged.call_args.args[1]] == [("8/16 c16", ("rate",)), ("8/16 c1", ("tpot", "ttft"))]


@pytest.mark.parametrize(
    "words",
    [
        [], ["--serve", "m"], ["--serve", "m", "--python", "p", "--server", "http://127.0.0.1:1"],
        ["--server", "http://127.0.0.1:1", "--workload", "sharegpt"],
    ],
)  # fmt: skip
def test_bench_serves_a_model_or_asks_a_server(words: list[str]) -> None:
    """Neither, both, a model without an environment, and texts without their file are refused."""
    arguments = main.parse(["bench", *words])
    with refusal("usage"):
        arguments.run(arguments)


def test_cell_of_real_prompts_without_their_file_is_refused_and_a_file_that_no_cell_reads(place: Path) -> None:
    with refusal("usage", match="file of prompts"):
        answered(place, question(place, workload=("sharegpt",)))
    with refusal("usage", match="not with the file of --texts"):
        answered(place, question(place, texts=place / "prompts.jsonl"))


# One measurement.

ORDER = LoadSpec("u", "m", 16, 24, 2, 2)
SOUND = Request(0.0, 0.1, 0.5, 16, 24)
LUMP, FEWER = replace(SOUND, ttft=0.49999), replace(SOUND, output_tokens=13)
COUNTS = throughput_run.CounterChange(4, 96)


@pytest.mark.parametrize(
    ("requests", "found", "expected"),
    [
        ((SOUND, SOUND), COUNTS, []),
        ((SOUND, replace(SOUND, error="429")), COUNTS, ["request-failed"]),
        (
            (SOUND, replace(SOUND, output_tokens=23)),
            replace(COUNTS, tokens=95),
            ["answer-other", "usage-mismatch"],
        ),
        ((SOUND, replace(SOUND, prompt_tokens=17)), COUNTS, ["prompt-other"]),
        ((SOUND, replace(SOUND, ttft=0.6)), COUNTS, ["times-impossible"]),
        ((SOUND, replace(SOUND, ttft=0.0)), COUNTS, ["times-impossible"]),
        ((SOUND, SOUND), None, ["counters-missing"]),
        ((SOUND, SOUND), replace(COUNTS, tokens=97), ["usage-mismatch"]),
        (
            (SOUND, SOUND),
            replace(COUNTS, finished=1, tokens=24),
            ["usage-mismatch"],
        ),
        ((SOUND, SOUND), replace(COUNTS, hits=0.01), ["prefix-cached"]),
        ((SOUND, SOUND), replace(COUNTS, hits=0.0099), []),
        # The server counts every token, but they came at once or in fewer pieces: no time is believed, and no wheel is blamed.
        ((SOUND, LUMP), COUNTS, ["stream-merged"]),
        ((SOUND, replace(SOUND, ttft=0.5)), COUNTS, ["stream-merged"]),
        ((SOUND, FEWER), COUNTS, ["stream-merged"]),
        ((SOUND, FEWER), replace(COUNTS, tokens=85), ["answer-other", "usage-mismatch"]),
        ((SOUND, replace(LUMP, error="it broke")), COUNTS, ["request-failed"]),
    ],
)
def test_every_reason_has_its_cause(
    requests: tuple[Request, ...], found: throughput_run.CounterChange | None, expected: list[str]
) -> None:
    """Each thing that is wrong is named by itself, and a sound leg by none; real prompts may have any length."""
    for order, faults in ((ORDER, expected), (replace(ORDER, prompt_file=Path("x")), [each for each in expected if each != "prompt-other"])):
        reasons = throughput_run.invalid_reasons(order, LoadResult("g", 1.0, requests), found, 0.01)
        assert [reason.reference for reason in reasons] == faults


def test_counters_are_differences() -> None:
    """A server that began anew in the middle of a leg has no counters for it; speculation is metered apart, by the server's counters."""
    first = {"vllm:generation_tokens_total": 24.0, "vllm:request_success_total": 1.0}
    second = {name: 3 * value for name, value in first.items()}
    assert throughput_run.counter_change(first, second) == throughput_run.CounterChange(2, 48)
    assert throughput_run.counter_change(second, first) is throughput_run.counter_change({}, {}) is None
    drafts = {"vllm:spec_decode_num_drafts_total": 10.0, "vllm:spec_decode_num_accepted_tokens_total": 20.0}
    assert throughput_run.counter_change(first, {**second, **drafts}) == throughput_run.CounterChange(2, 48, drafts=3)


def test_a_host_whose_gpu_has_memory_of_its_own_keeps_less_free(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The floor of unified memory is more than many such hosts have left."""
    refserved.edit(place / "ci" / "gates" / "machine.yaml", floor=12_885, discrete_floor=2_000)
    hindrance = Reason("machine-busy", "another program runs")
    monkeypatch.setattr("sparkwright.bench.machine.monitor.MachineMonitor.settle", lambda *_: [hindrance])
    experiment = throughput.Experiment(context(place), question(place), policy.load(place), recipes.load(place, "toy-cpu"), thread_load.ThreadLoad())
    assert experiment.result().stopped == hindrance
    assert {plan.kept_free for plan in experiment._plans.values()} == {2_000}
