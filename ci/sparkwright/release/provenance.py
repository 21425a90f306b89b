"""
The provenance of a wheel: an in-toto statement with SLSA's predicate, as plain JSON.

It needs no signature of its own, as the signed index names it by its hash.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sparkwright import __version__
from sparkwright.client.records import ForkSource
from sparkwright.core.files import sha256_bytes
from sparkwright.release.wheel_facts import WheelFacts

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:sparkwright:build:v1"
#: A machine of the publisher's own, for which only the publisher vouches (SLSA build level 1).
BUILDER = "urn:sparkwright:builder:self-hosted"

#: Kind of a source → the name of its pin's digest in in-toto.
_PINS = {"git": "gitCommit", "sdist": "sha256", "wheel": "sha256"}


def statement(wheel: WheelFacts, lock_digest: str = "") -> bytes:
    """
    Return the statement about *wheel*; the same wheel gives the same bytes.

    Args:
        lock_digest: The sha256 of ``forks/<stack>/lock.yaml``; empty if there is none.
    """
    source, record = wheel.source, wheel.record
    external = {
        "fork": source.name,
        "project": wheel.project,
        "version": wheel.version,
        "machine": wheel.machine,
        "built": source.built,
        "stack": wheel.stack,
        "arch": record.arch if record else "",
    }
    internal: dict[str, Any] = {
        "cuda": source.cuda,
        "sites": source.sites,
        "sourceTree": source.source_tree,
        "isolation": source.isolation or "none recorded",
    }
    if record:
        internal |= {"compiler": record.compiler, "plan": record.plan, "inputs": record.inputs}
    materials = _materials(source)
    if lock_digest:
        uri = f"forks/{wheel.stack}/lock.yaml"
        materials.append({"name": "lock.yaml", "uri": uri, "digest": {"sha256": lock_digest}})
    if record and record.tools:
        materials.append({"name": "toolchain", "digest": {"sha256": record.tools}})
    byproducts = []
    if wheel.sbom:
        byproducts.append({"name": "sbom", "digest": {"sha256": sha256_bytes(wheel.sbom)}})
    version = {"sparkwright": record.sparkwright if record else __version__}
    document = {
        "_type": STATEMENT,
        "subject": [{"name": wheel.name, "digest": {"sha256": wheel.sha256}}],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": _present(external),
                "internalParameters": _present(internal),
                "resolvedDependencies": materials,
            },
            "runDetails": {
                "builder": {"id": BUILDER, "version": version},
                "byproducts": byproducts,
            },
        },
    }
    return msgspec.json.format(msgspec.json.encode(document, order="deterministic"), indent=1)


def _materials(source: ForkSource) -> list[dict[str, Any]]:
    """Return the upstream source, every patch in order, and the wheel under a graft."""
    digest = {_PINS[source.kind]: source.pin} if source.kind in _PINS else {}
    if source.tree:
        digest["gitTree"] = source.tree
    upstream: dict[str, Any] = {"name": source.name, "digest": digest}
    if source.kind == "git":
        upstream["uri"] = f"git+{source.origin.replace(' @ ', '@')}"
    resolved = "yes" if source.resolved else "no"
    annotations = {"origin": source.origin, "version": source.version, "resolved": resolved}
    upstream["annotations"] = annotations
    patches = [
        {
            "name": patch.name,
            "digest": {"sha256": patch.sha256},
            "annotations": _present({"patch": patch.subject, "pick": str(patch.pick or "")}),
        }
        for patch in source.patches
    ]
    base = (
        [{"name": "the official wheel", "digest": {"sha256": source.base}}] if source.base else []
    )
    return [upstream, *patches, *base]


def _present(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}
