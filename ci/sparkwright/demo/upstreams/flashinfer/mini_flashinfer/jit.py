"""Where the kernels lie that are compiled at run time."""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).parent / "data"


def include_folder() -> Path:
    """Return the folder for the compiler's ``-I``."""
    return DATA / "include"


def sources() -> list[Path]:
    """Return every kernel source that the package carries."""
    return sorted((DATA / "csrc").glob("*.cu"))
