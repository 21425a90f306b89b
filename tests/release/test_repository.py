"""The index as a TUF repository: what a client of python-tuf reads, who may change it, rotation of keys, and kills."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.refusals import refusal
from tests.support import refused, tufindex
from tests.support.tufindex import ROLES, Reader
from tuf.api.exceptions import ExpiredMetadataError, UnsignedMetadataError

from sparkwright.core.files import sha256_file
from sparkwright.release import keys, repository
from sparkwright.release.keys import Keys
from sparkwright.release.repository import IndexFolder

NAME = "2026.11.1"


@pytest.fixture(name="held")
def _held(tmp_path: Path) -> Keys:
    return tufindex.make_keys(tmp_path / "keys")


@pytest.fixture(name="folder")
def _folder(tmp_path: Path, held: Keys) -> Path:
    tufindex.publish(tmp_path / "index", held, NAME)
    return tmp_path / "index"


def root_of(folder: Path) -> bytes:
    return (folder / "metadata" / "1.root.json").read_bytes()


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_failed_change_publishes_nothing(folder: Path, held: Keys) -> None:
    before, (release, _) = files(folder), tufindex.release("2026.11.2")
    with refusal("publish-failed"), IndexFolder(folder).changing(held, ROLES) as change:
        change.put(release.wheels[0], b"other bytes")
    assert files(folder) == before


@pytest.mark.parametrize("names", [("online",), ("targets",)])
def test_change_needs_keys_of_its_roles(
    folder: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    tufindex.make_keys(tmp_path / "others")
    few = keys.load([tmp_path / "keys" / f"{name}.pem" for name in names] + [tmp_path / "others"])
    before = files(folder)
    with refusal("key-missing"), IndexFolder(folder).changing(few, ROLES) as change:
        change.schedule_signing("targets")
    assert files(folder) == before


def test_expired_index_is_renewed(folder: Path, held: Keys, tmp_path: Path) -> None:
    short = msgspec.structs.replace(
        ROLES, timestamp=msgspec.structs.replace(ROLES.timestamp, days=-1)
    )
    with IndexFolder(folder).changing(held, short) as change:
        change.schedule_signing()
    with tufindex.serve(folder) as url:
        reader = Reader(url, tmp_path / "client", root_of(folder))
        with pytest.raises(ExpiredMetadataError):
            reader.read()
        with IndexFolder(folder).changing(held, ROLES) as change:
            change.schedule_signing()
        assert NAME in reader.read()


@pytest.mark.parametrize(
    "held_names", [("root", "targets", "online"), ("targets", "online"), ("online",)]
)
def test_replaced_index_is_not_signed(
    folder: Path,
    tmp_path: Path,
    held_names: tuple[str, ...],
    record_property: Callable[[str, object], None],
) -> None:
    """Somebody who can write to the folder makes an index that admits the publisher's keys beside their own."""
    mine = keys.load([tmp_path / "keys" / f"{name}.pem" for name in held_names])
    pin = IndexFolder(folder).fingerprint
    theirs = tufindex.make_keys(tmp_path / "theirs")
    evil = tmp_path / "evil"
    tufindex.publish(evil, theirs, NAME)
    for name, roles in keys.ROLES.items():
        both = keys.load([tmp_path / "theirs" / f"{name}.pem", tmp_path / "keys" / f"{name}.pub"])
        with IndexFolder(evil).changing(theirs, ROLES) as change:
            change.rotate(
                roles, [*(signer.public_key for signer in both.signers.values()), *both.public]
            )
    before = refused.tree(evil)
    with refusal("index-unpinned"), IndexFolder(evil).changing(mine, ROLES) as change:
        change.schedule_signing()
    with refusal("index-damaged"):
        IndexFolder(evil, pin=pin)
    if "root" in held_names:
        with (
            refusal("index-unpinned"),
            IndexFolder(evil, resuming=True).changing(mine, ROLES) as change,
        ):
            change.rotate(["root"], [signer.public_key for signer in mine.by_file["root"]])
    row = refused.record(record_property, "index-unpinned", before, refused.tree(evil))
    assert row[1] == "nothing"


def test_root_is_renewed_with_its_own_keys(folder: Path, held: Keys, tmp_path: Path) -> None:
    late = IndexFolder(folder)
    own = [signer.public_key for signer in held.by_file["root"]]
    with IndexFolder(folder).changing(keys.load([tmp_path / "keys" / "root.pem"]), ROLES) as change:
        change.rotate(["root"], own)
    after = IndexFolder(folder)
    assert after.root
    assert (after.root.signed.version, after.version) == (2, 1)
    with refusal("index-moved"), late.changing(held, ROLES) as change:
        change.rotate(["root"], own)
    with tufindex.serve(folder) as url:
        assert NAME in Reader(url, tmp_path / "client", root_of(folder)).read()


def test_threshold_of_two_roots(tmp_path: Path) -> None:
    two = msgspec.structs.replace(ROLES, root=msgspec.structs.replace(ROLES.root, threshold=2))
    held = tufindex.make_keys(tmp_path / "keys", "root", "targets", "online")
    folder = tmp_path / "index"
    with refusal("key-missing"), IndexFolder(folder).changing(held, two):
        pass
    assert not IndexFolder(folder).exists
    keys.make(tmp_path / "keys", ["root-2"])
    held = keys.load([tmp_path / "keys"])
    with IndexFolder(folder).changing(held, two):
        pass
    new = tufindex.make_keys(tmp_path / "new", "online")
    few = keys.load(
        [tmp_path / "keys" / "root.pem", tmp_path / "keys" / "online.pem", tmp_path / "new"]
    )
    with refusal("key-missing"), IndexFolder(folder).changing(few, two) as change:
        change.rotate(
            ["snapshot", "timestamp"], [signer.public_key for signer in new.signers.values()]
        )


@pytest.mark.parametrize(
    ("role", "other"),
    [("targets", "targets-2"), ("snapshot", "online-2"), ("timestamp", "online-2")],
)
def test_new_root_signs_roles_of_raised_threshold(tmp_path: Path, role: str, other: str) -> None:
    folder, name = tmp_path / "index", other.partition("-")[0]
    held = tufindex.make_keys(
        tmp_path / "keys", "root", name, other, *{"targets", "online"} - {name}
    )
    tufindex.publish(folder, held, NAME)
    raised = msgspec.structs.replace(getattr(ROLES, role), threshold=2)
    policy = msgspec.structs.replace(ROLES, **{role: raised})
    own = [signer.public_key for signer in held.by_file["root"]]
    (tmp_path / "keys" / f"{other}.pem").rename(tmp_path / f"{other}.pem")
    few = keys.load([tmp_path / "keys"])
    tufindex.publish(folder, few, "2026.11.2")
    before = files(folder)
    with refusal("key-missing"), IndexFolder(folder).changing(few, policy) as change:
        change.rotate(["root"], own)
    assert files(folder) == before
    with IndexFolder(folder).changing(held, policy) as change:
        change.rotate(["root"], own)
    assert IndexFolder(folder).root.signed.roles[role].threshold == 2  # type: ignore[union-attr]
    with tufindex.serve(folder) as url:
        assert (
            NAME
            in Reader(
                url, tmp_path / "client", (folder / "metadata" / "1.root.json").read_bytes()
            ).read()
        )


#: Audit events of the interpreter that change the file system.
WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.chmod", "shutil.rmtree"}


def kill_at(step: int, run: Callable[[], object]) -> bool:
    """Run *run* in a copy of this process that ends itself before its *step*-th file operation; return whether it came so far."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = step

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        writing = (
            event == "open"
            and isinstance(arguments[2], int)
            and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if writing or event in WRITES:
            left -= 1
            if not left:
                os._exit(9)

    status = 1
    try:
        sys.addaudithook(watch)
        run()
        status = 0
    finally:
        os._exit(status)


def _rotate(folder: Path, tmp_path: Path, *, lost: bool) -> None:
    used = ["root.pem", "targets.pem", *([] if lost else ["online.pem"])]
    both = keys.load([*(tmp_path / "keys" / name for name in used), tmp_path / "new"])
    new = keys.load([tmp_path / "new"]).signers.values()
    with IndexFolder(folder, resuming=True).changing(both, ROLES) as change:
        change.rotate(["snapshot", "timestamp"], [signer.public_key for signer in new])


@pytest.mark.parametrize(
    "what", ["first", "second", "promotion", "rotation", "rotation-lost", "removal"]
)
def test_kill_at_any_file_operation_leaves_the_old_or_the_new_index(
    tmp_path: Path, held: Keys, what: str, record_property: Callable[[str, object], None]
) -> None:
    start, folder = tmp_path / "start", tmp_path / "index"
    if what != "first":
        tufindex.publish(start, held, NAME)
    tufindex.make_keys(tmp_path / "new", "online")

    def change() -> None:
        if what in ("first", "second"):
            tufindex.publish(folder, held, "2026.11.2")
        elif what == "promotion":
            tufindex.publish(folder, held, NAME, channel="verified")
        elif what == "removal":
            index = IndexFolder(folder)
            with index.changing(held, ROLES) as transaction:
                transaction.remove(index.entry(NAME).release)
            repository.remove_unreferenced(IndexFolder(folder))
        else:
            _rotate(folder, tmp_path, lost=what == "rotation-lost")

    def view() -> object:
        """Return what a client sees, with every file that the releases name; None without an index."""
        if not (folder / "metadata" / "timestamp.json").exists():
            return None
        with tufindex.serve(folder) as url:
            seen = Reader(
                url, tmp_path / f"client{step}", root_of(start if what != "first" else folder)
            ).read()
        assert all(
            sha256_file(folder / file.path) == file.sha256
            for release, _ in seen.values()
            for file in release.files
        )
        return {name: state for name, (_, state) in seen.items()}

    seen, step, killed, gap = [], 0, True, 0
    while killed:
        step += 1
        os.system(f"rm -rf {folder}; test ! -d {start} || cp -a {start} {folder}")
        killed = kill_at(step, change)
        try:
            now = view()
        except UnsignedMetadataError:
            # Without the lost key, clients are refused between the two renames.
            assert what == "rotation-lost"
            gap += 1
            _rotate(folder, tmp_path, lost=True)
            now = view()
        if now not in seen:
            seen.append(now)
        # The same command completes what was begun.
        if what != "removal":
            change()
        assert IndexFolder(folder).exists
    record_property(refused.KILLS, step - 1)
    assert step > 5
    assert gap < step / 2
    assert len(seen) == (1 if what.startswith("rotation") else 2)
