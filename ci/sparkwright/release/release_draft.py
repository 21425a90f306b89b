"""From decided wheels to the record of a release and to what its files hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec.structs import replace

from sparkwright.audit import policy as audit_policy
from sparkwright.client.errors import ClientError
from sparkwright.client.locked_wheels import LockedWheel
from sparkwright.client.records import (
    ForkSource,
    Machine,
    Missing,
    Proof,
    Release,
    ReleaseFile,
    ReleaseLock,
    ReleaseWheel,
)
from sparkwright.core.errors import UsageError
from sparkwright.core.files import sha256_bytes, sha256_file
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import capability
from sparkwright.release import (
    decision,
    gate_results,
    locked_set,
    provenance,
    release_notes,
    wheel_facts,
)
from sparkwright.release.errors import ReleaseError
from sparkwright.release.gate_results import GateResults
from sparkwright.release.policy import ReleasePolicy, SetRule
from sparkwright.release.wheel_facts import WheelFacts


@dataclasses.dataclass(frozen=True)
class DecidedWheels:
    """The wheels of a release, and by file name what the gates wrote and what is shown of each."""

    wheels: tuple[WheelFacts, ...]
    results: Mapping[str, GateResults]
    proofs: Mapping[str, Proof]

    @property
    def missing(self) -> dict[str, tuple[Missing, ...]]:
        """What each wheel lacks for ``verified``, if anything."""
        return {name: proof.missing for name, proof in self.proofs.items() if proof.missing}

    def require_verified(self) -> None:
        """Raise `verified-refused` if a wheel lacks something."""
        if missing := self.missing:
            raise ReleaseError(
                "verified-refused",
                f"{len(missing)} of {len(self.wheels)} wheels may not be in verified.",
                details=missing_lines(missing),
                data={"missing": missing},
            )


def missing_lines(missing: Mapping[str, Sequence[Missing]]) -> list[str]:
    """Return a line for each wheel and reason: the gates that are no pass for it."""
    return [
        f"{name.partition('-')[0]}: {' '.join(gates)}: {reason}"
        for name, entries in missing.items()
        for reason, gates in release_notes.reasons(entries).items()
    ]


def decide(
    context: RunContext, policy: ReleasePolicy, paths: Sequence[Path], verdicts: Path | None
) -> DecidedWheels:
    """
    Return what is shown of the wheels at *paths*.

    Args:
        verdicts: The folder of the gates' files; None for beside each wheel.

    Raises:
        UsageError: The wheels are of another stack.
        release-gpu-foreign: They are for another GPU than the policy.
        wheel-invalid, wheel-mismatch, archive-unsafe, evidence-invalid, verdict-foreign,
            verdict-hollow: See `wheel_facts`, `gate_results` and `decision`.
    """
    project, audit = context.project, None
    if project.audit_file.exists():
        audit = audit_policy.load(project.audit_file, project.spec.arch)
    wheels = wheel_facts.read_all(paths, audit)
    if others := sorted({wheel.stack for wheel in wheels} - {project.stack}):
        raise UsageError(
            "usage",
            f"These are wheels of stack {', '.join(others)}, not of {project.stack}.",
            todo=f"Give --stack {others[0]}.",
        )
    require_gpu(policy, {wheel.name: wheel.record.arch for wheel in wheels if wheel.record})
    return decide_facts(wheels, policy, verdicts)


def require_gpu(policy: ReleasePolicy, archs: Mapping[str, str]) -> None:
    """
    Require that the architectures *archs*, by what has them, are those of the policy's GPU.

    Raises:
        release-gpu-foreign: One is for another GPU.
    """
    if foreign := {
        name: arch for name, arch in archs.items() if capability(arch) != policy.file.gpu
    }:
        raise ReleaseError(
            "release-gpu-foreign",
            f"The release policy is for SM {policy.file.gpu}.",
            details=[f"{name}: for {arch}" for name, arch in foreign.items()],
        )


def decide_facts(
    wheels: tuple[WheelFacts, ...], policy: ReleasePolicy, verdicts: Path | None
) -> DecidedWheels:
    """Return what is shown of *wheels*; otherwise as `decide`."""
    results = {wheel.name: gate_results.read_beside(wheel.path, verdicts) for wheel in wheels}
    return DecidedWheels(wheels, results, decision.decide_all(wheels, results, policy))


class ReleaseDraft:
    """
    A release that is not published yet.

    Args:
        name: Of the release.
        url: The address of the index. *address*: returns the address of a new wheel at another
            host by its file name; empty for the index.
        published: The wheels of the index, by file name.
        before: The release of the same stack before it.

    Attributes:
        contents: What the files of the release hold, wheels not included.

    Raises:
        set-unresolved, set-mixed: The wheels make no installable set.
    """

    def __init__(
        self,
        context: RunContext,
        policy: ReleasePolicy,
        decided: DecidedWheels,
        *,
        name: str,
        url: str,
        address: Callable[[str], str],
        published: Mapping[str, ReleaseWheel],
        before: Release | None,
    ) -> None:
        self.contents: dict[ReleaseFile, bytes] = {}
        self._context = context
        self._made = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        wheels = tuple(
            self._wheel(wheel, decided, address, published.get(wheel.name))
            for wheel in decided.wheels
        )
        machines: list[Machine] = sorted({wheel.machine for wheel in wheels} - {"any"})
        rule = policy.set_rule(context.project.stack)
        paths = {wheel.name: wheel.path for wheel in decided.wheels}
        sources: dict[str, ForkSource] = {}
        # Of two builds of a fork, one from an unresolved source is the one to show.
        for facts in sorted(decided.wheels, key=lambda facts: facts.source.resolved):
            sources.setdefault(facts.source.name, facts.source)
        release = Release(
            name=name,
            stack=context.project.stack,
            made=self._made,
            wheels=wheels,
            # A set without machine code is for the Spark.
            locks=tuple(
                self._lock(wheels, paths, machine, url, rule) for machine in machines or ["aarch64"]
            ),
            forks=tuple(
                release_notes.with_upstream(context, source) for source in sources.values()
            ),
            edits=rule.edits,
            overlays=rule.overlays,
            inexact_records=rule.inexact_records,
            before=before.name if before else "",
        )
        self.release = with_notes(release, before, self.contents)

    def _wheel(
        self,
        wheel: WheelFacts,
        decided: DecidedWheels,
        address: Callable[[str], str],
        earlier: ReleaseWheel | None,
    ) -> ReleaseWheel:
        lock_file = self._context.project.lock_file
        statement = provenance.statement(
            wheel, sha256_file(lock_file) if lock_file.exists() else ""
        )
        stem = wheel.name.removesuffix(".whl")
        return ReleaseWheel(
            name=wheel.name,
            size=wheel.size,
            sha256=wheel.sha256,
            url=earlier.url if earlier else address(wheel.name),
            fork=wheel.source.name,
            project=wheel.project,
            version=wheel.version,
            machine=wheel.machine,
            metadata=sha256_bytes(wheel.metadata),
            uploaded=earlier.uploaded if earlier else self._made,
            proof=with_files(decided, wheel.name, self.contents),
            requires_python=wheel.requires_python,
            device_code=wheel.device_code,
            content=wheel.content,
            isolated=wheel.isolated,
            provenance=_add(f"{stem}.provenance.json", statement, self.contents),
            sbom=_add(f"{stem}.cdx.json", wheel.sbom, self.contents) if wheel.sbom else None,
        )

    def _lock(
        self,
        wheels: Sequence[ReleaseWheel],
        paths: Mapping[str, Path],
        machine: Machine,
        url: str,
        rule: SetRule,
    ) -> ReleaseLock:
        project = self._context.project
        own = {
            LockedWheel(
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
            torch=locked_set.torch_version(project.build_folder / "pylock.toml"),
        )
        edited = {edit.package for edit in rule.edits}
        if missing := sorted(edited - locked.packages.keys()):
            raise ClientError(
                "set-mixed", "The set lacks packages that are to be edited.", details=missing
            )
        file = _add(f"pylock.{machine}.toml", locked.lock, self.contents)
        return ReleaseLock(
            **msgspec.structs.asdict(file),
            machine=machine,
            pythons=locked.pythons,
            packages=locked.packages,
        )


def with_files(decided: DecidedWheels, name: str, contents: dict[ReleaseFile, bytes]) -> Proof:
    """Return the proof of the wheel *name* with the gates' files, which are added to *contents*."""
    results, stem = decided.results[name], name.removesuffix(".whl")
    files = {"verdicts": results.verdicts_file, "throughput": results.throughput_file}
    return replace(
        decided.proofs[name],
        **{
            kind: _add(f"{stem}.{kind}.json", data, contents)
            for kind, data in files.items()
            if data
        },
    )


def with_notes(
    release: Release, before: Release | None, contents: dict[ReleaseFile, bytes]
) -> Release:
    """Return *release* with its notes, which are added to *contents*."""
    text = release_notes.markdown(release, before)
    return replace(release, notes=_add(f"{release.name}.md", text.encode(), contents))


def _add(name: str, data: bytes, contents: dict[ReleaseFile, bytes]) -> ReleaseFile:
    file = ReleaseFile(name=name, size=len(data), sha256=sha256_bytes(data))
    contents[file] = data
    return file
