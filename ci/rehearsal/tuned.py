"""
Pack the tuned configurations of the rehearsal into a wheel, and make its environment.

    tuned.py ROOT

The wheel lies in ``ROOT/tuned`` beside the files, its environment in ``ROOT/environments/tuned``.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from sparkwright.builder.wheel import archive
from sparkwright.forks.stack import MOE_CONFIGS


def main() -> None:
    """Pack the files that `sparkwright model tune` wrote, as the writer of grafts does."""
    root = Path(sys.argv[1])
    output, environments = root / "tuned", root / "environments"
    # `model tune` leaves a file that is slower for a batch in its output folder.
    folders = [root / "program" / "build" / "2026.06" / "moe-9.0a", root / "slower"]
    files = sorted(file for folder in folders if folder.is_dir() for file in folder.iterdir())
    output.mkdir()
    for file in files:
        shutil.copy(file, output)
    (wheel,) = (root / "dist").glob("*.whl")
    members = {f"vllm/{MOE_CONFIGS}/{path.name}": path.read_bytes() for path in files}
    members = {name: data for name, data in members.items() if name.endswith(".json")}
    version = archive.WheelName.of(wheel.name).version
    archive.rewrite(wheel, output, version=version, replace=members)
    target = environments / "tuned"
    shutil.copytree(environments / "candidate", target, symlinks=True, copy_function=os.link)
    (site,) = target.glob("lib/python3*/site-packages")
    for name, data in members.items():
        (site / name).write_bytes(data)


if __name__ == "__main__":
    main()
