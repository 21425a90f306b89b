"""Attacks on the index, as TUF names them, and an old client that follows a rotation."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from securesystemslib.signer import CryptoSigner, SigstoreKey
from tests.client.test_refusals import HTML, answer, dripping, endless
from tests.client.world import World, wheel
from tests.support import refused, tufindex
from tuf.api.metadata import Metadata, MetaFile

from sparkwright.client import index as client_index
from sparkwright.release.keys import Keys
from sparkwright.release.repository import IndexFolder

ONE, TWO = "2026.11.1", "2026.11.2"
PAST = datetime.now(UTC).replace(microsecond=0) - timedelta(days=1)


class Attacker:
    """Writes metadata that no publisher would, signed with the publisher's keys or others."""

    def __init__(self, world: World) -> None:
        self.world, self.folder = world, world.root / "metadata"
        self.index = IndexFolder(world.root)

    def rewrite(
        self, role: str, change: Callable[[Any], object], keys: Keys | None = None, count: int = 9
    ) -> None:
        """Change the metadata of *role*, and sign it, and whatever names it, with at most *count* of *keys*."""
        index, held = self.index, keys or self.world.keys
        assert index.root
        roles: dict[str, Metadata[Any]] = {
            "root": index.root, "targets": index.targets, "snapshot": index.snapshot, "timestamp": index.timestamp,
        }  # fmt: skip
        change(roles[role].signed)
        affected = {
            "root": ["root"],
            "targets": ["targets", "snapshot", "timestamp"],
            "snapshot": ["snapshot", "timestamp"],
        }
        for name in affected.get(role, ["timestamp"]):
            metadata = roles[name]
            metadata.signed.version += 1
            metadata.signatures.clear()
            signers = held.for_new_index(name)
            for signer in signers[: count if name == role else 9]:
                metadata.sign(signer, append=True)
            version = metadata.signed.version
            data = metadata.to_bytes()
            (
                self.folder
                / ("timestamp.json" if name == "timestamp" else f"{version}.{name}.json")
            ).write_bytes(data)
            if name == "targets":
                roles["snapshot"].signed.meta["targets.json"] = MetaFile.from_data(
                    version, data, ["sha256"]
                )
            elif name == "snapshot":
                roles["timestamp"].signed.snapshot_meta = MetaFile.from_data(
                    version, data, ["sha256"]
                )


def expire(signed: Any) -> None:
    signed.expires = PAST


def keep(signed: Any) -> None:
    """Change nothing."""


def _other_keys(world: World) -> Keys:
    return tufindex.make_keys(world.folder / "others")


def _mixed(world: World) -> None:
    """Serve the snapshot of one version under the name of the next."""
    attacker = Attacker(world)
    version = attacker.index.snapshot.signed.version
    old = (attacker.folder / f"{version}.snapshot.json").read_bytes()
    attacker.rewrite("snapshot", keep)
    timestamp = attacker.index.timestamp
    timestamp.signed.version += 1
    timestamp.signed.snapshot_meta = MetaFile(version + 1)
    timestamp.signatures.clear()
    timestamp.sign(world.keys.for_new_index("timestamp")[0])
    (attacker.folder / "timestamp.json").write_bytes(timestamp.to_bytes())
    (attacker.folder / f"{version + 1}.snapshot.json").write_bytes(old)


def _flip(place: str) -> Callable[[World], None]:
    """Return what changes one letter in a signed file."""

    def spoil(world: World) -> None:
        path = next(world.root.glob(place))
        changed, count = re.subn(rb'("expires": ?")2', rb"\g<1>3", path.read_bytes())
        assert count == 1
        path.write_bytes(changed)

    return spoil


def _serve(place: str, fault: Callable[[Any], object]) -> Callable[[World], None]:
    def spoil(world: World) -> None:
        path = next(world.root.glob(place))
        world.faults[path.relative_to(world.root).as_posix()] = fault

    return spoil


def _remove(place: str) -> Callable[[World], None]:
    def spoil(world: World) -> None:
        next(world.root.glob(place)).unlink()

    return spoil


def _release_of_another(world: World) -> None:
    """Name one release's file in the entry of another."""
    world.publish(TWO, [wheel("demo", "1.1")])

    def change(targets: Any) -> None:
        one, two = (targets.targets[f"releases/{name}.json"] for name in (ONE, TWO))
        two.hashes, two.length = one.hashes, one.length

    path = next(world.root.glob(f"targets/releases/*.{ONE}.json"))
    shutil.copy(path, path.with_name(path.name.replace(ONE, TWO)))
    Attacker(world).rewrite("targets", change)


def _targets(change: Callable[[Any], object]) -> Callable[[World], None]:
    return lambda world: Attacker(world).rewrite(
        "targets", lambda targets: change(targets.targets[f"releases/{ONE}.json"])
    )


def _threshold(world: World) -> None:
    """Sign with one key what a root of two asks two for."""
    attacker = Attacker(world)
    more = CryptoSigner.generate_ed25519()

    def change(root: Any) -> None:
        root.add_key(more.public_key, "targets")
        root.roles["targets"].threshold = 2

    attacker.rewrite("root", change)
    attacker.rewrite("targets", keep)


def _revoked(world: World) -> None:
    """Sign with a key that a newer root no longer admits."""
    attacker, new = Attacker(world), CryptoSigner.generate_ed25519()

    def change(root: Any) -> None:
        for keyid in list(root.roles["targets"].keyids):
            root.revoke_key(keyid, "targets")
        root.add_key(new.public_key, "targets")

    attacker.rewrite("root", change)
    attacker.rewrite("targets", keep)


def _skipped(world: World) -> None:
    """Serve root 3 under the name of root 2."""
    attacker = Attacker(world)
    attacker.rewrite("root", keep)
    attacker.rewrite("root", keep)
    (attacker.folder / "3.root.json").rename(attacker.folder / "2.root.json")


METADATA = {
    "root": "metadata/1.root.json",
    "timestamp": "metadata/timestamp.json",
    "snapshot": "metadata/*.snapshot.json",
}
ATTACKS: dict[str, tuple[str, Callable[[World], object]]] = {
    "mix and match": ("index-rollback", _mixed),
    "freeze: the timestamp expired": (
        "index-expired",
        lambda world: Attacker(world).rewrite("timestamp", expire),
    ),
    "the snapshot expired": (
        "index-expired",
        lambda world: Attacker(world).rewrite("snapshot", expire),
    ),
    "targets expired": ("index-expired", lambda world: Attacker(world).rewrite("targets", expire)),
    "the root expired": ("index-expired", lambda world: Attacker(world).rewrite("root", expire)),
    "too few signatures": ("index-unsigned", _threshold),
    "a revoked key": ("index-unsigned", _revoked),
    "a skipped root": ("index-rollback", _skipped),
    "no signature": (
        "index-unsigned",
        lambda world: Attacker(world).rewrite("targets", keep, count=0),
    ),
    "another publisher's keys": (
        "index-unsigned",
        lambda world: Attacker(world).rewrite("targets", keep, _other_keys(world)),
    ),
    "another publisher's root": (
        "index-unsigned",
        lambda world: Attacker(world).rewrite("root", keep, _other_keys(world)),
    ),
    "a changed timestamp": ("index-unsigned", _flip("metadata/timestamp.json")),
    "a changed snapshot": ("index-damaged", _flip("metadata/*.snapshot.json")),
    "changed targets": ("index-damaged", _flip("metadata/*.targets.json")),
    "a page for the timestamp": ("index-invalid", _serve("metadata/timestamp.json", answer(HTML))),
    "a page for every missing file": (
        "index-invalid",
        lambda world: world.faults.update({"metadata/2.root.json": answer(HTML)}),
    ),
    "a redirect of the timestamp": (
        "index-invalid",
        _serve("metadata/timestamp.json", answer(b"", 302, Location="file:///etc/passwd")),
    ),
    "an endless timestamp": ("index-invalid", _serve("metadata/timestamp.json", endless)),
    "an endless root": (
        "index-invalid",
        lambda world: world.faults.update({"metadata/2.root.json": endless}),
    ),
    "endless targets": ("index-invalid", _serve("metadata/*.targets.json", endless)),
    "a dripping timestamp": ("index-unreachable", _serve("metadata/timestamp.json", dripping)),
    "nested without end": (
        "index-invalid",
        _serve("metadata/timestamp.json", answer(b"[" * 30_000)),
    ),
    "a cut-off snapshot": (
        "index-unreachable",
        _serve("metadata/*.snapshot.json", answer(b"{", length=300)),
    ),
    "no snapshot": ("index-damaged", _remove("metadata/*.snapshot.json")),
    "no timestamp": ("index-missing", _remove("metadata/timestamp.json")),
    "a broken server": ("index-unreachable", _serve("metadata/timestamp.json", answer(b"", 500))),
    "no release": ("index-damaged", _remove("targets/releases/*.json")),
    "a changed release": ("index-damaged", _serve("targets/releases/*.json", answer(b"{}"))),
    "an endless release": ("index-invalid", _serve("targets/releases/*.json", endless)),
    "a dripping release": ("index-unreachable", _serve("targets/releases/*.json", dripping)),
    "a release in the place of another": ("set-mixed", _release_of_another),
    "no lock": ("index-damaged", _remove("files/*/pylock.*")),
    "a changed lock": ("index-damaged", _serve("files/*/pylock.*", answer(b"lock"))),
    "an endless lock": ("index-invalid", _serve("files/*/pylock.*", endless)),
    "an unreadable state": (
        "release-unknown",
        _targets(lambda target: target.unrecognized_fields["custom"].pop("channel")),
    ),
    "an unknown channel": (
        "release-unknown",
        _targets(lambda target: target.unrecognized_fields["custom"].update(channel="stable")),
    ),
    "a stack with a newline": (
        "release-unknown",
        _targets(lambda target: target.unrecognized_fields["custom"].update(stack="2026.11\n")),
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_is_refused(
    world: World,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """Whatever is served, nothing is installed, nothing is waited for, and the reference says what to do."""
    for limit in ("REFRESH_SECONDS", "FILE_SECONDS"):
        monkeypatch.setattr(client_index, limit, 1.5 if "dripping" in name else 15.0)
    expected, spoil = ATTACKS[name]
    world.publish(ONE, [wheel("demo")])
    user, fingerprint = world.user(), world.fingerprint
    spoil(world)
    began = time.monotonic()

    outcome = user.run("install", "--trust", fingerprint)

    row = refused.record(record_property, outcome.reference, {}, user.listing())
    assert row == (expected, "nothing"), outcome.said
    assert time.monotonic() - began < 20


def test_rollback_of_the_index_is_refused(world: World) -> None:
    """Metadata older than what this machine has seen is refused, at a mirror as well."""
    world.publish(ONE, [wheel("demo")])
    mirror, user = shutil.copytree(world.root, world.folder / "mirror"), world.user()
    world.publish(TWO, [wheel("demo", "1.1")])
    assert user.install("--dry-run").code == 0

    assert user.run("install", "--index", str(mirror)).reference == "index-rollback"
    shutil.copy(mirror / "metadata/timestamp.json", world.root / "metadata/timestamp.json")
    assert user.run("install").reference == "index-rollback"


@pytest.mark.parametrize("first", ["carried", "trusted"])
def test_rollback_is_refused_however_the_root_was_learnt(
    world: World, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """A client that carries root 2 and one that was given the fingerprint of root 1 share what was seen."""
    world.publish(ONE, [wheel("demo")])
    more = CryptoSigner.generate_ed25519()
    keys = Keys({**world.keys.by_file, "root": [*world.keys.by_file["root"], more]})
    with IndexFolder(world.root).changing(keys, tufindex.ROLES) as change:
        change.rotate(["root"], [more.public_key])
    timestamp = world.root / "metadata/timestamp.json"
    old = timestamp.read_bytes()
    world.publish(TWO, [wheel("demo", "1.1")])
    user, address, root = world.user(), world.folder / "index.txt", world.folder / "root.json"
    address.write_text(f"{world.url}\n{world.fingerprint}\n")
    shutil.copy(world.root / "metadata/2.root.json", root)

    def listed(how: str) -> str:
        with monkeypatch.context() as patch:
            if how == "carried":
                patch.setattr(client_index, "CARRIED_ADDRESS", address)
                patch.setattr(client_index, "CARRIED_ROOT", root)
                return user.run("list").reference
            return user.run("list", "--trust", world.fingerprint).reference

    assert listed(first) == ""
    timestamp.write_bytes(old)
    assert [listed("carried"), listed("trusted")] == ["index-rollback"] * 2


def test_a_state_of_a_later_format_hides_only_its_release(world: World) -> None:
    """A value that this client does not know is no reason to refuse the index."""
    world.publish(ONE, [wheel("demo")])
    world.publish(TWO, [wheel("demo", "1.1")])
    user = world.user()

    def change(targets: Any) -> None:
        state = targets.targets[f"releases/{TWO}.json"].unrecognized_fields["custom"]
        state["machines"] = ["riscv64"]

    Attacker(world).rewrite("targets", change)
    outcome = user.run("list", "--trust", world.fingerprint)
    assert list(outcome.document["releases"]) == [ONE]
    assert f"need a newer client, such as {TWO}" in outcome.said


def test_redirect_of_metadata_is_followed(world: World) -> None:
    """Signatures count, not the server: an index that moved stays readable at its old address."""
    world.publish(ONE, [wheel("demo")])
    path = world.root / "metadata/timestamp.json"
    path.rename(world.root / "moved.json")
    world.faults["metadata/timestamp.json"] = answer(b"", 302, Location="/moved.json")
    assert world.user().install("--dry-run").code == 0


def test_old_client_follows_a_rotation(world: World) -> None:
    """A client that saw root 1 follows new keys of every role, root itself included; the old keys count no more."""
    world.publish(ONE, [wheel("demo")])
    user = world.user()
    assert user.install().code == 0
    old = world.keys
    new = tufindex.make_keys(world.folder / "new")
    both = Keys({name: [*old.by_file[name], *new.by_file[name]] for name in old.by_file})
    for name in ("root", "targets", "online"):
        roles = {"root": ["root"], "targets": ["targets"], "online": ["snapshot", "timestamp"]}[
            name
        ]
        with IndexFolder(world.root).changing(both, tufindex.ROLES) as change:
            change.rotate(roles, [signer.public_key for signer in new.by_file[name]])
    world.keys = new
    world.publish(TWO, [wheel("demo", "1.1")])

    assert user.run("install").document["release"]["name"] == TWO
    assert world.user().install().code == 0  # a new client, by the fingerprint of root 1
    Attacker(world).rewrite("targets", keep, old)
    assert user.run("list").reference == "index-unsigned"


def test_an_identity_of_sigstore_needs_its_part(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be verified for lack of a library is no fault of the index."""
    world.publish(ONE, [wheel("demo")])
    user, attacker = world.user(), Attacker(world)

    def change(root: Any) -> None:
        identity = {
            "identity": "https://github.com/a/b/.github/workflows/c.yml@refs/heads/main",
            "issuer": "https://a.example",
        }
        root.add_key(SigstoreKey("0" * 64, "sigstore-oidc", "Fulcio", identity), "targets")
        root.roles["targets"].threshold = 2

    attacker.rewrite("root", change)
    attacker.rewrite("targets", keep)
    assert user.install().reference == "index-unsigned"
    monkeypatch.setattr(client_index, "find_spec", lambda name: None)
    assert user.install().reference == "part-missing"
