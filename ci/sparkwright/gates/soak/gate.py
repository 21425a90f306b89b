"""
G7: hours of mixed load, and the same words and distributions afterwards.

The load mixes concurrencies, lengths, shared prefixes, clients that go away and bad requests.
Meanwhile the memory of the server's processes, the processes themselves and the kernel's log are
watched. The journal gets a line for each interval, so the last minutes before a machine dies can be
read. An interrupted soak has no verdict: the next one begins anew, as a new server is another one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from sparkwright.bench.machine import watchdog
from sparkwright.bench.server.client import REASONS as SERVER_REASONS
from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.core.console import console
from sparkwright.core.store import append_line
from sparkwright.gates.core.verdict import Check, declare, invalid, not_run
from sparkwright.gates.soak import checks, collect
from sparkwright.gates.soak.checks import SoakEnd, SoakInterval, SoakPolicy
from sparkwright.gates.soak.collect import Load, Monitor

__all__ = ["CHECKS", "REASONS", "REPEATED", "TITLE", "SoakPolicy", "run"]

TITLE = "hours of mixed load"

#: The gates that run again after the load.
REPEATED = ("words", "distributions")
CHECKS = (
    *declare("duration", "requests", "words-under-load", measured=True),
    *declare("memory-growth", "gpu-memory-growth", measured=True),
    *declare("restarts", "kernel-log", "drained", *(f"{name}-after" for name in REPEATED)),
    *declare("again", role="reports"),
)

REASONS: Mapping[str, str] = {**SERVER_REASONS, **watchdog.MEANINGS, **checks.MEANINGS}


def run(
    policy: SoakPolicy, url: str, journal: Path, *, model: str = "", pid: int | None = None,
    again: Mapping[str, Callable[[], tuple[Check, ...]]] | None = None,
    kernel: Path = watchdog.KMSG,
) -> tuple[Check, ...]:  # fmt: skip
    """
    Return the checks of the gate, after the time that *policy* sets.

    Args:
        journal: The file for a line of each interval.
        pid: The server's process, whose memory and children are watched.
        again: The gates that run again afterwards.
        kernel: The device of the kernel's log.
    """
    client = Client(url, model)
    lines = range(1, 2 + max(policy.load.prompts) // 4)
    text = "\n".join(policy.load.line.replace("{number}", str(number)) for number in lines)
    try:
        load = Load(policy, url, client.model(), client.tokenize(text))
    except ServerInvalid as error:
        return (invalid("requests", error.message, error.reason),)
    monitor = Monitor(pid, kernel)
    try:
        journal.unlink(missing_ok=True)
        intervals = _intervals(policy, load, monitor, journal)
        gone = _gone(policy, intervals)
        left = None if gone else collect.running(client, policy.drain)
        requests = (request for interval in intervals for request in interval.requests)
        keys = [request.key for request in requests if request.outcome == "repeating"]
        alone = [load.send(key).outcome for key in keys[: checks.MOST_REPEATED]]
        repeating = alone.count("repeating")
        end = SoakEnd(intervals[-1].at, gone, left, repeating, monitor.unwatched)
        append_line(journal, end)
    finally:
        load.stop()
        monitor.close()
    after = [
        not_run(f"{name}-after", "the server is gone", "server-gone") if gone
        else checks.judge_again(name, repeat())
        for name, repeat in (again or {}).items()
    ]  # fmt: skip
    missing = not_run("again", "nothing was given to be run again", "not-asked")
    return (*checks.judge(policy, intervals, end), *(after or [missing]))


def _intervals(
    policy: SoakPolicy, load: Load, monitor: Monitor, journal: Path
) -> list[SoakInterval]:
    """Keep the load up until the time is over or the server is gone, and return the intervals."""
    intervals: list[SoakInterval] = []
    began = time.monotonic()
    # In a short soak each concurrency has its turn, too.
    longest = min(policy.interval, policy.seconds / len(policy.load.concurrencies))
    turns = itertools.cycle(policy.load.concurrencies)
    with console.progress("soak", policy.seconds) as progress:
        while (at := time.monotonic() - began) < policy.seconds and not _gone(policy, intervals):
            concurrency, seconds = next(turns), min(longest, policy.seconds - at)
            for _ in load.run(str(len(intervals)), concurrency, seconds):
                at = time.monotonic() - began
                monitor.sample(at)
                progress.update(at, f"{concurrency} at once")
            intervals.append(monitor.interval(at, concurrency, load.take()))
            append_line(journal, intervals[-1])
    return intervals


def _gone(policy: SoakPolicy, intervals: list[SoakInterval]) -> bool:
    """Return whether requests failed and none was answered in each of the last intervals."""
    last = intervals[-policy.gone :]
    outcomes = [{request.outcome for request in interval.requests} for interval in last]
    silent = [{"failed"} <= each and each.isdisjoint(checks.ANSWERS) for each in outcomes]
    return len(silent) == policy.gone and all(silent)
