"""Lines from another program, taken as they come."""

from __future__ import annotations

import os
import select

#: Bytes that are read at once, and kept of a line that does not end.
LARGEST = 4096


class Lines:
    """The lines that come from an open file, without waiting for one."""

    def __init__(self, handle: int) -> None:
        self.handle, self.closed, self.quiet, self._rest = handle, False, False, b""

    def read(self, wait: float) -> list[str]:
        """Return the whole lines that are there within *wait* seconds; *quiet* says that nothing came, *closed* that nothing will."""
        self.quiet = self.closed or not select.select([self.handle], [], [], max(0.0, wait))[0]
        if self.quiet:
            return []
        data = os.read(self.handle, LARGEST)
        self.closed = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-LARGEST:]
        return [line.decode("ascii", "replace") for line in lines]
