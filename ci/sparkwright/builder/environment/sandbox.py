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
import shutil
import signal
import socket
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
        if refusal is None:
            paths = {folder.absolute(): INSIDE / name for folder, name in mounts.items()}
            # A store below the folder that gets hidden would vanish for the launcher and caches.
            used = (*paths, Path(sys.executable), _SCRIPT.absolute())
            hidden = any(path.is_relative_to(INSIDE) for path in used)
            return cls("namespace", {} if hidden else paths)
        if needed:
            what = "This machine lets no build run without a network."
            raise BuildError("isolation-missing", what, details=[refusal])
        _warn(refusal)
        return cls("none")

    def sandbox_path(self, path: Path) -> Path:
        """Return the path of *path* in the sandbox."""
        return Path(self.translate(str(path)))

    def translate(self, text: str) -> str:
        """Return *text* with every mounted folder replaced by its path in the sandbox."""
        for folder, mount in self.mounts.items():
            text = re.sub(rf"{re.escape(str(folder))}(?![\w.-])", str(mount), text)
        return text

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
                proxy still name the one that refuses everything.

        Raises:
            tool-missing: The program is not installed.
            build-downloads: The program tried to reach a host, even if it succeeded without it.
        """
        program = os.fspath(command[0])
        inside = Path(program).is_relative_to(INSIDE)
        if not inside and shutil.which(program, path=env.get("PATH")) is None:
            raise CommandError("tool-missing", f"{program} is not installed.")
        with tempfile.TemporaryDirectory(prefix="sparkwright-") as folder:
            requests = Path(folder, "requests")
            spec = {
                "inside": str(INSIDE),
                "binds": {str(folder): str(mount) for folder, mount in self.mounts.items()},
                "loopback": self.kind == "namespace" and not network,
                "requests": str(requests),
            }
            script = [sys.executable, "-IS", str(_SCRIPT), msgspec.json.encode(spec).decode()]
            unshare = _unshare(network=network) if self.kind == "namespace" else []
            # unshare(1) heeds no other signal; the end of its child ends every process in the
            # sandbox.
            end_by = signal.SIGKILL if self.kind == "namespace" else signal.SIGTERM
            full = [*unshare, *script, *command]
            try:
                process.run(full, shown=command, log=log, env=env, end_by=end_by, **options)
            except (CommandError, BuildError) as error:
                _raise_for_downloads(requests, log, error)
                raise
            _raise_for_downloads(requests, log, None)


def _raise_for_downloads(
    requests: Path, log: Path, error: CommandError | BuildError | None
) -> None:
    text = log.read_text("utf-8", "replace")
    wanted = requests.read_text("utf-8", "replace").splitlines() if requests.exists() else []
    if error:
        # Only the output shows an attempt past the proxy, and only a failed program is judged by
        # its output.
        wanted += sorted({match[1] for match in _UNREACHED.finditer(text)})
    wanted = list(dict.fromkeys(wanted))
    if not wanted:
        return
    hosts = {re.sub(r"^\w+ |^\w+://|:\d+$|/.*$", "", line) for line in wanted} - {""}
    # The first line is the command itself.
    lines = dict.fromkeys(
        line.strip() for line in text.splitlines()[1:] if any(host in line for host in hosts)
    )
    others = f" and {len(wanted) - 1} more" if len(wanted) > 1 else ""
    raise BuildError(
        "build-downloads",
        f"The build tried to download from {wanted[0].removeprefix('CONNECT ')}{others}.",
        details=[*(f"asked for: {line}" for line in wanted), *list(lines)[:6], f"full log: {log}"],
        data={"wanted": wanted},
    ) from error


@functools.cache
def _warn(refusal: str) -> None:
    console.warn(f"builds run with a network here, in folders of this machine's names: {refusal}")


def _unshare(*, network: bool = False) -> list[str]:
    # As root of a user namespace if the user is not root; the files that it makes still belong to
    # the user.
    options = ["--mount", "--pid", "--fork", "--kill-child"]
    options += [] if network else ["--net"]
    options += [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *options]


@functools.cache
def _refusal() -> str | None:
    """Return the reason why this machine offers no new namespaces, None if it does."""
    command = [*_unshare(), "mount", "-t", "tmpfs", "none", str(INSIDE)]
    try:
        process.output(command, timeout=60)
    except CommandError as error:
        return "; ".join([error.what, *error.details])
    return None


def _only_loopback() -> bool:
    # From the kernel: /sys may not be mounted, and shows the devices of the network that it was
    # mounted in.
    try:
        return [name for _, name in socket.if_nameindex()] == ["lo"]
    except OSError:
        return False
