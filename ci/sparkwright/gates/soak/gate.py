"""
G7: does the server still say the same after hours of mixed load?

The load mixes concurrencies, lengths, shared prefixes and clients that go away. Meanwhile the memory of the server's processes, the
processes themselves and the kernel's log are watched, a line of the journal for each stretch. Afterwards the words and the distributions
are asked for again. A soak that was interrupted is never a pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from sparkwright.bench.machine import kernel_log
from sparkwright.bench.machine.kernel_log import KernelLog
from sparkwright.bench.server.client import Client
from sparkwright.bench.server.openai_schema import REASONS as SERVER_REASONS
from sparkwright.bench.server.openai_schema import ServerInvalid
from sparkwright.core.console import Progress, console
from sparkwright.gates.core.journal import JournalWriter
from sparkwright.gates.core.verdict import Check, declare, invalid
from sparkwright.gates.generation import policy as prompts
from sparkwright.gates.soak import checks as soaked
from sparkwright.gates.soak import journal as soakjournal
from sparkwright.gates.soak.collect import Load, LoadPolicy, Stretch
from sparkwright.gates.soak.journal import Begun, Ended, Observed, Record
from sparkwright.gates.soak.processes import Processes

TITLE = "hours of mixed load"

#: The gates that a gate runs again after the load.
REPEATED = ("words", "distributions")
CHECKS = (
    *declare("duration", "requests", "words-under-load", "memory-growth", measured=True),
    *declare("restarts", "kernel-log", "drained", *(f"{name}-after" for name in REPEATED)),
    *declare("again", role="reports"),
)

REASONS: Mapping[str, str] = {**SERVER_REASONS, **kernel_log.MEANINGS, **soaked.MEANINGS}

#: vLLM's gauges of the requests that it works on, and of those that wait.
RUNNING = frozenset({"vllm:num_requests_running", "vllm:num_requests_waiting"})

#: What runs after the load, by a name for the check (``words``): the checks of another gate.
Again = Mapping[str, Callable[[], tuple[Check, ...]]]


class SoakPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/soak.yaml``, which says where each threshold comes from.

    Attributes:
        seconds: Of load.
        stretch: Seconds of a line of the journal.
        sample: Seconds between two looks at the memory.
        load: What is asked.
        warm: The share of the time at the beginning whose memory does not count, as caches fill.
        growth: The most that the server's memory may grow, in MB (10^6 bytes) an hour.
        confidence: Of the interval of the growth.
        run: From how many tokens in a row on an answer is odd.
        least: Whole answers that are needed at each concurrency.
        drain: Seconds within which the server must be idle after the load.
        gone: Stretches without a whole answer after which the server counts as gone.
    """

    seconds: float
    stretch: float
    sample: float
    load: LoadPolicy
    warm: float
    growth: float
    confidence: float
    run: int
    least: int
    drain: float
    gone: int

    def __post_init__(self) -> None:
        times = (self.seconds, self.stretch, self.sample, self.growth, self.drain)
        if not all(one > 0 for one in times) or not 0 <= self.warm < 1 or not 0.5 <= self.confidence < 1:
            raise ValueError("times and growth are above 0, warm and confidence are parts of 1")
        if self.run < 2 or self.least < 1 or self.gone < 1:
            raise ValueError("run is at least 2, least and gone are at least 1")

    def concurrency(self, at: float) -> int:
        """Return how many requests are made at once after *at* seconds; in a short soak the turns are shorter, so that each comes."""
        turns = self.load.concurrencies
        return turns[int(at / min(self.load.phase, self.seconds / len(turns))) % len(turns)]


def run(
    policy: SoakPolicy, url: str, journal: Path, *,
    model: str = "", pid: int | None = None, again: Again | None = None, kernel: Path = kernel_log.KMSG,
) -> tuple[Check, ...]:  # fmt: skip
    """
    Return the checks of the gate, after the time that *policy* sets.

    Args:
        journal: Where every stretch is written to.
        pid: The server's process; its memory and its children are watched. Without it, they are not.
        again: The gates that are run again afterwards.
        kernel: Where the kernel's log is read.
    """
    client = Client(url, model)
    try:
        name, limit = client.model(), client.max_model_len()
        lines = 1 + max(policy.load.prompts) // 4
        text = client.tokenize(prompts.filling(prompts.Long(policy.load.line, policy.load.line), lines))
    except ServerInvalid as error:
        return (invalid("requests", error.says, error.reference),)
    load = Load(policy.load, url, name, text, limit, policy.run)
    try:
        record = _watched(policy, client, load, journal, pid, kernel, name)
    finally:
        load.stop(wait=0)
    return (*soaked.checks(policy, record), *soaked.again(record, again or {}))


def interrupted(policy: SoakPolicy, journal: Path) -> tuple[Check, ...]:
    """
    Return what the journal of an earlier soak says, none of it a pass unless it had ended.

    Raises:
        file-invalid: There is no journal there.
    """
    record = soakjournal.read(journal)
    return (*soaked.checks(policy, record), *soaked.again(record, {}))


class _Watch:
    """Everything that is looked at beside the answers."""

    def __init__(self, client: Client, pid: int | None, kernel: Path) -> None:
        self.processes = Processes(client, pid)
        self.log: KernelLog | None = None
        self.unreadable = ""
        try:
            self.log = KernelLog(kernel)
        except OSError as error:
            self.unreadable = f"{kernel}: {error.strerror}"
        self._memory: list[tuple[float, float]] = []
        self._available: float | None = None

    def sample(self, at: float) -> None:
        """Look at the memory."""
        if (resident := self.processes.resident()) is not None:
            self._memory.append((round(at, 3), resident))
        available = self.processes.available()
        self._available = available if self._available is None else min(self._available, available)

    def observed(self, at: float, load: Stretch) -> Observed:
        """Return what was seen since the last call."""
        findings: list[kernel_log.Finding] = []
        if self.log:
            try:
                findings += self.log.findings()
            except OSError as error:
                self.log, self.unreadable = None, f"the kernel's log: {error.strerror}"
        lost = self.unreadable or (f"records were overwritten {self.log.lost} times" if self.log and self.log.lost else "")
        memory, self._memory = tuple(self._memory), []
        return Observed(at, load, memory, self._least_available(), self.processes.restarts(), tuple(findings[:20]), lost)

    def _least_available(self) -> float | None:
        available, self._available = self._available, None
        return available

    def close(self) -> None:
        if self.log:
            self.log.close()


def _watched(policy: SoakPolicy, client: Client, load: Load, path: Path, pid: int | None, kernel: Path, model: str) -> Record:
    """Return the record of the load, which is also what the journal holds."""
    watch, journal = _Watch(client, pid, kernel), JournalWriter(path)
    try:
        record = Record(Begun(policy.seconds, model, watch.processes.unknown, watch.unreadable), (), None)
        journal.add(record.begun)
        with console.progress("soak", policy.seconds) as progress:
            began = time.monotonic()
            for observed in _stretches(policy, watch, load, progress, began):
                record = msgspec.structs.replace(record, observed=(*record.observed, observed))
                journal.add(observed)
                if gone := _gone(policy, record.observed):
                    break
        # A worker that still waits for its answer is a request that the server never ended.
        running = load.stop(policy.drain) or _running(client, policy.drain)
        # What the workers still had in hand when the time was over.
        last = watch.observed(time.monotonic() - began, load.taken())
        odd = soaked.total((*record.observed, last)).oddities
        ended = Ended(last.at, "gone" if gone else "time", running, tuple(load.repeats_alone(fault) for fault in odd))
        journal.add(last)
        journal.add(ended)
        return msgspec.structs.replace(record, observed=(*record.observed, last), ended=ended)
    finally:
        journal.close()
        watch.close()


def _stretches(policy: SoakPolicy, watch: _Watch, load: Load, progress: Progress, began: float) -> Iterator[Observed]:
    """Keep the load up until the time is over, and yield what was seen in each stretch."""
    next_line, total = policy.stretch, Stretch()
    while True:
        at = time.monotonic() - began
        now = policy.concurrency(at)
        load.set_concurrency(now)
        watch.sample(at)
        over = at >= policy.seconds
        if over or at >= next_line:
            next_line = at + policy.stretch
            observed = watch.observed(at, load.taken())
            total = total.with_(observed.load)
            yield observed
        if over:
            return
        progress.update(at, f"{now} at once; {total.whole} answers, {total.cancelled} cancelled, {total.failed} failed")
        time.sleep(min(policy.sample, max(0.0, policy.seconds - at)))


def _gone(policy: SoakPolicy, observed: Sequence[Observed]) -> bool:
    """Has the server failed all it was asked for as many stretches as *policy* allows?"""
    last = observed[-policy.gone :]
    return len(last) == policy.gone and all(one.load.failed and not one.load.whole for one in last)


def _running(client: Client, wait: float) -> float | None:
    """Return how many requests the server still works on, after at most *wait* seconds; None where it does not say."""
    end = time.monotonic() + wait
    while True:
        try:
            found = client.metrics()
        except ServerInvalid:
            return None
        if any(name not in found for name in RUNNING):
            return None
        left = sum(found[name] for name in RUNNING)
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.2)
