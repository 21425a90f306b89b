"""A reference server beside this process, which does not outlive it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec

from sparkwright.bench.load.reference.behaviour import Behaviour, Lateness, Listening
from sparkwright.bench.server import openai_schema
from sparkwright.bench.server.openai_schema import ServerInvalid
from sparkwright.core import http, process

#: Seconds within which a server must listen, on a machine that does much else.
PATIENCE = 60.0


class Running:
    """
    A server that runs.

    Attributes:
        url: Where it answers. *behaviour*: what it does.
    """

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        command = [sys.executable, "-P", "-m", "sparkwright.bench.load.reference", "--behaviour", msgspec.json.encode(behaviour).decode()]
        # The signal comes when the thread ends that starts it, so start it in one that stays.
        self._process = subprocess.Popen(process.wrap_with_limits(command, by=signal.SIGKILL), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        try:
            self.url = self._listening()
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it is there."""
        return self._process.poll() is None

    def lateness(self) -> Lateness:
        """Return how late it was since this was last asked; raise `ServerInvalid` where it is gone."""
        try:
            reply = http.request("GET", f"{self.url}/lateness", seconds=30, attempts=1, direct=True)
        except http.HttpFailure as failure:
            raise ServerInvalid("server-unreachable", str(failure)) from None
        return openai_schema.decode(reply.body, Lateness)

    def stop(self) -> None:
        """End it; harmless when repeated."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()

    def _listening(self) -> str:
        """Return the address that it prints."""
        assert self._process.stdout is not None
        until, line = time.monotonic() + PATIENCE, b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))
            piece = os.read(self._process.stdout.fileno(), 4096) if ready else b""
            if not piece:
                raise RuntimeError(f"the reference server did not start within {PATIENCE:g} s, or ended: {self._process.poll()}")
            line += piece
        return msgspec.json.decode(line, type=Listening).url


@contextlib.contextmanager
def started(behaviour: Behaviour) -> Iterator[Running]:
    """Yield a server with *behaviour* that runs in the block."""
    server = Running(behaviour)
    try:
        yield server
    finally:
        server.stop()
