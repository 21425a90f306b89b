"""
One program in a container: without a network or rights, as the caller's user, and gone when the run that started it is.

Every container carries the name of its run and of the process that owns it. What a killed run left behind is removed by the next.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sparkwright.builder.container_engine import Engine, undisturbed
from sparkwright.builder.environment.sandbox import VARIABLE
from sparkwright.core.console import console

if TYPE_CHECKING:
    from docker.models.containers import Container

#: Label that holds the run's id, and the one that says which process owns the container.
LABEL, OWNER = "sparkwright", "sparkwright.owner"
#: Processes and threads of a build; ninja starts a few per core, and a build that starts thousands does so by mistake.
PROCESSES = 4096
#: Seconds that an interrupted program has to end by itself, and so to keep what it learned.
GRACE = 10


class Folder(msgspec.Struct, frozen=True):
    """A folder of this machine, laid over *target* inside; what is written there stays only where it is *writable*."""

    source: Path
    target: Path
    writable: bool = False


class Ended(msgspec.Struct, frozen=True):
    """How a program ended: its exit status, and whether the kernel killed something for want of memory."""

    status: int
    out_of_memory: bool


def owner() -> str:
    """Return what this process is known by on this machine, for ever: boot, process namespace, process id and its start."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}/{os.getpid()}/{_started(os.getpid())}"


def is_gone(named: str) -> bool:
    """Is the process *named* so (`owner`) known to run no more? One in another process namespace cannot be known of."""
    boot, namespace, number, started = [*named.split("/"), "", "", ""][:4]
    mine = owner().split("/")
    if boot != mine[0]:
        return True
    if namespace != mine[1] or not number.isdigit():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return _started(int(number)) not in ("", started)


def _started(process: int) -> str:
    """Return the start of *process* in clock ticks after boot (proc_pid_stat(5), field 22); empty where it cannot be seen."""
    try:
        return Path(f"/proc/{process}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[19]
    except OSError:
        return ""


def sweep(engine: Engine) -> list[str]:
    """Remove the containers of runs that are gone, and return their names."""
    from docker.errors import APIError

    removed = []
    with engine.answering():
        for left in engine.client.containers.list(all=True, filters={"label": OWNER}, ignore_removed=True):
            if is_gone(left.labels.get(OWNER, "")):
                # Another run may be removing it at this moment.
                with contextlib.suppress(APIError):
                    left.remove(force=True)
                removed.append(str(left.name))
    if removed:
        console.note(f"removed the container of a run that was killed: {', '.join(removed)}")
    return removed


def run(
    engine: Engine,
    image: str,
    command: Sequence[str],
    *,
    folders: Iterable[Folder] = (),
    variables: Mapping[str, str] | None = None,
    memory: int = 0,
    init: bool = True,
    further: Mapping[str, Any] | None = None,
    after: Callable[[Container, int], None] | None = None,
    on_out: Callable[[str], None] = console.result,
    on_err: Callable[[str], None] = console.note,
) -> Ended:
    """
    Run *command* in a container of *image* until it ends, its lines given to *on_out* and *on_err* as they come.

    Args:
        folders: What it sees of this machine's files; all else is the image's and cannot be written.
        memory: Limit in bytes, swap included; 0 sets none.
        init: Put a process in front that passes signals on and reaps what programs leave.
        further: Options of the SDK in place of those that every container here has.
        after: Called with the container and its status once it has ended, while it is still there.

    Raises:
        engine-unreachable, engine-refused, emulation-missing, disk-full: See there.
    """
    made: Container | None = None
    options = {**_options(engine, folders, variables or {}, memory, init), **(further or {})}
    with engine.answering():
        try:
            with undisturbed():
                made = engine.client.containers.create(image, list(command), **options)
            heard = engine.client.api.attach(str(made.id), stdout=True, stderr=True, stream=True, demux=True)
            made.start()
            _listen(heard, on_out, on_err)
            status = int(made.wait(timeout=None)["StatusCode"])
            made.reload()
            if after:
                after(made, status)
            return Ended(status, bool(made.attrs["State"].get("OOMKilled")))
        except KeyboardInterrupt:
            _end(made)
            raise
        finally:
            _remove(made)


def _options(engine: Engine, folders: Iterable[Folder], variables: Mapping[str, str], memory: int, init: bool) -> dict[str, Any]:
    from docker.types import LogConfig, Mount

    run_id = secrets.token_hex(8)
    user, namespace = engine.user
    return {
        "name": f"sparkwright-{run_id}",
        "labels": {LABEL: run_id, OWNER: owner()},
        "user": user,
        "userns_mode": namespace or None,
        "network_mode": "none",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "read_only": True,
        "tmpfs": {"/tmp": "rw,exec,nosuid,nodev,mode=1777"},  # noqa: S108  the container's own
        "mounts": [Mount(str(one.target), str(one.source.resolve()), "bind", read_only=not one.writable) for one in folders],
        "environment": {"HOME": "/tmp", "LC_ALL": "C.UTF-8", VARIABLE: "container", **variables},  # noqa: S108  see above
        "mem_limit": memory or None,
        "memswap_limit": memory or None,
        "pids_limit": PROCESSES,
        "init": init,
        # SIGINT lets the program keep what it has learned so far; SIGTERM would end Python at once.
        "stop_signal": "SIGINT",
        # What it says is read as it comes; a copy on the engine's disk would serve nobody.
        "log_config": LogConfig(type="none"),
    }


def _listen(heard: Iterable[tuple[bytes | None, bytes | None]], on_out: Callable[[str], None], on_err: Callable[[str], None]) -> None:
    out, err = _Lines(on_out), _Lines(on_err)
    for said, complained in heard:
        out.take(said or b"")
        err.take(complained or b"")
    out.end()
    err.end()


class _Lines:
    """Turns pieces of a stream into lines."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line, self._rest = on_line, ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
        for line in lines:
            self._on_line(line)

    def end(self) -> None:
        if self._rest:
            self._on_line(self._rest)


def _end(made: Container | None) -> None:
    """Ask the program to end, and give it a moment; a second interruption cuts that short."""
    from docker.errors import APIError

    if made is not None:
        with contextlib.suppress(APIError):
            made.stop(timeout=GRACE)


def _remove(made: Container | None) -> None:
    from docker.errors import APIError

    if made is not None:
        # One that somebody else removed is as good.
        with undisturbed(), contextlib.suppress(APIError):
            made.remove(force=True)
