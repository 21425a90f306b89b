"""Environments that are another one with a fault of `tests/server/faulty` in it: the sides of an A/B with a known difference."""

from __future__ import annotations

import json
import venv
from pathlib import Path

from sparkwright.bench.server import wheel_identity

FAULTY = Path(__file__).parent / "faulty"


def environment(root: Path, python: Path, step: float) -> Path:
    """Make an environment in *root* from that of *python*, with *step* seconds of sleep in each step of its server, and return its Python."""
    venv.create(root, with_pip=False, symlinks=True)
    site, original = next(root.glob("lib/python3.*/site-packages")), wheel_identity.site_packages(python)
    fault = json.dumps({"fault": "stall", "seconds": step})
    (site / "another.pth").write_text(f"{original}\n{FAULTY}\nimport os; os.environ['SPARKWRIGHT_TEST_FAULT'] = {fault!r}\n")
    for info in original.glob("vllm-*.dist-info"):
        (site / info.name).symlink_to(info)
    return root / "bin" / "python"
