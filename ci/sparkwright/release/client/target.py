"""From a release in the index to the set that is to be in an environment, with everything that is claimed of it checked."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence

from sparkwright.core.errors import PythonError
from sparkwright.core.files import canonical, sha256_bytes
from sparkwright.forks.stack import SourceError
from sparkwright.release import sets
from sparkwright.release.client import packages
from sparkwright.release.client.catalogue import Catalogue
from sparkwright.release.client.state import Chosen, Pinned
from sparkwright.release.environment import Environment
from sparkwright.release.errors import ReleaseError, TrustError
from sparkwright.release.evidence import check
from sparkwright.release.manifest import places
from sparkwright.release.manifest.records import (
    Channel,
    Entry,
    Lock,
    Missing,
    Proof,
    Release,
    Wheel,
)
from sparkwright.release.spec import OnsiteSpec

#: The fork whose wheel is the installer itself, which is no part of the set.
SELF = "sparkwright"


def lock_of(release: Release, machine: str = "") -> Lock | None:
    """Return the lock for *machine* (default: this one): its own, else the one for every machine."""
    by_machine: dict[str, Lock] = {lock.machine: lock for lock in release.locks}
    return by_machine.get(machine or platform.machine()) or by_machine.get("any")


def wheels_of(release: Release, machine: str = "") -> tuple[Wheel, ...]:
    """Return the release's wheels for *machine* (default: this one)."""
    return tuple(wheel for wheel in release.wheels if wheel.machine in (machine or platform.machine(), "any"))


def first_fitting(catalogue: Catalogue, entries: Sequence[Entry], machine: str = "") -> tuple[Entry, Release]:
    """Return the first of *entries* that has wheels for *machine* (default: this one); raise `release-unknown` where none has."""
    for entry in entries:
        release = catalogue.release(entry)
        if lock_of(release, machine):
            return entry, release
    where = machine or f"this machine ({platform.machine()})"
    raise ReleaseError("release-unknown", f"No release is for {where}.", details=[entry.name for entry in entries][:10])


def proved(catalogue: Catalogue, entry: Entry, release: Release, channel: Channel, machine: str = "") -> tuple[Missing, ...]:
    """
    Check all evidence of what would be installed on *machine* (default: this one), and return what is missing of it.

    Raises:
        evidence-invalid, signature-invalid, signer-unknown, verdict-foreign, verdict-hollow: See `evidence.check`.
        release-unproved: Something is missing, and *channel* is ``verified``.
    """
    proof = catalogue.proof(entry)
    forks = {fork.name: fork for fork in release.forks}
    missing: list[Missing] = []
    for wheel in wheels_of(release, machine):
        about = [one for one in proof.wheels if one.wheel == wheel.sha256]
        if len(about) != 1:
            raise TrustError(
                "evidence-invalid", f"The proof of {entry.name} says nothing of {wheel.filename}, or twice.", details=[wheel.sha256]
            )
        check.checked(wheel, forks.get(wheel.fork), about[0], catalogue.evidence, catalogue.trust)
        missing += about[0].missing
    if missing and "verified" in (channel, entry.channel):
        details = [f"{one.gate}: {one.state}: {one.says}" for one in missing][:20]
        raise ReleaseError("release-unproved", f"{entry.name} has no pass for everything that `verified` asks for.", details=details)
    return tuple(missing)


def chosen(catalogue: Catalogue, entry: Entry, release: Release, place: Environment) -> tuple[Chosen, OnsiteSpec | None]:
    """
    Return the set for *place*.

    Raises:
        set-mixed: The lock, the edits and the release do not belong together.
        environment-unusable: The set is not for its Python.
    """
    lock = lock_of(release, place.machine)
    assert lock is not None  # `first_fitting`
    what = f"the lock of {entry.name}"
    read = sets.read(catalogue.lock(entry, release, lock.machine), what)
    try:
        selected = sets.select(read, place.ranked, place.markers)
    except SourceError as error:
        if error.reference != "not-provided":
            raise
        raise PythonError(
            "environment-unusable",
            f"{entry.name} is not for the Python of {place.prefix} ({place.full or place.abi}).", details=[error.what, *error.details],
            todo="Make an environment with a Python that the release is for (see its page or `sparkwright list`).",
        ) from error  # fmt: skip
    pinned = {packages.canonical(one.name): _pinned(catalogue, one) for one in selected}
    _check(entry, release, lock, pinned, place.machine)
    onsite = catalogue.onsite(entry, release)
    if onsite is not None:
        _check_onsite(entry, onsite, pinned, place)
    own = {wheel.project: wheel for wheel in wheels_of(release, place.machine)}
    there = tuple(_ours(catalogue, own, one) for one in pinned.values() if own.get(one.project) is None or own[one.project].fork != SELF)
    text = canonical(onsite).decode() if onsite is not None else ""
    index, serial = catalogue.manifest.url, catalogue.manifest.serial
    return Chosen(entry.release, entry.name, entry.stack, entry.channel, entry.proof, index, serial, there, text), onsite


def _pinned(catalogue: Catalogue, one: sets.Pinned) -> Pinned:
    return Pinned(packages.canonical(one.name), one.version, one.filename, one.sha256, catalogue.address.of(one.url), one.size or 0)


def _ours(catalogue: Catalogue, own: Mapping[str, Wheel], one: Pinned) -> Pinned:
    """Take a wheel of ours from the index that was asked, which may be a mirror of the one that the lock names."""
    wheel = own.get(one.project)
    if wheel is None:
        return one
    place = wheel.url or places.wheel(wheel.sha256, wheel.filename)
    return Pinned(one.project, one.version, one.filename, one.sha256, catalogue.address.of(place), wheel.size)


def _check(entry: Entry, release: Release, lock: Lock, pinned: Mapping[str, Pinned], machine: str) -> None:
    """Raise `set-mixed` unless lock and release name the same wheels and the same versions."""
    wrong = []
    for wheel in wheels_of(release, machine):
        one = pinned.get(wheel.project)
        if one is None:
            wrong += [f"{wheel.project}: not in the lock"] if wheel.fork != SELF else []
        elif (one.filename, one.sha256) != (wheel.filename, wheel.sha256):
            wrong += [f"{wheel.project}: release {wheel.filename} {wheel.sha256[:12]}, lock {one.filename} {one.sha256[:12]}"]
    for one in pinned.values():
        if (stated := lock.packages.get(one.project)) != one.version:
            wrong.append(f"{one.project}: release {stated or 'without it'}, lock {one.version}")
    if wrong:
        raise ReleaseError("set-mixed", f"The lock of {entry.name} does not belong to the release.", details=sorted(wrong)[:20])


def _check_onsite(entry: Entry, onsite: OnsiteSpec, pinned: Mapping[str, Pinned], place: Environment) -> None:
    wrong = []
    for package in onsite.packages:
        one = pinned.get(packages.canonical(package.name))
        if one is None or package.wheels.get(one.filename) != one.sha256 or package.wheel(place.tags) != one.filename:
            wrong.append(f"{package.name} {package.version}: the lock has {one.filename if one else 'none'}")
    if wrong:
        raise ReleaseError("set-mixed", f"What {entry.name} edits on the machine is not in its lock.", details=wrong)


def proof_digest(proof: Proof) -> str:
    """Return the address of *proof*."""
    return sha256_bytes(canonical(proof))
