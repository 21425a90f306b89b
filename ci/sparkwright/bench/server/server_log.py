"""
The log of a server, read line by line: any size, in memory that does not grow.

A line that is longer than `LONGEST` is taken for several.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

#: Bytes of a line that are looked at; vLLM's configuration, the longest of use, has about 5,000.
LONGEST = 16 * 1024
#: The largest log, in bytes; a soak of hours writes some tens of megabytes.
LARGEST = 1 << 30
#: Lines, and different values, that are stored of each kind.
MOST_LINES = 20

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def compile_patterns(*patterns: str) -> None:
    """Raise ValueError unless all *patterns* are regular expressions."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None


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
        compile_patterns(self.pattern)


class LogLines(msgspec.Struct):
    """The lines of one kind: their number, the first of them, and values with their counts."""

    count: int = 0
    texts: list[str] = []
    values: dict[str, int] = {}

    def add(self, text: str, value: str | None) -> None:
        """Count a line."""
        self.count += 1
        if len(self.texts) < MOST_LINES:
            self.texts.append(text)
        if value is not None and (value in self.values or len(self.values) < MOST_LINES):
            self.values[value] = self.values.get(value, 0) + 1


class LogInvalid(Exception):
    """A file is not a log that can be read; the text says why."""


class LogScanner:
    """
    Search a log that may still grow.

    Attributes:
        lines: Lines that match, by the name of their pattern.
    """

    def __init__(self, patterns: Mapping[str, LogPattern]) -> None:
        self.lines = {name: LogLines() for name in patterns}
        self._position = 0
        self._patterns = [
            (part.encode(), name, re.compile(kind.pattern))
            for name, kind in patterns.items()
            for part in ((kind.holds,) if isinstance(kind.holds, str) else kind.holds)
        ]

    def read(self, log: Path, *, final: bool = False) -> None:
        """
        Search the lines of *log* that are new and whole; with *final*, one without end, too.

        Raises:
            LogInvalid: It holds a byte 0, which text never does, or more than `LARGEST` bytes.
        """
        with log.open("rb") as stream:
            stream.seek(self._position)
            while line := stream.readline(LONGEST):
                if not final and len(line) < LONGEST and not line.endswith(b"\n"):
                    return
                self._position += len(line)
                if b"\0" in line or self._position > LARGEST:
                    raise LogInvalid(f"it is no text, or has more than {LARGEST} bytes")
                # A progress bar overwrites itself; what it leaves is not part of the next line.
                for text in line.split(b"\r"):
                    self._search(text)

    def _search(self, line: bytes) -> None:
        kinds = {name: pattern for part, name, pattern in self._patterns if part in line}
        text = _COLOUR.sub("", line.decode("utf-8", "replace")).strip() if kinds else ""
        for name, pattern in kinds.items():
            if match := pattern.search(text):
                self.lines[name].add(text[:400], match.groupdict().get("value"))


def scan(log: Path, patterns: Mapping[str, LogPattern]) -> dict[str, LogLines]:
    """
    Return the lines of *log* by the name of their pattern.

    Raises:
        LogInvalid: It is not a regular file, is too large, or holds bytes that are not text.
    """
    scanner = LogScanner(patterns)
    if not log.is_file():
        raise LogInvalid("it is not a regular file")
    try:
        scanner.read(log, final=True)
    except OSError as error:
        raise LogInvalid(f"it cannot be read: {error.strerror}") from None
    return scanner.lines
