"""
From the wheels of a release to its record and to what its files hold: what is shown of the wheels,
where they come from, and the locked sets around them.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from sparkwright.builder import pylock
from sparkwright.client import ClientError, install, locked_wheels
from sparkwright.client.records import (
    LARGEST_PACK,
    ForkSource,
    Machine,
    Missing,
    Proof,
    Release,
    ReleaseFile,
    ReleaseLock,
    ReleaseWheel,
    WarmPack,
    line,
)
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.core.files import (
    list_folder,
    read_bytes,
    read_json,
    sha256_bytes,
    sha256_file,
)
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import capability
from sparkwright.gates.core.verdict import Ladder
from sparkwright.release import ReleaseError, decision, locked_set, pages, wheel_facts
from sparkwright.release.policy import ReleasePolicy, SetRule

#: What the files of a release hold, wheels not included.
Contents = dict[ReleaseFile, bytes]

#: A machine of the publisher's own, for which only the publisher vouches (SLSA build level 1).
BUILDER = "urn:sparkwright:builder:self-hosted"

#: Kind of a source → the name of its pin's digest in in-toto.
_PINS = {"git": "gitCommit", "sdist": "sha256", "wheel": "sha256"}


def read_wheels(
    context: RunContext, policy: ReleasePolicy, paths: Sequence[Path]
) -> tuple[wheel_facts.WheelFacts, ...]:
    """
    Return what the wheels at *paths* are.

    Raises:
        UsageError: They are of another stack.
        release-gpu-foreign: They are for another GPU than the policy.
        wheel-invalid, wheel-mismatch, wheel-unsafe, archive-unsafe: See `wheel_facts.read_all`.
    """
    wheels, stack = wheel_facts.read_all(paths), context.project.stack
    for wheel in wheels:
        if wheel.stack != stack:
            raise UsageError(
                "usage",
                f"{wheel.name} is a wheel of stack {wheel.stack}, not of {stack}.",
                todo=f"Give --stack {wheel.stack}.",
            )
        if wheel.record:
            require_gpu(policy, wheel.name, wheel.record.arch)
    return wheels


def require_gpu(policy: ReleasePolicy, what: str, arch: str) -> None:
    """
    Require that the architecture *arch* of the wheel, or the index, *what* is that of the policy's
    GPU.

    Raises:
        release-gpu-foreign: It is for another GPU.
    """
    if capability(arch) != policy.file.gpu:
        raise ReleaseError(
            "release-gpu-foreign",
            f"The release policy is for SM {policy.file.gpu}.",
            details=[f"{what}: for {arch}"],
        )


def prove(
    wheels: Sequence[wheel_facts.WheelFacts],
    policy: ReleasePolicy,
    verdicts: Path | None,
    contents: Contents,
) -> tuple[dict[str, Proof], dict[str, str]]:
    """
    Return what is shown of each of *wheels*, and the digest of its device code by the audit, by
    file name; the files of the gates are added to *contents*.

    Args:
        verdicts: The folder of the gates' files; None for beside each wheel.

    Raises:
        evidence-invalid, verdict-foreign, verdict-hollow, file-invalid: See `decision`.
    """
    recipes = set[str]().union(*policy.file.recipes.values())
    results = {wheel.name: decision.read_results(wheel.path, verdicts, recipes) for wheel in wheels}
    proofs, device_code = dict[str, Proof](), dict.fromkeys(results, "")
    for wheel in wheels:
        own, serving = results[wheel.name], list[Ladder | None]()
        rule = policy.file.forks.get(wheel.source.name)
        for other in wheels:
            if (
                rule
                and rule.served_by == other.source.name
                and wheel.machine in ("any", other.machine)
            ):
                serving.append(results[other.name].ladder)
        # A wheel for any machine is proved by the wheel that serves it, if there is only one.
        proof = decision.decide(wheel, own, policy, serving[0] if len(serving) == 1 else None)
        if own.ladder:
            decision.require_logged(wheel.path, verdicts, own.ladder)
            device_code[wheel.name] = line(own.ladder.device_code)
        for kind, data in own.files.items():
            name = f"{wheel.name.removesuffix('.whl')}.{kind}.json"
            proof = replace(proof, **{kind: _add(name, data, contents)})
        proofs[wheel.name] = proof
    return proofs, device_code


def missing(proofs: Mapping[str, Proof]) -> dict[str, tuple[Missing, ...]]:
    """Return what each wheel lacks for ``verified``, if anything."""
    return {name: proof.missing for name, proof in proofs.items() if proof.missing}


def missing_lines(lacks: Mapping[str, Sequence[Missing]]) -> Iterator[str]:
    """Yield a line for each wheel and reason: the gates that are no pass for it."""
    for name, entries in lacks.items():
        for reason, gates in pages.reasons(entries).items():
            yield f"{name.partition('-')[0]}: {' '.join(gates)}: {reason}"


def require_verified(proofs: Mapping[str, Proof]) -> None:
    """Raise `verified-refused` if a wheel lacks something."""
    if lacks := missing(proofs):
        raise ReleaseError(
            "verified-refused",
            f"{len(lacks)} of {len(proofs)} wheels may not be in verified.",
            details=[*missing_lines(lacks)],
            data={"missing": lacks},
        )


def draft(
    context: RunContext,
    policy: ReleasePolicy,
    wheels: Sequence[wheel_facts.WheelFacts],
    proofs: Mapping[str, Proof],
    device_code: Mapping[str, str],
    contents: Contents,
    *,
    verdicts: Path | None,
    name: str,
    url: str,
    host: str,
    published: Mapping[str, ReleaseWheel],
    before: Release | None,
) -> Release:
    """
    Return the release of *wheels*, whose files are added to *contents*.

    Args:
        verdicts: The folder of the gates' files; None for beside each wheel.
        name: Of the release.
        url: The address of the index. *host*: where new wheels go, with a final slash; empty for
            the index.
        published: The wheels of the index, by file name.
        before: The release of the same stack before it.

    Raises:
        set-unresolved, set-mixed, wheel-unsafe: The wheels make no installable set.
    """
    timestamp, project = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), context.project
    rule = policy.file.sets.get(project.stack, SetRule())
    lock_digest = sha256_file(project.lock_file) if project.lock_file.exists() else ""
    records, sources, folders = list[ReleaseWheel](), dict[str, ForkSource](), dict[str, Path]()
    for facts in wheels:
        stem, earlier = facts.name.removesuffix(".whl"), published.get(facts.name)
        address = f"{host}{quote(facts.name, safe='')}" if host else ""
        record = ReleaseWheel(
            name=facts.name,
            size=facts.size,
            sha256=facts.sha256,
            url=earlier.url if earlier else address,
            fork=facts.source.name,
            project=facts.project,
            version=facts.version,
            machine=facts.machine,
            metadata=sha256_bytes(facts.metadata),
            uploaded=earlier.uploaded if earlier else timestamp,
            proof=proofs[facts.name],
            requires_python=facts.requires_python,
            device_code=device_code[facts.name],
            content=facts.content,
            isolated=facts.isolated,
            provenance=_add(f"{stem}.provenance.json", provenance(facts, lock_digest), contents),
            sbom=_add(f"{stem}.cdx.json", facts.sbom, contents) if facts.sbom else None,
        )
        records.append(record)
        sources[facts.source.name] = facts.source
        folders[facts.name] = verdicts or facts.path.parent
    locks, texts = list[ReleaseLock](), list[bytes]()
    machines: list[Machine] = sorted({facts.machine for facts in wheels} - {"any"})
    # A set without machine code is for the Spark.
    for machine in machines or ["aarch64"]:
        lock, text = _lock(rule, records, wheels, machine, url, contents)
        locks.append(lock)
        texts.append(text)
    release = Release(
        name=name,
        stack=project.stack,
        made=timestamp,
        wheels=tuple(records),
        locks=tuple(locks),
        forks=tuple(sources.values()),
        edits=rule.edits,
        overlays=rule.overlays,
        inexact_records=rule.inexact_records,
        before=before.name if before else "",
    )
    for lock, text in zip(locks, texts, strict=True):
        _require_installable(release, wheels, lock, text)
    return replace(release, packs=warm_packs(proofs, folders, b"".join(texts), contents))


def _require_installable(
    release: Release, wheels: Sequence[wheel_facts.WheelFacts], lock: ReleaseLock, text: bytes
) -> None:
    """
    Require that a client would take the locked set *lock* of *release*, whose file is *text*, as
    far as its own *wheels* show it.

    Raises:
        lock-invalid, release-unknown, set-mixed, edit-mismatch, wheel-unsafe: It would not; see
            `sparkwright.client`.
    """
    for python in lock.pythons:
        install.release_wheels(release, lock, text, **pylock.selection(f"{python}.0", lock.machine))
    checked = dict[str, locked_wheels.CheckedWheel]()
    for facts in wheels:
        if facts.checked and facts.machine in (lock.machine, "any"):
            checked[facts.project] = facts.checked
    own = list(checked.values())
    locked_wheels.check_set(own, release.overlays)
    edits = [edit for edit in release.edits if edit.package in checked]
    locked_wheels.edited(own, edits, wheel_facts.SITE)


def _lock(
    rule: SetRule,
    records: Sequence[ReleaseWheel],
    wheels: Sequence[wheel_facts.WheelFacts],
    machine: Machine,
    url: str,
    contents: Contents,
) -> tuple[ReleaseLock, bytes]:
    """Return the locked set of *machine*, and its file, which is added to *contents*."""
    own = dict[locked_wheels.LockedWheel, Path]()
    for record, facts in zip(records, wheels, strict=True):
        if record.machine in (machine, "any"):
            wheel = locked_wheels.LockedWheel(
                record.project,
                record.version,
                record.name,
                record.url or f"{url}{record.path.replace('+', '%2B')}",
                record.sha256,
                record.size,
            )
            own[wheel] = facts.path
    locked = locked_set.resolve(own, machine, rule, index_url=package_index.index_url())
    if absent := sorted({edit.package for edit in rule.edits} - locked.packages.keys()):
        raise ClientError(
            "set-mixed", "The set lacks packages that are to be edited.", details=absent
        )
    lock = ReleaseLock(
        **msgspec.structs.asdict(_add(f"pylock.{machine}.toml", locked.lock, contents)),
        machine=machine,
        pythons=locked.pythons,
        packages=locked.packages,
    )
    return lock, locked.lock


def warm_packs(
    proofs: Mapping[str, Proof],
    folders: Mapping[str, Path],
    locks: bytes,
    contents: Contents,
) -> tuple[WarmPack, ...]:
    """
    Return the packs that nights made of wheels and recipes that *proofs* show, whose files are
    added to *contents*. One that was made with wheels that no set holds is left out, with a
    warning.

    Args:
        folders: Of the gates' files, by wheel. *locks*: the files of the locked sets.

    Raises:
        file-invalid: A record is damaged. evidence-invalid: An archive is not the one of it.
    """
    packs, failure = list[WarmPack](), partial(ReleaseError, "evidence-invalid")
    for name, folder in folders.items():
        for path in list_folder(folder, f"{name.removesuffix('.whl')}.*.pack.json"):
            pack = read_json(path, WarmPack)
            if pack.key.recipe not in proofs[name].recipes:
                console.warn(f"{pack.name} is left out: its recipe was not shown for the wheel")
                continue
            if absent := [
                each for each, sha in pack.key.wheels.items() if sha.encode() not in locks
            ]:
                console.warn(
                    f"{pack.name} is left out: it was made with another {', '.join(absent)}"
                )
                continue
            data = read_bytes(folder / pack.name, limit=LARGEST_PACK, failure=failure)
            if sha256_bytes(data) != pack.sha256:
                raise failure(f"{pack.name} is not the archive that the night made.")
            _add(pack.name, data, contents)
            packs.append(pack)
    return tuple(packs)


def _add(name: str, data: bytes, contents: Contents) -> ReleaseFile:
    file = ReleaseFile(name=name, size=len(data), sha256=sha256_bytes(data))
    contents[file] = data
    return file


def provenance(wheel: wheel_facts.WheelFacts, lock_digest: str = "") -> bytes:
    """
    Return the provenance of *wheel*: an in-toto statement with SLSA's predicate, as plain JSON.

    It needs no signature of its own, as the signed index names it by its hash. The same wheel gives
    the same bytes.

    Args:
        lock_digest: The sha256 of ``forks/<stack>/lock.yaml``; empty if there is none.
    """
    source, record = wheel.source, wheel.record
    assert record, "the wheels of a draft were read"
    patches = [
        {
            "name": patch.name,
            "digest": {"sha256": patch.sha256},
            "annotations": {"patch": patch.subject, "pick": str(patch.pick or "")},
        }
        for patch in source.patches
    ]
    dependencies = {
        "the official wheel": source.base,
        "lock.yaml": lock_digest,
        "toolchain": record.tools,
    }
    document = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": wheel.name, "digest": {"sha256": wheel.sha256}}],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:sparkwright:build:v1",
                "externalParameters": {
                    "fork": source.name,
                    "project": wheel.project,
                    "version": wheel.version,
                    "machine": wheel.machine,
                    "built": source.built,
                    "stack": wheel.stack,
                    "arch": record.arch,
                },
                "internalParameters": {
                    "cuda": source.cuda,
                    "sites": source.sites,
                    "sourceTree": source.source_tree,
                    "isolation": source.isolation or "none recorded",
                    "compiler": record.compiler,
                    "plan": record.plan,
                    "inputs": record.inputs,
                },
                "resolvedDependencies": [_upstream(source), *patches, *_by_hash(dependencies)],
            },
            "runDetails": {
                "builder": {"id": BUILDER, "version": {"sparkwright": record.sparkwright}},
                "byproducts": _by_hash({"sbom": sha256_bytes(wheel.sbom) if wheel.sbom else ""}),
            },
        },
    }
    return msgspec.json.format(msgspec.json.encode(document, order="deterministic"), indent=1)


def _upstream(source: ForkSource) -> dict[str, Any]:
    """Return the upstream source as a dependency."""
    digest = {_PINS[source.kind]: source.pin} if source.kind in _PINS else {}
    return {
        "name": source.name,
        "digest": {**digest, "gitTree": source.tree},
        "annotations": {
            "origin": source.origin,
            "version": source.version,
            "resolved": "yes" if source.resolved else "no",
        },
        **({"uri": f"git+{source.origin.replace(' @ ', '@')}"} if source.kind == "git" else {}),
    }


def _by_hash(files: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the *files*, name → sha256, that there are."""
    return [
        {"name": name, "digest": {"sha256": sha256}} for name, sha256 in files.items() if sha256
    ]
