"""What the runner did, a JSON line for each event, written through to the disk: a run that was killed is one that began and did not end."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

import msgspec

#: Bytes above which the journal is set aside; the one before is kept, older ones are not.
LARGEST = 8 * 1024 * 1024

Event = Literal["began", "job", "ended", "died"]


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    One line.

    Attributes:
        at: Seconds since 1970; *run*: what belongs together.
        result: As GitHub's runner says it (Succeeded, Failed, Canceled), ``none`` where no job came.
        reference: Why a run ended badly; empty where it did not.
        cleaned: Bytes that the clean-up gave back; *ended*: processes that it had to end.
    """

    at: float
    run: str
    event: Event
    name: str = ""
    job: str = ""
    result: str = ""
    reference: str = ""
    says: str = ""
    cleaned: int = 0
    ended: int = 0


class Journal:
    """The journal at *path*."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, entry: Entry) -> None:
        """Add a line; it is on the disk when this returns."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size > LARGEST:
            os.replace(self.path, self.path.with_suffix(".old"))
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            # A line that was torn by a crash must not swallow this one.
            torn = not self._whole()
            os.write(handle, (b"\n" if torn else b"") + msgspec.json.encode(entry) + b"\n")
            os.fsync(handle)
        finally:
            os.close(handle)

    def _whole(self) -> bool:
        with self.path.open("rb") as stream:
            end = stream.seek(0, os.SEEK_END)
            if not end:
                return True
            stream.seek(end - 1)
            return stream.read(1) == b"\n"

    def entries(self) -> tuple[Entry, ...]:
        """Return the whole lines, the oldest first; what is not one of ours is passed over."""
        found = []
        try:
            with self.path.open("rb") as stream:
                lines = stream.read(2 * LARGEST).split(b"\n")
        except FileNotFoundError:
            return ()
        for line in lines:
            try:
                found.append(msgspec.json.decode(line, type=Entry))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
        return tuple(found)

    def unfinished(self) -> Entry | None:
        """Return the newest run that began and has no end, if there is one."""
        runs = [entry for entry in self.entries() if entry.event in ("began", "ended", "died")]
        return runs[-1] if runs and runs[-1].event == "began" else None

def now() -> float:
    """Return the time as entries have it."""
    return round(time.time(), 3)
