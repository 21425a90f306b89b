"""Tars of any members, written without any check of ours or of tarfile's."""

import io
import tarfile
from typing import Any

#: A header and the bytes behind it.
Member = tuple[tarfile.TarInfo, bytes]


def member(name: str, data: bytes = b"", **fields: Any) -> Member:
    """Return a member with these *fields* of its header; its size is that of *data* unless it is one of them."""
    info = tarfile.TarInfo(name)
    for field, value in {"size": len(data), **fields}.items():
        setattr(info, field, value)
    return info, data


def packed(*members: Member) -> bytes:
    """Return the uncompressed tar of *members*."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()
