"""Assets of a release on GitHub, played by a real server: immutable, compared after the upload, and completed by a second run."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.refusals import refusal
from tests.support import githubapi
from tests.support.githubapi import Answer, Release, World, reply, starter, unheard

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


def opened(world: World, token: str = githubapi.TOKEN, **options: Any) -> GitHubAssets:
    github, options = GitHub(world.api, token), {"uploads": world.uploads, **options}
    return GitHubAssets(github, world.repository, TAG, **options)


def only(world: World) -> Release:
    [release] = world.releases.values()
    return release


@pytest.mark.parametrize(
    ("fault", "times"), [(reply(500), 0), (reply(500), 2), (starter, 2), (unheard, 1)]
)
def test_fault_of_an_upload_is_overcome(
    world: World, files: dict[ReleaseFile, Path], fault: Answer, times: int
) -> None:
    """A second run sends nothing; other files are refused, as the release is published."""
    world.once("POST", "/assets", fault, times)
    assert opened(world).publish(files) == [NAME]
    assert (only(world).draft, only(world).immutable) == (False, True)
    contents = [asset.data for asset in only(world).assets.values()]
    assert contents == [path.read_bytes() for path in files.values()]
    uploads = world.count("POST", "/assets")
    assert opened(world).publish(files) == []
    assert (world.count("POST", "/assets"), world.count("PATCH", "")) == (uploads, 1)
    other = {ReleaseFile(name="other.whl", size=5, sha256="0" * 64): next(iter(files.values()))}
    with refusal("wheel-name-taken"):
        opened(world).publish(other)


def _added(world: World) -> None:
    def spoil(name: str, data: bytes) -> bytes:
        only(world).assets[99] = githubapi.Asset(99, "surprise.whl", b"?")
        return data

    world.spoil = spoil


def once(method: str, path: str, answer: Answer) -> Callable[[World], object]:
    return lambda world: world.once(method, path, answer)


def setting(**values: object) -> Callable[[World], object]:
    """Return what changes attributes of the world."""
    return lambda world: vars(world).update(values)


FAULTS: dict[str, tuple[Callable[[World], object], str]] = {
    "other bytes are kept": (setting(spoil=lambda _, data: data[::-1]), "publish-failed"),
    "somebody else adds a file": (_added, "publish-failed"),
    "the repository is private": (setting(private=True), "publish-failed"),
    "the rate is limited": (
        once("POST", "/assets", reply(429, "wait", Retry_After="3600")),
        "github-limited",
    ),
    "the token may not write": (once("POST", "/assets", reply(403, "no")), "github-refused"),
    "the file is refused": (once("POST", "/assets", reply(422, "no")), "publish-failed"),
    "a login page answers": (
        once("GET", "/releases/tags", lambda handler: handler.answer(200, b"<html>")),
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
    shown = [*traceback.format_exception(caught.value), str(caught.value.document())]
    assert githubapi.TOKEN not in "".join(shown)


def test_mutable_release_is_completed_once_the_setting_is_on(
    world: World, files: dict[ReleaseFile, Path]
) -> None:
    """The policy may allow mutable releases."""
    world.immutable = False
    opened(world, immutable=False).publish(files)
    assert not only(world).draft
    with refusal("release-mutable"):
        opened(world).publish(files)
    world.immutable = True
    assert opened(world).publish(files) == []
    assert only(world).immutable


@pytest.mark.parametrize("size", [github_assets.LARGEST, 0])
def test_size_is_refused_before_anything_is_sent(
    world: World, files: dict[ReleaseFile, Path], size: int
) -> None:
    with refusal("publish-failed", match="2 GiB"):
        opened(world).publish({replace(file, size=size): path for file, path in files.items()})
    assert not world.releases


def test_publication_needs_a_token(world: World) -> None:
    with pytest.raises(SparkwrightError, match="needs a token"):
        opened(world, token="")


def test_tag_belongs_to_its_files() -> None:
    assert tag_of("2026.11", ["a", "b"]) == tag_of("2026.11", ["b", "a"])
    assert len({tag_of("2026.11", ["a"]), tag_of("2026.11", ["b"]), tag_of("2026.06", ["a"])}) == 3
