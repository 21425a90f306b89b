"""
The records behind an entry of the manifest, as they lie on disk: read by their hashes, and held against each other and their files.

What every page needs of a release is skimmed from its records, without the parts that only its own page shows: of a thousand releases,
those would take most of the time.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from sparkwright.core.errors import WheelError
from sparkwright.core.files import sha256_bytes
from sparkwright.release.errors import ReleaseError
from sparkwright.release.manifest import places
from sparkwright.release.manifest.records import (
    Entry,
    Line,
    Machine,
    Missing,
    Name,
    Proof,
    Proved,
    Release,
    Sha256,
    Time,
)

T = TypeVar("T", bound=msgspec.Struct)

#: Bytes of a release or a proof; the largest ones known have some hundred kilobytes.
LARGEST = 64 << 20


class File(msgspec.Struct, frozen=True, gc=False):
    """Of a `Wheel`: what the simple API shows."""

    filename: Name
    sha256: Sha256
    size: int
    project: Name
    version: Name
    machine: Machine
    url: Line
    metadata: Sha256
    uploaded: Time
    requires_python: Line = ""


class Locked(msgspec.Struct, frozen=True, gc=False):
    """Of a `Lock`: all but the packages."""

    machine: Machine
    sha256: Sha256
    requirements: Sha256


class Listed(msgspec.Struct, frozen=True, gc=False):
    """Of a `Release`: what pages about many show."""

    name: Name
    stack: Name
    made: Time
    wheels: tuple[File, ...]
    locks: tuple[Locked, ...]
    onsite: str = ""
    before: str = ""
    format: Literal[1] = 1


class Attested(msgspec.Struct, frozen=True, gc=False):
    """Of an `Evidence`: all of it; a kind that this program does not know is still a file."""

    kind: Line
    sha256: Sha256
    size: int


class Shown(msgspec.Struct, frozen=True, gc=False):
    """Of a `Proved`: what is missing, and where the evidence lies."""

    wheel: Sha256
    missing: tuple[Missing, ...]
    evidence: tuple[Attested, ...] = ()


class Proofs(msgspec.Struct, frozen=True, gc=False):
    """Of a `Proof`: the same of each wheel."""

    release: Sha256
    wheels: tuple[Shown, ...]
    format: Literal[1] = 1


class Skimmed(msgspec.Struct, frozen=True, gc=False):
    """An entry with what pages about many show of its records; *shown*: by the sha256 of the wheel."""

    entry: Entry
    release: Listed
    shown: dict[str, Shown]


class Whole(msgspec.Struct, frozen=True):
    """An entry with its records; *proved*: by the sha256 of the wheel."""

    entry: Entry
    release: Release
    proof: Proof
    proved: dict[str, Proved]


def record(root: Path, name: str, sha256: str, kind: type[T]) -> T:
    """
    Return the record at *name* below *root*.

    Raises:
        index-damaged: It is missing, has other bytes than *sha256* says, or is no such record.
    """
    path = f"{root}/{name}"
    try:
        with open(path, "rb") as stream:  # noqa: PTH123  thousands of files; pathlib would cost as much as the reading
            data = stream.read(LARGEST + 1)
        if (found := sha256_bytes(data)) != sha256:
            raise ReleaseError(
                "index-damaged", f"{name} has other bytes than its name says.", details=[f"named: {sha256}", f"found: {found}"]
            )
        return msgspec.json.decode(data, type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReleaseError("index-damaged", f"{name} cannot be read.", details=[str(error)]) from error


def skimmed(root: Path, entry: Entry) -> Skimmed:
    """
    Return *entry* with what pages about many show of it.

    Raises:
        index-damaged: A record is missing or damaged, or the two are not about each other.
        verified-refused: The entry says ``verified``, and the proof does not.
        wheel-mismatch: A wheel's name states another project (normalised, PEP 503) or version than its record.
    """
    release = record(root, places.release(entry.release), entry.release, Listed)
    proof = record(root, places.proof(entry.release, entry.proof), entry.proof, Proofs)
    said = (release.name, release.stack, release.made, proof.release)
    if said != (entry.name, entry.stack, entry.made, entry.release):
        raise ReleaseError(
            "index-damaged", f"The records of {entry.name} are those of another release.", details=[f"they say: {', '.join(said)}"]
        )
    shown = {one.wheel: one for one in proof.wheels}
    if len(shown) != len(proof.wheels) or shown.keys() != {wheel.sha256 for wheel in release.wheels}:
        raise ReleaseError("index-damaged", f"The proof of {entry.name} is about other wheels than the release has.")
    for wheel in release.wheels:
        name, _, rest = wheel.filename.partition("-")
        if re.sub(r"[-_.]+", "-", name).lower() != wheel.project or rest.split("-")[0] != wheel.version:
            raise WheelError("wheel-mismatch", f"{wheel.filename} is recorded as {wheel.project} {wheel.version}.")
        near(wheel)
    one = Skimmed(entry, release, shown)
    _proven(one)
    return one


def _proven(one: Skimmed) -> None:
    found = [(wheel, lack) for wheel in one.release.wheels for lack in one.shown[wheel.sha256].missing]
    if one.entry.channel == "verified" and found:
        lacking = [f"{wheel.filename}: {lack.gate} {lack.state} ({lack.reference})" for wheel, lack in found[:20]]
        raise ReleaseError(
            "verified-refused", f"{one.entry.name} cannot stand in verified: its proof says that something is missing.", details=lacking
        )


def whole(root: Path, entry: Entry) -> Whole:
    """Return *entry*, which was skimmed, with its records; raises `index-damaged` as `record` does."""
    release = record(root, places.release(entry.release), entry.release, Release)
    proof = record(root, places.proof(entry.release, entry.proof), entry.proof, Proof)
    return Whole(entry, release, proof, {one.wheel: one for one in proof.wheels})


def near(wheel: File) -> bool:
    """
    Return whether the index itself keeps *wheel*.

    Raises:
        index-damaged: Its address is neither where wheels lie here nor on another host.
    """
    if wheel.url.startswith(("https://", "http://")):
        return False
    if wheel.url != places.wheel(wheel.sha256, wheel.filename):
        raise ReleaseError("index-damaged", f"{wheel.filename} is said to lie at an address that no wheel has.", details=[wheel.url])
    return True


def present(root: Path, one: Skimmed) -> None:
    """
    See that everything that pages about *one* point to is there: by its size where that is known, unread.

    Raises:
        index-damaged: Something is missing or has another size.
    """
    address = one.entry.release
    for wheel in one.release.wheels:
        if near(wheel):
            _size(root, wheel.url, wheel.size)
            _size(root, f"{wheel.url}.metadata", None)
        for evidence in one.shown[wheel.sha256].evidence:
            _size(root, places.evidence(evidence.sha256), evidence.size)
    for lock in one.release.locks:
        _size(root, places.lock(address, lock.machine), None)
        _size(root, places.requirements(address, lock.machine), None)
    if one.release.onsite:
        _size(root, places.onsite(address), None)


def _size(root: Path, name: str, expected: int | None) -> None:
    try:
        found = os.stat(f"{root}/{name}").st_size  # noqa: PTH116  see `record`
    except OSError as error:
        raise ReleaseError("index-damaged", f"{name} is missing.", details=[str(error)]) from error
    if found != expected and (expected is not None or not found):
        raise ReleaseError(
            "index-damaged", f"{name} has {found:,} bytes, not {expected:,}." if expected is not None else f"{name} is empty."
        )
