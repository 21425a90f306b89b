"""Opening what somebody signed, offline: a DSSE envelope signed with a key, or a Sigstore bundle signed by an identity."""

from __future__ import annotations

import msgspec

from sparkwright.release.errors import TrustError
from sparkwright.release.signing import dsse
from sparkwright.release.signing.statement import Statement
from sparkwright.release.signing.trust import Trust


class Opened(msgspec.Struct, frozen=True):
    """A statement, and who signed it; *identity* where that is somebody whom others vouch for, rather than a key."""

    statement: Statement
    by: str
    identity: bool = False


def opened(data: bytes, trust: Trust, *, predicate_type: str, what: str) -> Opened:
    """
    Return the statement in *data*, once somebody whom *trust* names has signed exactly these bytes.

    Args:
        predicate_type: What it has to be a statement of. *what*: what was read, for messages.

    Raises:
        evidence-invalid: It is no signed file, or a statement of something else. signature-invalid: The bytes are not those that were
        signed. signer-unknown: Somebody else signed them.
    """
    envelope = dsse.decode(data, what)
    if envelope.is_bundle:
        from sparkwright.release.signing import bundle  # heavy, and not needed where keys sign

        payload_type, payload, by = bundle.verified(data, trust, what)
    else:
        payload_type, payload, by = envelope.payload_type, envelope.payload, _verified(envelope, trust, what)
    if payload_type != dsse.PAYLOAD_TYPE:
        raise TrustError("evidence-invalid", f"{what} holds {payload_type!r:.200}, not {dsse.PAYLOAD_TYPE}.")
    statement = Statement.of(payload, what)
    if statement.predicate_type != predicate_type:
        details = [f"expected {predicate_type}", f"found    {statement.predicate_type:.200}"]
        raise TrustError("evidence-invalid", f"{what} says something else than expected.", details=details)
    return Opened(statement, by, envelope.is_bundle)


def _verified(envelope: dsse.Envelope, trust: Trust, what: str) -> str:
    """Return who signed; the hint that a signature gives of its key decides nothing but which failure is reported."""
    signed = dsse.pae(envelope.payload_type, envelope.payload)
    for signature in envelope.signatures:
        for key in trust.keys:
            if key.verifies(signature.sig, signed):
                return key.by
    named = {signature.keyid for signature in envelope.signatures}
    if known := [key.by for key in trust.keys if key.fingerprint in named]:
        raise TrustError("signature-invalid", f"The signature of {known[0]} does not fit {what}.")
    signers = ", ".join(sorted(f"ed25519:{name[:16]}" if name else "a key that is not named" for name in named))
    raise TrustError(
        "signer-unknown", f"{what} is signed by {signers!r}.", details=[f"trusted: {name}" for name in trust.names or ["nobody"]]
    )
