"""The soak's policy, its record, and the checks that follow from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sparkwright.bench.machine.watchdog import Finding
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

#: A slope of fewer points is a guess; of more, a part is taken.
FEWEST_POINTS, MOST_POINTS = 12, 200
#: Repeating requests that are sent again after the load.
MOST_REPEATED = 5
#: Outcomes of requests that the server answered.
ANSWERS = ("answered", "repeating")

#: Reason → what it means and what to do.
MEANINGS: Mapping[str, str] = {
    "server-gone": "The server gave no more answers. Look at the end of its log, and at the "
    "kernel's.",
    "requests-failed": "Requests that nobody aborted went wrong under load, or a bad request was "
    "not refused. The first ones are listed.",
    "load-too-small": "Fewer answers came at a concurrency than the policy needs for a load. Make "
    "the soak longer, or the machine freer.",
    "token-run": "Answers repeat one token under load, and not alone: the KV cache or the logits "
    "of a batch are broken.",
    "memory-grows": "The memory of the server's processes grows by more than the policy allows. On "
    "unified memory this ends in a hang.",
    "growth-undecided": "The memory's noise is larger than the growth that is looked for. Make the "
    "soak longer.",
    "too-few-samples": "The memory was looked at too seldom to say whether it grows. Make the soak "
    "longer.",
    "processes-unknown": "The server's process is not known, or runs on another machine; its "
    "memory cannot be watched.",
    "no-gpu": "This machine has no NVIDIA GPU, so there is no GPU memory to watch.",
    "gpu-memory-unknown": "The driver does not list the GPU memory of the server's processes. Run "
    "the gate in the server's process namespace.",
    "server-restarted": "A process of the server ended during the soak. A supervisor that starts "
    "it again hides crashes; look at its log.",
    "requests-stuck": "After the load, the server still works on requests whose clients are gone: "
    "what they hold is never given back.",
    "gauges-absent": "The server does not say how many requests it works on.",
    "worse-after-soak": "What passed on a fresh server does not after the load. Look at the checks "
    "that are named.",
    "not-asked": "Nothing was given to be run again after the load.",
}

AtLeastOne = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, lt=1)]
Lengths = Annotated[tuple[AtLeastOne, ...], Meta(min_length=1)]


class SoakLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The mix of requests.

    Attributes:
        concurrencies: Requests at once, in turn.
        prompts: Tokens of the prompts; lengths that do not fit into the model are left out.
        answers: Tokens of the answers.
        shared: Share of requests that begin with the same *prefix* tokens.
        aborted: Share of requests whose client closes the connection within *patience* seconds.
        bad: Share of requests that the server has to refuse.
        line: The text that prompts are cut from, once for each ``{number}``.
    """

    concurrencies: Lengths
    prompts: Lengths
    answers: Lengths
    shared: Share
    prefix: Annotated[int, Meta(ge=0)]
    aborted: Share
    patience: Seconds
    bad: Share
    line: Annotated[str, Meta(pattern=r"\{number\}")]


class SoakPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/soak.yaml``, which states the source of each number.

    Attributes:
        seconds: Duration of the load.
        interval: Seconds of one concurrency, and of a line of the journal.
        sample: Seconds between two readings of the memory.
        load: The mix of requests.
        warm: The first share of the time, whose memory does not count, as caches fill.
        growth: MB (10^6 bytes) an hour by which the server's memory may grow.
        confidence: Of the interval of the growth.
        run: An answer with as many equal tokens in a row counts as repeating.
        least: Answers needed at each concurrency.
        drain: Seconds within which a request ends, and the server is idle after the load.
        gone: Intervals without an answer after which the server counts as gone.
    """

    seconds: Seconds
    interval: Seconds
    sample: Seconds
    load: SoakLoad
    warm: Share
    growth: Annotated[float, Meta(gt=0)]
    confidence: Annotated[float, Meta(ge=0.5, lt=1)]
    run: Annotated[int, Meta(ge=2)]
    least: AtLeastOne
    drain: Seconds
    gone: AtLeastOne


class SoakRequest(msgspec.Struct, frozen=True):
    """
    A request that ended.

    Attributes:
        key: Decides what is asked, so that the request can be repeated.
        outcome: ``answered``, ``repeating`` (an answer that repeats one token), ``aborted`` by the
            client, ``refused`` as it should be, or ``failed``.
        tokens: Tokens of the answer.
        message: What went wrong.
    """

    key: str
    outcome: Literal["answered", "repeating", "aborted", "refused", "failed"]
    tokens: int = 0
    message: str = ""


class SoakInterval(msgspec.Struct, frozen=True, tag="interval"):
    """
    An interval of the load.

    Attributes:
        at: Its end in seconds since the beginning.
        concurrency: Requests at once.
        requests: Those that ended in it.
        memory: Kind (``memory``, ``gpu-memory``) → readings: seconds since the beginning, bytes.
        available: Bytes that the machine had left, at least.
        ended: Processes of the server that ended.
        kernel: Faults in the kernel's log.
    """

    at: float
    concurrency: int
    requests: tuple[SoakRequest, ...] = ()
    memory: dict[str, tuple[tuple[float, float], ...]] = {}
    available: float = 0.0
    ended: tuple[str, ...] = ()
    kernel: tuple[Finding, ...] = ()


class SoakEnd(msgspec.Struct, frozen=True, tag="end"):
    """
    The end of the load.

    Attributes:
        at: Seconds since the beginning.
        gone: Whether the server gave no more answers.
        running: Requests that the server still worked on; None if it does not say.
        alone: How many of the repeating requests, at most `MOST_REPEATED`, repeat without load.
        unwatched: Check → reason and message, if its subject could not be watched.
    """

    at: float
    gone: bool = False
    running: float | None = None
    alone: int = 0
    unwatched: dict[str, tuple[str, str]] = {}


def judge(policy: SoakPolicy, intervals: Sequence[SoakInterval], end: SoakEnd) -> tuple[Check, ...]:
    """Return the checks of the load."""
    ended = [(interval.at, text) for interval in intervals for text in interval.ended]
    faults = [(interval.at, fault) for interval in intervals for fault in interval.kernel]
    checks = (
        _duration(policy, end),
        _requests(policy, intervals),
        _words(intervals, end),
        _growth(policy, "memory", intervals),
        _growth(policy, "gpu-memory", intervals),
        _events("restarts", [(at, "server-restarted", text) for at, text in ended]),
        _events("kernel-log", [(at, fault.reference, fault.text) for at, fault in faults]),
        _drained(end),
    )
    return tuple(
        _unwatched(check.name, *end.unwatched[check.name])
        if check.name in end.unwatched and check.state != "fail"
        else check
        for check in checks
    )


def _unwatched(name: str, reason: str, message: str) -> Check:
    """Return that a subject was not watched; memory of a GPU that is not here is not missed."""
    return not_run(name, message, reason, required=reason != "no-gpu")


def _duration(policy: SoakPolicy, end: SoakEnd) -> Check:
    figures = [Figure("time under load", end.at, "s", bound=policy.seconds)]
    message = f"{end.at:.0f} of {policy.seconds:.0f} s of load"
    if end.gone:
        return failed("duration", message, "server-gone", figures=figures)
    return passed("duration", message, figures=figures)


def _requests(policy: SoakPolicy, intervals: Sequence[SoakInterval]) -> Check:
    pairs = [(each.concurrency, request) for each in intervals for request in each.requests]
    outcomes = Counter(request.outcome for _, request in pairs)
    answers = Counter(key for key, request in pairs if request.outcome in ANSWERS)
    figures = [
        *(Figure(outcome, count) for outcome, count in outcomes.items()),
        *(Figure(f"answers at concurrency {key}", answers[key]) for key in sorted(answers)),
        Figure("tokens", sum(request.tokens for _, request in pairs)),
    ]
    if wrong := [request.message for _, request in pairs if request.outcome == "failed"]:
        samples = [Sample("request", "an answer", text) for text in wrong]
        message = f"{len(wrong)} of {len(pairs)} requests went wrong"
        return failed("requests", message, "requests-failed", figures=figures, samples=samples)
    if few := [key for key in policy.load.concurrencies if answers[key] < policy.least]:
        message = f"fewer than {policy.least} answers came at concurrency {few}"
        return invalid("requests", message, "load-too-small", figures=figures)
    return passed("requests", f"none of {len(pairs)} requests went wrong", figures=figures)


def _words(intervals: Sequence[SoakInterval], end: SoakEnd) -> Check:
    """Return whether load makes answers repeat a token; G4 judges what repeats alone, too."""
    requests = [request for interval in intervals for request in interval.requests]
    answers = [request for request in requests if request.outcome in ANSWERS]
    repeating = [request for request in answers if request.outcome == "repeating"]
    figures = [Figure("answers that repeat a token", len(repeating), count=len(answers), bound=0)]
    message = f"{len(repeating)} of {len(answers)} answers repeat one token, {end.alone} also alone"
    if end.alone < min(len(repeating), MOST_REPEATED):
        samples = [Sample("answer under load", "", request.message) for request in repeating]
        return failed("words-under-load", message, "token-run", figures=figures, samples=samples)
    return passed("words-under-load", message, figures=figures)


def _growth(policy: SoakPolicy, kind: str, intervals: Sequence[SoakInterval]) -> Check:
    """
    Return whether memory grows after the warm-up, by the interval of the Theil–Sen slope.

    A cache that fills and a large request move single points; the median of the slopes between all
    pairs is right as long as fewer than 29 % of them are outliers (Sen 1968).
    """
    from scipy.stats import theilslopes

    name, warm = f"{kind}-growth", policy.warm * policy.seconds
    readings = [point for each in intervals for point in each.memory.get(kind, ())]
    late = [(size / 1e6, at / 3600) for at, size in readings if at >= warm]
    if len(late) < FEWEST_POINTS:
        message = f"{len(late)} readings after the warm-up are too few"
        return inconclusive(name, message, "too-few-samples")
    least = min(each.available for each in intervals)
    # Of too many points the pairs take gigabytes, and neighbours depend on each other.
    sizes, hours = zip(*late[:: len(late) // MOST_POINTS + 1], strict=True)
    middle, _, low, high = map(float, theilslopes(sizes, hours, policy.confidence))
    figures = [
        Figure("growth", middle, "MB/h", len(sizes), bound=policy.growth),
        Figure("growth at least", low, "MB/h"),
        Figure("growth at most", high, "MB/h"),
        Figure("memory at the end", sizes[-1], "MB"),
        Figure("least memory left", least / 1e6, "MB"),
    ]
    message = f"{middle:+.0f} MB/h ({low:+.0f} to {high:+.0f}), {policy.growth:g} are allowed"
    if low > policy.growth:
        return failed(name, message, "memory-grows", figures=figures)
    if high > policy.growth:
        return inconclusive(name, message, "growth-undecided", figures=figures)
    return passed(name, message, figures=figures)


def _events(name: str, events: Sequence[tuple[float, str, str]]) -> Check:
    """Return the check *name* of *events*: seconds, reason and text of each."""
    if not events:
        return passed(name, "none")
    samples = [Sample(f"after {at:.0f} s", "", text) for at, _, text in events]
    _, reason, text = events[0]
    return failed(name, text, reason, samples=samples)


def _drained(end: SoakEnd) -> Check:
    if end.running is None:
        return not_run("drained", "the server does not say what it works on", "gauges-absent")
    message = f"{end.running:g} requests are worked on after the load"
    if end.running:
        return failed("drained", message, "requests-stuck")
    return passed("drained", message)


def judge_again(name: str, checks: Sequence[Check]) -> Check:
    """Return whether a gate that ran again after the load still passes."""
    required = [check for check in checks if check.required]
    state = worst(check.state for check in required)
    bad = [check for check in required if check.state != "pass"]
    message = f"after the load, {len(bad)} of {len(required)} checks do not pass"
    if state == "pass":
        return passed(f"{name}-after", message)
    samples = [Sample(check.name, "pass", f"{check.state}: {check.message}"[:300]) for check in bad]
    return Check(f"{name}-after", state, message, "worse-after-soak", samples=tuple(samples[:20]))
