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
from sparkwright.release.wheel_facts import WheelFacts

#: What the files of a release hold, wheels not included.
Contents = dict[ReleaseFile, bytes]

#: A machine of the publisher's own, for which only the publisher vouches (SLSA build level 1).
BUILDER = "urn:sparkwright:builder:self-hosted"

#: Kind of a source → the name of its pin's digest in in-toto.
_PINS = {"git": "gitCommit", "sdist": "sha256", "wheel": "sha256"}


def read_wheels(
    context: RunContext, policy: ReleasePolicy, paths: Sequence[Path]
) -> tuple[WheelFacts, ...]:
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
                f"{wheel.path.name} is a wheel of stack {wheel.stack}, not of {stack}.",
                todo=f"Give --stack {wheel.stack}.",
            )
        if wheel.record:
            require_gpu(policy, wheel.path.name, wheel.record.arch)
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
    wheels: Sequence[WheelFacts],
    policy: ReleasePolicy,
    verdicts: Path | None,
    contents: Contents,
) -> list[WheelFacts]:
    """
    Return *wheels* with what is shown of each, and with the digest of its device code by the audit;
    the files of the gates are added to *contents*.

    Args:
        verdicts: The folder of the gates' files; None for beside each wheel.

    Raises:
        evidence-invalid, verdict-foreign, verdict-hollow, file-invalid: See `decision`.
    """
    recipes, proved = set[str]().union(*policy.file.recipes.values()), list[WheelFacts]()
    results = [decision.read_results(facts.path, verdicts, recipes) for facts in wheels]
    for facts, own in zip(wheels, results, strict=True):
        rule, serving = policy.file.forks.get(facts.source.name), list[Ladder | None]()
        for other, result in zip(wheels, results, strict=True):
            if (
                rule
                and rule.served_by == other.source.name
                and facts.wheel.machine in ("any", other.wheel.machine)
            ):
                serving.append(result.ladder)
        # A wheel for any machine is proved by the wheel that serves it, if there is only one.
        proof = decision.decide(facts, own, policy, serving[0] if len(serving) == 1 else None)
        if own.ladder:
            decision.require_logged(facts.path, verdicts, own.ladder)
        for kind, data in own.files.items():
            name = f"{facts.wheel.name.removesuffix('.whl')}.{kind}.json"
            proof = replace(proof, **{kind: _add(name, data, contents)})
        device_code = line(own.ladder.device_code) if own.ladder else ""
        wheel = replace(facts.wheel, proof=proof, device_code=device_code)
        proved.append(replace(facts, wheel=wheel))
    return proved


def missing(wheels: Sequence[WheelFacts]) -> dict[str, tuple[Missing, ...]]:
    """Return what each wheel lacks for ``verified``, if anything."""
    lacks = dict[str, tuple[Missing, ...]]()
    for facts in wheels:
        if facts.wheel.proof.missing:
            lacks[facts.wheel.name] = facts.wheel.proof.missing
    return lacks


def missing_lines(lacks: Mapping[str, Sequence[Missing]]) -> Iterator[str]:
    """Yield a line for each wheel and reason: the gates that are no pass for it."""
    for name, entries in lacks.items():
        for reason, gates in pages.reasons(entries).items():
            yield f"{name.partition('-')[0]}: {' '.join(gates)}: {reason}"


def require_verified(wheels: Sequence[WheelFacts]) -> None:
    """Raise `verified-refused` if a wheel lacks something."""
    if lacks := missing(wheels):
        raise ReleaseError(
            "verified-refused",
            f"{len(lacks)} of {len(wheels)} wheels may not be in verified.",
            details=[*missing_lines(lacks)],
            data={"missing": lacks},
        )


def draft(
    context: RunContext,
    policy: ReleasePolicy,
    wheels: Sequence[WheelFacts],
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
    released, sources = list[WheelFacts](), dict[str, ForkSource]()
    machines, locks, texts = set[Machine](), list[ReleaseLock](), list[bytes]()
    for facts in wheels:
        stem, earlier = facts.path.name.removesuffix(".whl"), published.get(facts.path.name)
        address = f"{host}{quote(facts.path.name, safe='')}" if host else ""
        wheel = replace(
            facts.wheel,
            url=earlier.url if earlier else address,
            uploaded=earlier.uploaded if earlier else timestamp,
            provenance=_add(f"{stem}.provenance.json", provenance(facts, lock_digest), contents),
            sbom=_add(f"{stem}.cdx.json", facts.sbom, contents) if facts.sbom else None,
        )
        released.append(replace(facts, wheel=wheel))
        sources[facts.source.name] = facts.source
        machines.add(wheel.machine)
    # A set without machine code is for the Spark.
    for machine in sorted(machines - {"any"}) or ["aarch64"]:
        lock, text = _lock(rule, released, machine, url, contents)
        locks.append(lock)
        texts.append(text)
    release = Release(
        name=name,
        stack=project.stack,
        made=timestamp,
        wheels=tuple(facts.wheel for facts in released),
        locks=tuple(locks),
        forks=tuple(sources.values()),
        edits=rule.edits,
        overlays=rule.overlays,
        inexact_records=rule.inexact_records,
        before=before.name if before else "",
    )
    for lock, text in zip(locks, texts, strict=True):
        _require_installable(release, released, lock, text)
    return replace(release, packs=warm_packs(released, verdicts, b"".join(texts), contents))


def _require_installable(
    release: Release, wheels: Sequence[WheelFacts], lock: ReleaseLock, text: bytes
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
        if facts.checked and facts.wheel.machine in (lock.machine, "any"):
            checked[facts.wheel.project] = facts.checked
    own = list(checked.values())
    locked_wheels.check_set(own, release.overlays)
    edits = [edit for edit in release.edits if edit.package in checked]
    locked_wheels.edited(own, edits, wheel_facts.SITE)


def _lock(
    rule: SetRule,
    wheels: Sequence[WheelFacts],
    machine: Machine,
    url: str,
    contents: Contents,
) -> tuple[ReleaseLock, bytes]:
    """Return the locked set of *machine*, and its file, which is added to *contents*."""
    own = dict[locked_wheels.LockedWheel, Path]()
    for facts in wheels:
        wheel = facts.wheel
        if wheel.machine in (machine, "any"):
            locked_wheel = locked_wheels.LockedWheel(
                wheel.project,
                wheel.version,
                wheel.name,
                wheel.url or f"{url}{wheel.path.replace('+', '%2B')}",
                wheel.sha256,
                wheel.size,
            )
            own[locked_wheel] = facts.path
    locked = locked_set.resolve(own, machine, rule, index_url=package_index.index_url())
    for edit in rule.edits:
        if edit.package not in locked.packages:
            raise ClientError(
                "set-mixed",
                "The set lacks packages that are to be edited.",
                details=[edit.package],
            )
    lock = ReleaseLock(
        **msgspec.structs.asdict(_add(f"pylock.{machine}.toml", locked.lock, contents)),
        machine=machine,
        pythons=locked.pythons,
        packages=locked.packages,
    )
    return lock, locked.lock


def warm_packs(
    wheels: Sequence[WheelFacts], verdicts: Path | None, locks: bytes, contents: Contents
) -> tuple[WarmPack, ...]:
    """
    Return the packs that nights made of *wheels* and recipes that are shown for them, whose files
    are added to *contents*. One that was made with wheels that no set holds is left out, with a
    warning.

    Args:
        verdicts: The folder of the gates' files; None for beside each wheel.
        locks: The files of the locked sets.

    Raises:
        file-invalid: A record is damaged. evidence-invalid: An archive is not the one of it.
    """
    packs, failure = list[WarmPack](), partial(ReleaseError, "evidence-invalid")
    for facts in wheels:
        folder, stem = verdicts or facts.path.parent, facts.path.name.removesuffix(".whl")
        for path in list_folder(folder, f"{stem}.*.pack.json"):
            pack = read_json(path, WarmPack)
            if pack.key.recipe not in facts.wheel.proof.recipes:
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


def provenance(facts: WheelFacts, lock_digest: str = "") -> bytes:
    """
    Return the provenance of the wheel of *facts*: an in-toto statement with SLSA's predicate, as
    plain JSON.

    It needs no signature of its own, as the signed index names it by its hash. The same wheel gives
    the same bytes.

    Args:
        lock_digest: The sha256 of ``forks/<stack>/lock.yaml``; empty if there is none.
    """
    wheel, source, record = facts.wheel, facts.source, facts.record
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
                    "stack": facts.stack,
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
                "byproducts": _by_hash({"sbom": sha256_bytes(facts.sbom) if facts.sbom else ""}),
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
