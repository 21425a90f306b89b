"""An environment with Ray beside a vLLM, for tests of clusters; Ray is installed once, into the user's cache (0.3 GB)."""

from __future__ import annotations

import shutil
import subprocess
import venv
from pathlib import Path

import filelock
import pytest
from tests.support import standin
from uv import find_uv_bin

from sparkwright.cli.options import default_cache

RAY = "2.60.0"


def _site(environment: Path) -> Path:
    return next(environment.glob("lib/python3.*/site-packages"))


@pytest.fixture(scope="session", name="ray_site")
def _ray_site() -> Path:
    """Return the packages of an environment with Ray."""
    import sys

    root = default_cache() / "tests" / f"ray-{RAY}-{sys.version_info[0]}.{sys.version_info[1]}"
    root.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(root.with_suffix(f"{root.suffix}.lock")):
        if not (root / "complete").exists():
            shutil.rmtree(root, ignore_errors=True)
            venv.create(root, with_pip=False, symlinks=True)
            subprocess.run([find_uv_bin(), "pip", "install", "--quiet", "--python", root / "bin" / "python", f"ray=={RAY}"], check=True)
            (root / "complete").touch()
    return _site(root)


@pytest.fixture(scope="session", name="rayed_standin")
def _rayed_standin(ray_site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with the stand-in and the real Ray."""
    python = standin.environment(tmp_path_factory.mktemp("rayed") / "venv")
    (_site(python.parents[1]) / "ray.pth").write_text(f"{ray_site}\n")
    return python
