"""
Wheel tags of a machine that is not this one: what its Python takes, by its version and that of its
C library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.tags import Tag

#: glibc 2.*this*: of DGX OS 7 (Ubuntu 24.04), on which wheels of another machine are to run;
#: nothing newer is taken or linked against.
GLIBC = 39

#: glibc 2.N → the old name of manylinux_2_N (PEP 600, "Legacy manylinux tags").
_LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}

#: The oldest glibc that manylinux wheels of a machine can name: the policies before manylinux2014
#: know no other machine than x86-64.
_OLDEST = {"x86_64": 5}


def manylinux(machine: str, newest: int) -> list[str]:
    """
    Return the platform tags that *machine* with glibc 2.*newest* takes, best first, old names
    beside their new ones.
    """
    found = []
    for minor in range(newest, _OLDEST.get(machine, 17) - 1, -1):
        found += [
            f"manylinux_2_{minor}_{machine}",
            *([f"{_LEGACY[minor]}_{machine}"] if minor in _LEGACY else []),
        ]
    return found


def tags(python: Sequence[int], machine: str, newest: int = GLIBC) -> list[Tag]:
    """Return the wheel tags that CPython *python* takes there, best first."""
    from packaging.tags import compatible_tags, cpython_tags

    version, platforms = tuple(python[:2]), manylinux(machine, newest)
    return [
        *cpython_tags(version, platforms=platforms),
        *compatible_tags(version, f"cp{version[0]}{version[1]}", platforms),
    ]
