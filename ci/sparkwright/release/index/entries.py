"""The records behind an entry of the manifest, as they lie on disk: read by their hashes, and held against each other and their files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TypeVar

import msgspec

from sparkwright import digest
from sparkwright.errors import IndexDamaged, VerifiedRefused, WheelMismatch
from sparkwright.release.manifest import places
from sparkwright.release.manifest.records import Entry, Proof, Proved, Release, Wheel

T = TypeVar("T", bound=msgspec.Struct)

#: Bytes of a release or a proof; the largest ones known have some hundred kilobytes.
LARGEST = 64 << 20


class Held(msgspec.Struct, frozen=True):
    """An entry with its records; *proved*: by the sha256 of the wheel."""

    entry: Entry
    release: Release
    proof: Proof
    proved: dict[str, Proved]


def record(root: Path, name: str, sha256: str, kind: type[T]) -> T:
    """
    Return the record at *name* below *root*.

    Raises:
        IndexDamaged: It is missing, has other bytes than *sha256* says, or is no such record.
    """
    path = root / name
    try:
        if path.stat().st_size > LARGEST:
            raise IndexDamaged(f"{name} has more than {LARGEST >> 20} MiB, which no record has.")
        data = path.read_bytes()
        if (found := digest.sha256_bytes(data)) != sha256:
            raise IndexDamaged(f"{name} has other bytes than its name says.", details=[f"named: {sha256}", f"found: {found}"])
        return msgspec.json.decode(data, type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise IndexDamaged(f"{name} cannot be read.", details=[str(error)]) from error


def held(root: Path, entry: Entry) -> Held:
    """
    Return *entry* with its records.

    Raises:
        IndexDamaged: A record is missing or damaged, or the two are not about each other.
        VerifiedRefused: The entry says ``verified``, and the proof does not.
        WheelMismatch: A wheel's name states another project (normalised, PEP 503) or version than its record.
    """
    release = record(root, places.release(entry.release), entry.release, Release)
    proof = record(root, places.proof(entry.release, entry.proof), entry.proof, Proof)
    said = (release.name, release.stack, release.made, proof.release)
    if said != (entry.name, entry.stack, entry.made, entry.release):
        raise IndexDamaged(f"The records of {entry.name} are those of another release.", details=[f"they say: {', '.join(said)}"])
    proved = {one.wheel: one for one in proof.wheels}
    if len(proved) != len(proof.wheels) or proved.keys() != {wheel.sha256 for wheel in release.wheels}:
        raise IndexDamaged(f"The proof of {entry.name} is about other wheels than the release has.")
    for wheel in release.wheels:
        name, _, rest = wheel.filename.partition("-")
        if re.sub(r"[-_.]+", "-", name).lower() != wheel.project or rest.split("-")[0] != wheel.version:
            raise WheelMismatch(f"{wheel.filename} is recorded as {wheel.project} {wheel.version}.")
    _proven(entry, release, proved)
    return Held(entry, release, proof, proved)


def _proven(entry: Entry, release: Release, proved: dict[str, Proved]) -> None:
    lacking = [
        f"{wheel.filename}: {one.rung} {one.state} ({one.reference})" for wheel in release.wheels for one in proved[wheel.sha256].missing
    ]
    if entry.channel == "verified" and lacking:
        raise VerifiedRefused(f"{entry.name} cannot stand in verified: its proof says that something is missing.", details=lacking[:20])


def near(wheel: Wheel) -> bool:
    """
    Return whether the index itself keeps *wheel*.

    Raises:
        IndexDamaged: Its address is neither where wheels lie here nor on another host.
    """
    if wheel.url.startswith(("https://", "http://")):
        return False
    if wheel.url != places.wheel(wheel.sha256, wheel.filename):
        raise IndexDamaged(f"{wheel.filename} is said to lie at an address that no wheel has.", details=[wheel.url])
    return True


def present(root: Path, one: Held) -> None:
    """
    See that everything that pages about *one* point to is there: by its size where that is known, unread.

    Raises:
        IndexDamaged: Something is missing or has another size.
    """
    address = one.entry.release
    for wheel in one.release.wheels:
        if near(wheel):
            _size(root, wheel.url, wheel.size)
            _size(root, f"{wheel.url}.metadata", None)
        for evidence in one.proved[wheel.sha256].evidence:
            _size(root, places.evidence(evidence.sha256), evidence.size)
    for lock in one.release.locks:
        _size(root, places.lock(address, lock.machine), None)
        _size(root, places.requirements(address, lock.machine), None)
    if one.release.onsite:
        _size(root, places.onsite(address), None)


def _size(root: Path, name: str, expected: int | None) -> None:
    # Tens of thousands of files are asked here; pathlib would cost as much as the kernel.
    try:
        found = os.stat(f"{root}/{name}").st_size  # noqa: PTH116
    except OSError as error:
        raise IndexDamaged(f"{name} is missing.", details=[str(error)]) from error
    if found != expected and (expected is not None or not found):
        raise IndexDamaged(f"{name} has {found:,} bytes, not {expected:,}." if expected is not None else f"{name} is empty.")
