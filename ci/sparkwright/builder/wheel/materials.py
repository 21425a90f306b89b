"""
What a wheel is made of beside the fork's own source, gathered from the lock for its bill of
materials.
"""

from __future__ import annotations

import base64
import contextlib

from sparkwright.builder import source_tree
from sparkwright.builder.environment import pylock, toolchain
from sparkwright.builder.source_tree import SourceTree
from sparkwright.builder.wheel import version_label
from sparkwright.builder.wheel.graft import Transplant
from sparkwright.builder.wheel.sbom import Archive, Bill
from sparkwright.forks.context import RunContext
from sparkwright.forks.lock import FileLock, VendoredLock


def bill(
    session: RunContext,
    source: SourceTree,
    *,
    base: FileLock | None = None,
    done: Transplant | None = None,
    **facts: str,
) -> Bill:
    """
    Return what the wheel made of *source* consists of.

    Args:
        base: The official wheel under a graft.
        done: The account of its libraries; None for a wheel in which nothing was compiled, which is
            the same from every machine. facts: What else is to be said of it, with ``_`` for ``-``.

    Raises:
        file-invalid: pylock.toml cannot be read.
        What `sourcetree.make` raises, for the forks that the build reads.
    """
    project = session.project
    told = {
        "stack": project.stack,
        "fork": source.fork,
        "built": project.fork(source.fork).build,
        "arch": project.spec.arch,
    }
    return Bill(
        source=source,
        needs=tuple(source_tree.make(session, need) for need in project.fork(source.fork).needs),
        bases=(Archive(base.name, base.filename, base.sha256),) if base else (),
        vendored=vendored(session, source),
        tools=compilers(session) if done else (),
        compiled=done.libraries if done else {},
        kept={name: _hex(recorded) for name, recorded in done.base.items()} if done else {},
        facts={
            **told,
            **({"cuda": version_label.cuda(project)} if done else {}),
            **{name.replace("_", "-"): value for name, value in facts.items() if value},
        },
    )


def vendored(session: RunContext, source: SourceTree) -> dict[str, VendoredLock]:
    """
    Return the vendored sources that the build of *source* takes, by name in the lock.

    A build of targets beyond the core takes those that FetchContent asks for, and the sources below
    them. Submodules are part of a git source; in an archive of the package index they are covered
    by its hash.
    """
    sources = session.lock.forks[source.fork].vendored
    fetched = toolchain.settings(session, source.fork).needs_vendored

    def taken(name: str) -> bool:
        root = min((other for other in sources if f"{name}/".startswith(f"{other}/")), key=len)
        return source.source.kind == "git" if sources[root].kind == "submodule" else fetched

    return {name: entry for name, entry in sources.items() if taken(name)}


def compilers(session: RunContext) -> tuple[Archive, ...]:
    """Return the CUDA compiler that pylock.toml locks for this machine."""
    return tuple(
        Archive(*wheel)
        for wheel in pylock.wheels(session.project)
        if wheel[0] == version_label.NVCC
    )


def _hex(recorded: str) -> str:
    """Return the digest of a row of RECORD in hex; nothing where it is not one by sha256."""
    method, _, value = recorded.partition("=")
    with contextlib.suppress(ValueError):
        found = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4))
        return found.hex() if method == "sha256" and len(found) == 32 else ""
    return ""
