"""The servers of an experiment: started from two environments, or one that runs already."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from sparkwright.bench.load.vllm_bench import LoadError
from sparkwright.bench.machine.watchdog import watch_memory
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.records import Reason, Side
from sparkwright.bench.server.launch import LaunchPlan, Server
from sparkwright.core.console import console
from sparkwright.gates.throughput.measurement import (
    ExternalServer,
    MeasurementContext,
    RunningServer,
    load_order,
    measure,
)
from sparkwright.gates.throughput.records import Measurement


class ServerPair:
    """
    The servers that are measured.

    Args:
        launches: How each side is started. *url*: of a running server, in their place.
        logs: Folder for the logs of the servers.
        check: Returns why the candidate's log breaks the kernel contract; None if it does not.
    """

    def __init__(
        self,
        context: MeasurementContext,
        launches: Mapping[Side, LaunchPlan],
        logs: Path,
        url: str = "",
        check: Callable[[Path], Reason | None] = lambda _: None,
    ) -> None:
        self._context, self._launches, self._logs, self._url = context, launches, logs, url
        self._servers: dict[Side, RunningServer] = {}
        self._check, self._broken = check, dict[Side, Reason]()

    @contextlib.contextmanager
    def launch(self, sides: Sequence[Side]) -> Iterator[None]:
        """Start fresh servers for *sides* at the same time, and stop them behind the block."""
        if self._url:
            self._servers = {side: ExternalServer(self._url) for side in sides}
            yield
            return
        with contextlib.ExitStack() as stack:
            # All processes are started before the first is waited for.
            servers = {
                side: Server(self._launches[side], self._logs / f"{side}.log") for side in sides
            }
            for server in servers.values():
                stack.callback(server.stop)
            for server in servers.values():
                stack.enter_context(server)
            # A server that loads its weights takes memory faster than any other may.
            for server in servers.values():
                stack.enter_context(watch_memory(self._context.machine.policy.memory, server.kill))
            self._servers, candidate = {**servers}, servers.get("candidate")
            broken = self._check(candidate.log) if candidate and candidate.guard() else None
            self._broken = {"candidate": broken} if broken else {}
            yield

    def alive(self, side: Side) -> bool:
        """Return whether the server of *side* still runs."""
        return self._servers[side].guard()

    def measure(self, cell: WorkloadCell, blank: Measurement, seed: int) -> Measurement:
        """Return *blank* with a measurement of *cell*, or why its launch does not count."""
        if broken := self._broken.get(blank.side):
            return replace(blank, began=time.time(), reasons=(broken,))
        return measure(self._context, self._servers[blank.side], cell, blank, seed)

    def requests(self, cell: WorkloadCell, side: Side) -> int:
        """Return how many requests a measurement of *cell* makes, from the time of one round."""
        server = self._servers[side]
        trial = load_order(self._context, server.url, replace(cell, requests=cell.concurrency), 1)
        seconds = None
        # A server that does not answer is found by the measurement itself.
        with contextlib.suppress(LoadError):
            seconds = self._context.generator.measure(trial).seconds if server.guard() else None
        return self._context.rule.requests(cell, seconds)

    def cool_down(self, reason: Reason) -> bool:
        """Wait a while, and return whether the machine is as it should be again."""
        context = self._context
        with console.progress("let the machine calm down", context.cooldown) as line:
            end = time.monotonic() + context.cooldown
            while (left := end - time.monotonic()) > 0:
                line.update(round(context.cooldown - left), f"s  ({reason.reference})")
                time.sleep(min(left, 1.0))
        own = [process for server in self._servers.values() for process in server.processes()]
        snapshot = context.machine.snapshot(own)
        return not context.machine.disturbances(snapshot, snapshot)

    def tell(self, news: str) -> None:
        """Show *news*."""
        console.note(news)
