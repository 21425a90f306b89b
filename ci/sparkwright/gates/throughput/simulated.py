"""
A world of noise for whole gates: what a course measures with, without a second passing.

Servers, the load generator and the sentinel follow one `sparkwright.bench.statistics.noise.Machine` and its clock. All that judges — the
order of launches, the validity of legs, the state of the machine, the journal, the decision — is what a real gate runs.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import psutil
from msgspec.structs import replace

from sparkwright.bench.load.load_spec import LoadResult, LoadSpec, Request
from sparkwright.bench.machine import state_checks
from sparkwright.bench.machine.state_checks import MachinePolicy, Normal, Snapshot
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.records import Reason, Side
from sparkwright.bench.statistics.noise import Launch, Machine
from sparkwright.gates.throughput import measurement
from sparkwright.gates.throughput.measurement import MeasurementContext
from sparkwright.gates.throughput.policy import ThroughputPolicy
from sparkwright.gates.throughput.records import Measurement

#: True times of the simulated model, in seconds: a step and a first token of a 30B model on a GB10, about.
TPOT, TTFT = 0.015, 0.25
#: Seconds of a launch, of the sentinel's look, of a leg, and of calming down.
START, LOOK, LEG, CALM = 120.0, 1.0, 60.0, 60.0
#: Moments of a leg at which the machine is asked.
PARTS = 4
#: Seconds of the sentinel's GEMV and copy on this machine.
GEMV, COPY = 0.004, 0.008


class Served:
    """A launch of a side: its counters grow with what it answers."""

    ended = reference = ""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.url = launch, f"http://{launch.side}.{launch.number}.invalid"
        self.counts: Counter[str] = Counter()

    def guard(self) -> bool:
        return True

    def processes(self) -> list[psutil.Process]:
        return []

    def counters(self) -> Mapping[str, float]:
        return dict(self.counts)


class Simulated:
    """
    Servers, generator and machine in one.

    Args:
        machine: The noise, with the candidate's true slowdown.
        policy, states: What legs and the machine are judged by.

    Attributes:
        now: Seconds since the machine's beginning. *requests*: of a leg, whose figures are all alike.
    """

    name = "simulated"

    def __init__(self, machine: Machine, policy: ThroughputPolicy, states: MachinePolicy, requests: int = 2) -> None:
        self._machine, self._states, self.now, self.requests = machine, states, 0.0, requests
        self._means = MeasurementContext(self, self, policy, "model")
        self._servers: dict[Side, Served] = {}
        self._normal = Normal(GEMV, GEMV, GEMV, COPY, "simulated")

    def slow_down(self, slowdown: float) -> None:
        """Let the candidate be slower by ln(1 + …) *slowdown* from its next launch on."""
        self._machine.noise = replace(self._machine.noise, slowdown=slowdown)

    @contextlib.contextmanager
    def launch(self, sides: Sequence[Side]) -> Iterator[None]:
        """Start fresh servers for *sides*."""
        self.now += START
        self._servers = {side: Served(self._machine.launch(side)) for side in sides}
        yield

    def size(self, cell: WorkloadCell, side: Side) -> int:  # noqa: ARG002  both sides are alike
        """Return how many requests a leg makes."""
        return max(self.requests, cell.concurrency)

    def leg(self, cell: WorkloadCell, blank: Measurement, seed: int) -> Measurement:
        """Return *blank* filled in, as a real world does it."""
        return measurement.measured(self._means, self._servers[blank.side], cell, blank, seed)

    def cool(self, reasons: Sequence[Reason]) -> bool:  # noqa: ARG002  all pass with time
        """Let time pass."""
        self.now += CALM
        shot = self.snapshot()
        return not self.disturbances(shot, shot)

    def tell(self, news: str) -> None:
        """Say nothing: nobody reads thousands of gates."""

    def measure(self, order: LoadSpec) -> LoadResult:
        """Return what a sound generator would see of a leg that takes `LEG` seconds."""
        server = next(one for one in self._servers.values() if one.url == order.url)
        # A slow state that comes and goes inside the leg, unseen by the sentinel, slows it by its share.
        moments = [self.now + (part + 0.5) * LEG / PARTS for part in range(PARTS)]
        factor = statistics.fmean(self._machine.factor(at, server.launch) for at in moments)
        seconds = factor * (TTFT + TPOT * (order.output_tokens - 1))
        one = Request(0.0, factor * TTFT, seconds, order.prompt_tokens, order.output_tokens, order.output_tokens)
        self.now += LEG
        server.counts["vllm:request_success_total"] += order.requests
        server.counts['vllm:request_success_total{finished_reason="length"}'] += order.requests
        server.counts["vllm:generation_tokens_total"] += order.requests * order.output_tokens
        rounds = -(-order.requests // order.concurrency)
        return LoadResult(self.name, "", rounds * seconds, (one,) * order.requests)

    def snapshot(self, ours: Sequence[psutil.Process] = ()) -> Snapshot:  # noqa: ARG002  there are none
        """Return what the sentinel sees now."""
        self.now += LOOK
        return Snapshot(time=self.now, monotonic=self.now, gemv=GEMV * self._machine.gemv(self.now), copy=COPY, other_load=0.0)

    def disturbances(self, before: Snapshot, after: Snapshot) -> tuple[Reason, ...]:
        """Return why a leg between two snapshots does not count."""
        return state_checks.disturbances(before, after, self._normal, self._states)

    @property
    def policy(self) -> MachinePolicy:
        """Return the policy of the machine."""
        return self._states
