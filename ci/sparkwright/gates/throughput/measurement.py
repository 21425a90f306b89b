"""One leg: a load on a server, the machine's state and the server's counters around it, and whether it counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import psutil
from msgspec.structs import replace

from sparkwright.bench.load.load_spec import LoadError, LoadGenerator, LoadResult, LoadSpec
from sparkwright.bench.machine.state_checks import MachinePolicy, Snapshot
from sparkwright.bench.model import decode_bytes
from sparkwright.bench.model.decode_bytes import Bandwidth
from sparkwright.bench.recipes.workloads import RequestRule, WorkloadCell
from sparkwright.bench.records import Reason
from sparkwright.bench.server.openai_schema import ServerInvalid
from sparkwright.core.console import console
from sparkwright.gates.throughput import validity
from sparkwright.gates.throughput.policy import ThroughputPolicy
from sparkwright.gates.throughput.records import Measurement, Speculation

#: Seconds within which the end of a server's process is noticed.
NOTICED = 3.0


class Machine(Protocol):
    """The machine's state; `sparkwright.bench.machine.monitor.Machine` in earnest."""

    def snapshot(self, ours: Sequence[psutil.Process] = ()) -> Snapshot: ...

    def disturbances(self, before: Snapshot, after: Snapshot) -> tuple[Reason, ...]: ...

    @property
    def policy(self) -> MachinePolicy: ...


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


class MeasurementContext(msgspec.Struct, frozen=True):
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

    generator: LoadGenerator
    machine: Machine
    policy: ThroughputPolicy
    model: str
    tokenizer: Path | None = None
    texts: Path | None = None
    step: Callable[[WorkloadCell], float | None] = lambda _: None
    bandwidth: Bandwidth | None = None
    rule: RequestRule = RequestRule(5, 3, 0.0, 512)
    cooldown: float = 0.0


def measured(means: MeasurementContext, server: Serving, cell: WorkloadCell, blank: Measurement, seed: int) -> Measurement:
    """Return *blank* filled in: what the generator measured at *server*, and why it does not count, if it does not."""
    if not server.guard():
        return replace(blank, began=time.time(), reasons=(Reason(server.reference, server.ended),))
    order = ordered(means, server.url, cell, seed)
    before = means.machine.snapshot(server.processes())
    leg = replace(blank, began=before.time, before=before)
    try:
        counters = server.counters()
        with console.progress(f"{cell.name}, {blank.side}", 0) as line:
            line.update(0, f"{order.requests} requests")
            run = means.generator.measure(order)
        found = validity.counted(counters, server.counters())
    except (LoadError, ServerInvalid) as error:
        why = Reason(server.reference, server.ended) if _ended(server) else (Reason(error.reason, error.message) if isinstance(error, LoadError) else Reason(error.reference, error.says))
        return replace(leg, reasons=(why,))
    after = means.machine.snapshot(server.processes())
    guessed = validity.speculation(run, found) if found else None
    share = _roofline(means, cell, run, guessed)
    # What a batch reads of a model with experts is bounded from above only, so one request alone can be above the ceiling.
    wrong = validity.reasons(order, run, found, prefix_hits=means.policy.prefix_hits, roofline=share if cell.concurrency == 1 else None)
    merged = validity.passing(order, run, found, wrong)
    wrong = () if merged else wrong
    passing = (*means.machine.disturbances(before, after), *merged)
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


def ordered(means: MeasurementContext, url: str, cell: WorkloadCell, seed: int) -> LoadSpec:
    """Return the load of a leg of *cell*."""
    return LoadSpec(
        url, means.model, cell.prompt, cell.answer, cell.concurrency, cell.requests, means.policy.warmups, seed,
        means.tokenizer, means.texts if cell.texts else None, timeout_s=means.policy.patience,
    )  # fmt: skip


def _roofline(means: MeasurementContext, cell: WorkloadCell, run: LoadResult, guessed: Speculation | None) -> float | None:
    """Return the share of the memory's bandwidth that the leg's steps need; None where it cannot be told."""
    step = means.step(cell)
    if step is None or step < means.policy.roofline_least or means.bandwidth is None or run.tpot <= 0:
        return None
    length = guessed.length if guessed else 1.0
    return decode_bytes.bandwidth_use(step, 1 / run.tpot, means.bandwidth.gigabytes, accepted=length)
