"""
The platform tag that a wheel has, against the one that auditwheel would give it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from sparkwright.audit import checkers
from sparkwright.audit.checkers import PATIENCE, Outcome
from sparkwright.audit.wheel_reader import Subject

_MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)_\w+")


class _WheelAnswer(msgspec.Struct):
    sym_tag: str | None = None
    versioned_symbols: Mapping[str, list[str]] = {}


def promise(platforms: Sequence[str]) -> tuple[int, int] | None:
    """Return the lowest glibc among manylinux tags; None without one."""
    return min(((int(found[1]), int(found[2])) for platform in platforms if (found := _MANYLINUX.fullmatch(platform))), default=None)


def platform_tag(wheel: Path, about: Subject, scratch: Path, patience: float = PATIENCE) -> Outcome:
    """Return whether auditwheel's tag, by the versions of the symbols that the wheel wants, is as old as the tag that the wheel has."""
    promised = promise(about.platforms)

    def work() -> tuple[str, list[tuple[str, str, str]]]:
        answer = checkers.answer(
            "auditwheel", ["show", "--json", "--disable-isa-ext-check", wheel.absolute()], scratch, _WheelAnswer, patience
        )
        real = promise([answer.sym_tag or ""])
        says = f"{answer.sym_tag}, promised: {', '.join(about.platforms)}"
        if real is None or (promised and real > promised):
            return says, [("", "tag-newer", f"auditwheel says {says}")]
        return says, []

    return checkers.outcome("auditwheel", "" if promised else "its tag promises no version of glibc", work)
