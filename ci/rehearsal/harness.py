"""Put the lm-evaluation-harness of a rehearsal where the gates look for it: harness.py ROOT."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from sparkwright.builder import pylock, toolchain
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.gates import accuracy


def main() -> None:
    """Copy the environment, whose links are not of its own folder."""
    root = Path(sys.argv[1])
    project = Project(root / "program", os.environ["STACK"])
    context = RunContext(project, Store(root / "store"), (), root)
    wheels = pylock.select(project.root / accuracy.LOCK)
    target = toolchain.environment_folder(context, accuracy.TITLE, wheels)
    shutil.copytree(root / "environments" / "harness", target, symlinks=True)
    (target / "complete").write_text("made of a rehearsal\n", "utf-8")


if __name__ == "__main__":
    main()
