"""
The unit manifest: for each translation unit its object, its target, its architectures, and the
digests of its device code.

The linker copies the fatbins of the objects into the library as they are, so that a cubin in a
wheel leads back to its source by its sha256. The manifest is part of the wheel's build record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sparkwright.builder.errors import BuildError
from sparkwright.builder.wheel import elf, fatbin
from sparkwright.builder.wheel.elf import ElfUnreadable
from sparkwright.builder.wheel.fatbin import FatbinUnreadable
from sparkwright.core.digest import sha256_bytes

if TYPE_CHECKING:
    from sparkwright.builder.arch.plan import PlannedUnit


class CompiledUnit(msgspec.Struct, frozen=True):
    """
    A CUDA translation unit of a wheel.

    Attributes:
        source: Relative to the source tree; a generated one begins with ``<build>/``.
        target: The CMake target.
        object: Relative to the build folder.
        library: The member of the wheel that its target is; empty for an object or static library,
            which is linked into others.
        gencode: As in the plan: sorted entries ``virtual:real``.
        code: Arch and sha256 of each cubin (``sm_121f``) and PTX text (``compute_80``) in its
            object, sorted; empty for relocatable device code, which the device linker changes.
    """

    source: str
    target: str
    object: str
    library: str
    gencode: tuple[str, ...]
    code: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return f"{self.source} (target {self.target})"


def record(
    build: Path, units: Iterable[PlannedUnit], libraries: Mapping[str, str]
) -> tuple[CompiledUnit, ...]:
    """
    Return the manifest of the planned *units*, which have been compiled in the folder *build*.

    Args:
        libraries: Target → member of the wheel.

    Raises:
        compile-failed: An object is missing, or is not what a compiler writes.
    """
    return tuple(
        CompiledUnit(
            unit.source,
            unit.target,
            unit.object,
            libraries.get(unit.target, ""),
            unit.gencode,
            _code(build / unit.object),
        )
        for unit in sorted(units, key=lambda unit: (unit.target, unit.source))
    )


def _code(path: Path) -> tuple[tuple[str, str], ...]:
    try:
        with elf.mapped(path) as data:
            if any(section.name == elf.RELOCATABLE_FATBIN for section in elf.sections(data)):
                return ()
            entries = fatbin.entries(data, elf.shared_object(data).fatbins)
            code = ((entry.target, sha256_bytes(fatbin.unpack(data, entry))) for entry in entries)
            return tuple(sorted(code))
    except (OSError, ElfUnreadable, FatbinUnreadable) as error:
        what = f"{path.name} is not an object file with device code."
        raise BuildError("compile-failed", what, details=[str(error)]) from error
