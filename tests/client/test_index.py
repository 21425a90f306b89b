"""Attacks on the index, as TUF names them, and an old client that follows a rotation."""

import functools
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from securesystemslib.signer import CryptoSigner, Key, SSlibKey
from tests.client.test_refusals import HTML, answer, dripping, endless
from tests.client.world import ONE, TWO, User, World, wheel
from tests.refusals import refusal
from tests.support import tufindex
from tuf.api.metadata import MetaFile

from sparkwright.client import index as client_index
from sparkwright.release.keys import KEY_ROLES, Keys
from sparkwright.release.repository import IndexFolder

PAST = datetime.now(UTC).replace(microsecond=0) - timedelta(days=1)


def keep(signed: Any) -> None:
    """Change nothing."""


def expire(signed: Any) -> None:
    signed.expires = PAST


def rewrite(
    world: World,
    role: str,
    change: Callable[[Any], object] = keep,
    *,
    keys: Keys | None = None,
    count: int = 9,
    index: IndexFolder | None = None,
) -> None:
    """
    Change the metadata of *role*, and sign it, and whatever names it, with at most *count* of *keys*.

    Args:
        keys: Those of the publisher by default. *index*: as it was read before an earlier change.
    """
    index, held = index or IndexFolder(world.root), keys or world.keys
    roles = {name: index.metadata[name] for name in ("root", "targets", "snapshot", "timestamp")}
    change(roles[role].signed)
    # Each of the last three is named by the next one.
    for name in [role] if role == "root" else list(roles)[list(roles).index(role) :]:
        metadata = roles[name]
        metadata.signed.version += 1
        metadata.signatures.clear()
        for signer in held.for_new_index(name)[: count if name == role else 9]:
            metadata.sign(signer, append=True)
        version, data = metadata.signed.version, metadata.to_bytes()
        index.metadata_path(name, version).write_bytes(data)
        if name == "targets":
            roles["snapshot"].signed.meta["targets.json"] = MetaFile.from_data(
                version, data, ["sha256"]
            )
        elif name == "snapshot":
            roles["timestamp"].signed.snapshot_meta = MetaFile.from_data(version, data, ["sha256"])


def _mixed(world: World) -> None:
    """Serve the snapshot of one version under the name of the next."""
    index = IndexFolder(world.root)
    old, version = next(world.root.glob("metadata/*.snapshot.json")), index.version + 1

    def next_version(signed: Any) -> None:
        signed.snapshot_meta = MetaFile(version)

    rewrite(world, "timestamp", next_version, index=index)
    shutil.copy(old, old.with_name(f"{version}.snapshot.json"))


def at(place: str, spoil: Callable[[Path], object]) -> Callable[[World], object]:
    """Return what spoils one file of the index."""
    return lambda world: spoil(next(world.root.glob(place)))


def flipped(path: Path) -> None:
    """Change one letter in a signed file."""
    before = path.read_bytes()
    path.write_bytes(before.replace(b'"expires":"2', b'"expires":"3', 1))
    assert path.read_bytes() != before


def serving(place: str, fault: Callable[[Any], object]) -> Callable[[World], object]:
    """Return what has the server answer in another way for one file of the index."""

    def spoil(world: World) -> None:
        world.faults[next(world.root.glob(place)).relative_to(world.root).as_posix()] = fault

    return spoil


def _release_of_another(world: World) -> None:
    """Name one release's file in the entry of another."""
    world.publish(TWO, [wheel("demo", "1.1")])

    def change(targets: Any) -> None:
        one, two = (targets.targets[f"releases/{name}.json"] for name in (ONE, TWO))
        two.hashes, two.length = one.hashes, one.length

    path = next(world.root.glob(f"targets/releases/*.{ONE}.json"))
    shutil.copy(path, path.with_name(path.name.replace(ONE, TWO)))
    rewrite(world, "targets", change)


def with_state(change: Callable[[Any], object], name: str = ONE) -> Callable[[World], None]:
    """Return what changes how the release *name* stands."""

    def edit(targets: Any) -> None:
        change(targets.targets[f"releases/{name}.json"].unrecognized_fields["custom"])

    return lambda world: rewrite(world, "targets", edit)


def after_root(change: Callable[[Any], object], times: int = 1) -> Callable[[World], None]:
    """Return what signs *times* new roots with *change*, and then targets with the keys that are here."""

    def attack(world: World) -> None:
        index = IndexFolder(world.root)
        for _ in range(times):
            rewrite(world, "root", change, index=index)
        rewrite(world, "targets", index=index)

    return attack


def _two_of_two(root: Any, other: Key | None = None) -> None:
    """Have two keys sign the targets: *other*, or one that is not here, besides."""
    root.add_key(other or CryptoSigner.generate_ed25519().public_key, "targets")
    root.roles["targets"].threshold = 2


def _revoked(root: Any) -> None:
    for keyid in list(root.roles["targets"].keyids):
        root.revoke_key(keyid, "targets")
    root.add_key(CryptoSigner.generate_ed25519().public_key, "targets")


def _one_key_twice(world: World) -> None:
    """Name one key under two ids, of which both have to sign."""
    [signer] = world.keys.by_file["targets"]
    key = signer.public_key
    other = SSlibKey("f" * 64, key.keytype, key.scheme, key.keyval)
    world.keys = Keys({**world.keys.by_file, "targets": [signer, CryptoSigner(signer._private_key, other)]})  # type: ignore[attr-defined]
    after_root(functools.partial(_two_of_two, other=other))(world)
    with refusal("index-damaged"):
        IndexFolder(world.root)


def _stated_length(world: World) -> None:
    """Serve an endless snapshot, whose length the timestamp states."""
    rewrite(world, "timestamp", lambda signed: setattr(signed.snapshot_meta, "length", 1 << 70))
    serving("metadata/*.snapshot.json", endless)(world)


def rotated(world: World, *names: str) -> Keys:
    """Give the roles of *names* to new keys, and return a new key of every kind."""
    old, new = world.keys, tufindex.make_keys(world.folder / "new")
    both = Keys({name: [*old.by_file[name], *new.by_file[name]] for name in old.by_file})
    for name in names:
        with IndexFolder(world.root).changing(both, tufindex.ROLES) as change:
            change.rotate(KEY_ROLES[name], [signer.public_key for signer in new.by_file[name]])
    return new


def _skipped(world: World) -> None:
    """Serve root 3 under the name of root 2."""
    after_root(keep, 2)(world)
    (world.root / "metadata/3.root.json").rename(world.root / "metadata/2.root.json")


ATTACKS: dict[str, tuple[str, Callable[[World], object]]] = {
    "mix and match": ("index-rollback", _mixed),
    "freeze: the timestamp expired": (
        "index-expired",
        lambda world: rewrite(world, "timestamp", expire),
    ),
    "the snapshot expired": (
        "index-expired",
        lambda world: rewrite(world, "snapshot", expire),
    ),
    "targets expired": ("index-expired", lambda world: rewrite(world, "targets", expire)),
    "the root expired": ("index-expired", lambda world: rewrite(world, "root", expire)),
    "too few signatures": ("index-unsigned", after_root(_two_of_two)),
    "a revoked key": ("index-unsigned", after_root(_revoked)),
    "a key under two ids": ("index-unsigned", _one_key_twice),
    "a snapshot of the length that is stated": ("index-invalid", _stated_length),
    "a skipped root": ("index-rollback", _skipped),
    "no signature": (
        "index-unsigned",
        lambda world: rewrite(world, "targets", count=0),
    ),
    "another publisher's keys": (
        "index-unsigned",
        lambda world: rewrite(world, "targets", keys=tufindex.make_keys(world.folder / "others")),
    ),
    "another publisher's root": (
        "index-unsigned",
        lambda world: rewrite(world, "root", keys=tufindex.make_keys(world.folder / "others")),
    ),
    "a changed timestamp": ("index-unsigned", at("metadata/timestamp.json", flipped)),
    "a changed snapshot": ("index-damaged", at("metadata/*.snapshot.json", flipped)),
    "changed targets": ("index-damaged", at("metadata/*.targets.json", flipped)),
    "a page for the timestamp": ("index-invalid", serving("metadata/timestamp.json", answer(HTML))),
    "a page for every missing file": (
        "index-invalid",
        lambda world: world.faults.update({"metadata/2.root.json": answer(HTML)}),
    ),
    "a redirect of the timestamp": (
        "index-invalid",
        serving("metadata/timestamp.json", answer(b"", 302, Location="file:///etc/passwd")),
    ),
    "an endless timestamp": ("index-invalid", serving("metadata/timestamp.json", endless)),
    "an endless root": (
        "index-invalid",
        lambda world: world.faults.update({"metadata/2.root.json": endless}),
    ),
    "endless targets": ("index-invalid", serving("metadata/*.targets.json", endless)),
    "a dripping timestamp": ("index-unreachable", serving("metadata/timestamp.json", dripping)),
    "nested without end": (
        "index-invalid",
        serving("metadata/timestamp.json", answer(b"[" * 30_000)),
    ),
    "a cut-off snapshot": (
        "index-unreachable",
        serving("metadata/*.snapshot.json", answer(b"{", length=300)),
    ),
    "no snapshot": ("index-damaged", at("metadata/*.snapshot.json", Path.unlink)),
    "no timestamp": ("index-missing", at("metadata/timestamp.json", Path.unlink)),
    "a broken server": ("index-unreachable", serving("metadata/timestamp.json", answer(b"", 500))),
    "no release": ("index-damaged", at("targets/releases/*.json", Path.unlink)),
    "a changed release": ("index-damaged", serving("targets/releases/*.json", answer(b"{}"))),
    "an endless release": ("index-invalid", serving("targets/releases/*.json", endless)),
    "a dripping release": ("index-unreachable", serving("targets/releases/*.json", dripping)),
    "a release in the place of another": ("set-mixed", _release_of_another),
    "no lock": ("index-damaged", at("files/*/pylock.*", Path.unlink)),
    "a changed lock": ("index-damaged", serving("files/*/pylock.*", answer(b"lock"))),
    "an endless lock": ("index-invalid", serving("files/*/pylock.*", endless)),
    "an unreadable state": (
        "release-unknown",
        with_state(lambda state: state.pop("channel")),
    ),
    "an unknown channel": (
        "release-unknown",
        with_state(lambda state: state.update(channel="stable")),
    ),
    "a stack with a newline": (
        "release-unknown",
        with_state(lambda state: state.update(stack="2026.11\n")),
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_is_refused(user: User, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is served, nothing is installed, nothing is waited for, and the reference says what to do."""
    for limit in ("REFRESH_SECONDS", "FILE_SECONDS"):
        monkeypatch.setattr(client_index, limit, 1.5 if "dripping" in name else 15.0)
    expected, spoil = ATTACKS[name]
    fingerprint = user.world.fingerprint
    spoil(user.world)
    began = time.monotonic()

    outcome = user.run("install", "--trust", fingerprint)

    assert (outcome.reference, user.listing()) == (expected, {}), outcome.said
    assert time.monotonic() - began < 20


def test_the_request_and_no_word_tells_which_file_is_absent(user: User) -> None:
    mirror = shutil.copytree(user.world.root, user.folder / "timestamp.json")
    next(mirror.glob("metadata/*.snapshot.json")).unlink()
    outcome = user.run("list", "--trust", user.world.fingerprint, "--index", mirror)
    assert outcome.reference == "index-damaged"


@pytest.mark.parametrize("carried_first", [True, False])
def test_rollback_is_refused_however_the_root_was_learnt(
    user: User, monkeypatch: pytest.MonkeyPatch, carried_first: bool
) -> None:
    """
    Metadata older than what this machine has seen is refused, at a mirror as well; a client that carries root 2 and one that
    was given the fingerprint of root 1 share what was seen.
    """
    metadata, address = user.world.root / "metadata", user.folder / "index.txt"
    after_root(keep)(user.world)
    address.write_text(f"{user.world.url}\n{user.world.fingerprint}\n")
    mirror = shutil.copytree(user.world.root, user.folder / "mirror")
    user.world.publish(TWO, [wheel("demo", "1.1")])

    def listed(carried: bool, *words: str | Path) -> str:
        trust = [] if carried else ["--trust", user.world.fingerprint]
        with monkeypatch.context() as patch:
            if carried:
                patch.setattr(client_index, "CARRIED_ADDRESS", address)
                patch.setattr(client_index, "CARRIED_ROOT", metadata / "2.root.json")
            return user.run("list", *trust, *words).reference

    assert listed(carried_first) == ""
    assert listed(False, "--index", mirror) == "index-rollback"
    shutil.copy(mirror / "metadata/timestamp.json", metadata)
    assert [listed(True), listed(False)] == ["index-rollback"] * 2


def test_keys_that_the_carried_root_replaced_count_no_more(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mirror that ends at root 1 is held to root 2, although nothing was seen on this machine before."""
    mirror, address = shutil.copytree(user.world.root, user.folder / "mirror"), user.folder / "index.txt"
    world = user.world
    rotated(world, "root", "online")
    address.write_text(f"{world.url}\n{world.fingerprint}\n")
    monkeypatch.setattr(client_index, "CARRIED_ADDRESS", address)
    monkeypatch.setattr(client_index, "CARRIED_ROOT", max(world.root.glob("metadata/*.root.json")))
    assert user.run("list", "--index", mirror).reference == "index-unsigned"


def test_state_of_a_later_format_hides_only_its_release(both: User) -> None:
    """A value that this client does not know is no reason to refuse the index."""
    with_state(lambda state: state.update(machines=["riscv64"]), TWO)(both.world)
    outcome = both.run("list")
    assert list(outcome.document["releases"]) == [ONE]
    assert f"need a newer client, such as {TWO}" in outcome.said


def test_redirect_of_metadata_is_followed(user: User) -> None:
    """Signatures count, not the server: an index that moved stays readable at its old address."""
    path = user.world.root / "metadata/timestamp.json"
    path.rename(user.world.root / "moved.json")
    user.world.faults["metadata/timestamp.json"] = answer(b"", 302, Location="/moved.json")
    assert user.install("--dry-run").code == 0


def test_old_client_follows_a_rotation(installed: User) -> None:
    """A client that saw root 1 follows new keys of every role, root itself included; the old keys count no more."""
    world, old = installed.world, installed.world.keys
    world.keys = rotated(world, *KEY_ROLES)
    world.publish(TWO, [wheel("demo", "1.1")])

    assert installed.run("install").document["release"]["name"] == TWO
    assert world.user().install().code == 0  # a new client, by the fingerprint of root 1
    rewrite(world, "targets", keys=old)
    assert installed.run("list").reference == "index-unsigned"
