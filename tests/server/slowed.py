"""An environment that is another one with the faults of `tests/server/faulty` in it: the candidate of an A/B with one known difference."""

from __future__ import annotations

import venv
from pathlib import Path

from sparkwright.bench.server import wheel_identity

FAULTY = Path(__file__).parent / "faulty"


def environment(root: Path, python: Path) -> Path:
    """Make it in *root* from the environment of *python*, which stays as it is, and return its Python."""
    venv.create(root, with_pip=False, symlinks=True)
    site = next(root.glob("lib/python3.*/site-packages"))
    (site / "another.pth").write_text(f"{wheel_identity.site_packages(python)}\n{FAULTY}\n")
    return root / "bin" / "python"
