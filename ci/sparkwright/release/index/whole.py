"""Is an index whole? Everything that the manifest names is read again, and, deeply, every hash and every page."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sparkwright.core.console import console
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.files import sha256_file
from sparkwright.release.errors import ReleaseError
from sparkwright.release.index import entries, live
from sparkwright.release.index.entries import Skimmed
from sparkwright.release.index.generation import Making, same
from sparkwright.release.manifest import places, signed
from sparkwright.release.manifest.records import Entry, Manifest
from sparkwright.release.signing import dsse
from sparkwright.release.signing.statement import Statement
from sparkwright.release.signing.trust import Trust


class _Bundle(msgspec.Struct, frozen=True, rename="camel"):
    """What of a Sigstore bundle is read where nobody's signature counts."""

    dsse_envelope: dsse.Envelope


def check(root: Path, trust: Trust | None, *, deep: bool = False) -> list[str]:
    """
    Return everything that is wrong with the index at *root*, a line each; nothing where it is whole.

    Args:
        trust: Whose signature counts; without, nobody's is checked. *deep*: hash every file, and make every page again to compare.

    Raises:
        index-missing: There is no index.
    """
    root = root.absolute()
    try:
        found = live.current(root)
        if found is None:
            raise ReleaseError("index-missing", f"{root} holds no index.")
        manifest, led = _manifest(found[1], trust), live.pages_of(live.place(root, found[0]))
    except SparkwrightError as error:
        if error.reference == "index-missing":
            raise
        return [_said(error)]
    wrong = [] if manifest.serial == found[0] else [_damaged(f"generation {found[0]} holds the manifest with the serial {manifest.serial}")]
    lost = [name for name in live.NAMES if not _leads(root / name, f"{live.CURRENT}/{name}")]
    wrong += [_damaged(f"{name} does not lead to the live generation") for name in lost]
    with console.progress("reading the index", len(manifest.entries)) as progress:
        for count, entry in enumerate(manifest.entries, 1):
            wrong += _entry(root, entry, led.get(entry.release, ""), deep=deep)
            progress.update(count)
    if deep and not wrong:
        wrong += _pages(root, manifest, found[1])
    return wrong


def _manifest(data: bytes, trust: Trust | None) -> Manifest:
    if trust is not None:
        return signed.read(data, trust, what=places.MANIFEST)
    try:
        envelope = dsse.decode(data, places.MANIFEST)
        if envelope.is_bundle:
            envelope = msgspec.json.decode(data, type=_Bundle).dsse_envelope
        return msgspec.convert(Statement.of(envelope.payload, places.MANIFEST).predicate, Manifest)
    except msgspec.ValidationError as error:
        raise ReleaseError(
            "manifest-invalid", f"{places.MANIFEST} does not have the fields of a manifest.", details=[str(error)]
        ) from error


def _entry(root: Path, entry: Entry, pages: str, *, deep: bool) -> Iterator[str]:
    try:
        one = entries.skimmed(root, entry)
        entries.present(root, one)
    except SparkwrightError as error:
        yield _said(error)
        return
    release = f"b/{entry.release}"
    names = {"pages": pages, **{name: f"pages/{name}" for name in live.RELEASE_NAMES}}
    for name, target in names.items():
        if not _leads(root / release / name, target) or not (root / release / name).exists():
            yield _damaged(f"{release}/{name} does not lead to the pages that the live generation has")
    if deep:
        yield from (
            _damaged(f"{name} has other bytes than its hash says")
            for name, sha256 in _named(one)
            if sha256_file(root / name) != sha256
        )


def _named(one: Skimmed) -> Iterator[tuple[str, str]]:
    """Yield every file behind *one* that lies in the index, with its sha256."""
    address = one.entry.release
    for wheel in one.release.wheels:
        if entries.near(wheel):
            yield wheel.url, wheel.sha256
            yield f"{wheel.url}.metadata", wheel.metadata
        yield from ((places.evidence(evidence.sha256), evidence.sha256) for evidence in one.shown[wheel.sha256].evidence)
    for lock in one.release.locks:
        yield places.lock(address, lock.machine), lock.sha256
        yield places.requirements(address, lock.machine), lock.requirements
    if one.release.onsite:
        yield places.onsite(address), one.release.onsite


def _pages(root: Path, manifest: Manifest, sealed: bytes) -> Iterator[str]:
    """Yield every page that is not what it would be if it were made now."""
    making = Making(root, manifest, None)
    stale = making.stale()
    with tempfile.TemporaryDirectory(prefix="sparkwright-index-") as folder:
        made, there = making.generation(Path(folder) / "g", sealed), live.place(root, manifest.serial)
        for path in sorted(made.rglob("*")):
            name = path.relative_to(made)
            if path.is_file() and not same(there / name, path.read_bytes()):
                stale.append(f"{live.GENERATIONS}/{manifest.serial}/{name}")
    yield from (_damaged(f"{name} is not the page that the manifest gives") for name in stale)


def _leads(path: Path, target: str) -> bool:
    try:
        return str(path.readlink()) == target
    except OSError:
        return False


def _damaged(what: str) -> str:
    return f"{'index-damaged'}: {what}"


def _said(error: SparkwrightError) -> str:
    return f"{error.reference}: {error.what}"
