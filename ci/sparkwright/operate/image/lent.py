"""
What is lent to the container that installs: the manifest, whom to trust, the installer's files by hash, and the store's downloads.

All of it lies below ``/tmp``, which is memory inside, and so leaves nothing in the image, not even a folder.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from sparkwright.builder.container import BindMount
from sparkwright.core.errors import FileError
from sparkwright.forks.context import RunContext
from sparkwright.operate.image import selected
from sparkwright.operate.image.picked import Picked
from sparkwright.release.manifest import places
from sparkwright.release.signing.trust import Trust, Trusted

LENT, STORE = Path("/tmp/lent"), Path("/tmp/store")  # noqa: S108  the container's own
#: The part of ``lent`` that makes the program inside a user of the same index, who trusts whom we do.
CONFIG = "config/config.yaml"
#: The installer and what it requires.
PROGRAM = "program.txt"
INDEX = "index"


@contextlib.contextmanager
def folders(context: RunContext, picked: Picked, installer: Sequence[Path]) -> Iterator[tuple[BindMount, ...]]:
    """Yield the folders that the container reads; raises `file-invalid` where a trusted root cannot be read."""
    with tempfile.TemporaryDirectory(prefix="sparkwright-image-") as name:
        place = Path(name)
        # Root inside may be nobody out here.
        place.chmod(0o755)
        _write(place / INDEX / places.MANIFEST, picked.manifest)
        _write(place / CONFIG, b"{}\n")
        _write(place / CONFIG.replace("config.yaml", "trust.yaml"), _trust(picked, place / "config"))
        _write(place / PROGRAM, selected.lines(installer, f"{STORE}/downloads").encode())
        lent = [BindMount(context.store.folder(part), STORE / part) for part in ("downloads", "index")]
        yield (BindMount(place, LENT), *lent)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _trust(picked: Picked, folder: Path) -> bytes:
    """Return ``trust.yaml`` for the program inside: JSON, which is YAML."""
    trust: Trust = picked.index.trust
    if trust.root:
        try:
            _write(folder / "root.json", Path(trust.root).read_bytes())
        except OSError as error:
            raise FileError("file-invalid", f"{trust.root} cannot be read.", details=[str(error)]) from error
    said = Trusted(tuple(key.text for key in trust.keys), trust.identities, "root.json" if trust.root else "")
    return msgspec.json.encode({"indexes": {picked.index.manifest.url: said}})
