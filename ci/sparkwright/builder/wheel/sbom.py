"""
The software bill of materials of a wheel: CycloneDX 1.6 as JSON, in the wheel itself at
``.dist-info/sboms/`` (PEP 770).

Upstream's release, and the official wheel under a graft, are the ancestors of the wheel. A patch of
CycloneDX has no field for a hash; so every patch is also a component of type *file* with its
sha256, and ``pedigree.patches`` points at it by ``diff.url``. The document holds no path, date or
random number: its serial number follows from its content, and equal inputs give equal bytes.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import msgspec
from packaging.utils import canonicalize_name

from sparkwright import __version__
from sparkwright.builder.pylock import LockedWheel
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.builder.workspace import SourceTree
from sparkwright.cherry_picks.apply import AppliedPatch
from sparkwright.core.files import canonical, sha256_bytes
from sparkwright.forks.stack import VendoredLock


def document(
    name: WheelName,
    *,
    properties: Mapping[str, str],
    source: SourceTree,
    needs: Sequence[SourceTree] = (),
    bases: Sequence[LockedWheel] = (),
    vendored: Mapping[str, VendoredLock] = MappingProxyType({}),
    tools: Sequence[LockedWheel] = (),
    compiled: Mapping[str, str] = MappingProxyType({}),
    inherited: Mapping[str, str] = MappingProxyType({}),
    trimmed: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """
    Return the CycloneDX document of the wheel *name*.

    Args:
        properties: Properties of the wheel: name → value.
        source: The built source.
        needs: Forks whose sources were compiled with it.
        bases: Wheels that files or libraries were taken from.
        vendored: Sources that the build took beside the fork's own, by name in the lock.
        tools: Compilers from the package index.
        compiled: Libraries compiled here: member → sha256 in hex.
        inherited: Libraries of a base wheel, likewise; empty for a digest of another kind.
        trimmed: Libraries of a base wheel without the code for other GPUs, likewise.
    """
    project = canonicalize_name(name.distribution)
    ancestors = [_upstream(source, name.version.partition("+")[0])]
    for base in bases:
        ancestors.append(_file("base", base))
    patches = [
        {
            "type": "cherry-pick" if step.pick else "unofficial",
            "diff": {"url": f"#patch/{source.fork}/{step.sha256}"},
        }
        for step in source.steps
    ]
    main = _component(
        "wheel",
        project,
        name.version,
        properties=properties,
        purl=_index_url(project, name.version),
        components=[
            *_libraries("compiled", compiled),
            *_libraries("base", inherited),
            *_libraries("base, trimmed", trimmed),
        ],
        pedigree={"ancestors": ancestors, "patches": patches},
    )
    parts = list[dict[str, Any]]()
    for tree in (source, *needs):
        for order, step in enumerate(tree.steps, 1):
            parts.append(_patch(tree, order, step))
    for need in needs:
        parts.append(_upstream(need, ""))
    for part, entry in sorted(vendored.items()):
        parts.append(_vendored(part, entry))
    for tool in tools:
        parts.append(_file("tool", tool, scope="excluded"))
    content: dict[str, Any] = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": main,
            "tools": {
                "components": [
                    {"type": "application", "name": "sparkwright", "version": __version__}
                ]
            },
        },
        "components": parts,
        "dependencies": [{"ref": "wheel", "dependsOn": [part["bom-ref"] for part in parts]}],
    }
    sha256 = sha256_bytes(canonical(content))
    content["serialNumber"] = uuid.uuid5(uuid.NAMESPACE_OID, sha256).urn
    return msgspec.json.format(canonical(content)) + b"\n"


def _libraries(origin: str, hashes: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the libraries of a wheel that have one origin: member → sha256."""
    for member, sha256 in sorted(hashes.items()):
        properties = {"library:origin": origin}
        yield _component(
            f"library/{member}", member, kind="file", sha256=sha256, properties=properties
        )


def _vendored(name: str, entry: VendoredLock) -> dict[str, Any]:
    commit, tree = (entry.commit, entry.tree) if entry.resolved else ("", "")
    return _component(
        f"vendored/{name}",
        name,
        commit or entry.ref,
        properties={
            "ref": entry.ref,
            "resolved": "yes" if entry.resolved else "no",
            "commit": commit,
            "tree": tree,
            "without": ", ".join(entry.without),
        },
        url=entry.url,
    )


def _upstream(tree: SourceTree, release: str) -> dict[str, Any]:
    """
    Return the source of a fork as it was fetched.

    Its *pin* is a commit, or the sha256 of a file of the package index; for a folder in a wheel it
    is the hash of more than the source.
    """
    source = tree.source
    commit = source.pin if source.kind == "git" else ""
    return _component(
        f"source/{source.fork}",
        source.fork,
        release or commit,
        properties={
            "kind": source.kind,
            "origin": source.origin,
            "pin": source.pin,
            "resolved": "yes" if source.resolved else "no",
            "tree": source.tree,
            "tree:patched": tree.patched,
            "tree:built": tree.tree,
        },
        url=source.origin.partition(" @ ")[0] if commit else "",
        sha256=source.pin if source.kind == "sdist" else "",
    )


def _patch(tree: SourceTree, order: int, step: AppliedPatch) -> dict[str, Any]:
    return _component(
        f"patch/{tree.fork}/{step.sha256}",
        step.name,
        kind="file",
        sha256=step.sha256,
        properties={
            "patch:fork": tree.fork,
            "patch:order": str(order),
            "patch:reason": step.reason,
            "patch:tree": step.tree,
            "patch:pick": str(step.pick or ""),
        },
        description=step.subject,
    )


def _file(role: str, wheel: LockedWheel, **fields: Any) -> dict[str, Any]:
    project, filename, sha256 = wheel
    release = filename.split("-")[1]
    return _component(
        f"{role}/{filename}",
        project,
        release,
        sha256=sha256,
        properties={"file": filename},
        purl=_index_url(project, release),
        **fields,
    )


def _index_url(project: str, version: str) -> str:
    return f"pkg:pypi/{canonicalize_name(project)}@{quote(version)}"


def _component(
    ref: str,
    name: str,
    version: str = "",
    *,
    kind: str = "library",
    sha256: str = "",
    properties: Mapping[str, str],
    url: str = "",
    **fields: Any,
) -> dict[str, Any]:
    """Return a component without its empty fields; *properties* get the prefix ``sparkwright:``."""
    component = {
        "bom-ref": ref,
        "type": kind,
        "name": name,
        "version": version,
        "hashes": [{"alg": "SHA-256", "content": sha256}] if sha256 else [],
        "properties": [
            {"name": f"sparkwright:{key}", "value": value}
            for key, value in properties.items()
            if value
        ],
        "externalReferences": [{"type": "vcs", "url": url}]
        if url.startswith(("https://", "http://"))
        else [],
        **fields,
    }
    return {key: value for key, value in component.items() if value}
