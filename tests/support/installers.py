"""The installers of others, pip and uv, in an environment of the test."""

import subprocess
import sys
from pathlib import Path


def environment(folder: Path) -> Path:
    """Make an environment without pip in *folder*, and return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


def install(installer: str, python: Path) -> list[str | Path]:
    """Return the command by which *installer* installs what its further words name for *python*, without a cache."""
    if installer == "pip":
        return [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-cache-dir"]
    return ["uv", "pip", "install", "--quiet", "--no-cache", "--python", python]
