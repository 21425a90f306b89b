"""What an official wheel holds, read from its bytes, to stand beside what was compiled here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparkwright.audit import policy, wheel_reader
from sparkwright.core import digest
from sparkwright.core.errors import WheelError
from sparkwright.forks.context import RunContext
from sparkwright.release.decide.libraries import Found
from sparkwright.release.manifest.records import Fork, Library


def libraries(session: RunContext, path: Path) -> tuple[Library, ...]:
    """
    Return the libraries in the wheel at *path*, with the machine code that they hold, as a release tells of its own.

    Raises:
        wheel-invalid, archive-unsafe: It is no wheel, or a hostile one. disk-full: There is no room for its largest library.
    """
    about = wheel_reader.subject(path)
    found = Found(about, policy.load(session.project.audit_file, session.project.spec.arch))
    wheel_reader.walk(path, about, session.store.folder("work"), found.visit)
    return tuple(Library(one.name, one.size, "base", found.counts.get(one.name, {})) for one in found.binaries)


def of(session: RunContext, forks: Sequence[Fork], wheels: Sequence[Path]) -> dict[str, tuple[Library, ...]]:
    """
    Return what the official *wheels* hold, by the fork that was grafted on them.

    Raises:
        wheel-mismatch: A wheel is the official one of none of *forks*.
    """
    made = {}
    for path in wheels:
        sha256 = digest.sha256_file(path)
        fork = next((one for one in forks if one.base == sha256), None)
        if fork is None:
            known = [f"{one.name}: {one.base}" for one in forks if one.base] or ["no fork of it is a graft"]
            todo = "Name the official wheel that the release was grafted on; `sparkwright fetch` keeps it in the store."
            raise WheelError(
                "wheel-mismatch",
                f"{path.name} is not the official wheel under any fork of this release.",
                details=[f"its sha256: {sha256}", *known],
                todo=todo,
            )
        made[fork.name] = libraries(session, path)
    return made
