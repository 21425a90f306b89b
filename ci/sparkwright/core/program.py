"""
Run a command line, and turn failures into messages, documents of ``--json`` and exit codes.

0: done. 1: failed. 2: wrong usage. 3: a fault of ours, with a log. 4: inconclusive or not-run. 5:
the network or an upstream is out of reach. 130: interrupted.
"""

import argparse
import contextlib
import errno
import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sparkwright import __version__
from sparkwright.core.console import OutputClosed, console, open_streams
from sparkwright.core.errors import FileError, SparkwrightError, UsageError
from sparkwright.core.store import translate_disk_full

_REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)


def execute(run: Callable[[Sequence[str]], int], words: Sequence[str] | None = None) -> int:
    """
    Run *words*, print the document of ``--json``, and return the exit code.

    Args:
        run: Runs a command line, raises expected failures, and returns the exit code otherwise.
        words: The command line; that of this process where it is not given.
    """
    words = sys.argv[1:] if words is None else words
    open_streams()
    # The parser may exit before it has read --json, and its error must be a document, too.
    console.json = "--json" in words
    try:
        try:
            code, error = _run_and_report(run, words)
            console.finish(error)
            return code
        except SparkwrightError as unwritable:  # the output cannot be written
            console.json = False
            console.failure(unwritable)
            return unwritable.exit_code
    except (OutputClosed, SparkwrightError):  # no stream is left for a message
        return 1


def run_parsed(arguments: argparse.Namespace) -> int:
    """Run the command that a parser found; it returns its document, or an exit code, or neither."""
    console.json = arguments.json
    outcome = arguments.run(arguments)
    if isinstance(outcome, dict):
        console.document(outcome)
    return outcome if isinstance(outcome, int) else 0


def _run_and_report(
    run: Callable[[Sequence[str]], int], words: Sequence[str]
) -> tuple[int, dict[str, object] | None]:
    """Run the command line, and return the exit code and the error of the document."""
    try:
        with _translated_refusals():
            return run(words), None
    except SparkwrightError as error:
        console.failure(error)
        return error.exit_code, error.document()
    except SystemExit as end:
        console.json = console.json and bool(end.code)  # a help text is no document
        return int(end.code or 0), {
            "reference": "usage",
            "what": "The command line cannot be read.",
            "todo": UsageError.references["usage"].todo,
        }
    except KeyboardInterrupt:
        console.note("interrupted; what is finished is kept, and the next run continues from here")
        return 130, {"reference": "interrupted"}
    except Exception:  # a bug of ours, which the log has to explain
        return 3, {"reference": "fault", "log": write_log(words)}


@contextlib.contextmanager
def _translated_refusals() -> Iterator[None]:
    """Raise `disk-full` or `access-denied` for a file that the operating system refuses."""
    try:
        with translate_disk_full(Path(tempfile.gettempdir())):
            yield
    except OSError as error:
        # Without a name it is about a process, and not about a file.
        if error.filename is None or error.errno not in _REFUSALS:
            raise
        raise FileError(
            "access-denied", f"This user may not use {error.filename}.", details=[str(error)]
        ) from error


def write_log(words: Sequence[str]) -> str:
    """
    Write the log of the fault that is handled, and return its path; empty if it cannot be written.
    """
    versions = f"sparkwright {__version__}\nPython {platform.python_version()}\n"
    text = f"{versions}{platform.platform()}\ncommand: {words[:2]}\n\n{traceback.format_exc()}"
    log = ""
    with contextlib.suppress(OSError):
        # Not in the cache directory, which may be the cause.
        handle, log = tempfile.mkstemp(prefix="sparkwright-fault-", suffix=".log")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
    console.note(
        f"error: fault: this is a fault of sparkwright, not yours. Nothing finished is lost.\n  "
        f"please report it with {log or text}"
    )
    return log
