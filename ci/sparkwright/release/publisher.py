"""
What a publisher does with an index: publish, promote, yank, prune and renew.

A publication is decided and prepared first, from the index as it was read. What is slow (gates'
files, the lock, uploads) happens without the lock of the index; the change itself is one
transaction, which refuses an index that moved meanwhile.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec.structs import replace
from packaging.version import Version

from sparkwright.audit import policy as audit_policy
from sparkwright.client.errors import ClientError
from sparkwright.client.records import (
    Channel,
    ForkSource,
    Line,
    Machine,
    Missing,
    Proof,
    Release,
    ReleaseFile,
    ReleaseLock,
    ReleaseState,
    ReleaseWheel,
    number,
)
from sparkwright.core import github, http
from sparkwright.core.errors import GitHubError, StoreError, UsageError
from sparkwright.core.files import sha256_bytes, sha256_file
from sparkwright.core.http import HttpFailure
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext
from sparkwright.release import (
    decision,
    gate_results,
    github_assets,
    locked_set,
    machine_edits,
    pages,
    provenance,
    release_notes,
    repository,
    wheel_facts,
)
from sparkwright.release.errors import ReleaseError
from sparkwright.release.gate_results import GateResults
from sparkwright.release.github_assets import GitHubAssets
from sparkwright.release.keys import Keys
from sparkwright.release.locked_set import LockedSet, OwnWheel
from sparkwright.release.policy import ReleasePolicy
from sparkwright.release.repository import Entry, Index, IndexFacts
from sparkwright.release.wheel_facts import WheelFacts

#: What the files of a release hold: bytes, or the path of a wheel.
Contents = dict[ReleaseFile, bytes | Path]


class PublishRequest(msgspec.Struct, frozen=True):
    """
    What is to be published.

    Attributes:
        channel: None for ``verified`` or a refusal.
        verdicts: The folder of the gates' files; None for beside each wheel.
        github: ``OWNER/REPOSITORY`` for new wheels; empty for the folder of the index.
        url: The address of a new index; empty for that of the policy.
    """

    wheels: tuple[Path, ...]
    channel: Channel | None = None
    verdicts: Path | None = None
    github: str = ""
    url: str = ""
    dry_run: bool = False


class Published(msgspec.Struct, frozen=True):
    """
    A publication.

    Attributes:
        version: Of the timestamp metadata that offers it.
        already: The same wheels were published before, and nothing was done.
        sent: Files that were sent, those that lay there already not included.
        missing: Wheel → what it lacks for ``verified``.
        fingerprint: Of root 1 of the index.
    """

    release: str
    channel: Channel
    version: int = 0
    already: bool = False
    sent: tuple[str, ...] = ()
    missing: dict[str, tuple[Missing, ...]] = {}
    fingerprint: str = ""


class Changed(msgspec.Struct, frozen=True):
    """
    A change of an index.

    Attributes:
        version: Of the timestamp metadata. *expires*: until when clients accept it.
        releases: The releases that were changed.
        removed: Paths that were removed. *elsewhere*: addresses of removed wheels at other hosts.
    """

    version: int
    expires: str
    releases: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Decided:
    """Wheels, and what is shown of each by file name."""

    wheels: tuple[WheelFacts, ...]
    results: Mapping[str, GateResults]
    proofs: Mapping[str, Proof]

    def require_verified(self) -> None:
        """Raise `verified-refused` if a wheel lacks something."""
        missing = {
            wheel.name: self.proofs[wheel.name].missing
            for wheel in self.wheels
            if self.proofs[wheel.name].missing
        }
        if missing:
            raise ReleaseError(
                "verified-refused",
                f"{len(missing)} of {len(self.wheels)} wheels may not stand in verified.",
                details=[
                    f"{name.partition('-')[0]}: {entry.gate}: {entry.state} ({entry.reference}): "
                    f"{entry.says}"
                    for name, entries in missing.items()
                    for entry in entries
                ],
                data={"missing": missing},
            )

    def proof(self, wheel: WheelFacts, contents: Contents) -> Proof:
        """Return the proof of *wheel* with the gates' files, which are added to *contents*."""
        results = self.results[wheel.name]
        stem = wheel.name.removesuffix(".whl")
        return replace(
            self.proofs[wheel.name],
            verdicts=_file(f"{stem}.verdicts.json", results.verdicts_file, contents),
            throughput=_file(f"{stem}.throughput.json", results.throughput_file, contents),
        )


@dataclasses.dataclass(frozen=True)
class Publisher:
    """
    Who publishes in which index.

    Attributes:
        folder: The folder of the index.
    """

    context: RunContext
    folder: Path
    keys: Keys
    policy: ReleasePolicy

    def open(self) -> Index:
        """Return the index; raise `index-missing` if there is none."""
        index = self._index()
        if not index.exists:
            raise ClientError("index-missing", f"There is no index in {self.folder}.")
        return index

    def _index(self) -> Index:
        return Index(self.folder, pin=self.policy.file.root)

    def publish(self, request: PublishRequest) -> Published:
        """
        Publish wheels as one release, or complete what a killed run began.

        Raises:
            verified-refused: Something is missing, and ``candidate`` was not asked for.
            wheel-name-taken, version-order, release-name-taken, release-yanked: The index does not
                admit these wheels.
            set-unresolved, set-mixed: They make no installable set.
            index-busy, index-moved: Another publisher. key-missing: The keys do not suffice.
            UsageError: The wheels are of another stack, or the address of the index is unknown.
        """
        index, stack = self._index(), self.context.project.stack
        url = self._url(index, request.url)
        decided = self._decide(request.wheels, request.verdicts)
        if request.channel != "candidate":
            decided.require_verified()
        channel: Channel = request.channel or "verified"
        missing = {name: proof.missing for name, proof in decided.proofs.items() if proof.missing}
        if same := _same_release(index, stack, decided.wheels):
            if channel == "verified" and same.state.channel == "candidate":
                raise ReleaseError(
                    "release-name-taken",
                    f"These wheels are published, as the candidate {same.release.name}.",
                    todo=f"Move it: `sparkwright release promote {same.release.name}`.",
                )
            if not request.dry_run:
                pages.write(index)
            return Published(
                same.release.name, same.state.channel, index.version, True, (), missing,
                index.fingerprint,
            )  # fmt: skip
        _require_free_names(index, decided.wheels)
        _require_order(index, stack, channel, decided.wheels)
        name = f"{stack}.{max([0, *(number(e.release.name) for e in index.of_stack(stack))]) + 1}"
        if request.dry_run:
            return Published(name, channel, index.version, missing=missing)
        index.require_keys(self.keys, self.policy.file.roles)
        contents: Contents = {}
        host = self._host(name, index, decided.wheels, request.github, channel)
        release = self._release(index, decided, name, url, host, contents)
        self._require_room(contents)
        sent = self._upload(host, decided, index) if host else []
        with index.changing(self.keys, self.policy.file.roles) as change:
            change.facts = IndexFacts(url, change.facts.retired)
            for file, content in contents.items():
                change.put(file, content)
            for wheel in decided.wheels:
                record = next(entry for entry in release.wheels if entry.name == wheel.name)
                if not record.url:
                    change.put(record, wheel.path)
                    change.put_metadata(record, wheel.metadata)
            change.set_release(release, _state(release, channel))
        index = self._finish()
        return Published(
            name, channel, index.version, False, (*sent, *change.sent), missing, index.fingerprint
        )

    def promote(self, name: str, verdicts: Path) -> Changed:
        """
        Move a candidate to ``verified`` by new verdicts about its very bytes.

        Args:
            verdicts: The folder of the gates' files; wheels that another host keeps may lie there,
                too, else they are fetched.

        Raises:
            verified-refused: Something is still missing.
            release-unknown: There is no such candidate of this stack. release-yanked: It is yanked.
            version-order: ``verified`` offers a higher version already.
            index-damaged, download-invalid: A wheel is not what was published.
        """
        index = self.open()
        entry, stack = index.entry(name), self.context.project.stack
        if entry.state.channel != "candidate" or entry.state.stack != stack:
            raise ClientError(
                "release-unknown",
                f"{name} is no candidate of stack {stack}.",
                details=[f"stack {entry.state.stack}, channel {entry.state.channel}"],
            )
        _require_offered(entry)
        _require_order(index, stack, "verified", entry.release.wheels, besides=name)
        contents: Contents = {}
        with tempfile.TemporaryDirectory(prefix="promote-") as folder:
            paths = [self._wheel(wheel, Path(folder), verdicts) for wheel in entry.release.wheels]
            decided = self._decide(paths, verdicts)
            decided.require_verified()
            proofs = {wheel.name: decided.proof(wheel, contents) for wheel in decided.wheels}
        wheels = tuple(replace(wheel, proof=proofs[wheel.name]) for wheel in entry.release.wheels)
        release = self._with_notes(replace(entry.release, wheels=wheels), index, contents)
        with index.changing(self.keys, self.policy.file.roles) as change:
            for file, content in contents.items():
                change.put(file, content)
            change.set_release(release, _state(release, "verified"))
        return _changed(self._finish(), name)

    def yank(self, name: str, reason: str) -> Changed:
        """
        Stop offering a release; its files stay for those who pinned it.

        Raises:
            release-unknown: There is none. release-yanked: It is yanked already.
            UsageError: The reason is empty, or not one line.
        """
        try:
            msgspec.convert(reason, Line)
        except msgspec.ValidationError:
            reason = ""
        if not reason.strip():
            raise UsageError(
                "usage",
                "A release is yanked with a reason of one line, which people and pip show.",
                todo="Give it with --reason TEXT.",
            )
        index = self.open()
        entry = index.entry(name)
        _require_offered(entry)
        with index.changing(self.keys, self.policy.file.roles) as change:
            change.set_state(name, replace(entry.state, yanked=reason))
        return _changed(self._finish(), name)

    def prune(self, keep: int, *, verified: bool = False) -> Changed:
        """
        Remove the candidates of each stack that are older than the *keep* newest offered ones.

        The newest release of a stack always stays, so that its number is not used again.

        Args:
            keep: At least 1.
            verified: Do the same with the releases of ``verified``.
        """
        index = self.open()
        newer: dict[tuple[str, str], int] = {}
        surplus: list[Entry] = []
        for entry in list(index.entries.values())[::-1]:
            kind = entry.state.stack, entry.state.channel
            if newer.get(kind, 0) >= keep and (verified or entry.state.channel == "candidate"):
                surplus.append(entry)
            newer[kind] = newer.get(kind, 0) + (not entry.state.yanked)
        with index.changing(self.keys, self.policy.file.roles) as change:
            change.renew()
            for entry in surplus:
                change.remove(entry.release)
        index = self._finish()
        removed = repository.remove_unreferenced(index)
        used = {wheel.url for entry in index.entries.values() for wheel in entry.release.wheels}
        urls = {wheel.url for entry in surplus for wheel in entry.release.wheels} - used
        names = sorted(entry.release.name for entry in surplus)
        return replace(
            _changed(index, *names), removed=tuple(removed), elsewhere=tuple(sorted(urls))
        )

    def refresh(self) -> Changed:
        """
        Sign snapshot and timestamp again, and the targets metadata if its keys are here; remove
        what killed runs left.
        """
        with self.open().changing(self.keys, self.policy.file.roles) as change:
            change.renew(*(["targets"] if change.holds("targets") else []))
        index = self._finish()
        return replace(_changed(index), removed=tuple(repository.remove_unreferenced(index)))

    def rotate(self, roles: Sequence[str], new: Keys) -> Changed:
        """
        Give *roles* to the keys *new* alone; the same keys renew the root metadata.

        Raises:
            key-missing: Keys of the root, or of a role that has to be signed, are not here.
        """
        both = Keys({**self.keys.by_file, "new": list(new.signers.values())})
        index = Index(self.folder, pin=self.policy.file.root, resuming=True)
        with index.changing(both, self.policy.file.roles) as change:
            change.rotate(roles, [signer.public_key for signer in new.signers.values()])
        return _changed(self._finish())

    def _finish(self) -> Index:
        """Return the index as it is now, with its pages."""
        index = self._index()
        pages.write(index)
        return index

    def _url(self, index: Index, requested: str) -> str:
        url = requested or index.facts.url or self.policy.file.url
        url = f"{url.rstrip('/')}/" if url else ""
        if not url.startswith(("https://", "http://127.0.0.1:", "http://localhost:")):
            raise UsageError(
                "usage",
                f"{url or 'Nothing'} is the address at which the index will be served.",
                todo="Give --url https://…, or write it into ci/release.yaml.",
            )
        if index.exists and url != index.facts.url:
            raise UsageError(
                "usage", f"The index in {self.folder} is served at {index.facts.url}, not at {url}."
            )
        return url

    def _decide(self, paths: Sequence[Path], verdicts: Path | None) -> _Decided:
        project = self.context.project
        audit = None
        if project.audit_file.exists():
            audit = audit_policy.load(project.audit_file, project.spec.arch)
        wheels = wheel_facts.read_all(paths, audit)
        if others := sorted({wheel.stack for wheel in wheels} - {project.stack}):
            raise UsageError(
                "usage",
                f"These are wheels of stack {', '.join(others)}, not of {project.stack}.",
                todo=f"Give --stack {others[0]}.",
            )
        results = {wheel.name: gate_results.read_beside(wheel.path, verdicts) for wheel in wheels}
        return _Decided(wheels, results, decision.decide_all(wheels, results, self.policy))

    def _host(
        self,
        name: str,
        index: Index,
        wheels: Sequence[WheelFacts],
        repository: str,
        channel: Channel,
    ) -> GitHubAssets | None:
        """Return the host of new wheels; None for the folder of the index."""
        known = _known_wheels(index)
        new = [wheel.sha256 for wheel in wheels if wheel.name not in known]
        if not repository or not new:
            return None
        api = github.GitHub.from_environment(self.context.mirrored(github.ADDRESS), seconds=300)
        return GitHubAssets(
            api,
            repository,
            github_assets.tag_of(name, new),
            uploads=self.context.mirrored(github_assets.UPLOADS),
            prerelease=channel == "candidate",
            immutable=self.policy.file.immutable,
        )

    def _upload(self, host: GitHubAssets, decided: _Decided, index: Index) -> list[str]:
        """Send the new wheels, and the METADATA of each beside it (PEP 658)."""
        known = _known_wheels(index)
        files: dict[ReleaseFile, Path] = {}
        with tempfile.TemporaryDirectory(prefix="metadata-") as folder:
            for wheel in decided.wheels:
                if wheel.name not in known:
                    own = ReleaseFile(name=wheel.name, size=wheel.size, sha256=wheel.sha256)
                    files[own] = wheel.path
                    metadata = Path(folder, f"{wheel.name}.metadata")
                    metadata.write_bytes(wheel.metadata)
                    file = ReleaseFile(
                        name=metadata.name,
                        size=len(wheel.metadata),
                        sha256=sha256_bytes(wheel.metadata),
                    )
                    files[file] = metadata
            return host.publish(files)

    def _release(
        self,
        index: Index,
        decided: _Decided,
        name: str,
        url: str,
        host: GitHubAssets | None,
        contents: Contents,
    ) -> Release:
        """Return the record of a new release, and add what its files hold to *contents*."""
        made, known = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), _known_wheels(index)
        lock_file = self.context.project.lock_file
        lock_digest = sha256_file(lock_file) if lock_file.exists() else ""
        wheels = []
        for wheel in decided.wheels:
            stem, before = wheel.name.removesuffix(".whl"), known.get(wheel.name)
            statement = provenance.statement(wheel, lock_digest)
            address = before.url if before else host.url(wheel.name) if host else ""
            wheels.append(
                ReleaseWheel(
                    name=wheel.name,
                    size=wheel.size,
                    sha256=wheel.sha256,
                    url=address,
                    fork=wheel.source.name,
                    project=wheel.project,
                    version=wheel.version,
                    machine=wheel.machine,
                    metadata=sha256_bytes(wheel.metadata),
                    uploaded=before.uploaded if before else made,
                    proof=decided.proof(wheel, contents),
                    requires_python=wheel.requires_python,
                    device_code=wheel.device_code,
                    content=wheel.content,
                    libraries=wheel.libraries,
                    provenance=_file(f"{stem}.provenance.json", statement, contents),
                    sbom=_file(f"{stem}.cdx.json", wheel.sbom, contents),
                )
            )
        paths = {wheel.name: wheel.path for wheel in decided.wheels}
        edits = machine_edits.load(self.context.project)
        locks = []
        for machine in _machines(wheels):
            locked = self._locked(
                [w for w in wheels if w.machine in (machine, "any")], machine, url, paths
            )
            if edits:
                edits.require(locked.wheels)
            file = _file(f"pylock.{machine}.toml", locked.lock, contents)
            assert file
            locks.append(
                ReleaseLock(
                    **msgspec.structs.asdict(file),
                    machine=machine,
                    pythons=locked.pythons,
                    packages=locked.packages,
                )
            )
        sources: dict[str, ForkSource] = {}
        for wheel in decided.wheels:
            sources.setdefault(wheel.source.name, wheel.source)
        earlier = index.of_stack(self.context.project.stack)
        release = Release(
            name=name,
            stack=self.context.project.stack,
            made=made,
            wheels=tuple(wheels),
            locks=tuple(locks),
            forks=tuple(
                release_notes.with_upstream(self.context, source) for source in sources.values()
            ),
            edits=edits.edits if edits else (),
            overlays=edits.overlays if edits else (),
            before=earlier[-1].release.name if earlier else "",
        )
        return self._with_notes(release, index, contents)

    def _with_notes(self, release: Release, index: Index, contents: Contents) -> Release:
        before = index.entries.get(release.before)
        text = release_notes.markdown(release, before.release if before else None)
        file = _file(f"{release.name}.md", text.encode(), contents)
        return replace(release, notes=file)

    def _locked(
        self,
        wheels: Sequence[ReleaseWheel],
        machine: Machine,
        url: str,
        paths: Mapping[str, Path],
    ) -> LockedSet:
        project = self.context.project
        own = [
            OwnWheel(
                wheel.project,
                wheel.version,
                paths[wheel.name],
                wheel.url or f"{url}{wheel.path.replace('+', '%2B')}",
                wheel.sha256,
                wheel.size,
            )
            for wheel in wheels
        ]
        return locked_set.resolve(
            own,
            machine,
            self.policy.set_rule(project.stack),
            index_url=package_index.index_url(),
            torch=locked_set.torch_version(project.build_folder / "pylock.toml"),
        )

    def _require_room(self, contents: Contents) -> None:
        """Raise `disk-full` before anything is written that would not fit."""
        parent = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        free = shutil.disk_usage(parent).free
        needed = sum(file.size for file in contents if not (self.folder / file.path).exists())
        if needed > free:
            raise StoreError(
                "disk-full",
                f"There is no room for this release in {self.folder}.",
                details=[f"needed: {needed / 1e6:,.0f} MB", f"free: {free / 1e6:,.0f} MB"],
            )

    def _wheel(self, wheel: ReleaseWheel, folder: Path, verdicts: Path) -> Path:
        """Return *wheel* as a file in *folder*, by its hash: of the index, *verdicts*, or fetched."""
        path = folder / wheel.name
        for known in (self.folder / wheel.path, verdicts / wheel.name):
            if known.is_file() and sha256_file(known) == wheel.sha256:
                path.symlink_to(known.absolute())
                return path
        if not wheel.url:
            raise repository.damaged(
                f"{wheel.name} is not in the index, or not what it was.",
                [f"sha256: {wheel.sha256}"],
            )
        try:
            http.download(wheel.url, path, size=wheel.size)
        except HttpFailure as failure:
            raise GitHubError(
                "github-unreachable", f"{wheel.name} cannot be fetched.", details=[str(failure)]
            ) from None
        if sha256_file(path) != wheel.sha256:
            raise ClientError(
                "download-invalid",
                f"{wheel.name} is not what was published.",
                details=[f"expected: {wheel.sha256}", f"received: {sha256_file(path)}"],
            )
        return path


def _file(name: str, data: bytes, contents: Contents) -> ReleaseFile | None:
    """Return the record of a file with *data*, which is added to *contents*; None if it is empty."""
    if not data:
        return None
    file = ReleaseFile(name=name, size=len(data), sha256=sha256_bytes(data))
    contents[file] = data
    return file


def _machines(wheels: Iterable[ReleaseWheel]) -> list[Machine]:
    """Return the machines of a set; one without machine code is for the Spark."""
    return sorted({wheel.machine for wheel in wheels} - {"any"}) or ["aarch64"]


def _state(release: Release, channel: Channel) -> ReleaseState:
    missing = (entry.gate for entries in release.missing.values() for entry in entries)
    return ReleaseState(
        stack=release.stack,
        made=release.made,
        channel=channel,
        machines=tuple(lock.machine for lock in release.locks),
        pythons=tuple(dict.fromkeys(python for lock in release.locks for python in lock.pythons)),
        missing=tuple(sorted(set(missing))),
    )


def _changed(index: Index, *names: str) -> Changed:
    expires = f"{index.timestamp.signed.expires:%Y-%m-%dT%H:%M:%SZ}"
    return Changed(index.version, expires, names)


def _known_wheels(index: Index) -> dict[str, ReleaseWheel]:
    return {wheel.name: wheel for entry in index.entries.values() for wheel in entry.release.wheels}


def _require_free_names(index: Index, wheels: Iterable[WheelFacts]) -> None:
    """Raise `wheel-name-taken` for a file name that the index has, or had, for other bytes."""
    taken = {name: wheel.sha256 for name, wheel in _known_wheels(index).items()}
    taken = {**index.facts.retired, **taken}
    for wheel in wheels:
        if taken.get(wheel.name, wheel.sha256) != wheel.sha256:
            raise ReleaseError(
                "wheel-name-taken",
                f"The index has, or once had, {wheel.name} with other bytes.",
                details=[f"published: {taken[wheel.name]}", f"now:       {wheel.sha256}"],
            )


def _require_order(
    index: Index,
    stack: str,
    channel: Channel,
    wheels: Iterable[WheelFacts | ReleaseWheel],
    besides: str = "",
) -> None:
    """
    Require that pip would prefer *wheels* to what *channel* offers of the same stack.

    Args:
        besides: The name of a release that does not count.

    Raises:
        version-order: It offers a higher version.
    """
    offered: dict[tuple[str, str], list[tuple[Version, str, str]]] = {}
    for entry in index.of_stack(stack):
        counts = channel in ("candidate", entry.state.channel)
        if counts and not entry.state.yanked and entry.release.name != besides:
            for known in entry.release.wheels:
                version = (Version(known.version), known.sha256, entry.release.name)
                offered.setdefault((known.project, known.machine), []).append(version)
    for wheel in wheels:
        versions = offered.get((wheel.project, wheel.machine))
        if not versions:
            continue
        highest, sha256, name = max(versions)
        if sha256 != wheel.sha256 and Version(wheel.version) <= highest:
            raise ReleaseError(
                "version-order",
                f"pip would pass over {wheel.name}.",
                details=[f"{name} offers {wheel.project} {highest}", f"this is {wheel.version}"],
            )


def _same_release(index: Index, stack: str, wheels: Sequence[WheelFacts]) -> Entry | None:
    """Return the release of exactly *wheels*; raise `release-yanked` if it is yanked."""
    hashes = {wheel.sha256 for wheel in wheels}
    for entry in index.of_stack(stack):
        if {wheel.sha256 for wheel in entry.release.wheels} == hashes:
            _require_offered(entry)
            return entry
    return None


def _require_offered(entry: Entry) -> None:
    if entry.state.yanked:
        raise ClientError(
            "release-yanked",
            f"{entry.release.name} is yanked.",
            details=[f"because {entry.state.yanked}"],
            todo="A fix is a new version: raise `label` in stack.yaml and build again.",
        )
