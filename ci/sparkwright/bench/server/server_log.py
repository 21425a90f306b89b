"""
The log of a server, read line by line: its lines of several kinds, and the parts of its start.

It may have any size, and takes memory that does not grow. A line that is longer than `LONGEST` is
taken for several. The parts explain a start and decide nothing: what a start compiled or tuned is
known from the files that it left (`warm_pack.additions`).
"""

import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from sparkwright.bench.server.client import ServerInvalid
from sparkwright.core import strict_yaml
from sparkwright.core.errors import FileError

#: Bytes of a line that are looked at; vLLM's configuration, the longest of use, has about 5,000.
LONGEST = 16 * 1024
#: The largest log, in bytes; a soak of hours writes some tens of megabytes.
LARGEST = 1 << 30
#: Lines, and different values, that are stored of each kind.
MOST_LINES = 20

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class LogPattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    One kind of line.

    Attributes:
        holds: A fixed part by which it is found quickly; of several, a line has at least one.
        pattern: A regular expression that is searched in the line; its group *value*, if it has
            one, is the value of the line.
    """

    holds: str | tuple[str, ...]
    pattern: str

    def __post_init__(self) -> None:
        strict_yaml.compile_patterns(self.pattern)

    def search(self, text: str) -> re.Match[str] | None:
        """Return the match in the line *text*."""
        parts = (self.holds,) if isinstance(self.holds, str) else self.holds
        return re.search(self.pattern, text) if any(part in text for part in parts) else None


class LogLines(msgspec.Struct):
    """The lines of one kind: their number, the first of them, and values with their counts."""

    count: int = 0
    texts: list[str] = []
    values: dict[str, int] = {}

    def add(self, text: str, value: str | None) -> None:
        """Count a line."""
        self.count += 1
        if len(self.texts) < MOST_LINES:
            self.texts.append(text)
        if value is not None and (value in self.values or len(self.values) < MOST_LINES):
            self.values[value] = self.values.get(value, 0) + 1


def scan(log: Path, patterns: Mapping[str, LogPattern]) -> dict[str, LogLines]:
    """
    Return the lines of *log* by the name of their pattern.

    Raises:
        ServerInvalid: It is not a regular file, cannot be read, holds a byte 0, which text never
            does, or more than `LARGEST` bytes (``log-unreadable``).
    """
    lines = {name: LogLines() for name in patterns}
    if not log.is_file():
        raise _unreadable("it is not a regular file")
    try:
        with log.open("rb") as stream:
            while line := stream.readline(LONGEST):
                if b"\0" in line or stream.tell() > LARGEST:
                    raise _unreadable(f"it is no text, or has more than {LARGEST} bytes")
                # A progress bar overwrites itself; what it leaves is not part of the next line.
                for part in line.split(b"\r"):
                    text = _COLOUR.sub("", part.decode("utf-8", "replace")).strip()
                    for name, pattern in patterns.items():
                        if match := pattern.search(text):
                            lines[name].add(text[:400], match.groupdict().get("value"))
    except OSError as error:
        raise _unreadable(f"it cannot be read: {error.strerror}") from None
    return lines


def _unreadable(why: str) -> ServerInvalid:
    return ServerInvalid("log-unreadable", f"the log cannot be used: {why}")


#: The process and the time in front of a line of vLLM; there is no year.
_LINE = re.compile(r"(?:\((?P<process>[^)]+)\) )?[A-Z]+ (?P<time>\d\d-\d\d \d\d:\d\d:\d\d) ")
#: That of the stamps: a leap year, so that every day exists.
YEAR = timedelta(days=366)
#: The line at which a server answers.
READY = "Application startup complete"
#: A start in its order: a part, and its lines in 0.33.0. A line states seconds, or counts an event;
#: seconds of a part without them are those from the line *begin* to the line *end*.
LINES = (
    # The API server's words before it starts the engine, and the engine's first.
    ("engine's imports", "begin", r"non-default args:"),
    ("engine's imports", "end", r"Initializing a V1 LLM engine"),
    # model_executor/model_loader/default_loader.py, and of a GPU all of v1/worker/gpu
    ("weights, read", "", r"Loading weights took (\d+\.?\d*) seconds"),
    ("weights", "", r"Model loading took \S+ GiB memory and (\d+\.?\d*) seconds"),
    # compilation/monitor.py, decorators.py and backends.py
    ("torch.compile", "", r"torch\.compile .*took (\d+\.?\d*) s in total"),
    ("torch.compile", "loaded", r"Directly load (?:AOT compilation|the compiled graph)"),
    ("torch.compile", "compiled", r"saved AOT compiled function|Compiling a graph for compile"),
    ("torch.compile", "that could not be loaded", r"Compiling model again due to a load failure"),
    ("first run", "", r"Initial profiling/warmup run took (\d+\.?\d*) s"),
    # v1/worker/cpu_model_runner.py
    ("CPU's warm-up", "begin", r"Warming up model for the compilation"),
    ("CPU's warm-up", "end", r"Warming up done"),
    # flashinfer/autotuner/autotuner.py
    ("tuning", "begin", r"\[Autotuner\]: Autotuning process starts"),
    ("tuning", "end", r"\[Autotuner\]: Autotuning process ends"),
    ("tuning", "found", r"\[Autotuner\]: Config cache hit"),
    # model_executor/warmup/kernel_warmup.py and utils/jit_monitor.py
    ("JIT warm-up", "", r"JIT kernel warmup finished in (\d+\.?\d*)s"),
    ("JIT warm-up", "compiled while it served", r"JIT compilation during inference"),
    # v1/worker/gpu/model_runner.py: with what Triton compiles in it
    ("graph capture", "", r"Graph capturing finished in (\d+\.?\d*) secs"),
    # v1/engine/core.py: the sum of the parts above without the weights
    ("engine", "", r"init engine \(profile, create kv cache, warmup model\) took (\d+\.?\d*) s"),
)


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
        self._start, self._imports = began, None if began is None else 0.0
        #: Part → process → seconds; part → event → count; and the stamps at both ends.
        self._seconds: dict[str, dict[str, float]] = {}
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)
        self._stamps: list[datetime] = []

    def add(self, line: str) -> None:
        """Read a line of the log; lines after the start are ignored."""
        if self.ready:
            return
        self.ready = READY in line
        if not (stamp := _LINE.match(line)):
            return
        if self._start is not None and not self._stamps:
            self._imports = time.monotonic() - self._start
        clock = datetime.strptime(f"2024-{stamp['time']}", "%Y-%m-%d %H:%M:%S")
        self._stamps = [*self._stamps[:1], clock]
        process = (stamp["process"] or "").rpartition(" pid=")[0]
        # A start may last over New Year.
        elapsed = ((clock - self._stamps[0]) % YEAR).total_seconds()
        for name, event, pattern in LINES:
            if not (match := re.search(pattern, line)):
                continue
            seconds = self._seconds.setdefault(name, {})
            if event == "begin":
                seconds[""] = seconds.get("", 0.0) - elapsed
            elif event == "end":
                seconds[""] = elapsed + seconds.get("", -elapsed)
            elif event:
                self._counts[name][event] += 1
            else:
                seconds[process] = seconds.get(process, 0.0) + float(match[1])

    def parts(self) -> list[StartPart]:
        """Return the parts in the order of a start, and the sum to the last stamped line."""
        parts = [] if self._imports is None else [StartPart("imports", self._imports)]
        for name in dict.fromkeys(name for name, _, _ in LINES):
            if name in self._seconds:
                ended = [each for each in self._seconds[name].values() if each >= 0]
                slowest = max(ended, default=None)
                parts.append(StartPart(name, slowest, dict(self._counts[name])))
        if self._stamps:
            total = ((self._stamps[-1] - self._stamps[0]) % YEAR).total_seconds()
            parts.append(StartPart("from the first line to the last", total))
        return parts


def read_start(log: Path) -> StartLog:
    """
    Return the start of a server with the *log*.

    Raises:
        file-invalid: It cannot be read, or holds no line of vLLM.
    """
    start, failure = StartLog(), ""
    try:
        with log.open("rb") as stream:
            while (line := stream.readline(LONGEST)) and not start.ready:
                start.add(line.decode("utf-8", "replace"))
    except OSError as error:
        failure = str(error)
    if failure or not start.parts():
        raise FileError(
            "file-invalid",
            f"{log} is no log of vLLM. {failure}".strip(),
            todo="Name a file with all that vLLM printed.",
        )
    return start
