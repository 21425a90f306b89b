"""What the soak gate makes of its record: pure functions of what was observed, so an interrupted journal is judged by the same rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from sparkwright.gates.core.verdict import (
    Check,
    Figure,
    Sample,
    failed,
    inconclusive,
    invalid,
    not_run,
    passed,
    worst,
)
from sparkwright.gates.soak import theil_sen
from sparkwright.gates.soak.collect import MOST_KEPT, Stretch
from sparkwright.gates.soak.journal import Observed, Record

if TYPE_CHECKING:
    from sparkwright.gates.soak.gate import SoakPolicy

#: Stable reference → what it means and what to do; what a server does wrong is in `sparkwright.bench.server.openai_schema.REASONS`.
MEANINGS: Mapping[str, str] = {
    "soak-interrupted": "The soak was stopped before its time was over. What it saw until then is no proof; run it again.",
    "server-gone": "The server gave no more answers. Look at the end of its log, and at the kernel's.",
    "requests-failed": "Requests that nobody cancelled went wrong under load. The first ones are listed with their reasons.",
    "load-too-small": "Fewer answers came at a concurrency than the policy needs for a load. Make the soak longer, or the machine freer.",
    "token-run": "Answers said one token again and again under load, and not alone: the KV cache or the logits of a batch are broken.",
    "memory-grows": "The memory of the server's processes grows by more than the policy allows. On unified memory this ends in a hang.",
    "growth-undecided": "The memory's noise is larger than the growth that is looked for. Make the soak longer.",
    "too-few-samples": "The memory was looked at too seldom to say whether it grows. Make the soak longer.",
    "processes-unknown": "The server's process is not known, or runs on another machine; its memory cannot be watched.",
    "server-restarted": "A process of the server ended during the soak. A supervisor that starts it again hides crashes; look at its log.",
    "requests-stuck": "After the load, the server still works on requests whose clients are gone: what they hold is never given back.",
    "gauges-absent": "The server does not say how many requests it works on.",
    "worse-after-soak": "What passed on a fresh server does not after the load. Look at the checks that are named.",
    "not-asked": "Nothing was given to be run again after the load.",
}


def checks(policy: SoakPolicy, record: Record) -> tuple[Check, ...]:
    """Return the checks of the load itself."""
    load = total(record.observed)
    loaded = (_requests(policy, record, load), _odd(record, load), _memory(policy, record))
    watched = (_restarts(record), _kernel(record), _drained(record))
    return (_duration(policy, record), *(_unproven(record, check) for check in (*loaded, *watched)))


def total(observed: Iterable[Observed]) -> Stretch:
    """Return all of the load as one stretch."""
    load = Stretch()
    for one in observed:
        load = load.with_(one.load)
    return load


def _unproven(record: Record, check: Check) -> Check:
    """Return *check*, less the pass where the soak did not take its time: what did not show in a part may show in the whole."""
    if check.state != "pass" or (record.ended and record.ended.why == "time"):
        return check
    reference = "server-gone" if record.ended else "soak-interrupted"
    return inconclusive(check.name, f"until the soak ended early: {check.message}", reference, figures=check.figures)


def _duration(policy: SoakPolicy, record: Record) -> Check:
    ran = record.ended.at if record.ended else max((one.at for one in record.observed), default=0.0)
    figures = [Figure("time under load", ran, "s", bound=policy.seconds)]
    if record.ended is None:
        says = f"the soak was stopped after {ran:.0f} of {policy.seconds:.0f} s"
        return inconclusive("duration", says, "soak-interrupted", figures=figures)
    if record.ended.why == "gone":
        return failed("duration", f"after {ran:.0f} of {policy.seconds:.0f} s the server was gone", "server-gone", figures=figures)
    return passed("duration", f"{ran:.0f} s of load", figures=figures)


def _requests(policy: SoakPolicy, record: Record, load: Stretch) -> Check:
    figures = [
        Figure("requests", load.asked), Figure("whole answers", load.whole), Figure("cancelled", load.cancelled),
        Figure("tokens", load.tokens), Figure("failed", load.failed, bound=0),
        *(Figure(f"whole answers at concurrency {name}", count, bound=policy.least) for name, count in load.by_concurrency.items()),
    ]  # fmt: skip
    if load.failed:
        samples = [Sample("request", "a whole answer", f"{fault.reference}: {fault.says}") for fault in load.faults]
        return failed("requests", f"{load.failed} of {load.asked} requests went wrong", "requests-failed", figures=figures, samples=samples)
    few = [one for one in policy.load.concurrencies if load.by_concurrency.get(str(one), 0) < policy.least]
    if few and record.ended:
        says = f"fewer than {policy.least} whole answers came at concurrency {', '.join(map(str, few))}"
        return invalid("requests", says, "load-too-small", figures=figures)
    return passed("requests", f"{load.whole} whole answers, {load.cancelled} cancelled, none went wrong", figures=figures)


def _odd(record: Record, load: Stretch) -> Check:
    """Does load make answers repeat one token? What the model says so alone, too, is its own way, which the words gate judges."""
    figures = [Figure("answers with a run of one token", load.odd, count=load.whole, bound=0)]
    if load.odd and record.ended and record.ended.alone and all(record.ended.alone):
        says = f"{load.odd} of {load.whole} answers repeat one token; the {len(record.ended.alone)} that were asked again alone do so, too"
        return passed("words-under-load", says, figures=figures)
    if load.odd:
        samples = [Sample("answer under load", "", fault.says) for fault in load.oddities[:MOST_KEPT]]
        says = f"{load.odd} of {load.whole} answers under load repeat one token"
        return failed("words-under-load", says, "token-run", figures=figures, samples=samples)
    if not load.whole:
        return not_run("words-under-load", "no answer arrived", "load-too-small")
    return passed("words-under-load", f"none of {load.whole} answers repeats one token", figures=figures)


def _memory(policy: SoakPolicy, record: Record) -> Check:
    """Does the memory grow? The interval of the slope decides, in MB an hour, after the first part that warms up."""
    if record.begun.processes:
        return not_run("memory-growth", record.begun.processes, "processes-unknown")
    series = [point for one in record.observed for point in one.memory if point[0] >= policy.warm * policy.seconds]
    slope = theil_sen.slope(series, policy.confidence)
    if slope is None:
        return inconclusive("memory-growth", f"{len(series)} samples after the warm-up are too few", "too-few-samples")
    low, middle, high = (one * 3600 / 1e6 for one in (slope.low, slope.middle, slope.high))
    figures = [
        Figure("growth", middle, "MB/h", len(series), bound=policy.growth),
        Figure("growth at least", low, "MB/h"), Figure("growth at most", high, "MB/h"),
        Figure("memory at the end", series[-1][1] / 1e6, "MB"),
        *(Figure("least memory left", one / 1e6, "MB") for one in _least(record)),
    ]  # fmt: skip
    says = f"{middle:+.0f} MB/h ({low:+.0f} to {high:+.0f}), {policy.growth:g} are allowed"
    if low > policy.growth:
        return failed("memory-growth", says, "memory-grows", figures=figures)
    if high > policy.growth:
        return inconclusive("memory-growth", says, "growth-undecided", figures=figures)
    return passed("memory-growth", says, figures=figures)


def _least(record: Record) -> list[float]:
    known = [one.available for one in record.observed if one.available is not None]
    return [min(known)] if known else []


def _restarts(record: Record) -> Check:
    seen = [(one.at, what) for one in record.observed for what in one.restarts]
    if seen:
        samples = [Sample(f"after {at:.0f} s", "", what) for at, what in seen]
        return failed("restarts", f"{seen[0][1]}, after {seen[0][0]:.0f} s", "server-restarted", samples=samples)
    whole = not record.begun.processes
    return passed("restarts", "no process of the server ended" if whole else "the server says that it did not begin anew")


def _kernel(record: Record) -> Check:
    found = [(one.at, finding) for one in record.observed for finding in one.kernel]
    if found:
        samples = [Sample(f"after {at:.0f} s", "", finding.text) for at, finding in found]
        return failed("kernel-log", f"the kernel reported: {found[0][1].text}", found[0][1].reference, samples=samples)
    if record.begun.kernel:
        return not_run("kernel-log", f"the kernel's log cannot be read: {record.begun.kernel}", "kernel-log-unreadable")
    if lost := next((one.lost for one in record.observed if one.lost), ""):
        return inconclusive("kernel-log", f"faults may be missing: {lost}", "kernel-log-lost")
    return passed("kernel-log", "no Xid, no error of the GPU's driver, no process killed for memory")


def _drained(record: Record) -> Check:
    left = record.ended.running if record.ended else None
    if left is None:
        reason = "the server does not say what it works on" if record.ended else "the soak was stopped"
        return not_run("drained", reason, "gauges-absent" if record.ended else "soak-interrupted")
    if left:
        figures = [Figure("requests", left, bound=0)]
        return failed("drained", f"{left:g} requests are worked on after the load", "requests-stuck", figures=figures)
    return passed("drained", "the server is idle after the load")


def again(record: Record, gates: Mapping[str, Callable[[], tuple[Check, ...]]]) -> tuple[Check, ...]:
    """Return a check for each gate that is run again after the load."""
    if not gates:
        return (not_run("again", "nothing was given to be run again", "not-asked"),)
    if record.ended is None or record.ended.why == "gone":
        return tuple(not_run(f"{name}-after", "the server is gone", "server-gone") for name in gates)
    return tuple(_after(name, run()) for name, run in gates.items())


def _after(name: str, found: tuple[Check, ...]) -> Check:
    required = [check for check in found if check.required]
    state = worst(check.state for check in required)
    name = f"{name}-after"
    if state == "pass":
        return passed(name, f"{len(required)} checks pass after the load")
    bad = [check for check in required if check.state != "pass"]
    first = next((check for check in bad if check.state == state), None)
    says = f"after the load: {', '.join(f'{check.name} {check.state}' for check in bad) or 'no check'}"
    samples = [Sample(check.name, "pass", f"{check.state}, {check.reason}: {check.message}"[:300]) for check in bad]
    if state == "fail":
        return failed(name, says, "worse-after-soak", samples=samples)
    if state == "invalid":
        return invalid(name, says, "worse-after-soak", samples=samples)
    if state == "inconclusive":
        return inconclusive(name, says, "worse-after-soak", samples=samples)
    return not_run(name, says, first.reason if first else "not-asked")
