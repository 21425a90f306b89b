"""Programs of other projects, each in an environment of its own that is made of exactly the wheels that a lock names by hash."""

from __future__ import annotations

import platform
from pathlib import Path

from sparkwright.builder import pylock, toolchain
from sparkwright.core.files import content_key
from sparkwright.forks.context import RunContext


def obtain(context: RunContext, name: str, title: str, lock: Path) -> Path:
    """
    Return the Python of the environment *name*, installed from the file *lock*; *title* is what people call it.

    Raises:
        source-unreachable, source-mismatch, offline, disk-full: See `sparkwright.builder.pylock.download`.
        command-failed: The installer failed.
    """
    wheels = pylock.select(lock)
    key = content_key(name, {"wheels": wheels, "python": platform.python_version(), "machine": platform.machine()})
    root = context.store.root / "environments" / f"{name}-{key[:16]}"
    with toolchain.completing(context.store, root) as lacking:
        if lacking:
            toolchain.install(context, root, wheels, title)
    return root / "bin" / "python"
