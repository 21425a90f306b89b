"""
Whose signature counts for an index: what the command line names, else what the user's ``trust.yaml`` says, else what the installer carries.

The first of the three that says anything is all that counts, so that naming a key narrows what is believed and never widens it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sparkwright.core import strict_yaml
from sparkwright.core.errors import FileError
from sparkwright.release.errors import TrustError
from sparkwright.release.signing.keys import PublicKey
from sparkwright.release.signing.urls import normalised

#: Written into the installer's wheel by `publish`, beside this package.
PACKAGED = Path(__file__).parents[1] / "trust.json"

#: The user's file, in the same folder as config.yaml.
USER_FILE = "trust.yaml"

LARGEST = 1024 * 1024


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Somebody whom an identity provider vouches for: a mail address or a workflow's URL, and the provider's own URL."""

    identity: str
    issuer: str


class Trust(msgspec.Struct, frozen=True):
    """
    Whose signature counts.

    Attributes:
        root: Path of a trusted root (or a client trust configuration) of a private Sigstore instance; empty for the public one.
        said: Who says so, for people: the command line, a file's path, the installer.
    """

    keys: tuple[PublicKey, ...] = ()
    identities: tuple[Identity, ...] = ()
    root: str = ""
    said: str = ""

    @property
    def names(self) -> list[str]:
        """Everybody whose signature counts, as messages name them."""
        return [key.by for key in self.keys] + [f"{one.identity} ({one.issuer})" for one in self.identities]


class Trusted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose signature counts, as a file says it; keys as `PublicKey.text`."""

    keys: tuple[str, ...] = ()
    identities: tuple[Identity, ...] = ()
    root: str = ""

    def trust(self, said: str) -> Trust:
        """Return the same with keys read; raises `key-invalid`."""
        keys = tuple(PublicKey.of(text, f"a key in {said}") for text in self.keys)
        return Trust(keys, self.identities, self.root, said)


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the installer carries: its index, and who signs that."""

    index: str
    keys: tuple[str, ...] = ()
    identities: tuple[Identity, ...] = ()


class _UserFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``trust.yaml``: URL of an index → whose signature counts for it."""

    indexes: dict[str, Trusted]


def config_folder() -> Path:
    """Return the folder of the user's configuration: that of ``SPARKWRIGHT_CONFIG``, else the platform's place."""
    if named := os.environ.get("SPARKWRIGHT_CONFIG"):
        return Path(named).absolute().parent
    import platformdirs

    return Path(platformdirs.user_config_dir("sparkwright", appauthor=False))


def find(index_url: str, key_files: Sequence[Path] = (), config: Path | None = None, packaged: Path = PACKAGED) -> Trust:
    """
    Return whose signature counts for the index at *index_url*.

    Args:
        key_files: Public keys that the command line names. *config*: the folder of ``trust.yaml`` (default: `config_folder`).

    Raises:
        trust-missing: Nothing says. key-invalid, file-invalid: What says is damaged.
    """
    if key_files:
        return Trust(tuple(PublicKey.load(path) for path in key_files), said="--key")
    for found in (_of_user(index_url, config or config_folder()), _of_installer(index_url, packaged)):
        if found and (found.keys or found.identities):
            return found
    raise TrustError("trust-missing", f"Nothing says who may sign the index {index_url}.")


def _of_user(index_url: str, config: Path) -> Trust | None:
    path = config / USER_FILE
    if not path.exists():
        return None
    for url, trusted in strict_yaml.load(path, _UserFile).indexes.items():
        if normalised(url) == normalised(index_url):
            found = trusted.trust(str(path))
            return msgspec.structs.replace(found, root=str(path.parent / found.root) if found.root else "")
    return None


def _of_installer(index_url: str, packaged: Path) -> Trust | None:
    read = carried(packaged)
    if read is None or normalised(read.index) != normalised(index_url):
        return None
    return Trusted(read.keys, read.identities).trust("the installer")


def carried(packaged: Path = PACKAGED) -> Document | None:
    """
    Return what the installer carries: the URL of its index, and who signs that; None in a checkout.

    Raises:
        file-invalid: The file is damaged.
    """
    try:
        with packaged.open("rb") as stream:
            data = stream.read(LARGEST + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FileError("file-invalid", f"{packaged} cannot be read.", details=[str(error)]) from error
    try:
        if len(data) > LARGEST:
            raise FileError("file-invalid", f"{packaged} is larger than {LARGEST} bytes.")
        return msgspec.json.decode(data, type=Document)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FileError("file-invalid", f"{packaged} does not say whom to trust.", details=[str(error)]) from error


def document(index: str, keys: Sequence[PublicKey], identities: Sequence[Identity] = ()) -> bytes:
    """Return ``trust.json`` for an installer of the index at *index*; equal trust gives equal bytes."""
    named = tuple(sorted(identities, key=lambda one: (one.identity, one.issuer)))
    made = Document(normalised(index), tuple(sorted(key.text for key in keys)), named)
    return msgspec.json.format(msgspec.json.encode(made)) + b"\n"
