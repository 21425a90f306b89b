"""
Print all output of the program.

Messages go to standard error; standard output carries results, or one JSON document with
``--json``. Without a terminal the lines are plain, and under GitHub Actions steps fold into groups,
failures become annotations, and results stand on the page of the job, too.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from sparkwright.core import github_summary

if TYPE_CHECKING:
    from sparkwright.core.errors import SparkwrightError


#: What a terminal, or a reader of bidirectional text, takes for a command inside a JSON string.
_COMMANDS = re.compile("[\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")


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
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def size(count: float) -> str:
    """Return *count* bytes in decimal units, as package indexes do."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


class Progress:
    """
    A live line: the progress of a piece of work and the estimated time that is left.

    Args:
        title: What is going on.
        total: The whole, in any unit; 0 where it is not known.
        unit: ``bytes`` are shown as sizes, all else as plain numbers.
    """

    def __init__(self, console: Console, title: str, total: float, unit: str = "") -> None:
        self._console, self.title, self.total, self.unit = console, title, total, unit
        self.done = 0.0
        self._began = self._updated = time.monotonic()
        self._first = 0.0
        self.shown = False

    def start_at(self, done: float) -> None:
        """
        Set the amount that was there before this run, which the estimate leaves out.
        """
        self.done = self._first = done

    def update(self, done: float, note: str = "", remaining: float | None = None) -> None:
        """Show the amount *done*; *remaining* overrides the estimate, in seconds."""
        self.done = done
        now = time.monotonic()
        if now - self._updated < self._console.interval:
            return
        self._updated = now
        if remaining is None and self.total and done > self._first:
            remaining = (now - self._began) / (done - self._first) * (self.total - done)
        self.shown = True
        self._console.live(self._line(note, remaining))

    def _line(self, note: str, remaining: float | None) -> str:
        amount = size(self.done) if self.unit == "bytes" else f"{self.done:g}"
        whole = (
            (f" of {size(self.total)}" if self.unit == "bytes" else f" of {self.total:g}")
            if self.total
            else ""
        )
        left = f", about {duration(remaining)} left" if remaining is not None else ""
        return f"{self.title}: {amount}{whole}{left}{f'  {note}' if note else ''}"


class Console:
    """
    The output of the program; one instance, `console`, which the command line configures.
    """

    def __init__(self) -> None:
        self.json = False
        self.verbose = False
        self.github = os.environ.get("GITHUB_ACTIONS") == "true"
        self._depth = 0
        self._document: dict[str, Any] = {}
        self._lines: list[str] = []

    @property
    def terminal(self) -> bool:
        return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    @property
    def interval(self) -> float:
        """
        Return the seconds between two states of a live line, each a line of the log without a
        terminal.
        """
        return 0.2 if self.terminal else 15.0

    @contextlib.contextmanager
    def _writing(self, stream: TextIO) -> Iterator[None]:
        """
        Translate errors of writing to *stream* within the block.

        Raises:
            disk-full: It is a file for which there is no room.
            output-unwritable: It cannot be written for another reason.
            OutputClosed: Its reader is gone.
        """
        try:
            yield
        except OSError as error:
            _drain(stream)
            if error.errno == errno.EPIPE:
                raise OutputClosed from error
            from sparkwright.core.errors import StoreError

            name = "standard output" if stream is sys.stdout else "standard error"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                todo = (
                    "Make room where the output goes, and run it again. Nothing finished is lost."
                )
                raise StoreError(
                    "disk-full", f"There is no room for {name}.", details=[str(error)], todo=todo
                ) from error
            raise StoreError(
                "output-unwritable", f"{name.capitalize()} cannot be written.", details=[str(error)]
            ) from error

    def _write(self, stream: TextIO, text: str, *, flush: bool = False) -> None:
        with self._writing(stream):
            stream.write(text)
            if flush:
                stream.flush()

    def _say(self, text: str, end: str = "\n") -> None:
        wipe = "\r\x1b[K" if self.terminal else ""
        self._write(sys.stderr, f"{wipe}{printable(text)}{end}", flush=True)

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

    def detail(self, text: str) -> None:
        """Print a message that only ``-v`` shows."""
        if self.verbose:
            self.note(text)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self._say(f"::warning::{text}" if self.github else "  " * self._depth + f"warning: {text}")

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        """
        Print *title*, indent the messages of the block, and print its duration if that is more than
        two seconds.
        """
        began = time.monotonic()
        if self.github and self._depth == 0:
            self._say(f"::group::{title}")
        else:
            self.note(title)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            took = time.monotonic() - began
            if took > 2:
                self.note(f"  {title}: {duration(took)}")
            if self.github and self._depth == 0:
                self._say("::endgroup::")

    @contextlib.contextmanager
    def progress(self, title: str, total: float, unit: str = "") -> Iterator[Progress]:
        """Yield a live line that is wiped when the block ends."""
        progress = Progress(self, "  " * self._depth + title, total, unit)
        try:
            yield progress
        finally:
            if progress.shown:
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
        Print a table with aligned columns.

        Args:
            columns: The headings; one that begins with ``>`` is aligned to the right.
            result: The table is what the verb was asked for, so it goes to standard output unless
                that carries JSON.
        """
        from rich import box
        from rich.console import Console as RichConsole
        from rich.table import Table

        if result and self.github:
            self._flush_lines()
            github_summary.append(github_summary.table(title, columns, rows))
        stream = sys.stdout if result and not self.json else sys.stderr
        table = Table(
            title=printable(title) or None,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        for column in columns:
            right = column.startswith(">")
            table.add_column(
                column.removeprefix(">"), justify="right" if right else "left", overflow="fold"
            )
        for row in rows:
            table.add_row(*map(printable, row))
        # Files and pipes have no width of their own; 80 columns would fold paths that people grep
        # for.
        width = None if stream.isatty() else 200
        # Rich would end the program on its own where the stream cannot be written.
        text = io.StringIO()
        terminal = stream.isatty()
        RichConsole(
            file=text, width=width, force_terminal=terminal, highlight=False, markup=False
        ).print(table)
        self._write(stream, text.getvalue())

    def document(self, data: dict[str, Any]) -> None:
        """Set the content of the document of ``--json``, which `finish` prints."""
        self._document = data

    def finish(self, error: dict[str, object] | None = None) -> None:
        """
        Print the JSON document, with the *error* that ended the run, if ``--json`` is given; flush
        the output.

        Raises:
            disk-full, output-unwritable, OutputClosed: It cannot be.
        """
        self._flush_lines()
        data = {"schema": 1, **self._document, **({"error": error} if error else {})}
        self._document = {}
        if self.json:
            import msgspec

            try:
                text = msgspec.json.encode(data)
            except UnicodeEncodeError:
                # A file name of the command line may be no UTF-8, and then it is no text of JSON
                # either.
                text = msgspec.json.encode(_plain(msgspec.to_builtins(data)))
            lines = msgspec.json.format(text, indent=2).decode()
            self._write(
                sys.stdout, _COMMANDS.sub(lambda match: f"\\u{ord(match[0]):04x}", lines) + "\n"
            )
        self._write(sys.stdout, "", flush=True)
        self._write(sys.stderr, "", flush=True)

    def result(self, text: str) -> None:
        """Print a line of the command's result."""
        self._write(sys.stderr if self.json else sys.stdout, printable(text) + "\n")
        if self.github:
            self._lines += text.split("\n")

    def _flush_lines(self) -> None:
        """
        Append the collected result lines to the page of the job, as one block.
        """
        if any(line.strip() for line in self._lines):
            github_summary.append(github_summary.block(self._lines))
        self._lines = []

    def failure(self, error: SparkwrightError) -> None:
        """Print the reference of *error*, its message, its details and what to do."""
        lines = [f"error: {error.reference}: {error.what}"]
        lines += [f"    {line}" for line in error.details]
        lines += [f"  what to do: {error.todo}"]
        if self.github:
            self._flush_lines()
            self._say(f"::error title={error.reference}::{error.what}")
            github_summary.append(github_summary.block(lines))
        self._say("\n".join(lines))


def open_streams() -> None:
    """
    Make standard input, output and error safe to use.

    One that was closed becomes the null device: the next file to be opened would take its number,
        and hold what is printed. A text that the
    encoding of the output lacks is escaped.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is taken, and those below are open by now. Programs that are
            # started get it, too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115  until the end
            setattr(sys, name, stream)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def _drain(stream: TextIO) -> None:
    """
    Discard what *stream* still buffers, which Python would otherwise try to write again, and
    report, when it exits.
    """
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()


def _plain(data: Any) -> Any:
    """Return *data* with every character that UTF-8 cannot encode escaped."""
    if isinstance(data, str):
        return data.encode("utf-8", "backslashreplace").decode()
    if isinstance(data, dict):
        return {_plain(key): _plain(value) for key, value in data.items()}
    return [_plain(item) for item in data] if isinstance(data, (list, tuple)) else data


console = Console()
