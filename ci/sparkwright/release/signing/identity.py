"""Signing as an identity that others vouch for: a workflow of a forge, or a person, by Sigstore's keyless signing (network)."""

from __future__ import annotations

import base64
import binascii
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import msgspec

from sparkwright.core.errors import SparkwrightError
from sparkwright.release.errors import TrustError
from sparkwright.release.signing import bundle
from sparkwright.release.signing.statement import Statement

if TYPE_CHECKING:
    from sigstore.oidc import IdentityToken
    from sigstore.sign import Signer, SigningContext

#: An identity token, where the surroundings (GitHub Actions, GitLab, Google Cloud, …) give none by themselves.
TOKEN = "SPARKWRIGHT_IDENTITY_TOKEN"  # noqa: S105  the name of a variable


#: How long a certificate is used, in seconds; Fulcio's are valid for ten minutes.
CERTIFICATE_SECONDS = 300.0


#: How long one signature may take, in seconds; the library itself waits for its services without end.
SECONDS = 180.0


class _Claims(msgspec.Struct):
    """Of a token's claims, the one that GitHub's certificates are named after; the others are the library's business."""

    job_workflow_ref: str = ""


class IdentitySigner:
    """
    Signs as the identity of a token. See `sparkwright.release.signing.statement.Signer`.

    Args:
        root: Client trust configuration of a private Sigstore instance; empty for the public one, whose log everybody can read.
        token: The identity token; by default what the surroundings give.

    Raises:
        identity-unusable: There is no token, it cannot be used, or the instance cannot be reached.
    """

    has_identity = True

    def __init__(self, root: str = "", token: str = "") -> None:
        self._given = token
        try:
            from sigstore.sign import SigningContext

            self._identity = self._token()
            self._context: SigningContext = SigningContext.from_trust_config(bundle.trust_config(root))
        except Exception as error:  # the library's failures have no common base
            if isinstance(error, TrustError) and error.reference == "identity-unusable":
                raise
            raise _unusable("Nothing can be signed as an identity.", error) from error
        self._signer: Signer | None = None
        self._since = 0.0
        self.by = _name(self._identity)

    def sign(self, statement: Statement) -> bytes:
        """Return *statement* in a Sigstore bundle, signed and entered into the log; raises `identity-unusable`."""
        from sigstore import dsse

        content = dsse.Statement(statement.encode())
        try:
            return _within(SECONDS, lambda: self._current().sign_dsse(content).to_json().encode())
        except SparkwrightError:
            raise
        except Exception as error:  # as above
            raise _unusable(f"Signing as {self.by} failed.", error) from error

    def _current(self) -> Signer:
        """Return the signer whose certificate still holds for a while; one serves for all signatures of ten minutes."""
        if self._signer is None or time.monotonic() - self._since > CERTIFICATE_SECONDS:
            if self._signer is not None:
                self._identity = self._token()
            with self._context.signer(self._identity) as signer:
                self._signer, self._since = signer, time.monotonic()
        return self._signer

    def _token(self) -> IdentityToken:
        from sigstore.oidc import IdentityToken, detect_credential

        raw = self._given or os.environ.get(TOKEN) or detect_credential()
        if not raw:
            raise TrustError(
                "identity-unusable",
                "There is no identity here to sign as.",
                details=[f"{TOKEN} is not set, and nothing else gives a token"],
            )
        return IdentityToken(raw)


def _name(token: IdentityToken) -> str:
    """Return what the certificate for *token* will be for: GitHub's are named after the workflow, others as the library says."""
    claims = _Claims()
    if token.issuer == "https://token.actions.githubusercontent.com":
        try:
            part = str(token).split(".")[1]
            claims = msgspec.json.decode(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)), type=_Claims)
        except (IndexError, binascii.Error, msgspec.DecodeError) as error:
            raise _unusable("The identity token cannot be read.", error) from error
    return f"https://github.com/{claims.job_workflow_ref}" if claims.job_workflow_ref else str(token.identity)


def _within(seconds: float, call: Callable[[], bytes]) -> bytes:
    """Return what *call* returns; after *seconds* it is left to itself, in a thread that does not keep the program from ending."""
    done: Future[bytes] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result(seconds)


def _unusable(what: str, error: Exception) -> TrustError:
    return TrustError("identity-unusable", what, details=[f"{type(error).__name__}: {error}"[:1000]])
