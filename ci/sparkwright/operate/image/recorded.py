"""
What was pushed, for good: which bytes a registry has under which name, and which release is in them.

The record lies in the output folder as ``image-<digest>.json``. With an index, its publisher signs the same and puts it beside the release,
as ``b/<release>/image-<digest>.dsse.json``; no manifest has to change for it, and with the release it goes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sparkwright.core.errors import FileError, StoreError
from sparkwright.core.files import sha256_bytes
from sparkwright.operate.image.made import Made
from sparkwright.operate.image.picked import Picked
from sparkwright.release.errors import ReleaseError
from sparkwright.release.manifest import places
from sparkwright.release.manifest.records import Line, Name, Sha256
from sparkwright.release.publish import ground
from sparkwright.release.publish.folder import Folder
from sparkwright.release.publish.prepare import Publisher
from sparkwright.release.signing import envelope
from sparkwright.release.signing.statement import Statement, Subject
from sparkwright.release.signing.trust import Trust

FORMAT = 1
PREDICATE = "urn:sparkwright:image:v1"
#: A record has a few kilobytes.
LARGEST = 1 << 20


class ImageRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    An image in a registry.

    Attributes:
        digest: sha256 of its manifest, by which the registry gives it to everybody. *id*: by which an engine knows it.
        base: Its base, ``NAME@sha256:…`` or an id.
        release: Address of the release in it; *name*, *stack*: as in that. *proved*: whether everything that ``verified`` asks for was.
        wheels: Project → sha256 of our wheels. *labels*: what the image says of itself.
    """

    digest: Sha256
    repository: Line
    tag: Line
    id: Line
    platform: Line
    base: Line
    release: Sha256
    name: Name
    stack: Name
    proved: bool
    wheels: dict[Name, Sha256]
    labels: dict[str, str] = {}
    format: int = FORMAT


def record(made: Made, found: Picked, repository: str, tag: str, pushed: str) -> ImageRecord:
    """Return the record of *made*, which the registry has as *pushed* (``sha256:…``)."""
    entry = found.entry
    return ImageRecord(
        pushed.removeprefix("sha256:"), repository, tag, made.id, made.platform, made.base, entry.release, entry.name, entry.stack,
        not found.missing, {wheel.project: wheel.sha256 for wheel in found.wheels}, dict(made.labels),
    )  # fmt: skip


def ready(folder: Path) -> None:
    """Make sure that a record can be written to *folder*: what is pushed cannot be taken back. Raises `state-unusable`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise StoreError(
            "state-unusable", f"{folder} cannot be written.", details=[str(error)], todo="Name another folder with --output."
        ) from error


def written(folder: Path, kept: ImageRecord) -> Path:
    """Write *kept* to *folder*, whole or not at all, and return its file."""
    path = folder / f"image-{kept.digest}.json"
    unfinished = path.with_suffix(".new")
    unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(kept)) + b"\n")
    unfinished.replace(path)
    return path


def read(path: Path) -> ImageRecord:
    """Return the record in the file *path*; raises `file-invalid` where it is none."""
    try:
        with path.open("rb") as stream:
            return msgspec.json.decode(stream.read(LARGEST), type=ImageRecord)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FileError("file-invalid", f"{path} is no record of an image.", details=[str(error)]) from error


def place(kept: ImageRecord) -> str:
    """Return where the signed record lies in an index."""
    return str(Path(places.release(kept.release)).with_name(f"image-{kept.digest}.dsse.json"))


def published(publisher: Publisher, kept: ImageRecord) -> str:
    """
    Sign *kept*, put it beside its release in the publisher's index, and return its place there.

    Raises:
        index-missing, index-damaged, index-busy, signer-unknown: The index is not there, not whole, held, or somebody else's.
        release-unknown: It does not have that release. wheel-name-taken: Another record of that digest is there. disk-full.
    """
    with ground.held(publisher.root):
        check(publisher, kept.release)
        where = place(kept)
        if (there := publisher.root / where).is_file() and opened(there.read_bytes(), publisher.trust, where) == kept:
            return where
        data = publisher.signer.sign(Statement((Subject(kept.repository, kept.digest),), PREDICATE, _predicate(kept)))
        with tempfile.NamedTemporaryFile(dir=publisher.root / ground.WORK) as file:
            file.write(data)
            file.flush()
            Folder(publisher.root).put(where, Path(file.name), sha256_bytes(data))
    return where


def check(publisher: Publisher, release: str) -> None:
    """Raise `release-unknown` unless the publisher's index offers *release*; raises as `ground.required`, too."""
    manifest = ground.required(publisher.root, publisher.trust)
    if release not in {entry.release for entry in manifest.entries}:
        raise ReleaseError("release-unknown", f"The index in {publisher.root} has no such release.", details=[release])


def opened(data: bytes, trust: Trust, what: str) -> ImageRecord:
    """
    Return the record in *data*, once somebody whom *trust* names signed it.

    Raises:
        evidence-invalid, signature-invalid, signer-unknown: See `envelope.opened`. file-invalid: It is about another image than it says.
    """
    said = envelope.opened(data, trust, predicate_type=PREDICATE, what=what).statement
    try:
        kept = msgspec.convert(said.predicate, ImageRecord)
    except msgspec.ValidationError as error:
        raise FileError("file-invalid", f"{what} does not have the fields of an image's record.", details=[str(error)]) from error
    if [one.sha256 for one in said.subjects] != [kept.digest]:
        raise FileError("file-invalid", f"{what} is signed about another image than the one that it describes.")
    return kept


def _predicate(kept: ImageRecord) -> dict[str, object]:
    built: Mapping[str, object] = msgspec.to_builtins(kept)
    return dict(built)
