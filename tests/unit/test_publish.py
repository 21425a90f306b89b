"""Publishing small real wheels: what may go where, what is refused, what a second run does, and that an index is never left half."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from tests import githubapi, indexserver, publishing, wheels
from tests.publishing import Client, Place

from sparkwright import digest
from sparkwright.errors import (
    GitHubUnreachable,
    IndexBusy,
    IndexDamaged,
    IndexMissing,
    IndexMoved,
    ReleaseMutable,
    ReleaseNameTaken,
    ReleaseUnknown,
    ReleaseYanked,
    SignatureInvalid,
    SignerUnknown,
    UsageError,
    VerdictForeign,
    VerifiedRefused,
    VersionOrder,
    WheelNameTaken,
)
from sparkwright.release import index
from sparkwright.release.manifest import places
from sparkwright.release.publish import changes, ground, sequence
from sparkwright.release.publish.prepare import Publisher
from sparkwright.release.publish.sequence import Asked, Published
from sparkwright.release.signing import trust


@pytest.fixture(name="place")
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Return a publisher whose index does not exist yet; the package index has nothing."""
    with publishing.bare_index(tmp_path / "bare") as url:
        monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", url)
        yield Place(tmp_path / "place")


@pytest.fixture(name="made")
def _made(tmp_path: Path) -> list[Path]:
    """Return the wheels of a release that may go to verified."""
    return wheels.release(tmp_path / "dist")


def later(folder: Path, number: int = 1, *, judged: bool = True) -> list[Path]:
    """Return the wheels of a later release."""
    return wheels.release(folder / f"later{number}", label=f"{wheels.LABEL}.{number}", judged=judged)


def sound(place: Place) -> None:
    """Check that the index is whole, every byte of it."""
    assert index.check(place.root, place.trust, deep=True) == []


def seen(place: Place) -> int:
    """Return the serial that a client sees who checks everything."""
    with indexserver.serve(place.root) as served:
        return Client(served.url, place.trust).look()


def test_what_was_proved_becomes_a_release(place: Place, made: list[Path]) -> None:
    """All wheels and the installer are there, each with its METADATA and evidence; a client who checks every byte finds it so."""
    done = place.publish(made)

    assert (done.release, done.channel, done.serial, done.missing) == ("2026.11.1", "verified", 1, {})
    assert len(done.sent) == 2 * (len(made) + 1)
    assert seen(place) == 1
    sound(place)
    release = ground.release(place.root, done.address)
    assert [wheel.fork for wheel in release.wheels] == ["cutlass", "flashinfer", "flashinfer", "vllm", "sparkwright"]
    assert {fork.name for fork in release.forks} == {"cutlass", "flashinfer", "vllm"}
    assert set(release.locks[0].packages) == {"sparkwright-cutlass", "flashinfer-python", "flashinfer-jit-cache", "vllm"}


def test_what_is_to_be_edited_on_site_comes_along(place: Place, made: list[Path]) -> None:
    """The stack's onsite.yaml, where it has one, is a file of the release, by its hash."""
    done = place.publish(made)
    release = ground.release(place.root, done.address)
    there = place.root / places.onsite(done.address)

    assert there.exists() == bool(release.onsite)
    assert not release.onsite or digest.sha256_file(there) == release.onsite


def test_the_installer_knows_whom_to_trust(place: Place, made: list[Path], tmp_path: Path) -> None:
    """The installer in the index carries its address and the key that signed it, so a user of it names neither."""
    import zipfile

    done = place.publish(made)
    wheel = ground.release(place.root, done.address).wheels[-1]
    with zipfile.ZipFile(place.root / wheel.url) as archive:
        (tmp_path / "trust.json").write_bytes(archive.read("sparkwright/release/trust.json"))
    found = trust.carried(tmp_path / "trust.json")

    assert found == trust.Document(publishing.URL, (place.signer.public.text,))


def test_a_dry_run_writes_nothing(place: Place, made: list[Path]) -> None:
    """What would be published is said, and there is still no folder."""
    done = place.publish(made, dry=True)

    assert (done.release, done.serial, place.root.exists()) == ("2026.11.1", 0, False)


def test_what_was_not_proved_goes_to_candidate_only(place: Place, tmp_path: Path) -> None:
    """Without the verdicts that are asked for there is no release, unless as a candidate, labelled with what is missing."""
    bare = wheels.release(tmp_path / "dist", judged=False)
    with pytest.raises(VerifiedRefused) as caught:
        place.publish(bare)
    assert any("vllm: G8: not-run (not-climbed)" in line for line in caught.value.details)
    assert index.current(place.root) is None

    done = place.publish(bare, "candidate", url=publishing.URL)
    assert set(done.missing) == {path.name for path in bare}
    assert place.manifest().entries[0].channel == "candidate"
    assert seen(place) == 1
    assert not list((place.root / "verified").glob("simple/vllm"))


def test_the_same_again_does_nothing(place: Place, made: list[Path]) -> None:
    """A second run says that these wheels are published, and no file is another or newer."""
    place.publish(made)
    before = place.files()
    done = place.publish(made)

    assert (done.already, done.release, done.sent) == (True, "2026.11.1", ())
    assert place.files() == before


def test_a_wheel_in_two_releases_is_one_file(place: Place, made: list[Path], tmp_path: Path) -> None:
    """A later release takes over what did not change: the file, its address and the time of its first publication."""
    first = place.publish(made)
    folder = tmp_path / "next"
    folder.mkdir()
    same = [Path(shutil.copy(path, folder)) for path in made[:3]]
    newer = wheels.vllm(folder, label=f"{wheels.LABEL}.1", requires=[f"flashinfer-python=={made[1].name.split('-')[1]}"])
    done = place.publish([*same, newer], "candidate")
    before, after = (ground.release(place.root, one.address) for one in (first, done))

    assert [place.rpartition("/")[2] for place in done.sent] == [newer.name, f"{newer.name}.metadata"]
    assert [one for one in after.wheels if one.project != "vllm"] == [one for one in before.wheels if one.project != "vllm"]
    assert after.before == first.address
    sound(place)


def test_a_name_is_never_used_for_other_bytes(place: Place, made: list[Path], tmp_path: Path) -> None:
    """A wheel that was built again under the same version is refused, and the index stays as it was."""
    place.publish(made)
    before = place.files()
    with pytest.raises(WheelNameTaken, match="holds"):
        place.publish(wheels.release(tmp_path / "again", judged=False, size=10), "candidate")

    assert place.files() == before


def test_a_name_that_was_removed_stays_taken(place: Place, tmp_path: Path) -> None:
    """What `retain` took away may come back with the same bytes, and never with others."""
    for number in (1, 2):
        place.publish(later(tmp_path, number, judged=False), "candidate", url=publishing.URL)
    changes.retain(place.publisher(), 1)

    with pytest.raises(WheelNameTaken, match="once held"):
        place.publish([wheels.vllm(tmp_path / "other", label=f"{wheels.LABEL}.1", size=10)], "candidate")


def test_a_version_that_pip_would_pass_over_is_refused(place: Place, made: list[Path], tmp_path: Path) -> None:
    """An older label after a newer one reaches nobody, so it is refused until the newer one is yanked."""
    place.publish(later(tmp_path))
    with pytest.raises(VersionOrder, match="pass over"):
        place.publish(made)
    changes.yank(place.publisher(), "2026.11.1", "wrong")

    assert place.publish(made).release == "2026.11.2"


def test_what_was_yanked_is_not_offered_again(place: Place, made: list[Path]) -> None:
    """The same wheels cannot come back under another release: whoever saw the reason would see it vanish."""
    place.publish(made)
    changes.yank(place.publisher(), "2026.11.1", "it is slow")

    with pytest.raises(ReleaseYanked):
        place.publish(made)


def test_a_candidate_is_promoted_and_not_published_again(place: Place, tmp_path: Path) -> None:
    """Verdicts that came later move the candidate; publishing it a second time says how."""
    made = wheels.release(tmp_path / "dist", judged=False)
    place.publish(made, "candidate")
    shutil.rmtree(tmp_path / "dist")
    judged = wheels.release(tmp_path / "dist")

    with pytest.raises(ReleaseNameTaken) as caught:
        place.publish(judged)
    assert "promote 2026.11.1" in caught.value.todo


def test_verdicts_about_other_bytes_are_refused(place: Place, made: list[Path]) -> None:
    """A verdict for another digest is no verdict, in any channel."""
    wheels.judge(made[3], sha256="0" * 64)

    with pytest.raises(VerdictForeign):
        place.publish(made, "candidate")


def test_a_new_index_needs_its_address(place: Place, made: list[Path]) -> None:
    """The address is signed, so somebody has to say it; a second one for the same index is refused."""
    with pytest.raises(UsageError, match="where the new index"):
        place.publish(made, url="")
    place.publish(made, url=publishing.URL)
    with pytest.raises(UsageError, match="another index"):
        place.publish(made, url="https://elsewhere.example/")


def test_wheels_of_another_stack_are_refused(place: Place, tmp_path: Path) -> None:
    """A release is of one stack; the error names the one that the wheels are of."""
    with pytest.raises(UsageError, match="2026.05"):
        place.publish([wheels.vllm(tmp_path / "dist", stack="2026.05")], "candidate")


def test_an_index_of_somebody_else_is_not_touched(place: Place, made: list[Path], tmp_path: Path) -> None:
    """Who cannot verify what is there does not sign over it, unless told whose key it was."""
    place.publish(made)
    other = Place(tmp_path / "other")
    other.root = place.root
    before = place.files()
    with pytest.raises(SignerUnknown):
        changes.refresh(other.publisher())
    assert place.files() == before

    other.trust = trust.Trust((other.signer.public, place.signer.public))
    assert changes.refresh(other.publisher()).serial == 2


def test_a_damaged_index_is_not_added_to(place: Place, made: list[Path], tmp_path: Path) -> None:
    """A manifest that somebody edited, or a record that a disk changed, ends the publication before it begins."""
    done = place.publish(made)
    record = place.root / places.release(done.address)
    kept = record.read_bytes()
    record.write_bytes(kept.replace(b"vllm", b"mllv"))
    with pytest.raises(IndexDamaged):
        place.publish(later(tmp_path))
    record.write_bytes(kept)
    manifest = (place.root / places.MANIFEST).resolve()
    manifest.write_bytes(manifest.read_bytes().replace(b'"payload":"', b'"payload":"AAAA'))
    with pytest.raises(SignatureInvalid):
        place.publish(later(tmp_path))


class TestTwoPublishers:
    def test_the_second_is_told(self, place: Place, made: list[Path], tmp_path: Path) -> None:
        """While one works, another is told so at once, and nothing of the first's work is lost."""
        began, told = threading.Event(), threading.Event()

        def wait(step: str) -> None:
            if step == "generation":
                began.set()
                assert told.wait(60)

        first = threading.Thread(target=place.publish, args=(made,), kwargs={"observe": wait})
        first.start()
        assert began.wait(60)
        try:
            with pytest.raises(IndexBusy):
                place.publish(later(tmp_path), url=publishing.URL)
        finally:
            told.set()
            first.join()

        assert [entry.name for entry in place.manifest().entries] == ["2026.11.1"]
        assert place.publish(later(tmp_path)).release == "2026.11.2"

    @pytest.mark.parametrize("step", ["generation", "flip"])
    def test_one_who_does_not_see_the_lock_wins_or_loses_whole(self, place: Place, made: list[Path], tmp_path: Path, step: str) -> None:
        """Where a file system has no locks, the serial is looked at before the flip: one of the two is refused, and its next run goes on."""
        place.publish(made)

        def other(now: str) -> None:
            if now == step:
                (place.root / ground.WORK / "lock").unlink()
                changes.yank(place.publisher(), "2026.11.1", "wrong")

        with pytest.raises(IndexMoved):
            place.publish(later(tmp_path), observe=other)
        assert [record.action for record in place.manifest().log] == ["publish", "yank"]
        sound(place)
        assert place.publish(later(tmp_path)).release == "2026.11.2"
        sound(place)


#: Publishes on a disk of its own that has no room left at a step that the command line names.
FULL = """
import subprocess, sys
from pathlib import Path
root, step = Path(sys.argv[1]), sys.argv[2]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", root / "index"], check=True)
from tests.publishing import Place
from sparkwright.errors import SparkwrightError
place = Place(root)
def fill(now):
    if now.startswith(step):
        with open(place.root / "filler", "wb", buffering=0) as stream:
            try:
                while stream.write(b"0" * 4096): pass
            except OSError: pass
made = sorted(Path(sys.argv[3]).glob("*.whl"))
try:
    place.publish(made, "candidate", fill, url="https://wheels.example/")
except SparkwrightError as error:
    print(error.reference)
from sparkwright.release import index
assert index.current(place.root) is None
(place.root / "filler").unlink()
print(place.publish(made, "candidate", url="https://wheels.example/").release)
assert index.check(place.root, place.trust, deep=True) == []
"""


@pytest.mark.parametrize("step", ["prepare", "write files", "flush", "generation"])
def test_a_full_disk_is_said_and_leaves_the_index_whole(place: Place, tmp_path: Path, step: str) -> None:
    """Wherever the room ends, clients see no half of it; with room again, the same command completes it."""
    wheels.release(tmp_path / "dist", judged=False)
    place.root.mkdir()
    apart = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    if subprocess.run([*apart, "mount", "-t", "tmpfs", "none", place.root], capture_output=True, check=False).returncode:
        pytest.skip("no mount of its own is allowed here")
    environment = {**os.environ, "PYTHONPATH": str(wheels.ROOT)}
    command = [*apart, sys.executable, "-c", FULL, str(tmp_path / "place"), step, str(tmp_path / "dist")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    assert done.stdout.split() == ["disk-full", "2026.11.1"], done.stderr


class TestGitHub:
    @pytest.fixture(name="world")
    def _world(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[githubapi.World]:
        monkeypatch.setenv("GITHUB_TOKEN", githubapi.TOKEN)
        with githubapi.serve() as world:
            yield world

    @staticmethod
    def publisher(place: Place, world: githubapi.World, observe: Callable[[str], None] = lambda _: None) -> Publisher:
        return place.publisher(observe, mirrors={"https://api.github.com": world.api, "https://uploads.github.com": world.uploads})

    def publish(
        self, place: Place, world: githubapi.World, made: list[Path], observe: Callable[[str], None] = lambda _: None
    ) -> Published:
        asked = Asked(tuple(made), "candidate", repository=world.repository, url=publishing.URL)
        return sequence.publish(self.publisher(place, world, observe), asked)

    def test_wheels_lie_there_and_the_index_here(self, place: Place, world: githubapi.World, tmp_path: Path) -> None:
        """The release is immutable, a client finds every wheel by its address, and the folder holds everything but wheels."""
        made = later(tmp_path, judged=False)
        done = self.publish(place, world, made)

        assert [one.immutable for one in world.releases.values()] == [True]
        assert seen(place) == 1
        assert not (place.root / "files").exists()
        assert self.publish(place, world, made).already
        assert len(done.sent) == 2 * (len(made) + 1)

    def test_a_kill_at_any_step_is_completed(self, place: Place, world: githubapi.World, tmp_path: Path) -> None:
        """Ended before each step in turn, drafts and published releases among them, the same command completes one release and sends no
        file twice that arrived."""

        class Killed(BaseException):
            pass

        made = [wheels.vllm(tmp_path / "dist")]
        steps = 0
        while True:
            left = steps = steps + 1

            def observe(_: str) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    raise Killed

            try:
                self.publish(place, world, made, observe)
                break
            except Killed:
                assert index.current(place.root) is None or place.manifest().entries
            if steps % 3 == 0:
                self.publish(place, world, made)
                assert seen(place) == 1
                sound(place)
                assert [(one.draft, len(one.assets)) for one in world.releases.values()] == [(False, 4)]
                shutil.rmtree(place.root)
                world.releases.clear()
        assert steps > 12
        assert seen(place) == 1

    @pytest.mark.parametrize("published", [False, True])
    def test_what_a_killed_run_left_there_is_removed(self, place: Place, world: githubapi.World, made: list[Path], tmp_path: Path, published: bool) -> None:
        """Another command removes the draft, or the release that nothing refers to."""
        place.publish(made)

        class Killed(BaseException):
            pass

        def observe(step: str) -> None:
            if step.startswith("generation" if published else "finish"):
                raise Killed

        with pytest.raises(Killed):
            self.publish(place, world, later(tmp_path, judged=False), observe)
        assert len(world.releases) == 1
        done = changes.refresh(self.publisher(place, world))

        assert not world.releases
        assert done.removed
        sound(place)

    def test_without_a_token_another_verb_still_works(self, place: Place, world: githubapi.World, made: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A yank does not wait for a token: what a killed run left at GitHub is told, and stays."""
        place.publish(made)

        def observe(step: str) -> None:
            if step == "finish":
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.publish(place, world, later(tmp_path, judged=False), observe)
        monkeypatch.delenv("GITHUB_TOKEN")
        changes.yank(self.publisher(place, world), "2026.11.1", "wrong")

        assert place.manifest().entries[0].yanked == "wrong"
        assert len(world.releases) == 1

    def test_a_mutable_release_is_never_referred_to(self, place: Place, world: githubapi.World, tmp_path: Path) -> None:
        """Where releases of the repository can be changed, there is no index."""
        world.immutable = False

        with pytest.raises(ReleaseMutable):
            self.publish(place, world, later(tmp_path, judged=False))
        assert index.current(place.root) is None

    def test_a_host_that_fails_leaves_the_index_as_it_was(self, place: Place, world: githubapi.World, tmp_path: Path) -> None:
        """However long GitHub fails, what was published stays; the next run completes the release."""
        world.once("POST", "/assets", githubapi.reply(500), times=100)
        with pytest.raises(GitHubUnreachable):
            self.publish(place, world, [wheels.vllm(tmp_path / "dist")])
        assert index.current(place.root) is None
        world.faults.clear()

        assert self.publish(place, world, [wheels.vllm(tmp_path / "dist")]).release == "2026.11.1"

    def test_a_candidate_there_is_promoted_from_its_own_bytes(self, place: Place, world: githubapi.World, tmp_path: Path) -> None:
        """The wheels are fetched again from where users get them, by hash, and decided anew; the release stays where it is."""
        bare = wheels.release(tmp_path / "dist", judged=False)
        self.publish(place, world, bare)
        for path in bare:
            wheels.judge(path, companions=[one for one in bare if one != path] if path == bare[-1] else ())
        for path in bare:
            path.unlink()
        changes.promote(self.publisher(place, world), "2026.11.1", tmp_path / "dist")

        assert place.manifest().entries[0].channel == "verified"
        assert seen(place) == 2


class TestChanges:
    def test_promote_asks_for_everything(self, place: Place, tmp_path: Path) -> None:
        """A candidate moves once new verdicts about its very bytes show all; the release stays, its proof is new."""
        made = wheels.release(tmp_path / "dist", judged=False)
        done = place.publish(made, "candidate")
        before = place.manifest().entries[0]
        with pytest.raises(VerifiedRefused):
            changes.promote(place.publisher(), "2026.11.1", tmp_path / "dist")
        for path in made:
            wheels.judge(path, companions=[one for one in made if one != path] if path == made[-1] else ())
        told = changes.promote(place.publisher(), "2026.11.1", tmp_path / "dist", "gated at last")
        after = place.manifest().entries[0]

        assert (told.action, told.serial, after.channel, after.release) == ("promote", 2, "verified", done.address)
        assert before.proof != after.proof
        assert seen(place) == 2
        sound(place)

    def test_promote_keeps_the_order_of_versions(self, place: Place, tmp_path: Path) -> None:
        """A candidate that is older than what verified offers is not moved there: pip would not take it."""
        old = wheels.release(tmp_path / "dist", judged=False)
        place.publish(old, "candidate")
        place.publish(later(tmp_path))
        for path in old:
            wheels.judge(path, companions=[one for one in old if one != path] if path == old[-1] else ())

        with pytest.raises(VersionOrder):
            changes.promote(place.publisher(), "2026.11.1", tmp_path / "dist")

    def test_yank_needs_a_reason_and_keeps_files(self, place: Place, made: list[Path]) -> None:
        """The release stays listed with the reason, its files stay, and the log says who did it."""
        place.publish(made)
        with pytest.raises(UsageError):
            changes.yank(place.publisher(), "2026.11.1", " ")
        changes.yank(place.publisher(), "2026.11.1", "it is slow")
        record = place.manifest().log[-1]

        assert (record.action, record.release, record.reason, record.by) == ("yank", "2026.11.1", "it is slow", place.signer.by)
        assert "it is slow" in (place.root / "verified/simple/vllm/index.html").read_text()
        assert seen(place) == 2

    def test_rollback_goes_to_the_release_before(self, place: Place, made: list[Path], tmp_path: Path) -> None:
        """The newest is yanked, and with nothing before it there is nothing to go back to."""
        place.publish(made)
        place.publish(later(tmp_path))
        told = changes.rollback(place.publisher(), wheels.STACK, "verified", "it is slow")

        assert told.releases == ("2026.11.2",)
        assert [entry.yanked for entry in place.manifest().entries] == ["", "it is slow"]
        with pytest.raises(ReleaseUnknown):
            changes.rollback(place.publisher(), wheels.STACK, "verified", "worse")

    def test_retain_removes_what_nothing_else_refers_to(self, place: Place, tmp_path: Path) -> None:
        """Old candidates go with their files; what other releases share stays, and so does the index, whole."""
        names = [place.publish(later(tmp_path, number, judged=False), "candidate", url=publishing.URL) for number in (1, 2, 3)]
        shared = ground.release(place.root, names[0].address).wheels[-1].url
        told = changes.retain(place.publisher(), 1)

        assert told.releases == ("2026.11.1", "2026.11.2")
        assert [entry.name for entry in place.manifest().entries] == ["2026.11.3"]
        assert (place.root / shared).exists()
        assert not (place.root / "b" / names[0].address).exists()
        assert len(list((place.root / "files").glob("*/*.whl"))) == 5
        assert seen(place) == 4
        sound(place)

    @pytest.mark.parametrize("step", ["generation", "flip", "remove"])
    def test_a_killed_retain_is_completed(self, place: Place, tmp_path: Path, step: str) -> None:
        """Killed before the flip, nothing is gone; killed after it, the next run removes the rest."""
        for number in (1, 2):
            place.publish(later(tmp_path, number, judged=False), "candidate", url=publishing.URL)

        def observe(now: str) -> None:
            if now.startswith(step):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            changes.retain(place.publisher(observe), 1)
        sound(place)
        assert len(place.manifest().entries) == (1 if step == "remove" else 2)
        changes.retain(place.publisher(), 1)

        assert len(list((place.root / "files").glob("*/*.whl"))) == 5
        sound(place)

    def test_refresh_signs_again(self, place: Place, made: list[Path]) -> None:
        """The manifest says the same with a higher serial, and what a killed run left is gone."""
        place.publish(made)
        before = place.manifest()
        told = changes.refresh(place.publisher(), "still here")

        assert (told.serial, place.manifest().entries) == (2, before.entries)
        assert place.manifest().expires >= before.expires

    def test_without_an_index_nothing_is_changed(self, place: Place) -> None:
        """What is not there is not yanked from; no folder is made for it."""
        with pytest.raises(IndexMissing):
            changes.yank(place.publisher(), "2026.11.1", "wrong")
        assert not place.root.exists()
        place.root.mkdir()
        with pytest.raises(IndexMissing):
            changes.yank(place.publisher(), "2026.11.1", "wrong")

    def test_a_release_that_is_not_there_is_named(self, place: Place, made: list[Path]) -> None:
        """A typo changes nothing."""
        place.publish(made)
        before = place.files()
        with pytest.raises(ReleaseUnknown):
            changes.yank(place.publisher(), "2026.11.9", "wrong")
        with pytest.raises(ReleaseUnknown):
            changes.promote(place.publisher(), "2026.11.9", place.root)

        assert place.files() == before


def test_what_another_publication_left_is_removed(place: Place, made: list[Path], tmp_path: Path) -> None:
    """A killed publication that nobody completes leaves nothing behind once anything else was published."""
    place.publish(made)
    before = place.files()

    def observe(step: str) -> None:
        if step == "flip":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        place.publish(later(tmp_path, 1), observe=observe)
    assert len(list((place.root / "files").glob("*/*.whl"))) == 9
    done = changes.refresh(place.publisher())

    assert done.removed
    assert {name for name in place.files() if not name.startswith(("g/", "current/", "index.html", "manifest"))} == {
        name for name in before if not name.startswith(("g/", "current/", "index.html", "manifest"))
    }
    assert list((place.root / ground.WORK).iterdir()) == [place.root / ground.WORK / "lock"]
    assert msgspec.json.decode((place.root / places.MANIFEST).read_bytes())
    sound(place)
