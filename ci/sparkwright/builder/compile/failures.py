"""What the end of a compiler means, and the error that says so to people."""

from __future__ import annotations

import re
import signal

from sparkwright.builder.errors import BuildError
from sparkwright.core.errors import SparkwrightError, StoreError

#: Lines of the compiler that an error repeats; the log has all.
LINES = 25
#: How the drivers of GCC and nvcc say that a program of theirs was killed; they themselves end with an ordinary status.
_KILLED = re.compile(r"died due to signal 9\b|Killed signal terminated program|terminated by signal 9\b|^Killed$", re.MULTILINE)
_CRASHED = re.compile(r"died due to signal (\d+)|terminated by signal (\d+)|internal compiler error|signal terminated program")
_FULL = re.compile(r"No space left on device|Disk quota exceeded")


def killed(status: int, words: str) -> bool:
    """Was the compiler, or a program that it called, ended by signal 9, which the kernel sends where memory runs out?"""
    return status in (-signal.SIGKILL, 128 + signal.SIGKILL) or (status != 0 and bool(_KILLED.search(words)))


def failure(unit: str, status: int, words: str) -> SparkwrightError:
    """
    Return the error for *unit*.

    Args:
        status: Of the compiler; negative when a signal ended it.
        words: The last that it said.
    """
    said = [line for line in words.splitlines() if line.strip()][-LINES:]
    if _FULL.search(words):
        return StoreError("disk-full", f"There is no room for what compiling {unit} writes.", details=said, data={"unit": unit})
    if number := _signal(status, words):
        twice = ", twice; the second time nothing ran beside it" if number == signal.SIGKILL else ""
        what = f"The compiler of {unit} was ended by {_name(number)}{twice}."
        return BuildError("compiler-crashed", what, details=said, data={"unit": unit, "signal": number})
    if _CRASHED.search(words):
        return BuildError("compiler-crashed", f"The compiler of {unit} crashed.", details=[*said, f"status: {status}"], data={"unit": unit})
    return BuildError("compile-failed", f"{unit} does not compile.", details=[*said, f"status: {status}"], data={"unit": unit})


def _signal(status: int, words: str) -> int:
    if killed(status, words):
        return signal.SIGKILL
    match = _CRASHED.search(words)
    return -status if status < 0 else int((match and (match[1] or match[2])) or 0)


def _name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def too_small(unit: str, needed: int, budget: int, available: int) -> BuildError:
    """Return the error for *unit*, whose compiler is known to hold *needed* megabytes."""
    return BuildError(
        "memory-too-small",
        f"Compiling {unit} takes {needed / 1000:.1f} GB, as measured; there are {min(budget, available) / 1000:.1f} GB.",
        details=_memory(budget, available),
        data={"unit": unit, "needed_megabytes": needed, "budget_megabytes": budget, "available_megabytes": available},
    )


def exceeded(unit: str, peak: int, budget: int, available: int) -> BuildError:
    """Return the error for *unit*, which ran alone and held *peak* megabytes."""
    return BuildError(
        "memory-exceeded",
        f"Compiling {unit}, with nothing beside it, came to {peak / 1000:.1f} GB and was ended.",
        details=_memory(budget, available),
        data={"unit": unit, "peak_megabytes": peak, "budget_megabytes": budget, "available_megabytes": available},
    )


def _memory(budget: int, available: int) -> list[str]:
    return [f"budget: {budget / 1000:.1f} GB (--memory)", f"available on this machine: {available / 1000:.1f} GB"]


def hung(unit: str, seconds: float, idle: float) -> BuildError:
    """Return the error for *unit*, which has run for so many *seconds* and was *idle* for the last of them."""
    what = f"The compiler of {unit} was ended after {seconds / 60:.0f} min: for the last {idle / 60:.0f} min it used no CPU."
    return BuildError("compiler-hung", what, data={"unit": unit, "seconds": round(seconds), "idle_seconds": round(idle)})
