"""The manifest as a signed file: an in-toto statement about the manifest's own bytes, with the manifest as its predicate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from sparkwright.core.errors import UsageError
from sparkwright.core.files import canonical, sha256_bytes
from sparkwright.release.errors import ReleaseError, TrustError
from sparkwright.release.manifest import times
from sparkwright.release.manifest.records import FORMAT, Manifest
from sparkwright.release.signing import envelope
from sparkwright.release.signing.statement import Signer, Statement, Subject
from sparkwright.release.signing.trust import Trust
from sparkwright.release.signing.urls import normalised

PREDICATE = "urn:sparkwright:manifest:v1"

#: Name of the one subject, whose sha256 is that of the predicate's canonical bytes.
SUBJECT = "manifest"


def seal(manifest: Manifest, signer: Signer) -> bytes:
    """
    Return *manifest* signed, as it is served.

    Raises:
        manifest-invalid: It says what no manifest may say, so that every client would refuse it.
    """
    check(manifest, "the manifest to sign")
    predicate: dict[str, Any] = msgspec.to_builtins(manifest)
    _converted(predicate, "the manifest to sign")
    return signer.sign(Statement((Subject(SUBJECT, _address(predicate)),), PREDICATE, predicate))


def read(data: bytes, trust: Trust, *, what: str, asked: str = "") -> Manifest:
    """Return the manifest in *data*, as `opened` does."""
    return opened(data, trust, what=what, asked=asked)[0]


def opened(data: bytes, trust: Trust, *, what: str, asked: str = "") -> tuple[Manifest, str]:
    """
    Return the manifest in *data*, once somebody whom *trust* names has signed it, and who that is (see `envelope.Opened`).

    Args:
        what: Where it was read, for messages. *asked*: the URL that it has to be signed for; empty takes any.

    Raises:
        manifest-invalid: It is no manifest. signature-invalid: The bytes are not those that were signed. signer-unknown: Somebody else
        signed them. manifest-elsewhere: It is the manifest of another index.
    """
    try:
        found = envelope.opened(data, trust, predicate_type=PREDICATE, what=what)
    except TrustError as error:
        if error.reference != "evidence-invalid":
            raise
        raise ReleaseError("manifest-invalid", error.what, details=error.details) from error
    statement, subject = found.statement, found.statement.subjects[0]
    if len(statement.subjects) != 1 or subject.sha256 != _address(statement.predicate):
        raise ReleaseError("manifest-invalid", f"{what} is a statement about something else than the manifest that it holds.")
    manifest = _converted(statement.predicate, what)
    check(manifest, what)
    if asked and normalised(asked) != normalised(manifest.url):
        raise ReleaseError(
            "manifest-elsewhere", f"{what} was signed for another index.", details=[f"asked      {asked}", f"signed for {manifest.url}"]
        )
    return manifest, found.by


def _converted(predicate: dict[str, Any], what: str) -> Manifest:
    try:
        return msgspec.convert(predicate, Manifest)
    except msgspec.ValidationError as error:
        raise ReleaseError("manifest-invalid", f"{what} does not have the fields of a manifest.", details=[str(error)]) from error


def check(manifest: Manifest, what: str) -> None:
    """
    Refuse a manifest that contradicts itself.

    Raises:
        manifest-invalid: Its format is unknown, its serial or a time is impossible, or it names a release or a serial twice.
    """
    wrong = list(_contradictions(manifest))
    if wrong:
        raise ReleaseError("manifest-invalid", f"{what} contradicts itself.", details=wrong)


def _contradictions(manifest: Manifest) -> Iterator[str]:
    if manifest.format != FORMAT:
        yield f"format {manifest.format}; this program knows {FORMAT}: a newer sparkwright reads it"
    if manifest.serial < 1:
        yield f"serial {manifest.serial}"
    try:
        if times.moment(manifest.made) >= times.moment(manifest.expires):
            yield f"it expires ({manifest.expires}) before it is made ({manifest.made})"
        normalised(manifest.url)
    except (ValueError, UsageError) as error:
        yield str(error)
    if len({entry.name for entry in manifest.entries}) != len(manifest.entries):
        yield "two releases have the same name"
    if len({entry.release for entry in manifest.entries}) != len(manifest.entries):
        yield "two releases have the same address"
    serials = [record.serial for record in manifest.log]
    if serials != sorted(set(serials)) or (serials and not 1 <= serials[0] <= serials[-1] <= manifest.serial):
        yield "its log is out of order"


def _address(predicate: dict[str, Any]) -> str:
    return sha256_bytes(canonical(predicate))
