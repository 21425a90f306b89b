"""Sizes and architectures of wheels and libraries, and where each wheel comes from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from sparkwright.core.console import size
from sparkwright.release.manifest.records import Fork, Library, Release, Wheel
from sparkwright.release.notes import words
from sparkwright.release.notes.blocks import Block, Code, Grid, Heading, Says, Slanted, Words, short

ORIGINS = {"compiled": "compiled here", "base": "from the official wheel"}

BUILT = {
    "headers": "headers, packed", "backend": "by the project's own build backend", "graft": "graft on the official wheel",
    "full": "whole, from source",
}  # fmt: skip


def wheels(release: Release, before: Release | None) -> Iterator[Block]:
    """Yield the size of each wheel, and of the libraries in it with the architectures that they hold code for."""
    then = {(wheel.project, wheel.machine): wheel for wheel in before.wheels} if before else {}
    rows = []
    for wheel in release.wheels:
        old = then.get((wheel.project, wheel.machine))
        rows.append((Code(wheel.filename), short(wheel.sha256), size(wheel.size), *_against(wheel.size, old.size if old else None)))
    yield Heading("Sizes and architectures")
    yield Grid(("wheel", "sha256", "size", "before", "change"), tuple(rows), 2)
    for wheel in release.wheels:
        if wheel.libraries:
            yield Heading(f"Libraries of {wheel.project} for {wheel.machine}", 3)
            yield _libraries(wheel, then.get((wheel.project, wheel.machine)))


def _libraries(wheel: Wheel, old: Wheel | None) -> Grid:
    then: Mapping[str, Library] = {one.name: one for one in old.libraries} if old else {}
    rows = [
        (
            Code(one.name),
            ORIGINS[one.origin],
            code(one),
            size(one.size),
            *_against(one.size, then[one.name].size if one.name in then else None),
        )
        for one in wheel.libraries
    ]
    gone = [
        (Code(name), "removed", "–", "–", size(one.size), "–")
        for name, one in then.items()
        if name not in {n.name for n in wheel.libraries}
    ]
    return Grid(("library", "origin", "machine code for", "size", "before", "change"), (*rows, *gone), 3)


def _against(now: int, then: int | None) -> tuple[Words, Words]:
    return ("–", "–") if then is None else (size(then), words.signed(now / then - 1) if then else "–")


def code(one: Library) -> str:
    """Return for what a library has machine code, and how many cubins."""
    return ", ".join(f"{arch} ({one.code[arch]})" for arch in sorted(one.code, key=_order)) or "no GPU"


def _order(arch: str) -> tuple[int, str]:
    """Return what architectures are sorted by: sm_75 before sm_100."""
    return int(re.sub(r"\D", "", arch.partition(" ")[0])[:9] or 0), arch


def provenance(release: Release) -> Iterator[Block]:
    """Yield where each fork comes from, as its build record says."""
    yield Heading("Where it comes from")
    if not release.forks:
        yield Says("No fork is in this release.")
        return
    rows = tuple(
        (fork.name, fork.version, fork.kind, Code(fork.pin), _resolved(fork), BUILT.get(fork.built, fork.built), _isolated(fork))
        for fork in release.forks
    )
    yield Grid(("fork", "version", "source", "pin", "pin is", "built", "kept from the network by"), rows, 7)
    yield Grid(
        ("fork", "from", "tree of the source", "tree that was built", "official wheel"),
        tuple((fork.name, fork.origin, short(fork.tree), short(fork.source_tree), short(fork.base)) for fork in release.forks),
        5,
    )


def _resolved(fork: Fork) -> Words:
    return "whole" if fork.resolved else Slanted("not resolved: a short name, taken on trust")


def _isolated(fork: Fork) -> Words:
    return fork.isolation if fork.isolation not in ("", "none") else Slanted("nothing that is recorded")
