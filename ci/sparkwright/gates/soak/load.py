"""
The load of a soak, and everything that is watched meanwhile.

Requests follow from their names, so two soaks send the same ones. An aborted request closes
its connection within an answer, as users do, and the server has to free its blocks.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import psutil
from msgspec import Meta

from sparkwright.bench.machine import watchdog
from sparkwright.bench.records import Count, Positive
from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.gates.core.server_facts import Pace

#: A token that no vocabulary has; vLLM refuses it.
BAD_TOKEN = 2**31 - 1

Share = Annotated[float, Meta(ge=0, lt=1)]
Lengths = Annotated[tuple[Count, ...], Meta(min_length=1)]


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
    prefix: Annotated[int, Meta(ge=0)]
    aborted: Share
    patience: Positive
    bad: Share
    line: Annotated[str, Meta(pattern=r"\{number\}")]


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
        least: Answers needed at each concurrency.
        drain: Seconds within which a request ends, and the server is idle after the load.
    """

    seconds: Positive
    shortest: Positive
    interval: Positive
    sample: Positive
    load: SoakLoad
    warm: Share
    growth: Positive
    confidence: Annotated[float, Meta(ge=0.5, lt=1)]
    run: Annotated[int, Meta(ge=2)]
    repeating: Share
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
        self._processes = {process: str(process) for process in self._alive()}
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
        for process in set(self._processes).difference(alive):
            watched.ended.append((at, "server-restarted", f"{self._processes.pop(process)} ended"))
        on_gpu = gpu_memory({process.pid for process in alive})
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
                faults = list(self._log.findings())[:20]
                watched.faults += [(at, fault.reference, fault.message) for fault in faults]
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
    import pynvml

    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    except pynvml.NVMLError:
        return 0.0
    try:
        lists = [pynvml.nvmlDeviceGetComputeRunningProcesses(device) for device in devices]
    except pynvml.NVMLError:
        return None
    used = [entry.usedGpuMemory for entries in lists for entry in entries if entry.pid in pids]
    # The driver reports None for memory that it does not count; a sum without it is wrong.
    return None if None in used or (devices and not used) else float(sum(used))
