"""
Run one build program without a network, in folders whose paths are the same on every machine.

`sparkwright.builder.environment.sandbox` starts it as the first process of new namespaces. It uses
the standard library only. Its first argument is a JSON object, the rest of the command line is the
program:

- ``binds``: folder → its path for the program, below ``inside``.
- ``inside``: an existing folder of every system, over which an empty one is mounted.
- ``loopback``: the network is a new one, whose loopback device has to be switched on.
- ``requests``: the file to which every request to a host is written, one per line.
"""

import contextlib
import ctypes
import fcntl
import http.server
import json
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping

# From <sys/mount.h>, <linux/sockios.h> and <net/if.h>.
MS_BIND, MS_REC = 0x1000, 0x4000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy")


def mount(source: str, target: str, kind: str, flags: int) -> None:
    """Mount *source* at *target*, and raise `OSError` if the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind.encode(), flags, None):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def bind_folders(inside: str, binds: Mapping[str, str]) -> None:
    """Mount every folder of *binds* at its path below *inside*."""
    # Opened before the empty folder hides those below it.
    opened = {
        target: os.open(folder, os.O_PATH | os.O_DIRECTORY) for folder, target in binds.items()
    }
    mount("tmpfs", inside, "tmpfs", 0)
    for target, folder in opened.items():
        pathlib.Path(target).mkdir(parents=True)
        mount(f"/proc/self/fd/{folder}", target, "", MS_BIND | MS_REC)
        os.close(folder)


def switch_on_loopback() -> None:
    """
    Bring up ``lo``, which a new network has switched off: the proxy listens there, and so do test
    servers of programs.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack_from("h", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request), 16)[0]
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


def refusing_proxy(path: str) -> int:
    """
    Start a proxy that refuses every request and writes it to the file *path*; return its port.
    """

    class RefusedDownload(http.server.BaseHTTPRequestHandler):
        def refuse(self) -> None:
            # One write to a file opened for appending is atomic.
            with pathlib.Path(path).open("a") as stream:
                stream.write(" ".join(f"{self.command} {self.path}".split())[:500] + "\n")
            with contextlib.suppress(OSError):
                self.send_error(403, "a build has no network")

        def __getattr__(self, name: str) -> object:
            if name.startswith("do_"):
                return self.refuse
            raise AttributeError(name)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class names it so
            """Write nothing; the base class writes to standard error."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), RefusedDownload)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return int(server.server_address[1])


def main() -> int:
    spec, command = json.loads(sys.argv[1]), sys.argv[2:]
    if spec["binds"]:
        bind_folders(spec["inside"], spec["binds"])
    if spec["loopback"]:
        switch_on_loopback()
    proxy = f"http://127.0.0.1:{refusing_proxy(spec['requests'])}"
    environment = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
    environment |= {name: proxy for lower in PROXIES for name in (lower, lower.upper())}
    child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue  # nohup: the build is to outlive the terminal
        signal.signal(number, lambda _number, _frame: child.terminate())
    # A terminal sends Ctrl-C to the program as well; its end is awaited.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = child.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
