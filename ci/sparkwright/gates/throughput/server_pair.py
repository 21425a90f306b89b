"""The real world of a course: servers that are started from two environments, or one that runs already."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
from msgspec.structs import replace

from sparkwright.bench.load.load_spec import LoadError
from sparkwright.bench.machine.oom_watchdog import watch_memory
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.records import Reason, Side
from sparkwright.bench.server.client import Client
from sparkwright.bench.server.launch import LaunchPlan, Server
from sparkwright.core.console import console
from sparkwright.gates.throughput.measurement import MeasurementContext, Serving, measured, ordered
from sparkwright.gates.throughput.records import Measurement

#: Seconds between two bytes of a server that is asked for its counters.
PATIENCE = 30.0


def _counters(url: str, model: str) -> Mapping[str, float]:
    return Client(url, model, deadline=PATIENCE).metrics()


class ExternalServer:
    """A server that somebody else started, at *url*, for *model*; nothing is known of its processes."""

    ended = reference = ""

    def __init__(self, url: str, model: str) -> None:
        self.url, self._model = url, model

    def guard(self) -> bool:
        return True

    def processes(self) -> list[psutil.Process]:
        return []

    def counters(self) -> Mapping[str, float]:
        return _counters(self.url, self._model)


class OwnServer:
    """A *server* of ours."""

    def __init__(self, server: Server) -> None:
        self._server, self.url = server, server.url

    @property
    def ended(self) -> str:
        return self._server.failure

    @property
    def reference(self) -> str:
        return self._server.reason

    def guard(self) -> bool:
        return self._server.guard()

    def processes(self) -> list[psutil.Process]:
        return self._server.processes()

    def counters(self) -> Mapping[str, float]:
        return _counters(self.url, self._server.plan.name)


class ServerPair:
    """
    Servers from environments, or one that runs already.

    Args:
        launches: How each side is started. *url*: of a server that runs, in their place.
        logs: Folder for what the servers print.
    """

    def __init__(self, means: MeasurementContext, launches: Mapping[Side, LaunchPlan], logs: Path, url: str = "") -> None:
        self._means, self._launches, self._logs, self._url = means, dict(launches), logs, url
        self._servers: dict[Side, Serving] = {}

    @contextlib.contextmanager
    def launch(self, sides: Sequence[Side]) -> Iterator[None]:
        """Start fresh servers for *sides* at the same time, and end them behind the block."""
        if self._url:
            self._servers = {side: ExternalServer(self._url, self._means.model) for side in sides}
            yield
            return
        with contextlib.ExitStack() as stack:
            # All processes are started before the first is waited for.
            began = {side: Server(self._launches[side], self._logs / f"{side}.log") for side in sides}
            for server in began.values():
                stack.callback(server.stop)
            for server in began.values():
                stack.enter_context(server)
            # A server that loads its weights takes memory faster than any other may.
            for server in began.values():
                stack.enter_context(watch_memory(self._means.machine.policy.memory, server.kill))
            self._servers = {side: OwnServer(server) for side, server in began.items()}
            yield

    def leg(self, cell: WorkloadCell, blank: Measurement, seed: int) -> Measurement:
        """Return *blank* filled in with one leg of *cell*."""
        return measured(self._means, self._servers[blank.side], cell, blank, seed)

    def size(self, cell: WorkloadCell, side: Side) -> int:
        """Return how many requests a leg of *cell* makes: one round is timed. A server that gives none is found out by the leg itself."""
        means, server = self._means, self._servers[side]
        trial = replace(ordered(means, server.url, cell, 1), requests=cell.concurrency)
        try:
            each = means.generator.measure(trial).seconds if server.guard() else None
        except LoadError:
            each = None
        return means.rule.requests(cell, each)

    def cool(self, reasons: Sequence[Reason]) -> bool:
        """Wait a while, and return whether the machine is as it should be again."""
        with console.progress("let the machine calm down", self._means.cooldown) as line:
            end = time.monotonic() + self._means.cooldown
            while (left := end - time.monotonic()) > 0:
                line.update(round(self._means.cooldown - left), f"s  ({reasons[0].reference})")
                time.sleep(min(left, 1.0))
        shot = self._means.machine.snapshot([one for server in self._servers.values() for one in server.processes()])
        return not self._means.machine.disturbances(shot, shot)

    def tell(self, news: str) -> None:
        """Say something in passing."""
        console.note(news)
