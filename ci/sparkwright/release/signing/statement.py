"""What is signed: an in-toto statement, version 1, which says something of files that it names by hash."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from sparkwright.core.files import canonical
from sparkwright.release.errors import TrustError
from sparkwright.release.manifest.records import Sha256

#: The type of every statement (github.com/in-toto/attestation, spec/v1/statement.md).
TYPE = "https://in-toto.io/Statement/v1"

#: The most subjects that a statement may have; ours have one, or as many as a release has wheels.
MOST_SUBJECTS = 10_000


class Subject(msgspec.Struct, frozen=True):
    """A file that a statement is about."""

    name: str
    sha256: Sha256


class _Subject(msgspec.Struct, frozen=True):
    """A subject as in-toto writes it; other hashes beside sha256 are allowed and not looked at."""

    digest: dict[str, str]
    name: str = ""


class _Statement(msgspec.Struct, frozen=True, rename={"type": "_type", "predicate_type": "predicateType"}):
    """A statement as in-toto writes it."""

    type: str
    subject: tuple[_Subject, ...]
    predicate_type: str
    predicate: dict[str, Any]


class Statement(msgspec.Struct, frozen=True):
    """
    What somebody says of files.

    Attributes:
        predicate_type: A URI that tells how *predicate* is read.
    """

    subjects: tuple[Subject, ...]
    predicate_type: str
    predicate: dict[str, Any]

    def encode(self) -> bytes:
        """Return the statement as in-toto's JSON; equal statements give equal bytes."""
        subjects = tuple(_Subject({"sha256": one.sha256}, one.name) for one in self.subjects)
        return canonical(msgspec.to_builtins(_Statement(TYPE, subjects, self.predicate_type, self.predicate)))

    @classmethod
    def of(cls, data: bytes, what: str) -> Statement:
        """
        Return the statement that *data* holds.

        Args:
            what: What was read, for the message.

        Raises:
            evidence-invalid: It is no in-toto statement of version 1, or a subject of it has no sha256.
        """
        try:
            read = msgspec.json.decode(data, type=_Statement)
            if read.type != TYPE:
                raise TrustError("evidence-invalid", f"{what} is a statement of the type {read.type!r:.200}, not {TYPE}.")
            if not 0 < len(read.subject) <= MOST_SUBJECTS:
                raise TrustError("evidence-invalid", f"{what} is about {len(read.subject)} files; 1 to {MOST_SUBJECTS} can be.")
            named = [{"name": one.name, "sha256": one.digest.get("sha256", "")} for one in read.subject]
            return cls(msgspec.convert(named, tuple[Subject, ...]), read.predicate_type, read.predicate)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TrustError("evidence-invalid", f"{what} is no in-toto statement.", details=[str(error)]) from error


class Signer(Protocol):
    """
    Who signs.

    Attributes:
        by: As people and records name the signer: ``ed25519:`` and 16 digits of the key's fingerprint, or the identity.
        has_identity: Is it an identity that others vouch for, rather than a key?
    """

    @property
    def by(self) -> str: ...

    @property
    def has_identity(self) -> bool: ...

    def sign(self, statement: Statement) -> bytes:
        """Return the statement signed: a file for `envelope.opened`."""
        ...
