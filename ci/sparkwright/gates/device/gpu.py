"""
The GPU at hand, asked through its driver in a process of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from sparkwright.core import process
from sparkwright.core.process import Limits

DRIVER = Path(__file__).parent / "inside" / "driver.py"

#: CUDA reserves far more address space than it uses, so that a limit on it would only keep it from starting.
NO_LIMIT = 1 << 30

#: Generations that have a family target (``121f``), which alone gives them the FP4 instructions; see gates.md §4.1.
_FAMILIES = (10, 11, 12)


class Gpu(msgspec.Struct, frozen=True):
    """
    The first GPU.

    Attributes:
        driver: The CUDA version that the driver offers, as 1000 × major + 10 × minor.
        memory: In bytes; *clock_khz* and *memory_khz* are the highest clocks.
    """

    name: str
    major: int
    minor: int
    driver: int
    processors: int
    clock_khz: int
    memory_khz: int
    memory: int

    @property
    def target(self) -> str:
        """What nvcc is to compile for, as it follows ``sm_``."""
        return f"{self.major}{self.minor}" + ("f" if self.major in _FAMILIES else "")

    def __str__(self) -> str:
        about = f"SM {self.major}.{self.minor}, {self.processors} multiprocessors, {self.memory / 1e9:.0f} GB"
        return f"{self.name}, {about}, driver for CUDA {self.driver // 1000}.{self.driver % 1000 // 10}"


class Absent(msgspec.Struct, frozen=True):
    """Why there is no GPU."""

    absent: str


def ask(scratch: Path, seconds: float = 60) -> Gpu | Absent:
    """Return the first GPU, or why there is none that answers within *seconds*."""
    ended = process.run_limited([sys.executable, str(DRIVER), "facts"], Limits(seconds, NO_LIMIT, 1), scratch / "facts.log")
    if ended.late:
        return Absent(f"the CUDA driver did not answer within {seconds:g} s")
    try:
        return msgspec.json.decode(ended.tail.splitlines()[-1], type=Gpu)
    except (msgspec.MsgspecError, IndexError):
        pass
    try:
        return msgspec.json.decode(ended.tail.splitlines()[-1], type=Absent)
    except (msgspec.MsgspecError, IndexError):
        return Absent(f"the CUDA driver gave no answer (status {ended.status}): {ended.tail[-200:]}")
