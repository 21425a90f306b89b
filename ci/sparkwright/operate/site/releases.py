"""
The releases of an index, for the site: manifest by its signature, records and measurements by their hashes, each held against the others.

A record that is damaged costs its own release, which is then shown as damaged. A manifest that is not to be believed costs everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TypeVar

import msgspec

from sparkwright.core.console import console
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.files import sha256_bytes
from sparkwright.forks.context import StandaloneContext
from sparkwright.operate.site import problems
from sparkwright.operate.site.problems import Problem
from sparkwright.operate.site.records import Measured
from sparkwright.release.client import address
from sparkwright.release.client.catalogue import MOST_RECORD, Catalogue
from sparkwright.release.client.install import Wish
from sparkwright.release.errors import ReleaseError, TrustError
from sparkwright.release.manifest import places
from sparkwright.release.manifest.records import (
    Entry,
    Evidence,
    Manifest,
    Proof,
    Proved,
    Release,
    Wheel,
)
from sparkwright.release.notes import published

T = TypeVar("T", Release, Proof)

#: Of the figures that are kept in the store, by the sha256 of their file; raise it when `measured.of` computes something else.
FORMAT = 1


class Shown(msgspec.Struct, frozen=True):
    """
    A release.

    Attributes:
        release, proof: None where *problem* says why they cannot be shown.
        measured: sha256 of the wheel → its figures, where a measurement belongs to it.
    """

    entry: Entry
    release: Release | None = None
    proof: Proof | None = None
    measured: dict[str, tuple[Measured, ...]] = {}
    problem: Problem | None = None

    @property
    def wheels(self) -> tuple[tuple[Wheel, Proved], ...]:
        """The wheels with what is proved of each."""
        proved = {one.wheel: one for one in self.proof.wheels} if self.proof else {}
        return tuple((wheel, proved[wheel.sha256]) for wheel in self.release.wheels) if self.release else ()


class Books(msgspec.Struct, frozen=True):
    """
    An index.

    Attributes:
        checked: Whether the signature of the manifest was checked. *by*: whose it is.
        releases: Oldest first. *problems*: of measurements; those of releases stand with them.
    """

    manifest: Manifest
    by: str
    checked: bool
    releases: tuple[Shown, ...]
    problems: tuple[Problem, ...] = ()


class _Kept(msgspec.Struct, frozen=True):
    """Figures by the sha256 of the file that they were computed from."""

    figures: dict[str, tuple[Measured, ...]] = {}
    format: int = 0


def read(context: StandaloneContext, wish: Wish) -> Books:
    """
    Return what the index that *wish* means holds.

    Raises:
        SparkwrightError: As `published.opened`: there is no index, or its manifest is not to be believed.
    """
    index, checked = published.opened(context, wish)
    kept = context.store.get("site", "measured", _Kept)
    known = dict(kept.figures) if kept and kept.format == FORMAT else {}
    shown, wrong, used = list[Shown](), list[Problem](), dict[str, tuple[Measured, ...]]()
    with console.progress("reading releases", len(index.manifest.entries)) as progress:
        for count, entry in enumerate(index.manifest.entries, 1):
            one = _shown(index, entry)
            figures, faults = _measured(index, one, known)
            used.update({found[0].source: found for found in figures.values() if found})
            shown.append(msgspec.structs.replace(one, measured=figures))
            wrong += faults
            progress.update(count)
    if used != known:
        context.store.put("site", "measured", _Kept(used, FORMAT))
    return Books(index.manifest, index.by, checked, tuple(shown), tuple(wrong))


def _shown(index: Catalogue, entry: Entry) -> Shown:
    try:
        release, proof = _records(index, entry)
        _sound(entry, release, proof)
    except SparkwrightError as error:
        return Shown(entry, problem=problems.of(entry.name, error))
    return Shown(entry, release, proof)


def _records(index: Catalogue, entry: Entry) -> tuple[Release, Proof]:
    """Return the two records of *entry*; from a folder they are read as they lie, and only what comes from afar is kept."""
    if index.address.folder is None:
        return index.release(entry), index.proof(entry)
    release = _local(index, places.release(entry.release), entry.release, Release)
    return release, _local(index, places.proof(entry.release, entry.proof), entry.proof, Proof)


def _local(index: Catalogue, name: str, sha256: str, kind: type[T]) -> T:
    data = address.small(index.address, name, most=MOST_RECORD, failure=partial(ReleaseError, "index-damaged"))
    if data is None or sha256_bytes(data) != sha256:
        raise ReleaseError("index-damaged", f"{name} is missing." if data is None else f"{name} has other bytes than its hash says.")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReleaseError("index-damaged", f"{name} cannot be read.", details=[str(error)]) from error


def _sound(entry: Entry, release: Release, proof: Proof) -> None:
    """Raise `set-mixed` or `verified-refused` where the records contradict the manifest or each other."""
    said = (release.name, release.stack, release.made, proof.release)
    if said != (entry.name, entry.stack, entry.made, entry.release):
        raise ReleaseError(
            "set-mixed", f"The records of {entry.name} are those of another release.", details=[f"they say: {', '.join(said)}"]
        )
    if sorted(one.wheel for one in proof.wheels) != sorted(wheel.sha256 for wheel in release.wheels):
        raise ReleaseError("set-mixed", f"The proof of {entry.name} is about other wheels than the release has.")
    if entry.channel == "verified" and (lacking := [lack.reference for one in proof.wheels for lack in one.missing]):
        raise ReleaseError(
            "verified-refused", f"{entry.name} stands in verified, and its proof says that something is missing.", details=lacking[:20]
        )


def _measured(
    index: Catalogue, one: Shown, known: Mapping[str, tuple[Measured, ...]]
) -> tuple[dict[str, tuple[Measured, ...]], list[Problem]]:
    """Return the figures of each wheel that has a measurement, and what is wrong with the others'."""
    figures, wrong = dict[str, tuple[Measured, ...]](), list[Problem]()
    for wheel, evidence in _measurements(one):
        try:
            found = known.get(evidence.sha256)
            if found is None:
                found = _computed(evidence, lambda evidence=evidence: _evidence(index, evidence))  # type: ignore[misc]
            if foreign := sorted({figure.wheel for figure in found} - {wheel.sha256}):
                raise ReleaseError(
                    "verdict-foreign", f"The measurement of {wheel.filename} is about another wheel.", details=[f"about: {foreign[0]}"]
                )
            figures[wheel.sha256] = found
        except SparkwrightError as error:
            wrong.append(problems.of(f"{one.entry.name}: {wheel.filename}", error))
    return figures, wrong


def _measurements(one: Shown) -> Iterator[tuple[Wheel, Evidence]]:
    for wheel, proved in one.wheels:
        yield from ((wheel, evidence) for evidence in proved.evidence if evidence.kind == "throughput")


def _computed(evidence: Evidence, read: Callable[[], bytes]) -> tuple[Measured, ...]:
    from sparkwright.bench.report import read as results
    from sparkwright.operate.site import measured

    data = read()
    return measured.of(results.decode(data, f"the throughput {evidence.sha256[:12]}"), evidence.sha256)


def _evidence(index: Catalogue, one: Evidence) -> bytes:
    if index.address.folder is None:
        return index.evidence(one)
    name = places.evidence(one.sha256)
    data = address.small(index.address, name, most=min(one.size, MOST_RECORD), failure=partial(TrustError, "evidence-invalid"))
    if data is None or sha256_bytes(data) != one.sha256:
        raise TrustError("evidence-invalid", f"{name} is missing." if data is None else f"{name} has other bytes than its hash says.")
    return data
