"""Which wheel a bill of materials (CycloneDX) says that it is about; the rest of it is for others to read."""

from __future__ import annotations

import msgspec

from sparkwright.core.errors import Failure


class _Component(msgspec.Struct, frozen=True):
    name: str
    version: str = ""


class _About(msgspec.Struct, frozen=True):
    component: _Component


class _Bill(msgspec.Struct, frozen=True):
    format: str = msgspec.field(name="bomFormat")
    metadata: _About


def check(data: bytes, filename: str, project: str, version: str, failure: Failure) -> None:
    """Raise *failure* unless *data* is a CycloneDX document about that version of that project (normalised), the wheel *filename*."""
    from packaging.utils import canonicalize_name

    try:
        found = msgspec.json.decode(data, type=_Bill)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise failure(f"The SBOM of {filename} is no CycloneDX document.", details=[str(error)]) from error
    said = found.metadata.component
    if (found.format, canonicalize_name(said.name), said.version) != ("CycloneDX", project, version):
        raise failure(f"The SBOM of {filename} is about another wheel.", details=[f"{said.name!r:.200} {said.version!r:.200}"])
