"""
What was pushed, for good: which bytes a registry has under which name, and which release is in them.

The record lies in the output folder as ``image-<digest>.json``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec

from sparkwright.core.errors import StoreError
from sparkwright.operate.image.made import Made
from sparkwright.operate.image.picked import Picked
from sparkwright.release.manifest.records import Line, Name, Sha256

FORMAT = 1


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
