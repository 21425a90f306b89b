"""Hosts of files: a folder, and releases on GitHub, played by a real server. Nothing is overwritten, and nothing unread counts as kept."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.refusals import refusal
from tests.support import githubapi
from tests.support.githubapi import Answer, Release, World, cut, drop, reply, starter, unheard

from sparkwright.core.errors import SparkwrightError
from sparkwright.core.files import sha256_file
from sparkwright.core.github import GitHub
from sparkwright.release.publish import releases
from sparkwright.release.publish.folder import UNFINISHED, Folder
from sparkwright.release.publish.releases import GitHubReleases, tag_of

NAME = "vllm-0.33.0+spark.2026.11-cp38-abi3-manylinux_2_28_aarch64.whl"
TAG = "2026.11.1-0123456789ab"


@pytest.fixture(name="wheel")
def _wheel(tmp_path: Path) -> Path:
    """Return a file of some hundred kilobytes, named as a wheel."""
    path = tmp_path / NAME
    path.write_bytes(os.urandom(300_000))
    return path


def place(path: Path) -> str:
    return f"files/{sha256_file(path)}/{path.name}"


def put(host: Folder | GitHubReleases, path: Path) -> str:
    return host.put(place(path), path, sha256_file(path))


class TestFolder:

    def test_what_is_there_is_not_written_again(self, tmp_path: Path, wheel: Path) -> None:
        """A second run says that the file was there, and leaves the file itself alone."""
        host = Folder(tmp_path)
        put(host, wheel)
        before = (tmp_path / place(wheel)).stat()
        put(host, wheel)

        assert (host.sent, host.there) == ([place(wheel)], [place(wheel)])
        assert (tmp_path / place(wheel)).stat().st_ino == before.st_ino
        assert (tmp_path / place(wheel)).read_bytes() == wheel.read_bytes()
        assert before.st_mode & 0o777 == 0o644

    def test_other_bytes_are_never_replaced(self, tmp_path: Path, wheel: Path) -> None:
        """A damaged file of that name is an error that shows both hashes, and stays for people to look at."""
        where = place(wheel)
        (tmp_path / where).parent.mkdir(parents=True)
        (tmp_path / where).write_bytes(b"damaged")

        with refusal("wheel-name-taken") as caught:
            put(Folder(tmp_path), wheel)
        assert sha256_file(wheel) in str(caught.value.details)
        assert (tmp_path / where).read_bytes() == b"damaged"

    def test_a_name_that_appears_meanwhile_is_not_replaced(self, tmp_path: Path, wheel: Path) -> None:
        """Between writing and naming, another program may take the name; its file stays."""

        def other(step: str) -> None:
            if step.startswith("name "):
                (tmp_path / place(wheel)).write_bytes(b"mine")

        with refusal("wheel-name-taken"):
            put(Folder(tmp_path, other), wheel)
        assert (tmp_path / place(wheel)).read_bytes() == b"mine"

    def test_a_wheel_that_changes_while_it_is_read_is_not_published(self, tmp_path: Path, wheel: Path) -> None:
        """The bytes that are shipped are hashed on their way, so what was decided about is what is shipped."""
        where, sha256 = place(wheel), sha256_file(wheel)
        with wheel.open("ab") as stream:
            stream.write(b"!")

        with refusal("publish-failed", match="changed while it was read"):
            Folder(tmp_path).put(where, wheel, sha256)
        assert not [path for path in (tmp_path / "files").rglob("*") if path.is_file()]

    def test_a_killed_write_leaves_nothing_for_long(self, tmp_path: Path, wheel: Path) -> None:
        """What a killed run left beside the place is no file of the index, and goes with the next run."""
        left = (tmp_path / place(wheel)).parent / f"{UNFINISHED}abc"
        left.parent.mkdir(parents=True)
        left.write_bytes(b"half")
        put(Folder(tmp_path), wheel)

        assert not left.exists()

    def test_a_full_disk_leaves_nothing_half(self, tmp_path: Path, wheel: Path) -> None:
        """Where the disk ends in the middle of the file, there is no file; the error is the one of a full disk."""
        script = "; ".join([
            "import errno, os, sys", "from pathlib import Path", "from sparkwright.core.errors import StoreError",
            "from sparkwright.release.publish.folder import Folder",
            "room = [200_000]",
            "def moved(count, _):\n    room[0] -= count\n    if room[0] < 0: raise OSError(errno.ENOSPC, 'full')",
        ])  # fmt: skip
        script = script.replace("; def", "\ndef") + (
            f"\ntry:\n    Folder(Path({str(tmp_path / 'index')!r})).put({place(wheel)!r}, Path({str(wheel)!r}), "
            f"{sha256_file(wheel)!r}, moved)\nexcept StoreError as error:\n    print(error.reference)"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

        assert done.stdout == "disk-full\n"
        assert not [path for path in (tmp_path / "index").rglob("*") if path.is_file()]

    def test_what_nobody_refers_to_can_be_removed(self, tmp_path: Path, wheel: Path) -> None:
        """Removing takes the file and the folder that it leaves empty, and does not mind what is gone already."""
        host = Folder(tmp_path)
        put(host, wheel)
        host.remove((place(wheel), place(wheel), "files/none/nothing"))

        assert list((tmp_path / "files").iterdir()) == []


@pytest.fixture(name="world")
def _world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "PIP_CERT", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    with githubapi.serve() as world:
        yield world


def opened(world: World, tag: str = TAG, token: str = githubapi.TOKEN, *, seconds: float = 60) -> GitHubReleases:
    return GitHubReleases(GitHub(world.api, token, seconds=seconds), world.repository, tag, uploads=world.uploads)


def only(world: World) -> Release:
    [release] = world.releases.values()
    return release


def names(world: World) -> list[str]:
    return [one.name for one in only(world).assets.values()]


class TestGitHub:
    def test_a_file_becomes_an_asset_of_an_immutable_release(self, world: World, wheel: Path) -> None:
        """A draft, the file, its bytes read back through the redirect, one publication; the address is the one that everybody uses."""
        host = opened(world)
        host.ready()
        address = put(host, wheel)
        assert only(world).draft
        host.finish()

        assert address == f"{world.api}/acme/wheels/releases/download/{TAG}/{NAME.replace('+', '%2B')}"
        assert (only(world).draft, only(world).immutable, names(world)) == (False, True, [NAME])
        assert world.count("GET", r"^/\d+$") == 1
        assert world.strangers == []

    @pytest.mark.parametrize("published", [False, True])
    def test_a_second_run_sends_nothing(self, world: World, wheel: Path, published: bool) -> None:
        """The next run finds its draft, or the published release, compares the bytes again, and sends none."""
        first = opened(world)
        put(first, wheel)
        if published:
            first.finish()
        again = opened(world)
        put(again, wheel)
        again.finish()

        assert (again.sent, again.there) == ([], [place(wheel)])
        assert world.count("POST", "/assets") == 1
        assert world.count("PATCH", "") == 1
        assert only(world).immutable

    @pytest.mark.parametrize(
        ("fault", "times", "sent"),
        [(reply(500), 2, 3), (reply(502), 1, 2), (drop, 1, 2), (starter, 2, 3), (unheard, 1, 1)],
        ids=["500", "502", "drop", "starter", "unheard"],
    )
    def test_a_fault_in_an_upload_is_overcome(self, world: World, wheel: Path, fault: Answer, times: int, sent: int) -> None:
        """After a failed upload the draft is looked at again: what is whole counts, what is not is removed and sent again."""
        world.once("POST", "/assets", fault, times)
        host = opened(world)
        put(host, wheel)
        host.finish()

        assert names(world) == [NAME]
        assert only(world).immutable
        assert world.count("POST", "/assets") == sent

    @pytest.mark.parametrize(
        ("status", "headers"), [(429, {"Retry_After": "0"}), (403, {"Retry_After": "1"})], ids=["too-many", "secondary-limit"]
    )
    def test_a_short_limit_is_waited_for(self, world: World, wheel: Path, status: int, headers: dict[str, str]) -> None:
        """GitHub's limits say how long they last, and a short one is waited out, for questions and for uploads."""
        world.once("POST", "/assets", reply(status, "You have exceeded a secondary rate limit", **headers))
        world.once("GET", "/releases/tags", reply(status, "You have exceeded a secondary rate limit", **headers))
        put(opened(world), wheel)

        assert names(world) == [NAME]

    def test_a_long_limit_is_an_error(self, world: World, wheel: Path) -> None:
        """Nobody is kept waiting for an hour; the error says when the limit ends, and the next run goes on."""
        world.once("POST", "/assets", reply(429, "slow down", Retry_After="3600"))
        with refusal("github-limited"):
            put(opened(world), wheel)
        put(opened(world), wheel)

        assert names(world) == [NAME]

    def test_a_draft_that_was_made_unheard_is_found(self, world: World, wheel: Path) -> None:
        """Where the answer to the question for a draft is lost, the draft is found, and not a second one made."""
        world.once("POST", "/releases$", unheard)
        put(opened(world), wheel)

        assert len(world.releases) == 1

    def test_a_truncated_download_is_tried_again(self, world: World, wheel: Path) -> None:
        """What breaks off on the way back says nothing about what is kept, and is read again."""
        world.once("GET", r"^/\d+$", cut(0.5))
        put(opened(world), wheel)

        assert world.count("POST", "/assets") == 1

    def test_a_proxy_that_always_truncates_is_an_error(self, world: World, wheel: Path) -> None:
        """What cannot be read back was not proved to be kept."""
        world.once("GET", r"^/\d+$", cut(0.9), times=100)

        with refusal("github-unreachable", match="cannot be read back"):
            put(opened(world), wheel)

    def test_other_bytes_are_noticed_and_sent_again(self, world: World, wheel: Path) -> None:
        """A host that spoils the first upload is found out by the download, even where it states the hash that everybody hopes for."""
        left = [1]

        def spoil(_: str, data: bytes) -> bytes:
            left[0] -= 1
            return data[:-1] + b"\0" if left[0] >= 0 else data

        world.spoil = spoil
        put(opened(world), wheel)

        assert [one.data for one in only(world).assets.values()] == [wheel.read_bytes()]

    def test_a_host_that_always_spoils_is_left(self, world: World, wheel: Path) -> None:
        """However often it is sent, other bytes come back: that is an error, and the draft stays one."""
        world.spoil = lambda _, data: data[::-1]

        with refusal("publish-failed", match="does not keep"):
            put(opened(world), wheel)
        assert only(world).draft

    def test_the_stated_hash_is_compared_too(self, world: World, wheel: Path) -> None:
        """Where GitHub says another hash than that of the bytes that it sends, one of the two is wrong, and nothing is published."""
        host = opened(world)
        put(host, wheel)
        next(iter(only(world).assets.values())).digest = "sha256:" + "0" * 64

        with refusal("publish-failed", match="not what was sent"):
            host.finish()
        assert only(world).draft

    def test_a_draft_that_somebody_added_to_is_not_published(self, world: World, wheel: Path) -> None:
        """A file that nobody here put into the draft would be published with ours; the error names it."""
        host = opened(world)
        put(host, wheel)
        only(world).assets[99] = githubapi.Asset(99, "surprise.whl", b"?")

        with refusal("publish-failed") as caught:
            host.finish()
        assert "surprise.whl" in str(caught.value.details)
        assert only(world).draft

    def test_a_published_release_is_not_added_to(self, world: World, wheel: Path, tmp_path: Path) -> None:
        """What is published takes no further file."""
        first = opened(world)
        put(first, wheel)
        first.finish()
        other = tmp_path / "other.whl"
        other.write_bytes(b"other")

        with refusal("wheel-name-taken"):
            put(opened(world), other)

    def test_two_gibibytes_are_refused_before_anything_is_sent(self, world: World, tmp_path: Path) -> None:
        """GitHub takes files below 2 GiB; ours is refused here, not after an hour of sending."""
        large = tmp_path / "large.whl"
        with large.open("wb") as stream:
            stream.truncate(releases.LARGEST)

        with refusal("publish-failed", match="2 GiB"):
            opened(world).put("files/x/large.whl", large, "0" * 64)
        assert not world.releases

    @pytest.mark.parametrize("told", [True, False], ids=["setting", "admin"])
    def test_a_repository_whose_releases_can_change_is_refused_first(self, world: World, told: bool) -> None:
        """Where GitHub tells that releases are not immutable, nothing is sent."""
        world.immutable, world.told = False, told

        with refusal("release-mutable"):
            opened(world).ready()
        assert not world.releases

    def test_a_policy_may_do_without(self, world: World, wheel: Path) -> None:
        """Where ci/release.yaml does not ask for it, releases that can be changed are taken as they are."""
        world.immutable = False
        host = releases.of(GitHub(world.api, githubapi.TOKEN), world.repository, TAG, world.uploads, prerelease=False, immutable=False)
        host.ready()
        put(host, wheel)
        host.finish()

        assert (only(world).draft, only(world).immutable) == (False, False)

    def test_a_release_that_stays_mutable_is_withdrawn(self, world: World, wheel: Path) -> None:
        """Where the setting cannot be read, the published release is looked at; one that could be changed becomes a draft again."""
        world.immutable, world.told, world.admin = False, False, False
        host = opened(world)
        host.ready()
        put(host, wheel)
        with refusal("release-mutable"):
            host.finish()
        assert only(world).draft
        world.immutable = True
        again = opened(world)
        put(again, wheel)
        again.finish()

        assert (only(world).immutable, again.sent) == (True, [])

    def test_the_token_goes_to_no_other_host(self, world: World, wheel: Path) -> None:
        """An upload address at another host gets neither token nor file; the error says how to name a host that is right."""
        host = GitHubReleases(GitHub(world.api, githubapi.TOKEN), world.repository, TAG, uploads="https://uploads.github.com")

        with refusal("github-unreachable", match="another host") as caught:
            put(host, wheel)
        assert "--mirror" in caught.value.todo
        assert not names(world)

    def test_no_message_shows_the_token(self, world: World, wheel: Path) -> None:
        """A server that sends the token back finds it in no error."""
        world.once("POST", "/assets", reply(400, f"bad {githubapi.TOKEN}"))
        with pytest.raises(SparkwrightError) as caught:
            put(opened(world), wheel)

        assert githubapi.TOKEN not in "".join(traceback.format_exception(caught.value)) + str(caught.value.document())

    @pytest.mark.parametrize(
        ("status", "reference"), [(401, "github-refused"), (403, "github-refused"), (404, "github-refused"), (422, "publish-failed")]
    )
    def test_a_refusal_says_why(self, world: World, wheel: Path, status: int, reference: str) -> None:
        """A token that may not write, a repository that is not there, a file that is not wanted: each is named."""
        world.once("POST", "/assets", reply(status, "no"))

        with refusal(reference):
            put(opened(world), wheel)

    def test_a_page_where_json_belongs_is_refused(self, world: World, wheel: Path) -> None:
        """A login page in GitHub's place is not read as an answer."""
        world.once("GET", "/releases/tags", lambda handler: handler.answer(200, b"<html>Log in</html>"))

        with refusal("github-unreachable", match="not GitHub's answer"):
            put(opened(world), wheel)

    def test_without_a_token_nothing_begins(self, world: World) -> None:
        """Publishing needs a token, and the error says which right it needs."""
        with refusal("github-refused", match="needs a token"):
            releases.of(GitHub(world.api), world.repository, TAG, world.uploads, prerelease=False)

    def test_a_private_repository_is_refused(self, world: World) -> None:
        """Nobody could install from it."""
        world.private = True

        with refusal("publish-failed", match="private"):
            opened(world).ready()

    @pytest.mark.parametrize("published", [False, True])
    def test_what_nobody_refers_to_can_be_removed(self, world: World, wheel: Path, published: bool) -> None:
        """Draft or published, the whole release goes, with its tag; a second time, nothing happens."""
        host = opened(world)
        put(host, wheel)
        if published:
            host.finish()
        for _ in range(2):
            opened(world).remove((place(wheel),))

        assert not world.releases
        assert not world.tags


def test_a_tag_belongs_to_its_files() -> None:
    """Equal files in any order have the same tag, and others another, so a run never meets the draft of another set."""
    assert tag_of("2026.11.1", ["a", "b"]) == tag_of("2026.11.1", ["b", "a"])
    assert len({tag_of("2026.11.1", ["a"]), tag_of("2026.11.1", ["b"]), tag_of("2026.11.2", ["a"])}) == 3
