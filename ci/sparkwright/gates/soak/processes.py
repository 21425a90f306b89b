"""The processes of a server on this machine: their memory, and whether one of them ended or began anew."""

from __future__ import annotations

import psutil

from sparkwright.bench.server.client import Client
from sparkwright.bench.server.openai_schema import ServerInvalid

#: When the server's own process began, in seconds since 1970; every Prometheus client for Python has it.
BEGAN = "process_start_time_seconds"


class Processes:
    """
    The process tree below *pid*, and what the server itself says of its beginning.

    Args:
        pid: The server's process; None where it is not known.

    Attributes:
        unknown: Why there is no process to look at; empty where there is.
    """

    def __init__(self, client: Client, pid: int | None) -> None:
        self._client = client
        self._root: psutil.Process | None = None
        self.unknown = "the server's process is not known"
        if pid is not None:
            try:
                self._root, self.unknown = psutil.Process(pid), ""
            except psutil.Error:
                self.unknown = f"there is no process {pid}"
        self._known = {one.pid: _title(one) for one in self._tree()}
        self._began = self._said()

    def _tree(self) -> list[psutil.Process]:
        # psutil compares the time of creation, so a process that got the number of an ended one does not count.
        if self._root is None or not self._root.is_running():
            return []
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            return []

    def _said(self) -> float | None:
        try:
            return self._client.metrics().get(BEGAN)
        except ServerInvalid:
            return None

    def resident(self) -> float | None:
        """
        Return the resident bytes of all processes together; None where there are none.

        What processes share is counted in each, which moves the sum and not its slope.
        """
        sizes = [size for one in self._tree() if (size := _resident(one)) is not None]
        return float(sum(sizes)) if sizes else None

    @staticmethod
    def available() -> float:
        """Return the bytes that the machine could still give out (MemAvailable)."""
        return float(psutil.virtual_memory().available)

    def restarts(self) -> tuple[str, ...]:
        """
        Return, since the last call, which processes ended, and whether the server says that it began anew.

        Only those count that were there at the beginning: compilers that the server runs on the way come and go.
        """
        now = {one.pid for one in self._tree() if _alive(one)}
        gone = tuple(f"process {pid} ended: {title}" for pid, title in self._known.items() if pid not in now)
        said = self._said()
        anew = (f"the server says that it began {said - self._began:.0f} s later",) if said and self._began and said != self._began else ()
        self._known = {pid: title for pid, title in self._known.items() if pid in now}
        self._began = said or self._began
        return (*gone, *anew)


def _resident(process: psutil.Process) -> int | None:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return None


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _title(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return "unknown"
