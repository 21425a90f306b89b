"""Why a compiler failed, read from what ninja prints, and the error that says so."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator

import msgspec

from sparkwright.builder.errors import BuildError
from sparkwright.core.errors import SparkwrightError, StoreError

#: Lines of the compiler that an error repeats; the log has all.
LINES = 25
#: The value of NINJA_STATUS. A failed edge names its outputs after it (ninja 1.13 adds the status).
STATUS = "[%f/%t] "
_STATUS = re.compile(r"\[(\d+)/(\d+)\] ")
_FAILED = re.compile(r"FAILED: (?:\[code=(\d+)\] )?(.+)")
#: How the drivers of GCC and nvcc report a killed program, and how compilers ask in vain for
#: memory.
_KILLED = re.compile(
    r"died due to signal 9\b|Killed signal terminated program|terminated by signal 9\b|^Killed$"
    r"|out of memory allocating|virtual memory exhausted|std::bad_alloc|Memory allocation failure",
    re.MULTILINE,
)
_CRASHED = re.compile(
    r"died due to signal (\d+)|terminated by signal (\d+)|internal compiler error"
    r"|signal terminated program"
)
_FULL = re.compile(r"No space left on device|Disk quota exceeded")


class FailedEdge(msgspec.Struct, frozen=True):
    """
    A build edge that failed.

    Attributes:
        status: Exit status of the command; 128 and the signal's number if a signal ended it.
        text: What the command printed.
    """

    output: str
    status: int
    text: str

    @property
    def out_of_memory(self) -> bool:
        """Was the compiler killed by signal 9, or was it denied memory?"""
        return self.status == 128 + signal.SIGKILL or bool(_KILLED.search(self.text))


def progress(line: str) -> tuple[int, int] | None:
    """Return how many edges are finished, and of how many, if *line* is a status line of ninja."""
    match = _STATUS.match(line)
    return (int(match[1]), int(match[2])) if match else None


def failed_edges(lines: Iterable[str]) -> Iterator[FailedEdge]:
    """Yield the failed edges in the *lines* that ninja printed, in their order."""
    edge: re.Match[str] | None = None
    text: list[str] = []
    for line in [*lines, "ninja: "]:
        match = _FAILED.match(line)
        if edge and (match or progress(line) or line.startswith("ninja: ")):
            # The first line is the command.
            yield FailedEdge(edge[2].split()[0], int(edge[1] or 1), "\n".join(text[1:]))
            edge = None
        if match:
            edge, text = match, []
        elif edge:
            text.append(line)


def compile_error(unit: str, failed: FailedEdge) -> SparkwrightError:
    """Return the error for *unit*, or for the output of another build step."""
    lines = [line for line in failed.text.splitlines() if line.strip()][-LINES:]
    if _FULL.search(failed.text):
        what = f"There is no room for what compiling {unit} writes."
        return StoreError("disk-full", what, details=lines, data={"unit": unit})
    match = _CRASHED.search(failed.text)
    # nvcc ends with status 255 for reasons of its own.
    number = failed.status - 128 if 128 < failed.status <= 128 + signal.SIGRTMAX else 0
    number = number or int((match and (match[1] or match[2])) or 0)
    if number:
        what = f"The compiler of {unit} was ended by signal {number} ({signal.strsignal(number)})."
        data = {"unit": unit, "signal": number}
        return BuildError("compiler-crashed", what, details=lines, data=data)
    details = [*lines, f"status: {failed.status}"]
    if match:
        what = f"The compiler of {unit} crashed."
        return BuildError("compiler-crashed", what, details=details, data={"unit": unit})
    what = f"{unit} does not compile."
    return BuildError("compile-failed", what, details=details, data={"unit": unit})


def memory_too_small(unit: str, needed: int, budget: int, available: int) -> BuildError:
    """Return the error for *unit*, whose compiler was measured to hold *needed* megabytes."""
    return BuildError(
        "memory-too-small",
        f"Compiling {unit} takes {needed / 1000:.1f} GB, as measured; "
        f"there are {min(budget, available) / 1000:.1f} GB.",
        details=_memory(budget, available),
        data={"unit": unit, "needed_megabytes": needed, "budget_megabytes": budget},
    )


def memory_exceeded(unit: str, peak: int, budget: int, available: int) -> BuildError:
    """Return the error for *unit*, killed for memory twice, at last with *peak* megabytes."""
    return BuildError(
        "memory-exceeded",
        f"The compiler of {unit} was killed for memory twice; nothing ran beside it the second "
        f"time, when its largest process came to {peak / 1000:.1f} GB.",
        details=_memory(budget, available),
        data={"unit": unit, "peak_megabytes": peak, "budget_megabytes": budget},
    )


def _memory(budget: int, available: int) -> list[str]:
    return [
        f"budget: {budget / 1000:.1f} GB (--memory)",
        f"available on this machine: {available / 1000:.1f} GB",
    ]


def hung(unit: str, seconds: float, patience: float) -> BuildError:
    """Return the error for *unit*, which was ended after *seconds* because it used no CPU."""
    what = (
        f"The compiler of {unit} was ended after {seconds / 60:.0f} min: "
        f"for the last {patience / 60:g} min it used no CPU."
    )
    data = {"unit": unit, "seconds": round(seconds), "idle_seconds": round(patience)}
    return BuildError("compiler-hung", what, data=data)
