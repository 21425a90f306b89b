"""A compiler call as the gate sees it, what compilers may take together, and what became of a unit."""

from __future__ import annotations

import contextlib
import socket
import struct

import msgspec

from sparkwright.builder.compile.costs import Expected


class Limits(msgspec.Struct, frozen=True):
    """
    What compilers may take.

    Attributes:
        megabytes: Together; the gate also keeps within what is available on the machine.
        reserve: Megabytes that stay available to everything else.
        patience, factor, idle: A unit that ran for *factor* times its expected time and *patience* seconds, and used no CPU for the last
            *idle* seconds, hangs.
    """

    cores: int
    megabytes: int
    reserve: int = 500
    patience: float = 1800.0
    factor: float = 10.0
    idle: float = 180.0

    def hangs(self, seconds: float, idle: float, expected: float) -> bool:
        """Does a compiler hang that runs for *seconds*, of which it used no CPU in the last *idle*, and was *expected* to take fewer?"""
        return idle > self.idle and seconds > max(self.factor * expected, self.patience)


class Outcome(msgspec.Struct, frozen=True):
    """
    What became of a unit.

    Attributes:
        hit: The cache had it; nothing was compiled.
        asked, began, ended: Seconds since the gate opened; *began* is when it got its memory.
        cpu: Seconds of CPU that it used, which tell its work better than its time does where the machine does other things, too.
        megabytes: Peak of its processes together, as sampled, or of the largest one, whichever is more.
        stops: How often it was ended to make room.
        exceeded: It was ended at the limit; its peak is more than what is said here.
    """

    unit: str
    status: int
    hit: bool
    asked: float
    began: float
    ended: float
    cpu: float
    megabytes: int
    expected: Expected
    stops: int = 0
    exceeded: bool = False

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def instructive(self) -> bool:
        """Is the cost worth a record: of a unit that was compiled, or that turned out to be too large?"""
        return self.exceeded or (self.status == 0 and not self.hit)


class Sample(msgspec.Struct, frozen=True):
    """At one moment: seconds since the gate opened, megabytes that compilers held, that were granted, that the machine had available."""

    second: float
    used: int
    granted: int
    available: int


class Call:
    """A compiler call as the gate sees it; *state* is one of asked, looking, missed, running, stopping, ended."""

    def __init__(self, link: socket.socket, build: str, number: int, now: float) -> None:
        # The dot ends the number: the mark of call 1 is no beginning of that of call 10.
        self.link, self.number, self.mark, self.asked, self.began = link, number, f"{build}-{number}.", now, now
        self.pid = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        self.unit, self.state, self.expected = "", "new", Expected(0, 0, "kind")
        self.granted = self.peak = self.held = 0
        self.cpu, self.busy, self.stops, self.alone, self.rescued = 0.0, now, 0, False, False

    @property
    def ready(self) -> bool:
        return self.state in ("asked", "missed")

    @property
    def active(self) -> bool:
        return self.state in ("running", "stopping")

    def send(self, *words: str) -> None:
        # A launcher that has just died is noticed when its end of the connection closes.
        with contextlib.suppress(OSError):
            self.link.send("\t".join(words).encode("utf-8", "surrogateescape"))
