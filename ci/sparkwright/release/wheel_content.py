"""
The digest by which an installed wheel is recognised, whichever installer laid it down.

It is the sha256 over the sorted lines ``<name>,<sha256 in hex>`` of the files that installers leave
as they are: without RECORD, what they note in the ``.dist-info`` folder, compiled Python, scripts
and data. So a wheel, pip's environment and uv's have the same digest.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from packaging.utils import canonicalize_name

from sparkwright.core.errors import FileError
from sparkwright.core.files import read_text, sha256_file
from sparkwright.core.zips import INSTALLER_FILES

T = TypeVar("T")

#: What installers write into the ``.dist-info`` folder, and what signs RECORD.
_VARYING = INSTALLER_FILES | {"RECORD.jws", "RECORD.p7s"}

_SHA256 = re.compile(r"sha256=([A-Za-z0-9_-]{43})=?")


def of_wheel(files: Mapping[str, str], info: str) -> str:
    """
    Return the digest of a wheel.

    Args:
        files: Member → sha256.
        info: The name of its ``.dist-info`` folder.
    """
    return _digest(_stable(files.items(), info))


def of_environment(site: Path) -> dict[str, str]:
    """
    Return the digests of the wheels of ours in the site-packages *site*: ``content <project>`` →
    digest, from the files themselves. A wheel of which a file is missing is left out.
    """
    digests = {}
    for info in sorted(site.glob("*+spark.*.dist-info")):
        project = canonicalize_name(info.name.partition("-")[0])
        try:
            record = csv.reader(read_text(info / "RECORD").splitlines())
            names = {row[0]: site / row[0] for row in record if row}
            digests[f"content {project}"] = _digest(
                (name, _hashed(path)) for name, path in _stable(names.items(), info.name)
            )
        except (OSError, ValueError, csv.Error, FileError):
            continue
    return digests


def hexed(text: str) -> str:
    """Return a hash of RECORD (``sha256=…``, unpadded base64) in hex; empty if it is none."""
    match = _SHA256.fullmatch(text)
    return base64.urlsafe_b64decode(match[1] + "=").hex() if match else ""


def _stable(rows: Iterable[tuple[str, T]], info: str) -> Iterator[tuple[str, T]]:
    """Yield the rows of files that every installer leaves as they are, by their installed names."""
    data = f"{info.removesuffix('.dist-info')}.data"
    for name, value in rows:
        top, _, rest = name.partition("/")
        if name.startswith(("../", "/")) or name.endswith(".pyc"):
            continue
        if top == data:
            # These two become the site-packages; scripts, data and headers leave it.
            if rest.startswith(("purelib/", "platlib/")):
                yield rest.partition("/")[2], value
        elif top != info or rest not in _VARYING:
            yield name, value


def _hashed(path: Path) -> str:
    # A device in the place of a file may never end.
    if not path.is_file():
        raise ValueError(f"{path} is no file")
    return sha256_file(path)


def _digest(rows: Iterable[tuple[str, str]]) -> str:
    lines = sorted(f"{name},{sha256}\n" for name, sha256 in rows)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
