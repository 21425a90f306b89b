"""
A server's processes: started under a keeper, watched by their log and the machine's memory, and gone when whoever started them is gone.

The log is looked at again and again: where it says what no traffic should see (a negative estimate of the memory of CUDA graphs), the
server is ended.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import psutil

from sparkwright.bench.server.keeper import PATIENCE, Order
from sparkwright.bench.server.server_log import Line, Scanner, read_from
from sparkwright.core.process import available_megabytes

#: A server whose log has such a line is ended before traffic: with a negative estimate, vLLM 0.20 to 0.33 plans more KV cache than there
#: is memory (vllm #44740).
FATAL = (Line("graph-memory-negative", "CUDA graph memory: -", r"Estimated CUDA graph memory: (?P<value>-\d[\d.]*) GiB"),)


class Kept:
    """
    A command and everything that it starts.

    Args:
        command: Its words. *order*: its environment, and how long it may take to end. *log*: where its output goes.
        reserve: Megabytes that must stay free on the machine; below that it is ended. 0 for no such floor.
        held: Descriptors that stay open as long as anything of it runs, such as that of a lock.

    Attributes:
        log: What it prints. *grace*: seconds that it has to end by itself.
        ended: Why it does not run as it should, in a sentence; empty while it does. See *reference*.
        reference: ``server-died``, ``memory-low``, ``log-unreadable``, the name of the line in `FATAL` that ended it, or what `kill` was
            told.
    """

    def __init__(self, command: Iterable[str], order: Order, log: Path, *, reserve: int = 0, held: Sequence[int] = ()) -> None:
        self.log, self.ended, self.reference = log, "", ""
        self.grace, self._reserve = order.grace, reserve
        self._scanner, self._read = Scanner(FATAL), 0
        log.parent.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-P", "-m", "sparkwright.bench.server.keeper", *command]
        with log.open("wb") as sink:
            self._keeper = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True, pass_fds=held
            )
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(msgspec.json.encode(order) + b"\n")
        self._keeper.stdin.flush()

    @property
    def running(self) -> bool:
        """Whether its process is there."""
        return self._keeper.poll() is None

    @property
    def status(self) -> int | None:
        """Exit status, as a shell has it; None while it runs."""
        return self._keeper.poll()

    def processes(self) -> list[psutil.Process]:
        """Return its processes, wherever they moved."""
        try:
            return psutil.Process(self._keeper.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def memory(self) -> int:
        """Return the megabytes that its processes hold together; what they share counts for each."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total // 1_000_000

    def guard(self) -> bool:
        """End it where its log or the machine's memory asks for that; return whether it still runs as it should. Called again and again."""
        if not self.ended:
            with contextlib.suppress(FileNotFoundError):  # somebody tidied up
                self._read = read_from(self.log, self._read, self._scanner)
            if self._scanner.binary:
                self.end("log-unreadable", "its log holds bytes that are no text")
            for name, found in self._scanner.found.items():
                if found.count:
                    self.end(name, found.texts[0])
            if self._reserve and (free := available_megabytes()) < self._reserve:
                self.end("memory-low", f"{free} MB are free on the machine, {self._reserve} must stay")
        if not self.ended and not self.running:
            self.end("server-died", f"it ended by itself, with status {self._keeper.returncode}")
        return not self.ended

    def end(self, reference: str, why: str) -> None:
        """End it for *reference* and *why*, and wait until it is gone."""
        self.ended, self.reference = self.ended or why, self.reference or reference
        self.stop()

    def kill(self, reference: str, why: str) -> None:
        """End it at once, without its grace, for *reference* and *why*; from any thread, while others look at it."""
        self.ended, self.reference = self.ended or why, self.reference or reference
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and (left := self.processes()):
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.02)
        self.stop()

    def ask_to_end(self) -> None:
        """Let the keeper end everything, and do not wait for it; harmless when repeated."""
        assert self._keeper.stdin is not None
        with contextlib.suppress(OSError):
            self._keeper.stdin.close()

    def stop(self) -> None:
        """End it and everything that it started; harmless when repeated."""
        left = self.processes()
        self.ask_to_end()
        try:
            self._keeper.wait(timeout=self.grace + PATIENCE + 20)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._keeper.kill()
            self._keeper.wait()
        for process in left:  # none, unless somebody killed the keeper
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.ended = self.ended or "it was stopped"
