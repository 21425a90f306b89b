"""
What a wheel is, from its bytes: read as hostile, every member hashed against RECORD, and every name for it compared with the others.

Nothing is unpacked to a name of the wheel's own choice. What it says of its origin (the build record) is held against the libraries in it.
"""

from __future__ import annotations

import csv
import io
import tempfile
from collections.abc import Mapping, Sequence
from email.message import Message
from email.parser import BytesParser
from functools import partial
from pathlib import Path

import msgspec

from sparkwright.audit import wheel as audit_wheel
from sparkwright.audit.policy import AuditPolicy
from sparkwright.audit.report import AuditedWheel
from sparkwright.builder.pipeline import BuildRecord
from sparkwright.builder.wheel import archive as wheelfile
from sparkwright.builder.wheel.archive import BUILD_RECORD, SBOM, WheelName
from sparkwright.core.errors import FileError, WheelError
from sparkwright.core.files import sha256_bytes
from sparkwright.core.zips import zip_file, zip_members
from sparkwright.release import bill, content
from sparkwright.release.decide import libraries, origin
from sparkwright.release.manifest.records import Fork, Machine, Wheel, line

#: Platform tag's end → the machine.
MACHINES: Mapping[str, Machine] = {"any": "any", "x86_64": "x86_64", "aarch64": "aarch64"}


class Inspected(msgspec.Struct, frozen=True):
    """
    A wheel as it was found.

    Attributes:
        path: Where it lies.
        wheel: Without the address and the time that publishing gives it.
        fork: Where it comes from; of the precompiled modules, where the wheel of their sources does.
        record: Its build record; None for the installer, and for the precompiled modules, whose record is another.
        sbom: Empty where it has none.
        metadata: Its METADATA, which the index serves beside it.
        stack: The stack that it was built from; empty for the installer.
        isolated: Whether what was compiled was kept from the network; None where nothing was, or nothing says so.
    """

    path: Path
    wheel: Wheel
    fork: Fork
    record: BuildRecord | None
    sbom: bytes
    metadata: bytes
    stack: str = ""
    isolated: bool | None = None


def inspect(path: Path, audit: AuditPolicy | None = None, *, scratch: Path | None = None) -> Inspected:
    """
    Return what the wheel at *path* is.

    The wheel of precompiled modules must lie beside the wheel of their sources, which says where both come from.

    Args:
        audit: The stack's; with it, the device code is read and digested as the audit does. Without, a wheel has none here, and the
            verdicts of one that has some will be found to be about another.
        scratch: An existing folder for libraries while they are read; the system's temporary folder by default.

    Raises:
        wheel-invalid: It is no wheel, or damaged.
        wheel-unsafe: A name leaves its folder or appears twice, a member is a link, or larger than it admits to.
        wheel-mismatch: Its file name, METADATA, WHEEL, RECORD, SBOM, build record and bytes do not say the same.
        disk-full: There is no room for the largest library.
    """
    name = WheelName.of(path.name)
    _check_archive(path)
    about = audit_wheel.read_subject(path)
    found = libraries.Found(about, audit)
    texts = _texts(path, name)
    _check_metadata(name, texts)
    mismatches = audit_wheel.walk(path, about, scratch or Path(tempfile.gettempdir()), found.visit)
    if mismatches:
        raise WheelError(
            "wheel-mismatch",
            f"RECORD of {path.name} is not what it holds.",
            details=[f"{one.library}: {one.message}" for one in mismatches[:20]],
        )
    came = origin.of(path, name, texts.get(BUILD_RECORD))
    rows = {row[0]: (content.hexed(row[1]), int(row[2] or 0)) for row in csv.reader(io.StringIO(texts["RECORD"].decode())) if len(row) == 3}
    metadata = _headers(texts["METADATA"])
    wheel = Wheel(
        path.name, about.sha256, about.size, came.fork.name, about.name, str(metadata["Version"]), _machine(path.name, about), "",
        sha256_bytes(texts["METADATA"]), "", line(str(metadata["Requires-Python"] or "")), found.digest, content.of_wheel(path),
        libraries.listed(path.name, found, came, rows),
    )  # fmt: skip
    sbom = texts.get(SBOM, b"")
    if sbom:
        bill.check(sbom, wheel.filename, wheel.project, wheel.version, partial(WheelError, "wheel-mismatch"))
    return Inspected(path, wheel, came.fork, came.record, sbom, texts["METADATA"], came.stack, came.isolated)


def _check_archive(path: Path) -> None:
    """Raise `wheel-unsafe` for what a sound archive would not have, `wheel-invalid` for one that cannot be read."""
    try:
        with zip_file(path) as archive:
            try:
                zip_members(archive, path.name)
            except (FileError, WheelError) as error:
                if isinstance(error, FileError) and error.reference != "archive-unsafe":
                    raise
                if isinstance(error, WheelError) and error.reference != "wheel-invalid":
                    raise
                raise WheelError("wheel-unsafe", error.what, details=error.details) from error
    except OSError as error:
        raise WheelError("wheel-invalid", f"{path.name} cannot be read.", details=[str(error)]) from error


def _texts(path: Path, name: WheelName) -> dict[str, bytes]:
    """Return the members of the ``.dist-info`` folder that say what the wheel is, by their names in it."""
    with zip_file(path) as archive:
        found = zip_members(archive, path.name)
        folders = sorted({top for member in found if (top := member.partition("/")[0]).endswith((".dist-info", ".data"))})
        if strange := [one for one in folders if one not in (name.info, name.info.replace(".dist-info", ".data"))]:
            raise WheelError("wheel-mismatch", f"{path.name} has folders of another wheel.", details=strange)
        wanted = ("METADATA", "WHEEL", "RECORD", *(one for one in (BUILD_RECORD, SBOM) if f"{name.info}/{one}" in found))
        return {one: wheelfile.member_text(archive, found, f"{name.info}/{one}", path.name) for one in wanted}


def _headers(text: bytes) -> Message:
    return BytesParser().parsebytes(text, headersonly=True)


def _check_metadata(name: WheelName, texts: Mapping[str, bytes]) -> None:
    from packaging.tags import parse_tag
    from packaging.utils import canonicalize_name

    metadata, wheel = _headers(texts["METADATA"]), _headers(texts["WHEEL"])
    said = (metadata.get_all("Name", []), metadata.get_all("Version", []), sorted(wheel.get_all("Tag", [])))
    faults = []
    if [canonicalize_name(str(one)) for one in said[0]] != [canonicalize_name(name.distribution)]:
        faults.append(f"METADATA: Name {', '.join(map(str, said[0])) or 'is not there'}")
    if list(map(str, said[1])) != [name.version]:
        faults.append(f"METADATA: Version {', '.join(map(str, said[1])) or 'is not there'}")
    if sorted({str(one) for text in said[2] for one in parse_tag(str(text))}) != sorted(map(str, parse_tag(name.tag))):
        faults.append(f"WHEEL: Tag {', '.join(map(str, said[2])) or 'is not there'}")
    if faults:
        raise WheelError("wheel-mismatch", f"{name.filename} says inside that it is another wheel.", details=faults)


def _machine(filename: str, about: AuditedWheel) -> Machine:
    found = {next((MACHINES[end] for end in MACHINES if tag.endswith(end)), None) for tag in about.platforms}
    machine = found.pop()
    if found or machine is None:
        raise WheelError("wheel-mismatch", f"{filename} is for several machines, or for none that is served.", details=about.platforms)
    return machine


def inspect_all(paths: Sequence[Path], audit: AuditPolicy | None = None, *, scratch: Path | None = None) -> tuple[Inspected, ...]:
    """
    Return what the wheels at *paths* are, as `inspect` does.

    Raises:
        wheel-mismatch: Besides, when two are of one project for one machine.
    """
    found = tuple(inspect(path, audit, scratch=scratch) for path in paths)
    keys = [(one.wheel.project, one.wheel.machine) for one in found]
    if twice := sorted({f"{project} for {machine}" for project, machine in keys if keys.count((project, machine)) > 1}):
        raise WheelError("wheel-mismatch", "A release holds one wheel of a project for each machine.", details=twice)
    return found
