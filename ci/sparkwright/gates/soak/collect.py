"""
The load of a soak, and everything that is watched meanwhile.

Requests follow from their names, so two soaks send the same ones. An aborted request closes
its connection within an answer, as users do, and the server has to free its blocks.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import queue
import random
import threading
import time
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

import psutil

from sparkwright.bench.machine.watchdog import Finding, KernelLog
from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.gates.soak.checks import MEANINGS, SoakInterval, SoakPolicy, SoakRequest

#: Reasons of a request whose deadline is over.
LATE = ("server-slow", "server-silent")
#: A token that no vocabulary has; vLLM refuses it.
BAD_TOKEN = 2**31 - 1
#: vLLM's gauges of the requests that it works on.
RUNNING = ("vllm:num_requests_running", "vllm:num_requests_waiting")


class Load:
    """
    Threads that send requests to the server at *url*.

    Args:
        text: Tokens that prompts are cut from.
    """

    def __init__(self, policy: SoakPolicy, url: str, model: str, text: Sequence[int]) -> None:
        self._policy, self._url, self._model, self._text = policy, url, model, text
        self._limit = Client(url, model).max_model_len()
        self._requests, self._stopped = queue.SimpleQueue[SoakRequest](), threading.Event()

    def run(self, name: str, concurrency: int, seconds: float) -> Iterator[None]:
        """
        Send *concurrency* requests at once for *seconds*; yield at each sample of the policy.

        Every request that was begun ends; *name* decides what they are.
        """
        end = time.monotonic() + seconds
        workers = [
            threading.Thread(target=self._work, args=(f"{name}/{worker}", end), daemon=True)
            for worker in range(concurrency)
        ]
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            time.sleep(self._policy.sample)
            yield

    def take(self) -> tuple[SoakRequest, ...]:
        """Return the requests that ended since the last call."""
        return tuple(self._requests.get() for _ in range(self._requests.qsize()))

    def stop(self) -> None:
        """Let no worker send another request."""
        self._stopped.set()

    def _work(self, name: str, end: float) -> None:
        for number in itertools.count():
            if self._stopped.is_set() or time.monotonic() >= end:
                return
            request = self.send(f"{name}/{number}")
            self._requests.put(request)
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

    def send(self, key: str) -> SoakRequest:
        """Send the request of *key* and return how it ended."""
        prompt, tokens, patience = self.draw(key)
        bad = prompt[0] == BAD_TOKEN
        client = Client(self._url, self._model, deadline=patience or self._policy.drain)
        try:
            answer = client.complete(prompt, max_tokens=tokens, ignore_eos=True)
        except ServerInvalid as error:
            if patience is not None and error.reason in LATE:
                return SoakRequest(key, "aborted")
            if bad and error.reason == "server-refused" and error.status < 500:
                return SoakRequest(key, "refused")
            return SoakRequest(key, "failed", 0, str(error))
        if bad:
            return SoakRequest(key, "failed", tokens, "a token of no vocabulary was accepted")
        run = max((len(list(run)) for _, run in itertools.groupby(answer.tokens)), default=0)
        if run >= self._policy.run:
            message = f"{run} times the same token in {tokens}, after a prompt of {len(prompt)}"
            return SoakRequest(key, "repeating", tokens, message)
        return SoakRequest(key, "answered", tokens)


class Monitor:
    """
    The server's processes, their memory, and the kernel's log.

    Args:
        pid: The server's process; None if it is not known.
        kernel: The device of the kernel's log.

    Attributes:
        unwatched: Check → reason and message, if its subject cannot be watched.
    """

    def __init__(self, pid: int | None, kernel: Path) -> None:
        self._memory = collections.defaultdict[str, list[tuple[float, float]]](list)
        self._available = math.inf
        self._root = psutil.Process(pid) if pid is not None and psutil.pid_exists(pid) else None
        self._processes = {process: str(process) for process in self._tree()}
        self.unwatched: dict[str, tuple[str, str]] = {}
        if not self._processes:
            unknown = ("processes-unknown", MEANINGS["processes-unknown"])
            self.unwatched |= {"memory-growth": unknown, "restarts": unknown}
        if not (gpu := gpu_memory({process.pid for process in self._processes})):
            reason = "no-gpu" if gpu is None else "gpu-memory-unknown"
            self.unwatched["gpu-memory-growth"] = (reason, MEANINGS[reason])
        self._log: KernelLog | None = None
        try:
            self._log = KernelLog(kernel)
        except OSError as error:
            self.unwatched["kernel-log"] = ("kernel-log-hidden", f"{kernel}: {error.strerror}")

    def sample(self, at: float) -> None:
        """Read the memory, *at* seconds since the beginning."""
        processes = self._tree()
        self._available = min(self._available, float(psutil.virtual_memory().available))
        # A process may end meanwhile.
        with contextlib.suppress(psutil.Error):
            resident = sum(process.memory_info().rss for process in processes)
            self._memory["memory"].append((at, float(resident)))
        if gpu := gpu_memory({process.pid for process in processes}):
            self._memory["gpu-memory"].append((at, gpu))
        elif processes:
            reason = "gpu-memory-unknown"
            self.unwatched.setdefault("gpu-memory-growth", (reason, MEANINGS[reason]))

    def interval(
        self, at: float, concurrency: int, requests: tuple[SoakRequest, ...]
    ) -> SoakInterval:
        """Return everything since the last call."""
        memory = {kind: tuple(readings) for kind, readings in self._memory.items()}
        self._memory.clear()
        alive = self._tree()
        ended = [process for process in self._processes if process not in alive]
        texts = tuple(f"{self._processes.pop(process)} ended" for process in ended)
        faults = self._findings()
        return SoakInterval(at, concurrency, requests, memory, self._available, texts, faults)

    def close(self) -> None:
        if self._log:
            self._log.close()

    def _tree(self) -> list[psutil.Process]:
        """Return the server's processes that are alive."""
        with contextlib.suppress(psutil.Error):
            # psutil compares the time of creation, so a reused process id does not count.
            if self._root and self._root.is_running():
                tree = [self._root, *self._root.children(recursive=True)]
                return [process for process in tree if _alive(process)]
        return []

    def _findings(self) -> tuple[Finding, ...]:
        try:
            findings = tuple(self._log.findings() if self._log else ())
            lost = "records were overwritten" if self._log and self._log.lost else ""
        except OSError as error:
            findings, lost = (), str(error)
        if lost:
            self.unwatched["kernel-log"] = ("kernel-log-lost", f"faults may be missing: {lost}")
        return findings[:20]


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
    # The driver says None for what it does not count; the rest of a sum says nothing.
    return 0.0 if None in used else float(sum(used))


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def running(client: Client, seconds: float) -> float | None:
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
