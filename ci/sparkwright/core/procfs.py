"""CPU that processes use, and memory that is free."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import psutil


def cpu_seconds_below(pid: int) -> float:
    """
    Return the seconds of CPU that the descendants of *pid* used, and those that they waited for.
    """
    seconds = 0.0
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                seconds += sum(child.cpu_times()[:4])
    return seconds


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except OSError:
        return ""


def memory_limit() -> int:
    """Return the bytes of memory of this machine, or of this container if it may use less."""
    total = psutil.virtual_memory().total
    text = _read(Path("/sys/fs/cgroup/memory.max")).strip()
    return min(int(text), total) if text.isdigit() else total


def available_megabytes() -> int:
    """Return the megabytes that programs can still take on this machine or in this container."""
    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    used = _read(group / "memory.current").strip()
    if used.isdigit():
        # Cached files are counted as used and given back when needed.
        files = re.search(r"^inactive_file (\d+)", _read(group / "memory.stat"), re.MULTILINE)
        free = min(free, memory_limit() - int(used) + (int(files[1]) if files else 0))
    return free // 1_000_000
