"""
The process of a vLLM server that a gate starts, with a bounded log.

It is watched while it runs, and ends with the process that started it (`subreaper`). It may run as
another user, who can change neither the caller's files nor its memory.
"""

import contextlib
import functools
import os
import pwd
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

from sparkwright.bench.machine.watchdog import watch_memory
from sparkwright.bench.server import peers, server_log
from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.bench.server.launch import LaunchPlan
from sparkwright.bench.server.subreaper import KILL_SECONDS
from sparkwright.core.console import console
from sparkwright.core.process import wrap_with_limits

#: The script that supervises a command; neither variables of the command nor its folder change
#: what it imports.
SUPERVISOR = (sys.executable, "-E", "-P", str(Path(__file__).with_name("subreaper.py")))


class Server:
    """
    A server and all its descendants, which end when this process does. Its ``with`` block is
    entered when the server is ready or has failed.

    Raises:
        environment-unusable: There is no such Python.
        variable-refused: The installed vLLM does not read a variable of *plan*.
        peer-missing, peers-differ, link-failed, link-slow: As `peers.gather`.

    Attributes:
        plan: How it was started.
        log: The file with its output.
        url: Its address.
        failure: Why it does not run as it should, in a sentence; empty while it does.
        reason: ``server-late``, ``server-died``, ``memory-low``, ``kernel-no-memory``,
            ``log-unreadable``, or the reason given to `end`.
    """

    def __init__(self, plan: LaunchPlan, log: Path) -> None:
        plan.check()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        self.plan, self.log, self.url = plan, log, f"http://127.0.0.1:{port}"
        self.failure, self.reason = "", ""
        self._stopped = threading.Event()
        environment = plan.environment()
        self._links = list[socket.socket]()
        if plan.machines:
            self._links, _ = peers.gather(
                plan.machines, plan.python, plan.model, plan.flags, environment
            )
        limited = wrap_with_limits(plan.command(port), path=environment.get("PATH"))
        command = [*SUPERVISOR, str(plan.grace), *limited]
        if plan.user:
            command = _as_user(plan.user, command, environment)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,
            )
        if plan.kept_free:
            watched = plan.kept_free, functools.partial(self.end, order=b"k"), self._stopped
            threading.Thread(target=watch_memory, args=watched, daemon=True).start()

    def __enter__(self) -> Self:
        begin = time.monotonic()
        try:
            with console.progress("start the server", 0) as progress:
                while self.guard() and not self._answers():
                    seconds = time.monotonic() - begin
                    if seconds > self.plan.timeout:
                        self.end("server-late", f"it does not answer after {seconds:.0f} s")
                    progress.update(round(seconds), "s")
                    time.sleep(0.5)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def client(self, *, deadline: float = 900.0) -> Client:
        """Return a client; the first request for logprobs may compile for minutes."""
        return Client(self.url, self.plan.name, deadline=deadline)

    def _answers(self) -> bool:
        with contextlib.suppress(ServerInvalid):
            return bool(self.client(deadline=10).model())
        return False

    def processes(self) -> list[psutil.Process]:
        """Return its processes, whatever session they are in."""
        try:
            supervisor = psutil.Process(self._process.pid)
            while supervisor.name() == "sudo":
                supervisor = supervisor.children()[0]
            return supervisor.children(recursive=True)
        except (psutil.NoSuchProcess, IndexError):
            return []

    def guard(self) -> bool:
        """
        Return whether it runs as it should; call this repeatedly.

        It is ended if its log becomes too large.
        """
        if not self.failure and self.log.stat().st_size > server_log.LARGEST:
            self.end("log-unreadable", f"its log has more than {server_log.LARGEST} bytes")
        if not self.failure and self._links and select.select(self._links, [], [], 0)[0]:
            self.end("server-died", "another machine that serves with it has ended or is lost")
        if not self.failure and not self.running:
            self.end("server-died", f"it ended by itself, with status {self._process.returncode}")
        return not self.failure

    def end(self, reason: str, failure: str, order: bytes = b"t") -> None:
        """
        End it for *reason*, as `stop` does, from any thread; may be repeated, the first reason
        counts.
        """
        # The cause is stored first, so that it is there when another thread sees the server end.
        self.failure, self.reason = self.failure or failure, self.reason or reason
        self.stop(order)

    def stop(self, order: bytes = b"t") -> None:
        """Send *order* to the supervisor, and wait until the server is gone; may be repeated."""
        supervisor = self._process
        assert supervisor.stdin
        with contextlib.suppress(OSError, ValueError):
            supervisor.stdin.write(order)
        try:
            supervisor.wait(timeout=self.plan.grace + KILL_SECONDS + 20)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            with contextlib.suppress(OSError, ValueError):
                supervisor.stdin.write(b"k")
            supervisor.stdin.close()
            supervisor.wait()
        # The other machines' guards see the connection close, and end their servers.
        for link in self._links:
            link.close()
        self._links = []
        self._stopped.set()
        self.failure = self.failure or "it was stopped"


def _as_user(user: str, command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """
    Return the command line that runs *command* as *user* with exactly *environment*.

    Root changes the user by util-linux's setpriv, without any capability; others by sudo, which
    must not ask for a password.
    """
    words = ["env", "-i", *(f"{name}={value}" for name, value in environment.items()), *command]
    if os.geteuid():
        return ["sudo", "-n", "-u", user, "--", *words]
    account = pwd.getpwnam(user)
    return [
        "setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--init-groups",
        "--bounding-set=-all", "--no-new-privs", "--", *words,
    ]  # fmt: skip
