"""
Verifying what an identity signed, offline: Sigstore's own library on its bundle, against a trusted root that is here already.

Who signed is read from a short-lived certificate; that it was valid then, and that the signature was published, is shown by what the
bundle carries: the certificate's own timestamp, the log's inclusion proof, and its signed checkpoint.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sparkwright.core.errors import SparkwrightError
from sparkwright.release.errors import TrustError
from sparkwright.release.signing.trust import Identity, Trust

if TYPE_CHECKING:
    from cryptography.x509 import Certificate
    from sigstore.models import Bundle, ClientTrustConfig, TrustedRoot
    from sigstore.verify import Verifier

#: The largest trusted root that is read, in bytes.
LARGEST = 4 * 1024 * 1024


# It warns on standard error that it does not ask the network, which is what is wanted here.
logging.getLogger("sigstore").addHandler(logging.NullHandler())


class _Kind(msgspec.Struct, rename="camel"):
    media_type: str


class _Policy:
    """Which of the trusted identities a certificate is for; the library asks once it has verified the certificate itself."""

    def __init__(self, identities: tuple[Identity, ...], what: str) -> None:
        self._identities, self._what = identities, what
        self.by = ""

    def verify(self, cert: Certificate) -> None:
        from sigstore.errors import VerificationError
        from sigstore.verify import policy

        for one in self._identities:
            try:
                policy.Identity(identity=one.identity, issuer=one.issuer).verify(cert)
            except VerificationError:
                continue
            self.by = one.identity
            return
        details = [f"trusted: {one.identity} ({one.issuer})" for one in self._identities]
        raise TrustError(
            "signer-unknown", f"{self._what} is signed by {', '.join(named(cert)) or 'nobody that has a name'}.", details=details
        )


def verified(data: bytes, trust: Trust, what: str) -> tuple[str, bytes, str]:
    """
    Return type and bytes of what the Sigstore bundle *data* signs, and the identity that signed it.

    Raises:
        evidence-invalid: It is no bundle. signature-invalid: Something of it does not hold. signer-unknown: The identity is not trusted, or
        the certificate is of an authority that is not. trust-missing: There is no trusted root, or the library cannot be loaded.
    """
    if not trust.identities:
        details = [f"trusted: {name}" for name in trust.names or ["nobody"]]
        raise TrustError("signer-unknown", f"{what} is signed by an identity, and no identity is trusted.", details=details)
    verifier = _verifier(trust.root)
    from sigstore.errors import CertValidationError

    bundle, policy = read(data, what), _Policy(trust.identities, what)
    try:
        payload_type, payload = verifier.verify_dsse(bundle, policy)
    except SparkwrightError:
        raise
    except CertValidationError as error:
        raise TrustError(
            "signer-unknown",
            f"The certificate in {what} is not one that the trusted root vouches for at the time of signing.",
            details=[str(error)],
        ) from error
    except Exception as error:  # whatever a library makes of hostile bytes, they are not verified
        raise TrustError(
            "signature-invalid", f"{what} is not what was signed.", details=[f"{type(error).__name__}: {error}"[:1000]]
        ) from error
    if not policy.by:
        raise TrustError("signature-invalid", f"{what} was not asked for its identity.")
    return payload_type, payload, policy.by


def read(data: bytes, what: str) -> Bundle:
    """Return the bundle in *data*, not verified in any way; raises `evidence-invalid`."""
    from sigstore.models import Bundle

    try:
        return Bundle.from_json(data)
    except Exception as error:  # as above
        raise TrustError(
            "evidence-invalid", f"{what} is no Sigstore bundle.", details=[f"{type(error).__name__}: {error}"[:1000]]
        ) from error


def named(certificate: Certificate) -> list[str]:
    """Return the names that *certificate* is for."""
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [*names.get_values_for_type(x509.RFC822Name), *names.get_values_for_type(x509.UniformResourceIdentifier)]


@functools.lru_cache
def _verifier(root: str) -> Verifier:
    """Return the verifier for a trusted root, which is read once a run."""
    try:
        from sigstore.verify import Verifier

        return Verifier(trusted_root=trusted_root(root))
    except SparkwrightError:
        raise
    except Exception as error:  # a library that is missing or broken verifies nothing
        where = root or "the public Sigstore instance"
        raise TrustError(
            "trust-missing",
            f"The trusted root of {where} cannot be had offline.",
            details=[f"{type(error).__name__}: {error}"[:1000]],
            todo="Name the publisher's key with --key instead, or mend the library: pip install --upgrade sigstore",
        ) from error


def trusted_root(root: str) -> TrustedRoot:
    """Return the trusted root in the file *root*; without one, the public instance's that the library has at hand."""
    from sigstore.models import ClientTrustConfig, TrustedRoot

    if not root:
        return ClientTrustConfig.production(offline=True).trusted_root
    text = _text(root)
    if "clienttrustconfig" in msgspec.json.decode(text, type=_Kind).media_type:
        return ClientTrustConfig.from_json(text).trusted_root
    return TrustedRoot.from_file(root)


def trust_config(root: str) -> ClientTrustConfig:
    """Return where signatures are made: the private instance that the file *root* describes, else the public one (network)."""
    from sigstore.models import ClientTrustConfig

    return ClientTrustConfig.from_json(_text(root)) if root else ClientTrustConfig.production()


def _text(root: str) -> str:
    with Path(root).open("rb") as stream:
        data = stream.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise ValueError(f"{root} has more than {LARGEST} bytes")
    return data.decode()
