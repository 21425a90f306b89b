"""
The log of a server, read line by line: any size, in memory that does not grow.

A line that is longer than `LONGEST` is taken for several.
"""

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
        holds: A fixed part by which it is found quickly; of several, a line has at least one.
        pattern: A regular expression that is searched in the line; its group *value*, if it has
            one, is the value of the line.
    """

    holds: str | tuple[str, ...]
    pattern: str

    def __post_init__(self) -> None:
        compile_patterns(self.pattern)

    def search(self, text: str) -> re.Match[str] | None:
        """Return the match in the line *text*."""
        parts = (self.holds,) if isinstance(self.holds, str) else self.holds
        return re.search(self.pattern, text) if any(part in text for part in parts) else None


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


def scan(log: Path, patterns: Mapping[str, LogPattern]) -> dict[str, LogLines]:
    """
    Return the lines of *log* by the name of their pattern.

    Raises:
        LogInvalid: It is not a regular file, cannot be read, holds a byte 0, which text never does,
            or more than `LARGEST` bytes.
    """
    lines = {name: LogLines() for name in patterns}
    if not log.is_file():
        raise LogInvalid("it is not a regular file")
    try:
        with log.open("rb") as stream:
            while line := stream.readline(LONGEST):
                if b"\0" in line or stream.tell() > LARGEST:
                    raise LogInvalid(f"it is no text, or has more than {LARGEST} bytes")
                # A progress bar overwrites itself; what it leaves is not part of the next line.
                for part in line.split(b"\r"):
                    text = _COLOUR.sub("", part.decode("utf-8", "replace")).strip()
                    for name, pattern in patterns.items():
                        if match := pattern.search(text):
                            lines[name].add(text[:400], match.groupdict().get("value"))
    except OSError as error:
        raise LogInvalid(f"it cannot be read: {error.strerror}") from None
    return lines
