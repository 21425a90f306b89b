"""From decided wheels to the bytes of a publication: release, locks, signed evidence, proof; all of it in a journal before any is sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urljoin

from msgspec.structs import replace

from sparkwright.core.files import canonical, sha256_bytes, sha256_file
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext
from sparkwright.release import sets, spec
from sparkwright.release.decide.facts import Inspected
from sparkwright.release.decide.policy import ReleasePolicy
from sparkwright.release.evidence import make
from sparkwright.release.manifest import places
from sparkwright.release.manifest.records import (
    Channel,
    Entry,
    Fork,
    Lock,
    Machine,
    Proof,
    Proved,
    Release,
    Time,
    Wheel,
)
from sparkwright.release.notes import needs
from sparkwright.release.publish import releases
from sparkwright.release.publish.folder import Folder
from sparkwright.release.publish.hosts import Host, Observe, unobserved
from sparkwright.release.publish.journal import Draft, Journal, Planned
from sparkwright.release.publish.offers import INSTALLER, Offers
from sparkwright.release.signing.statement import Signer
from sparkwright.release.signing.trust import Trust


@dataclasses.dataclass(frozen=True)
class Publisher:
    """
    Who publishes where.

    Attributes:
        root: The folder of the index.
        trust: Whose signature counts for what is there already.
        observe: Told each step before it is taken.
    """

    context: RunContext
    root: Path
    signer: Signer
    trust: Trust
    policy: ReleasePolicy
    observe: Observe = unobserved


@dataclasses.dataclass(frozen=True)
class Decided:
    """
    Wheels and what was decided of each, in the same order, the installer last.

    Attributes:
        raw: sha256 of a wheel → kind of evidence → the file that the gates wrote.
    """

    inspected: tuple[Inspected, ...]
    proved: tuple[Proved, ...]
    raw: Mapping[str, Mapping[str, bytes]]

    @property
    def wheels(self) -> list[Wheel]:
        return [one.wheel for one in self.inspected]


def prepared(
    publisher: Publisher, offers: Offers, decided: Decided, *, key: str, at: Time, channel: Channel, url: str, repository: str
) -> Journal:
    """
    Return the journal of a new release, written to the disk.

    Args:
        url: Of the index. *repository*: of GitHub, where new wheels go there; empty for the folder of the index.

    Raises:
        set-unresolved, set-mixed: The wheels make no installable set.
    """
    stack = publisher.context.project.stack
    name = offers.name(stack)
    new = [one for one in decided.inspected if one.wheel.filename not in offers.wheels]
    host = host_for(publisher, name, new, repository, prerelease=channel == "candidate")
    draft = Draft(publisher.root, key)
    wheels = tuple(_placed(one.wheel, offers, host, at) for one in decided.inspected)
    urls = {one.filename: urljoin(url, one.url) for one in wheels}
    locked = {machine: _locked(publisher, decided, machine, urls) for machine in machines(decided.wheels)}
    release = _release(publisher, offers, decided, wheels, locked, name, at)
    record = canonical(release)
    address = sha256_bytes(record)
    proof = canonical(proved(publisher, draft, release, decided, at))
    for machine, found in locked.items():
        draft.add(places.lock(address, machine), found.lock)
        draft.add(places.requirements(address, machine), found.requirements)
    if onsite := _onsite(publisher.context):
        draft.add(places.onsite(address), onsite)
    entry = Entry(draft.add(places.release(address), record), sha256_bytes(proof), name, stack, at, channel)
    draft.add(places.proof(address, entry.proof), proof)
    files = tuple(planned for one in new for planned in _files(draft, one))
    return draft.finish(entry, host.name, files, {one.filename: one.sha256 for one in wheels})


def host_for(publisher: Publisher, name: str, new: Sequence[Inspected], repository: str, *, prerelease: bool) -> Host:
    """Return where the *new* wheels of the release *name* go."""
    if not repository:
        return Folder(publisher.root, publisher.observe)
    tag = releases.tag_of(name, [one.wheel.sha256 for one in new])
    return host_of(publisher, f"github:{repository}@{tag}", prerelease=prerelease)


def host_of(publisher: Publisher, name: str, *, prerelease: bool = False) -> Host:
    """Return the host of that name; raises `github-refused` where it needs a token and there is none."""
    if name == Folder.name:
        return Folder(publisher.root, publisher.observe)
    from sparkwright.core import github

    repository, _, tag = name.removeprefix("github:").partition("@")
    mirrored = publisher.context.mirrored
    api = github.GitHub.from_environment(mirrored(github.ADDRESS), seconds=300)
    return releases.of(
        api, repository, tag, mirrored(releases.UPLOADS), prerelease=prerelease, immutable=publisher.policy.immutable,
        observe=publisher.observe,
    )  # fmt: skip


def machines(wheels: Iterable[Wheel]) -> list[Machine]:
    """Return the machines that a set of *wheels* is for; a set without machine code is for the Spark, as everything here is."""
    return sorted({one.machine for one in wheels} - {"any"}) or ["aarch64"]


def _placed(wheel: Wheel, offers: Offers, host: Host, at: Time) -> Wheel:
    """Return *wheel* with its address and the time of its first publication."""
    if known := offers.wheels.get(wheel.filename):
        return replace(wheel, url=known.url, uploaded=known.uploaded)
    return replace(wheel, url=host.address(places.wheel(wheel.sha256, wheel.filename)), uploaded=at)


def _locked(publisher: Publisher, decided: Decided, machine: Machine, urls: Mapping[str, str]) -> sets.Resolved:
    fitting = [one.path for one in decided.inspected if one.wheel.machine in (machine, "any") and one.wheel.fork != INSTALLER]
    project = publisher.context.project
    return sets.of_stack(project, publisher.policy, fitting, machine, index_url=package_index.index_url(), urls=urls)


def _release(
    publisher: Publisher, offers: Offers, decided: Decided, wheels: tuple[Wheel, ...], locked: Mapping[Machine, sets.Resolved],
    name: str, at: Time,
) -> Release:  # fmt: skip
    context, stack = publisher.context, publisher.context.project.stack
    forks: dict[str, Fork] = {}
    for one in decided.inspected:
        if one.wheel.fork != INSTALLER:
            forks.setdefault(one.fork.name, one.fork)
    locks = tuple(
        Lock(machine, sha256_bytes(one.lock), sha256_bytes(one.requirements), dict(one.packages))
        for machine, one in locked.items()
    )
    needed = needs.gather(context, tuple(forks.values()), ask=not context.offline)
    onsite = _onsite(context)
    return Release(
        name, stack, at, wheels, tuple(forks.values()), locks, needed, sha256_bytes(onsite) if onsite else "", offers.before(stack)
    )


def _onsite(context: RunContext) -> bytes:
    """Return what is to be installed and edited on the user's machine; empty where the stack has nothing."""
    wanted = spec.load(context.project)
    return canonical(wanted) if wanted else b""


def _files(draft: Draft, one: Inspected) -> list[Planned]:
    where = places.wheel(one.wheel.sha256, one.wheel.filename)
    if one.wheel.fork == INSTALLER:
        # Nobody else keeps it, and the next run's program may be another.
        draft.keep(where, one.path.read_bytes())
    return [Planned(where, one.wheel.sha256, one.wheel.size), draft.keep(f"{where}.metadata", one.metadata)]


def proved(publisher: Publisher, draft: Draft, release: Release, decided: Decided, at: Time) -> Proof:
    """Return the proof of *release*, its evidence signed and in *draft*."""
    address = sha256_bytes(canonical(release))
    placed = {one.sha256: one for one in release.wheels}
    both = zip(decided.inspected, decided.proved, strict=True)
    return Proof(address, at, tuple(_evident(publisher, draft, placed[one.wheel.sha256], one, what, decided) for one, what in both))


def _evident(publisher: Publisher, draft: Draft, wheel: Wheel, one: Inspected, what: Proved, decided: Decided) -> Proved:
    """Return *what* with its evidence, which is signed and kept in *draft*."""
    raw, lock = decided.raw[wheel.sha256], publisher.context.project.lock_file
    rule = publisher.policy.forks.get(wheel.fork)
    made = make.statements(
        wheel, one.fork, what, raw, record=one.record, lock_digest=sha256_file(lock) if lock.exists() else "",
        stack=publisher.context.project.stack, required=rule.gates if rule else (),
    )  # fmt: skip
    files = make.signed(made, raw, wheel, publisher.signer)
    for named, data in files.items():
        draft.add(places.evidence(named.sha256), data)
    return replace(what, evidence=tuple(sorted(files, key=lambda one: one.kind)))
