"""
Files of an official wheel that the GPU of a stack cannot use, and that a graft leaves out.

A library is left out if the GPU loads the code of none of its compiled units, which follows from
the library; environment.yaml names other files, each with the reason. In a library that stays, a
unit whose code the GPU loads holds nothing else.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from itertools import groupby
from pathlib import Path

import msgspec

from sparkwright.builder import BuildError
from sparkwright.builder.toolchain import ForkEnvironment
from sparkwright.builder.wheel import elf, gpu_target
from sparkwright.builder.wheel.gpu_target import parsed, taken
from sparkwright.core.zips import zip_file, zip_members


class Omissions(msgspec.Struct, frozen=True):
    """
    The parts of an official wheel that a graft leaves out.

    Attributes:
        reasons: A library, or a glob of environment.yaml → why it is of no use.
        files: The members that these are.
        trimmed: Libraries without the code for other GPUs, with their bytes.
    """

    reasons: dict[str, str] = {}
    files: frozenset[str] = frozenset()
    trimmed: dict[str, bytes] = {}


def find(base: Path, arch: str, replaced: Collection[str], settings: ForkEnvironment) -> Omissions:
    """
    Return what a GPU of *arch* (``12.1f``) cannot use in the official wheel *base*.

    Args:
        replaced: Libraries that are compiled here.

    Raises:
        omission-idle: An entry of environment.yaml matches nothing.
    """
    gpu = parsed(f"sm_{arch.replace('.', '')}")[:2]
    reasons, files, trimmed, idle = dict[str, str](), set[str](), dict[str, bytes](), list[str]()
    with zip_file(base) as wheel:
        members = zip_members(wheel, base.name).keys() - {*replaced}
        for entry in settings.unused:
            matching = fnmatch.filter(members, entry.glob)
            if not matching:
                idle.append(entry.glob)
            else:
                reasons[entry.glob] = entry.reason
                files.update(matching)
        for name in sorted(name for name in members - files if name.endswith(".so")):
            data = wheel.read(name)
            try:
                fatbins = elf.shared_object(data).fatbins
                entries = elf.fatbin_entries(data, fatbins)
                units = [list(unit) for _, unit in groupby(entries, lambda e: e.container)]
            except elf.ElfUnreadable:
                # The audit says so.
                continue
            usable = [taken(unit, gpu) for unit in units]
            if usable == units:
                continue
            if any(usable):
                trimmed[name] = gpu_target.trimmed(data, gpu)
            else:
                files.add(name)
                targets = ", ".join(sorted({entry.target for unit in units for entry in unit}))
                reasons[name] = (
                    f"SM {gpu[0]}.{gpu[1]} loads none of its {len(units)} units ({targets})"
                )
    if idle:
        raise BuildError(
            "omission-idle",
            f"{len(idle)} entries of `unused` match nothing in {base.name}.",
            details=idle,
        )
    return Omissions(reasons, frozenset(files), trimmed)
