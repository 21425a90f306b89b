"""
Servers, load generator and machine with known noise and a virtual clock, for whole throughput gates
in which no second passes.

The order of launches, the validity of measurements, the journal and the decision are the real ones.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from sparkwright.bench.load.vllm_bench import LoadResult, LoadSpec, Request
from sparkwright.bench.machine import state_checks
from sparkwright.bench.machine.monitor import MachineMonitor
from sparkwright.bench.machine.state_checks import MachinePolicy, Normal, Snapshot
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.records import Reason, Side
from sparkwright.gates.throughput.measurement import ExternalServer, MeasurementContext
from sparkwright.gates.throughput.records import ThroughputPolicy
from sparkwright.gates.throughput.server_pair import ServerPair

#: Seconds of a decode step, of a first token, of a launch, a measurement and a cool-down.
TPOT, TTFT, LAUNCH, MEASURE, COOLDOWN = 0.015, 0.25, 120.0, 60.0, 60.0
#: Seconds of the probe's GEMV and copy.
GEMV, COPY = 0.004, 0.008


class Noise(msgspec.Struct, frozen=True):
    """
    Spreads of logarithms: of a launch and of a measurement in it, and the candidate's slowdown.

    Attributes:
        slow: Whether the machine is in its hidden slow state at a second.
        throttled: Throttle reasons that a measurement of a side leaves behind.
        broken: Why launches of a side break the kernel contract.
    """

    launch: float = 0.003
    run: float = 0.002
    slowdown: float = 0.0
    slow: Callable[[float], bool] = lambda _: False
    throttled: Mapping[Side, tuple[str, ...]] = {}
    broken: Mapping[Side, Reason] = {}


class SimulatedServer(ExternalServer):
    """A launch; its counters grow with what it answers."""

    def __init__(self, side: Side, number: int, effect: float) -> None:
        super().__init__(f"http://{side}.{number}.invalid")
        self.side, self.effect = side, effect
        self.failure = self.reason = ""
        self.counts: Counter[str] = Counter()

    def guard(self) -> bool:
        return not self.failure

    def end(self) -> None:
        """End as a crashed server does."""
        self.failure, self.reason = "it ended with status -11", "server-died"


class SimulatedLoad:
    """The load generator of *servers*."""

    name = "simulated"

    def __init__(self, servers: SimulatedServers) -> None:
        self._servers = servers

    def measure(self, spec: LoadSpec) -> LoadResult:
        servers = self._servers
        server, noise = servers.at(spec.url), servers.noise
        servers.measured += 1
        draw = random.Random(f"{servers.seed}/{spec.seed}").gauss(0, noise.run)
        slowdown = noise.slowdown if server.side == "candidate" else 0.0
        factor = math.exp(server.effect + draw + slowdown) * (1.5 if noise.slow(servers.now) else 1)
        latency = factor * (TTFT + TPOT * (spec.output_tokens - 1))
        shape = spec.prompt_tokens, spec.output_tokens, spec.output_tokens
        request = Request(0.0, factor * TTFT, latency, *shape)
        servers.now += MEASURE
        servers.throttled = noise.throttled.get(server.side, ())
        server.counts["vllm:request_success_total"] += spec.requests
        server.counts['vllm:request_success_total{finished_reason="length"}'] += spec.requests
        server.counts["vllm:generation_tokens_total"] += spec.requests * spec.output_tokens
        rounds = -(-spec.requests // spec.concurrency)
        return LoadResult(self.name, "", rounds * latency, (request,) * spec.requests)


class SimulatedMachine(MachineMonitor):
    """The machine of *servers*."""

    def __init__(self, servers: SimulatedServers, policy: MachinePolicy) -> None:
        self._servers, self.policy = servers, policy
        self._normal = Normal(GEMV, GEMV, GEMV, COPY)

    def snapshot(self, ours: Sequence[psutil.Process] = ()) -> Snapshot:
        self._servers.now += 1
        gemv = GEMV * (1.5 if self._servers.noise.slow(self._servers.now) else 1.0)
        throttled, self._servers.throttled = self._servers.throttled, ()
        return Snapshot(
            time=self._servers.now, monotonic=self._servers.now, gemv=gemv, copy=COPY, other_load=0.0,
            throttle_reasons=throttled,
        )  # fmt: skip

    def disturbances(self, before: Snapshot, after: Snapshot) -> tuple[Reason, ...]:
        return state_checks.disturbances(before, after, self._normal, self.policy)


class SimulatedServers(ServerPair):
    """Servers and machine in one; *seed* decides every draw."""

    load = SimulatedLoad

    def __init__(
        self, noise: Noise, policy: ThroughputPolicy, machine: MachinePolicy, seed: int = 1
    ) -> None:
        self.noise, self.now, self.seed = noise, 0.0, seed
        self.measured, self.numbers = 0, Counter[str]()
        self.throttled: tuple[str, ...] = ()
        self.news: list[str] = []
        self.machine = SimulatedMachine(self, machine)
        context = MeasurementContext(self.load(self), self.machine, policy, self._counters, "model")
        super().__init__(context, {}, Path())

    def _counters(self, url: str) -> Mapping[str, float]:
        return dict(self.at(url).counts)

    def at(self, url: str) -> SimulatedServer:
        """Return the server at *url*."""
        servers = [one for one in self._servers.values() if isinstance(one, SimulatedServer)]
        return next(one for one in servers if one.url == url)

    @contextlib.contextmanager
    def launch(self, sides: Sequence[Side]) -> Iterator[None]:
        self.now += LAUNCH
        self._servers, self._broken = {}, dict(self.noise.broken)
        for side in sides:
            number = self.numbers[side]
            self.numbers[side] += 1
            effect = random.Random(f"{self.seed}/{side}/{number}").gauss(0, self.noise.launch)
            self._servers[side] = SimulatedServer(side, number, effect)
        yield

    def requests(self, cell: WorkloadCell, side: Side) -> int:
        return max(2, cell.concurrency)

    def cool_down(self, reason: Reason) -> bool:
        self.now += COOLDOWN
        snapshot = self.machine.snapshot()
        return not self.machine.disturbances(snapshot, snapshot)

    def tell(self, news: str) -> None:
        self.news.append(news)
