"""
Components of a CycloneDX document and their package URLs, in the few fields that a bill of
materials of ours has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cyclonedx.model.component import Component, ComponentScope, ComponentType
    from packageurl import PackageURL

_GITHUB = re.compile(r"https://github\.com/([^/]+)/([^/]+?)(?:\.git)?/?")


def component(
    name: str,
    version: str = "",
    *,
    ref: str = "",
    kind: ComponentType | None = None,
    sha256: str = "",
    facts: Mapping[str, str] | None = None,
    purl: PackageURL | None = None,
    url: str = "",
    description: str = "",
    scope: ComponentScope | None = None,
) -> Component:
    """Return a component; *facts* become properties of ours."""
    from cyclonedx.model import (
        ExternalReference,
        ExternalReferenceType,
        HashAlgorithm,
        HashType,
        Property,
        XsUri,
    )
    from cyclonedx.model.component import Component, ComponentType

    hashes = [HashType(alg=HashAlgorithm.SHA_256, content=sha256)] if sha256 else []
    links = (
        [ExternalReference(type=ExternalReferenceType.VCS, url=XsUri(url))]
        if url.startswith(("https://", "http://"))
        else []
    )
    return Component(
        name=name,
        version=version or None,
        type=kind or ComponentType.LIBRARY,
        bom_ref=ref or None,
        hashes=hashes,
        scope=scope,
        properties=[
            Property(name=f"sparkwright:{key}", value=value) for key, value in (facts or {}).items()
        ],
        external_references=links,
        purl=purl,
        description=description or None,
    )


def index(name: str, version: str) -> PackageURL:
    """Return the package URL of a project of the package index."""
    from packageurl import PackageURL

    return PackageURL("pypi", name=name, version=version or None)


def github(url: str, commit: str) -> PackageURL | None:
    """Return the package URL of the repository *url* at *commit*; None where it lies elsewhere."""
    from packageurl import PackageURL

    found = _GITHUB.fullmatch(url)
    return PackageURL("github", found[1], found[2], commit) if found else None


def release(filename: str) -> PackageURL | None:
    """Return the package URL of the source distribution *filename*; None for any other file."""
    from packaging.utils import InvalidSdistFilename, parse_sdist_filename

    try:
        name, version = parse_sdist_filename(filename)
    except InvalidSdistFilename:
        return None
    return index(name, str(version))
