"""
G7: hours of mixed load, and the same words and distributions afterwards.

The load mixes concurrencies, lengths, shared prefixes, clients that go away and bad requests.
Meanwhile the memory of the server's processes, the processes themselves and the kernel's log are
watched. Each interval prints a line, so the last minutes before a machine dies can be read. An
interrupted soak has no verdict: the next one begins anew, as a new server is another one.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from sparkwright.bench.machine import watchdog
from sparkwright.bench.server.client import REASONS as SERVER_REASONS
from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.core.console import console
from sparkwright.core.states import State
from sparkwright.gates.core.server_facts import measure_pace
from sparkwright.gates.core.verdict import (
    ORDER,
    Check,
    Figure,
    Sample,
    decided,
    declare,
    failed,
    invalid,
    judged,
    not_run,
    passed,
    worst,
)
from sparkwright.gates.soak.load import Load, Monitor, SoakPolicy, SoakRequest, Watched

CHECKS = (
    *declare("duration", "requests", "words-under-load", measured=True),
    *declare("memory-growth", measured=True),
    *declare("restarts", "kernel-log", "drained", "words-after", "distributions-after"),
)

#: A slope of fewer points is a guess; of more, a part is taken.
FEWEST_POINTS, MOST_POINTS = 12, 200
#: Outcomes of requests that the server answered.
ANSWERS = ("answered", "repeating")
#: vLLM's gauges of the requests that it works on.
RUNNING = ("vllm:num_requests_running", "vllm:num_requests_waiting")

#: Reason → what it means and what to do.
REASONS: Mapping[str, str] = {
    **SERVER_REASONS,
    **watchdog.MEANINGS,
    "server-gone": (
        "The server stopped answering. Look at the end of its log, and at the kernel's."
    ),
    "requests-failed": (
        "Requests that were not aborted failed under load, or a bad request "
        "was not refused. The first ones are listed."
    ),
    "load-too-small": (
        "Fewer answers came at a concurrency than the policy needs for a load. "
        "Make the soak longer, or end other programs."
    ),
    "token-run": "Too many answers repeat one token: the KV cache or the logits are broken.",
    "memory-grows": (
        "The memory of the server's processes, on the host and the GPU together, grows by more "
        "than the policy allows. On unified memory this ends in a hang."
    ),
    "growth-undecided": "The memory's noise is larger than the growth that is looked for. Make the "
    "soak longer.",
    "soak-short": "The soak was shorter than `shortest` of ci/gates/soak.yaml, as its recipe asks.",
    "too-few-samples": (
        "There are too few readings of the memory to say whether it grows. Make the soak longer."
    ),
    "processes-unknown": "The server's process is not known, or runs on another machine; its "
    "memory cannot be watched.",
    "gpu-memory-unknown": "The driver does not list the GPU memory of the server's processes. Run "
    "the gate in the server's process namespace.",
    "server-restarted": "A process of the server ended during the soak. A supervisor that starts "
    "it again hides crashes; look at its log.",
    "requests-stuck": (
        "After the load, the server still runs requests whose clients are "
        "gone, and their memory is never freed."
    ),
    "gauges-absent": "The server does not state how many requests it runs.",
    "worse-after-soak": (
        "Checks that passed on a fresh server fail after the load. Look at those that are named."
    ),
    "not-asked": "Without a reference the distributions could not be compared after the load. "
    "Name it with --against.",
}


def run(
    policy: SoakPolicy,
    client: Client,
    *,
    words: Callable[[], tuple[Check, ...]] | None = None,
    distributions: Callable[[], tuple[Check, ...]] | None = None,
    processes: Callable[[], Sequence[psutil.Process]] = tuple,
    kernel: Path = watchdog.KMSG,
) -> tuple[Check, ...]:
    """
    Return the checks of the gate, after the time that *policy* sets.

    Args:
        words, distributions: Run G4 and G5 again after the load; None without a reference.
        processes: Returns the server's processes, whose memory and end are watched.
        kernel: The device of the kernel's log.
    """
    lines = range(1, 2 + max(policy.load.prompts) // 4)
    text = "\n".join(policy.load.line.replace("{number}", str(number)) for number in lines)
    try:
        load = Load(
            policy, client.url, client.model(), client.tokenize(text), measure_pace(client, 0.0)
        )
    except ServerInvalid as error:
        return (invalid("requests", error.message, error.reason),)
    monitor = Monitor(processes, kernel)
    watched = monitor.watched
    try:
        soak(policy, load, monitor)
    finally:
        monitor.close()
    after = {"words-after": words, "distributions-after": distributions}
    return (
        *judge(policy, load.requests, watched),
        drained(client, policy.drain),
        *(judge_again(name, repeat, gone=watched.gone) for name, repeat in after.items()),
    )


def soak(policy: SoakPolicy, load: Load, monitor: Monitor) -> None:
    """Keep the load up until the time is over or the server is gone."""
    began, watched = time.monotonic(), monitor.watched
    load.end = began + policy.seconds
    with console.progress("soak", policy.seconds) as progress:
        for number, concurrency in enumerate(itertools.cycle(policy.load.concurrencies)):
            counted = len(load.requests)
            seconds = min(load.turn_s, policy.seconds - watched.seconds)
            for _ in load.run(str(number), concurrency, seconds):
                watched.seconds = time.monotonic() - began
                monitor.sample(watched.seconds)
                progress.update(watched.seconds, f"{concurrency} at once")
            outcomes = Counter[str](request.outcome for request in load.requests[counted:])
            # Not how they ended: who stops it by that would choose among attempts.
            console.note(
                f"{watched.seconds:.0f} s, {concurrency} at once: {outcomes.total()} requests; "
                f"{psutil.virtual_memory().available / 1e9:.1f} GB left"
            )
            # A failure fails the gate; without a single answer, more of them show nothing.
            watched.gone = bool(outcomes["failed"]) and not any(outcomes[name] for name in ANSWERS)
            if watched.gone or watched.seconds >= policy.seconds:
                return


def judge(
    policy: SoakPolicy, requests: Sequence[SoakRequest], watched: Watched
) -> tuple[Check, ...]:
    """Return the checks of the load."""
    checks = (
        judged(
            "duration",
            f"{watched.seconds:.0f} of {policy.seconds:.0f} s of load",
            "server-gone",
            not watched.gone,
            [Figure("time under load", watched.seconds, "s", bound=policy.seconds)],
        ),
        _requests(policy, requests),
        _words(policy, requests),
        _growth(policy, watched),
        _events("restarts", watched.ended),
        _events("kernel-log", watched.faults),
    )
    # What was not watched all the time passes no check.
    unwatched = {
        name: not_run(name, message, reason)
        for name, (reason, message) in watched.unwatched.items()
    }
    return tuple(
        check if check.state == "fail" else unwatched.get(check.name, check) for check in checks
    )


def _requests(policy: SoakPolicy, requests: Sequence[SoakRequest]) -> Check:
    outcomes = Counter(request.outcome for request in requests)
    answers = Counter(each.concurrency for each in requests if each.outcome in ANSWERS)
    figures = [
        *(Figure(outcome, count) for outcome, count in outcomes.items()),
        *(Figure(f"answers at concurrency {key}", answers[key]) for key in sorted(answers)),
        Figure("tokens", sum(request.tokens for request in requests)),
        Figure("tokens of the longest", max((request.tokens for request in requests), default=0)),
    ]
    if wrong := [each.message for each in requests if each.outcome == "failed"]:
        samples = [Sample("request", "an answer", text) for text in wrong]
        message = f"{len(wrong)} of {len(requests)} requests went wrong"
        return failed("requests", message, "requests-failed", figures=figures, samples=samples)
    if few := [key for key in policy.load.concurrencies if answers[key] < policy.least]:
        message = f"fewer than {policy.least} answers came at concurrency {few}"
        return invalid("requests", message, "load-too-small", figures=figures)
    return passed("requests", f"none of {len(requests)} requests went wrong", figures=figures)


def _words(policy: SoakPolicy, requests: Sequence[SoakRequest]) -> Check:
    """Return whether few answers at each concurrency repeat a token."""
    name = "words-under-load"
    repeating = [each for each in requests if each.outcome == "repeating"]
    answers = Counter(each.concurrency for each in requests if each.outcome in ANSWERS)
    if not answers:
        return invalid(name, "there are no answers to look at", "load-too-small")
    counts = Counter(each.concurrency for each in repeating)
    figures = [
        Figure(
            f"answers that repeat a token, {key} at once", counts[key], count=answers[key],
            bound=policy.repeating * answers[key],
        )
        for key in sorted(answers)
    ]  # fmt: skip
    many = [key for key in sorted(answers) if counts[key] > policy.repeating * answers[key]]
    message = f"{len(repeating)} of {answers.total()} answers repeat one token"
    if many:
        samples = [
            Sample(f"answer, {each.concurrency} at once", "", each.message)
            for each in repeating
            if each.concurrency in many
        ]
        message += f", too many at concurrency {', '.join(map(str, many))}"
        return failed(name, message, "token-run", figures=figures, samples=samples)
    return passed(name, message, figures=figures)


def _growth(policy: SoakPolicy, watched: Watched) -> Check:
    """
    Return whether memory grows after the warm-up, by the interval of the Theil–Sen slope.

    A cache that fills and a large request move single points; the median of the slopes between all
    pairs is right as long as fewer than 29 % of them are outliers (Sen 1968).
    """
    from scipy.stats import theilslopes

    name, warm, most = "memory-growth", policy.warm * policy.seconds, policy.growth
    if policy.seconds < policy.shortest:
        message = (
            f"caches still fill in {policy.seconds:.0f} s; "
            f"it takes {policy.shortest:.0f} s to say whether memory grows"
        )
        return not_run(name, message, "soak-short", required=False)
    late = [(size / 1e6, at / 3600) for at, size in watched.memory if at >= warm]
    if len(late) < FEWEST_POINTS:
        message = f"{len(late)} readings after the warm-up are too few"
        return decided(name, message, "inconclusive", {"inconclusive": "too-few-samples"})
    # Of too many points the pairs take gigabytes, and neighbours depend on each other.
    sizes, hours = zip(*late[:: len(late) // MOST_POINTS + 1], strict=True)
    middle, _, low, high = map(float, theilslopes(sizes, hours, policy.confidence))
    figures = [
        Figure("growth", middle, "MB/h", len(sizes), bound=most),
        Figure("growth at least", low, "MB/h"),
        Figure("growth at most", high, "MB/h"),
        Figure("memory at the end", sizes[-1], "MB"),
    ]
    message = f"{middle:+.0f} MB/h ({low:+.0f} to {high:+.0f}), {most:g} are allowed"
    state: State = "fail" if low > most else "inconclusive" if high > most else "pass"
    reasons: dict[State, str] = {"fail": "memory-grows", "inconclusive": "growth-undecided"}
    return decided(name, message, state, reasons, figures)


def _events(name: str, events: Sequence[tuple[float, str, str]]) -> Check:
    """Return the check *name* of *events*: seconds, reason and text of each."""
    if not events:
        return passed(name, "none")
    samples = [Sample(f"after {at:.0f} s", "", text) for at, _, text in events]
    _, reason, text = events[0]
    return failed(name, text, reason, samples=samples)


def drained(client: Client, seconds: float) -> Check:
    """Return whether the server works on no request after at most *seconds*."""
    end = time.monotonic() + seconds
    while True:
        try:
            metrics = client.metrics()
            running = sum(metrics[name] for name in RUNNING)
        except (ServerInvalid, KeyError):
            return not_run("drained", "the server does not state its requests", "gauges-absent")
        if not running or time.monotonic() > end:
            message = f"{running:g} requests are worked on after the load"
            return judged("drained", message, "requests-stuck", not running)
        time.sleep(0.2)


def judge_again(
    name: str, repeat: Callable[[], tuple[Check, ...]] | None, *, gone: bool = False
) -> Check:
    """Return the check *name*: whether the gate that *repeat* runs after the load still passes."""
    if gone:
        return not_run(name, "the server is gone", "server-gone")
    if repeat is None:
        return not_run(name, "to run it, name the reference with --against", "not-asked")
    required = [check for check in repeat() if check.required]
    state = worst(check.state for check in required)
    bad = [check for check in required if check.state != "pass"]
    message = f"after the load, {len(bad)} of {len(required)} checks do not pass"
    samples = [Sample(check.name, "pass", f"{check.state}: {check.message}"[:300]) for check in bad]
    return decided(name, message, state, dict.fromkeys(ORDER[:-1], "worse-after-soak"), (), samples)
