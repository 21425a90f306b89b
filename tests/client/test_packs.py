"""A warm pack comes with the signed release, only when it is asked for, and stays and goes with the release."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.client.world import ONE, TWO, User, World, wheel
from tests.support import packs

from sparkwright.client.environment import PACKS, Prefix
from sparkwright.client.records import Release, WarmPack
from sparkwright.core.files import sha256_file
from sparkwright.core.process import CACHES

WHEEL = wheel("vllm")


def offer(world: World, folder: Path, name: str = ONE, **key: Any) -> WarmPack:
    """Publish a release with a pack for the recipe toy-cpu."""
    folder.mkdir(exist_ok=True)
    archive, pack = packs.pack(folder, key=replace(packs.KEY, **{"wheels": {"vllm": WHEEL.sha256}, **key}))
    with world.changing() as transaction:
        transaction.put(replace(pack, url=""), archive)

    def with_pack(release: Release) -> Release:
        return replace(release, packs=(pack,))

    world.publish(name, [WHEEL], change=with_pack)
    return pack


def own(user: User, name: str = ONE) -> set[str]:
    """Return the files of the packs of a release."""
    folder = user.prefix / "releases" / name / CACHES / PACKS
    return {path.name for path in folder.glob("*")}


def test_a_pack_is_fetched_when_it_is_asked_for_and_goes_with_its_release(world: World, tmp_path: Path) -> None:
    pack, user = offer(world, tmp_path / "one"), world.user()
    assert user.install().code == 0
    assert own(user) == set()
    marker = Prefix(user.prefix).marker(ONE)
    assert marker
    assert marker.packs == {"toy-cpu": pack.size}
    outcome = user.run("install", "--warm", "toy-cpu")
    assert (outcome.code, outcome.document["release"]["state"]) == (0, "there already")
    assert outcome.document["packs"][0]["sha256"] == pack.sha256
    assert own(user) == {pack.sha256, f"{pack.sha256}.json"}
    record = user.prefix / "releases" / ONE / CACHES / PACKS / f"{pack.sha256}.json"
    assert msgspec.json.decode(record.read_bytes(), type=WarmPack) == pack
    # A release that follows, and the way back.
    world.publish(TWO, [wheel("vllm", "1.1")])
    assert user.install().code == 0
    assert user.run("rollback").code == 0
    assert own(user) == {pack.sha256, f"{pack.sha256}.json"}
    assert user.run("doctor").code == 0
    assert user.run("uninstall", ONE).code == 0
    assert own(user) == set()


def test_a_pack_that_the_release_does_not_have_is_refused(world: World, tmp_path: Path) -> None:
    offer(world, tmp_path / "one")
    user = world.user()
    assert user.install("--warm", "other").reference == "pack-unknown"
    assert user.run("uninstall").code == 0
    assert user.install("--dry-run", "--warm", "toy-cpu").code == 0
    assert not own(user)


def test_a_pack_of_other_wheels_or_of_another_publisher_is_refused(world: World, tmp_path: Path) -> None:
    """An index elsewhere may have a release of the same name and wheels, and the user trusts its root."""
    offer(world, tmp_path / "one", wheels={"vllm": "b" * 64})
    user = world.user()
    outcome = user.install("--warm", "toy-cpu")
    assert (outcome.reference, outcome.document["error"]["details"]) == ("pack-foreign", ["vllm"])
    trusted = ("--trust", world.fingerprint)
    assert user.run("install", "--index", str(world.root), *trusted, "--warm", "toy-cpu").reference == "pack-foreign"
    (tmp_path / "second").mkdir()
    with World(tmp_path / "second").served() as second:
        offer(second, tmp_path / "two")
        words = ("--index", second.url, "--trust", second.fingerprint, "--version", ONE)
        assert user.run("install", *words, "--warm", "toy-cpu").reference == "environment-unusable"
    assert not own(user)


def longer(handler: Any) -> None:
    handler.send_response(200)
    handler.send_header("content-length", "1000000")
    handler.end_headers()
    handler.wfile.write(b"\0" * 1_000_000)


def changed(handler: Any) -> None:
    data = bytearray(Path(handler.translate_path(handler.path)).read_bytes())
    data[len(data) // 2] ^= 1
    handler.send_response(200)
    handler.send_header("content-length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


@pytest.mark.parametrize("fault", [changed, longer])
def test_a_pack_that_is_not_the_signed_one_is_not_kept(world: World, tmp_path: Path, fault: Callable[[Any], None]) -> None:
    pack, user = offer(world, tmp_path / "one"), world.user()
    world.faults[pack.path] = fault
    assert user.install("--warm", "toy-cpu").reference in ("download-invalid", "index-damaged")
    assert (user.current, own(user)) == (ONE, set())
    world.faults.clear()
    assert user.run("install", "--warm", "toy-cpu").code == 0


def test_a_kill_while_a_pack_is_brought_leaves_none_or_a_whole_one(world: World, tmp_path: Path) -> None:
    pack, user, kills = offer(world, tmp_path / "one"), world.user(), 0
    assert user.install().code == 0
    folder = user.prefix / "releases" / ONE / CACHES / PACKS
    with user.forking() as run:
        for step in range(1, 200):
            ended = run(step, ["install", "--json", "--warm", "toy-cpu"])
            if (folder / f"{pack.sha256}.json").exists():
                assert sha256_file(folder / pack.sha256) == pack.sha256
            if ended.startswith("ended"):
                break
            kills += 1
    assert (ended, kills > 5) == ("ended 0", True)
    assert own(user) == {pack.sha256, f"{pack.sha256}.json"}
