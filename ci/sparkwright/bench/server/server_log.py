"""
The log of a server, read as a stream: a gigabyte in seconds, lines of any length, in memory that does not grow.

Most of a log is of no interest, so a block is searched for the fixed part of every line that is asked for, and taken apart only where one
is found.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

import msgspec

#: Bytes of a line that are looked at; the longest that is asked for, vLLM's configuration, has about 5,000.
LONGEST = 16 * 1024
#: Bytes read at once.
BLOCK = 1024 * 1024
#: The largest log that is read, in bytes.
LARGEST = 16 * 1024**3
#: Lines and different values that are kept of each kind.
KEPT = 20

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Line(msgspec.Struct, frozen=True):
    """
    One kind of line.

    Attributes:
        name: Kebab-case.
        holds: A part of it that never varies, by which it is found quickly; of several it has one.
        pattern: A regular expression that is searched in the line; its group *value*, where it has one, is what is wanted.
    """

    name: str
    holds: str | tuple[str, ...]
    pattern: str


class Found(msgspec.Struct):
    """Lines of one kind: how many there are, the first of them, and the values that they name, in the order of their first appearance."""

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
    """A log cannot be read as one; *says* tells why."""

    def __init__(self, says: str) -> None:
        self.says = says
        super().__init__(says)


class Scanner:
    """
    Looks for *lines* in a log that comes in pieces.

    Attributes:
        found: What was seen of each, by name.
        binary: Whether there was a byte 0, which no line of text has.
    """

    def __init__(self, lines: Iterable[Line]) -> None:
        self.found: dict[str, Found] = {}
        self._lines: list[tuple[bytes, str, re.Pattern[str]]] = []
        for line in lines:
            self.found[line.name] = Found()
            parts = (line.holds,) if isinstance(line.holds, str) else line.holds
            self._lines += [(part.encode(), line.name, re.compile(line.pattern)) for part in parts]
        self.binary = False
        self._rest = b""
        self._skipping = False

    def feed(self, data: bytes) -> None:
        """Look at the next piece."""
        self.binary = self.binary or b"\0" in data
        # A progress bar writes over itself; what it leaves behind is no part of the next line.
        data = self._rest + data.replace(b"\r", b"\n")
        if self._skipping:
            _, end, data = data.partition(b"\n")
            self._skipping = not end
        body, end, self._rest = data.rpartition(b"\n")
        if end:
            self._look(body)
        if len(self._rest) > LONGEST:
            self._look(self._rest[:LONGEST])
            self._rest, self._skipping = b"", True

    def close(self) -> None:
        """Look at the last line, which may have no end."""
        self._look(self._rest)
        self._rest = b""

    def _look(self, body: bytes) -> None:
        wanted = [one for one in self._lines if one[0] in body]
        if not wanted:
            return
        for line in body.split(b"\n"):
            kinds = {name: pattern for part, name, pattern in wanted if part in line}
            text = _text(line) if kinds else ""
            for name, pattern in kinds.items():
                if match := pattern.search(text):
                    self.found[name].add(text[:400], match.groupdict().get("value"))


def _text(line: bytes) -> str:
    return _COLOUR.sub("", line[:LONGEST].decode("utf-8", "replace"))


def read_from(log: Path, place: int, scanner: Scanner) -> int:
    """Feed *scanner* with what *log* has behind byte *place*, and return where it ends now."""
    with log.open("rb") as source:
        source.seek(place)
        end = os.fstat(source.fileno()).st_size
        while place < end and (data := source.read(min(BLOCK, end - place))):
            place += len(data)
            scanner.feed(data)
    return place


def scan(log: Path, lines: Iterable[Line]) -> Scanner:
    """
    Return what *log* has of *lines*.

    Raises:
        LogInvalid: It is no file, it is too large, or it holds bytes that are no text.
    """
    try:
        found = log.stat()
        if not stat.S_ISREG(found.st_mode):
            raise LogInvalid("it is no regular file")
        if found.st_size > LARGEST:
            raise LogInvalid(f"it has {found.st_size} bytes, more than {LARGEST}")
        scanner = Scanner(lines)
        read_from(log, 0, scanner)
    except OSError as error:
        raise LogInvalid(f"it cannot be read: {error.strerror}") from None
    scanner.close()
    if scanner.binary:
        raise LogInvalid("it holds bytes that are no text")
    return scanner
