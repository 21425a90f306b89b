"""
A zip archive read as hostile: what is refused before anything is unpacked.
"""

from __future__ import annotations

import zipfile

from sparkwright.errors import ArchiveUnsafe, WheelInvalid

MOST_MEMBERS = 100_000
#: One member; the largest library of the official vLLM wheel is 308 MB.
MOST_BYTES = 4 * 1024**3
#: All members together, as the disk of a build machine would have to hold them.
MOST_BYTES_TOTAL = 24 * 1024**3
#: From here on a member that is larger than its packed form by `MOST_RATIO` is no library and no text, and neither is such a wheel.
RATIO_FROM, RATIO_TOTAL_FROM, MOST_RATIO = 64 * 1024**2, 1024**3, 200
#: RECORD and METADATA are read into memory.
MOST_BYTES_TEXT = 64 * 1024**2

#: Bytes of a member's header before its name.
_LOCAL_HEADER = 30
#: What every installer can unpack; the others may also ask for gigabytes of memory.
_PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def checked(archive: zipfile.ZipFile, origin: str) -> dict[str, zipfile.ZipInfo]:
    """
    Return the members of *archive* that are files, by name, from what its directory says.

    Raises:
        WheelInvalid: One appears twice, shares bytes with another, is packed in an unusual way, or is larger than in any wheel.
        ArchiveUnsafe: A name leaves its folder, or it is a link.
    """
    members: dict[str, zipfile.ZipInfo] = {}
    total = 0
    infos = archive.infolist()
    if len(infos) > MOST_MEMBERS:
        raise WheelInvalid(f"{origin} has more than {MOST_MEMBERS} members.")
    for info in infos:
        name = info.filename
        parts = name.rstrip("/").split("/")
        if "\\" in name or any(part in ("", ".", "..") for part in parts) or any(ord(letter) < 32 for letter in name):
            raise ArchiveUnsafe(f"{origin} has a member that would leave its folder.", details=[f"member: {name!r}"])
        if info.external_attr >> 28 == 0o12:
            raise ArchiveUnsafe(f"{origin} has a symbolic link, which no wheel may have.", details=[f"member: {name!r}"])
        if name in members:
            raise WheelInvalid(f"{origin} holds the same member twice.", details=[f"member: {name!r}"])
        if info.compress_type not in _PACKINGS:
            raise WheelInvalid(f"{origin} is packed in a way that not every installer knows.", details=[f"member: {name!r}"])
        total += info.file_size
        if info.file_size > MOST_BYTES or total > MOST_BYTES_TOTAL or _inflated(info.file_size, info.compress_size, RATIO_FROM):
            raise WheelInvalid(f"{origin} is larger than any wheel.", details=[f"member: {name!r}", f"bytes: {info.file_size}"])
        if not info.is_dir():
            members[name] = info
    _check_places(infos, archive.start_dir, origin)
    if _inflated(total, archive.start_dir, RATIO_TOTAL_FROM):
        raise WheelInvalid(f"{origin} is larger than any wheel.", details=[f"bytes of all members: {total}"])
    return members


def _inflated(size: int, packed: int, limit: int) -> bool:
    return size > limit and size > MOST_RATIO * max(packed, 1)


def _check_places(infos: list[zipfile.ZipInfo], end: int, origin: str) -> None:
    """Refuse members that share bytes, by which a small file holds a large content many times."""
    ordered = sorted(infos, key=lambda info: info.header_offset)
    for info, following in zip(ordered, [*(info.header_offset for info in ordered[1:]), end], strict=True):
        if info.header_offset + _LOCAL_HEADER + info.compress_size > following:
            raise WheelInvalid(f"{origin} holds members that overlap.", details=[f"member: {info.filename!r}"])


def text(archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], name: str, origin: str) -> bytes:
    """Return the text of the member *name*; raise `WheelInvalid` where it is missing or too long to be one."""
    info = members.get(name)
    if info is None or info.file_size > MOST_BYTES_TEXT:
        raise WheelInvalid(f"{origin} has no usable {name.rpartition('/')[2]}.", details=[f"expected: {name}"])
    with archive.open(info) as stream:
        return stream.read(MOST_BYTES_TEXT)
