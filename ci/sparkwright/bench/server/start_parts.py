"""
The parts of a server's start, by what vLLM and FlashInfer write into the log: how long each took,
and what of it came from a cache.

The text explains a start and decides nothing. What a start compiled or tuned is known from the
files that it left (`warm_pack.additions`).
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from datetime import datetime
from functools import partial
from pathlib import Path

import msgspec

from sparkwright.bench.server.server_log import LONGEST
from sparkwright.core.errors import FileError

#: The process and the time in front of a line of vLLM; there is no year.
_LINE = re.compile(r"(?:\((?P<process>[^)]+)\) )?[A-Z]+ (?P<time>\d\d-\d\d \d\d:\d\d:\d\d) ")
#: The line at which a server answers.
READY = "Application startup complete"
#: Part of a start → the line that states its seconds. Lines of 0.33.0; the source is named.
SECONDS = {
    # v1/worker/gpu/model_runner.py: with what is computed from the weights
    "weights": re.compile(r"Model loading took \S+ GiB memory and (\S+) seconds"),
    # model_executor/model_loader/default_loader.py: all that a CPU's worker says
    "weights, read": re.compile(r"Loading weights took (\S+) seconds"),
    # compilation/monitor.py
    "torch.compile": re.compile(
        r"torch\.compile (?:took|and initial profiling/warmup run together took) (\S+) s in total"
    ),
    "first run": re.compile(r"Initial profiling/warmup run took (\S+) s"),
    # model_executor/warmup/kernel_warmup.py
    "JIT warm-up": re.compile(r"JIT kernel warmup finished in ([\d.]+)s"),
    # v1/worker/gpu/model_runner.py: with what Triton compiles in it
    "graph capture": re.compile(r"Graph capturing finished in (\S+) secs"),
    # v1/engine/core.py: all of these but the weights
    "engine": re.compile(r"init engine \(profile, create kv cache, warmup model\) took (\S+) s"),
}
#: Part → the lines between which it lies, to the second.
BETWEEN = {
    "engine's imports": ("non-default args:", "Initializing a V1 LLM engine"),
    # flashinfer/autotuner/autotuner.py
    "tuning": ("[Autotuner]: Autotuning process starts", "[Autotuner]: Autotuning process ends"),
    # v1/worker/cpu_model_runner.py
    "CPU's warm-up": ("Warming up model for the compilation", "Warming up done"),
}
#: What is counted → the part that it explains, and its line.
COUNTED = {
    # compilation/decorators.py, backends.py
    "loaded": ("torch.compile", "Directly load (?:AOT compilation|the compiled graph)"),
    "compiled": ("torch.compile", "saved AOT compiled function|Compiling a graph for compile"),
    "that could not be loaded": ("torch.compile", "Compiling model again due to a load failure"),
    "found": ("tuning", r"\[Autotuner\]: Config cache hit"),
    # utils/jit_monitor.py
    "compiled while it served": ("JIT warm-up", "JIT compilation during inference"),
}


class StartPart(msgspec.Struct, frozen=True):
    """
    A part of a start.

    Attributes:
        seconds: Of the process that took longest; None if the log does not say.
        counts: What came from a cache and what did not, as the log says.
    """

    name: str
    seconds: float | None
    counts: dict[str, int] = {}


class StartLog:
    """
    The log of a start, line by line.

    Attributes:
        ready: Whether the server answers.

    Args:
        began: When the server was started, by `time.monotonic`; None if that is unknown.
    """

    def __init__(self, began: float | None = None) -> None:
        self.ready = False
        self._start = began
        self._seconds = defaultdict[str, defaultdict[str, float]](partial(defaultdict, float))
        self._counts = Counter[str]()
        self._began: dict[tuple[str, str], datetime] = {}
        self._first: datetime | None = None
        self._last: datetime | None = None

    def add(self, line: str) -> None:
        """Take a line of the log; those behind the start are left out."""
        if self.ready:
            return
        self.ready = READY in line
        stamp, process = _LINE.match(line), ""
        if stamp:
            process = (stamp["process"] or "").rpartition(" pid=")[0]
            # A leap year, so that every day exists.
            clock = datetime.strptime(f"2024-{stamp['time']}", "%Y-%m-%d %H:%M:%S")
            if self._first is None and self._start is not None:
                self._seconds["imports"][""] = time.monotonic() - self._start
            self._first, self._last = self._first or clock, clock
            self._add_landmark(line, process, clock)
        for name, pattern in SECONDS.items():
            if match := pattern.search(line):
                self._seconds[name][process] += _number(match[1])
        for event, (_, text) in COUNTED.items():
            self._counts[event] += bool(re.search(text, line))

    def _add_landmark(self, line: str, process: str, clock: datetime) -> None:
        for name, (begin, end) in BETWEEN.items():
            # The engine says that its imports are done, which the API server began.
            key = name, "" if name == "engine's imports" else process
            if begin in line:
                self._began[key] = clock
            elif end in line and key in self._began:
                seconds = (clock - self._began.pop(key)).total_seconds()
                self._seconds[name][process] += max(0.0, seconds)

    def parts(self) -> list[StartPart]:
        """Return the parts in the order of a start, and the sum to the last stamped line."""
        order = (
            *("imports", "engine's imports", "weights", "weights, read", "torch.compile"),
            *("first run", "CPU's warm-up", "tuning", "JIT warm-up", "graph capture", "engine"),
        )
        parts = list[StartPart]()
        for name in order:
            counts = dict[str, int]()
            for event, (part, _) in COUNTED.items():
                if part == name and self._counts[event]:
                    counts[event] = self._counts[event]
            slowest = max(self._seconds[name].values(), default=None)
            if slowest is not None or counts:
                parts.append(StartPart(name, slowest, counts))
        if self._first and self._last:
            total = (self._last - self._first).total_seconds()
            parts.append(StartPart("from the first line to the last", max(0.0, total)))
        return parts


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def read(log: Path) -> StartLog:
    """
    Return the start that the file *log* tells of.

    Raises:
        file-invalid: It cannot be read, or holds no line of vLLM.
    """
    start = StartLog()
    try:
        with log.open("rb") as stream:
            while (line := stream.readline(LONGEST)) and not start.ready:
                start.add(line.decode("utf-8", "replace"))
    except OSError as error:
        raise FileError("file-invalid", f"{log} cannot be read.", details=[str(error)]) from error
    if not start.parts():
        todo = "Name a file with all that `vllm serve` printed."
        raise FileError("file-invalid", f"{log} holds no line of vLLM.", todo=todo)
    return start
