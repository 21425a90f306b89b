"""What a shared library wants from the system that loads it."""

from __future__ import annotations

import re
from typing import BinaryIO

_VERSION = re.compile(r"(GLIBC|GLIBCXX|CXXABI)_(\d+(?:\.\d+)+)")


def version_text(version: tuple[int, ...]) -> str:
    """Return ``(2, 28)`` as people write it; empty for none."""
    return ".".join(map(str, version))


def wanted_versions(library: BinaryIO) -> dict[str, tuple[int, ...]]:
    """Return the highest version of glibc, libstdc++ and its ABI that *library* wants (its ``.gnu.version_r``)."""
    from elftools.elf.elffile import ELFFile
    from elftools.elf.gnuversions import GNUVerNeedSection

    found: dict[str, tuple[int, ...]] = {}
    for section in ELFFile(library).iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for _, auxiliaries in section.iter_versions():
                for auxiliary in auxiliaries:
                    if match := _VERSION.fullmatch(auxiliary.name):
                        version = tuple(int(part) for part in match[2].split("."))
                        found[match[1]] = max(found.get(match[1], ()), version)
    return found
