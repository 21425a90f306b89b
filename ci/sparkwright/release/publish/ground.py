"""The folder of an index as its publisher finds it: held by one at a time, its manifest verified, its records read by hash."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sparkwright.core.files import sha256_bytes
from sparkwright.core.store import translate_disk_full
from sparkwright.release import index
from sparkwright.release.errors import ReleaseError
from sparkwright.release.manifest import places, signed
from sparkwright.release.manifest.records import Entry, Manifest, Proof, Release
from sparkwright.release.publish.hosts import Observe, unobserved
from sparkwright.release.signing.statement import Signer
from sparkwright.release.signing.trust import Trust

#: What the publisher keeps for itself; nothing in the index refers to it, and a copy of the index need not have it.
WORK = ".publishing"
#: Bytes of the largest record that is read.
LARGEST = 64 << 20


@contextlib.contextmanager
def held(root: Path) -> Iterator[None]:
    """
    Keep other publishers of the index at *root* away for the block; the operating system ends that when the process dies.

    Raises:
        index-busy: Another one works on it.
    """
    from filelock import FileLock, Timeout

    with translate_disk_full(root):
        (root / WORK).mkdir(parents=True, exist_ok=True)
    lock = FileLock(root / WORK / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ReleaseError("index-busy", f"Another publisher works on {root}.", details=[f"lock: {lock.lock_file}"]) from None
    try:
        yield
    finally:
        lock.release()


def manifest(root: Path, trust: Trust) -> Manifest | None:
    """
    Return what the index at *root* says it holds; None where there is none yet.

    Raises:
        manifest-invalid, signature-invalid, signer-unknown: It is not what somebody signed whom *trust* names.
        index-damaged: It cannot be read.
    """
    live = index.current(root)
    if live is None:
        return None
    found = signed.read(live[1], trust, what=f"the manifest in {root}")
    if found.serial != live[0]:
        raise ReleaseError("index-damaged", f"The live generation is {live[0]}, and its manifest has the serial {found.serial}.")
    return found


def required(root: Path, trust: Trust) -> Manifest:
    """Return the manifest of the index at *root*; raises `index-missing` where there is none."""
    found = manifest(root, trust)
    if found is None:
        raise ReleaseError("index-missing", f"There is no index in {root}.")
    return found


def release(root: Path, address: str) -> Release:
    """
    Return the release *address*.

    Raises:
        index-damaged: Its record is missing, or not the one of that address.
    """
    return msgspec.json.decode(_bytes(root, places.release(address), address), type=Release)


def proof(root: Path, entry: Entry) -> Proof:
    """Return what is proved of *entry* today; raises as `release`."""
    return msgspec.json.decode(_bytes(root, places.proof(entry.release, entry.proof), entry.proof), type=Proof)


def _bytes(root: Path, place: str, sha256: str) -> bytes:
    try:
        with (root / place).open("rb") as stream:
            data = stream.read(LARGEST + 1)
    except OSError as error:
        raise ReleaseError("index-damaged", f"{place} cannot be read.", details=[str(error)]) from error
    if (found := sha256_bytes(data)) != sha256:
        raise ReleaseError("index-damaged", f"{place} is not what it was.", details=[f"its name says: {sha256}", f"its bytes:     {found}"])
    return data


def turn(root: Path, before: int, after: Manifest, signer: Signer, observe: Observe = unobserved) -> None:
    """
    Sign *after*, make its pages, and let clients see it, by one rename.

    Args:
        before: The serial that the work began with; 0 for an index that is not there yet.

    Raises:
        index-moved: Another one is live by now. *Others*: as `index.generate`; in each case clients see what they saw before.
    """
    observe("generation")
    sealed = signed.seal(after, signer)
    index.generate(root, after, sealed)
    observe("flip")
    live = index.current(root)
    if (live[0] if live else 0) != before:
        raise ReleaseError("index-moved", f"The index is at serial {live[0] if live else 0}, and this began at {before}.")
    index.flip(root, after.serial)
