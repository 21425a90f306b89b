"""
All output. Nothing else in the package prints.

People's text goes to standard error; standard output carries results, or under ``--json`` one JSON document. Without a
terminal the lines are plain, and under GitHub Actions steps fold into groups, failures become annotations, and results stand on the
page of the job, too.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from sparkwright import summary

if TYPE_CHECKING:
    from sparkwright.errors import SparkwrightError


class OutputClosed(BaseException):
    """Nobody reads the output any more, as after ``| head -1``; the run ends without a word, like any program's."""


def duration(seconds: float) -> str:
    """Return *seconds* as people say it: ``4.2 s``, ``3 min 05 s``, ``1 h 20 min``."""
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
    One live line: what is done, of how much, and when it should end.

    Args:
        title: What is going on.
        total: The whole, in any unit; 0 where it is not known.
        unit: ``bytes`` are shown as sizes, all else as plain numbers.
    """

    def __init__(self, console: Console, title: str, total: float, unit: str = "") -> None:
        self._console, self.title, self.total, self.unit = console, title, total, unit
        self.done = 0.0
        self._began = self._shown = time.monotonic()
        self._first = 0.0
        self._open = False

    def start_at(self, done: float) -> None:
        """Set what was there before this run, so that the estimate rests on this run's speed alone."""
        self.done = self._first = done

    def update(self, done: float, note: str = "", remaining: float | None = None) -> None:
        """Show that *done* of the total is there; *remaining* overrides the estimate in seconds."""
        self.done = done
        now = time.monotonic()
        if now - self._shown < self._console.interval:
            return
        self._shown = now
        if remaining is None and self.total and done > self._first:
            remaining = (now - self._began) / (done - self._first) * (self.total - done)
        self._open = True
        self._console.live(self._line(note, remaining))

    def _line(self, note: str, remaining: float | None) -> str:
        amount = size(self.done) if self.unit == "bytes" else f"{self.done:g}"
        whole = (f" of {size(self.total)}" if self.unit == "bytes" else f" of {self.total:g}") if self.total else ""
        left = f", about {duration(remaining)} left" if remaining is not None else ""
        return f"{self.title}: {amount}{whole}{left}{f'  {note}' if note else ''}"

    def close(self) -> None:
        if self._open:
            self._console.live("")


class Console:
    """Where people and programs read what sparkwright does; one instance, `console`, configured by the command line."""

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
        """Seconds between two states of a live line; without a terminal each state is a line of a log."""
        return 0.2 if self.terminal else 15.0

    @contextlib.contextmanager
    def _writing(self, stream: TextIO) -> Iterator[None]:
        """
        Name what fails when the block writes to *stream*.

        Raises:
            DiskFull: The file system has no room.
            OutputUnwritable: Writing fails for another reason.
            OutputClosed: The reader is gone.
        """
        try:
            yield
        except OSError as error:
            _drain(stream)
            if error.errno == errno.EPIPE:
                raise OutputClosed from error
            from sparkwright.errors import DiskFull, OutputUnwritable

            name = "standard output" if stream is sys.stdout else "standard error"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                todo = "Make room where the output goes, and run it again. Nothing finished is lost."
                raise DiskFull(f"There is no room for {name}.", details=[str(error)], todo=todo) from error
            raise OutputUnwritable(f"{name.capitalize()} cannot be written.", details=[str(error)]) from error

    def _write(self, stream: TextIO, text: str) -> None:
        with self._writing(stream):
            stream.write(text)

    def _say(self, text: str) -> None:
        with self._writing(sys.stderr):
            sys.stderr.write(f"\r\x1b[K{text}\n" if self.terminal else f"{text}\n")
            sys.stderr.flush()

    def live(self, text: str) -> None:
        """Replace the live line; on anything but a terminal, print it as a line."""
        if self.terminal:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
            with self._writing(sys.stderr):
                sys.stderr.write("\r\x1b[K" + text[: columns - 1])
                sys.stderr.flush()
        elif text:
            self._say("  " + text)

    def note(self, text: str) -> None:
        """Say something in passing."""
        self._say("  " * self._depth + text)

    def detail(self, text: str) -> None:
        """Say something that only ``-v`` shows."""
        if self.verbose:
            self.note(text)

    def warn(self, text: str) -> None:
        """Say something that a person should look at."""
        self._say(f"::warning::{text}" if self.github else "  " * self._depth + f"warning: {text}")

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Announce *title*, indent what is said inside, and say how long it took when that was more than two seconds."""
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
            progress.close()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, result: bool = False) -> None:
        """
        Print a table with aligned columns.

        Args:
            columns: The headings; one that begins with ``>`` is aligned to the right.
            result: The table is what the verb was asked for, so it goes to standard output unless that carries JSON.
        """
        from rich import box
        from rich.console import Console as RichConsole
        from rich.table import Table

        if result and self.github:
            self._flush_lines()
            summary.append(summary.table(title, columns, rows))
        stream = sys.stdout if result and not self.json else sys.stderr
        table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for column in columns:
            right = column.startswith(">")
            table.add_column(column.removeprefix(">"), justify="right" if right else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        # Files and pipes have no width of their own; 80 columns would fold paths that people grep for.
        width = None if stream.isatty() else 200
        # Rich would end the program on its own where the stream cannot be written.
        buffer = io.StringIO()
        RichConsole(file=buffer, width=width, force_terminal=stream.isatty(), highlight=False, markup=False, soft_wrap=False).print(table)
        self._write(stream, buffer.getvalue())

    def document(self, data: dict[str, Any]) -> None:
        """Set what the one JSON document of ``--json`` will hold; `finish` prints it."""
        self._document = data

    def finish(self, error: dict[str, object] | None = None) -> None:
        """
        Print the JSON document, the *error* that ended the run in it; without ``--json``, nothing. What was printed is out afterwards.

        Raises:
            DiskFull, OutputUnwritable, OutputClosed: It cannot be.
        """
        self._flush_lines()
        data, self._document = {**self._document, "error": error} if error else self._document, {}
        if self.json:
            import msgspec

            try:
                text = msgspec.json.encode(data)
            except UnicodeEncodeError:
                # A file name of the command line may be no UTF-8, and then it is no text of JSON either.
                text = msgspec.json.encode(_plain(msgspec.to_builtins(data)))
            self._write(sys.stdout, msgspec.json.format(text, indent=2).decode() + "\n")
        for stream in (sys.stdout, sys.stderr):
            with self._writing(stream):
                stream.flush()

    def result(self, text: str) -> None:
        """Print a line that the verb was asked for."""
        self._write(sys.stderr if self.json else sys.stdout, text + "\n")
        if self.github:
            self._lines += text.split("\n")

    def _flush_lines(self) -> None:
        """Bring the lines of results to the page of the job, those that follow each other as one block."""
        if any(line.strip() for line in self._lines):
            summary.append(summary.block(self._lines))
        self._lines = []

    def failure(self, error: SparkwrightError) -> None:
        """Print a failure: reference and what failed, details, what it usually means, what to do."""
        if self.github:
            self._say(f"::error title={error.reference}::{error.what}")
        lines = [f"error: {error.reference}: {error.what}"]
        lines += [f"    {line}" for line in error.details]
        lines += [f"  it usually means: {error.means}", f"  what to do: {error.todo}"]
        if self.github:
            self._flush_lines()
            summary.append(summary.block(lines))
        self._say("\n".join(lines))


def open_streams() -> None:
    """
    Make standard input, output and error safe to use.

    Replace a closed stream by the null device; otherwise the next file that is opened would get its descriptor and receive the output.
    Escape characters that the encoding of the output lacks.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # open() takes the lowest free descriptor, and those below are open by now. Child processes inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115  until the end
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def _drain(stream: TextIO) -> None:
    """Discard what *stream* still buffers; Python would try to write it again at exit, and print an error of its own."""
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
