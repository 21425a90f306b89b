"""
Sandbox of build programs: no network, and folders that have the same names on every machine.

A program that is locked by hash can still download one that is not; in the sandbox it cannot, and
the attempt is reported. Since the folder names are the same everywhere, so are the bytes that
compilers derive from them, and one checkout can use what another compiled.
"""

import contextlib
import functools
import os
import re
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from sparkwright.builder import BuildError
from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, SparkwrightError

#: namespace: its own network, mounts and processes · none: no isolation.
Kind = Literal["namespace", "none"]
#: An empty folder of every Linux system (Filesystem Hierarchy Standard 3.0, 4.9), hidden in the
#: sandbox alone.
INSIDE = Path("/usr/local/src")

#: Mounts an empty folder at $1 and in it $2 folders (pairs of source and target), then runs the
#: rest, and writes the counters of its network to the file $0. The shell stays: it reaps orphans,
#: and signals reach programs as they do elsewhere.
_MOUNT = """\
count=$2
[ "$count" -eq 0 ] || mount -t tmpfs none "$1"
shift 2
while [ "$count" -gt 0 ]; do
    mkdir -p "$2"; mount --rbind "$1" "$2"; shift 2; count=$((count - 1))
done
status=0; "$@" || status=$?
cat /proc/net/snmp /proc/net/snmp6 > "$0" || true
exit "$status"
"""
#: What may stand directly before an absolute path: blanks, an option's letters, or ``file://``.
_BEFORE = r"((?:^|[\s\"'=:;,(@])(?://)?[^/\s\"'=:;,(@]*)"
#: The kernel's counters of the network of this process. The twelfth of IPv4 is OutNoRoutes; the
#: second of UDP is NoPorts, which tells of a name that is asked of a server at an own address.
_UNANSWERED = re.compile(
    r"^(?:Ip: (?:\d+ ){11}|Udp: \d+ |(?:Ip6OutNoRoutes|Udp6NoPorts)\s+)(\d+)", re.MULTILINE
)
_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")
#: What git, curl, CMake, pip and Python say of a host that they cannot reach. It names the host of
#: an attempt; the kernel's counters or the proxy know whether there was one.
_UNREACHED = re.compile(
    r"(?:Could not resolve host(?:name)?:? |unable to access '(?=\w+://)|Failed to connect to "
    r"|Could not connect to server: |HTTPS?ConnectionPool\(host='|Could not fetch URL )"
    r"(?P<host>[^\s',]+)"
    r"|Temporary failure in name resolution"
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
    def create(cls, mounts: Mapping[Path, str], *, needed: bool = False) -> Self:
        """
        Return the strictest sandbox that this machine offers.

        Args:
            mounts: Folder → its name below `INSIDE`.
            needed: Refuse to build without isolation.

        Raises:
            isolation-missing: It is needed, and this machine offers none.
        """
        refusal = _refusal()
        if refusal and needed:
            raise BuildError(
                "isolation-missing",
                "This machine cannot run a build without a network.",
                details=[refusal],
            )
        if refusal:
            return cls("none")
        paths = dict[Path, Path]()
        for folder, name in mounts.items():
            # A program may follow a link above the folder, and name it by its real path.
            paths |= dict.fromkeys((folder.absolute(), folder.resolve()), INSIDE / name)
        # The mounts below INSIDE would hide a folder of the machine that lies there.
        hidden = any(path.is_relative_to(INSIDE) for path in paths)
        return cls("namespace", {} if hidden else paths)

    def sandbox_path(self, path: Path) -> Path:
        """Return the path of *path* in the sandbox."""
        return Path(self.translate(str(path)))

    def translate(self, text: str) -> str:
        """Return *text* with every mounted folder replaced by its path in the sandbox."""
        for folder, mount in self.mounts.items():
            path = rf"{_BEFORE}{re.escape(str(folder))}(?![\w.-])"
            text = re.sub(path, rf"\g<1>{mount}", text)
        return text

    def run(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        log: Path,
        env: Mapping[str, str],
        **options: Any,
    ) -> None:
        """
        Run *command* in the sandbox as `process.run` does; mounted folders that its words and *env*
        name are replaced by their paths there.

        Raises:
            build-downloads: The program tried to reach a host, even if it succeeded without it.
        """
        isolated = self.kind == "namespace"
        variables = {
            name: self.translate(text) for name, text in env.items() if name.lower() not in _PROXIES
        }
        shown = [self.translate(os.fspath(word)) for word in command]
        wrapped, end_by, counters = shown, signal.SIGTERM, log.with_name(f"{log.name}.network")
        if isolated:
            sources = {mount: folder for folder, mount in self.mounts.items()}
            shell = ["sh", "-euc", _MOUNT, str(counters), str(INSIDE), str(len(sources))]
            for mount, folder in sources.items():
                shell += [str(folder), str(mount)]
            wrapped = [*_unshare(), *shell, *shown]
            # unshare(1) heeds no other signal; the end of its child ends every process in the
            # sandbox.
            end_by = signal.SIGKILL
        failure: SparkwrightError | None = None
        counters.unlink(missing_ok=True)  # a killed run may have left it
        wanted = list[str]()
        with socket.create_server(("127.0.0.1", 0)) as proxy:
            if not isolated:
                # Without a proxy a program reaches the host that it wants; this one refuses it.
                threading.Thread(target=_refuse, args=(proxy, wanted), daemon=True).start()
                address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
                for name in _PROXIES[:-1]:
                    variables[name] = variables[name.upper()] = address
            try:
                process.run(wrapped, shown=shown, log=log, env=variables, end_by=end_by, **options)
            except SparkwrightError as error:
                failure = error
            finally:
                proxy.shutdown(socket.SHUT_RDWR)  # this ends the thread's wait for a connection
        # How many packets of programs met no host or port.
        text = counters.read_text("ascii") if counters.exists() else ""
        attempts = sum(map(int, _UNANSWERED.findall(text)))
        counters.unlink(missing_ok=True)
        if wanted or attempts:
            unreached = dict[str, None]()
            # The first line is the command.
            for line in log.read_text("utf-8", "replace").splitlines()[1:]:
                if match := _UNREACHED.search(line):
                    unreached[line.strip()] = None
                    if match["host"]:
                        wanted.append(match["host"])
            hosts = list(dict.fromkeys(wanted))
            raise BuildError(
                "build-downloads",
                f"The build tried to download from {', '.join(hosts) or 'another host'}.",
                details=[*unreached, f"full log: {log}"],
                data={"wanted": hosts},
            ) from failure
        if failure:
            raise failure


def _refuse(proxy: socket.socket, wanted: list[str]) -> None:
    """Close every connection to *proxy*, and put the host that its request names in *wanted*."""
    with contextlib.suppress(OSError):  # the proxy was shut down
        while True:
            # A connection may be reset, or stay silent.
            with proxy.accept()[0] as connection, contextlib.suppress(OSError):
                wanted.append("another host")
                connection.settimeout(1)
                request = connection.recv(4096).decode("latin-1")
                wanted[-1:] = re.findall(r"\A\w+ (?:\w+://)?([^/: ]+)", request) or wanted[-1:]


def _unshare() -> list[str]:
    return [
        *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--net"),
        # As root of a user namespace if the user is not root; the files that it makes still belong
        # to the user.
        *([] if os.geteuid() == 0 else ["--map-root-user"]),
    ]


@functools.cache
def _refusal() -> str | None:
    """Return the reason why this machine offers no new namespaces, and warn; None if it does."""
    try:
        process.output([*_unshare(), "mount", "-t", "tmpfs", "none", str(INSIDE)], timeout=60)
    except CommandError as error:
        refusal = "; ".join([error.what, *error.details])
        console.warn(f"builds have a network and other folder names on this machine: {refusal}")
        return refusal
    return None
