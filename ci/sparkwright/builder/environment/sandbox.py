"""
Where build programs run: without a network, and in folders that have the same names on every machine.

A program that is in the lock by hash can still ask for one that is not; here it cannot, and what it asked for is named. Since the names
of the folders are the same everywhere, so are the bytes that compilers derive from them, and what one checkout compiled serves another.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from sparkwright.builder.errors import BuildError
from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError

#: namespace: its own network, mounts and processes · container: the engine gave it no network · none: nothing holds a program back.
Kind = Literal["namespace", "container", "none"]
#: An empty folder of every Linux system (Filesystem Hierarchy Standard 3.0, 4.9), hidden in the build's own view alone.
INSIDE = Path("/usr/local/src")
#: Set by `sparkwright build --container` for the program that it starts inside.
VARIABLE = "SPARKWRIGHT_ISOLATION"

#: What git, curl, pip and CMake print of a host that they cannot reach.
_WANTED = re.compile(r"(?:Could not resolve host:? |unable to access '|Failed to connect to |Could not connect to server: )([^\s']+)")


class Room(msgspec.Struct, frozen=True):
    """
    A view of the file system and the network.

    Attributes:
        kind: How far it is apart.
        places: Folder → where programs in the room see it; empty where they see all as it is.
    """

    kind: Kind
    places: dict[Path, Path] = {}

    def inside(self, path: Path) -> Path:
        """Return where programs in the room see *path*."""
        for folder, place in self.places.items():
            if path.is_relative_to(folder):
                return place / path.relative_to(folder)
        return path

    def translated(self, text: str) -> str:
        """Return *text* with every folder that has a place written as that place."""
        for folder, place in self.places.items():
            text = text.replace(str(folder), str(place))
        return text

    def command(
        self, command: Sequence[str | os.PathLike[str]], witness: Path, *, network: bool = False
    ) -> list[str]:
        """Return the command line that runs *command* in the room and writes to *witness* what it asked the network for."""
        spec = {
            "inside": str(INSIDE), "binds": {str(folder): str(place) for folder, place in self.places.items()},
            "loopback": self.kind == "namespace" and not network, "witness": str(witness),
        }  # fmt: skip
        inner = [sys.executable, "-IS", str(Path(__file__).parent / "isolate.py"), msgspec.json.encode(spec).decode()]
        return [*(_unshare(network=network) if self.kind == "namespace" else ()), *inner, *(os.fspath(part) for part in command)]

    def run(
        self, command: Sequence[str | os.PathLike[str]], *, log: Path, env: Mapping[str, str], network: bool = False, **options: Any
    ) -> None:
        """
        Run *command* in the room as `process.run` does.

        Args:
            network: Leave it the network, for a compiler cache on another host. The variables of a proxy
                still name the one that refuses everything.

        Raises:
            tool-missing: There is no such program.
            build-downloads: The program tried to reach a host, whether or not it minded that it could not.
        """
        with tempfile.TemporaryDirectory(prefix="sparkwright-") as folder:
            witness = Path(folder, "witness")
            # unshare(1) heeds no other signal; the end of its child is the end of all in the room.
            end_by = signal.SIGKILL if self.kind == "namespace" else signal.SIGTERM
            try:
                process.run(self.command(command, witness, network=network), shown=command, log=log, env=env, end_by=end_by, **options)
            except (CommandError, BuildError) as error:
                if error.reference == "tool-missing":
                    raise
                if witness.with_name("witness.missing").exists():
                    raise CommandError("tool-missing", f"{os.fspath(command[0])} is not installed.") from error
                _raise_for_downloads(witness, log, error)
                raise
            _raise_for_downloads(witness, log, None)


def _raise_for_downloads(witness: Path, log: Path, error: CommandError | BuildError | None) -> None:
    seen = witness.read_text("utf-8", "replace").splitlines() if witness.exists() else []
    # A program that needs no proxy, or has its own idea of one, is seen by its words alone; only a failure is judged by words.
    said = {match[1] for match in _WANTED.finditer(log.read_text("utf-8", "replace"))} if error else set()
    wanted = list(dict.fromkeys([*seen, *sorted(said)]))
    if wanted:
        text = log.read_text("utf-8", "replace").splitlines()
        hosts = {re.sub(r"^\w+ |^\w+://|:\d+$|/.*$", "", line) for line in wanted}
        # The first line is the command itself.
        lines = [line.strip() for line in text[1:] if any(host and host in line for host in hosts)]
        details = [*(f"asked for: {line}" for line in wanted), *dict.fromkeys(lines[:6]), f"full log: {log}"]
        raise BuildError(
            "build-downloads", f"The build tried to download from {_named(wanted)}.", details=details, data={"wanted": wanted}
        ) from error


def _named(wanted: Sequence[str]) -> str:
    return wanted[0].removeprefix("CONNECT ") + (f" and {len(wanted) - 1} more" if len(wanted) > 1 else "")


def room(places: Mapping[Path, str], *, needed: bool = False) -> Room:
    """
    Return the best room that this machine offers.

    Args:
        places: Folder → its name below `INSIDE`.
        needed: The build is worth nothing with a network.

    Raises:
        isolation-missing: It is needed, and this machine offers none.
    """
    if os.environ.get(VARIABLE) == "container" and _only_loopback():
        return Room("container")
    refusal = _refusal()
    fixed = {folder.absolute(): INSIDE / name for folder, name in places.items()}
    if refusal is None:
        # A store below the folder that gets hidden would vanish for the launcher and the caches.
        hidden = any(folder.is_relative_to(INSIDE) for folder in (*fixed, Path(sys.executable), Path(__file__).absolute()))
        return Room("namespace", {} if hidden else fixed)
    if needed:
        raise BuildError("isolation-missing", "This machine lets no build run without a network.", details=[refusal])
    _warn(refusal)
    return Room("none")


@functools.cache
def _warn(refusal: str) -> None:
    console.warn(f"builds run with a network here, in folders of this machine's names: {refusal}")


def _unshare(*, network: bool = False) -> list[str]:
    # As root of a user namespace where the user is not root; the files that it makes still belong to the user.
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *user, *([] if network else ["--net"]), "--mount", "--pid", "--fork", "--kill-child"]


@functools.cache
def _refusal() -> str | None:
    """Return why new namespaces cannot be had here, or None where they can."""
    script = "import ctypes; raise SystemExit(ctypes.CDLL(None).mount(b'tmpfs', b'/usr/local/src', b'tmpfs', 0, None) and 1)"
    command = [*_unshare(), sys.executable, "-IS", "-c", script]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr.strip() or f"{INSIDE} cannot be laid over")


def _only_loopback() -> bool:
    # The kernel is asked: /sys may not be mounted, and shows the devices of the network that it was mounted in.
    try:
        return [name for _, name in socket.if_nameindex()] == ["lo"]
    except OSError:
        return False
