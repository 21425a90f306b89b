"""
The user's configuration: ``config.yaml`` in the platform's folder, or the file that
``SPARKWRIGHT_CONFIG`` names.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec
import platformdirs

from sparkwright.core import strict_yaml
from sparkwright.core.errors import UsageError


class CompilerCache(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The cache of compiled units, beside the build folder.

    Attributes:
        tool: ``auto`` takes ccache if it is installed.
        size: The most that the local cache may hold, as ccache spells it.
    """

    tool: Literal["auto", "none"] = "auto"
    size: str = "10G"


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The user's configuration.

    Attributes:
        mirrors: Beginning of an address → its replacement.
        releases: The index that ``install`` takes releases from.
    """

    mirrors: dict[str, str] = {}
    compiler_cache: CompilerCache = CompilerCache()
    releases: str = ""


def config() -> Config:
    """
    Return the user's configuration; the defaults where there is no file.

    Raises:
        file-invalid: The file is damaged, or ``SPARKWRIGHT_CONFIG`` names one that does not exist.
    """
    named = os.environ.get("SPARKWRIGHT_CONFIG")
    folder = platformdirs.user_config_path("sparkwright", appauthor=False)
    path = Path(named) if named else folder / "config.yaml"
    return strict_yaml.load(path, Config) if named or path.is_file() else Config()


def mirror_map(options: list[str]) -> dict[str, str]:
    """
    Return the mirrors of the user's configuration and of the ``--mirror URL=REPLACEMENT``
    *options*, which come first.

    Raises:
        usage: An option has no ``=`` or an empty side.
        file-invalid: As `config`.
    """
    pairs = [option.partition("=") for option in options]
    for option, (url, _, replacement) in zip(options, pairs, strict=True):
        if not url or not replacement:
            raise UsageError("usage", f"--mirror {option!r} is not of the form URL=REPLACEMENT.")
    return {**config().mirrors, **{url: replacement for url, _, replacement in pairs}}
