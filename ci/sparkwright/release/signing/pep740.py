"""
The provenance object of the simple API (PEP 740), made of a Sigstore bundle about one wheel.

It holds the same certificate, log entry and signed statement in another arrangement, so it can be verified by whoever verifies such
objects, and claims nothing that the bundle does not.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from sparkwright.core.files import canonical
from sparkwright.release.errors import TrustError
from sparkwright.release.signing import bundle, dsse
from sparkwright.release.signing.statement import Statement

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

#: Of the two kinds of statement that PEP 740's verifiers take, the one that has something to say.
PREDICATE = "https://slsa.dev/provenance/v1"

# Claims in Fulcio's certificates (github.com/sigstore/fulcio, docs/oid-info.md).
_ISSUER, _REPOSITORY, _WORKFLOW = "1.3.6.1.4.1.57264.1.8", "1.3.6.1.4.1.57264.1.12", "1.3.6.1.4.1.57264.1.18"

_FORGES = {
    "https://token.actions.githubusercontent.com": ("GitHub", "https://github.com/", "/.github/workflows/", "workflow"),
    "https://gitlab.com": ("GitLab", "https://gitlab.com/", "//", "workflow_filepath"),
}


class _Material(msgspec.Struct, rename="camel"):
    tlog_entries: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=1)]


class _Statement(msgspec.Struct, rename="camel"):
    payload: bytes
    signatures: Annotated[tuple[dsse.Signature, ...], msgspec.Meta(min_length=1, max_length=1)]


class _Bundle(msgspec.Struct, rename="camel"):
    """What of a bundle goes into the object; the library has read it before and found it in order."""

    verification_material: _Material
    dsse_envelope: _Statement


def pep740(signed: bytes, filename: str) -> bytes:
    """
    Return the provenance object for the wheel *filename*, whose provenance is the Sigstore bundle *signed*.

    Returns:
        Its JSON; equal bundles give equal bytes. Empty where PEP 740's verifiers know no publisher of the identity's kind (a person, say).

    Raises:
        evidence-invalid: It is no bundle, not about that wheel alone, or not of the predicate that PEP 740 takes.
    """
    what = f"the provenance of {filename}"
    certificate = bundle.read(signed, what).signing_certificate
    try:
        read = msgspec.json.decode(signed, type=_Bundle)
    except msgspec.DecodeError as error:
        raise TrustError("evidence-invalid", f"{what} is no bundle around a statement.", details=[str(error)]) from error
    envelope, entry = read.dsse_envelope, read.verification_material.tlog_entries[0]
    statement = Statement.of(envelope.payload, what)
    if statement.predicate_type != PREDICATE or [one.name for one in statement.subjects] != [filename]:
        raise TrustError("evidence-invalid", f"The statement is not about {filename} alone, or not of the type {PREDICATE}.")
    if "inclusionPromise" not in entry:
        # The object has no room for a timestamp of anybody else.
        raise TrustError("evidence-invalid", f"The log did not say when the provenance of {filename} was signed, which PEP 740 relies on.")
    publisher = _publisher(certificate)
    if publisher is None:
        return b""
    attestation = {
        "version": 1,
        "verification_material": {"certificate": _base64(_der(certificate)), "transparency_entries": [entry]},
        "envelope": {"statement": _base64(envelope.payload), "signature": _base64(envelope.signatures[0].sig)},
    }
    return canonical({"version": 1, "attestation_bundles": [{"publisher": publisher, "attestations": [attestation]}]})


def _publisher(certificate: Certificate) -> dict[str, str] | None:
    """Return the publisher as PEP 740's verifiers know them, by the claims of *certificate*."""
    claims = {extension.oid.dotted_string: extension.value for extension in certificate.extensions}
    issuer, repository, workflow = (_claim(getattr(claims.get(oid), "value", b"")) for oid in (_ISSUER, _REPOSITORY, _WORKFLOW))
    if issuer == "https://accounts.google.com":
        return {"kind": "Google", "email": bundle.named(certificate)[0]}
    if issuer not in _FORGES:
        return None
    kind, host, between, field = _FORGES[issuer]
    path = workflow.rpartition("@")[0].removeprefix(repository)
    if not repository.startswith(host) or not path.startswith(between):
        return None
    return {"kind": kind, "repository": repository.removeprefix(host), field: path.removeprefix(between)}


def _claim(der: bytes) -> str:
    """Return the text of a claim, a DER UTF8String; empty for anything else."""
    if len(der) < 2 or der[0] != 0x0C:
        return ""
    begin = 2 if der[1] < 0x80 else 2 + (der[1] & 0x7F)
    length = der[1] if der[1] < 0x80 else int.from_bytes(der[2:begin], "big")
    return der[begin:].decode("utf-8", "replace") if len(der) == begin + length else ""


def _der(certificate: Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.DER)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
