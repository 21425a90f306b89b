#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = ["tuf>=6"]
# ///
"""
Check a release of an index without sparkwright: signatures, hashes and what it claims.

    uv run verify_release.py URL FINGERPRINT [RELEASE]

URL is the address of the index and FINGERPRINT the sha256 of its first root metadata, as the
publisher states it elsewhere. Without RELEASE, the newest of the channel verified is checked. Every
file that the release names is downloaded, compared with its size and its sha256, and forgotten. The
status is 0 if all agree. An index that a Sigstore identity signs needs `--with
securesystemslib[sigstore]`, too.

python-tuf verifies the metadata: signatures, thresholds, expiry, and that the parts belong
together. Whether verdicts are true it cannot tell: the publisher vouches for them.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin

from securesystemslib.signer import KEY_FOR_TYPE_AND_SCHEME, SigstoreKey
from tuf.api.exceptions import DownloadError, RepositoryError
from tuf.ngclient import Updater

#: Seconds without a byte, and bytes of the largest root metadata.
PATIENCE, LARGEST_ROOT = 60, 1 << 19

# The library reads keys of identities only on request.
KEY_FOR_TYPE_AND_SCHEME["sigstore-oidc", "Fulcio"] = SigstoreKey


def urlopen(url: str) -> Any:
    """Return the reply of *url*, which is no file of this machine."""
    if not url.startswith(("https://", "http://")):
        raise ValueError(f"{url} is no address of a web server")
    return urllib.request.urlopen(url, timeout=PATIENCE)  # noqa: S310  checked above


def first_root(url: str, fingerprint: str) -> bytes:
    """Return the first root metadata, whose sha256 is *fingerprint*."""
    with urlopen(urljoin(url, "metadata/1.root.json")) as reply:
        root: bytes = reply.read(LARGEST_ROOT)
    if (actual := hashlib.sha256(root).hexdigest()) != fingerprint.lower():
        raise SystemExit(f"error: the first root of {url} is {actual}, not {fingerprint}")
    return root


def named_files(record: Any) -> Iterator[dict[str, Any]]:
    """Yield each file that a part of a release's record names."""
    if isinstance(record, dict) and {"name", "size", "sha256"} <= record.keys():
        yield record
    parts = record.values() if isinstance(record, dict) else record
    for part in parts if isinstance(record, dict | list) else ():
        yield from named_files(part)


def fault(url: str, file: dict[str, Any]) -> str:
    """Return in what the bytes at the address of *file* differ from it; empty if in nothing."""
    address = file.get("url") or f"{url}files/{file['sha256']}/{quote(file['name'])}"
    digest, size = hashlib.sha256(), 0
    try:
        with urlopen(address) as reply:
            while size <= file["size"] and (data := reply.read(1 << 20)):
                size += len(data)
                digest.update(data)
    except (OSError, ValueError) as error:
        return f"{address}: {error}"
    if (size, digest.hexdigest()) != (file["size"], file["sha256"]):
        return f"{address}: {size} bytes, sha256 {digest.hexdigest()}"
    return ""


def main(url: str, fingerprint: str, name: str = "") -> int:
    """Check the release *name*, and return the exit status."""
    url = url.rstrip("/") + "/"
    with tempfile.TemporaryDirectory() as folder:
        updater = Updater(
            folder,
            urljoin(url, "metadata/"),
            target_dir=folder,
            target_base_url=urljoin(url, "targets/"),
            bootstrap=first_root(url, fingerprint),
        )
        updater.refresh()
        # The library lists targets nowhere; what it wrote, it has verified.
        targets = json.loads(Path(folder, "targets.json").read_bytes())["signed"]["targets"]
        states, verified = {}, []
        for path, each in targets.items():
            release, state = path.split("/")[-1].removesuffix(".json"), each["custom"]
            states[release] = state
            if state["channel"] == "verified" and not state.get("yanked"):
                verified.append((state["made"], release))
        name = name or max(verified, default=("", ""))[1]
        target = updater.get_targetinfo(f"releases/{name}.json")
        if target is None:
            what = name or "in verified"
            raise SystemExit(f"error: there is no release {what}; there are {', '.join(states)}")
        record = json.loads(Path(updater.download_target(target)).read_bytes())
    state, files = states[name], {file["sha256"]: file for file in named_files(record)}
    print(f"{name}: signed, {state['channel']}, made {state['made']}, {len(files)} files")
    if state.get("yanked"):
        print(f"yanked: {state['yanked']}")
    if state.get("missing"):
        print(f"not shown: {', '.join(state['missing'])}")
    faults = 0
    for file in files.values():
        problem = fault(url, file)
        state = "differs" if problem else "agrees"
        print(f"{state} {file['sha256']} {file['name']} {problem}".rstrip())
        faults += bool(problem)
    if faults:
        print(f"{faults} of {len(files)} files differ")
        return 1
    print("every file is the one that was signed")
    return 0


if __name__ == "__main__":
    if not 3 <= len(sys.argv) <= 4:
        raise SystemExit("usage: verify_release.py URL FINGERPRINT [RELEASE]")
    try:
        sys.exit(main(*sys.argv[1:]))
    except (RepositoryError, DownloadError, OSError, ValueError, LookupError) as error:
        raise SystemExit(f"error: {type(error).__name__}: {error}") from None
