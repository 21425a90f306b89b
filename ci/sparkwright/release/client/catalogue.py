"""
What an index offers, checked: the signed manifest, and from it release, proof, lock and evidence, each by its hash.

What is named by a hash never changes, so it is kept in the store and asked for once.
"""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import msgspec

from sparkwright.core.errors import FileError, SparkwrightError
from sparkwright.core.files import sha256_bytes
from sparkwright.forks.context import StandaloneContext
from sparkwright.release import spec
from sparkwright.release.client import address
from sparkwright.release.client.address import Address
from sparkwright.release.errors import InstallError, ReleaseError, TrustError
from sparkwright.release.manifest import places, seen, signed, times
from sparkwright.release.manifest.records import Entry, Evidence, Manifest, Proof, Release
from sparkwright.release.signing.trust import Trust
from sparkwright.release.spec import OnsiteSpec

T = TypeVar("T", Release, Proof)

MOST_MANIFEST = 64 << 20
#: A release of ten wheels is below 1 MB; verdicts with all samples are the largest evidence.
MOST_RECORD = 64 << 20


class Catalogue(msgspec.Struct, frozen=True):
    """An index whose manifest was checked; *by*: whose signature it has."""

    context: StandaloneContext
    address: Address
    trust: Trust
    manifest: Manifest
    by: str = ""

    def release(self, entry: Entry) -> Release:
        """
        Return the record of a release.

        Raises:
            index-damaged: It is not there. download-invalid: What is there is something else. set-mixed: It is that of another release.
        """
        data = self._named(places.release(entry.release), entry.release, f"the record of {entry.name}", Release)
        release = _decoded(data, Release, f"the record of {entry.name}")
        if (release.name, release.stack) != (entry.name, entry.stack):
            raise ReleaseError("set-mixed", f"The manifest's {entry.name} is a release that calls itself {release.name}.")
        return release

    def proof(self, entry: Entry) -> Proof:
        """Return what is proved of a release; raises as `release`."""
        data = self._named(places.proof(entry.release, entry.proof), entry.proof, f"the proof of {entry.name}", Proof)
        proof = _decoded(data, Proof, f"the proof of {entry.name}")
        if proof.release != entry.release:
            raise ReleaseError(
                "set-mixed", f"The manifest gives {entry.name} a proof that is about another release.", details=[f"about: {proof.release}"]
            )
        return proof

    def lock(self, entry: Entry, release: Release, machine: str) -> bytes:
        """Return the bytes of the release's lock for *machine*; raises as `release`."""
        wanted = next(lock.sha256 for lock in release.locks if lock.machine == machine)
        return self._named(places.lock(entry.release, machine), wanted, f"the lock of {entry.name}", None)

    def onsite(self, entry: Entry, release: Release) -> OnsiteSpec | None:
        """Return what the release edits on the user's machine; raises as `release`."""
        if not release.onsite:
            return None
        what = f"the edits of {entry.name}"
        return onsite_of(self._named(places.onsite(entry.release), release.onsite, what, None), what)

    def evidence(self, one: Evidence) -> bytes:
        """Return a file of evidence; raise `evidence-invalid` where it is not there or is something else."""
        try:
            data = self._named(places.evidence(one.sha256), one.sha256, f"the {one.kind}", None, most=min(one.size, MOST_RECORD))
        except (ReleaseError, InstallError) as error:
            if isinstance(error, ReleaseError) and error.reference != "index-damaged":
                raise
            if isinstance(error, InstallError) and error.reference != "download-invalid":
                raise
            raise TrustError("evidence-invalid", error.what, details=error.details) from error
        if len(data) != one.size:
            raise TrustError(
                "evidence-invalid", f"The {one.kind} has {len(data)} bytes instead of {one.size}.", details=[places.evidence(one.sha256)]
            )
        return data

    def _named(self, name: str, sha256: str, what: str, kind: type[msgspec.Struct] | None, most: int = MOST_RECORD) -> bytes:
        """Return the file *name*, known to have *sha256*, from the store or the index."""
        kept = self.context.store.root / "index" / sha256
        if kept.is_file() and sha256_bytes(data := kept.read_bytes()) == sha256:
            return data
        found = address.small(
            self.address, name, most=most, failure=partial(InstallError, "download-invalid"), offline=self.context.offline
        )
        if found is None:
            raise ReleaseError("index-damaged", f"The index at {self.address} lacks {what}.", details=[f"file: {name}"])
        if (other := sha256_bytes(found)) != sha256:
            raise _other(found, kind, f"{self.address} serves something else in the place of {what}.", name, sha256, other)
        self.context.store.write(f"index/{sha256}", found)
        return found


def _other(data: bytes, kind: type[msgspec.Struct] | None, what: str, name: str, wanted: str, found: str) -> SparkwrightError:
    """Return the failure for bytes with another hash: a record of the right kind is another release's."""
    details = [f"file:   {name}", f"wanted: {wanted}", f"found:  {found}"]
    if data.lstrip()[:1] == b"<":
        return InstallError("download-invalid", what, details=[*details, "It is an HTML or XML page."])
    try:
        if kind is not None:
            msgspec.json.decode(data, type=kind)
            return ReleaseError("set-mixed", what, details=details)
    except msgspec.DecodeError:
        pass
    if kind is None and data.startswith((b'lock-version = "', b"# ")):
        return ReleaseError("set-mixed", what, details=details)
    return InstallError("download-invalid", what, details=details)


def _decoded(data: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise ReleaseError("index-damaged", f"The index's manifest names {what}, which cannot be read.", details=[str(error)]) from error


def onsite_of(data: bytes, what: str) -> OnsiteSpec:
    """Return the record of edits in *data*; raise `index-damaged` where it is none."""
    try:
        return spec.checked(msgspec.json.decode(data, type=OnsiteSpec), what)
    except (msgspec.DecodeError, FileError) as error:
        if isinstance(error, FileError) and error.reference != "file-invalid":
            raise
        details = error.details if isinstance(error, FileError) else [str(error)]
        raise ReleaseError("index-damaged", f"The index's manifest names {what}, which cannot be read.", details=details) from error


def read(context: StandaloneContext, where: Address, trust: Trust, *, signed_for: str = "") -> Catalogue:
    """
    Return what the index at *where* offers, and remember its manifest.

    Args:
        signed_for: The address that the manifest is to be signed for, where it is reached at another one.

    Raises:
        index-missing: There is no manifest. manifest-invalid, manifest-elsewhere: See `signed.read`. manifest-replayed, manifest-forked,
        manifest-expired: See `seen.check`. signature-invalid, signer-unknown: See `signing.envelope`.
        source-unreachable, offline: See `address.small`.
    """
    data = address.small(
        where, places.MANIFEST, most=MOST_MANIFEST, failure=partial(ReleaseError, "manifest-invalid"), offline=context.offline
    )
    if data is None:
        raise ReleaseError("index-missing", f"{where} holds no index of sparkwright.", details=[f"missing: {where.of(places.MANIFEST)}"])
    manifest, by = signed.opened(data, trust, what=f"the manifest of {where}", asked=signed_for or where.url)
    found, index = sha256_bytes(data), seen.index_id(manifest.url)
    seen.check(manifest, found, index, times.now(), context.state)
    seen.note(manifest, found, index, context.state)
    return Catalogue(context, where, trust, manifest, by)
