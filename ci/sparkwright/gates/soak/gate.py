"""
G7: hours of mixed load, and the same words and distributions afterwards.

The load mixes concurrencies, lengths, shared prefixes, clients that go away and bad requests.
Requests follow from their names, so two soaks send the same ones. An aborted request closes its
connection within an answer, as users do, and the server has to free its blocks.

Meanwhile the memory of the server's processes, the processes themselves and the kernel's log are
watched. Each interval prints a line, so the last minutes before a machine dies can be read. An
interrupted soak has no verdict: the next one begins anew, as a new server is another one.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import psutil
from msgspec import Meta

from sparkwright.bench.machine import watchdog
from sparkwright.bench.records import Count, Positive
from sparkwright.bench.server.client import REASONS as SERVER_REASONS
from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.core.console import console
from sparkwright.core.states import State
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

CHECKS = (
    *declare("duration", "requests", "words-under-load", measured=True),
    *declare("memory-growth", "gpu-memory-growth", measured=True),
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
    "token-run": "Too many answers repeat one token, or more in a batch than alone: the KV cache "
    "or the logits are broken.",
    "memory-grows": "The memory of the server's processes grows by more than the policy allows. On "
    "unified memory this ends in a hang.",
    "growth-undecided": "The memory's noise is larger than the growth that is looked for. Make the "
    "soak longer.",
    "too-few-samples": (
        "There are too few readings of the memory to say whether it grows. Make the soak longer."
    ),
    "processes-unknown": "The server's process is not known, or runs on another machine; its "
    "memory cannot be watched.",
    "no-gpu": "This machine has no NVIDIA GPU, so there is no GPU memory to watch.",
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

#: The reason of a request whose deadline is over.
LATE = "server-slow"
#: A token that no vocabulary has; vLLM refuses it.
BAD_TOKEN = 2**31 - 1

Share = Annotated[float, Meta(ge=0, lt=1)]
Lengths = Annotated[tuple[Count, ...], Meta(min_length=1)]


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
    patience: Positive
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
        repeating: Share of the answers at a concurrency that may repeat.
        chance: That a sound server fails because its answers repeat by chance.
        least: Answers needed at each concurrency.
        drain: Seconds within which a request ends, and the server is idle after the load.
        gone: Intervals without an answer after which the server counts as gone.
    """

    seconds: Positive
    interval: Positive
    sample: Positive
    load: SoakLoad
    warm: Share
    growth: Positive
    confidence: Annotated[float, Meta(ge=0.5, lt=1)]
    run: Annotated[int, Meta(ge=2)]
    repeating: Share
    chance: Annotated[float, Meta(gt=0, lt=1)]
    least: Count
    drain: Positive
    gone: Count


class SoakRequest(msgspec.Struct, frozen=True):
    """
    A request that ended.

    Attributes:
        concurrency: Requests at once.
        outcome: ``answered``, ``repeating`` (an answer that repeats one token), ``aborted`` by the
            client, ``refused`` as it should be, or ``failed``.
        tokens: Tokens of the answer.
        message: What went wrong.
    """

    concurrency: int
    outcome: Literal["answered", "repeating", "aborted", "refused", "failed"]
    tokens: int = 0
    message: str = ""


class Load:
    """
    Threads that send requests to the server at *url*.

    Args:
        text: Tokens that prompts are cut from.

    Attributes:
        requests: Those that ended.
    """

    def __init__(self, policy: SoakPolicy, url: str, model: str, text: Sequence[int]) -> None:
        self._policy, self._url, self._model, self._text = policy, url, model, text
        self._limit = Client(url, model).max_model_len()
        self._stopped = threading.Event()
        self.requests: list[SoakRequest] = []

    def run(self, name: str, concurrency: int, seconds: float) -> Iterator[None]:
        """
        Send *concurrency* requests at once for *seconds*; yield at each sample of the policy.

        Every request that was begun ends; *name* decides what they are.
        """
        end = time.monotonic() + seconds
        workers = [
            threading.Thread(target=self._work, args=(concurrency, key, end), daemon=True)
            for key in (f"{name}/{worker}" for worker in range(concurrency))
        ]
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            time.sleep(self._policy.sample)
            yield

    def stop(self) -> None:
        """Let no worker send another request."""
        self._stopped.set()

    def _work(self, concurrency: int, name: str, end: float) -> None:
        for number in itertools.count():
            if self._stopped.is_set() or time.monotonic() >= end:
                return
            request = self.send(f"{name}/{number}", concurrency)
            self.requests.append(request)
            if request.outcome == "failed":
                # A server that fails at once must not be asked a thousand times a second.
                self._stopped.wait(1.0)

    def draw(self, key: str) -> tuple[tuple[int, ...], int, float | None]:
        """Return prompt, length of the answer and deadline (None: not aborted) of a request."""
        load, limit = self._policy.load, self._limit
        draw = random.Random(key)  # noqa: S311  not a secret
        tokens = draw.choice([length for length in load.answers if length < limit] or [1])
        room = limit - tokens
        length = draw.choice([length for length in load.prompts if length <= room] or [room])
        begin = draw.randrange(max(1, len(self._text) - length + 1))
        prompt = tuple(self._text[begin : begin + length])
        if draw.random() < load.shared:
            prompt = (*self._text[: min(load.prefix, length - 1)], *prompt)[:length]
        if draw.random() < load.bad:
            return (BAD_TOKEN, *prompt[1:]), tokens, None
        patience = draw.uniform(0.02, 1.0) * load.patience
        return prompt, tokens, patience if draw.random() < load.aborted else None

    def send(self, key: str, concurrency: int = 1) -> SoakRequest:
        """Send the request of *key*, one of *concurrency* at once, and return how it ended."""
        prompt, tokens, patience = self.draw(key)
        bad = prompt[0] == BAD_TOKEN
        client = Client(self._url, self._model, deadline=patience or self._policy.drain)
        outcome = partial(SoakRequest, concurrency)
        try:
            answer = client.complete(prompt, max_tokens=tokens, ignore_eos=True)
        except ServerInvalid as error:
            if patience is not None and error.reason == LATE:
                return outcome("aborted")
            # vLLM refuses some requests in the first event of a stream, whose status is 200.
            if bad and error.reason == "server-refused" and error.status < 500:
                return outcome("refused")
            return outcome("failed", 0, str(error))
        if bad:
            return outcome("failed", tokens, "a token of no vocabulary was accepted")
        run = max((len(list(run)) for _, run in itertools.groupby(answer.tokens)), default=0)
        if run >= self._policy.run:
            message = f"{run} times the same token in {tokens}, after a prompt of {len(prompt)}"
            return outcome("repeating", tokens, message)
        return outcome("answered", tokens)


class Watched(msgspec.Struct):
    """
    Observations of a server and its machine; times are seconds since the beginning.

    Attributes:
        memory: Check of the memory → readings: time and bytes.
        ended: Time, reason and text of each process of the server that ended.
        faults: Time, reason and text of each fault in the kernel's log.
        unwatched: Check → reason and message, if its subject cannot be watched.
        seconds: The time under load.
        gone: Whether the server gave no more answers.
        running: Requests that the server still worked on after the load; None if it does not say.
    """

    memory: dict[str, list[tuple[float, float]]] = {}
    ended: list[tuple[float, str, str]] = []
    faults: list[tuple[float, str, str]] = []
    unwatched: dict[str, tuple[str, str]] = {}
    seconds: float = 0.0
    gone: bool = False
    running: float | None = None


class Monitor:
    """
    The server's processes, their memory, and the kernel's log.

    Args:
        pid: The server's process; None if it is not known.
        kernel: The device of the kernel's log.

    Attributes:
        watched: What `sample` read so far.
    """

    def __init__(self, pid: int | None, kernel: Path) -> None:
        self.watched = Watched()
        self._root = psutil.Process(pid) if pid is not None and psutil.pid_exists(pid) else None
        self._processes = {process: str(process) for process in self._tree()}
        unwatched, self._log = self.watched.unwatched, None
        if not self._processes:
            text = "the server's process is not known here"
            unwatched["memory-growth"] = unwatched["restarts"] = ("processes-unknown", text)
        if gpu_memory(()) is None:
            unwatched["gpu-memory-growth"] = ("no-gpu", "this machine has no NVIDIA GPU")
        try:
            self._log = watchdog.KernelLog(kernel)
        except OSError as error:
            unwatched["kernel-log"] = ("kernel-log-hidden", f"{kernel}: {error.strerror}")

    def sample(self, at: float) -> None:
        """Read everything, *at* seconds since the beginning."""
        watched, processes = self.watched, self._tree()
        for process in set(self._processes).difference(processes):
            watched.ended.append((at, "server-restarted", f"{self._processes.pop(process)} ended"))
        # A process may end meanwhile.
        with contextlib.suppress(psutil.Error):
            resident = sum(process.memory_info().rss for process in processes)
            watched.memory.setdefault("memory-growth", []).append((at, float(resident)))
        if gpu := gpu_memory({process.pid for process in processes}):
            watched.memory.setdefault("gpu-memory-growth", []).append((at, gpu))
        else:
            text = "the driver does not list the memory of the server's processes"
            watched.unwatched.setdefault("gpu-memory-growth", ("gpu-memory-unknown", text))
        if self._log:
            lost = ""
            try:
                faults = list(self._log.findings())[:20]
                watched.faults += [(at, fault.reference, fault.message) for fault in faults]
                lost = "records were overwritten" if self._log.lost else ""
            except OSError as error:
                lost = str(error)
            if lost:
                text = f"faults may be missing: {lost}"
                watched.unwatched["kernel-log"] = ("kernel-log-lost", text)

    def close(self) -> None:
        """Close the kernel's log."""
        if self._log:
            self._log.close()

    def _tree(self) -> list[psutil.Process]:
        """Return the server's processes that are alive."""
        alive = []
        # psutil compares the time of creation, so a reused process id does not count.
        with contextlib.suppress(psutil.Error):
            if self._root and self._root.is_running():
                for process in (self._root, *self._root.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        if process.status() != psutil.STATUS_ZOMBIE:
                            alive.append(process)
        return alive


def gpu_memory(pids: Container[int]) -> float | None:
    """
    Return the bytes that *pids* hold on all GPUs by the driver's count.

    It is None without a GPU, and 0 if the driver does not count the memory of all of them.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        if not (count := pynvml.nvmlDeviceGetCount()):
            return None
    except pynvml.NVMLError:
        return None
    try:
        devices = map(pynvml.nvmlDeviceGetHandleByIndex, range(count))
        lists = [pynvml.nvmlDeviceGetComputeRunningProcesses(device) for device in devices]
    except pynvml.NVMLError:
        return 0.0
    used = [entry.usedGpuMemory for entries in lists for entry in entries if entry.pid in pids]
    # The driver reports None for memory that it does not count; a sum without it is wrong.
    return 0.0 if None in used else float(sum(used))


# The gate.


def run(
    policy: SoakPolicy,
    client: Client,
    *,
    words: Callable[[], tuple[Check, ...]] | None = None,
    distributions: Callable[[], tuple[Check, ...]] | None = None,
    pid: int | None = None,
    kernel: Path = watchdog.KMSG,
) -> tuple[Check, ...]:
    """
    Return the checks of the gate, after the time that *policy* sets.

    Args:
        words, distributions: Run G4 and G5 again after the load; None without a reference.
        pid: The server's process, whose memory and children are watched.
        kernel: The device of the kernel's log.
    """
    lines = range(1, 2 + max(policy.load.prompts) // 4)
    text = "\n".join(policy.load.line.replace("{number}", str(number)) for number in lines)
    try:
        load = Load(policy, client.url, client.model(), client.tokenize(text))
    except ServerInvalid as error:
        return (invalid("requests", error.message, error.reason),)
    monitor = Monitor(pid, kernel)
    watched = monitor.watched
    try:
        _soak(policy, load, monitor)
        if not watched.gone:
            watched.running = _running(client, policy.drain)
    finally:
        load.stop()
        monitor.close()
    after = {"words-after": words, "distributions-after": distributions}
    return (
        *judge(policy, load.requests, watched),
        *(judge_again(name, repeat, gone=watched.gone) for name, repeat in after.items()),
    )


def _soak(policy: SoakPolicy, load: Load, monitor: Monitor) -> None:
    """Keep the load up until the time is over or the server is gone."""
    outcomes: list[Counter[str]] = []
    began, watched = time.monotonic(), monitor.watched
    # In a short soak each concurrency has its turn, too.
    longest = min(policy.interval, policy.seconds / len(policy.load.concurrencies))
    concurrencies = itertools.cycle(policy.load.concurrencies)
    with console.progress("soak", policy.seconds) as progress:
        while watched.seconds < policy.seconds and not watched.gone:
            concurrency = next(concurrencies)
            seconds = min(longest, policy.seconds - watched.seconds)
            for _ in load.run(str(len(outcomes)), concurrency, seconds):
                watched.seconds = time.monotonic() - began
                monitor.sample(watched.seconds)
                progress.update(watched.seconds, f"{concurrency} at once")
            counted = sum(map(Counter.total, outcomes))
            outcomes.append(Counter(request.outcome for request in load.requests[counted:]))
            watched.gone = is_gone(policy, outcomes)
            left = psutil.virtual_memory().available / 1e9
            answers = ", ".join(f"{count} {name}" for name, count in outcomes[-1].items())
            console.note(
                f"{watched.seconds:.0f} s, {concurrency} at once: {answers}; {left:.1f} GB left"
            )


def is_gone(policy: SoakPolicy, outcomes: Sequence[Mapping[str, int]]) -> bool:
    """
    Return whether in each of the last `SoakPolicy.gone` intervals some request failed and none was
    answered.
    """
    last = outcomes[-policy.gone :]
    silent = [each.get("failed") and not any(map(each.get, ANSWERS)) for each in last]
    return len(silent) == policy.gone and all(silent)


def _running(client: Client, seconds: float) -> float | None:
    """Return the requests that the server works on after at most *seconds*; None if unknown."""
    end = time.monotonic() + seconds
    while True:
        try:
            metrics = client.metrics()
            left = sum(metrics[name] for name in RUNNING)
        except (ServerInvalid, KeyError):
            return None
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.2)


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
        _growth(policy, "memory-growth", watched),
        _growth(policy, "gpu-memory-growth", watched),
        _events("restarts", watched.ended),
        _events("kernel-log", watched.faults),
        _drained(watched.running),
    )
    return tuple(
        # A GPU that is not here is not missed.
        not_run(check.name, message, reason, required=reason != "no-gpu")
        if reason and check.state != "fail"
        else check
        for check in checks
        for reason, message in [watched.unwatched.get(check.name, ("", ""))]
    )


def _requests(policy: SoakPolicy, requests: Sequence[SoakRequest]) -> Check:
    outcomes = Counter(request.outcome for request in requests)
    answers = Counter(each.concurrency for each in requests if each.outcome in ANSWERS)
    figures = [
        *(Figure(outcome, count) for outcome, count in outcomes.items()),
        *(Figure(f"answers at concurrency {key}", answers[key]) for key in sorted(answers)),
        Figure("tokens", sum(request.tokens for request in requests)),
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
    """
    Return whether few answers repeat a token, and no more often in a batch than alone.

    Another batch gives other roundings, so a single answer may repeat in one and not in another;
    only the shares can be compared (Fisher's exact test, with Bonferroni's correction). A server
    that is broken alone, too, exceeds the share that is allowed.
    """
    from scipy.stats import fisher_exact

    answers, repeating = Counter[int](), Counter[int]()
    for request in requests:
        answers[request.concurrency] += request.outcome in ANSWERS
        repeating[request.concurrency] += request.outcome == "repeating"
    name, alone = "words-under-load", min(policy.load.concurrencies)
    figures = [
        Figure(
            f"answers that repeat a token, {key} at once", repeating[key], count=answers[key],
            bound=policy.repeating * answers[key],
        )
        for key in sorted(answers)
    ]  # fmt: skip
    rows = {key: (repeating[key], answers[key] - repeating[key]) for key in answers}
    several = [key for key in rows if key != alone]
    many = [key for key in rows if repeating[key] > policy.repeating * answers[key]]
    more = [
        key
        for key in several
        if answers[alone]
        and fisher_exact([rows[key], rows[alone]], "greater").pvalue < policy.chance / len(several)
    ]
    bad = sorted({*many, *more})
    total = f"{repeating.total()} of {answers.total()} answers repeat one token"
    samples = [
        Sample(f"answer, {each.concurrency} at once", "", each.message)
        for each in requests
        if each.outcome == "repeating" and each.concurrency in bad
    ]
    if bad:
        message = f"{total}, too many at concurrency {', '.join(map(str, bad))}"
        return failed(name, message, "token-run", figures=figures, samples=samples)
    if answers[alone] < policy.least:
        message = f"{answers[alone]} answers came at concurrency {alone}, too few to compare with"
        return invalid(name, message, "load-too-small", figures=figures)
    return passed(name, f"{total}, no more in a batch than alone", figures=figures)


def _growth(policy: SoakPolicy, name: str, watched: Watched) -> Check:
    """
    Return whether memory grows after the warm-up, by the interval of the Theil–Sen slope.

    A cache that fills and a large request move single points; the median of the slopes between all
    pairs is right as long as fewer than 29 % of them are outliers (Sen 1968).
    """
    from scipy.stats import theilslopes

    warm, most = policy.warm * policy.seconds, policy.growth
    late = [(size / 1e6, at / 3600) for at, size in watched.memory.get(name, ()) if at >= warm]
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


def _drained(running: float | None) -> Check:
    if running is None:
        return not_run("drained", "the server does not say what it works on", "gauges-absent")
    message = f"{running:g} requests are worked on after the load"
    return judged("drained", message, "requests-stuck", not running)


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
