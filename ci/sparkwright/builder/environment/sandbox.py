"""
Sandbox of build programs: no network, and folders that have the same names on every machine.

A program that is locked by hash can still download one that is not; in the sandbox it cannot, and
the attempt is reported. Since the folder names are the same everywhere, so are the bytes that
compilers derive from them, and one checkout can use what another compiled.
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

#: namespace: its own network, mounts and processes · container: the engine gave it no network ·
#: none: no isolation.
Kind = Literal["namespace", "container", "none"]
#: An empty folder of every Linux system (Filesystem Hierarchy Standard 3.0, 4.9), hidden in the
#: sandbox alone.
INSIDE = Path("/usr/local/src")
#: Set by `sparkwright build --container` for the program that it starts inside.
VARIABLE = "SPARKWRIGHT_ISOLATION"

_SCRIPT = Path(__file__).parents[1] / "_scripts" / "isolate.py"
#: Messages of git, curl, pip and CMake about a host that they cannot reach.
_UNREACHED = re.compile(
    r"(?:Could not resolve host:? |unable to access '|Failed to connect to |Could not connect to "
    r"server: )([^\s']+)"
)


class Sandbox(msgspec.Struct, frozen=True):
    """
    A view of the file system and the network.

    Attributes:
        kind: Its means of isolation.
        mounts: Folder → its path in the sandbox; empty if paths are the same there.
    """

    kind: Kind
    mounts: dict[Path, Path] = {}

    @classmethod
    def create(cls, mounts: Mapping[Path, str], *, needed: bool = False) -> Sandbox:
        """
        Return the strictest sandbox that this machine offers.

        Args:
            mounts: Folder → its name below `INSIDE`.
            needed: Refuse to build without isolation.

        Raises:
            isolation-missing: It is needed, and this machine offers none.
        """
        if os.environ.get(VARIABLE) == "container" and _only_loopback():
            return cls("container")
        refusal = _refusal()
        paths = {folder.absolute(): INSIDE / name for folder, name in mounts.items()}
        if refusal is None:
            # A store below the folder that gets hidden would vanish for the launcher and the
            # caches.
            hidden = any(
                path.is_relative_to(INSIDE)
                for path in (*paths, Path(sys.executable), _SCRIPT.absolute())
            )
            return cls("namespace", {} if hidden else paths)
        if needed:
            what = "This machine lets no build run without a network."
            raise BuildError("isolation-missing", what, details=[refusal])
        _warn(refusal)
        return cls("none")

    def sandbox_path(self, path: Path) -> Path:
        """Return the path of *path* in the sandbox."""
        for folder, mount in self.mounts.items():
            if path.is_relative_to(folder):
                return mount / path.relative_to(folder)
        return path

    def translate(self, text: str) -> str:
        """Return *text* with every mounted folder replaced by its path in the sandbox."""
        for folder, mount in self.mounts.items():
            text = text.replace(str(folder), str(mount))
        return text

    def command(
        self, command: Sequence[str | os.PathLike[str]], attempts: Path, *, network: bool = False
    ) -> list[str]:
        """
        Return the command line that runs *command* in the sandbox and writes refused requests to
        *attempts*.
        """
        spec = {
            "inside": str(INSIDE),
            "binds": {str(folder): str(mount) for folder, mount in self.mounts.items()},
            "loopback": self.kind == "namespace" and not network,
            "witness": str(attempts),
        }
        unshare = _unshare(network=network) if self.kind == "namespace" else []
        script = [sys.executable, "-IS", str(_SCRIPT), msgspec.json.encode(spec).decode()]
        return [*unshare, *script, *(os.fspath(part) for part in command)]

    def run(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        log: Path,
        env: Mapping[str, str],
        network: bool = False,
        **options: Any,
    ) -> None:
        """
        Run *command* in the sandbox as `process.run` does.

        Args:
            network: Leave it the network, for a compiler cache on another host. The variables of a
                proxy
                still name the one that refuses everything.

        Raises:
            tool-missing: The program is not installed.
            build-downloads: The program tried to reach a host, even if it succeeded without it.
        """
        with tempfile.TemporaryDirectory(prefix="sparkwright-") as folder:
            attempts = Path(folder, "witness")
            # unshare(1) heeds no other signal; the end of its child ends every process in the
            # sandbox.
            end_by = signal.SIGKILL if self.kind == "namespace" else signal.SIGTERM
            full = self.command(command, attempts, network=network)
            try:
                process.run(full, shown=command, log=log, env=env, end_by=end_by, **options)
            except (CommandError, BuildError) as error:
                if error.reference == "tool-missing":
                    raise
                if attempts.with_name("witness.missing").exists():
                    raise CommandError(
                        "tool-missing", f"{os.fspath(command[0])} is not installed."
                    ) from error
                _raise_for_downloads(attempts, log, error)
                raise
            _raise_for_downloads(attempts, log, None)


def _raise_for_downloads(
    attempts: Path, log: Path, error: CommandError | BuildError | None
) -> None:
    requests = attempts.read_text("utf-8", "replace").splitlines() if attempts.exists() else []
    text = log.read_text("utf-8", "replace")
    # Only the output shows an attempt past the proxy, and only a failed program is judged by its
    # output.
    hosts_in_output = {match[1] for match in _UNREACHED.finditer(text)} if error else set()
    wanted = list(dict.fromkeys([*requests, *sorted(hosts_in_output)]))
    if wanted:
        hosts = {re.sub(r"^\w+ |^\w+://|:\d+$|/.*$", "", line) for line in wanted}
        # The first line is the command itself.
        lines = [
            line.strip()
            for line in text.splitlines()[1:]
            if any(host and host in line for host in hosts)
        ]
        details = [
            *(f"asked for: {line}" for line in wanted),
            *dict.fromkeys(lines[:6]),
            f"full log: {log}",
        ]
        others = f" and {len(wanted) - 1} more" if len(wanted) > 1 else ""
        what = f"The build tried to download from {wanted[0].removeprefix('CONNECT ')}{others}."
        raise BuildError(
            "build-downloads", what, details=details, data={"wanted": wanted}
        ) from error


@functools.cache
def _warn(refusal: str) -> None:
    console.warn(f"builds run with a network here, in folders of this machine's names: {refusal}")


def _unshare(*, network: bool = False) -> list[str]:
    # As root of a user namespace if the user is not root; the files that it makes still belong to
    # the user.
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    return [
        "unshare",
        *user,
        *([] if network else ["--net"]),
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
    ]


@functools.cache
def _refusal() -> str | None:
    """Return the reason why this machine offers no new namespaces, None if it does."""
    script = (
        "import ctypes; raise SystemExit(ctypes.CDLL(None).mount(b'tmpfs', "
        "b'/usr/local/src', b'tmpfs', 0, None) and 1)"
    )
    command = [*_unshare(), sys.executable, "-IS", "-c", script]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (
        None
        if result.returncode == 0
        else (result.stderr.strip() or f"{INSIDE} cannot be mounted over")
    )


def _only_loopback() -> bool:
    # From the kernel: /sys may not be mounted, and shows the devices of the network that it was
    # mounted in.
    try:
        return [name for _, name in socket.if_nameindex()] == ["lo"]
    except OSError:
        return False
