"""The wheel at hand, held against what is said of it: its own bytes, bill of materials and build record. Nothing of it is unpacked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from sparkwright.builder.wheel import archive as wheelfile
from sparkwright.builder.wheel.archive import BUILD_RECORD, SBOM, WheelName
from sparkwright.core.errors import WheelError
from sparkwright.core.files import sha256_file
from sparkwright.core.zips import zip_file, zip_members
from sparkwright.release.errors import TrustError
from sparkwright.release.evidence import agreement
from sparkwright.release.evidence.check import Checked
from sparkwright.release.evidence.predicates import Provenance, read
from sparkwright.release.manifest.records import Fork, Machine, Patch, Wheel, line

_MACHINES: tuple[Machine, ...] = ("aarch64", "x86_64")


class _Source(msgspec.Struct, frozen=True):
    kind: str
    origin: str
    pin: str
    tree: str
    resolved: bool


class _Step(msgspec.Struct, frozen=True):
    name: str
    sha256: str
    subject: str
    reason: str
    pick: int = 0


class _Tree(msgspec.Struct, frozen=True):
    fork: str
    source: _Source
    tree: str
    steps: tuple[_Step, ...]


class _Record(msgspec.Struct, frozen=True):
    """Of `build.wheel.BuildRecord`, which only builders can import, what says where a wheel comes from."""

    source: _Tree
    base: str = ""


def wheel_at(path: Path) -> Wheel:
    """
    Return what the file at *path* is by its name and bytes; what only an index knows of it is left empty.

    Raises:
        wheel-invalid: There is no such file, or its name is no wheel's.
    """
    from packaging.utils import canonicalize_name

    name = WheelName.of(path.name)
    try:
        size, sha256 = path.stat().st_size, sha256_file(path)
    except OSError as error:
        raise WheelError("wheel-invalid", f"{path} cannot be read.", details=[str(error)]) from error
    machine: Machine = next((one for one in _MACHINES if name.tag.endswith(one)), "any")
    return Wheel(path.name, sha256, size, "", canonicalize_name(name.distribution), name.version, machine, "", "", "")


def check(path: Path, found: Checked) -> None:
    """
    Require that the wheel at *path* holds the bill of materials and the origin that *found* tells of.

    Raises:
        wheel-mismatch: It does not. wheel-invalid, archive-unsafe: It cannot be read safely.
    """
    info = WheelName.of(path.name).info
    with zip_file(path) as archive:
        members = zip_members(archive, path.name)
        there = [one for one in (SBOM, BUILD_RECORD) if f"{info}/{one}" in members]
        texts = {one: wheelfile.member_text(archive, members, f"{info}/{one}", path.name) for one in there}
    if texts.get(SBOM) != found.raw.get("sbom"):
        raise WheelError("wheel-mismatch", f"The SBOM in {path.name} is not the one that is published of it.")
    record = _record(texts.get(BUILD_RECORD, b""))
    if record is None:
        return
    made = read(found.statements["provenance"].predicate, Provenance, f"The provenance of {path.name}")
    wanted = agreement.dependencies(_fork(path, record))
    said = made.build_definition.resolved_dependencies[: len(wanted)]
    if said != wanted:
        wrong = [f"{one.name}: {one.digest}" for one in wanted if one not in said]
        raise WheelError(
            "wheel-mismatch", f"The build record in {path.name} tells of another origin than its provenance.", details=wrong[:20]
        )


def _record(data: bytes) -> _Record | None:
    """Return the build record; None for a wheel that says nothing of a source (precompiled modules, the installer)."""
    try:
        plain: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any]) if data else {}
        return msgspec.convert(plain, _Record) if "source" in plain else None
    except (msgspec.DecodeError, RecursionError) as error:
        raise TrustError("evidence-invalid", "The build record in the wheel cannot be read.", details=[str(error)]) from error


def _fork(path: Path, record: _Record) -> Fork:
    from packaging.version import Version

    source, steps = record.source.source, record.source.steps
    return Fork(
        record.source.fork, Version(WheelName.of(path.name).version).public, source.kind, line(source.origin), source.pin, source.tree,
        source.resolved, "", record.source.tree, record.base,
        tuple(Patch(line(one.name), one.sha256, line(one.subject), "", one.pick) for one in steps),
    )  # fmt: skip
