"""
What an installed wheel is recognised by, whoever installed it: one digest over the files that an installer lays down as they are.

It is the sha256 over the sorted lines ``<name>,<sha256 in hex>`` of RECORD, without what installers add or rewrite: RECORD itself, what
they note in the ``.dist-info`` folder, compiled Python, and scripts. So pip's environment, uv's and the wheel have the same.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from sparkwright.builder.wheel import archive as wheelfile
from sparkwright.core.errors import WheelError
from sparkwright.core.zips import zip_file, zip_members

#: What installers write into the ``.dist-info`` folder, and what signs RECORD.
NOTED = frozenset(("RECORD", "RECORD.jws", "RECORD.p7s", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json"))

#: A RECORD row: the name, and the sha256 in hex; empty where it states none.
Row = tuple[str, str]

_SHA256 = re.compile(r"sha256=([A-Za-z0-9_-]{43})=?")


def of_wheel(path: Path) -> str:
    """
    Return the content of the wheel at *path*, as its RECORD states it; whether that is true, `decide.facts.inspect` finds out.

    Raises:
        wheel-invalid: It is no wheel, or its RECORD cannot be read, has two rows of one name, or one without a sha256.
        archive-unsafe: A member's name leaves its folder.
    """
    try:
        with zip_file(path) as archive:
            members = zip_members(archive, path.name)
            records = [name for name in members if name.count("/") == 1 and name.endswith(".dist-info/RECORD")]
            if len(records) != 1:
                raise WheelError("wheel-invalid", f"{path.name} has {len(records)} RECORDs instead of one.")
            text = wheelfile.member_text(archive, members, records[0], path.name).decode("utf-8")
    except OSError as error:
        raise WheelError("wheel-invalid", f"{path.name} cannot be read.", details=[str(error)]) from error
    rows = list(_kept(_rows(text), records[0].partition("/")[0], ".data/"))
    if bare := [name for name, sha256 in rows if not sha256]:
        raise WheelError("wheel-invalid", f"The RECORD of {path.name} states no sha256.", details=bare[:10])
    if len({name for name, _ in rows}) < len(rows):
        raise WheelError("wheel-invalid", f"The RECORD of {path.name} has two rows of one name.")
    return _digest(rows)


def of_installed(info: Path, *, deep: bool = False) -> str:
    """
    Return the content of what is installed with the ``.dist-info`` folder *info*; empty where its RECORD cannot be read.

    Args:
        deep: Hash the files that RECORD names, and do not believe what it says of them; empty where one is missing.
    """
    try:
        record = info / "RECORD"
        if record.stat().st_size > wheelfile.MOST_BYTES_TEXT:
            return ""
        rows = list(_kept(_rows(record.read_text("utf-8")), info.name))
        return _digest((name, _hashed(info.parent / name)) for name, _ in rows) if deep else _digest(rows)
    except (OSError, ValueError, csv.Error):
        return ""


def facts(site: Path) -> dict[str, str]:
    """
    Return the content of every wheel of ours that is installed in *site*, as facts of a ladder: ``content <project>`` → digest.

    Every file is hashed, and of what is not whole there is no fact.
    """
    from packaging.utils import InvalidName, canonicalize_name

    found = {}
    for info in sorted(site.glob("*.dist-info")):
        name, _, version = info.name.removesuffix(".dist-info").rpartition("-")
        if "+spark." not in version:
            continue
        try:
            project = canonicalize_name(name, validate=True)
        except InvalidName:
            continue
        if digest := of_installed(info, deep=True):
            found[f"content {project}"] = digest
    return found


def _rows(text: str) -> Iterator[Row]:
    for row in csv.reader(io.StringIO(text)):
        if row:
            yield row[0], hexed(row[1]) if len(row) == 3 else ""


def hexed(text: str) -> str:
    """Return a hash as RECORD has it (``sha256=…``, unpadded base64) in hex; empty where it is no sha256."""
    match = _SHA256.fullmatch(text)
    return base64.urlsafe_b64decode(match[1] + "=").hex() if match else ""


def _kept(rows: Iterable[Row], info: str, moved: str = "") -> Iterator[Row]:
    """Yield the *rows* that every installer leaves as they are; *moved* ends the name of the folder whose files go elsewhere."""
    for name, sha256 in rows:
        top, _, rest = name.partition("/")
        if name.startswith(("../", "/")) or name.endswith(".pyc") or (top == info and rest in NOTED):
            continue
        if not (moved and f"{top}/".endswith(moved)):
            yield name, sha256
        elif rest.startswith(("purelib/", "platlib/")):
            # These two become site-packages itself; scripts and data leave it, and are rows with "../" then.
            yield rest.partition("/")[2], sha256


def _digest(rows: Iterable[Row]) -> str:
    return hashlib.sha256("".join(sorted(f"{name},{sha256}\n" for name, sha256 in rows)).encode()).hexdigest()


def _hashed(path: Path) -> str:
    # A device in the place of a file may never end.
    if not path.is_file():
        raise ValueError(f"{path} is no file")
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
