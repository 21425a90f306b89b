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
    if others := sorted({wheel.stack for wheel in wheels} - {stack}):
        raise UsageError(
            "usage",
            f"These are wheels of stack {', '.join(others)}, not of {stack}.",
            todo=f"Give --stack {others[0]}.",
        )
    require_gpu(policy, {wheel.name: wheel.record.arch for wheel in wheels if wheel.record})
    return wheels


def require_gpu(policy: ReleasePolicy, archs: Mapping[str, str]) -> None:
    """
    Require that every architecture is that of the policy's GPU.

    Args:
        archs: The architecture of each wheel, or of the index, by its name.

    Raises:
        release-gpu-foreign: One is for another GPU.
    """
    gpu = policy.file.gpu
    if foreign := [
        f"{name}: for {arch}" for name, arch in archs.items() if capability(arch) != gpu
    ]:
        raise ReleaseError(
            "release-gpu-foreign", f"The release policy is for SM {gpu}.", details=foreign
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
            # A wheel for any machine is proved by the wheel that serves it, if there is only one.
            fits = wheel.machine in ("any", other.machine)
            if fits and rule and rule.served_by == other.source.name:
                serving.append(results[other.name].ladder)
        proof = decision.decide(wheel, own, policy, serving[0] if len(serving) == 1 else None)
        if own.ladder:
            decision.require_logged(wheel.path, verdicts, own.ladder)
            device_code[wheel.name] = line(own.ladder.device_code)
        for kind, data in own.files.items():
            file = _add(f"{wheel.name.removesuffix('.whl')}.{kind}.json", data, contents)
            proof = replace(proof, **{kind: file})
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
    timestamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    lock_file, rule = (
        context.project.lock_file,
        policy.file.sets.get(context.project.stack, SetRule()),
    )
    lock_digest = sha256_file(lock_file) if lock_file.exists() else ""
    records: list[ReleaseWheel] = []
    for facts in wheels:
        stem, earlier = facts.name.removesuffix(".whl"), published.get(facts.name)
        record = ReleaseWheel(
            name=facts.name,
            size=facts.size,
            sha256=facts.sha256,
            url=_address(facts.name, earlier, host),
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
    paths = {facts.name: facts.path for facts in wheels}
    machines: list[Machine] = sorted({facts.machine for facts in wheels} - {"any"})
    sources = {facts.source.name: facts.source for facts in wheels}
    release = Release(
        name=name,
        stack=context.project.stack,
        made=timestamp,
        wheels=tuple(records),
        # A set without machine code is for the Spark.
        locks=tuple(
            _lock(rule, records, paths, machine, url, contents)
            for machine in machines or ["aarch64"]
        ),
        forks=tuple(sources.values()),
        edits=rule.edits,
        overlays=rule.overlays,
        inexact_records=rule.inexact_records,
        before=before.name if before else "",
    )
    _require_installable(release, wheels, contents)
    folders = {facts.name: verdicts or facts.path.parent for facts in wheels}
    locks = [data for file, data in contents.items() if file.name.startswith("pylock.")]
    return replace(release, packs=warm_packs(proofs, folders, locks, contents))


def _address(name: str, published: ReleaseWheel | None, host: str) -> str:
    """Return where the wheel *name* lies or is going to lie; empty for the index."""
    if published:
        return published.url
    return f"{host}{quote(name, safe='')}" if host else ""


def _require_installable(
    release: Release,
    wheels: Sequence[wheel_facts.WheelFacts],
    contents: Mapping[ReleaseFile, bytes],
) -> None:
    """
    Require that a client would take the locked sets of *release*, as far as its own *wheels* show
    it.

    Raises:
        lock-invalid, release-unknown, set-mixed, edit-mismatch, wheel-unsafe: It would not; see
            `sparkwright.client`.
    """
    texts = {file.sha256: data for file, data in contents.items()}
    for lock in release.locks:
        for python in lock.pythons:
            selection = pylock.selection(f"{python}.0", lock.machine)
            install.release_wheels(release, lock, texts[lock.sha256], **selection)
        own = [facts for facts in wheels if facts.machine in (lock.machine, "any")]
        checked = [facts.checked for facts in own if facts.checked]
        locked_wheels.check_set(checked, release.overlays)
        projects = {wheel.project for wheel in checked}
        edits = [edit for edit in release.edits if edit.package in projects]
        locked_wheels.edited(checked, edits, wheel_facts.SITE)


def _lock(
    rule: SetRule,
    wheels: Sequence[ReleaseWheel],
    paths: Mapping[str, Path],
    machine: Machine,
    url: str,
    contents: Contents,
) -> ReleaseLock:
    """Return the locked set of *machine*, whose file is added to *contents*."""
    own = {
        locked_wheels.LockedWheel(
            wheel.project,
            wheel.version,
            wheel.name,
            wheel.url or f"{url}{wheel.path.replace('+', '%2B')}",
            wheel.sha256,
            wheel.size,
        ): paths[wheel.name]
        for wheel in wheels
        if wheel.machine in (machine, "any")
    }
    locked = locked_set.resolve(
        own,
        machine,
        rule,
        index_url=package_index.index_url(),
    )
    if absent := sorted({edit.package for edit in rule.edits} - locked.packages.keys()):
        raise ClientError(
            "set-mixed", "The set lacks packages that are to be edited.", details=absent
        )
    file = _add(f"pylock.{machine}.toml", locked.lock, contents)
    return ReleaseLock(
        **msgspec.structs.asdict(file),
        machine=machine,
        pythons=locked.pythons,
        packages=locked.packages,
    )


def warm_packs(
    proofs: Mapping[str, Proof],
    folders: Mapping[str, Path],
    locks: Sequence[bytes],
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
            sets = b"".join(locks)
            if absent := [
                each for each, sha in pack.key.wheels.items() if sha.encode() not in sets
            ]:
                why = f"it was made with another {', '.join(absent)}"
                console.warn(f"{pack.name} is left out: {why}")
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
    git = source.kind == "git"
    return {
        "name": source.name,
        "digest": {**digest, "gitTree": source.tree},
        "annotations": {
            "origin": source.origin,
            "version": source.version,
            "resolved": "yes" if source.resolved else "no",
        },
        **({"uri": f"git+{source.origin.replace(' @ ', '@')}"} if git else {}),
    }


def _by_hash(files: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the *files*, name → sha256, that there are."""
    return [
        {"name": name, "digest": {"sha256": sha256}} for name, sha256 in files.items() if sha256
    ]
