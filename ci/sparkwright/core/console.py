"""
Print all output of the program.

Messages go to standard error; standard output carries results, or one JSON document with
``--json``. Without a terminal the lines are plain, and under GitHub Actions failures become
annotations.
"""

import contextlib
import errno
import io
import json
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, Literal, TextIO

from sparkwright.core.errors import SparkwrightError, StoreError

#: Columns of what goes to a file or a pipe.
WIDEST = 100

#: The errors of a disk, or of a user's share of it, that is full.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def printable(text: str) -> str:
    """
    Return *text* with every character escaped that a terminal might take for a command; line ends
    and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(
        letter
        if letter.isprintable() or letter in "\n\t\xa0\u200b\u202f"
        else letter.encode("unicode_escape").decode()
        for letter in text
    )


#: Where a workflow command of GitHub Actions would begin, in its new and its old form.
_WORKFLOW_COMMAND = re.compile(r"^[^\S\n]*(?=::)|(?<=#)(?=#\[)", re.MULTILINE)
#: Commands of a terminal (colour, title, movement), which leave rubbish when only their first
#: character is removed.
_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)


def one_line(text: str, limit: int, secret: str = "") -> str:
    """
    Return *text* as one printable line of at most *limit* characters, without terminal commands or
    *secret*.
    """
    spaced = (letter if letter.isprintable() else " " for letter in _SEQUENCES.sub("", text))
    line = " ".join("".join(spaced).split())
    # A host name comes back in small letters.
    line = re.sub(re.escape(secret), "***", line, flags=re.IGNORECASE) if secret else line
    return line if len(line) <= limit else line[: limit - 1] + "…"


class OutputClosed(BaseException):
    """
    The reader of the output has gone, as after ``| head -1``; the program ends without a message.
    """


def duration(seconds: float) -> str:
    """Return *seconds* as text: ``4.2 s``, ``3 min 05 s``, ``1 h 20 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes} min {rest:02d} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60:02d} min"
    )


def size(count: float) -> str:
    """Return *count* bytes in decimal units, as package indexes do."""
    from rich.filesize import decimal

    return decimal(int(count))


class Progress:
    """
    A live line: the progress of a piece of work and the estimated time that is left.

    Args:
        title: What is going on.
        total: The whole, in any unit; 0 where it is not known.
        unit: ``bytes`` are shown as sizes, ``seconds`` as durations, all else as plain numbers.
    """

    def __init__(self, console: "Console", title: str, total: float, unit: str = "") -> None:
        self._console, self._title, self.total, self._unit = console, title, total, unit
        self.done = self._first = 0.0
        self._began = self._updated = time.monotonic()

    def update(self, done: float, note: str = "", total: float | None = None) -> None:
        """
        Show the amount *done*. Another *total* than before begins a new part, whose time is
        estimated by its own pace.
        """
        self.done, now = done, time.monotonic()
        if total not in (None, self.total):
            self.total, self._began, self._first = total or 0, now, done
        if now - self._updated < self._console.interval:
            return
        self._updated = now
        amount = {"bytes": size, "seconds": duration}.get(self._unit, "{:g}".format)
        text = f"{self._title}: {amount(done)}"
        if self.total:
            text += f" of {amount(self.total)}"
        if self._first < done < self.total:
            remaining = (now - self._began) / (done - self._first) * (self.total - done)
            text += f", about {duration(remaining)} left"
        self._console.live(f"{text}  {note}" if note else text)


class Console:
    """
    The output of the program; one instance, `console`, which the command line configures.
    """

    def __init__(self) -> None:
        self.json = False
        self.github = os.environ.get("GITHUB_ACTIONS") == "true"
        self._depth = 0
        self._document: dict[str, Any] = {}

    @property
    def terminal(self) -> bool:
        return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    @property
    def interval(self) -> float:
        """The seconds between two states of a live line, each a line of a log."""
        return 0.2 if self.terminal else 15.0

    def _write(self, stream: TextIO, text: str) -> None:
        """
        Write *text* through to the reader of *stream*.

        Raises:
            disk-full, output-unwritable: It cannot be written.
            OutputClosed: Its reader is gone.
        """
        try:
            stream.write(text)
            stream.flush()
        except OSError as error:
            # Python would try to write the rest again, and report that, when it exits.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
                stream.flush()
            if error.errno == errno.EPIPE:
                raise OutputClosed from error
            raise StoreError(
                "disk-full" if error.errno in NO_ROOM else "output-unwritable",
                f"Standard {'output' if stream is sys.stdout else 'error'} cannot be written.",
                details=[str(error)],
                todo=StoreError.references["output-unwritable"].todo,
            ) from error

    def _no_command(self, text: str) -> str:
        """Return *text* so that GitHub Actions, if it reads, takes no line of it for a command."""
        return _WORKFLOW_COMMAND.sub(r"\g<0>\\", text) if self.github else text

    def _say(self, text: str, end: str = "\n") -> None:
        text = self._no_command(printable(text))
        if self.terminal:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
            text = "\r\x1b[K" + (_wrap(text, max(columns, 20), "  ") if end else text)
        self._write(sys.stderr, f"{text}{end}")

    def live(self, text: str) -> None:
        """Replace the live line; on anything but a terminal, print it as a line."""
        if self.terminal:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
            self._say(text[: columns - 1], end="")
        elif text:
            self._say("  " + text)

    def note(self, text: str) -> None:
        """Print a message."""
        self._say("  " * self._depth + text)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self._say("  " * self._depth + f"warning: {text}")

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        """
        Print *title*, indent the messages of the block, and print its duration if that is more than
        two seconds.
        """
        began = time.monotonic()
        self.note(title)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            took = time.monotonic() - began
            if took > 2:
                self.note(f"  {title}: {duration(took)}")

    @contextlib.contextmanager
    def progress(self, title: str, total: float, unit: str = "") -> Iterator[Progress]:
        """Yield a live line that is wiped when the block ends."""
        progress = Progress(self, "  " * self._depth + title, total, unit)
        try:
            yield progress
        finally:
            self.live("")

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        result: bool = False,
    ) -> None:
        """
        Print a table with aligned columns; a column without text in any row is left out.

        Args:
            columns: The headings; one that begins with ``>`` is aligned to the right.
            result: The table is what the verb was asked for, so it goes to standard output unless
                that carries JSON.
        """
        from rich import box
        from rich.console import Console as RichConsole
        from rich.table import Table

        stream, text = sys.stdout if result and not self.json else sys.stderr, io.StringIO()
        terminal, columns_there = stream.isatty(), shutil.get_terminal_size((WIDEST, 24)).columns
        # Rich would end the program on its own where the stream cannot be written.
        rich = RichConsole(
            file=text,
            width=None if terminal else max(1, min(columns_there, WIDEST)),
            force_terminal=terminal,
            highlight=False,
            markup=False,
        )
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        shown = list[Iterable[str]]()
        for column, *cells in zip_longest(columns, *rows, fillvalue=""):
            if any(cells) or not rows:
                head = printable(column.removeprefix(">"))
                justify: Literal["left", "right"] = "right" if column[:1] == ">" else "left"
                table.add_column(head, justify=justify, overflow="fold")
                shown.append(map(printable, cells))
        for row in zip(*shown, strict=True):
            table.add_row(*row)
        # Printed by itself, since rich folds the title of a table to the table's width.
        if title:
            rich.print(printable(title), style="italic")
        rich.print(table)
        lines = re.sub(r" +$", "", text.getvalue(), flags=re.MULTILINE)
        self._write(stream, self._no_command(lines))

    def document(self, data: dict[str, Any]) -> None:
        """Set the content of the document of ``--json``, which `finish` prints."""
        self._document = data

    def finish(self, error: dict[str, object] | None = None) -> None:
        """
        Print the JSON document, with the *error* that ended the run, if ``--json`` is given, and
        flush the output.

        Raises:
            disk-full, output-unwritable, OutputClosed: It cannot be.
        """
        data = {"schema": 1, **self._document, **({"error": error} if error else {})}
        self._document = {}
        if self.json:
            import msgspec

            text = json.dumps(msgspec.to_builtins(data, str_keys=True), ensure_ascii=False)
            # A file name may be no UTF-8. JSON has no NaN. In ASCII, a terminal obeys only DEL, and
            # GitHub Actions what stands behind "##[".
            valid = text.encode("utf-8", "replace").decode()
            plain = json.dumps(json.loads(valid, parse_constant=lambda _: None), indent=2)
            plain = plain.replace("\x7f", "\\u007f").replace("##[", "#\\u0023[")
            self._write(sys.stdout, plain + "\n")
        for stream in (sys.stdout, sys.stderr):  # argparse writes to them, too
            self._write(stream, "")

    def result(self, text: str) -> None:
        """Print a line of the command's result."""
        self._write(
            sys.stderr if self.json else sys.stdout, self._no_command(printable(text)) + "\n"
        )

    def failure(self, error: SparkwrightError) -> None:
        """Print the reference of *error*, its message, its details and what to do."""
        lines = [
            f"error: {error.reference}: {error.what}",
            *map("    {}".format, error.details),
            f"  what to do: {error.todo}",
        ]
        if self.github:
            escaped = printable(error.what).replace("%", "%25").replace("\n", "%0A")
            self._write(sys.stderr, f"::error title={error.reference}::{escaped}\n")
        self._say("\n".join(lines))


def pieces(text: str, width: int) -> list[str]:
    """Return *text* in parts of at most *width*, divided behind commas and the like if possible."""
    begin = rf".{{0,{width - 1}}}"
    return re.findall(rf"{begin}.\Z|{begin},|{begin}[/=:]|{begin}.", text, re.DOTALL)


def _wrap(text: str, width: int, indent: str = "") -> str:
    """
    Return *text* in lines of at most *width*, which end behind a word, or within one that is longer
    behind a comma and the like. Lines that go on begin as they did, and with *indent*.
    """
    lines = list[str]()
    for line in text.split("\n"):
        begin = line[: len(line) - len(line.lstrip())] + indent
        for part in textwrap.wrap(
            line, width, subsequent_indent=begin, break_long_words=False, break_on_hyphens=False
        ) or [""]:
            lines += pieces(part, width) or [""]
    return "\n".join(lines)


def open_streams() -> None:
    """
    Make standard input, output and error safe to use.

    One that was closed becomes the null device: the next file to be opened would take its number,
    and hold what is printed. A text that the encoding of the output lacks is escaped.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            # The null device takes the lowest free number, that of the closed stream, also in
            # programs that are started.
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", errors="replace"))
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


console = Console()
