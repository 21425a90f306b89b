"""Downloads that resume, are verified before they count, and keep what arrived when they break off."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sparkwright import __version__
from sparkwright.core.console import console
from sparkwright.core.store import Store, room_guard
from sparkwright.forks import package_index
from sparkwright.forks.errors import SourceError

if TYPE_CHECKING:
    import requests

#: A broken connection is taken up again this often before the download counts as failed.
ATTEMPTS = 5
#: What a broken connection loses at most; a larger one would never get on where connections break within it.
CHUNK = 1 << 16


def http() -> requests.Session:
    """Return a session that repeats what servers answer in passing (429, 5xx) and says who asks."""
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.util import Retry

    session = requests.Session()
    # pip's own variable for a lab's certificate authority; requests reads only its own.
    if not os.environ.get("REQUESTS_CA_BUNDLE") and (bundle := os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")):
        session.verify = bundle
    retry = Retry(total=4, backoff_factor=0.5, status_forcelist=(429, 500, 502, 503, 504), allowed_methods=("GET", "HEAD"))
    session.mount("https://", HTTPAdapter(max_retries=retry))
    session.mount("http://", HTTPAdapter(max_retries=retry))
    session.headers["User-Agent"] = f"sparkwright/{__version__}"
    # Compressed transfer would make byte ranges and lengths mean something else.
    session.headers["Accept-Encoding"] = "identity"
    return session


def path_of(store: Store, sha256: str, filename: str) -> Path:
    """Return where the file with that hash lies, or would."""
    return store.root / "downloads" / sha256 / filename


def obtain(store: Store, project: str, filename: str, sha256: str, *, offline: bool = False) -> Path:
    """
    Return the path of *filename* of *project* with the given *sha256*, downloading it when the store has none.

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
    """Bring the rest of *url* to *partial*, taking a broken connection up again where it broke."""
    import requests

    broke = ""
    with http() as session:
        for attempt in range(ATTEMPTS):
            time.sleep(min(8, attempt))
            before = partial.stat().st_size if partial.exists() else 0
            try:
                if _transfer(session, url, partial):
                    return
                broke = "the connection closed before the end"
            except requests.HTTPError as error:
                raise SourceError(
                    "source-unreachable", f"{package_index.shown(url)} cannot be had.", details=[package_index.shown(str(error))]
                ) from error
            except requests.RequestException as error:
                broke = package_index.shown(str(error))
            after = partial.stat().st_size if partial.exists() else 0
            console.detail(f"{partial.name}: {broke}; {after - before} bytes came, trying again")
    raise SourceError(
        "source-unreachable",
        f"{package_index.shown(url)} broke off {ATTEMPTS} times.",
        details=[broke, f"kept: {partial.stat().st_size if partial.exists() else 0} bytes in {partial}"],
    )


def _transfer(session: requests.Session, url: str, partial: Path) -> bool:
    """Fetch from where *partial* ends; return whether the whole is there now."""
    have = partial.stat().st_size if partial.exists() else 0
    headers = {"Range": f"bytes={have}-"} if have else {}
    with session.get(url, headers=headers, stream=True, timeout=(20, 120)) as reply:
        if reply.status_code == 416:
            # The server has no byte after what we hold: it is whole, and the hash will say whether it is right.
            return True
        reply.raise_for_status()
        resumed = reply.status_code == 206 and reply.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        have = have if resumed else 0
        total = have + int(reply.headers.get("Content-Length") or 0)
        with (
            room_guard(partial.parent),
            partial.open("ab" if resumed else "wb") as sink,
            console.progress(partial.stem, total, "bytes") as line,
        ):
            line.start_at(have)
            for chunk in reply.iter_content(CHUNK):
                sink.write(chunk)
                have += len(chunk)
                line.update(have)
            sink.flush()
            os.fsync(sink.fileno())
    return have >= total
