"""
The log of a server, read as a stream: any size, lines of any length, in memory that does not grow.

Most of a log is of no interest, so each block is searched for the fixed part of every pattern, and
is split into lines only if it holds one.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

#: Bytes of a line that are looked at; vLLM's configuration, the longest of use, has about 5,000.
LONGEST = 16 * 1024
#: Bytes read at once.
BLOCK = 1024 * 1024
#: The largest log that is read, in bytes.
LARGEST = 16 * 1024**3
#: Lines, and different values, that are kept of each kind.
KEPT = 20

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class LogPattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    One kind of line.

    Attributes:
        holds: A fixed part by which it is found quickly; of several parts a line has one.
        pattern: A regular expression that is searched in the line; its group *value*, if it has
            one, is the value of the line.
    """

    holds: str | tuple[str, ...]
    pattern: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"{self.pattern!r} is not a regular expression: {error}") from None


class LogLines(msgspec.Struct):
    """The lines of one kind: their number, the first of them, and values with their counts."""

    count: int = 0
    texts: list[str] = []
    values: dict[str, int] = {}

    def add(self, text: str, value: str | None) -> None:
        """Count a line."""
        self.count += 1
        if len(self.texts) < KEPT:
            self.texts.append(text)
        if value is not None and (value in self.values or len(self.values) < KEPT):
            self.values[value] = self.values.get(value, 0) + 1


class LogInvalid(Exception):
    """A file is not a log that can be read; *message* says why."""

    def __init__(self, message: str) -> None:
        self.message = message
        super().__init__(message)


class LogScanner:
    """
    Search a log that arrives in pieces.

    Attributes:
        lines: What was found, by the name of its pattern.
        binary: Whether there was a byte 0, which text never holds.
    """

    def __init__(self, patterns: Mapping[str, LogPattern]) -> None:
        self.lines = {name: LogLines() for name in patterns}
        self.binary = False
        self._patterns = [
            (part.encode(), name, re.compile(kind.pattern))
            for name, kind in patterns.items()
            for part in ((kind.holds,) if isinstance(kind.holds, str) else kind.holds)
        ]
        self._rest = b""
        self._skipping = False

    def feed(self, data: bytes) -> None:
        """Search the next piece."""
        self.binary = self.binary or b"\0" in data
        # A progress bar overwrites itself; what it leaves is not part of the next line.
        data = self._rest + data.replace(b"\r", b"\n")
        if self._skipping:
            _, end, data = data.partition(b"\n")
            self._skipping = not end
        body, _, self._rest = data.rpartition(b"\n")
        self._search(body)
        if len(self._rest) > LONGEST:
            self._search(self._rest[:LONGEST])
            self._rest, self._skipping = b"", True

    def close(self) -> None:
        """Search the last line, which may have no end."""
        self._search(self._rest)
        self._rest = b""

    def _search(self, body: bytes) -> None:
        present = [entry for entry in self._patterns if entry[0] in body]
        for line in body.split(b"\n") if present else ():
            kinds = {name: pattern for part, name, pattern in present if part in line}
            text = _COLOUR.sub("", line[:LONGEST].decode("utf-8", "replace")) if kinds else ""
            for name, pattern in kinds.items():
                if match := pattern.search(text):
                    self.lines[name].add(text[:400], match.groupdict().get("value"))


def read_from(log: Path, position: int, scanner: LogScanner) -> int:
    """Feed *scanner* with *log* from byte *position* on, and return where it ends now."""
    with log.open("rb") as stream:
        stream.seek(position)
        end = os.fstat(stream.fileno()).st_size
        while position < end and (data := stream.read(min(BLOCK, end - position))):
            position += len(data)
            scanner.feed(data)
    return position


def scan(log: Path, patterns: Mapping[str, LogPattern]) -> dict[str, LogLines]:
    """
    Return the lines of *log* by the name of their pattern.

    Raises:
        LogInvalid: It is not a regular file, is too large, or holds bytes that are not text.
    """
    scanner = LogScanner(patterns)
    try:
        status = log.stat()
        if not stat.S_ISREG(status.st_mode):
            raise LogInvalid("it is not a regular file")
        if status.st_size > LARGEST:
            raise LogInvalid(f"it has {status.st_size} bytes, more than {LARGEST}")
        read_from(log, 0, scanner)
    except OSError as error:
        raise LogInvalid(f"it cannot be read: {error.strerror}") from None
    scanner.close()
    if scanner.binary:
        raise LogInvalid("it holds bytes that are not text")
    return scanner.lines
