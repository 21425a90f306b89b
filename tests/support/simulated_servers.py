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

import msgspec
import psutil

from sparkwright.bench.load.vllm_bench import LoadResult, LoadSpec, Request
from sparkwright.bench.machine import state_checks
from sparkwright.bench.machine.monitor import MachineMonitor
from sparkwright.bench.machine.state_checks import MachinePolicy, Normal, Snapshot
from sparkwright.bench.records import Reason, Side
from sparkwright.gates.core.verdict import Check
from sparkwright.gates.throughput.measurement import (
    ExternalServer,
    MeasurementContext,
    RunningServer,
)
from sparkwright.gates.throughput.policy import ThroughputPolicy

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
    """

    launch: float = 0.003
    run: float = 0.002
    slowdown: float = 0.0
    slow: Callable[[float], bool] = lambda _: False
    throttled: Mapping[Side, tuple[str, ...]] = {}


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


class SimulatedMachine(MachineMonitor):
    """The machine of *servers*."""

    def __init__(self, servers: SimulatedServers, policy: MachinePolicy) -> None:
        self._servers, self.policy = servers, policy
        self._normal = Normal(GEMV, GEMV, GEMV, COPY)

    def snapshot(self, ours: Sequence[psutil.Process] = ()) -> Snapshot:
        servers = self._servers
        servers.now += 1
        gemv = GEMV * (1.5 if servers.noise.slow(servers.now) else 1.0)
        throttled, servers.throttled = servers.throttled, ()
        return Snapshot(
            time=servers.now, monotonic=servers.now, gemv=gemv, copy=COPY, other_load=0.0,
            throttle_reasons=throttled,
        )  # fmt: skip

    def disturbances(self, before: Snapshot, after: Snapshot) -> tuple[Reason, ...]:
        return state_checks.disturbances(before, after, self._normal, self.policy)


class SimulatedServers:
    """
    Servers, load generator and machine in one; *seed* decides every draw.

    Attributes:
        profiled: Sides whose servers were profiled, in order.
        faults: By side: what a profile of its server shows.
        spoil: What becomes of the result of a measurement, and of its server.
    """

    name = "simulated"

    def __init__(
        self, noise: Noise, policy: ThroughputPolicy, machine: MachinePolicy, seed: int = 1
    ) -> None:
        self.noise, self.now, self.seed = noise, 0.0, seed
        self.measured, self.numbers = 0, Counter[str]()
        self.throttled: tuple[str, ...] = ()
        self.profiled: list[Side] = []
        self.faults: dict[Side, Check] = {}
        self.spoil: Callable[[SimulatedServer, LoadResult], LoadResult] = lambda _, result: result
        self.servers: dict[Side, RunningServer] = {}
        self.context = MeasurementContext(
            self, SimulatedMachine(self, machine), policy, lambda url: dict(self.at(url).counts),
            "model", cooldown=COOLDOWN, wait=self.wait,
        )  # fmt: skip

    def wait(self, seconds: float) -> None:
        """Let the virtual clock run."""
        self.now += seconds

    def at(self, url: str) -> SimulatedServer:
        """Return the server at *url*."""
        servers = [one for one in self.servers.values() if isinstance(one, SimulatedServer)]
        return next(one for one in servers if one.url == url)

    @contextlib.contextmanager
    def launch(self, sides: Sequence[Side]) -> Iterator[dict[Side, RunningServer]]:
        """Start servers for *sides*."""
        self.now += LAUNCH
        self.servers = {}
        for side in sides:
            number = self.numbers[side]
            self.numbers[side] += 1
            effect = random.Random(f"{self.seed}/{side}/{number}").gauss(0, self.noise.launch)
            self.servers[side] = SimulatedServer(side, number, effect)
        yield self.servers

    def profile(self, side: Side, server: RunningServer) -> Check | None:
        """Return the check of the kernel contract that *server* breaks."""
        self.profiled.append(side)
        return self.faults.get(side)

    def measure(self, spec: LoadSpec) -> LoadResult:
        """Make the load, as a generator does."""
        server, noise = self.at(spec.url), self.noise
        self.measured += 1
        draw = random.Random(f"{self.seed}/{spec.seed}").gauss(0, noise.run)
        slowdown = noise.slowdown if server.side == "candidate" else 0.0
        factor = math.exp(server.effect + draw + slowdown) * (1.5 if noise.slow(self.now) else 1)
        latency = factor * (TTFT + TPOT * (spec.output_tokens - 1))
        shape = spec.prompt_tokens, spec.output_tokens, spec.output_tokens
        request = Request(0.0, factor * TTFT, latency, *shape)
        self.now += MEASURE
        self.throttled = noise.throttled.get(server.side, ())
        server.counts["vllm:request_success_total"] += spec.requests
        server.counts['vllm:request_success_total{finished_reason="length"}'] += spec.requests
        server.counts["vllm:generation_tokens_total"] += spec.requests * spec.output_tokens
        rounds = -(-spec.requests // spec.concurrency)
        result = LoadResult(self.name, "", rounds * latency, (request,) * spec.requests)
        return self.spoil(server, result)
