"""
The bill of materials of a wheel of ours: CycloneDX 1.6 as JSON, in the wheel itself at
``.dist-info/sboms/`` (PEP 770).

Upstream's release, and the official wheel under a graft, are the ancestors of the wheel. A patch of
CycloneDX has no field for a hash; so every patch is also a component of type *file* with its
sha256, and ``pedigree.patches`` points at it by ``diff.url``. It holds no path, date or chance: its
serial number follows from its content, and equal inputs give equal bytes.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sparkwright import __version__
from sparkwright.builder.source_tree import SourceTree
from sparkwright.builder.wheel.archive import SBOM, WheelName
from sparkwright.builder.wheel.component import component, github, index, release
from sparkwright.cherry_picks.apply import AppliedPatch
from sparkwright.core import digest
from sparkwright.forks.lock import UNRESOLVED, VendoredLock

if TYPE_CHECKING:
    from cyclonedx.model.component import Component, ComponentScope, Pedigree

__all__ = ["SBOM", "Archive", "Bill", "Papers", "document"]


class Archive(msgspec.Struct, frozen=True):
    """
    A file of the package index that went into the wheel, or that made it: project, file name and
    sha256.
    """

    project: str
    filename: str
    sha256: str


class Bill(msgspec.Struct, frozen=True):
    """
    What a wheel was made of.

    Attributes:
        source: What was built; None for a wheel that is made of another wheel's files, or of ours.
        needs: Forks whose sources were compiled with it.
        bases: Wheels that files or libraries were taken from.
        vendored: Sources that the build took beside the fork's own, by name in the lock.
        tools: Compilers from the package index.
        compiled, kept: Libraries made here, and those that came with a base: member → sha256 in
        hex. facts: Further properties: name → value.
    """

    source: SourceTree | None = None
    needs: tuple[SourceTree, ...] = ()
    bases: tuple[Archive, ...] = ()
    vendored: dict[str, VendoredLock] = {}
    tools: tuple[Archive, ...] = ()
    compiled: dict[str, str] = {}
    kept: dict[str, str] = {}
    facts: dict[str, str] = {}


class Papers(NamedTuple):
    """
    What travels in a wheel's ``.dist-info``: the bytes of its build record, and what its bill of
    materials is made of.
    """

    record: bytes
    bill: Bill

    def sbom(self, name: WheelName) -> bytes:
        """Return the bill of materials of the wheel *name*."""
        return document(self.bill, name)


def document(bill: Bill, name: WheelName) -> bytes:
    """Return the CycloneDX document of the wheel *name*, made of *bill*."""
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import ComponentType
    from cyclonedx.output.json import JsonV1Dot6
    from packaging.utils import canonicalize_name

    project = canonicalize_name(name.distribution)
    main = component(
        project, name.version, ref="wheel", facts=bill.facts, purl=index(project, name.version)
    )
    main.pedigree = _pedigree(bill, name)
    for origin, libraries in (("compiled", bill.compiled), ("base", bill.kept)):
        for member, sha256 in libraries.items():
            facts = {"library:origin": origin}
            main.components.add(
                component(
                    member,
                    ref=f"library/{member}",
                    kind=ComponentType.FILE,
                    sha256=sha256,
                    facts=facts,
                )
            )
    made = Bom()
    made.metadata.component = main
    made.metadata.tools.components.add(
        component("sparkwright", __version__, kind=ComponentType.APPLICATION)
    )
    parts = list(_parts(bill))
    made.components.update(parts)
    made.register_dependency(main, parts)
    return _settled(JsonV1Dot6(made).output_as_string())


def _settled(text: str) -> bytes:
    """Return the document *text* without day and chance: equal content, equal bytes."""
    made: dict[str, Any] = msgspec.json.decode(text)
    del made["metadata"]["timestamp"], made["serialNumber"]
    made["serialNumber"] = uuid.uuid5(
        uuid.NAMESPACE_OID, digest.sha256_bytes(digest.canonical(made))
    ).urn
    return msgspec.json.format(digest.canonical(made)) + b"\n"


def _parts(bill: Bill) -> Iterator[Component]:
    from cyclonedx.model.component import ComponentScope

    for source in filter(None, (bill.source, *bill.needs)):
        yield from (_patch(source.fork, order, step) for order, step in enumerate(source.steps, 1))
    for need in bill.needs:
        yield _upstream(need, "")
    for name, one in bill.vendored.items():
        facts = {
            "ref": one.ref,
            "resolved": _yes(one.resolved),
            "commit": one.commit,
            "tree": one.tree,
            "without": ", ".join(one.without),
        }
        told = {key: value for key, value in facts.items() if value not in ("", UNRESOLVED)}
        version = told.get("commit", one.ref)
        yield component(
            name,
            version,
            ref=f"vendored/{name}",
            facts=told,
            purl=github(one.url, version),
            url=one.url,
        )
    for tool in bill.tools:
        yield _archive(tool, f"tool/{tool.filename}", ComponentScope.EXCLUDED)


def _pedigree(bill: Bill, name: WheelName) -> Pedigree:
    """
    Return where the wheel comes from: upstream's source, the wheels under it, and the patches in
    their order.
    """
    from cyclonedx.model import XsUri
    from cyclonedx.model.component import Commit, Diff, Patch, PatchClassification, Pedigree

    made = Pedigree()
    made.ancestors.update(_archive(base, f"base/{base.filename}") for base in bill.bases)
    if bill.source is None:
        return made
    source = bill.source.source
    made.ancestors.add(_upstream(bill.source, name.version.partition("+")[0]))
    if source.kind == "git":
        made.commits.add(Commit(uid=source.pin, url=XsUri(source.origin.partition(" @ ")[0])))
    for step in bill.source.steps:
        kind = PatchClassification.CHERRY_PICK if step.pick else PatchClassification.UNOFFICIAL
        made.patches.add(
            Patch(type=kind, diff=Diff(url=XsUri("#" + _patch_ref(source.fork, step))))
        )
    return made


def _upstream(made: SourceTree, version: str) -> Component:
    """
    Return the source of a fork as it was fetched.

    Its *pin* is a commit, or the sha256 of a file of the package index; of a folder in a wheel that
    is the hash of more than the source.
    """
    source = made.source
    git = source.kind == "git"
    url = source.origin.partition(" @ ")[0] if git else ""
    facts = {
        "kind": source.kind,
        "origin": source.origin,
        "pin": source.pin,
        "resolved": _yes(source.resolved),
        "tree": source.tree,
        "tree:patched": made.patched,
        "tree:built": made.tree,
        "sites": str(len(made.sites)),
    }
    return component(
        source.fork,
        version or (source.pin if git else ""),
        ref=f"source/{source.fork}",
        facts=facts,
        url=url,
        sha256=source.pin if source.kind == "sdist" else "",
        purl=github(url, source.pin) if git else release(source.origin),
    )


def _patch_ref(fork: str, step: AppliedPatch) -> str:
    return f"patch/{fork}/{step.sha256}"


def _patch(fork: str, order: int, step: AppliedPatch) -> Component:
    from cyclonedx.model.component import ComponentType

    facts = {
        "patch:fork": fork,
        "patch:order": str(order),
        "patch:reason": step.reason,
        "patch:tree": step.tree,
    }
    facts |= {"patch:pick": str(step.pick)} if step.pick else {}
    return component(
        step.name,
        ref=_patch_ref(fork, step),
        kind=ComponentType.FILE,
        sha256=step.sha256,
        facts=facts,
        description=step.subject,
    )


def _archive(one: Archive, ref: str, scope: ComponentScope | None = None) -> Component:
    version = one.filename.split("-")[1] if one.filename.endswith(".whl") else ""
    purl = index(one.project, version)
    return component(
        one.project,
        version,
        ref=ref,
        sha256=one.sha256,
        facts={"file": one.filename},
        purl=purl,
        scope=scope,
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"
