"""
The container engine of this machine: found, or why it cannot be used.

It is spoken to through the docker SDK. The engine lays folders of ours into containers, so it has to be on this machine: its
address is a socket in the file system.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from sparkwright.errors import (
    DiskFull,
    EmulationMissing,
    EngineForbidden,
    EngineMissing,
    EngineRefused,
    EngineUnreachable,
    SparkwrightError,
)

if TYPE_CHECKING:
    from docker import DockerClient

#: Seconds that an engine has for one answer; those that take longer by nature (a build, a wait) have no limit.
PATIENCE = 60
SOCKET = "/var/run/docker.sock"


class Engine:
    """
    An engine that answers.

    Args:
        client: The SDK's client, connected.
    """

    def __init__(self, client: DockerClient) -> None:
        self.client = client

    @cached_property
    def platform(self) -> str:
        """What the engine runs without emulation: ``linux/amd64`` or ``linux/arm64``."""
        return f"linux/{self.client.version()['Arch']}"

    @cached_property
    def root(self) -> str:
        """Where the engine keeps images and containers."""
        return str(self.client.info().get("DockerRootDir", ""))

    @cached_property
    def user(self) -> tuple[str, str]:
        """The user that stands for the caller inside a container, as ``uid:gid``, and the user namespace mode that it needs."""
        options = " ".join(self.client.info().get("SecurityOptions") or ())
        if "name=rootless" in options:
            # A rootless engine's root is the caller; every other user inside would be nobody outside.
            return "0:0", ""
        return f"{os.getuid()}:{os.getgid()}", "host" if "name=userns" in options else ""

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """
        Say in our words what the SDK raises inside the block.

        Raises:
            EngineUnreachable: The engine went away.
            DiskFull, EmulationMissing, EngineRefused: The engine answered with an error.
        """
        import requests
        import urllib3
        from docker.errors import APIError, DockerException

        try:
            yield
        except BrokenPipeError:
            # Of our own output, when its reader has gone; the SDK never lets its own come out bare.
            raise
        except APIError as error:
            raise self.meaning(str(error.explanation or error)) from error
        except (requests.RequestException, urllib3.exceptions.HTTPError, DockerException, ConnectionError) as error:
            raise EngineUnreachable("The container engine went away.", details=[str(error)]) from error

    def meaning(self, text: str, otherwise: type[SparkwrightError] = EngineRefused, what: str = "") -> SparkwrightError:
        """Return the failure that the engine's words *text* tell of; one of type *otherwise*, where they tell of none that we know."""
        lines = text.strip().splitlines()[-25:]
        if "no space left on device" in text.lower():
            todo = "Make room there: docker system df says what is kept, docker system prune removes what nothing uses."
            return DiskFull(f"The container engine has no room left under {self.root}.", details=lines[-3:], todo=todo)
        if "exec format error" in text.lower():
            return EmulationMissing("This machine cannot run the programs of the image.", details=lines[-3:])
        return otherwise(what or "The container engine refused.", details=lines)


def connect() -> Engine:
    """
    Return the engine of this machine: that of ``DOCKER_HOST``, else the system's, else the user's own.

    Raises:
        EngineMissing, EngineForbidden, EngineUnreachable: See there.
    """
    import docker
    import requests
    from docker.errors import DockerException

    address = _address()
    _knock(address)
    try:
        return Engine(docker.DockerClient(base_url=f"unix://{address}", version="auto", timeout=PATIENCE))
    except (DockerException, requests.RequestException) as error:
        raise EngineUnreachable(f"The container engine at {address} does not answer.", details=[str(error)]) from error


def _address() -> str:
    if named := os.environ.get("DOCKER_HOST"):
        if not named.startswith("unix://"):
            what = f"DOCKER_HOST names an engine that is not on this machine: {named}."
            raise EngineUnreachable(what, todo="Unset it, or name a socket: unix:///var/run/docker.sock. Builds lend the engine folders.")
        return named.removeprefix("unix://")
    own = Path(os.environ.get("XDG_RUNTIME_DIR", "/nonexistent"), "docker.sock")
    return str(own) if own.exists() and not Path(SOCKET).exists() else SOCKET


def _knock(address: str) -> None:
    """Open the socket at *address* once: the kernel says why it cannot be opened, the SDK only that."""
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.settimeout(PATIENCE)
            one.connect(address)
    except (FileNotFoundError, NotADirectoryError) as error:
        installed = shutil.which("dockerd")
        todo = "Start the engine: sudo systemctl start docker." if installed else ""
        what = f"No container engine listens: there is no {address}{', although dockerd is installed' if installed else ''}."
        raise EngineMissing(what, todo=todo) from error
    except PermissionError as error:
        raise EngineForbidden(f"This user may not open {address}.", details=[_owner(address)]) from error
    except OSError as error:
        raise EngineUnreachable(f"The container engine at {address} does not answer.", details=[str(error)]) from error


def _owner(address: str) -> str:
    try:
        place = Path(address)
        return f"it belongs to {place.owner()}, group {place.group()}"
    except (OSError, KeyError) as error:
        return str(error)


@contextlib.contextmanager
def termination_interrupts() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that what it has to remove is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back while the block runs: between the engine's answer and our knowing of it nothing may come."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []
    # What whoever started us wants ignored (nohup, a job in the background of a script) stays ignored.
    heeded = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, _frame: seen.append(number)) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if seen:
        raise KeyboardInterrupt
