"""
The index as a TUF repository: what a client reads, who may change it, rotation of keys, and kills; and a Sigstore identity that
holds the targets role, with Sigstore's own library and an instance of the test's own.
"""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import sigstore.oidc
from msgspec.structs import replace
from securesystemslib.signer import Key
from sigstore.models import ClientTrustConfig
from sigstore.verify import Verifier
from tests.refusals import allowed, refusal
from tests.support import processes, sigstoreworld, tufindex
from tests.support.foldertree import files, tree

from sparkwright.core.files import sha256_file
from sparkwright.release import keys, repository
from sparkwright.release.policy import Identity

NAME = "2026.11.1"
HOLDER = Identity(sigstoreworld.WORKFLOW, sigstoreworld.GITHUB)


@pytest.fixture(name="held")
def _held(tmp_path: Path) -> keys.Keys:
    return tufindex.make_keys(tmp_path / "keys")


@pytest.fixture(name="folder")
def _folder(tmp_path: Path, held: keys.Keys) -> Path:
    tufindex.publish(tmp_path / "index", held, NAME)
    return tmp_path / "index"


def names_seen(folder: Path, client: Path) -> list[str]:
    """Return the releases that a client sees, with every file that they name; it trusts root 1."""
    root = (folder / "metadata" / "1.root.json").read_bytes()
    with tufindex.serve(folder) as url:
        seen = tufindex.read(url, client, root)
    named = [file for release, _ in seen.values() for file in release.files]
    assert all(sha256_file(folder / file.path) == file.sha256 for file in named)
    return sorted(seen)


def public_keys(held: keys.Keys, name: str) -> list[Key]:
    return [signer.public_key for signer in held.by_file[name]]


def test_failed_change_publishes_nothing(folder: Path, held: keys.Keys, tmp_path: Path) -> None:
    """A file with other bytes, or one that is gone, is refused by its own name; what else fails meanwhile is not blamed on the index."""
    before, (release, _) = files(folder), tufindex.release("2026.11.2")
    for source, named in ((b"other bytes", release.wheels[0].name), (tmp_path / "gone.whl", "gone.whl cannot be read")):
        with refusal("publish-failed", match=named), repository.IndexFolder(folder).changing(held, tufindex.ROLES) as change:
            change.put(release.wheels[0], source)
    with pytest.raises(FileNotFoundError), repository.IndexFolder(folder).changing(held, tufindex.ROLES):
        (tmp_path / "gone.whl").read_bytes()
    assert files(folder) == before


def test_odd_facts_are_damage_and_odd_releases_are_not_signed(folder: Path, held: keys.Keys) -> None:
    before, (release, _) = files(folder), tufindex.release("2026.11.2")
    state = tufindex.state(release)
    long = replace(release, stack="x" * 9_000_000)
    for odd, says in ((replace(release, before=1), state), (release, replace(state, channel="x")), (long, state)):
        with refusal("release-unreadable"), repository.IndexFolder(folder).changing(held, tufindex.ROLES) as change:
            change.set_release(odd, says)
    assert files(folder) == before
    with refusal("index-damaged"), repository.IndexFolder(folder).changing(held, tufindex.ROLES) as change:
        change.facts = 7  # type: ignore[assignment]
        change.schedule_signing("targets")


@pytest.mark.parametrize("mine", ["root", "targets", "online"])
def test_replaced_index_is_not_signed(folder: Path, tmp_path: Path, mine: str) -> None:
    """Somebody who can write to the folder makes an index that admits the publisher's keys beside their own."""
    pin, evil = repository.IndexFolder(folder).fingerprint, tmp_path / "evil"
    theirs = tufindex.make_keys(tmp_path / "theirs")
    tufindex.publish(evil, theirs, NAME)
    for name, roles in keys.KEY_ROLES.items():
        [own] = public_keys(keys.load([tmp_path / "keys"]), name)
        with repository.IndexFolder(evil).changing(theirs, tufindex.ROLES) as change:
            change.rotate(roles, [*public_keys(theirs, name), own])
    before = tree(evil)
    held = keys.load([tmp_path / "keys" / f"{mine}.pem"])
    with (
        refusal("index-unpinned"),
        repository.IndexFolder(evil, resuming=True).changing(held, tufindex.ROLES) as change,
    ):
        change.rotate(["root"], public_keys(held, "root"))
    with refusal("index-damaged"):
        repository.IndexFolder(evil, pin=pin)
    assert tree(evil) == before


def test_root_is_renewed_with_its_own_keys(folder: Path, tmp_path: Path) -> None:
    own = keys.load([tmp_path / "keys" / "root.pem"])
    with repository.IndexFolder(folder).changing(own, tufindex.ROLES) as change:
        change.rotate(["root"], public_keys(own, "root"))
    after = repository.IndexFolder(folder)
    assert after.root
    assert (after.root.signed.version, after.version) == (2, 1)
    assert names_seen(folder, tmp_path / "client") == [NAME]


@pytest.mark.parametrize(
    ("role", "other"),
    [("targets", "targets-2"), ("snapshot", "online-2"), ("timestamp", "online-2")],
)
def test_new_root_signs_roles_of_raised_threshold(tmp_path: Path, role: str, other: str) -> None:
    folder, few = tmp_path / "index", tufindex.make_keys(tmp_path / "keys")
    held = tufindex.make_keys(tmp_path / "keys", other)
    tufindex.publish(folder, held, NAME)
    tufindex.publish(folder, few, "2026.11.2")
    policy = replace(tufindex.ROLES, **{role: replace(getattr(tufindex.ROLES, role), threshold=2)})
    before = tree(folder)
    with refusal("key-missing"), repository.IndexFolder(folder).changing(few, policy) as change:
        change.rotate(["root"], public_keys(few, "root"))
    assert tree(folder) == before
    with repository.IndexFolder(folder).changing(held, policy) as change:
        change.rotate(["root"], public_keys(held, "root"))
    assert repository.IndexFolder(folder).root.signed.roles[role].threshold == 2  # type: ignore[union-attr]
    assert names_seen(folder, tmp_path / "client") == [NAME, "2026.11.2"]


def test_key_with_a_passphrase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(keys.PASSPHRASE, "secret")
    [(path, public)] = keys.make(tmp_path / "own", ["root"]).items()
    assert (path.stat().st_mode & 0o777, keys.load_private(path).public_key) == (0o600, public)
    assert b"ENCRYPTED" in path.read_bytes()
    for wrong in ("", "other"):
        monkeypatch.setenv(keys.PASSPHRASE, wrong)
        with refusal("key-invalid", hides="secret"):
            keys.load_private(path)


def test_keys_are_made_whole_or_not_at_all(tmp_path: Path) -> None:
    """A disk that takes a part of a key leaves none, so that the next run makes them; a key that is there stays, and no other is made."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
    try:
        with refusal("disk-full"):
            keys.make(tmp_path / "keys")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not files(tmp_path / "keys")
    [(path, public)] = keys.make(tmp_path / "keys", ["targets", "targets"]).items()
    assert keys.load_private(path).public_key == public
    before = files(tmp_path / "keys")
    with refusal("key-invalid", match=r"targets\.pem is there already"):
        keys.make(tmp_path / "keys")
    assert files(tmp_path / "keys") == before


def _rotate(folder: Path, tmp_path: Path, *, lost: bool) -> None:
    used = ["root.pem", "targets.pem", *([] if lost else ["online.pem"])]
    both = keys.load([*(tmp_path / "keys" / name for name in used), tmp_path / "new"])
    new = public_keys(keys.load([tmp_path / "new"]), "online")
    with repository.IndexFolder(folder, resuming=True).changing(both, tufindex.ROLES) as change:
        change.rotate(["snapshot", "timestamp"], new)


def _remove(folder: Path, held: keys.Keys) -> None:
    index = repository.IndexFolder(folder)
    if NAME in index.entries:
        with index.changing(held, tufindex.ROLES) as change:
            change.remove(index.entry(NAME).release)
    repository.remove_unreferenced(repository.IndexFolder(folder))


@pytest.mark.parametrize("what", ["first", "second", "rotation", "rotation-lost", "removal"])
def test_kill_at_any_file_operation_leaves_the_old_or_the_new_index(
    tmp_path: Path, held: keys.Keys, what: str
) -> None:
    """The same command completes what was begun."""
    start, folder, seen = tmp_path / "start", tmp_path / "index", set[str]()
    if what != "first":
        tufindex.publish(start, held, NAME)
    tufindex.make_keys(tmp_path / "new", "online")
    change = {
        "removal": lambda: _remove(folder, held),
        "rotation": lambda: _rotate(folder, tmp_path, lost=False),
        "rotation-lost": lambda: _rotate(folder, tmp_path, lost=True),
    }.get(what, lambda: tufindex.publish(folder, held, "2026.11.2"))
    step, killed, gap = 0, True, 0
    while killed:
        step += 1
        os.system(f"rm -rf {folder}; test ! -d {start} || cp -a {start} {folder}")
        killed = processes.kill_at(step, change)
        if (folder / "metadata" / "timestamp.json").exists():
            # Without the lost key, clients are refused between the two renames.
            gap += 1
            with allowed(*(["index-unsigned"] if what == "rotation-lost" else [])):
                seen.add(" ".join(names_seen(folder, tmp_path / f"client{step}")))
                gap -= 1
        change()
        assert repository.IndexFolder(folder).exists
        assert (folder / "index.html").is_file()
    assert step > 5
    assert gap < step / 2
    expected = {
        "first": {"2026.11.2"},
        "second": {NAME, f"{NAME} 2026.11.2"},
        "removal": {NAME, ""},
    }
    assert seen == expected.get(what, {NAME})


@pytest.fixture(name="sigstore_world")
def _sigstore_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[sigstoreworld.World]:
    with sigstoreworld.World() as world:
        config = ClientTrustConfig.from_json(world.config())
        monkeypatch.setattr(ClientTrustConfig, "production", lambda *_, **__: config)
        verifier = Verifier(trusted_root=config.trusted_root)
        monkeypatch.setattr(Verifier, "production", lambda *_, **__: verifier)
        monkeypatch.setattr(sigstore.oidc, "detect_credential", world.token)
        yield world


def test_identity_signs_and_another_one_does_not(
    sigstore_world: sigstoreworld.World, tmp_path: Path
) -> None:
    keys.make(tmp_path / "keys", ["root", "online"])
    folder = tmp_path / "index"
    tufindex.publish(folder, keys.load([tmp_path / "keys"], HOLDER), "2026.11.1")
    assert names_seen(folder, tmp_path / "client") == ["2026.11.1"]
    sigstore_world.identity = sigstoreworld.WORKFLOW.replace("publish.yml", "other.yml")
    # The publisher has read the index, and verified the identity, by then.
    with refusal("index-damaged"):
        tufindex.publish(folder, keys.load([tmp_path / "keys"], HOLDER), "2026.11.2")
    with refusal("index-unsigned"):
        names_seen(folder, tmp_path / "client")


def test_identity_without_credentials_is_refused(
    sigstore_world: sigstoreworld.World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys.make(tmp_path / "keys")
    with refusal("identity-unusable"):
        keys.load([tmp_path / "keys"], Identity(sigstoreworld.WORKFLOW, "https://accounts.example"))
    monkeypatch.setattr(sigstore.oidc, "detect_credential", lambda: None)
    with refusal("identity-unusable"):
        keys.load([tmp_path / "keys"], HOLDER)
