"""The condition of what is installed here, and where a wheel file is from."""

from __future__ import annotations

from pathlib import Path

from sparkwright.client.environment import Prefix
from sparkwright.client.errors import ClientError
from sparkwright.client.index import Index
from sparkwright.client.install import check_unchanged, newest_first
from sparkwright.client.records import ReleaseWheel
from sparkwright.core import files
from sparkwright.core.http import LARGEST_FILE


def examine(prefix: Prefix, name: str, *, deep: bool) -> tuple[str, ...]:
    """
    Return what differs in the environment *name* from how it was made.

    Nothing in it is run, and no RECORD is believed.

    Args:
        deep: Read every file.
    """
    marker = prefix.marker(name)
    if marker is None:
        return ("an interrupted run left it; the next `install` removes it",)
    if not (prefix.release(name) / "bin/python").exists():
        return (f"its Python {marker.python} is gone",)
    try:
        check_unchanged(prefix, name, deep=deep)
    except ClientError as error:
        return error.details or (error.what,)
    return ()


def find_wheel(index: Index, path: Path) -> tuple[str, ReleaseWheel]:
    """
    Return the newest release that holds exactly the bytes of *path*, and its record of the wheel.

    Raises:
        release-unknown: None does. file-invalid: *path* is no file.
    """
    sha256 = files.sha256_bytes(files.read_bytes(path, limit=LARGEST_FILE))
    for name in newest_first(index.states):
        for wheel in index.release(name).wheels:
            if wheel.sha256 == sha256:
                return name, wheel
    raise ClientError("release-unknown", f"No release holds {path.name}.", details=[sha256])
