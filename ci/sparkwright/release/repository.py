"""
The index in a folder: a TUF repository of static files, and the transaction that changes it.

```
metadata/timestamp.json  N.snapshot.json  N.targets.json  N.root.json
targets/releases/<sha256>.<name>.json      one TUF target per release
files/<sha256>/<filename>                  every other file, named by hash in the releases
```

The commit point is the rename of ``timestamp.json``. Everything before it is addressed by content
or has a version that no published metadata refers to, so a client reads the old index or the new
one, wherever a publisher is killed.
"""

import contextlib
import copy
import io
import shutil
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import msgspec
from securesystemslib.signer import Key, Signer
from tuf.api.exceptions import RepositoryError, UnsignedMetadataError
from tuf.api.metadata import (
    Metadata,
    MetaFile,
    Root,
    Snapshot,
    TargetFile,
    Targets,
    Timestamp,
)
from tuf.api.serialization import DeserializationError

from sparkwright.client import ClientError
from sparkwright.client.index import require_distinct_keys
from sparkwright.client.records import (
    LARGEST_RELEASE,
    Release,
    ReleaseFile,
    ReleaseState,
    ReleaseWheel,
    number,
    target_path,
)
from sparkwright.core.files import Sha256, canonical, read_bytes, sha256_bytes, sha256_file
from sparkwright.core.store import UNFINISHED, flush, locked, replacing, translate_disk_full
from sparkwright.release import ReleaseError, pages
from sparkwright.release.keys import Keys
from sparkwright.release.policy import Roles

#: In the folder of the index. Servers need not serve names that begin with a dot.
LOCK = ".lock"
#: Pages, which are written after the root metadata and replace those that are there.
PAGES = ("index.html", "releases", "simple")
#: The folders that the publisher writes into.
FOLDERS = ("files", "metadata", "releases", "simple", "targets")
#: The field of the targets metadata that is ours.
FIELD = "sparkwright"
#: The roles that every change signs.
RENEWAL = ("snapshot", "timestamp")

#: Bytes of the largest metadata file or release record.
LARGEST = 64 << 20


class ClientWheel(ReleaseFile, frozen=True, kw_only=True):
    """A wheel of the client that carries the address and the root of the index."""

    version: str
    metadata: Sha256
    requires_python: str = ""


class IndexFacts(msgspec.Struct, frozen=True):
    """
    What the index says of itself in its signed targets metadata.

    Attributes:
        url: Where it is served, with a final slash; empty if unknown.
        retired: File name → sha256 of wheels that were removed; the names are never used again.
        clients: Wheels of the client, the newest last.
        gpu: The compute capability of the GPU that every release is for; by default a Spark's.
    """

    url: str = ""
    retired: dict[str, Sha256] = {}
    clients: tuple[ClientWheel, ...] = ()
    gpu: str = "12.1"


class IndexEntry(msgspec.Struct, frozen=True):
    """A release of the index, and how it stands."""

    release: Release
    state: ReleaseState


class IndexFolder:
    """
    The index in *folder*, as it was when it was read.

    Every signature is checked, so that nobody who can write to the folder gets a publisher to sign
    what no publisher published. Expired metadata is accepted, as it is to be renewed.

    Args:
        pin: The fingerprint of root 1; empty to accept any.
        resuming: Also accept metadata that only the root before the newest one admits, as a
            rotation of keys that was killed leaves them.

    Attributes:
        metadata: What is published, by role; without a root, and of version 0, if there is no index
            yet.
        published_timestamp: The bytes of the timestamp metadata; empty if there is no index yet.
        facts: What the index says of itself.

    Raises:
        index-damaged: A file is missing or damaged, or its signatures do not suffice.
    """

    def __init__(self, folder: Path, *, pin: str = "", resuming: bool = False) -> None:
        self.folder, self._pin = folder, pin
        self.metadata: dict[str, Metadata[Any]] = {}
        for role in (Targets, Snapshot, Timestamp):
            self.metadata[role.type] = Metadata(role())
            self.metadata[role.type].signed.version = 0
        self.published_timestamp, self.facts = b"", IndexFacts()
        try:
            if odd := _irregular(folder):
                raise ValueError(f"neither a file nor a folder, or one for the other: {odd}")
            self._read(resuming=resuming)
        # A role's file that holds another role's metadata lacks attributes.
        except (
            *(OSError, ValueError, LookupError, AttributeError),
            *(RepositoryError, DeserializationError),
        ) as error:
            cause = f"{type(error).__name__}: {error}"[:500]
            raise damaged(f"{folder} is not a valid index.", [cause]) from error

    def _read(self, *, resuming: bool) -> None:
        roots: list[Metadata[Root]] = []
        while (path := self.metadata_path("root", len(roots) + 1)).exists():
            root: Metadata[Root] = Metadata.from_bytes(_bytes(path))
            for admitting in (*roots[-1:], root):
                admitting.signed.verify_delegate("root", root.signed_bytes, root.signatures)
            require_distinct_keys(root.signed)
            if root.signed.version != len(roots) + 1:
                raise ValueError(f"{path.name} is of version {root.signed.version}")
            roots.append(root)
            self.metadata["root"] = root
        if self._pin and roots and self.fingerprint != self._pin:
            raise ValueError(f"its root is {self.fingerprint}, and the policy says {self._pin}")
        for name in PAGES:
            if not roots and (self.folder / name).exists():
                raise ValueError(f"it has no root metadata, and holds {name}")
        timestamp = self.metadata_path("timestamp")
        if not timestamp.exists():
            return
        admitted_by = roots[-2:] if resuming else roots[-1:]
        self.published_timestamp = _bytes(timestamp)
        signed = self._load(admitted_by, "timestamp")
        signed = self._load(admitted_by, "snapshot", signed.snapshot_meta)
        signed = self._load(admitted_by, "targets", signed.meta["targets.json"])
        self.facts = msgspec.convert(signed.unrecognized_fields.get(FIELD, {}), IndexFacts)

    def _load(
        self, admitted_by: Sequence[Metadata[Root]], role: str, meta: MetaFile | None = None
    ) -> Any:
        """
        Read the metadata of *role*, which one of the roots *admitted_by* has to admit, and return
        what it signs.

        Args:
            meta: Its version and hash by other metadata; None for the timestamp.
        """
        data = _bytes(self.metadata_path(role, meta.version if meta else 0))
        if meta:
            meta.verify_length_and_hashes(data)
        metadata: Metadata[Any] = Metadata.from_bytes(data)
        if not any(_admits(root.signed, role, metadata) for root in admitted_by):
            # The library raises an error that says why no root admits it.
            admitted_by[-1].signed.verify_delegate(role, metadata.signed_bytes, metadata.signatures)
        self.metadata[role] = metadata
        return metadata.signed

    def metadata_path(self, role: str, version: int = 0) -> Path:
        """Return the file of the metadata of *role*."""
        # Only that of the timestamp has no version in its name.
        name = "timestamp.json" if role == "timestamp" else f"{version}.{role}.json"
        return self.folder / "metadata" / name

    @property
    def root(self) -> Metadata[Root] | None:
        """The newest root; None if there is no index yet."""
        return self.metadata.get("root")

    @property
    def exists(self) -> bool:
        """Whether the index was published."""
        return bool(self.published_timestamp)

    def require(self) -> Self:
        """Return it; raise `index-missing` if it was not published."""
        if not self.exists:
            raise ClientError("index-missing", f"There is no index in {self.folder}.")
        return self

    @property
    def version(self) -> int:
        """The version of the timestamp metadata; 0 for an index that was not published yet."""
        return int(self.metadata["timestamp"].signed.version)

    @property
    def expires(self) -> dict[str, datetime]:
        """When the metadata of each role expires."""
        return {role: metadata.signed.expires for role, metadata in self.metadata.items()}

    @property
    def fingerprint(self) -> str:
        """The sha256 of root 1, which a user compares; empty without one."""
        path = self.metadata_path("root", 1)
        return sha256_file(path) if path.exists() else ""

    @cached_property
    def entries(self) -> dict[str, IndexEntry]:
        """
        Name → release, in the order of publication.

        Raises:
            index-damaged: A release is missing or is not the signed one.
        """
        entries = sorted(
            map(self._entry, self.metadata["targets"].signed.targets.values()),
            key=lambda entry: (entry.release.made, number(entry.release.name)),
        )
        return {entry.release.name: entry for entry in entries}

    def _entry(self, target: TargetFile) -> IndexEntry:
        try:
            data = _bytes(self.folder / "targets" / target.get_prefixed_paths()[0])
            target.verify_length_and_hashes(data)
            entry = IndexEntry(
                msgspec.json.decode(data, type=Release),
                msgspec.convert(target.custom, ReleaseState),
            )
            if target_path(entry.release.name) != target.path:
                raise ValueError(f"it is the release {entry.release.name}")
        except (OSError, ValueError, RepositoryError) as error:
            raise damaged(
                f"{target.path} is not the release that was signed.", [str(error)[:500]]
            ) from error
        return entry

    @property
    def files(self) -> list[ReleaseFile]:
        """Every file that releases name, and the wheels of the client."""
        files: list[ReleaseFile] = list(self.facts.clients)
        for entry in self.entries.values():
            files += entry.release.files
        return files

    @property
    def wheels(self) -> dict[str, ReleaseWheel]:
        """File name → wheel of a release."""
        releases = self.entries.values()
        return {wheel.name: wheel for entry in releases for wheel in entry.release.wheels}

    def entry(self, name: str) -> IndexEntry:
        """Return the release *name*; raise `release-unknown` if there is none."""
        if name not in self.entries:
            raise ClientError(
                "release-unknown",
                f"The index has no release {name or 'yet'}.",
                details=list(self.entries)[-10:],
            )
        return self.entries[name]

    def of_stack(self, stack: str) -> list[IndexEntry]:
        """Return the releases of *stack*, oldest first."""
        return [entry for entry in self.entries.values() if entry.state.stack == stack]

    def require_own(self, keys: Keys) -> None:
        """
        Require that the root is pinned, or that own keys signed the index as it is.

        Who can write to the folder could replace the whole index by one that admits the
        publisher's keys beside others, and get its content signed by them.

        Raises:
            index-unpinned: Neither is so.
        """
        if self._pin or self.root is None or not self.exists:
            return
        root = self.root.signed
        for role in ["root"] if keys.of_role(root, "root") else ["targets", "timestamp"]:
            metadata = self.metadata[role]
            own = keys.of_role(root, role)
            signed = root.get_verification_result(
                role, metadata.signed_bytes, metadata.signatures
            ).signed
            if own and own.keys().isdisjoint(signed):
                raise ReleaseError(
                    "index-unpinned",
                    f"None of your keys signed {role} of {self.folder}, whose root is not pinned.",
                    details=[f"fingerprint of root 1: {self.fingerprint}"],
                )

    @contextlib.contextmanager
    def changing(self, keys: Keys, roles: Roles) -> Iterator["Transaction"]:
        """
        Yield a transaction that is committed at the end of the block, if that raises nothing; then
        the pages are written.

        Raises:
            key-missing: The keys do not suffice. index-unpinned: Nothing ties the index to them.
            Others: as `locked`.
        """
        transaction = Transaction(self, keys, roles)
        with self.locked():
            yield transaction
            transaction.commit()
            with self.writing():
                pages.write(IndexFolder(self.folder, pin=self._pin))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """
        Hold the lock of the index for the block.

        Raises:
            store-busy: Another publisher holds it. index-moved: The index changed since it was
                read. index-unwritable: The folder cannot be written. disk-full: There is no room.
        """
        failure = partial(ReleaseError, "index-unwritable")
        lock = locked(self.folder / LOCK, str(self.folder), wait=False, failure=failure)
        with contextlib.ExitStack() as held:
            with self.writing():
                self.folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(lock)
            timestamp = self.metadata_path("timestamp")
            present = _bytes(timestamp) if timestamp.exists() else b""
            next_root = self.metadata_path(
                "root", 1 + (self.root.signed.version if self.root else 0)
            )
            if present != self.published_timestamp or next_root.exists():
                raise ReleaseError(
                    "index-moved",
                    f"{self.folder} was changed by somebody else.",
                    details=[f"read at version {self.version}"],
                )
            yield

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """
        Raise `index-unwritable` or `disk-full` for what the operating system refuses within the
        block, which uses nothing but the folder of the index.
        """
        try:
            with translate_disk_full(self.folder):
                yield
        except OSError as error:
            raise ReleaseError(
                "index-unwritable", f"{self.folder} cannot be written.", details=[str(error)]
            ) from error


class Transaction:
    """
    A change of an index, which `IndexFolder.changing` commits.

    Raises:
        index-unpinned: Nothing ties the index to *keys*.
        key-missing: They do not suffice for a new index.

    Attributes:
        facts: What the index is to say of itself.
    """

    def __init__(self, index: IndexFolder, keys: Keys, roles: Roles) -> None:
        index.require_own(keys)
        self._index, self._keys, self._roles = index, keys, roles
        self._targets = copy.deepcopy(index.metadata["targets"].signed)
        self._signing: set[str] = set()
        self.facts = index.facts
        self._root = index.root or self._first_root()
        if not index.exists:
            self.schedule_signing("targets")

    def _first_root(self) -> Metadata[Root]:
        """Return root 1, whose keys are those of the files' names."""
        root = Root(version=1, consistent_snapshot=True)
        for role in root.roles:
            root.roles[role].threshold = getattr(self._roles, role).threshold
            for signer in self._keys.for_new_index(role):
                root.add_key(signer.public_key, role)
        self._keys.require(root, root.roles)
        return self._signed(root, "root", root)

    @property
    def root(self) -> bytes:
        """The root metadata that clients trust after the change."""
        return self._root.to_bytes()

    @property
    def fingerprint(self) -> str:
        """The sha256 of root 1, which the change may be about to write."""
        return self._index.fingerprint or sha256_bytes(self.root)

    def put(self, file: ReleaseFile, source: Path | bytes, metadata: bytes = b"") -> None:
        """
        Bring *file* to its place, and *metadata* beside it (PEP 658); nothing is written if it is
        there.

        Raises:
            publish-failed: *source* cannot be read, or has other bytes.
        """
        path = self._index.folder / file.path
        if not (path.is_file() and sha256_file(path) == file.sha256):
            self._write(path, source, file.sha256)
        beside = path.with_name(f"{path.name}.metadata")
        if metadata and not (beside.is_file() and beside.read_bytes() == metadata):
            self._write(beside, metadata)

    def set_release(self, release: Release, state: ReleaseState) -> None:
        """
        Add the release, or replace the one of its name.

        Raises:
            release-unreadable: No client could read it.
        """
        self.schedule_signing("targets")
        data = canonical(release)
        try:
            msgspec.json.decode(data, type=Release)
            msgspec.convert(msgspec.to_builtins(state), ReleaseState)
            if len(data) > LARGEST_RELEASE:
                raise ValueError(f"it has {len(data)} bytes, and may have {LARGEST_RELEASE}")
        except ValueError as error:
            raise ReleaseError(
                "release-unreadable",
                f"No client could read {release.name}.",
                details=[str(error)[:500]],
            ) from error
        target = TargetFile.from_data(target_path(release.name), data, ["sha256"])
        target.unrecognized_fields["custom"] = msgspec.to_builtins(state)
        self._write(self._index.folder / "targets" / target.get_prefixed_paths()[0], data)
        self._targets.targets[target_path(release.name)] = target

    def set_state(self, name: str, state: ReleaseState) -> None:
        """Change how the release *name* stands."""
        self.schedule_signing("targets")
        target = self._targets.targets[target_path(name)]
        target.unrecognized_fields["custom"] = msgspec.to_builtins(state)

    def remove(self, release: Release) -> None:
        """Remove *release*; the names of its wheels stay taken."""
        self.schedule_signing("targets")
        del self._targets.targets[target_path(release.name)]
        retired = self.facts.retired | {wheel.name: wheel.sha256 for wheel in release.wheels}
        self.facts = msgspec.structs.replace(self.facts, retired=retired)

    def schedule_signing(self, *roles: str) -> None:
        """
        Have the commit sign new versions of *roles*, of snapshot and of timestamp.

        Raises:
            key-missing: The keys do not suffice for one of them.
        """
        self._signing |= {*roles, *RENEWAL}
        self._keys.require(self._root.signed, sorted(self._signing))

    def holds(self, role: str) -> bool:
        """Return whether the keys suffice for *role*."""
        held = len(self._keys.of_role(self._root.signed, role))
        return held >= self._root.signed.roles[role].threshold

    def rotate(self, names: Iterable[str], keys: Sequence[Key]) -> None:
        """
        Give the roles *names* to *keys* alone, in a new root with the thresholds of the policy.

        Every role whose published metadata the new root does not admit is signed again.

        Raises:
            key-missing: The old keys of root, or the new ones of a role to be signed, do not
                suffice.
        """
        old, root = self._root.signed, copy.deepcopy(self._root.signed)
        for role in root.roles:
            root.roles[role].threshold = getattr(self._roles, role).threshold
        for role in names:
            for keyid in list(root.roles[role].keyids):
                root.revoke_key(keyid, role)
            for key in keys:
                root.add_key(key, role)
        self._keys.require(old, ["root"])
        self._keys.require(root, ["root"])
        # If nothing differs, a rotation that was killed after its root was written goes on.
        if "root" in names or (root.roles, root.keys) != (old.roles, old.keys):
            root.version += 1
            self._root = self._signed(root, "root", old, root)
        for role in ("targets", *RENEWAL):
            if role in names or not _admits(self._root.signed, role, self._index.metadata[role]):
                self.schedule_signing(role)

    def commit(self) -> None:
        """
        Write the metadata, and then the timestamp, which makes the change visible.

        With a new root, the old root's keys sign too if they are here. Clients then accept the
        metadata before and after they see the new root, which is written last.
        """
        old, staged = self._index.root, self._stage()
        order = list(staged)
        if self._root is not old:
            admitted = old is not None and all(
                _admits(old.signed, role, metadata) for role, metadata in staged.items()
            )
            # Before the timestamp, clients that know the old root alone are refused.
            order.insert(len(order) if admitted else -1, "root")
            staged["root"] = self._root
        for role in order:
            path = self._index.metadata_path(role, staged[role].signed.version)
            self._write(path, staged[role].to_bytes())

    def _stage(self) -> dict[str, Metadata[Any]]:
        """Return the next version of the roles that have to be signed, the timestamp last."""
        staged: dict[str, Metadata[Any]] = {}
        metadata = copy.deepcopy(self._index.metadata)
        snapshot, timestamp = metadata["snapshot"].signed, metadata["timestamp"].signed
        if "targets" in self._signing:
            self._targets.unrecognized_fields[FIELD] = msgspec.to_builtins(self.facts)
            snapshot.meta["targets.json"] = self._next(self._targets, staged)
        if self._signing:
            timestamp.snapshot_meta = self._next(snapshot, staged)
            self._next(timestamp, staged)
        return staged

    def _next(self, signed: Any, staged: dict[str, Metadata[Any]]) -> MetaFile:
        """Add the next version of *signed* to *staged*; return how other metadata names it."""
        signed.version += 1
        old = self._index.root or self._root
        metadata = self._signed(signed, signed.type, old.signed, self._root.signed)
        staged[signed.type] = metadata
        return MetaFile.from_data(signed.version, metadata.to_bytes(), ["sha256"])

    def _signed(self, signed: Any, role: str, *roots: Root) -> Metadata[Any]:
        """Return *signed* with a new expiry, signed by the keys that hold *role* by *roots*."""
        days = getattr(self._roles, role).days
        signed.expires = datetime.now(UTC).replace(microsecond=0) + timedelta(days=days)
        metadata: Metadata[Any] = Metadata(signed)
        signers = dict[str, Signer]()
        for root in roots:
            signers |= self._keys.of_role(root, role)
        for signer in signers.values():
            try:
                metadata.sign(signer, append=True)
            except UnsignedMetadataError as error:
                raise ReleaseError(
                    "identity-unusable", f"{role} cannot be signed.", details=[str(error)[:500]]
                ) from error
        return metadata

    def _write(self, path: Path, source: Path | bytes, sha256: str = "") -> None:
        """
        Write the file *path*, whole or not at all.

        Raises:
            publish-failed: *source* cannot be read, or has other bytes.
        """
        try:
            stream = io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
        except OSError as error:
            raise ReleaseError(
                "publish-failed", f"{source!s} cannot be read.", details=[str(error)]
            ) from error
        with stream, self._index.writing(), replacing(path) as temporary:
            with temporary.open("wb") as target:
                shutil.copyfileobj(stream, target, 1 << 20)
            if sha256 and (actual := sha256_file(temporary)) != sha256:
                raise ReleaseError(
                    "publish-failed",
                    f"{path.name} changed while it was read.",
                    details=[f"read:    {actual}", f"decided: {sha256}"],
                )
            flush(temporary)
        with self._index.writing():
            flush(path.parent)


def remove_unreferenced(index: IndexFolder) -> list[str]:
    """
    Remove what killed runs left and what no release refers to, and return the paths.

    Metadata stays: it is small, and clients may be reading it.
    """
    with index.locked(), index.writing():
        folder = index.folder
        used = {f"files/{file.sha256}" for file in index.files}
        for target in index.metadata["targets"].signed.targets.values():
            used.add(f"targets/{target.get_prefixed_paths()[0]}")
        digest, removed = "[0-9a-f]" * 64, list[str]()
        for pattern in (f"files/{digest}", f"targets/releases/{digest}.*", f"**/{UNFINISHED}*"):
            for path in sorted(folder.glob(pattern)):
                name = path.relative_to(folder).as_posix()
                if name not in used and path.exists():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                    removed.append(name)
    return removed


def damaged_files(folder: Path, files: Sequence[ReleaseFile]) -> list[str]:
    """
    Return the paths of *files* that the index keeps, and of METADATA beside wheels, which are
    missing or other bytes.
    """
    own = dict[str, str]()
    for file in files:
        if not file.url:
            own[file.path] = file.sha256
            if isinstance(file, ReleaseWheel | ClientWheel):
                own[f"{file.path}.metadata"] = file.metadata
    return [
        path
        for path, sha256 in own.items()
        if not (folder / path).is_file() or sha256_file(folder / path) != sha256
    ]


def _irregular(folder: Path) -> Path | None:
    """Return what a write would follow, or a read wait for: a link, pipe, or file for a folder."""
    front = folder / "index.html"
    if folder.exists() and not folder.is_dir():
        return folder
    if front.exists() and not front.is_file():
        return front
    for top in map(folder.joinpath, FOLDERS):
        if top.is_symlink() or (top.exists() and not top.is_dir()):
            return top
        for path in top.rglob("*"):
            if path.is_symlink() or (path.exists() and not (path.is_file() or path.is_dir())):
                return path
    return None


def _bytes(path: Path) -> bytes:
    """Return a file of the index; raise `index-damaged` if it is not a regular one."""
    return read_bytes(path, limit=LARGEST, failure=partial(ClientError, "index-damaged"))


def damaged(what: str, details: Sequence[str]) -> ClientError:
    """Return the error `index-damaged`."""
    return ClientError("index-damaged", what, details=details)


def _admits(root: Root, role: str, metadata: Metadata[Any]) -> bool:
    """Return whether *metadata* has the signatures that *root* asks for."""
    return bool(root.get_verification_result(role, metadata.signed_bytes, metadata.signatures))
