"""
G7: hours of mixed load, and the same words and distributions afterwards.

The load mixes concurrencies, lengths, shared prefixes, clients that go away and bad requests.
Meanwhile the memory of the server's processes, the processes themselves and the kernel's log are
watched. Each interval prints a line, so the last minutes before a machine dies can be read. An
interrupted soak has no verdict: the next one begins anew, as a new server is another one.
"""

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

from sparkwright.bench.machine import watchdog
from sparkwright.bench.records import Count, Positive
from sparkwright.bench.server.client import REASONS as SERVER_REASONS, Client, ServerInvalid
from sparkwright.core import memory
from sparkwright.core.console import console
from sparkwright.core.files import canonical, sha256_bytes
from sparkwright.core.states import State
from sparkwright.gates.core.server_under_test import (
    REFERENCE,
    Pace,
    Recorded,
    ServerIdentity,
    find_stock,
    measure_pace,
)
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

#: The file of the reference folder.
LOAD = "load.json"
#: The reason of an Xid that is no fault of the server.
OTHER_PROCESS = "kernel-xid-other"
#: A token that no vocabulary has; vLLM refuses it.
BAD_TOKEN = 2**31 - 1

Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Lengths = Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]


class SoakLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The mix of requests.

    Attributes:
        concurrencies: Requests at once, in turn.
        prompts, answers: Tokens of the prompts and of the answers; lengths that do not fit into the
            model are left out, and those that take so long that too few answers would come.
        shared: Share of requests that begin with the same *prefix* tokens.
        aborted: Share of requests whose client closes the connection within *patience* seconds.
        bad: Share of requests that the server has to refuse.
        line: The text that prompts are cut from, once for each ``{number}``.
    """

    concurrencies: Lengths
    prompts: Lengths
    answers: Lengths
    shared: Share
    prefix: Annotated[int, msgspec.Meta(ge=0)]
    aborted: Share
    patience: Positive
    bad: Share
    line: Annotated[str, msgspec.Meta(pattern=r"\{number\}")]


class SoakPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/soak.yaml``, which states the source of each number.

    Attributes:
        seconds: Duration of the load; *shortest*: where the time of all gates is short.
        interval: Seconds of one concurrency, and of a line of the journal.
        sample: Seconds between two readings of the memory.
        load: The mix of requests.
        warm: The first share of the time, whose memory does not count, as caches fill.
        growth: MB (10^6 bytes) an hour by which the server's memory may grow.
        confidence: Of the interval of the growth.
        run: An answer with as many equal tokens in a row counts as repeating.
        repeating: Share of the answers at a concurrency that may repeat.
        chance: With which the check fails in all, where more than *repeating* do, although answers
            of the stock wheel repeat as often.
        stock: Seconds of each concurrency on the stock wheel; a quarter of ours at most.
        least: Answers needed at each concurrency, and of the stock wheel.
        drain: Seconds within which a request ends, and the server is idle after the load.
    """

    seconds: Positive
    shortest: Positive
    interval: Positive
    sample: Positive
    load: SoakLoad
    warm: Share
    growth: Positive
    confidence: Annotated[float, msgspec.Meta(ge=0.5, lt=1)]
    run: Annotated[int, msgspec.Meta(ge=2)]
    repeating: Share
    chance: Share
    stock: Positive
    least: Count
    drain: Positive


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


class StockLoad(Recorded, frozen=True, forbid_unknown_fields=True):
    """
    What the stock wheel answered to a shorter load.

    Attributes:
        answers: How many came; *repeating*: how many of them repeat one token.
    """

    answers: int
    repeating: int


class Load:
    """
    Threads that send requests to the server at *url*.

    Args:
        text: Tokens that prompts are cut from.
        pace: Of the server.

    Attributes:
        requests: Those that ended.
        turn_s: Seconds of one concurrency; in a short soak each has its turn, too.
        end: The time at which clients close every connection, by `time.monotonic`.
    """

    def __init__(
        self, policy: SoakPolicy, url: str, model: str, text: Sequence[int], pace: Pace
    ) -> None:
        self._policy, self._url, self._model, self._text = policy, url, model, text
        self._limit, self._pace = Client(url, model).max_model_len(), pace
        self.requests: list[SoakRequest] = []
        self.turn_s = min(policy.interval, policy.seconds / len(policy.load.concurrencies))
        self.end = float("inf")

    def run(self, name: str, concurrency: int, seconds: float) -> Iterator[None]:
        """
        Send *concurrency* requests at once for *seconds*; yield at each sample of the policy.

        Every request that was begun ends, at `end` at the latest; *name* decides what they are.
        """
        end, workers = time.monotonic() + seconds, list[threading.Thread]()
        for number in range(concurrency):
            work = (concurrency, f"{name}/{number}", end)
            workers.append(threading.Thread(target=self._work, args=work, daemon=True))
            workers[-1].start()
        while any(map(threading.Thread.is_alive, workers)):
            time.sleep(self._policy.sample)
            yield

    def _work(self, concurrency: int, name: str, end: float) -> None:
        for number in itertools.count():
            if time.monotonic() >= end:
                return
            request = self.send(f"{name}/{number}", concurrency)
            self.requests.append(request)
            if request.outcome == "failed":
                # A server that fails at once must not be asked a thousand times a second.
                time.sleep(1.0)

    def draw(self, key: str, concurrency: int) -> tuple[tuple[int, ...], int, float | None]:
        """
        Return prompt, length of the answer and deadline (None: not aborted) of a request, one of
        *concurrency* at once.
        """
        load, limit, policy = self._policy.load, self._limit, self._policy
        draw = random.Random(key)  # noqa: S311  not a secret
        # The answers that are needed at each concurrency share its part of the time.
        share = concurrency * policy.seconds / len(load.concurrencies) / policy.least
        longest, round_s = min(self.turn_s, share), self._pace.round
        tokens = draw.choice(
            [n for n in load.answers if n < limit and round_s(0, n, concurrency) <= longest] or [1]
        )
        room = limit - tokens
        length = draw.choice(
            [n for n in load.prompts if n <= room and round_s(n, tokens, concurrency) <= longest]
            or [min(room, *load.prompts)]
        )
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
        prompt, tokens, patience = self.draw(key, concurrency)
        bad = prompt[0] == BAD_TOKEN
        deadline = patience or self._policy.drain
        if (left := max(0.01, self.end - time.monotonic())) < deadline:
            deadline = left
            # What ends with the soak is an abort, too, unless there was time for three rounds of
            # the longest requests.
            longest = max(self._policy.load.prompts), max(self._policy.load.answers)
            patience = left if left < 3 * self._pace.round(*longest, concurrency) else patience
        client = Client(self._url, self._model, deadline=deadline)
        outcome = partial(SoakRequest, concurrency)
        try:
            answer = client.complete(prompt, max_tokens=tokens, ignore_eos=True)
        except ServerInvalid as error:
            if error.reason == "server-slow" and patience:
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
        memory: Of the server's processes, on the host and the GPUs together: time and bytes.
        ended: Time, reason and text of each process of the server that ended.
        faults: Time, reason and text of each fault in the kernel's log.
        unwatched: Check → reason and message, if its subject cannot be watched.
        seconds: The time under load.
        gone: Whether requests failed in the last interval, and none was answered.
    """

    memory: list[tuple[float, float]] = []
    ended: list[tuple[float, str, str]] = []
    faults: list[tuple[float, str, str]] = []
    unwatched: dict[str, tuple[str, str]] = {}
    seconds: float = 0.0
    gone: bool = False


class Monitor:
    """
    The server's processes, their memory, and the kernel's log.

    Args:
        processes: Returns the server's processes; none if they are not known here.
        kernel: The device of the kernel's log.

    Attributes:
        watched: What `sample` read so far.
    """

    def __init__(self, processes: Callable[[], Sequence[psutil.Process]], kernel: Path) -> None:
        self.watched, self._list, self._log = Watched(), processes, None
        self._processes, self._own = dict[psutil.Process, str](), set[int]()
        for process in self._alive():
            self._processes[process] = str(process)
            self._own.add(process.pid)
        if not self._processes:
            text = "the server's processes are not known here"
            for name in ("memory-growth", "restarts"):
                self.watched.unwatched[name] = ("processes-unknown", text)
        try:
            self._log = watchdog.KernelLog(kernel)
        except OSError as error:
            text = f"{kernel}: {error.strerror}"
            self.watched.unwatched["kernel-log"] = ("kernel-log-hidden", text)

    def sample(self, at: float) -> None:
        """Read everything, *at* seconds since the beginning."""
        watched, alive = self.watched, self._alive()
        pids = {process.pid for process in alive}
        self._own |= pids
        for process in set(self._processes).difference(alive):
            watched.ended.append((at, "server-restarted", f"{self._processes.pop(process)} ended"))
        on_gpu = gpu_memory(pids)
        if on_gpu is None:
            text = "the driver does not list the memory of the server's processes"
            watched.unwatched.setdefault("memory-growth", ("gpu-memory-unknown", text))
        else:
            # A process may end meanwhile.
            with contextlib.suppress(psutil.Error):
                resident = sum(process.memory_info().rss for process in alive)
                watched.memory.append((at, resident + on_gpu))
        if self._log:
            lost = True
            with contextlib.suppress(OSError):
                for fault in list(self._log.findings())[:20]:
                    other = watchdog.is_of_another(fault, self._own)
                    reason = OTHER_PROCESS if other else fault.reference
                    watched.faults.append((at, reason, fault.message))
                lost = self._log.lost > 0
            if lost:
                text = "faults may be missing: records were overwritten or cannot be read"
                watched.unwatched["kernel-log"] = ("kernel-log-lost", text)

    def close(self) -> None:
        """Close the kernel's log."""
        if self._log:
            self._log.close()

    def _alive(self) -> list[psutil.Process]:
        """Return the server's processes that are alive."""
        alive = []
        for process in self._list():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        return alive


def gpu_memory(pids: Container[int]) -> float | None:
    """
    Return the bytes that *pids* hold on all GPUs by the driver's count.

    It is 0 without a GPU, and None if the driver does not count the memory of all of them.
    """
    gpus, failure = memory.query("gpu=index")
    if not gpus and not failure:
        return 0.0
    rows, failure = memory.query("compute-apps=pid,used_memory")
    sizes = [size for pid, size in rows if pid.isdecimal() and int(pid) in pids]
    # The driver states no number for memory that it does not count; a sum without it is wrong.
    if failure or not sizes or not all(map(str.isdecimal, sizes)):
        return None
    return float(sum(map(int, sizes)) << 20)


CHECKS = (
    *declare("duration", "requests", "words-under-load", "memory-growth", measured=True),
    *declare("restarts", "kernel-log", "drained", "words-after", "distributions-after"),
)

#: A slope of fewer points is a guess; of more, a part is taken.
FEWEST_POINTS, MOST_POINTS = 12, 200
#: Outcomes of requests that the server answered.
ANSWERS = ("answered", "repeating")
#: vLLM's gauges of the requests that it works on.
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"

#: Reason → what it means and what to do.
REASONS: Mapping[str, str] = {
    **SERVER_REASONS,
    **REFERENCE,
    **watchdog.MEANINGS,
    OTHER_PROCESS: "Another process on this machine had an error of the GPU meanwhile, so the soak "
    "shows nothing. Stop it, and run the gate again.",
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
    "token-run": "Too many answers repeat one token, and more than of the stock wheel if that was "
    "asked: the KV cache or the logits are broken.",
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


def _load(policy: SoakPolicy, client: Client) -> Load:
    """Return the load of *policy* on the server of *client*."""
    lines = range(1, 2 + max(policy.load.prompts) // 4)
    text = "\n".join(policy.load.line.replace("{number}", str(number)) for number in lines)
    return Load(
        policy, client.url, client.model(), client.tokenize(text), measure_pace(client, 0.0)
    )


def shape(policy: SoakPolicy) -> str:
    """Return a digest of what decides whether an answer to the load repeats."""
    return sha256_bytes(canonical([policy.load, policy.run]))


def stock_seconds(policy: SoakPolicy) -> float:
    """Return the seconds that the stock wheel is under load."""
    count = len(policy.load.concurrencies)
    return count * min(policy.stock, policy.seconds / count / 4)


def reference(
    path: Path | None, policy: SoakPolicy, served: ServerIdentity
) -> StockLoad | Check | None:
    """Return what the file at *path* has of the stock wheel, or why it is of no use, or None."""
    name, questions = "words-under-load", shape(policy)
    return find_stock(path, StockLoad, served, name, questions) if path else None


def record(policy: SoakPolicy, client: Client, served: ServerIdentity) -> StockLoad:
    """
    Return how many answers of *client*, whose identity is *served*, repeat one token under load.

    Raises:
        ServerInvalid: The server does not answer as it should.
    """
    load, concurrencies = _load(policy, client), policy.load.concurrencies
    for concurrency in concurrencies:
        seconds = stock_seconds(policy) / len(concurrencies)
        for _ in load.run(f"stock {concurrency}", concurrency, seconds):
            pass
    # A server that is gone repeats nothing.
    client.metrics()
    answers, repeating = _count(load.requests, *ANSWERS), _count(load.requests, "repeating")
    return StockLoad(served, shape(policy), answers.total(), repeating.total())


def _count(requests: Sequence[SoakRequest], *outcomes: str) -> Counter[int]:
    """Return how many of *requests* had one of *outcomes*, by concurrency."""
    return Counter(each.concurrency for each in requests if each.outcome in outcomes)


def run(
    policy: SoakPolicy,
    client: Client,
    *,
    stock: StockLoad | Check | None = None,
    words: Callable[[], tuple[Check, ...]] | None = None,
    distributions: Callable[[], tuple[Check, ...]] | None = None,
    processes: Callable[[], Sequence[psutil.Process]] = tuple,
    kernel: Path = watchdog.KMSG,
) -> tuple[Check, ...]:
    """
    Return the checks of the gate, after the time that *policy* sets.

    Args:
        stock: What the stock wheel answered, or why that cannot be said; None without a reference.
        words, distributions: Run G4 and G5 again after the load; None without a reference.
        processes: Returns the server's processes, whose memory and end are watched.
        kernel: The device of the kernel's log.
    """
    try:
        load = _load(policy, client)
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
        *judge(policy, load.requests, watched, stock),
        drained(client, policy.drain),
        *(judge_again(name, repeat, gone=watched.gone) for name, repeat in after.items()),
    )


def soak(policy: SoakPolicy, load: Load, monitor: Monitor) -> None:
    """Keep the load up until the time is over or the server is gone."""
    began, watched = time.monotonic(), monitor.watched
    load.end = began + policy.seconds
    with console.progress("soak", policy.seconds) as progress:
        concurrencies = policy.load.concurrencies
        for number, concurrency in enumerate(itertools.cycle(concurrencies)):
            counted = len(load.requests)
            # Requests end behind their turn; in a short soak, the last ones have theirs, too.
            turns = len(concurrencies) - number % len(concurrencies)
            seconds = min(load.turn_s, (policy.seconds - watched.seconds) / turns)
            for _ in load.run(str(number), concurrency, seconds):
                watched.seconds = time.monotonic() - began
                monitor.sample(watched.seconds)
                progress.update(watched.seconds, f"{concurrency} at once")
            ended = load.requests[counted:]
            # Not how they ended: who stops it by that would choose among attempts.
            console.note(
                f"{watched.seconds:.0f} s, {concurrency} at once: {len(ended)} requests; "
                f"{psutil.virtual_memory().available / 1e9:.1f} GB left"
            )
            # A failure fails the gate; without a single answer, more of them show nothing.
            watched.gone = bool(_count(ended, "failed")) and not _count(ended, *ANSWERS)
            if watched.gone or watched.seconds >= policy.seconds:
                return


def judge(
    policy: SoakPolicy,
    requests: Sequence[SoakRequest],
    watched: Watched,
    stock: StockLoad | Check | None = None,
) -> tuple[Check, ...]:
    """Return the checks of the load; *stock* as of `run`."""
    checks = (
        judged(
            "duration",
            f"{watched.seconds:.0f} of {policy.seconds:.0f} s of load",
            "server-gone",
            not watched.gone,
            [Figure("time under load", watched.seconds, "s", bound=policy.seconds)],
        ),
        _requests(policy, requests),
        _words(policy, requests, stock),
        _growth(policy, watched),
        _events("restarts", watched.ended),
        _events("kernel-log", watched.faults),
    )
    results = dict[str, Check]()
    for check in checks:
        results[check.name] = check
        # What was not watched all the time passes no check.
        if check.state != "fail" and check.name in watched.unwatched:
            reason, message = watched.unwatched[check.name]
            results[check.name] = not_run(check.name, message, reason)
    return tuple(results.values())


def _requests(policy: SoakPolicy, requests: Sequence[SoakRequest]) -> Check:
    answers, outcomes = _count(requests, *ANSWERS), Counter[str]()
    samples, longest, tokens = list[Sample](), 0, 0
    for request in requests:
        outcomes[request.outcome] += 1
        tokens, longest = tokens + request.tokens, max(longest, request.tokens)
        if request.outcome == "failed":
            samples.append(Sample("request", "an answer", request.message))
    figures = [
        *itertools.starmap(Figure, outcomes.items()),
        Figure("tokens", tokens),
        Figure("tokens of the longest", longest),
    ]
    for concurrency in sorted(answers):
        figures.append(Figure(f"answers at concurrency {concurrency}", answers[concurrency]))
    if samples:
        message = f"{len(samples)} of {len(requests)} requests went wrong"
        return failed("requests", message, "requests-failed", figures=figures, samples=samples)
    if few := [key for key in policy.load.concurrencies if answers[key] < policy.least]:
        message = f"fewer than {policy.least} answers came at concurrency {few}"
        return invalid("requests", message, "load-too-small", figures=figures)
    return passed("requests", f"none of {len(requests)} requests went wrong", figures=figures)


def _words(
    policy: SoakPolicy, requests: Sequence[SoakRequest], stock: StockLoad | Check | None
) -> Check:
    """
    Return whether few answers at each concurrency repeat a token, or no more than of *stock*.

    That is judged by Fisher's exact test, one-sided, with Bonferroni's correction: a small model
    repeats behind a prompt that is longer than those that it has learnt, whatever serves it.
    """
    from scipy.stats import fisher_exact

    name = "words-under-load"
    answers, counts = _count(requests, *ANSWERS), _count(requests, "repeating")
    if not answers:
        return invalid(name, "there are no answers to look at", "load-too-small")
    figures, many = list[Figure](), list[int]()
    for key in sorted(answers):
        most = policy.repeating * answers[key]
        label = f"answers that repeat a token, {key} at once"
        figures.append(Figure(label, counts[key], count=answers[key], bound=most))
        if counts[key] > most:
            many.append(key)
    message = f"{counts.total()} of {answers.total()} answers repeat one token"
    if many and isinstance(stock, Check):
        return stock
    if many and isinstance(stock, StockLoad):
        if stock.answers < policy.least:
            message += f", and {stock.answers} of the stock wheel are too few to compare with"
            return invalid(name, message, "load-too-small", figures=figures)
        theirs = (stock.repeating, stock.answers - stock.repeating)
        message += f", and {stock.repeating} of {stock.answers} of the stock wheel"
        label = "answers of the stock wheel that repeat a token"
        figures.append(Figure(label, stock.repeating, count=stock.answers))
        for key in tuple(many):
            ours = (counts[key], answers[key] - counts[key])
            p = fisher_exact((ours, theirs), "greater").pvalue
            if p >= policy.chance / len(answers):
                many.remove(key)
    if many:
        samples = [
            Sample(f"answer, {each.concurrency} at once", "", each.message)
            for each in requests
            if each.outcome == "repeating" and each.concurrency in many
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
    own = [event for event in events if event[1] != OTHER_PROCESS]
    _, reason, text = (own or events)[0]
    state = failed if own else invalid
    return state(name, text, reason, samples=samples)


def drained(client: Client, seconds: float) -> Check:
    """Return whether the server works on no request after at most *seconds*."""
    end = time.monotonic() + seconds
    while True:
        try:
            metrics = client.metrics()
            running = metrics[RUNNING] + metrics[WAITING]
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
    states, samples = list[State](), list[Sample]()
    for check in repeat():
        if check.required:
            states.append(check.state)
        if check.required and check.state != "pass":
            samples.append(Sample(check.name, "pass", f"{check.state}: {check.message}"[:300]))
    message = f"after the load, {len(samples)} of {len(states)} checks do not pass"
    reasons = dict.fromkeys(ORDER[:-1], "worse-after-soak")
    return decided(name, message, worst(states), reasons, (), samples)
