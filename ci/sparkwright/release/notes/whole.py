"""All blocks of the notes, in the order in which people ask."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from sparkwright.core.console import size
from sparkwright.core.files import canonical, sha256_bytes
from sparkwright.release.errors import ReleaseError
from sparkwright.release.manifest import places
from sparkwright.release.manifest.records import Proof, Release
from sparkwright.release.notes import changes, shown, sizes, stock
from sparkwright.release.notes.blocks import (
    Block,
    Code,
    Commands,
    Grid,
    Heading,
    Says,
    Strong,
    Words,
)
from sparkwright.release.sets.lock import BY_HASH


def address(release: Release) -> str:
    """Return the address of *release*."""
    return sha256_bytes(canonical(release))


def blocks(release: Release, proof: Proof, before: Release | None) -> list[Block]:
    """
    Return the notes of *release*.

    Raises:
        index-damaged: The proof is of another release.
    """
    mine = _check(release, proof)
    return [
        Says(_lead(release)),
        *shown.missing(release, proof),
        *changes.stack(release, before),
        *changes.patches(release, before),
        *stock.section(release, proof),
        *shown.gates(release, proof),
        *sizes.wheels(release, before),
        *sizes.provenance(release),
        *_install(release, mine),
        *_verify(release, proof, mine),
    ]


def _check(release: Release, proof: Proof) -> str:
    """Return the address of *release*, which *proof* must be about."""
    mine = address(release)
    if proof.release != mine:
        raise ReleaseError(
            "index-damaged", f"The proof of {release.name} is of another release.", details=[f"of {proof.release}", f"not {mine}"]
        )
    return mine


def _lead(release: Release) -> Words:
    forks = [f"{fork.name} {fork.version}" for fork in release.forks]
    torch = {lock.packages["torch"]: None for lock in release.locks if "torch" in lock.packages}
    what = ", ".join([*forks, *(f"torch {version}" for version in torch)]) or "no fork"
    machines = ", ".join(dict.fromkeys(wheel.machine for wheel in release.wheels if wheel.machine != "any"))
    return (
        Strong(release.name),
        f" of the stack {release.stack}: {what}. {len(release.wheels)} wheel{'' if len(release.wheels) == 1 else 's'}"
        f"{f' for {machines}' if machines else ''}, {size(sum(wheel.size for wheel in release.wheels))}, made {release.made}.",
    )


def _install(release: Release, mine: str) -> Iterator[Block]:
    yield Heading("Install, and go back")
    yield Commands((f"sparkwright install --version {shlex.quote(release.name)}", "sparkwright rollback --into VENV"))
    yield Says("The first verifies signature, verdicts and hashes and installs the matched set; the second brings back the set before it.")
    if release.locks:
        yield Says("Without those checks, but with every hash of the set, from INDEX, the address of the index:")
        yield Commands(tuple(f"pip install {BY_HASH} INDEX/{places.requirements(mine, lock.machine)}" for lock in release.locks))


def _verify(release: Release, proof: Proof, mine: str) -> Iterator[Block]:
    yield Heading("Verify")
    yield Says(
        ("Address of the release: ", Code(mine), ". Its record, its locks and its evidence are named by hash in the signed manifest.")
    )
    yield Grid(
        ("file", "sha256", "device code"),
        tuple(
            (Code(wheel.filename), Code(wheel.sha256), Code(wheel.device_code) if wheel.device_code else "–") for wheel in release.wheels
        ),
        3,
    )
    if release.locks:
        rows = tuple(
            (Code(path.rpartition("/")[2]), Code(sha256))
            for lock in release.locks
            for path, sha256 in (
                (places.lock(mine, lock.machine), lock.sha256),
                (places.requirements(mine, lock.machine), lock.requirements),
            )
        )
        yield Grid(("lock", "sha256"), rows, 2)
    yield from shown.evidence(release, proof)
    if said := shown.policy(proof):
        yield Says(("Decided by the release policy ", *(said if isinstance(said, tuple) else (said,)), "."))
