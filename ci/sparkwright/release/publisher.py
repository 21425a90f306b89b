"""
What a publisher does with an index: publish, promote, yank, prune and renew.

A publication is decided and prepared first, from the index as it was read. What is slow (gates'
files, the lock, uploads) happens without the lock of the index; the change itself is one
transaction, which refuses an index that moved meanwhile.
"""

import dataclasses
import itertools
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace
from packaging.version import Version

import sparkwright
from sparkwright.builder.wheel import archive
from sparkwright.client import ClientError
from sparkwright.client.index import CARRIED_ADDRESS, CARRIED_ROOT
from sparkwright.client.records import (
    Channel,
    Machine,
    Missing,
    Release,
    ReleaseState,
    ReleaseWheel,
    line,
    number,
)
from sparkwright.core.errors import UsageError
from sparkwright.core.files import sha256_bytes, sha256_file
from sparkwright.forks.context import RunContext
from sparkwright.release import ReleaseError, release_draft, repository
from sparkwright.release.keys import Keys
from sparkwright.release.policy import ReleasePolicy
from sparkwright.release.repository import ClientWheel, IndexEntry, IndexFolder, Transaction
from sparkwright.release.wheel_facts import WheelFacts

PACKAGE = Path(sparkwright.__file__).parent
#: Names the requirements and the modules of the distribution.
PROJECT = PACKAGE / "client" / "pyproject.toml"


class Published(msgspec.Struct, frozen=True):
    """
    A publication.

    Attributes:
        version: Of the timestamp metadata that offers it.
        already: The same wheels were published before, and nothing was done.
        missing: Wheel → what it lacks for ``verified``.
        fingerprint: Of root 1 of the index.
    """

    release: str
    channel: Channel
    version: int = 0
    already: bool = False
    missing: dict[str, tuple[Missing, ...]] = {}
    fingerprint: str = ""


class Changed(msgspec.Struct, frozen=True):
    """
    A change of an index.

    Attributes:
        version: Of the timestamp metadata. *expires*: until when clients accept all metadata.
        releases: The releases that were changed.
        removed: Paths that were removed.
    """

    version: int
    expires: str
    releases: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


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

    def open(self) -> IndexFolder:
        """Return the index; raise `index-missing` if there is none."""
        return self._index().require()

    def _index(self) -> IndexFolder:
        return IndexFolder(self.folder, pin=self.policy.file.root)

    def publish(
        self,
        wheels: Sequence[Path],
        channel: Channel | None = None,
        *,
        verdicts: Path | None = None,
        host: str = "",
        url: str = "",
        dry_run: bool = False,
    ) -> Published:
        """
        Publish wheels as one release, or complete what a killed run began.

        Args:
            channel: None for ``verified`` or a refusal.
            verdicts: The folder of the gates' files; None for beside each wheel.
            host: The address below which new wheels are going to lie, with a final slash; empty for
                the folder of the index.
            url: The address of a new index; empty for that of the policy.

        Raises:
            verified-refused: Something is missing, and ``candidate`` was not asked for.
            wheel-name-taken, version-order, release-name-taken, release-yanked: The index does not
                admit these wheels.
            set-unresolved, set-mixed: They make no installable set.
            store-busy, index-moved: Another publisher. key-missing: The keys do not suffice.
            release-gpu-foreign: The policy is for another GPU than the wheels or the index.
            UsageError: The wheels are of another stack, or the address of the index is unknown.
        """
        index, stack = self._index(), self.context.project.stack
        if self.policy.file.root and not index.exists:
            raise ClientError(
                "index-missing",
                f"There is no index in {self.folder}, and ci/release.yaml names the root of one.",
            )
        if index.exists:
            release_draft.require_gpu(self.policy, "the index", index.facts.gpu)
        url = self._url(index, url)
        contents: release_draft.Contents = {}
        read = release_draft.read_wheels(self.context, self.policy, wheels)
        facts = release_draft.prove(read, self.policy, verdicts, contents)
        if channel != "candidate":
            release_draft.require_verified(facts)
        channel = channel or "verified"
        done = Published("", channel, index.version, missing=release_draft.missing(facts))
        if same := _same_release(index, stack, facts):
            if channel == "verified" and same.state.channel == "candidate":
                raise ReleaseError(
                    "release-name-taken",
                    f"These wheels are published, as the candidate {same.release.name}.",
                    todo=f"Move it: `sparkwright release promote {same.release.name}`.",
                )
            if not dry_run:
                with index.changing(self.keys, self.policy.file.roles) as change:
                    _put_wheels(change, facts, same.release)
            name, channel = same.release.name, same.state.channel
            return replace(done, release=name, channel=channel, already=True)
        _require_free_names(index, facts)
        _require_order(index, stack, channel, [each.wheel for each in facts])
        before, last = None, 0
        for entry in index.of_stack(stack):
            before, last = entry.release, max(last, number(entry.release.name))
        name = f"{stack}.{last + 1}"
        if dry_run:
            return replace(done, release=name)
        Transaction(index, self.keys, self.policy.file.roles).schedule_signing("targets")
        release = release_draft.draft(
            self.context,
            self.policy,
            facts,
            contents,
            verdicts=verdicts,
            name=name,
            url=url,
            host=host,
            published=index.wheels,
            before=before,
        )
        with index.changing(self.keys, self.policy.file.roles) as change:
            clients = _with_client(change, url)
            change.facts = replace(change.facts, url=url, clients=clients, gpu=self.policy.file.gpu)
            _put_wheels(change, facts, release)
            _set_release(change, release, contents, channel)
        index = self._index()
        return replace(done, release=name, version=index.version, fingerprint=index.fingerprint)

    def promote(self, name: str, verdicts: Path) -> Changed:
        """
        Move a candidate to ``verified`` by new verdicts about its very bytes, which the signed
        release names by hash.

        Args:
            verdicts: The folder of the gates' files.

        Raises:
            verified-refused: Something is still missing.
            release-unknown: There is no such candidate of this stack. release-yanked: It is yanked.
            version-order: ``verified`` offers a higher version already.
            index-damaged: A file of the release is not what was published.
        """
        index = self.open()
        release_draft.require_gpu(self.policy, "the index", index.facts.gpu)
        entry, stack = index.entry(name), self.context.project.stack
        if entry.state.channel != "candidate" or entry.state.stack != stack:
            raise ClientError(
                "release-unknown",
                f"{name} is no candidate of stack {stack}.",
                details=[f"stack {entry.state.stack}, channel {entry.state.channel}"],
            )
        _require_offered(entry)
        _require_order(index, stack, "verified", entry.release.wheels)
        if faults := repository.damaged_files(self.folder, entry.release.files):
            raise repository.damaged(f"Files of {name} are not what they were.", faults)
        contents: release_draft.Contents = {}
        sources = {fork.name: fork for fork in entry.release.forks}
        facts = [
            WheelFacts(
                path=self.folder / wheel.path, wheel=wheel, source=sources[wheel.fork], stack=stack
            )
            for wheel in entry.release.wheels
        ]
        facts, locks = release_draft.prove(facts, self.policy, verdicts, contents), b""
        release_draft.require_verified(facts)
        for lock in entry.release.locks:
            locks += (self.folder / lock.path).read_bytes()
        release = replace(
            entry.release,
            wheels=tuple(each.wheel for each in facts),
            packs=release_draft.warm_packs(facts, verdicts, locks, contents),
        )
        with index.changing(self.keys, self.policy.file.roles) as change:
            _set_release(change, release, contents, "verified")
        return self._changed(name)

    def yank(self, name: str, reason: str) -> Changed:
        """
        Stop offering a release; its files stay for those who pinned it.

        Raises:
            release-unknown: There is none. release-yanked: It is yanked already.
            UsageError: The reason is empty, or not one line.
        """
        if not reason.strip() or line(reason) != reason:
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
        return self._changed(name)

    def prune(self, keep: int) -> Changed:
        """
        Remove the candidates of each stack that are older than the *keep* newest offered ones.

        The newest release of a stack always stays, so that its number is not used again.

        Args:
            keep: At least 1.
        """
        index, newer, names = self.open(), Counter[str](), list[str]()
        with index.changing(self.keys, self.policy.file.roles) as change:
            change.schedule_signing("targets")
            for name, entry in reversed(index.entries.items()):
                if entry.state.channel == "candidate":
                    if newer[entry.state.stack] >= keep:
                        change.remove(entry.release)
                        names.append(name)
                    newer[entry.state.stack] += not entry.state.yanked
        return self._changed(*sorted(names), removed=repository.remove_unreferenced(self._index()))

    def refresh(self) -> Changed:
        """
        Sign snapshot and timestamp again, and the targets metadata if its keys are here; remove
        what killed runs left.
        """
        with self.open().changing(self.keys, self.policy.file.roles) as change:
            change.schedule_signing(*(["targets"] if change.holds("targets") else []))
        return self._changed(removed=repository.remove_unreferenced(self._index()))

    def rotate(self, roles: Sequence[str], new: Keys) -> Changed:
        """
        Give *roles* to the keys *new* alone; the same keys renew the root metadata.

        Raises:
            key-missing: Keys of the root, or of a role that has to be signed, are not here.
            index-missing: There is no index.
        """
        both = Keys({**self.keys.by_file, "new": list(new.signers.values())})
        index = IndexFolder(self.folder, pin=self.policy.file.root, resuming=True)
        with index.require().changing(both, self.policy.file.roles) as change:
            change.rotate(roles, [signer.public_key for signer in new.signers.values()])
        return self._changed()

    def _changed(self, *names: str, removed: Iterable[str] = ()) -> Changed:
        index = self._index()
        expires = f"{min(index.expires.values()):%Y-%m-%dT%H:%M:%SZ}"
        return Changed(index.version, expires, names, tuple(removed))

    def _url(self, index: IndexFolder, requested: str) -> str:
        """Return the address of *index*: the one it has, that of the policy, or *requested*."""
        url = requested or index.facts.url or self.policy.file.url
        url = f"{url.rstrip('/')}/" if url else ""
        if not url.startswith(("https://", "http://127.0.0.1:")) or (
            index.exists and url != index.facts.url
        ):
            raise UsageError(
                "usage",
                f"The index cannot be served at {url or 'no address'}.",
                details=[f"it is served at {index.facts.url}"] if index.exists else [],
                todo="Give --url https://…, or write it into ci/release.yaml.",
            )
        return url


def _set_release(
    change: Transaction, release: Release, contents: release_draft.Contents, channel: Channel
) -> None:
    for file, data in contents.items():
        change.put(file, data)
    machines, pythons, lacks = list[Machine](), dict[str, None](), set[str]()
    for lock in release.locks:
        machines.append(lock.machine)
        pythons |= dict.fromkeys(lock.pythons)
    for wheel in release.wheels:
        for entry in wheel.proof.missing:
            lacks.add(entry.gate)
    state = ReleaseState(
        stack=release.stack,
        made=release.made,
        channel=channel,
        machines=tuple(machines),
        pythons=tuple(pythons),
        missing=tuple(sorted(lacks)),
    )
    change.set_release(release, state)


def _put_wheels(change: Transaction, wheels: Iterable[WheelFacts], release: Release) -> None:
    """Bring the wheels that the index itself keeps to their places, and METADATA beside them."""
    for facts in wheels:
        for record in release.wheels:
            if record.sha256 == facts.wheel.sha256 and not record.url:
                change.put(record, facts.path, facts.metadata)


def _with_client(change: Transaction, url: str) -> tuple[ClientWheel, ...]:
    """Return the wheels of the client in the index, with a new one if it would differ."""
    clients, carried = change.facts.clients, (url, change.fingerprint, change.root)
    with tempfile.TemporaryDirectory(prefix="client-") as name:
        for number in (max(1, len(clients)), len(clients) + 1):
            record, path, metadata = write_client(Path(name), *carried, label=str(number))
            if record in clients[-1:] or not clients:
                break
        change.put(record, path, metadata)
    return clients if record in clients else (*clients, record)


def write_client(
    folder: Path, url: str, fingerprint: str, root: bytes, *, label: str
) -> tuple[ClientWheel, Path, bytes]:
    """
    Write the wheel of the client, `sparkwright-install`, to *folder*, and return its record, its
    path and its METADATA.

    It is written directly: an installed program has no build backend, and equal inputs give equal
    bytes.

    Args:
        url: The address of the index.
        fingerprint: The sha256 of its first root: clients keep what they have seen of it by that.
        root: Its root metadata, which the client trusts at first.
        label: Local version label (PEP 440).
    """
    document = tomllib.loads(PROJECT.read_text("utf-8"))
    project = document["project"]
    included = document["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    files = {name: (PROJECT.parent / source).read_bytes() for source, name in included.items()}
    for path, data in ((CARRIED_ADDRESS, f"{url}\n{fingerprint}\n".encode()), (CARRIED_ROOT, root)):
        files[f"{PACKAGE.name}/{path.relative_to(PACKAGE).as_posix()}"] = data
    name = archive.WheelName(
        project["name"].replace("-", "_"), sparkwright.__version__, "py3-none-any"
    ).labelled(label)
    text = (
        f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {name.version}\n"
        f"Summary: {project['description']}\nLicense-Expression: {project['license']}\n"
        f"Requires-Python: {project['requires-python']}\n"
    )
    for requirement in project["dependencies"]:
        text += f"Requires-Dist: {requirement}\n"
    for extra, requirements in project["optional-dependencies"].items():
        text += f"Provides-Extra: {extra}\n"
        for requirement in requirements:
            text += f'Requires-Dist: {requirement}; extra == "{extra}"\n'
    scripts = "".join(f"{script} = {target}\n" for script, target in project["scripts"].items())
    dist_info = {"entry_points.txt": f"[console_scripts]\n{scripts}".encode()}
    path = archive.write(folder, name, files, text, pure=True, dist_info=dist_info)
    record = ClientWheel(
        name=path.name,
        size=path.stat().st_size,
        sha256=sha256_file(path),
        version=name.version,
        metadata=sha256_bytes(text.encode()),
        requires_python=project["requires-python"],
    )
    return record, path, text.encode()


def _require_free_names(index: IndexFolder, wheels: Iterable[WheelFacts]) -> None:
    """Raise `wheel-name-taken` for a file name that the index has, or had, for other bytes."""
    published = index.wheels
    for facts in wheels:
        wheel = facts.wheel
        earlier = published.get(wheel.name, wheel).sha256
        taken = index.facts.retired.get(wheel.name, earlier)
        if taken != wheel.sha256:
            raise ReleaseError(
                "wheel-name-taken",
                f"The index has, or once had, {wheel.name} with other bytes.",
                details=[f"published: {taken}", f"now:       {wheel.sha256}"],
            )


def _require_order(
    index: IndexFolder,
    stack: str,
    channel: Channel,
    wheels: Sequence[ReleaseWheel],
) -> None:
    """
    Require that pip would prefer *wheels* to what *channel* offers of the same stack.

    Raises:
        version-order: It offers a higher version.
    """
    for entry in index.of_stack(stack):
        if entry.state.yanked or channel not in ("candidate", entry.state.channel):
            continue
        name = entry.release.name
        for wheel, other in itertools.product(wheels, entry.release.wheels):
            same = (other.project, other.machine) == (wheel.project, wheel.machine)
            older = Version(wheel.version) <= Version(other.version)
            if same and older and other.sha256 != wheel.sha256:
                raise ReleaseError(
                    "version-order",
                    f"pip would pass over {wheel.name}.",
                    details=[f"{name} offers {other.name}"],
                    todo=f"Raise `label` in forks/{stack}/stack.yaml above that of {name} "
                    f"(spark.2026.11 to spark.2026.11.1) and build again, or yank {name}.",
                )


def _same_release(
    index: IndexFolder, stack: str, wheels: Sequence[WheelFacts]
) -> IndexEntry | None:
    """Return the release of exactly *wheels*; raise `release-yanked` if it is yanked."""
    hashes = {facts.wheel.sha256 for facts in wheels}
    for entry in index.of_stack(stack):
        if {wheel.sha256 for wheel in entry.release.wheels} == hashes:
            _require_offered(entry)
            return entry
    return None


def _require_offered(entry: IndexEntry) -> None:
    if entry.state.yanked:
        raise ClientError(
            "release-yanked",
            f"{entry.release.name} is yanked.",
            details=[f"because {entry.state.yanked}"],
            todo="A fix is a new version: raise `label` in stack.yaml and build again.",
        )
