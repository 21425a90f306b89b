"""
Wheels, written so that equal content gives equal bytes.

A wheel is made from files, or from another wheel by replacing members and bringing in a local
version label. Members that stay are copied as they lie, compressed, so that a graft onto a 330 MB
wheel takes seconds.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import struct
import zipfile
from collections.abc import Mapping
from email.parser import BytesParser
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import msgspec

from sparkwright.builder.errors import BuildError
from sparkwright.builder.wheel.version import restate
from sparkwright.core.errors import FileError, WheelError
from sparkwright.forks.archive import safe_path, zip_file

if TYPE_CHECKING:
    from packaging.requirements import Requirement

#: The earliest time that a zip can hold; times carry no meaning in a wheel
#: (reproducible-builds.org).
EPOCH = (1980, 1, 1, 0, 0, 0)

#: Fixed part of a local file header (APPNOTE.TXT 4.3.7); name and extra field follow it.
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")

MOST_MEMBERS = 100_000
#: A member; the largest library of the official vLLM wheel has 308 MB.
MOST_BYTES = 4 * 1024**3
#: All members together, as the disk of a build machine would have to hold them.
MOST_BYTES_TOTAL = 24 * 1024**3
#: Above these sizes a member, or a wheel, that is `MOST_RATIO` times its compressed size is
#: refused.
RATIO_FROM, RATIO_TOTAL_FROM, MOST_RATIO = 64 * 1024**2, 1024**3, 200
#: RECORD and METADATA are read into memory.
MOST_BYTES_TEXT = 64 * 1024**2
#: What every installer can unpack; the others may also require gigabytes of memory.
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)

#: What we add to a ``.dist-info``: where every part came from, and the bill of materials (PEP 770).
BUILD_RECORD = "sparkwright.json"
SBOM = "sboms/sparkwright.cdx.json"


class WheelName(msgspec.Struct, frozen=True):
    """
    The parts of a wheel's file name.

    Attributes:
        tag: ``python-abi-platform``, compressed sets included.
    """

    distribution: str
    version: str
    tag: str

    @property
    def filename(self) -> str:
        return f"{self.distribution}-{self.version}-{self.tag}.whl"

    @property
    def info(self) -> str:
        """Name of its ``.dist-info`` folder."""
        return f"{self.distribution}-{self.version}.dist-info"

    @classmethod
    def of(cls, filename: str, version: str = "") -> WheelName:
        """
        Return the parts of *filename*, with another *version* where one is given; raise
        `wheel-invalid` where it is no wheel's name.
        """
        from packaging.utils import InvalidWheelFilename, parse_wheel_filename

        try:
            parse_wheel_filename(filename)
        except InvalidWheelFilename as error:
            raise WheelError(
                "wheel-invalid", f"{filename} is not the name of a wheel.", details=[str(error)]
            ) from error
        parts = filename.removesuffix(".whl").split("-")
        return cls(parts[0], version or parts[1], "-".join(parts[-3:]))


def members(wheel: zipfile.ZipFile, origin: str) -> dict[str, zipfile.ZipInfo]:
    """
    Return the files of *wheel* by name, from what its directory states; nothing is unpacked.

    Raises:
        wheel-invalid: A member appears twice, shares bytes with another, is compressed in an
            unusual
            way, or is larger than in any wheel.
        archive-unsafe: A name leaves its folder, or it is a link.
    """
    files: dict[str, zipfile.ZipInfo] = {}
    total = 0
    infos = wheel.infolist()
    if len(infos) > MOST_MEMBERS:
        raise WheelError("wheel-invalid", f"{origin} has more than {MOST_MEMBERS} members.")
    for info in infos:
        name, details = info.filename, [f"member: {info.filename!r}", f"bytes: {info.file_size}"]
        safe_path(name.removesuffix("/"), origin)
        if info.external_attr >> 28 == 0o12:
            what = f"{origin} has a symbolic link, which no wheel may have."
            raise FileError("archive-unsafe", what, details=details)
        if name in files:
            raise WheelError(
                "wheel-invalid", f"{origin} holds the same member twice.", details=details
            )
        if info.compress_type not in _COMPRESSIONS:
            what = f"{origin} is packed in a way that not every installer knows."
            raise WheelError("wheel-invalid", what, details=details)
        total += info.file_size
        inflated = _inflated(info.file_size, info.compress_size, RATIO_FROM)
        if info.file_size > MOST_BYTES or total > MOST_BYTES_TOTAL or inflated:
            raise WheelError(
                "wheel-invalid", f"{origin} is larger than any wheel.", details=details
            )
        if not info.is_dir():
            files[name] = info
    # Members that share bytes let a small file hold a large content many times.
    ordered = sorted(infos, key=lambda info: info.header_offset)
    ends = [*(info.header_offset for info in ordered[1:]), wheel.start_dir]
    for info, end in zip(ordered, ends, strict=True):
        if info.header_offset + _LOCAL_HEADER.size + info.compress_size > end:
            details = [f"member: {info.filename!r}"]
            raise WheelError(
                "wheel-invalid", f"{origin} holds members that overlap.", details=details
            )
    if _inflated(total, wheel.start_dir, RATIO_TOTAL_FROM):
        details = [f"bytes of all members: {total}"]
        raise WheelError("wheel-invalid", f"{origin} is larger than any wheel.", details=details)
    return files


def _inflated(size: int, packed: int, limit: int) -> bool:
    return size > limit and size > MOST_RATIO * max(packed, 1)


def member_text(
    wheel: zipfile.ZipFile, listed: Mapping[str, zipfile.ZipInfo], name: str, origin: str
) -> bytes:
    """Return the text of the member *name*; raise `wheel-invalid` if it is missing or too long."""
    info = listed.get(name)
    if info is None or info.file_size > MOST_BYTES_TEXT:
        what = f"{origin} has no usable {name.rpartition('/')[2]}."
        raise WheelError("wheel-invalid", what, details=[f"expected: {name}"])
    with wheel.open(info) as stream:
        return stream.read(MOST_BYTES_TEXT)


class WheelWriter:
    """Writes members to the zip at *path* and keeps account for RECORD."""

    def __init__(self, path: Path, name: WheelName) -> None:
        self._zip = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=6)
        self._name = name
        self._record: list[tuple[str, str, str]] = []

    def add(self, name: str, data: bytes, *, executable: bool = False) -> None:
        """Write *data* as the member *name*."""
        info = zipfile.ZipInfo(name, EPOCH)
        info.compress_type = zipfile.ZIP_DEFLATED
        info.external_attr = _mode(executable=executable)
        self._zip.writestr(info, data)
        self._account(name, hashlib.sha256(data).digest(), len(data))

    def copy(
        self, source: IO[bytes], info: zipfile.ZipInfo, name: str, record: tuple[str, str]
    ) -> None:
        """
        Copy a member from another zip as it lies there, under *name*.

        Args:
            source: The other zip's bytes.
            record: What that wheel's RECORD says of it: digest and size.
        """
        source.seek(info.header_offset)
        header = _LOCAL_HEADER.unpack(source.read(_LOCAL_HEADER.size))
        source.seek(header[9] + header[10], 1)
        fresh = zipfile.ZipInfo(name, EPOCH)
        fresh.compress_type, fresh.CRC = info.compress_type, info.CRC
        fresh.compress_size, fresh.file_size = info.compress_size, info.file_size
        # The rest of the mode is the umask of whoever packed it, and nothing that an installer
        # keeps.
        fresh.external_attr = _mode(executable=bool(info.external_attr >> 16 & 0o111))
        target = self._zip.fp
        assert target is not None
        target.seek(self._zip.start_dir)
        fresh.header_offset = target.tell()
        target.write(fresh.FileHeader(zip64=info.file_size >= zipfile.ZIP64_LIMIT))
        left = info.compress_size
        while left:
            chunk = source.read(min(left, 1 << 22))
            if not chunk:
                raise WheelError("wheel-invalid", f"{info.filename} is cut off inside its wheel.")
            target.write(chunk)
            left -= len(chunk)
        # zipfile has no call for a member that is compressed already; these three are what its own
        # `_open_to_write` keeps.
        self._zip.filelist.append(fresh)
        self._zip.NameToInfo[name] = fresh
        self._zip.start_dir = target.tell()
        self._zip._didModify = True  # type: ignore[attr-defined]  # see above
        self._record.append((name, *record))

    def _account(self, name: str, digest: bytes, count: int) -> None:
        self._record.append(
            (name, "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode(), str(count))
        )

    def close(self) -> None:
        """Write RECORD, last, and the zip's directory."""
        record = f"{self._name.info}/RECORD"
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*sorted(self._record), (record, "", "")])
        info = zipfile.ZipInfo(record, EPOCH)
        info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, _mode(executable=False)
        self._zip.writestr(info, text.getvalue())
        self._zip.close()


def _mode(*, executable: bool) -> int:
    """Return the attributes of a regular file, as zip archives hold them."""
    return (0o100755 if executable else 0o100644) << 16


def write(
    path: Path, name: WheelName, files: Mapping[str, bytes], metadata: str, *, pure: bool
) -> None:
    """Write a wheel of *files* with the given METADATA text."""
    wheel = WheelWriter(path, name)
    for member in sorted(files):
        wheel.add(member, files[member])
    wheel.add(f"{name.info}/METADATA", metadata.encode())
    wheel.add(f"{name.info}/WHEEL", wheel_text(name.tag, pure).encode())
    wheel.close()


def wheel_text(tag: str, pure: bool) -> str:
    """Return the text of a WHEEL file (PEP 427); a compressed *tag* becomes one line per member."""
    from packaging.tags import parse_tag

    tags = "".join(f"Tag: {one}\n" for one in sorted(str(one) for one in parse_tag(tag)))
    return (
        f"Wheel-Version: 1.0\nGenerator: sparkwright\nRoot-Is-Purelib: {str(pure).lower()}\n{tags}"
    )


def records(wheel: zipfile.ZipFile, info: str, origin: str) -> dict[str, tuple[str, str]]:
    """
    Return what RECORD says: member → (digest, size).

    Raises:
        wheel-invalid: There is no RECORD, or its lines have not three fields.
    """
    try:
        rows = list(csv.reader(io.StringIO(wheel.read(f"{info}/RECORD").decode())))
        return {name: (digest, count) for name, digest, count in rows}
    except (KeyError, ValueError, csv.Error) as error:
        raise WheelError(
            "wheel-invalid", f"{origin} has no readable RECORD.", details=[str(error)]
        ) from error


def remake(
    base: Path,
    folder: Path,
    *,
    version: str,
    platform: str = "",
    replace: Mapping[str, bytes] | None = None,
    remove: frozenset[str] = frozenset(),
    version_files: tuple[str, ...] = (),
    requires: Mapping[str, str] | None = None,
    build_record: bytes = b"",
    sbom: bytes = b"",
) -> Path:
    """
    Write to *folder* the wheel *base* with another version, and with some members replaced, added
    or removed.

    Args:
        version: The new version; METADATA, the names of its folders and *version_files* follow it.
        platform: The new platform tag, where it changes.
        requires: Requirements that change; see `requiring`.
        build_record: JSON that says where every library came from; becomes ``sparkwright.json`` in
            the ``.dist-info``. sbom: The bill of materials; becomes `SBOM` there. One that
            upstream's wheel has under another name stays.

    Returns:
        The new wheel's path.

    Raises:
        wheel-invalid: *base* is damaged, or a version file does not state the version.
        requirement-mismatch: See `requiring`.
    """
    old = WheelName.of(base.name)
    tag = old.tag.rpartition("-")[0] + "-" + platform if platform else old.tag
    new = WheelName(old.distribution, version, tag)
    changed = dict(replace or {})
    papers = {member: data for member, data in ((BUILD_RECORD, build_record), (SBOM, sbom)) if data}
    path = folder / new.filename
    with zip_file(base) as source, base.open("rb") as raw:
        found = members(source, base.name)
        record = records(source, old.info, base.name)
        for name in version_files:
            text = changed.get(name) or source.read(name)
            changed[name] = restate(text.decode(), old.version, version, name).encode()
        writer = WheelWriter(path, new)
        for name in sorted(
            {*found, *changed} - remove, key=lambda name: (name.startswith(old.info), name)
        ):
            target = _renamed(name, old, new)
            if name == f"{old.info}/RECORD" or name.removeprefix(f"{old.info}/") in papers:
                continue
            if name == f"{old.info}/METADATA":
                writer.add(
                    target,
                    requiring(_metadata(source.read(name), old.version, version), requires or {}),
                )
            elif name == f"{old.info}/WHEEL":
                pure = b"Root-Is-Purelib: true" in source.read(name)
                writer.add(target, wheel_text(new.tag, pure).encode())
            elif name in changed:
                writer.add(target, changed[name], executable=name.endswith(".so"))
            elif name in record and record[name][0]:
                writer.copy(raw, found[name], target, record[name])
            else:
                raise WheelError(
                    "wheel-invalid", f"{base.name} holds {name}, which its RECORD does not know."
                )
        for member, data in papers.items():
            writer.add(f"{new.info}/{member}", data)
        writer.close()
    return path


def _renamed(name: str, old: WheelName, new: WheelName) -> str:
    for suffix in (".dist-info", ".data"):
        folder = f"{old.distribution}-{old.version}{suffix}/"
        if name.startswith(folder):
            return f"{new.distribution}-{new.version}{suffix}/" + name.removeprefix(folder)
    return name


def _metadata(text: bytes, old: str, new: str) -> bytes:
    head, gap, body = text.partition(b"\n\n")
    if BytesParser().parsebytes(head).get_all("Version") != [old]:
        raise WheelError("wheel-invalid", f"METADATA does not state version {old} once.")
    lines = [
        f"Version: {new}".encode() if line.startswith(b"Version:") else line
        for line in head.split(b"\n")
    ]
    return b"\n".join(lines) + gap + body


def requiring(metadata: bytes, requires: Mapping[str, str]) -> bytes:
    """
    Return METADATA that asks for other versions of some projects, or no longer for them.

    What a line asks for is replaced; when it does so (its marker, which may name an extra) stays.

    Args:
        requires: Normalised name → the requirement for the lines of that project, or nothing to
            remove them. A line keeps its extras
            where the requirement names none; a marker of the requirement is a further condition.

    Raises:
        requirement-mismatch: A project has no line, or none that would change.
        wheel-invalid: A requirement of the wheel cannot be read.
    """
    if not requires:
        return metadata
    head, gap, body = metadata.partition(b"\n\n")
    # A line that begins with a blank continues the one before it.
    fields = [_Field.of(line, requires) for line in re.split(rb"\n(?![ \t])", head)]
    if idle := sorted(
        requires.keys() - {field.project for field in fields if field.after != field.before}
    ):
        asked = {
            project: [field.before.decode() for field in fields if field.project == project]
            for project in idle
        }
        details = [
            f"{project}: {'; '.join(lines) or 'not required at all'}"
            for project, lines in asked.items()
        ]
        raise BuildError(
            "requirement-mismatch",
            f"What is said of {', '.join(idle)} changes no requirement of the official wheel.",
            details=details,
        )
    return b"\n".join(field.after for field in fields if field.after is not None) + gap + body


class _Field(NamedTuple):
    """
    A header field, and what takes its place, if anything; *project* is what it requires, if it
    does.
    """

    project: str
    before: bytes
    after: bytes | None

    @classmethod
    def of(cls, line: bytes, requires: Mapping[str, str]) -> _Field:
        from packaging.requirements import InvalidRequirement, Requirement
        from packaging.utils import canonicalize_name

        name, _, text = line.partition(b":")
        if name.lower() != b"requires-dist":
            return cls("", line, line)
        try:
            found = Requirement(" ".join(text.decode().split()))
        except (InvalidRequirement, UnicodeDecodeError) as error:
            raise WheelError(
                "wheel-invalid",
                "METADATA holds a requirement that cannot be read.",
                details=[repr(text), str(error)],
            ) from error
        project = canonicalize_name(found.name)
        if project not in requires:
            return cls(project, line, line)
        if not requires[project]:
            return cls(project, line, None)
        wanted = _joined(found, Requirement(requires[project]))
        return cls(
            project, line, line if wanted == found else b"%s: %s" % (name, str(wanted).encode())
        )


def _joined(found: Requirement, wanted: Requirement) -> Requirement:
    """
    Return *wanted* on the conditions of *found*, and with its extras where it has none itself.
    """
    from packaging.markers import Marker

    wanted.extras = wanted.extras or found.extras
    if found.marker:
        wanted.marker = (
            Marker(f"({found.marker}) and ({wanted.marker})") if wanted.marker else found.marker
        )
    return wanted
