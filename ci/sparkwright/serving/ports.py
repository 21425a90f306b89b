"""Whether a port is free, and who holds it where the kernel tells."""

from __future__ import annotations

import contextlib
import socket

from sparkwright.serving.errors import ServeError


def check(host: str, port: int) -> None:
    """
    Raise `port-taken` unless a server may listen at *host* and *port* now.

    Asked the way that vLLM does it: connections that are ending do not hold a port.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found[:1]:
            with socket.socket(family, kind, protocol) as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.bind(address)
                one.listen(1)
    except OSError as error:
        raise ServeError(
            "port-taken", f"{host} port {port} cannot be listened on: {error.strerror or error}.", details=holders(port)
        ) from None


def holders(port: int) -> list[str]:
    """Return who listens on *port*, as far as this user may know."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        listening = (one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN)
        found = ((one.pid, tuple(one.laddr)) for one in listening)
        return [_named(pid, f"{address[0]}:{address[1]}") for pid, address in found if address[1:] == (port,)]
    return []


def _named(pid: int | None, address: str) -> str:
    import psutil

    if pid is None:
        return f"{address}: a process of another user or container"
    with contextlib.suppress(psutil.Error):
        words = psutil.Process(pid).cmdline()
        return f"{address}: process {pid}, {' '.join(words)[:120]}"
    return f"{address}: process {pid}"


def asked_at(host: str, port: int) -> str:
    """Return the URL at which a server that listens on *host* is asked from this machine."""
    if host in ("", "0.0.0.0"):  # noqa: S104  compared, not bound
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
