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

from __future__ import annotations

import contextlib
import copy
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout
from securesystemslib.signer import KEY_FOR_TYPE_AND_SCHEME, Key, Signer, SigstoreKey
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

from sparkwright.client.errors import ClientError
from sparkwright.client.records import (
    Release,
    ReleaseFile,
    ReleaseState,
    ReleaseWheel,
    Sha256,
    decode_release,
    number,
    target_path,
)
from sparkwright.core.files import canonical, read_bytes, sha256_bytes, sha256_file
from sparkwright.core.store import UNFINISHED, flush, translate_disk_full
from sparkwright.release.errors import ReleaseError, TrustError
from sparkwright.release.keys import Keys
from sparkwright.release.policy import Roles

#: In the folder of the index. Servers need not serve names that begin with a dot.
LOCK = ".lock"
#: What is written after the root metadata, over what is there.
PAGES = ("index.html", "releases", "simple")
#: The folders that the publisher writes into.
FOLDERS = ("files", "metadata", "releases", "simple", "targets")
#: The beginning of the names below ``files`` and ``targets``.
_HASH = re.compile(r"[0-9a-f]{64}(?![0-9a-f])")
#: The field of the targets metadata that is ours.
FIELD = "sparkwright"
#: The roles that every change signs.
RENEWAL = ("snapshot", "timestamp")

#: Bytes of the largest metadata file or release record.
LARGEST = 64 << 20

# The library reads keys of identities only on request.
KEY_FOR_TYPE_AND_SCHEME["sigstore-oidc", "Fulcio"] = SigstoreKey


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
        resuming: Also accept metadata that the root before the newest one admits: a killed
            rotation.

    Attributes:
        root: None if there is no index yet. *targets*, *snapshot*, *timestamp*: as published.
        published_timestamp: The bytes of the timestamp metadata; empty if there is no index yet.

    Raises:
        index-damaged: A file is missing or damaged, or its signatures do not suffice.
    """

    def __init__(self, folder: Path, *, pin: str = "", resuming: bool = False) -> None:
        self.folder, self._pin = folder, pin
        self.root: Metadata[Root] | None = None
        self.targets: Metadata[Targets] = Metadata(Targets())
        self.snapshot: Metadata[Snapshot] = Metadata(Snapshot())
        self.timestamp: Metadata[Timestamp] = Metadata(Timestamp())
        for metadata in (self.targets, self.snapshot, self.timestamp):
            metadata.signed.version = 0
        self.published_timestamp = b""
        self._entries: dict[str, IndexEntry] | None = None
        try:
            if odd := list(_irregular(folder)):
                raise ValueError(f"neither a file nor a folder, or one for the other: {odd[:5]}")
            self._read(resuming=resuming)
        except (OSError, ValueError, LookupError, RepositoryError, DeserializationError) as error:
            cause = f"{type(error).__name__}: {error}"[:500]
            raise damaged(f"{folder} is not a valid index.", [cause]) from error

    def _read(self, *, resuming: bool) -> None:
        roots: list[Metadata[Root]] = []
        while (path := self.metadata_path("root", len(roots) + 1)).exists():
            data = _bytes(path)
            root: Metadata[Root] = Metadata.from_bytes(data)
            (roots[-1] if roots else root).signed.verify_delegate(
                "root", root.signed_bytes, root.signatures
            )
            root.signed.verify_delegate("root", root.signed_bytes, root.signatures)
            if root.signed.version != len(roots) + 1:
                raise ValueError(f"{path.name} is of version {root.signed.version}")
            if self._pin and not roots and sha256_bytes(data) != self._pin:
                pinned = f"and the policy says {self._pin}"
                raise ValueError(f"{path.name} is {sha256_bytes(data)}, {pinned}")
            roots.append(root)
        if roots:
            self.root = roots[-1]
        elif taken := [name for name in PAGES if (self.folder / name).exists()]:
            raise ValueError(f"it has no root metadata, and holds {', '.join(taken)}")
        timestamp = self.metadata_path("timestamp")
        if not timestamp.exists():
            return
        admitting = roots[-2:] if resuming else roots[-1:]
        self.published_timestamp = _bytes(timestamp)
        self.timestamp = _verified(admitting, "timestamp", self.published_timestamp)
        meta = self.timestamp.signed.snapshot_meta
        self.snapshot = self._listed(admitting, "snapshot", meta)
        self.targets = self._listed(admitting, "targets", self.snapshot.signed.meta["targets.json"])

    def _listed(self, admitting: Sequence[Metadata[Root]], role: str, meta: MetaFile) -> Any:
        data = _bytes(self.metadata_path(role, meta.version))
        meta.verify_length_and_hashes(data)
        metadata = _verified(admitting, role, data)
        if metadata.signed.version != meta.version:
            raise ValueError(f"{role} is of version {metadata.signed.version}")
        return metadata

    def metadata_path(self, role: str, version: int | None = None) -> Path:
        """Return the file of the metadata of *role*."""
        return self.folder / "metadata" / metadata_name(role, version)

    @property
    def exists(self) -> bool:
        """Whether the index was published."""
        return bool(self.published_timestamp)

    def require(self) -> IndexFolder:
        """Return it; raise `index-missing` if it was not published."""
        if not self.exists:
            raise ClientError("index-missing", f"There is no index in {self.folder}.")
        return self

    @property
    def version(self) -> int:
        """The version of the timestamp metadata; 0 for an index that was not published yet."""
        return self.timestamp.signed.version

    @property
    def expires(self) -> dict[str, datetime]:
        """When the metadata of each role expires."""
        own: list[Metadata[Any]] = [self.targets, self.snapshot, self.timestamp]
        roles = [*([self.root] if self.root else []), *own]
        return {metadata.signed.type: metadata.signed.expires for metadata in roles}

    @property
    def fingerprint(self) -> str:
        """The sha256 of root 1, which a user compares; empty without one."""
        path = self.metadata_path("root", 1)
        return sha256_file(path) if path.exists() else ""

    @property
    def facts(self) -> IndexFacts:
        """What the index says of itself."""
        return msgspec.convert(self.targets.signed.unrecognized_fields.get(FIELD, {}), IndexFacts)

    @property
    def entries(self) -> Mapping[str, IndexEntry]:
        """
        Name → release, in the order of publication.

        Raises:
            index-damaged: A release is missing or is not the signed one.
        """
        if self._entries is None:
            entries = [self._entry(target) for target in self.targets.signed.targets.values()]
            entries.sort(key=lambda entry: (entry.release.made, number(entry.release.name)))
            self._entries = {entry.release.name: entry for entry in entries}
        return self._entries

    def _entry(self, target: TargetFile) -> IndexEntry:
        try:
            data = _bytes(self.folder / "targets" / target.get_prefixed_paths()[0])
            target.verify_length_and_hashes(data)
            entry = IndexEntry(decode_release(data), msgspec.convert(target.custom, ReleaseState))
            if entry.release.target != target.path:
                raise ValueError(f"it is the release {entry.release.name}")
        except (OSError, ValueError, RepositoryError) as error:
            raise damaged(
                f"{target.path} is not the release that was signed.", [str(error)[:500]]
            ) from error
        return entry

    @property
    def files(self) -> list[ReleaseFile]:
        """Every file that releases name, and the wheels of the client."""
        named = [file for entry in self.entries.values() for file in entry.release.files]
        return [*named, *self.facts.clients]

    def entry(self, name: str) -> IndexEntry:
        """Return the release *name*; raise `release-unknown` if there is none."""
        if name not in self.entries:
            raise ClientError(
                "release-unknown",
                f"The index has no release {name}.",
                details=list(self.entries)[-10:],
            )
        return self.entries[name]

    def before(self, release: Release) -> Release | None:
        """Return the release of the stack before *release*, unless it was removed."""
        entry = self.entries.get(release.before)
        return entry.release if entry else None

    def of_stack(self, stack: str) -> list[IndexEntry]:
        """Return the releases of *stack*, oldest first."""
        return [entry for entry in self.entries.values() if entry.state.stack == stack]

    def require_keys(self, keys: Keys, roles: Roles) -> None:
        """Require the keys of a publication; raise `key-missing` or `index-unpinned`."""
        self._require_own(keys)
        Transaction(self, keys, roles).schedule_signing("targets")

    def _require_own(self, keys: Keys) -> None:
        """
        Require that the root is pinned, or that own keys signed the index as it is.

        Who can write to the folder could replace the whole index by one that admits the
        publisher's keys beside others, and get its content signed by them.
        """
        if self._pin or self.root is None or not self.exists:
            return
        root = self.root.signed
        roles: dict[str, Metadata[Any]] = {"targets": self.targets, "timestamp": self.timestamp}
        if keys.of_role(root, "root"):
            roles = {"root": self.root}
        for role, metadata in roles.items():
            own = {signer.public_key.keyid for signer in keys.of_role(root, role)}
            signed = root.get_verification_result(
                role, metadata.signed_bytes, metadata.signatures
            ).signed
            if own and own.isdisjoint(signed):
                raise ReleaseError(
                    "index-unpinned",
                    f"None of your keys signed {role} of {self.folder}, whose root is not pinned.",
                    details=[f"fingerprint of root 1: {self.fingerprint}"],
                )

    @contextlib.contextmanager
    def changing(self, keys: Keys, roles: Roles) -> Iterator[Transaction]:
        """
        Yield a transaction that is committed at the end of the block, if that raises nothing.

        Raises:
            key-missing: The keys do not suffice. index-unpinned: Nothing ties the index to them.
            Others: as `locked`.
        """
        self._require_own(keys)
        with self.locked():
            transaction = Transaction(self, keys, roles)
            yield transaction
            transaction.commit()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """
        Hold the lock of the index for the block.

        Raises:
            index-busy: Another publisher holds it. index-moved: The index changed since it was
                read. index-unwritable: The folder cannot be written. disk-full: There is no room.
        """
        with _writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                with FileLock(self.folder / LOCK, timeout=0):
                    self._unmoved()
                    yield
            except Timeout as error:
                raise ReleaseError(
                    "index-busy", f"Another publisher works on {self.folder}."
                ) from error

    def _unmoved(self) -> None:
        timestamp, version = (
            self.metadata_path("timestamp"),
            self.root.signed.version if self.root else 0,
        )
        present = _bytes(timestamp) if timestamp.exists() else b""
        if present != self.published_timestamp or self.metadata_path("root", version + 1).exists():
            raise ReleaseError(
                "index-moved",
                f"{self.folder} was changed by somebody else.",
                details=[f"read at version {self.version}"],
            )


class Transaction:
    """
    A change of an index, whose lock is held.

    Attributes:
        facts: What the index is to say of itself.
        sent: Paths of the files that were written, not found in place.
    """

    def __init__(self, index: IndexFolder, keys: Keys, roles: Roles) -> None:
        self._index, self._keys, self._roles = index, keys, roles
        self._folder = index.folder
        self._dirty: set[Path] = set()
        self._targets = copy.deepcopy(index.targets.signed)
        self._signing: list[str] = []
        self.facts = index.facts
        self.sent: list[str] = []
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
        return self._signed(root, "root", self._keys.of_role(root, "root"))

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
            publish-failed: *source* has other bytes.
        """
        path = self._folder / file.path
        if not (path.is_file() and sha256_file(path) == file.sha256):
            self._write(path, source, file.sha256)
            self.sent.append(file.path)
        beside = path.with_name(f"{path.name}.metadata")
        if metadata and not (beside.is_file() and beside.read_bytes() == metadata):
            self._write(beside, metadata)

    def set_release(self, release: Release, state: ReleaseState) -> None:
        """Add the release, or replace the one of its name."""
        self.schedule_signing("targets")
        data = canonical(release)
        target = TargetFile.from_data(release.target, data, ["sha256"])
        target.unrecognized_fields["custom"] = msgspec.to_builtins(state)
        self._write(self._folder / "targets" / target.get_prefixed_paths()[0], data)
        self._targets.targets[release.target] = target

    def set_state(self, name: str, state: ReleaseState) -> None:
        """Change how the release *name* stands."""
        self.schedule_signing("targets")
        target = self._targets.targets[target_path(name)]
        target.unrecognized_fields["custom"] = msgspec.to_builtins(state)

    def remove(self, release: Release) -> None:
        """Remove *release*; the names of its wheels stay taken."""
        self.schedule_signing("targets")
        del self._targets.targets[release.target]
        retired = {wheel.name: wheel.sha256 for wheel in release.wheels}
        retired = {**self.facts.retired, **retired}
        self.facts = msgspec.structs.replace(self.facts, retired=retired)

    def schedule_signing(self, *roles: str) -> None:
        """
        Have the commit sign new versions of *roles*, of snapshot and of timestamp.

        Raises:
            key-missing: The keys do not suffice for one of them.
        """
        self._signing += [role for role in (*roles, *RENEWAL) if role not in self._signing]
        self._keys.require(self._root.signed, self._signing)

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
        resuming = (root.roles, root.keys) == (old.roles, old.keys)
        if "root" in names or not resuming:
            root.version += 1
            signers = [*self._keys.of_role(old, "root"), *self._keys.of_role(root, "root")]
            self._root = self._signed(root, "root", signers)
        index = self._index
        published: dict[str, Metadata[Any]] = {
            "targets": index.targets,
            "snapshot": index.snapshot,
            "timestamp": index.timestamp,
        }
        others = {
            role
            for role, metadata in published.items()
            if role in names or not _admits(self._root.signed, role, metadata)
        }
        if others:
            self.schedule_signing(*others.intersection(["targets"]))

    def commit(self) -> None:
        """
        Write the metadata, and then the timestamp, which makes the change visible.

        With a new root, the old root's keys sign too if they are here. Clients then accept the
        metadata before and after they see the new root, which is written last.
        """
        old, staged = self._index.root, self._stage()
        new = self._root is not old
        root_first = old is None or not all(
            _admits(old.signed, role, metadata) for role, metadata in staged.items()
        )
        if new and root_first:
            self._write_root()
        if "timestamp" in staged:
            self._flush()
            self._write(self._index.metadata_path("timestamp"), staged["timestamp"].to_bytes())
        if new and not root_first:
            self._write_root()
        self._flush()

    def _stage(self) -> dict[str, Metadata[Any]]:
        """Sign what has to be signed, and write it; of the timestamp, return it only."""
        staged: dict[str, Metadata[Any]] = {}
        snapshot = copy.deepcopy(self._index.snapshot.signed)
        timestamp = copy.deepcopy(self._index.timestamp.signed)
        if "targets" in self._signing:
            self._targets.unrecognized_fields[FIELD] = msgspec.to_builtins(self.facts)
            snapshot.meta["targets.json"] = self._next(self._targets, "targets", staged)
        if self._signing:
            timestamp.snapshot_meta = self._next(snapshot, "snapshot", staged)
            timestamp.version += 1
            staged["timestamp"] = self._signed(timestamp, "timestamp")
        for role in ("targets", "snapshot"):
            if role in staged:
                path = self._index.metadata_path(role, staged[role].signed.version)
                self._write(path, staged[role].to_bytes())
        return staged

    def _next(self, signed: Any, role: str, staged: dict[str, Metadata[Any]]) -> MetaFile:
        """Sign the next version of *role*, and return how other metadata names it."""
        signed.version += 1
        staged[role] = self._signed(signed, role)
        return MetaFile.from_data(signed.version, staged[role].to_bytes(), ["sha256"])

    def _signed(
        self, signed: Any, role: str, signers: Sequence[Signer] | None = None
    ) -> Metadata[Any]:
        """Return *signed* with a new expiry, signed by the role's keys of both roots."""
        days = getattr(self._roles, role).days
        signed.expires = datetime.now(UTC).replace(microsecond=0) + timedelta(days=days)
        if signers is None:
            roots = [root.signed for root in (self._index.root, self._root) if root]
            signers = [signer for root in roots for signer in self._keys.of_role(root, role)]
        metadata: Metadata[Any] = Metadata(signed)
        for signer in {signer.public_key.keyid: signer for signer in signers}.values():
            try:
                metadata.sign(signer, append=True)
            except UnsignedMetadataError as error:
                raise TrustError(
                    "identity-unusable", f"{role} cannot be signed.", details=[str(error)[:500]]
                ) from error
        return metadata

    def _write_root(self) -> None:
        self._write(
            self._index.metadata_path("root", self._root.signed.version), self._root.to_bytes()
        )

    def _write(self, path: Path, source: Path | bytes, sha256: str = "") -> None:
        """Write the file *path*, whole or not at all; raise `publish-failed` for other bytes."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{UNFINISHED}{secrets.token_hex(8)}")
        try:
            if isinstance(source, bytes):
                temporary.write_bytes(source)
            else:
                shutil.copyfile(source, temporary)
            if sha256 and (actual := sha256_file(temporary)) != sha256:
                raise ReleaseError(
                    "publish-failed",
                    f"{path.name} changed while it was read.",
                    details=[f"read:    {actual}", f"decided: {sha256}"],
                )
            temporary.chmod(0o644)
            flush(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        self._dirty.update((path.parent, path.parent.parent))

    def _flush(self) -> None:
        """Write the names of new files through to the disk."""
        for folder in self._dirty:
            flush(folder)
        self._dirty.clear()


def metadata_name(role: str, version: int | None = None) -> str:
    """Return the file name of the metadata of *role*; only the timestamp has no version."""
    return f"{role}.json" if version is None else f"{version}.{role}.json"


def remove_unreferenced(index: IndexFolder) -> list[str]:
    """
    Remove what killed runs left and what no release refers to, and return the paths.

    Metadata of the version before the present one stays, for clients that are reading it.
    """
    with index.locked():
        folder = index.folder
        used = {f"files/{file.sha256}" for file in index.files}
        used |= {
            f"targets/{target.get_prefixed_paths()[0]}"
            for target in index.targets.signed.targets.values()
        }
        used |= {
            f"metadata/{metadata_name(role, version)}"
            for role, current in (
                ("targets", index.targets.signed.version),
                ("snapshot", index.snapshot.signed.version),
            )
            for version in (current, current - 1)
        }
        patterns = (
            "files/*",
            "targets/releases/*",
            "metadata/*.targets.json",
            "metadata/*.snapshot.json",
            f"**/{UNFINISHED}*",
        )
        removed = []
        for path in (path for pattern in patterns for path in sorted(folder.glob(pattern))):
            name = path.relative_to(folder).as_posix()
            named_by_hash = name.startswith(("files/", "targets/")) and UNFINISHED not in name
            ours = not named_by_hash or _HASH.match(path.name)
            if ours and name not in used and path.exists():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                removed.append(name)
    return removed


def damaged_files(folder: Path, files: Sequence[ReleaseFile]) -> list[str]:
    """
    Return the paths of *files* that the index keeps, and of METADATA beside wheels, which are
    missing or other bytes.
    """
    wheels = [file for file in files if isinstance(file, ReleaseWheel | ClientWheel)]
    own = {file.path: file.sha256 for file in files if not file.url}
    own |= {f"{wheel.path}.metadata": wheel.metadata for wheel in wheels if not wheel.url}
    return [
        path
        for path, sha256 in own.items()
        if not (folder / path).is_file() or sha256_file(folder / path) != sha256
    ]


def _irregular(folder: Path) -> Iterator[str]:
    """Yield what a write would follow, or a read wait for: links, pipes, and files for folders."""
    if folder.exists() and not folder.is_dir():
        yield str(folder)
    front = folder / "index.html"
    if front.exists() and not front.is_file():
        yield front.name
    for name in FOLDERS:
        path = folder / name
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            yield name
            continue
        for top, names, members in os.walk(path):
            for part in (*names, *members):
                mode = os.lstat(f"{top}/{part}").st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    yield os.path.relpath(f"{top}/{part}", folder)


def _bytes(path: Path) -> bytes:
    """Return a file of the index; raise `index-damaged` if it is not a regular one."""
    return read_bytes(path, limit=LARGEST, failure=partial(ClientError, "index-damaged"))


def damaged(what: str, details: Sequence[str]) -> ClientError:
    """Return the error `index-damaged`."""
    return ClientError("index-damaged", what, details=details)


def _verified(roots: Sequence[Metadata[Root]], role: str, data: bytes) -> Any:
    """Return metadata that one of *roots* admits; raise what TUF raises for the newest one."""
    metadata: Metadata[Any] = Metadata.from_bytes(data)
    if not any(_admits(root.signed, role, metadata) for root in roots):
        roots[-1].signed.verify_delegate(role, metadata.signed_bytes, metadata.signatures)
    return metadata


def _admits(root: Root, role: str, metadata: Metadata[Any]) -> bool:
    result = root.get_verification_result(role, metadata.signed_bytes, metadata.signatures)
    return bool(result)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raise `disk-full` or `index-unwritable` for what the operating system refuses."""
    try:
        with translate_disk_full(folder):
            yield
    except OSError as error:
        raise ReleaseError(
            "index-unwritable", f"{folder} cannot be written.", details=[str(error)]
        ) from error
