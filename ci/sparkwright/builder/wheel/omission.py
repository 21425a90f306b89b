"""
Files of an official wheel that the GPU of a stack cannot use, and that a graft leaves out.

A library is left out if the GPU loads the code of none of its compiled units, which follows from
the library; environment.yaml names other files, each with the reason. A library that stays is
unchanged.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from pathlib import Path

from sparkwright.builder import BuildError
from sparkwright.builder.toolchain import ForkEnvironment
from sparkwright.builder.wheel import elf
from sparkwright.builder.wheel.gpu_target import parsed, support_level
from sparkwright.core.zips import zip_file, zip_members


def find(
    base: Path, arch: str, replaced: Collection[str], settings: ForkEnvironment
) -> tuple[dict[str, str], frozenset[str]]:
    """
    Return what a GPU of *arch* (``12.1f``) cannot use in the official wheel *base*: a library, or a
    glob of environment.yaml → the reason; and the members that these are.

    Args:
        replaced: Libraries that are compiled here.

    Raises:
        omission-idle: An entry of environment.yaml matches nothing.
    """
    gpu = parsed(f"sm_{arch.replace('.', '')}")[:2]
    reasons, files = dict[str, str](), set[str]()
    with zip_file(base) as wheel:
        members = zip_members(wheel, base.name).keys() - {*replaced}
        for unused in settings.unused:
            matching = fnmatch.filter(members, unused.glob)
            if not matching:
                raise BuildError(
                    "omission-idle", f"`unused`: {unused.glob} matches nothing in {base.name}."
                )
            reasons[unused.glob] = unused.reason
            files.update(matching)
        for name in sorted(name for name in members - files if name.endswith(".so")):
            data = wheel.read(name)
            try:
                entries = list(elf.fatbin_entries(data, elf.shared_object(data).fatbins))
            except elf.ElfUnreadable:
                # The audit says so.
                continue
            cubins = [entry.arch for entry in entries if entry.kind == "cubin"]
            texts = [entry.arch for entry in entries if entry.kind == "ptx"]
            if entries and support_level(cubins, texts, gpu) == "nothing":
                files.add(name)
                units = len({entry.container for entry in entries})
                targets = ", ".join(sorted({entry.target for entry in entries}))
                reasons[name] = f"SM {gpu[0]}.{gpu[1]} loads none of its {units} units ({targets})"
    return reasons, frozenset(files)
