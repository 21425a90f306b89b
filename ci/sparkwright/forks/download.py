"""
Downloads that resume, are verified before they count, and keep what arrived when they break off.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from sparkwright.core import http
from sparkwright.core.console import console
from sparkwright.core.http import HttpFailure
from sparkwright.core.store import Store
from sparkwright.forks import package_index
from sparkwright.forks.errors import SourceError


def path_of(store: Store, sha256: str, filename: str) -> Path:
    """Return where the file with that hash lies, or would."""
    return store.root / "downloads" / sha256 / filename


def obtain(
    store: Store, project: str, filename: str, sha256: str, *, offline: bool = False
) -> Path:
    """
    Return the path of *filename* of *project* with the given *sha256*, downloading it when the
    store has none.

    Raises:
        offline: It is not in the store and *offline* is set.
        source-unreachable: The index does not offer it, or the connection broke too often.
        source-mismatch: The index states another hash, or other bytes arrived; those are removed.
        disk-full: There is no room; what arrived is kept.
    """
    path = path_of(store, sha256, filename)
    if path.exists():
        return path
    if offline:
        raise SourceError("offline", f"{filename} is not in the store.")
    with store.lock(f"download-{sha256[:16]}"):
        if path.exists():
            return path
        offer = package_index.find(project, filename)
        if offer.sha256 and offer.sha256 != sha256:
            raise SourceError(
                "source-mismatch",
                f"{filename} is not the file that the lock names.",
                details=[f"lock:  {sha256}", f"index: {offer.sha256}"],
            )
        partial = store.folder("downloads", sha256) / f"{filename}.part"
        _resume(offer.url, partial)
        _verify(partial, filename, sha256)
        os.replace(partial, path)
    return path


def _verify(partial: Path, filename: str, sha256: str) -> None:
    with partial.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        partial.unlink()
        raise SourceError(
            "source-mismatch",
            f"{filename} arrived with other bytes than the lock names.",
            details=[f"lock:    {sha256}", f"arrived: {found}"],
        )


def _resume(url: str, partial: Path) -> None:
    """Bring the rest of *url* to *partial*."""
    name = http.redact_credentials(url)
    try:
        with console.progress(partial.stem, 0, "bytes") as line:

            def advance(done: int, total: int) -> None:
                if not line.total:
                    line.start_at(done)
                line.total = total
                line.update(done)

            http.download(url, partial, on_progress=advance)
    except HttpFailure as failure:
        present = partial.stat().st_size if partial.exists() else 0
        details = [str(failure), f"kept: {present} bytes in {partial}"]
        raise SourceError(
            "source-unreachable", f"{name} cannot be downloaded.", details=details
        ) from failure
