"""Ed25519 keys in files: PKCS#8 for the half that signs, SPKI for the half that everybody may have, both as PEM."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import stat
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from sparkwright.core.files import reading
from sparkwright.core.store import translate_disk_full
from sparkwright.release.errors import TrustError
from sparkwright.release.signing import dsse
from sparkwright.release.signing.statement import Statement

#: The only place that a passphrase is taken from: command lines are seen by everybody on the machine.
PASSPHRASE = "SPARKWRIGHT_KEY_PASSPHRASE"  # noqa: S105  the name of a variable

#: A key's file has a few hundred bytes.
LARGEST = 16 * 1024

_PEM_BEGIN, _PEM_END = "-----BEGIN PUBLIC KEY-----", "-----END PUBLIC KEY-----"


def passphrase() -> str:
    """Return the passphrase that the environment gives; empty without one."""
    return os.environ.get(PASSPHRASE, "")


class PublicKey(msgspec.Struct, frozen=True):
    """The half of a key that verifies; *raw* is its 32 bytes (RFC 8032)."""

    raw: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]

    @property
    def fingerprint(self) -> str:
        """What people compare: sha256 of the raw bytes, in hex."""
        return hashlib.sha256(self.raw).hexdigest()

    @property
    def by(self) -> str:
        """How messages and records name it."""
        return f"ed25519:{self.fingerprint[:16]}"

    @property
    def text(self) -> str:
        """The key on one line, as trust.yaml and trust.json hold it: the base64 of its SPKI."""
        der = self._key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        return base64.b64encode(der).decode()

    @property
    def pem(self) -> str:
        return f"{_PEM_BEGIN}\n{self.text}\n{_PEM_END}\n"

    def verifies(self, signature: bytes, data: bytes) -> bool:
        """Did this key sign *data*?"""
        try:
            self._key().verify(signature, data)
        except InvalidSignature:
            return False
        return True

    def _key(self) -> Ed25519PublicKey:
        return Ed25519PublicKey.from_public_bytes(self.raw)

    @classmethod
    def of(cls, text: str, what: str = "the public key") -> PublicKey:
        """
        Return the key in *text*: PEM, or the one line between PEM's first and last.

        Raises:
            key-invalid: It is no public Ed25519 key.
        """
        if "PRIVATE KEY" in text:
            raise TrustError("key-invalid", f"{what} is a private key where the public one belongs (the file that ends in .pub).")
        body = text.strip().removeprefix(_PEM_BEGIN).removesuffix(_PEM_END)
        try:
            key = serialization.load_der_public_key(base64.b64decode("".join(body.split()), validate=True))
        except (ValueError, binascii.Error, UnsupportedAlgorithm) as error:
            raise TrustError("key-invalid", f"{what} is no public Ed25519 key.", details=[str(error)]) from error
        if not isinstance(key, Ed25519PublicKey):
            raise TrustError("key-invalid", f"{what} is no public Ed25519 key.", details=[f"it is a {type(key).__name__}"])
        return cls(key.public_bytes_raw())

    @classmethod
    def load(cls, path: Path) -> PublicKey:
        """
        Return the key in the file at *path*.

        Raises:
            key-invalid: It cannot be read, or is no public Ed25519 key.
        """
        return cls.of(_read(path, secret=False).decode("utf-8", "replace"), str(path))


class KeySigner:
    """Signs with a key from a file. See `sparkwright.release.signing.statement.Signer`."""

    has_identity = False

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = PublicKey(key.public_key().public_bytes_raw())

    @classmethod
    def passing(cls) -> KeySigner:
        """Return one with a key that is nowhere else, and gone with the process."""
        return cls(Ed25519PrivateKey.generate())

    @property
    def by(self) -> str:
        return self.public.by

    @classmethod
    def load(cls, path: Path, passphrase: str = "") -> KeySigner:
        """
        Return a signer with the private key in the file at *path*.

        Raises:
            key-invalid: It cannot be read, others may read it, the passphrase is wrong, or it is no Ed25519 key.
        """
        data = _read(path, secret=True)
        try:
            key = serialization.load_pem_private_key(data, passphrase.encode() or None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            # What the library says may quote the file, which is nobody's business.
            said = "the passphrase is wrong, or it is no key"
            if isinstance(error, TypeError):  # the library's way to say that a passphrase lacks, or is too much
                said = "it has no passphrase, but one was given" if passphrase else "it needs its passphrase"
            raise TrustError("key-invalid", f"{path} is no private key that can be read.", details=[f"{said} ({PASSPHRASE})"]) from None
        if not isinstance(key, Ed25519PrivateKey):
            raise TrustError("key-invalid", f"{path} is no private Ed25519 key.", details=[f"it is a {type(key).__name__}"])
        return cls(key)

    def sign(self, statement: Statement) -> bytes:
        """Return *statement* in a DSSE envelope, signed; the same statement gives the same bytes."""
        payload = statement.encode()
        signature = dsse.Signature(self._key.sign(dsse.pae(dsse.PAYLOAD_TYPE, payload)), self.public.fingerprint)
        return dsse.encode(dsse.Envelope(payload, dsse.PAYLOAD_TYPE, (signature,)))


def public_path(path: Path) -> Path:
    """Return where the public half of the key at *path* lies."""
    return path.with_name(f"{path.name}.pub")


def make(path: Path, passphrase: str = "") -> str:
    """
    Make a key in the file *path*, which its owner alone may read, and its public half beside it in ``<name>.pub``.

    Returns:
        The fingerprint.

    Raises:
        key-invalid: One of the two files is there already, or cannot be written. disk-full: No room.
    """
    for taken in (path, public_path(path)):
        if taken.exists() or taken.is_symlink():
            raise TrustError("key-invalid", f"{taken} is there already; a key is never overwritten.", todo="Choose another name.")
    key = Ed25519PrivateKey.generate()
    protection = serialization.BestAvailableEncryption(passphrase.encode()) if passphrase else serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection)
    public = PublicKey(key.public_key().public_bytes_raw())
    write_new(path, pem, 0o600)
    write_new(public_path(path), public.pem.encode(), 0o644)
    return public.fingerprint


def shown(path: Path, passphrase: str = "") -> PublicKey:
    """
    Return the public half of the key at *path*, which may be either half; a lost public file is written again.

    Raises:
        key-invalid: It is neither, or cannot be read.
    """
    if b"PRIVATE KEY" not in _read(path, secret=False):
        return PublicKey.load(path)
    public = KeySigner.load(path, passphrase).public
    if not public_path(path).exists():
        write_new(public_path(path), public.pem.encode(), 0o644)
    return public


def write_new(path: Path, data: bytes, mode: int) -> None:
    """
    Write *data* to a file that must not exist, whole or not at all.

    Raises:
        key-invalid: It exists, or cannot be written. disk-full: No room.
    """
    try:
        with translate_disk_full(path.parent), tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as stream:
            stream.write(data)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
            os.link(stream.name, path)  # unlike a rename, refuses where something is
    except FileExistsError as error:
        raise TrustError("key-invalid", f"{path} is there already; a key is never overwritten.", todo="Choose another name.") from error
    except OSError as error:
        raise TrustError("key-invalid", f"{path} cannot be written.", details=[str(error)]) from error


def _read(path: Path, *, secret: bool) -> bytes:
    try:
        with reading(path) as stream:
            state = os.fstat(stream.fileno())
            if secret and (state.st_mode & 0o077 or not stat.S_ISREG(state.st_mode)):
                raise TrustError(
                    "key-invalid", f"{path} is open to others.", details=[f"its mode is {stat.filemode(state.st_mode)}; chmod 600 {path}"]
                )
            data = stream.read(LARGEST + 1)
    except OSError as error:
        raise TrustError("key-invalid", f"{path} cannot be read.", details=[str(error)]) from error
    if len(data) > LARGEST:
        raise TrustError("key-invalid", f"{path} is too large for a key.", details=[f"more than {LARGEST} bytes"])
    return data
