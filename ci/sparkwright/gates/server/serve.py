"""
A vLLM server that a gate starts: from a given environment, with a known log and known variables, and gone when the gate is gone.

The caller's variables reach it through a list of what may pass; a recipe adds its own. While the server starts, its log is watched: where
that says what no traffic should see (a negative estimate of the memory of CUDA graphs), the server is ended before the first question.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import psutil

from sparkwright.build import resident
from sparkwright.console import console
from sparkwright.errors import ToolMissing
from sparkwright.gates.server.client import Client, ServerInvalid
from sparkwright.gates.server.keeper import PATIENCE, Order
from sparkwright.gates.server.log import Line, Scanner, read_from
from sparkwright.gates.server.wire import Address

#: Variables that pass from the caller to a server. What changes how vLLM computes is the recipe's alone; LD_LIBRARY_PATH and PYTHONPATH
#: would put other code in the place of the wheel's.
PASSED = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "TMPDIR", "TZ", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "HF_HUB_CACHE", "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES",
)  # fmt: skip

#: What every server of a gate has: nothing is fetched or reported, and the log comes line by line.
ALWAYS = {
    "LC_ALL": "C.UTF-8", "PYTHONNOUSERSITE": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
}  # fmt: skip

#: A server whose log has such a line is ended before traffic: with a negative estimate, vLLM 0.20 to 0.33 plans more KV cache than there
#: is memory (vllm #44740).
FATAL = (Line("graph-memory-negative", "CUDA graph memory: -", r"Estimated CUDA graph memory: (?P<value>-\d[\d.]*) GiB"),)


class Launch(msgspec.Struct, frozen=True):
    """
    How a server is started.

    Attributes:
        python: The Python of the environment that vLLM is installed in.
        model: Folder of the model.
        flags: Further arguments of ``vllm serve``.
        variables: Environment variables beside `PASSED` and `ALWAYS`; an empty value takes one away.
        name: The name under which the model is served.
        patience: Seconds until it must answer.
        reserve: Megabytes that must stay free on the machine; below that the server is ended. 0 for no such floor.
        grace: Seconds that it has to end by itself: it gives memory back, and removes what its processes share.
    """

    python: Path
    model: Path
    flags: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    name: str = "model"
    patience: float = 1800.0
    reserve: int = 0
    grace: float = 20.0

    def environment(self) -> dict[str, str]:
        """Return all variables that the server has."""
        passed = {name: os.environ[name] for name in PASSED if name in os.environ}
        return {name: value for name, value in {**passed, **ALWAYS, **self.variables}.items() if value}

    def command(self, port: int) -> list[str]:
        """Return the command line, as people would type it."""
        return [
            str(self.python), "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(self.model), "--served-model-name", self.name,
            "--host", "127.0.0.1", "--port", str(port), *self.flags,
        ]  # fmt: skip


class Server:
    """
    A server that runs inside its ``with`` block, or why it does not.

    Attributes:
        launch: How it was started.
        log: What it prints.
        url: Where it answers.
        ended: Why it does not serve, in a sentence; empty while it does. See *reference*.
        reference: ``server-died``, ``server-late``, ``memory-low``, the name of the line in `FATAL` that ended it, or what `kill` was told.
    """

    def __init__(self, launch: Launch, log: Path) -> None:
        self.launch, self.log = launch, log
        self.ended = self.reference = ""
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        log.parent.mkdir(parents=True, exist_ok=True)
        self._scanner, self._read = Scanner(FATAL), 0
        command = [sys.executable, "-P", "-m", "sparkwright.gates.server.keeper", *launch.command(port)]
        if not launch.python.exists():
            raise ToolMissing(f"There is no Python at {launch.python}.")
        with log.open("wb") as sink:
            self._keeper = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
            )
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(msgspec.json.encode(Order(launch.environment(), launch.grace)) + b"\n")
        self._keeper.stdin.flush()

    def __enter__(self) -> Self:
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def ready(self) -> bool:
        """Whether it serves."""
        return not self.ended

    @property
    def running(self) -> bool:
        """Whether its process is there."""
        return self._keeper.poll() is None

    def client(self, *, timeout: float = 300.0, deadline: float = 900.0) -> Client:
        """Return a client of it; patient, since a server compiles when it is first asked for logprobs and the like."""
        return Client(self.url, self.launch.name, timeout=timeout, deadline=deadline)

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the server, wherever they moved."""
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
        """End the server where its log or the machine's memory asks for it, and return whether it still serves; called again and again."""
        if not self.ended:
            self._read = read_from(self.log, self._read, self._scanner)
            if self._scanner.binary:
                self._end("log-unreadable", "its log holds bytes that are no text")
            for name, found in self._scanner.found.items():
                if found.count:
                    self._end(name, found.texts[0])
            if self.launch.reserve and (free := resident.available_megabytes()) < self.launch.reserve:
                self._end("memory-low", f"{free} MB are free on the machine, {self.launch.reserve} must stay")
        if not self.ended and not self.running:
            self._end("server-died", f"it ended by itself, with status {self._keeper.returncode}")
        return self.ready

    def _end(self, reference: str, why: str) -> None:
        self.ended, self.reference = self.ended or why, self.reference or reference
        self.stop()

    def kill(self, reference: str, why: str) -> None:
        """End the server at once, without its grace, for *reference* and *why*; from any thread, while others look at it."""
        self.ended, self.reference = self.ended or why, self.reference or reference
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and (left := self.processes()):
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.02)
        self.stop()

    def _wait(self) -> None:
        """Wait until the server answers as it should, or record why it does not."""
        began = time.monotonic()
        with console.progress("start the server", 0) as line:
            while self.guard() and not self._answers():
                passed = time.monotonic() - began
                if passed > self.launch.patience:
                    self._end("server-late", f"it does not answer after {passed:.0f} s")
                line.update(round(passed), f"s  {last_line(self.log)}")
                time.sleep(0.5)
        if self.ready:
            self.guard()

    def _answers(self) -> bool:
        """Whether ``/health`` says 200 and ``/v1/models`` lists the model; the first alone is said before the second is true."""
        try:
            with Address(self.url).exchange("/health", None, timeout=5, deadline=5) as reply:
                if reply.status != 200:
                    return False
            return bool(self.client(timeout=5, deadline=10).model())
        except ServerInvalid:
            return False

    def stop(self) -> None:
        """End the server and everything that it started; harmless when repeated."""
        assert self._keeper.stdin is not None
        left = self.processes()
        with contextlib.suppress(OSError):
            self._keeper.stdin.close()
        try:
            self._keeper.wait(timeout=self.launch.grace + PATIENCE + 20)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._keeper.kill()
            self._keeper.wait()
        for process in left:  # none, unless somebody killed the keeper
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.ended = self.ended or "it was stopped"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def last_line(log: Path) -> str:
    """Return the end of the last line of *log*, for people."""
    try:
        with log.open("rb") as source:
            source.seek(max(0, log.stat().st_size - 2000))
            lines = source.read().decode("utf-8", "replace").replace("\r", "\n").split("\n")
    except OSError:
        return ""
    text = next((line for line in reversed(lines) if line.strip()), "")
    return "".join(letter for letter in text if letter.isprintable())[-100:]
