"""The real world of a course: servers that are started from two environments, a load generator, and the machine's state around a leg."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import psutil
from msgspec.structs import replace

from sparkwright.console import console
from sparkwright.gates.load.order import Generator, LoadInvalid, Order, Run
from sparkwright.gates.machine.snapshot import Snapshot
from sparkwright.gates.model import roofline
from sparkwright.gates.model.roofline import Bandwidth
from sparkwright.gates.recipes.cells import Cell, Rule
from sparkwright.gates.server.client import Client
from sparkwright.gates.server.serve import Launch, Server
from sparkwright.gates.server.wire import ServerInvalid
from sparkwright.gates.throughput import validity
from sparkwright.gates.throughput.policy import ThroughputPolicy
from sparkwright.gates.throughput.records import Leg, Reason, Side, Speculation

#: Seconds between two bytes of a server that is asked for its counters.
PATIENCE = 30.0
#: Seconds within which the end of a server's process is noticed.
NOTICED = 3.0


class Machine(Protocol):
    """The machine's state; `sparkwright.gates.machine.state.Machine` in earnest."""

    def snapshot(self, ours: Sequence[psutil.Process] = ()) -> Snapshot: ...

    def disturbed(self, before: Snapshot, after: Snapshot) -> tuple[Reason, ...]: ...

    def watching(self, server: Server) -> contextlib.AbstractContextManager[object]: ...


class Serving(Protocol):
    """A server that answers."""

    @property
    def url(self) -> str: ...

    @property
    def ended(self) -> str: ...

    @property
    def reference(self) -> str: ...

    def guard(self) -> bool: ...

    def processes(self) -> list[psutil.Process]: ...

    def counters(self) -> Mapping[str, float]:
        """Return its metrics; raise `ServerInvalid` where it gives none."""
        ...


def _counters(url: str, model: str) -> Mapping[str, float]:
    return Client(url, model, timeout=PATIENCE, deadline=PATIENCE).metrics()


class Given:
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


class Started:
    """A *server* of ours."""

    def __init__(self, server: Server) -> None:
        self._server, self.url = server, server.url

    @property
    def ended(self) -> str:
        return self._server.ended

    @property
    def reference(self) -> str:
        return self._server.reference

    def guard(self) -> bool:
        return self._server.guard()

    def processes(self) -> list[psutil.Process]:
        return self._server.processes()

    def counters(self) -> Mapping[str, float]:
        return _counters(self.url, self._server.launch.name)


class Means(msgspec.Struct, frozen=True):
    """
    What legs are measured with.

    Attributes:
        generator, machine, policy: See there.
        model: The name under which the model is served. *tokenizer*: its folder.
        texts: File of real prompts, for the cells that want them.
        step: Returns the bytes that a decode step reads for a cell; None where the checkpoint is not known.
        bandwidth: Measured in this session; None where it was not.
        rule: How many requests a leg makes.
        cooldown: Seconds to wait before a disturbed leg is measured again.
    """

    generator: Generator
    machine: Machine
    policy: ThroughputPolicy
    model: str
    tokenizer: Path | None = None
    texts: Path | None = None
    step: Callable[[Cell], float | None] = lambda _: None
    bandwidth: Bandwidth | None = None
    rule: Rule = Rule(5, 3, 0.0, 512)
    cooldown: float = 0.0


class Real:
    """
    Servers from environments, or one that runs already.

    Args:
        launches: How each side is started. *url*: of a server that runs, in their place.
        logs: Folder for what the servers print.
    """

    def __init__(self, means: Means, launches: Mapping[Side, Launch], logs: Path, url: str = "") -> None:
        self._means, self._launches, self._logs, self._url = means, dict(launches), logs, url
        self._servers: dict[Side, Serving] = {}

    @contextlib.contextmanager
    def launch(self, sides: Sequence[Side]) -> Iterator[None]:
        """Start fresh servers for *sides* at the same time, and end them behind the block."""
        if self._url:
            self._servers = {side: Given(self._url, self._means.model) for side in sides}
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
                stack.enter_context(self._means.machine.watching(server))
            self._servers = {side: Started(server) for side, server in began.items()}
            yield

    def leg(self, cell: Cell, blank: Leg, seed: int) -> Leg:
        """Return *blank* filled in with one leg of *cell*."""
        return measured(self._means, self._servers[blank.side], cell, blank, seed)

    def size(self, cell: Cell, side: Side) -> int:
        """Return how many requests a leg of *cell* makes: one round is timed. A server that gives none is found out by the leg itself."""
        means, server = self._means, self._servers[side]
        trial = replace(_order(means, server.url, cell, 1), requests=cell.concurrency)
        try:
            each = means.generator.measure(trial).seconds if server.guard() else None
        except LoadInvalid:
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
        return not self._means.machine.disturbed(shot, shot)

    def tell(self, news: str) -> None:
        """Say something in passing."""
        console.note(news)


def measured(means: Means, server: Serving, cell: Cell, blank: Leg, seed: int) -> Leg:
    """Return *blank* filled in: what the generator measured at *server*, and why it does not count, if it does not."""
    if not server.guard():
        return replace(blank, began=time.time(), reasons=(Reason(server.reference, server.ended),))
    order = _order(means, server.url, cell, seed)
    before = means.machine.snapshot(server.processes())
    leg = replace(blank, began=before.at, before=before)
    try:
        counters = server.counters()
        with console.progress(f"{cell.name}, {blank.side}", 0) as line:
            line.update(0, f"{order.requests} requests")
            run = means.generator.measure(order)
        found = validity.counted(counters, server.counters())
    except (LoadInvalid, ServerInvalid) as error:
        why = Reason(server.reference, server.ended) if _ended(server) else Reason(error.reference, error.says)
        return replace(leg, reasons=(why,))
    after = means.machine.snapshot(server.processes())
    passing = means.machine.disturbed(before, after)
    guessed = validity.speculation(run, found) if found else None
    share = _roofline(means, cell, run, guessed)
    # What a batch reads of a model with experts is bounded from above only, so one request alone can be above the ceiling.
    wrong = validity.reasons(order, run, found, prefix_hits=means.policy.prefix_hits, roofline=share if cell.concurrency == 1 else None)
    failed = any(one.error for one in run.requests)
    gone = (Reason(server.reference, server.ended),) if (_ended(server) if failed else not server.guard()) else ()
    return replace(
        leg, run=run, after=after, speculation=guessed, prefix_hits=found.hits if found else None, roofline=share,
        reasons=(*gone, *wrong, *passing), discarded=bool(passing) and not wrong and not gone,
    )  # fmt: skip


def _ended(server: Serving) -> bool:
    """Return whether *server*, which answered no more, has ended; its death is told a moment after its last answer."""
    until = time.monotonic() + NOTICED
    while server.guard():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _order(means: Means, url: str, cell: Cell, seed: int) -> Order:
    return Order(
        url, means.model, cell.prompt, cell.answer, cell.concurrency, cell.requests, means.policy.warmups, seed,
        means.tokenizer, cell.prompts, means.texts if cell.prompts == "texts" else None, means.policy.patience,
    )  # fmt: skip


def _roofline(means: Means, cell: Cell, run: Run, guessed: Speculation | None) -> float | None:
    """Return the share of the memory's bandwidth that the leg's steps need; None where it cannot be told."""
    step = means.step(cell)
    if step is None or step < means.policy.roofline_least or means.bandwidth is None or run.tpot <= 0:
        return None
    length = guessed.length if guessed else 1.0
    return roofline.use(step, 1 / run.tpot, means.bandwidth.gigabytes, accepted=length)
