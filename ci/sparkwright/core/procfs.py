"""Memory and CPU that processes use, and memory that is free, from /proc."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK = os.sysconf("SC_CLK_TCK")


class Use(msgspec.Struct, frozen=True):
    """Bytes of memory that descendants of a process hold, and seconds of CPU that they used."""

    memory: int = 0
    cpu: float = 0.0


def use_below(pid: int) -> Use:
    """Return what the descendants of *pid* hold together; nothing for a process that is no more."""
    memory, ticks = 0, 0
    for child in _below(pid):
        try:
            # The name in the second field may hold blanks and brackets (proc(5)).
            fields = (
                Path(f"/proc/{child}/stat")
                .read_text("utf-8", "replace")
                .rpartition(") ")[2]
                .split()
            )
        except OSError:
            continue
        # utime, stime and those of children that were waited for; rss in pages.
        ticks += sum(map(int, fields[11:15]))
        memory += int(fields[21]) * _PAGE
    return Use(memory, ticks / _TICK)


def _below(pid: int) -> Iterator[int]:
    try:
        children = [
            int(word)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for word in _read(task / "children").split()
        ]
    except OSError:
        return
    for child in children:
        yield child
        yield from _below(child)


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except OSError:
        return ""


def memory_limit() -> int:
    """Return the bytes of memory of this machine, or of this container if it may use less."""
    import psutil

    total = psutil.virtual_memory().total
    text = _read(Path("/sys/fs/cgroup/memory.max")).strip()
    return min(int(text), total) if text.isdigit() else total


def available_megabytes() -> int:
    """Return the megabytes that programs can still take on this machine or in this container."""
    import psutil

    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    used = _read(group / "memory.current").strip()
    if used.isdigit():
        # Cached files are counted as used and given back when needed.
        files = re.search(r"^inactive_file (\d+)", _read(group / "memory.stat"), re.MULTILINE)
        free = min(free, memory_limit() - int(used) + (int(files[1]) if files else 0))
    return free // 1_000_000
