"""
The gate of a build: the one place that lets compilers start, by the memory that each should need.

It listens on a Unix socket in the launch folder. Each compiler call has a launcher (`sparkwright.builder.compile.launch`) with a
connection of its own, on which whole messages travel, their words set apart by tabs:

    launcher: unit SOURCE · miss · end STATUS KIBIBYTES CPU WORDS · stopped STATUS KIBIBYTES CPU WORDS
    gate:     go MARK · look MARK CCACHE · compile · stop · done

A closed connection means that the other side is dead: a launcher ends its compiler then, and the gate ends the compiler of a launcher.
With a cache a call first looks there, which takes next to no memory, and asks for memory only on a ``miss``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from sparkwright.builder.compile import failures, launch, procfs
from sparkwright.builder.compile.calls import Call, Limits, Outcome, Sample
from sparkwright.builder.compile.costs import Expected
from sparkwright.core import schedule
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.schedule import Holder, Unit

#: Seconds between two looks at what compilers hold.
INTERVAL = 0.5
#: Seconds without a new launcher after which all that ninja starts now are taken to be there, so that the longest of them goes first.
QUIET = 0.4
#: Seconds that a failed unit's launcher has to hand its words to ninja before the others are ended, whose end ninja does not explain.
LAST_WORDS = 0.5
#: Seconds for which a unit that fits the budget waits, alone, for other programs to free the machine's memory.
WAIT_FOR_ROOM = 60.0
#: Above this share of the budget in real use nothing new starts.
NEAR = 0.97


class Gate:
    """
    The gate, open inside its ``with`` block and serving in a thread of its own.

    Args:
        folder: The launch folder; emptied.
        expect: What a unit should cost.
        cache: Path of ccache, where there is one.
        root: What source paths begin with; the rest names the unit.
        urgency: Units in the order in which they should start (`schedule.arrange`); others come after, longest first.
        coming: How many launchers there should be; until then, or a quiet moment, nothing starts.
        ended: Called with each outcome, in the gate's thread.
        tick: Called after every look at the memory, in the gate's thread.
        available: Megabytes that the machine has available.
    """

    def __init__(
        self, folder: Path, limits: Limits, expect: Callable[[str], Expected], *, cache: str = "", root: str = "",
        urgency: Mapping[str, int] | None = None, coming: int = 0, ended: Callable[[Outcome], None] | None = None,
        tick: Callable[[Gate], None] | None = None, available: Callable[[], int] | None = None,
    ) -> None:  # fmt: skip
        self._folder, self._limits, self._expect, self._cache, self._root = folder, limits, expect, cache, root
        self._urgency, self._coming, self._ended, self._tick = urgency or {}, coming, ended, tick
        self._available = available or procfs.available_megabytes
        self._calls: dict[socket.socket, Call] = {}
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._serve, name="gate", daemon=True)
        self._wake, self._waker = socket.socketpair()
        self._opened = self._arrived = self._sampled = time.monotonic()
        self._ending = self._short_since = 0.0
        self._accepted, self._arrivals, self._mark = 0, 0, secrets.token_hex(8)
        self.failure: SparkwrightError | None = None
        self.fault: BaseException | None = None
        self.outcomes: list[Outcome] = []
        self.samples: list[Sample] = []
        self.paused = False

    # Opening and closing, in the thread of the build.

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        _end_left_over(self._folder)
        (self._folder / "mark").write_text(self._mark)
        (self._folder / "events.jsonl").write_bytes(b"")
        script = self._folder / "miss.sh"
        script.write_text(launch.MISS)
        script.chmod(0o755)
        shutil.rmtree(self._folder / "tmp", ignore_errors=True)
        (self._folder / "tmp").mkdir()
        self._listener = _listen(self._folder)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._waker.close()
        self._thread.join()
        for call in list(self._calls.values()):
            call.link.close()
        self._listener.close()
        self._wake.close()
        self._selector.close()
        (self._folder / "gate").unlink(missing_ok=True)
        # Launchers end their compilers now; whatever is left of this build has lost its launcher.
        procfs.end_marked(self._mark)
        (self._folder / "mark").unlink(missing_ok=True)
        shutil.rmtree(self._folder / "tmp", ignore_errors=True)
        if self.fault:
            raise self.fault

    @property
    def environment(self) -> dict[str, str]:
        """Return the variable by which every process of this build is known."""
        return {"SPARKWRIGHT_UNIT": f"{self._mark}-0."}

    @property
    def running(self) -> list[str]:
        """The units that compile now, the longest running first."""
        return [call.unit for call in sorted(self._calls.values(), key=lambda call: call.began) if call.active]

    # Everything below is the gate's thread.

    def _serve(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # raised again in the thread of the build, which ninja's end wakes
            self.fault = error
            self._listener.close()
            for call in list(self._calls.values()):
                call.link.close()

    def _turn(self) -> bool:
        """Wait for something to happen and act on it; return False when the build has closed the gate."""
        for key, _ in self._selector.select(self._patience()):
            if key.fileobj is self._wake:
                return False
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.fileobj, socket.socket):
                self._hear(self._calls[key.fileobj])
        now = time.monotonic()
        if self._ending:
            if now >= self._ending:
                for call in list(self._calls.values()):
                    self._drop(call)
            return True
        if now - self._sampled >= INTERVAL:
            self._sampled = now
            self._watch(now)
        self._admit(now)
        return True

    def _patience(self) -> float | None:
        if not self._calls:
            return None
        return 0.1 if self._ending or any(call.ready for call in self._calls.values()) else INTERVAL

    def _accept(self) -> None:
        link, _ = self._listener.accept()
        self._accepted += 1
        self._calls[link] = Call(link, self._mark, self._accepted, time.monotonic())
        self._selector.register(link, selectors.EVENT_READ)

    def _hear(self, call: Call) -> None:
        try:
            text = call.link.recv(65536).decode("utf-8", "surrogateescape")
        except OSError:
            text = ""
        word, *rest = text.split("\t", 4)
        if word == "unit":
            self._arrivals, self._arrived = self._arrivals + 1, time.monotonic()
            call.unit = rest[0].removeprefix(self._root)
            call.state, call.expected = "asked", self._expect(call.unit)
            call.granted = call.expected.megabytes
        elif word == "miss":
            call.state = "missed"
        elif word in ("end", "stopped"):
            call.peak = max(call.peak, int(rest[1]) * 1024 // 1_000_000)
            self._over(call, int(rest[0]), float(rest[2]), rest[3])
        elif not word:
            self._lost(call)

    def _lost(self, call: Call) -> None:
        """Forget a launcher that is gone; one that was killed left its compiler behind."""
        if call.state not in ("ended", "asked", "new"):
            procfs.end_marked(call.mark)
        self._drop(call)

    def _drop(self, call: Call) -> None:
        self._selector.unregister(call.link)
        call.link.close()
        self._calls.pop(call.link, None)

    # Ends of units.

    def _over(self, call: Call, status: int, cpu: float, words: str) -> None:
        now, was = time.monotonic(), call.state
        if was == "stopping" and status:
            call.state, call.alone, call.granted = "asked", True, max(call.granted, call.peak)
            return
        if status and was == "running" and failures.killed(status, words) and not call.rescued:
            # The kernel's choice for want of memory: once more, alone, and with twice the room.
            call.state, call.alone, call.rescued = "asked", True, True
            call.granted = min(2 * max(call.granted, call.peak), self._limits.megabytes)
            return
        hit, call.state = was == "looking", "ended"
        times = (call.asked - self._opened, call.began - self._opened, now - self._opened)
        done = Outcome(call.unit, status, hit and not status, *times, cpu, call.peak, call.expected, call.stops)
        self.outcomes.append(done)
        self._write_down("hit" if done.hit else "end", call.unit, status, done.seconds, call.peak)
        if self._ended:
            self._ended(done)
        if status:
            self._fail(failures.failure(call.unit, status, words))
        call.send("done")

    def _fail(self, failure: SparkwrightError) -> None:
        """Let nothing start any more, and end everything as soon as the failed unit has handed its words to ninja."""
        if not self._ending:
            self.failure, self._ending = failure, time.monotonic() + LAST_WORDS

    def _write_down(self, event: str, unit: str, status: int = 0, seconds: float = 0.0, megabytes: int = 0) -> None:
        line = {"event": event, "unit": unit, "status": status, "seconds": round(seconds, 2), "megabytes": megabytes}
        with (self._folder / "events.jsonl").open("ab") as stream:
            stream.write(msgspec.json.encode(line) + b"\n")

    # Admission.

    def _admit(self, now: float) -> None:
        calls = list(self._calls.values())
        looking = sum(call.state == "looking" for call in calls)
        if self._cache:
            for call in [call for call in calls if call.state == "asked" and not call.alone][: max(0, self._limits.cores - looking)]:
                call.state, call.began, call.busy = "looking", now, now
                call.send("look", call.mark, self._cache)
                looking += 1
        if looking or not self._all_there(now):
            return
        waiting = [call for call in calls if call.ready]
        active = [call for call in calls if call.active]
        if not waiting:
            return
        alone = [call for call in (*active, *waiting) if call.alone]
        if alone:
            if not active:
                self._start_alone(alone[0], now)
            return
        if any(self._refused(call) for call in waiting) or (active and self.paused):
            return
        self._choose(sorted(waiting, key=self._rank), active, now)

    def _choose(self, waiting: list[Call], active: list[Call], now: float) -> None:
        """Start those of *waiting* that `schedule.startable` names."""
        units = [Unit(call.mark, call.expected.seconds, call.granted) for call in waiting]
        holders = [Holder(call.mark, max(call.granted, call.held), call.began + call.expected.seconds) for call in active]
        free = self._free(active)
        if not active and units[0].megabytes > free:
            self._start_alone(waiting[0], now)
            return
        self._short_since = 0.0
        chosen = {unit.name for unit in schedule.startable(units, holders, now, self._limits.cores, free)}
        for call in waiting:
            if call.mark in chosen:
                self._start(call)

    def _all_there(self, now: float) -> bool:
        return self._arrivals >= self._coming > 0 or now - self._arrived >= QUIET

    def _rank(self, call: Call) -> tuple[int, float, int]:
        return (self._urgency.get(call.unit, len(self._urgency)), -call.expected.seconds, call.number)

    def _free(self, active: list[Call]) -> int:
        """Return the megabytes that nobody was granted: of the budget, and of what the machine has beside what is still to be used."""
        budget = self._limits.megabytes - sum(max(call.granted, call.held) for call in active)
        promised = sum(max(0, call.granted - call.held) for call in active)
        return min(budget, self._available() - self._limits.reserve - promised)

    def _refused(self, call: Call) -> bool:
        """Fail the build for a unit that is known to need more than the budget; a guess is tried."""
        if call.granted <= self._limits.megabytes or not call.expected.measured:
            return False
        self._fail(failures.too_small(call.unit, call.granted, self._limits.megabytes, self._available()))
        return True

    def _start_alone(self, call: Call, now: float) -> None:
        """Start *call* with nothing beside it, once the machine has the room; fail the build when it never has."""
        available = self._available()
        if call.expected.measured and call.granted > available:
            self._short_since = self._short_since or now
            if now - self._short_since > WAIT_FOR_ROOM:
                self._fail(failures.too_small(call.unit, call.granted, self._limits.megabytes, available))
            return
        self._short_since = 0.0
        self._start(call)

    def _start(self, call: Call) -> None:
        # Not the time of the turn: of two that start in one turn, the second is the younger.
        now, missed = time.monotonic(), call.state == "missed"
        call.state, call.began, call.busy, call.cpu, call.held = "running", now, now, 0.0, 0
        self._write_down("start", call.unit)
        if missed:
            call.send("compile")
        else:
            call.send("go", call.mark)

    # The watchdog.

    def _watch(self, now: float) -> None:
        active = [call for call in self._calls.values() if call.active]
        for call in active:
            self._look_at(call, now)
        used, available = sum(call.held for call in active), self._available()
        granted = sum(max(call.granted, call.held) for call in active)
        self.samples.append(Sample(round(now - self._opened, 1), used, granted, available))
        self.paused = used > NEAR * self._limits.megabytes or available < self._limits.reserve
        if used > self._limits.megabytes or available < self._limits.reserve / 2:
            self._make_room([call for call in active if call.state == "running"], active, used, available)
        if self._tick:
            self._tick(self)

    def _look_at(self, call: Call, now: float) -> None:
        use = procfs.use_below(call.pid)
        call.held = use.memory // 1_000_000
        call.peak = max(call.peak, call.held)
        call.granted = max(call.granted, call.held)  # it lied about its size
        if use.cpu > call.cpu + 0.05:
            call.cpu, call.busy = use.cpu, now
        if self._limits.hangs(now - call.began, now - call.busy, call.expected.seconds):
            self._fail(failures.hung(call.unit, now - call.began, now - call.busy))

    def _make_room(self, running: list[Call], active: list[Call], used: int, available: int) -> None:
        """End the youngest unit, which loses least; it runs again later, alone. One that is alone already fails the build."""
        if len(active) > len(running):
            return  # one is being ended; what it held is free in a moment
        if len(running) > 1:
            youngest = max(running, key=lambda call: call.began)
            youngest.state, youngest.stops = "stopping", youngest.stops + 1
            youngest.send("stop")
            self._write_down("stop", youngest.unit, 0, time.monotonic() - youngest.began, youngest.peak)
        elif running and (used > self._limits.megabytes or available < self._limits.reserve / 4):
            (call,) = running
            self._note_peak(call)
            self._fail(failures.exceeded(call.unit, call.peak, self._limits.megabytes, available))

    def _note_peak(self, call: Call) -> None:
        """Hand on the outcome of a unit that is about to be ended, so that its size is known the next time."""
        now = time.monotonic()
        if self._ended:
            seconds = (call.asked - self._opened, call.began - self._opened, now - self._opened)
            self._ended(Outcome(call.unit, -signal.SIGKILL, False, *seconds, call.cpu, call.peak, call.expected, call.stops, exceeded=True))


def _listen(folder: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    (folder / "gate").unlink(missing_ok=True)
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        listener.bind(f"/proc/self/fd/{place}/gate")  # the folder's own name may be longer than an address can be
    finally:
        os.close(place)
    listener.listen(4096)
    return listener


def _end_left_over(folder: Path) -> None:
    """End what a build that was killed in this folder left running: a compiler whose launcher, ninja and gate died at one stroke."""
    with contextlib.suppress(FileNotFoundError):
        if mark := (folder / "mark").read_text():
            procfs.end_marked(mark)
