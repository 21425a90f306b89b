"""
Two machines for one gate: the leader leases its partner for the time of a job.

There is no service for it. The leader starts one program on the partner (over ssh, as a forced command), and that program holds the lock
that the partner's own runner needs to take a job. The kernel lets go of the lock when the program ends, whatever ends it. Beats go both
ways: a partner that hears none for ``expires`` seconds frees itself, and a leader whose last answered beat is older than
``expires − margin`` ends its job before that. Each side looks at its own clock alone.

Nobody waits in a circle: a leader waits only for a name greater than its own (`policy.ordered`), and holds itself first.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from typing import Literal

from sparkwright.core import process
from sparkwright.core.errors import CommandError
from sparkwright.operate.errors import LabError
from sparkwright.operate.runner.ground import Ground
from sparkwright.operate.runner.holding import machine, wanting
from sparkwright.operate.runner.journal import Entry, now
from sparkwright.operate.runner.lines import Lines
from sparkwright.operate.runner.policy import Lease, ordered


def freed(heard: float, clock: float, lease: Lease) -> bool:
    """Is the partner free again at *clock*, its last beat having come at *heard*?"""
    return clock - heard > lease.expires


def given_up(answered: float, clock: float, lease: Lease) -> bool:
    """Has the leader to stop at *clock*, the last beat that was answered having been sent at *answered*?"""
    return clock - answered > lease.expires - lease.margin


def hold(ground: Ground, leader: str, clean: Callable[[], object], source: int = 0, sink: int = 1) -> str:
    """
    Be leased by *leader*, who speaks by *source* and listens at *sink*, until it lets go, is gone, or is silent for too long.

    Args:
        clean: Called when the machine is had, and again before it is let go.

    Returns:
        Why it ended.

    Raises:
        lease-refused: The leader's name does not come before this machine's.
    """
    lease, name = ground.policy.lease, ground.settings.name
    if not ordered(leader, name):
        _say(sink, "refused")
        raise LabError("lease-refused", f"{leader} may not wait for {name}: pairs are led by the name that comes first.")
    heard = _Heard(lease, Lines(source), sink)
    run = f"lease-{leader}-{os.getpid()}"
    with wanting(ground):
        _say(sink, "waiting")
        try:
            entered = contextlib.ExitStack()
            entered.enter_context(machine(ground, lease.patience, heard.listen))
        except LabError as error:
            if error.reference != "runner-busy":
                raise
            _say(sink, "refused")
            return heard.over or "the machine did not become free in time"
    with entered:
        clean()
        ground.journal().write(Entry(now(), run, "leased", says=leader))
        _say(sink, "held")
        try:
            while heard.listen(lease.beat / 4):
                pass
        finally:
            clean()
            ground.journal().write(Entry(now(), run, "released", says=heard.over))
    return heard.over


class _Heard:
    """What the leader says: *over* is why it is no longer there."""

    def __init__(self, lease: Lease, lines: Lines, sink: int) -> None:
        self._lease, self._lines, self._sink = lease, lines, sink
        self._last = time.monotonic()
        self.over = ""

    def listen(self, wait: float = 0) -> bool:
        """Answer the beats that have come; False when there will be none any more."""
        for line in self._lines.read(wait):
            if line.startswith("beat "):
                self._last = time.monotonic()
                _say(self._sink, line)
            elif line == "release":
                self.over = "released"
        if self._lines.closed:
            self.over = self.over or "the leader is gone"
        elif freed(self._last, time.monotonic(), self._lease):
            self.over = "the leader is silent"
        return not self.over


def _say(handle: int, line: str) -> None:
    # Nobody hears it any more: the next look at the other direction says so.
    with contextlib.suppress(OSError):
        os.write(handle, line.encode() + b"\n")


class Leader:
    """
    The leader's end: a program that reaches the partner, started by this.

    Attributes:
        state: ``lost`` is one that was held; ``refused`` one that never was.
    """

    def __init__(self, lease: Lease, partner: str) -> None:
        self.state: Literal["waiting", "held", "refused", "lost"] = "waiting"
        self._lease = lease
        command = [word.replace("{partner}", partner) for word in lease.reach]
        try:
            self._child = subprocess.Popen(process.wrap_with_limits(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except CommandError as error:
            raise LabError("lease-refused", f"{command[0]} is not installed, so {partner} cannot be reached.") from error
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        os.set_blocking(self._child.stdin.fileno(), False)
        self._to, self._lines = self._child.stdin.fileno(), Lines(self._child.stdout.fileno())
        self._answered = self._asked = time.monotonic()
        self._sent: dict[str, float] = {}
        self._number = 0

    def look(self) -> str:
        """Exchange beats, and return the state."""
        for line in self._lines.read(0):
            if line == "held" and self.state == "waiting":
                self.state = "held"
            elif line == "refused":
                self._gone()
            elif line in self._sent:
                self._answered = max(self._answered, self._sent.pop(line))
        clock = time.monotonic()
        if self._lines.closed or given_up(self._answered, clock, self._lease):
            self._gone()
        elif clock - self._asked >= self._lease.beat or not self._sent:
            self._number += 1
            self._sent = {**dict(list(self._sent.items())[-16:]), f"beat {self._number}": clock}
            self._asked = clock
            _say(self._to, f"beat {self._number}")
        return self.state

    def _gone(self) -> None:
        self.state = {"held": "lost", "waiting": "refused"}.get(self.state, self.state)  # type: ignore[assignment]  # of the literals

    def release(self) -> None:
        """Let the partner go, and wait a little for its clean-up; the end of the program frees it in any case."""
        _say(self._to, "release")
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):
            self._child.stdin.close()
        try:
            self._child.wait(self._lease.expires)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        assert self._child.stdout is not None
        self._child.stdout.close()
