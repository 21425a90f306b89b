"""Programs of other projects, each in an environment of its own that is made of exactly the wheels that a lock names by hash."""

from __future__ import annotations

import platform
from pathlib import Path

from sparkwright.builder.environment import pylock, toolchain
from sparkwright.core import digest
from sparkwright.core.console import console
from sparkwright.forks.context import RunContext


def obtain(session: RunContext, name: str, title: str, lock: Path) -> Path:
    """
    Return the Python of the environment *name*, installed from the file *lock*; *title* is what people call it.

    Raises:
        source-unreachable, source-mismatch, offline, disk-full: See `sparkwright.builder.environment.toolchain.download`.
        command-failed: The installer failed.
    """
    wheels = pylock.select(lock)
    key = digest.key(name, {"wheels": wheels, "python": platform.python_version(), "machine": platform.machine()})
    root = session.store.root / "environments" / f"{name}-{key[:16]}"
    if not (root / "complete").exists():
        with session.store.lock(f"environment-{name}-{key[:16]}"):
            if not (root / "complete").exists():
                with console.step(f"{title}: {len(wheels)} locked wheels"):
                    toolchain.install(session.store, root, toolchain.download(session.store, wheels, offline=session.offline))
                (root / "complete").write_text("made whole by sparkwright\n")
    return root / "bin" / "python"
