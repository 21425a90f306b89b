"""The records of a published release: from an index whose signature counts, or from a folder of one's own."""

from __future__ import annotations

from functools import partial

import msgspec

from sparkwright.core.console import console
from sparkwright.forks.context import StandaloneContext
from sparkwright.release.client import address, catalogue, install
from sparkwright.release.client.address import Address
from sparkwright.release.client.catalogue import Catalogue
from sparkwright.release.client.install import Wish
from sparkwright.release.errors import ReleaseError, TrustError
from sparkwright.release.manifest import places, signed
from sparkwright.release.manifest.records import Entry, Manifest, Proof, Release
from sparkwright.release.signing import dsse
from sparkwright.release.signing.statement import Statement
from sparkwright.release.signing.trust import Trust


class Published(msgspec.Struct, frozen=True):
    """
    A release as it was published.

    Attributes:
        before: The release before it; None where there is none, or the index no longer has it.
        yanked: Why it is no longer offered.
        checked: Whether somebody's signature of the manifest was checked.
    """

    release: Release
    proof: Proof
    before: Release | None
    channel: str
    yanked: str
    checked: bool


class _Bundle(msgspec.Struct, frozen=True, rename="camel"):
    """Of a Sigstore bundle, the envelope."""

    dsse_envelope: dsse.Envelope


def opened(context: StandaloneContext, wish: Wish) -> tuple[Catalogue, bool]:
    """
    Return the index that *wish* means, and whether somebody's signature of it was checked; raises as `install.opened`.

    A folder on this machine of which nobody says whose signature counts is read without one, and that is said.
    """
    try:
        return install.opened(context, wish), True
    except TrustError as error:
        if error.reference != "trust-missing":
            raise
        where = address.find(wish.index, context)
        if where.folder is None:
            raise
        index = _unsigned(context, where)
        console.note(f"the signature of {where} is not checked, as nothing says whose counts; name the publisher's key with --key")
        return index, False


def of_index(context: StandaloneContext, wish: Wish) -> Published:
    """
    Return the release that *wish* means, or the newest that is not yanked; see `opened`.

    Raises:
        SparkwrightError: As `opened`. release-unknown: There is no such release. index-damaged, download-invalid, set-mixed: A
        record is not there, or is another.
    """
    index, checked = opened(context, wish)
    entry = _meant(index.manifest, wish)
    release = index.release(entry)
    earlier = next((one for one in index.manifest.entries if one.release == release.before), None)
    before = index.release(earlier) if earlier else None
    return Published(release, index.proof(entry), before, entry.channel, entry.yanked, checked)


def _meant(manifest: Manifest, wish: Wish) -> Entry:
    """Return the release of that name or address; the newest that is offered where none is named."""
    named = [one for one in manifest.entries if wish.stack in ("", one.stack)]
    found = [one for one in named if (wish.release in (one.name, one.release) if wish.release else not one.yanked)]
    if not found:
        raise ReleaseError(
            "release-unknown",
            f"The index has no release {wish.release}." if wish.release else "The index offers no release.",
            details=[one.name for one in named[-20:]],
        )
    return found[-1]


def _unsigned(context: StandaloneContext, where: Address) -> Catalogue:
    """Return what the folder *where* holds, with nobody's signature checked."""
    data = address.small(where, places.MANIFEST, most=catalogue.MOST_MANIFEST, failure=partial(ReleaseError, "manifest-invalid"))
    if data is None:
        raise ReleaseError("index-missing", f"{where} holds no index of sparkwright.", details=[f"missing: {places.MANIFEST}"])
    what = f"the manifest of {where}"
    try:
        envelope = dsse.decode(data, what)
        payload = msgspec.json.decode(data, type=_Bundle).dsse_envelope.payload if envelope.is_bundle else envelope.payload
        manifest = msgspec.convert(Statement.of(payload, what).predicate, Manifest)
    except TrustError as error:
        if error.reference != "evidence-invalid":
            raise
        raise ReleaseError("manifest-invalid", error.what, details=error.details) from error
    except msgspec.MsgspecError as error:
        raise ReleaseError("manifest-invalid", f"{what} does not have the fields of a manifest.", details=[str(error)]) from error
    signed.check(manifest, what)
    return Catalogue(context, where, Trust(), manifest)
