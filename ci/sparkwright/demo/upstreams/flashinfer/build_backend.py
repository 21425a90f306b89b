"""The build backend: setuptools, after the kernel sources have been copied into the package."""

import shutil
from pathlib import Path
from typing import Any

from setuptools import build_meta  # type: ignore[import-untyped,unused-ignore]

ROOT = Path(__file__).parent.resolve()
DATA = ROOT / "mini_flashinfer" / "data"


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    for name in ("csrc", "include"):
        shutil.rmtree(DATA / name, ignore_errors=True)
        shutil.copytree(ROOT / name, DATA / name)
    return str(build_meta.build_wheel(wheel_directory, config_settings, metadata_directory))
