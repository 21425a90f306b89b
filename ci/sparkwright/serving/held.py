"""
What runs on this machine: one server at a time, which every `serve` of this user sees.

The lock is the kernel's, on a descriptor that the server's keepers inherit: it is free when nothing of the server is left, and no sooner,
however `serve` ended. (`filelock` hides its descriptor, so it cannot be inherited.) The record beside it says what runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from sparkwright.bench.server.subreaper import KILL_SECONDS
from sparkwright.core.console import console
from sparkwright.core.errors import StoreError
from sparkwright.core.store import translate_disk_full
from sparkwright.serving.errors import ServeError
from sparkwright.serving.wish import Role

Phase = Literal["waiting", "loading", "serving", "stopping", "joined"]

LARGEST = 1 << 20
#: Seconds that a server whose `serve` was killed may take to be gone.
ENDING = 20.0 + KILL_SECONDS


class Running(msgspec.Struct, frozen=True):
    """
    What runs.

    Attributes:
        pid, born: Of `serve`; *born* tells that process from a later one of the same number.
        since: Seconds of the epoch. *phase*: ``waiting`` for other machines, ``joined`` as one of them.
        recipe, name, model, python, version, wheel, release, log: What is served, with what, and where vLLM writes.
        url: Where it is asked from this machine.
        role, nodes, head: Its part in a cluster of so many machines.
        floor: Megabytes that stay free.
    """

    pid: int
    born: int
    since: float
    phase: Phase
    recipe: str
    name: str
    model: str
    python: str
    version: str
    wheel: str
    release: str
    log: str
    url: str
    role: Role = ""
    nodes: int = 1
    head: str = ""

    @property
    def alive(self) -> bool:
        """Whether that process is there."""
        return born(self.pid) == self.born


def born(pid: int) -> int:
    """Return when the process *pid* was started, in the kernel's ticks since it booted (no clock that somebody sets); 0 without one."""
    try:
        # The name in the second field may hold blanks and brackets (proc(5)).
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(") ")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def folder() -> Path:
    """Return where lock and record lie: ``SPARKWRIGHT_STATE_DIR``, else the platform's folder."""
    if named := os.environ.get("SPARKWRIGHT_STATE_DIR"):
        return Path(named) / "serving"
    import platformdirs

    return platformdirs.user_state_path("sparkwright", appauthor=False) / "serving"


def read() -> Running | None:
    """
    Return what was recorded last; None where nothing is. What it says of the process may no longer be true (`Running.alive`).

    Raises:
        state-unusable: The record cannot be read.
    """
    path = folder() / "running.json"
    try:
        with path.open("rb") as stream:
            return msgspec.json.decode(stream.read(LARGEST), type=Running)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreError(
            "state-unusable", f"{path} cannot be read.", details=[str(error)], todo=f"Remove {path}; nothing else is in it."
        ) from error


class Held:
    """The lock of this machine, held; *descriptor* is inherited by what must be gone before it is free."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def write(self, record: Running) -> None:
        """Record what runs, whole or not at all."""
        path = folder() / "running.json"
        temporary = path.with_suffix(".new")
        with _usable():
            temporary.write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
            os.replace(temporary, path)

    def clear(self) -> None:
        """Record that nothing runs."""
        with contextlib.suppress(OSError):
            (folder() / "running.json").unlink(missing_ok=True)


@contextlib.contextmanager
def _usable() -> Iterator[None]:
    place = folder()
    try:
        with translate_disk_full(place):
            yield
    except OSError as error:
        raise StoreError("state-unusable", f"{place} cannot be used.", details=[str(error)]) from error


@contextlib.contextmanager
def held() -> Iterator[Held]:
    """
    Hold this machine for one server while the block runs.

    Raises:
        serve-running: Another one does. state-unusable: The state folder cannot be written.
    """
    with _usable():
        folder().mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder() / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _take(descriptor)
        holder = Held(descriptor)
        try:
            yield holder
        finally:
            holder.clear()
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> None:
    until, said = time.monotonic() + ENDING, False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            other = read()
            if other is not None and other.alive:
                raise _refused(other) from None
            # Either it has just begun and not said so yet, or its `serve` was killed and its keeper is still at work.
            if time.monotonic() > until:
                raise ServeError(
                    "serve-running", "Something of a server that was started here still runs.", details=[f"lock: {folder() / 'lock'}"]
                ) from None
        if not said:
            console.note("what is left of the last server is ending; waiting for it")
            said = True
        time.sleep(0.1)


def _refused(other: Running) -> ServeError:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(other.since))
    details = [f"pid {other.pid}, since {since}, {other.phase}", f"recipe: {other.recipe or 'none'}; model: {other.model or 'none'}"]
    details += [f"address: {other.url}"] if other.url else [f"a machine of the cluster at {other.head}"]
    data = {"pid": other.pid, "recipe": other.recipe, "url": other.url, "since": since, "phase": other.phase}
    return ServeError("serve-running", f"{other.name or other.role} is being served by process {other.pid}.", details=details, data=data)
