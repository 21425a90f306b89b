"""Assets of a release on GitHub, played by a real server: immutable, compared after the upload, and completed by a second run."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.refusals import refusal
from tests.support import githubapi
from tests.support.githubapi import Answer, Release, World, drop, reply, starter, unheard

from sparkwright.client.records import ReleaseFile
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.files import sha256_file
from sparkwright.core.github import GitHub
from sparkwright.release import github_assets
from sparkwright.release.github_assets import GitHubAssets, tag_of

NAME = "vllm-0.33.0+spark.2026.11-cp38-abi3-manylinux_2_28_aarch64.whl"
TAG = "2026.11-0123456789ab"


@pytest.fixture(name="files")
def _files(tmp_path: Path) -> dict[ReleaseFile, Path]:
    path = tmp_path / NAME
    path.write_bytes(os.urandom(300_000))
    return {ReleaseFile(name=NAME, size=300_000, sha256=sha256_file(path)): path}


@pytest.fixture(name="world")
def _world() -> Iterator[World]:
    with githubapi.serve() as world:
        yield world


def opened(
    world: World, token: str = githubapi.TOKEN, *, immutable: bool = True, uploads: str = ""
) -> GitHubAssets:
    return GitHubAssets(
        GitHub(world.api, token),
        world.repository,
        TAG,
        uploads=uploads or world.uploads,
        immutable=immutable,
    )


def only(world: World) -> Release:
    [release] = world.releases.values()
    return release


def test_file_becomes_an_asset_of_an_immutable_release(
    world: World, files: dict[ReleaseFile, Path]
) -> None:
    host = opened(world)
    assert host.publish(files) == [NAME]
    assert (
        host.url(NAME)
        == f"{world.api}/acme/wheels/releases/download/{TAG}/{NAME.replace('+', '%2B')}"
    )
    assert (
        only(world).draft,
        only(world).immutable,
        [asset.name for asset in only(world).assets.values()],
    ) == (False, True, [NAME])
    assert world.strangers == []
    assert opened(world).publish(files) == []
    assert (world.count("POST", "/assets"), world.count("PATCH", "")) == (1, 1)


@pytest.mark.parametrize(
    ("method", "path", "fault", "times"),
    [
        ("POST", "/assets", reply(500), 2),
        ("POST", "/assets", drop, 1),
        ("POST", "/assets", starter, 2),
        ("POST", "/assets", unheard, 1),
    ],
)
def test_fault_is_overcome(
    world: World, files: dict[ReleaseFile, Path], method: str, path: str, fault: Answer, times: int
) -> None:
    world.once(method, path, fault, times)
    opened(world).publish(files)
    assert only(world).immutable
    assert [asset.data for asset in only(world).assets.values()] == [
        path.read_bytes() for path in files.values()
    ]


def _spoiled(world: World) -> None:
    world.spoil = lambda _, data: data[::-1]


def _added(world: World) -> None:
    def once(name: str, data: bytes) -> bytes:
        only(world).assets[99] = githubapi.Asset(99, "surprise.whl", b"?")
        return data

    world.spoil = once


def _mutable(world: World) -> None:
    world.immutable = False


def _private(world: World) -> None:
    world.private = True


FAULTS: dict[str, tuple[Callable[[World], None], str]] = {
    "other bytes are kept": (_spoiled, "publish-failed"),
    "somebody else adds a file": (_added, "publish-failed"),
    "the published release is mutable": (_mutable, "release-mutable"),
    "the repository is private": (_private, "publish-failed"),
    "the rate is limited": (
        lambda world: world.once("POST", "/assets", reply(429, "wait", Retry_After="3600")),
        "github-limited",
    ),
    "the token may not write": (
        lambda world: world.once("POST", "/assets", reply(403, "no")),
        "github-refused",
    ),
    "the file is refused": (
        lambda world: world.once("POST", "/assets", reply(422, "no")),
        "publish-failed",
    ),
    "a login page answers": (
        lambda world: world.once(
            "GET", "/releases/tags", lambda handler: handler.answer(200, b"<html>")
        ),
        "github-unreachable",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_refused_and_nothing_immutable_remains(
    world: World, files: dict[ReleaseFile, Path], name: str
) -> None:
    fault, reference = FAULTS[name]
    fault(world)
    with refusal(reference) as caught:
        opened(world).publish(files)
    assert all(release.draft for release in world.releases.values())
    assert githubapi.TOKEN not in "".join(traceback.format_exception(caught.value)) + str(
        caught.value.document()
    )


def test_mutable_release_is_completed_once_the_setting_is_on(
    world: World, files: dict[ReleaseFile, Path]
) -> None:
    _mutable(world)
    with refusal("release-mutable"):
        opened(world).publish(files)
    world.immutable = True
    assert opened(world).publish(files) == []
    assert only(world).immutable


def test_policy_may_allow_mutable_releases(world: World, files: dict[ReleaseFile, Path]) -> None:
    _mutable(world)
    opened(world, immutable=False).publish(files)
    assert not only(world).immutable


def test_published_release_takes_no_other_file(
    world: World, files: dict[ReleaseFile, Path], tmp_path: Path
) -> None:
    opened(world).publish(files)
    (tmp_path / "other.whl").write_bytes(b"other")
    with refusal("wheel-name-taken"):
        opened(world).publish(
            {ReleaseFile(name="other.whl", size=5, sha256="0" * 64): tmp_path / "other.whl"}
        )


@pytest.mark.parametrize("change", [{"size": github_assets.LARGEST}, {"size": 0}])
def test_size_is_refused_before_anything_is_sent(
    world: World, files: dict[ReleaseFile, Path], change: dict[str, int]
) -> None:
    with refusal("publish-failed", match="2 GiB"):
        opened(world).publish({replace(file, **change): path for file, path in files.items()})
    assert not world.releases


def test_changed_wheel_is_not_published(world: World, files: dict[ReleaseFile, Path]) -> None:
    [path] = files.values()
    path.write_bytes(os.urandom(300_000))
    with refusal("publish-failed", match="not what was sent"):
        opened(world).publish(files)


def test_token_goes_to_no_other_host(world: World, files: dict[ReleaseFile, Path]) -> None:
    with refusal("github-unreachable", match="another host") as caught:
        opened(world, uploads="https://uploads.github.com").publish(files)
    assert "--mirror" in caught.value.todo
    with pytest.raises(SparkwrightError, match="needs a token"):
        opened(world, token="")


def test_tag_belongs_to_its_files() -> None:
    assert tag_of("2026.11", ["a", "b"]) == tag_of("2026.11", ["b", "a"])
    assert len({tag_of("2026.11", ["a"]), tag_of("2026.11", ["b"]), tag_of("2026.06", ["a"])}) == 3
