"""
Keys of the index's roles: Ed25519 keys in files (PKCS#8, PEM), or an identity of Sigstore.

A folder of keys holds ``root*.pem``, ``targets*.pem`` and ``online*.pem``. The beginning of the
name says for which roles a new index takes the key; in an index that exists, the root metadata
alone says so. The fingerprint of a key is its key id.
"""

import contextlib
import itertools
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from securesystemslib.signer import CryptoSigner, Key, Signer, SigstoreSigner, SSlibKey
from tuf.api.metadata import Root

from sparkwright.core.files import list_folder, read_bytes
from sparkwright.core.store import flush, locked_in_place, replacing, translate_disk_full
from sparkwright.release import ReleaseError

if TYPE_CHECKING:
    from sparkwright.release.policy import Identity

#: The only source of a passphrase: command lines are visible to everybody on the machine.
PASSPHRASE = "SPARKWRIGHT_KEY_PASSPHRASE"  # noqa: S105  the name of a variable

#: The beginning of a key's file name → the roles of the index that it is for.
KEY_ROLES: Mapping[str, tuple[str, ...]] = {
    "root": ("root",),
    "targets": ("targets",),
    "online": ("snapshot", "timestamp"),
}

#: Bytes of the largest key file.
LARGEST = 16 * 1024


class Keys:
    """
    The keys that a publisher holds.

    Attributes:
        by_file: The beginning of the file name (see `KEY_ROLES`) → signers.
    """

    def __init__(self, by_file: Mapping[str, Sequence[Signer]]) -> None:
        self.by_file = by_file

    @property
    def signers(self) -> dict[str, Signer]:
        """Key id → signer."""
        every = itertools.chain.from_iterable(self.by_file.values())
        return {signer.public_key.keyid: signer for signer in every}

    def of_role(self, root: Root, role: str) -> dict[str, Signer]:
        """Return the signers whose key holds *role* by the metadata *root*, by key id."""
        own = self.signers
        return {keyid: own[keyid] for keyid in root.roles[role].keyids if keyid in own}

    def require(self, root: Root, roles: Iterable[str]) -> None:
        """
        Require enough keys for all of *roles*.

        Raises:
            key-missing: There are fewer than the threshold of a role.
        """
        for role in roles:
            signers, threshold = self.of_role(root, role), root.roles[role].threshold
            if len(signers) < threshold:
                raise ReleaseError(
                    "key-missing",
                    f"The role {role} needs {threshold} of its keys, and {len(signers)} are here.",
                    details=[f"key: {keyid}" for keyid in root.roles[role].keyids],
                )

    def for_new_index(self, role: str) -> list[Signer]:
        """Return the signers that a new index takes for *role*, by the names of their files."""
        return [*self.by_file.get("online" if role in KEY_ROLES["online"] else role, ())]


def passphrase() -> str:
    """Return the passphrase that the environment gives; empty without one."""
    return os.environ.get(PASSPHRASE, "")


def load(paths: Sequence[Path], identity: "Identity | None" = None) -> Keys:
    """
    Return the keys in the files and folders *paths*.

    Args:
        identity: Also sign for the targets role as this Sigstore identity, with the credentials
            of the environment.

    Raises:
        key-invalid: A file cannot be read, holds no Ed25519 key, or is open to others; or a
            folder holds none.
        identity-unusable: There are no credentials, or they are another identity's.
    """
    by_file = defaultdict[str, list[Signer]](list)
    for path in paths:
        files = list_folder(path, "*.pem") if path.is_dir() else [path]
        if not files:
            raise ReleaseError("key-invalid", f"{path} holds no key (*.pem).")
        for file in files:
            by_file[next(filter(file.name.startswith, KEY_ROLES), "")].append(load_private(file))
    if identity:
        by_file["targets"].append(_identity_signer(identity))
    return Keys(by_file)


def load_private(path: Path) -> CryptoSigner:
    """Return the private key in the file *path*; raise `key-invalid` as `load`."""
    if path.is_file() and path.stat().st_mode & 0o077:
        raise ReleaseError(
            "key-invalid",
            f"{path} is open to others.",
            todo=f"Make it yours alone: chmod 600 {path}",
        )
    data = read_bytes(path, limit=LARGEST, failure=partial(ReleaseError, "key-invalid"))
    try:
        key = serialization.load_pem_private_key(data, passphrase().encode() or None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # The library's message may quote the file, so it is not shown.
        raise ReleaseError(
            "key-invalid",
            f"{path} is no private key that can be read.",
            details=[f"it is no key, or {PASSPHRASE} is wrong, missing or not needed"],
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ReleaseError("key-invalid", f"{path} is no private Ed25519 key.")
    return CryptoSigner(key)


def make(folder: Path, names: Sequence[str] = tuple(KEY_ROLES)) -> dict[Path, Key]:
    """
    Make a key ``<name>.pem`` in *folder* for each of *names*, or none.

    Returns:
        The files, and their public keys.

    Raises:
        key-invalid: A file is there already, or cannot be written. disk-full: There is no room.
    """
    secret = passphrase().encode()
    protection: serialization.KeySerializationEncryption = (
        serialization.BestAvailableEncryption(secret) if secret else serialization.NoEncryption()
    )
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    pairs: dict[Path, Key] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (
            translate_disk_full(folder),
            locked_in_place(folder, str(folder)),
            contextlib.ExitStack() as written,
        ):
            for name in dict.fromkeys(names):
                path = folder / f"{name}.pem"
                if path.exists():
                    raise ReleaseError(
                        "key-invalid",
                        f"{path} is there already; a key is never overwritten.",
                        todo="Choose another folder.",
                    )
                key = Ed25519PrivateKey.generate()
                temporary = written.enter_context(replacing(path))
                temporary.touch(mode=0o600, exist_ok=False)
                temporary.write_bytes(key.private_bytes(pem, pkcs8, protection))
                flush(temporary)
                pairs[path] = SSlibKey.from_crypto(key.public_key())
    except OSError as error:
        raise ReleaseError(
            "key-invalid", f"No key can be written to {folder}.", details=[str(error)]
        ) from error
    return pairs


def _identity_signer(identity: "Identity") -> Signer:
    try:
        _, public = SigstoreSigner.import_(identity.identity, identity.issuer)
        return SigstoreSigner.from_priv_key_uri("sigstore:", public)
    except Exception as error:  # the library's failures have no common base
        raise ReleaseError(
            "identity-unusable",
            f"Nothing can be signed as {identity.identity}.",
            details=[f"{type(error).__name__}: {error}"[:1000]],
        ) from error
