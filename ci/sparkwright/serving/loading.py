"""
The silent minutes: what vLLM does between its start and its first answer, read from its log, with an estimate from earlier starts.

The lines are those of vLLM 0.20.1 to 0.33.0; a phase whose lines a release words otherwise is not shown, and the one before it lasts
longer.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from sparkwright.core.files import content_key
from sparkwright.core.store import Store

#: Bytes of a line that are looked at, and read at once.
LONGEST, BLOCK = 16 * 1024, 1 << 20
#: Starts that an estimate rests on.
KEPT = 5

#: Phase → the line that it begins with; ``k`` and ``n`` where it counts. In the order in which they come.
PHASES: tuple[tuple[str, str], ...] = (
    ("start", ""),
    ("engine", r"Initializing a V\d+ LLM engine"),
    ("weights", r"Starting to load model|(?:checkpoint|Multi-thread loading) shards: +\d+% Completed \| (?P<k>\d+)/(?P<n>\d+)"),
    ("compile", r"Start compiling|Dynamo bytecode transform time|Compiling a graph|torch\.compile (?:took|takes)|Directly load AOT"),
    ("cache", r"Available KV cache memory|KV cache size: [\d,]+ tokens|Explicitly set \("),
    ("graphs", r"Capturing [^|]*CUDA graphs?[^|]*\|[^|]*\| *(?P<k>\d+)/(?P<n>\d+)|Capturing [\w ]*CUDA graph"),
    ("warm-up", r"Graph capturing finished|init engine \(profile"),
    ("listen", r"Starting vLLM (?:API )?server|Application startup complete"),
)
_PATTERNS = tuple((name, re.compile(pattern)) for name, pattern in PHASES if pattern)
_ORDER = {name: place for place, (name, _) in enumerate(PHASES)}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Starts(msgspec.Struct, frozen=True):
    """Seconds of each phase in earlier starts of the same thing, the latest last."""

    starts: tuple[dict[str, float], ...] = ()


def key(*parts: str) -> str:
    """Return the address of what decides how long a start takes."""
    return content_key("starts", list(parts))


def recall(store: Store, address: str) -> Starts:
    """Return what is known of earlier starts."""
    return store.get("starts", address, Starts) or Starts()


def keep(store: Store, address: str, times: dict[str, float]) -> None:
    """Remember how long the phases of a start took that came to its end."""
    store.put("starts", address, Starts((*recall(store, address).starts, times)[-KEPT:]))


class Watch:
    """
    What a server that loads is doing.

    Args:
        log: What it prints. *earlier*: starts of the same thing. *passed*: gets each of its lines.

    Attributes:
        phase: The latest that began. *done*, *total*: what it counts; 0 where it does not.
        times: Seconds of each phase that is over.
    """

    def __init__(self, log: Path, earlier: Starts, passed: Callable[[str], None] | None = None) -> None:
        self._log, self._passed, self._earlier = log, passed, earlier.starts
        self.phase, self.done, self.total = PHASES[0][0], 0, 0
        self.times: dict[str, float] = {}
        self._began = self._phase_began = time.monotonic()
        self._place, self._rest = 0, b""

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began

    def look(self) -> None:
        """Read what the log has now."""
        with contextlib.suppress(FileNotFoundError), self._log.open("rb") as source:
            source.seek(self._place)
            while data := source.read(BLOCK):
                self._place += len(data)
                self._feed(data)

    def _feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data.replace(b"\r", b"\n")).split(b"\n")
        self._rest = self._rest[:LONGEST]
        for line in lines:
            if text := _COLOUR.sub("", line[:LONGEST].decode("utf-8", "replace")).strip():
                self._line("".join(letter if letter.isprintable() else " " for letter in text))

    def _line(self, text: str) -> None:
        if self._passed:
            self._passed(text)
        for name, pattern in _PATTERNS:
            if _ORDER[name] >= _ORDER[self.phase] and (match := pattern.search(text)):
                if name != self.phase:
                    self._begin(name)
                if (found := match.groupdict()).get("k"):
                    self.done, self.total = int(found["k"]), int(found["n"])
                return

    def _begin(self, name: str) -> None:
        now = time.monotonic()
        self.times[self.phase] = round(now - self._phase_began, 3)
        self.phase, self.done, self.total, self._phase_began = name, 0, 0, now

    def close(self) -> dict[str, float]:
        """Return the seconds of all phases, the last one included: it serves."""
        self._begin("ready")
        return self.times

    def remaining(self) -> float | None:
        """Return how many seconds are left by the median of earlier starts; None where there were none."""
        if not self._earlier:
            return None
        now = time.monotonic() - self._phase_began
        phase, done = self.phase, set(self.times)

        def left(start: dict[str, float]) -> float:
            ahead = sum(seconds for name, seconds in start.items() if name != phase and name not in done)
            return ahead + max(0.0, start.get(phase, 0.0) - now)

        found = sorted(left(start) for start in self._earlier)
        return found[len(found) // 2]

    def says(self) -> str:
        """Return what it is doing, for the live line."""
        count = f" {self.done} of {self.total}" if self.total else ""
        return f"{self.phase}{count} ({time.monotonic() - self._phase_began:.0f} s)"
