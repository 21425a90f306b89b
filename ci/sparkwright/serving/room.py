"""Whether the memory that is free now holds the server: a Spark has one for processors and GPU, and other programs are in it, too."""

from __future__ import annotations

import contextlib

from sparkwright.core import process
from sparkwright.serving.errors import ServeError

#: Megabytes from which on a program is worth naming. *MOST*: how many are.
LEAST, MOST = 200, 6


def check(needs: int, floor: int) -> None:
    """
    Refuse to start what other programs leave no room for.

    Args:
        needs: Megabytes that the server takes. *floor*: that stay free beside it.

    Raises:
        memory-held: There is less.
    """
    free = process.available_megabytes()
    if needs + floor > free:
        says = f"{needs:,} MB for the server and {floor:,} MB that stay free are {needs + floor:,} MB; {free:,} MB are free now"
        raise ServeError(
            "memory-held",
            "There is not enough free memory for the server.",
            details=[says, *holders()],
            data={"needs": needs, "free": free},
        )


def holders() -> list[str]:
    """Return the programs that hold most of the memory."""
    import psutil

    found = []
    for one in psutil.process_iter(["pid", "name", "memory_info"]):
        with contextlib.suppress(psutil.Error, AttributeError):
            held = one.info["memory_info"].rss // 1_000_000
            if held >= LEAST:
                found.append((held, f"process {one.info['pid']}, {one.info['name']}: {held:,} MB"))
    return [says for _, says in sorted(found, reverse=True)[:MOST]]
