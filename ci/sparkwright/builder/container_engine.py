"""
Connection to the container engine of this machine, through the docker SDK, and translation of its
errors.

Folders of this machine are mounted into containers, so the engine must be on it: its address is a
socket in the file system.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from sparkwright.builder.errors import ContainerError
from sparkwright.core.errors import Failure, SparkwrightError, StoreError

if TYPE_CHECKING:
    from docker import DockerClient

#: Seconds that an engine has for one answer; those that take longer by nature (a build, a wait)
#: have no limit.
PATIENCE = 60
SOCKET = "/var/run/docker.sock"


class Engine:
    """A container engine, reached by the SDK's connected *client*."""

    def __init__(self, client: DockerClient) -> None:
        self.client = client

    @cached_property
    def platform(self) -> str:
        """Platform that runs without emulation: ``linux/amd64`` or ``linux/arm64``."""
        return f"linux/{self.client.version()['Arch']}"

    @cached_property
    def root(self) -> str:
        """Folder of the engine's images and containers."""
        return str(self.client.info().get("DockerRootDir", ""))

    @cached_property
    def user(self) -> tuple[str, str]:
        """
        User inside a container that is the caller outside (``uid:gid``), and its user namespace
        mode.
        """
        options = " ".join(self.client.info().get("SecurityOptions") or ())
        if "name=rootless" in options:
            # A rootless engine's root is the caller; every other user inside would be nobody
            # outside.
            return "0:0", ""
        return f"{os.getuid()}:{os.getgid()}", "host" if "name=userns" in options else ""

    @contextlib.contextmanager
    def errors_translated(self) -> Iterator[None]:
        """
        Translate the errors that the SDK raises inside the block.

        Raises:
            engine-unreachable: The connection broke.
            disk-full, emulation-missing, engine-refused: The engine answered with an error.
        """
        import requests
        import urllib3
        from docker.errors import APIError, DockerException

        try:
            yield
        except BrokenPipeError:
            # The reader of our own output has gone; the SDK wraps its own errors.
            raise
        except APIError as error:
            raise self.translate_error(str(error.explanation or error)) from error
        except (
            requests.RequestException,
            urllib3.exceptions.HTTPError,
            DockerException,
            ConnectionError,
        ) as error:
            raise ContainerError(
                "engine-unreachable", "The container engine went away.", details=[str(error)]
            ) from error

    def translate_error(
        self,
        text: str,
        otherwise: Failure = partial(ContainerError, "engine-refused"),
        what: str = "",
    ) -> SparkwrightError:
        """
        Return the error that the engine's message *text* means; unless it is a common one,
        `otherwise(what)`.
        """
        lines = text.strip().splitlines()[-25:]
        if "no space left on device" in text.lower():
            what = f"The container engine has no room left under {self.root}."
            todo = (
                "Make room there: docker system df lists what is stored, docker system prune "
                "removes what is unused."
            )
            return StoreError("disk-full", what, details=lines[-3:], todo=todo)
        if "exec format error" in text.lower():
            return ContainerError(
                "emulation-missing",
                "This machine cannot run the programs of the image.",
                details=lines[-3:],
            )
        return otherwise(what or "The container engine refused.", details=lines)


def connect() -> Engine:
    """
    Connect to the engine of this machine: that of ``DOCKER_HOST``, else the system's, else the
    user's own.

    Raises:
        engine-missing: No engine listens.
        engine-forbidden: The user may not open its socket.
        engine-unreachable: It does not answer, or is on another machine.
    """
    import docker
    import requests
    from docker.errors import DockerException

    address = _address()
    _check_socket(address)
    try:
        return Engine(
            docker.DockerClient(base_url=f"unix://{address}", version="auto", timeout=PATIENCE)
        )
    except (DockerException, requests.RequestException) as error:
        raise ContainerError(
            "engine-unreachable",
            f"The container engine at {address} does not answer.",
            details=[str(error)],
        ) from error


def _address() -> str:
    if host := os.environ.get("DOCKER_HOST"):
        if not host.startswith("unix://"):
            what = f"DOCKER_HOST names an engine that is not on this machine: {host}."
            todo = (
                "Unset it, or name a socket: unix:///var/run/docker.sock. Builds mount "
                "folders of this machine."
            )
            raise ContainerError("engine-unreachable", what, todo=todo)
        return host.removeprefix("unix://")
    own = Path(os.environ.get("XDG_RUNTIME_DIR", "/nonexistent"), "docker.sock")
    return str(own) if own.exists() and not Path(SOCKET).exists() else SOCKET


def _check_socket(address: str) -> None:
    """
    Open the socket at *address* once, because the SDK does not report why it cannot be opened.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE)
            connection.connect(address)
    except (FileNotFoundError, NotADirectoryError) as error:
        installed = shutil.which("dockerd")
        todo = "Start the engine: sudo systemctl start docker." if installed else ""
        what = (
            f"No container engine listens: there is no "
            f"{address}{', although dockerd is installed' if installed else ''}."
        )
        raise ContainerError("engine-missing", what, todo=todo) from error
    except PermissionError as error:
        raise ContainerError(
            "engine-forbidden", f"This user may not open {address}.", details=[_owner(address)]
        ) from error
    except OSError as error:
        raise ContainerError(
            "engine-unreachable",
            f"The container engine at {address} does not answer.",
            details=[str(error)],
        ) from error


def _owner(address: str) -> str:
    try:
        path = Path(address)
        return f"it belongs to {path.owner()}, group {path.group()}"
    except (OSError, KeyError) as error:
        return str(error)


@contextlib.contextmanager
def termination_interrupts() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that its cleanup runs."""
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
def defer_signals() -> Iterator[None]:
    """
    Defer SIGINT and SIGTERM to the end of the block, so that no container is created and lost.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    # Signals that are ignored (nohup, a background job of a script) stay ignored.
    handled = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {
        number: signal.signal(number, lambda number, _frame: received.append(number))
        for number in handled
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise KeyboardInterrupt
