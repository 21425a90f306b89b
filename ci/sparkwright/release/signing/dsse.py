"""
The DSSE envelope: bytes, what kind of bytes they are, and signatures over both (github.com/secure-systems-lab/dsse, protocol.md).

A few lines of our own, because what reads bytes of strangers has to be typed and bounded; tests hold it against securesystemslib.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from sparkwright.release.errors import TrustError

#: The payload is an in-toto statement.
PAYLOAD_TYPE = "application/vnd.in-toto+json"

#: The largest signed file that is read, in bytes.
LARGEST = 64 * 1024 * 1024

#: Sigstore's bundles say so in their first field.
BUNDLE = "application/vnd.dev.sigstore.bundle"


class Signature(msgspec.Struct, frozen=True):
    """One signature; *keyid* is a hint that nobody vouches for."""

    sig: bytes
    keyid: Annotated[str, msgspec.Meta(max_length=500)] = ""


class Envelope(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """
    A signed file.

    Attributes:
        media_type: Empty for an envelope; a Sigstore bundle, which holds its envelope elsewhere, has one.
    """

    payload: bytes = b""
    payload_type: str = ""
    signatures: Annotated[tuple[Signature, ...], msgspec.Meta(max_length=16)] = ()
    media_type: str = ""

    @property
    def is_bundle(self) -> bool:
        return self.media_type.startswith(BUNDLE)


def pae(payload_type: str, payload: bytes) -> bytes:
    """Return what is signed: the pre-authentication encoding, which binds the payload to its type."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def encode(envelope: Envelope) -> bytes:
    """Return *envelope* as JSON; equal envelopes give equal bytes."""
    return msgspec.json.encode(envelope)


def decode(data: bytes, what: str) -> Envelope:
    """
    Return the envelope in *data*, not verified in any way; of a Sigstore bundle no more than that it is one.

    Raises:
        evidence-invalid: It is too large, or neither of the two.
    """
    if len(data) > LARGEST:
        raise TrustError("evidence-invalid", f"{what} has {len(data)} bytes; {LARGEST} are the most that is read.")
    try:
        envelope = msgspec.json.decode(data, type=Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TrustError(
            "evidence-invalid", f"{what} is not a signed file.", details=[str(error), f"it begins with {data[:80]!r}"]
        ) from error
    if not envelope.is_bundle and not (envelope.payload_type and envelope.signatures):
        raise TrustError("evidence-invalid", f"{what} is not a signed file.", details=["it has no payloadType or no signatures"])
    return envelope
