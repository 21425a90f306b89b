"""Publishing small real wheels: what may go where, what is refused, what a second run does, and that an index is never left half."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.refusals import refusal
from tests.support import githubapi, indexserver, publishing, wheels
from tests.support.githubapi import World
from tests.support.publishing import Client, Place

from sparkwright.builder.wheel.archive import WheelName
from sparkwright.release import index
from sparkwright.release.manifest import places
from sparkwright.release.publish import changes, ground, sequence
from sparkwright.release.publish.hosts import Observe, unobserved
from sparkwright.release.publish.prepare import Publisher
from sparkwright.release.publish.sequence import Asked, Published
from sparkwright.release.signing import trust


class Stock:
    """
    What many tests begin with, made once, to be copied.

    Attributes:
        root: ``dist``: the wheels of a release with their verdicts. ``later<n>``: those of later ones. ``place``: an index that has the
            first. *packages*: address of a package index that has nothing.
    """

    def __init__(self, root: Path, packages: str) -> None:
        self.root, self.packages = root, packages

    def wheels(self, folder: Path, name: str, label: str, *, judged: bool) -> list[Path]:
        """Return the wheels of the release *label*, as files of the test's own."""
        kept = self.root / f"{name}-{judged}"
        if not kept.exists():
            wheels.release(kept, label=label, judged=judged)
        target = folder / name
        shutil.copytree(kept, target, dirs_exist_ok=True)
        return [target / path.name for path in _ordered(kept)]


def _ordered(folder: Path) -> list[Path]:
    """Return cutlass, flashinfer, its modules, vllm."""
    order = ("sparkwright_cutlass", "flashinfer_python", "flashinfer_jit_cache", "vllm")
    return [next(folder.glob(f"{name}-*.whl")) for name in order]


@pytest.fixture(scope="module", name="stock")
def _stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stock]:
    root = tmp_path_factory.mktemp("stock")
    with publishing.bare_index(root / "bare") as packages, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARKWRIGHT_INDEX_URL", packages)
        stock = Stock(root, packages)
        Place(root / "place").publish(stock.wheels(root, "dist", wheels.LABEL, judged=True))
        yield stock


@pytest.fixture(name="empty")
def _empty(stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Return a publisher whose index does not exist yet; the package index has nothing."""
    monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", stock.packages)
    return Place(tmp_path / "place")


@pytest.fixture(name="place")
def _place(stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Return a publisher whose index has the release 2026.11.1, made of `made`."""
    monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", stock.packages)
    shutil.copytree(stock.root / "place", tmp_path / "place", symlinks=True)
    return Place(tmp_path / "place")


@pytest.fixture(name="made")
def _made(stock: Stock, tmp_path: Path) -> list[Path]:
    """Return the wheels of a release that may go to verified."""
    return stock.wheels(tmp_path, "dist", wheels.LABEL, judged=True)


Later = Callable[..., list[Path]]


@pytest.fixture(name="later")
def _later(stock: Stock, tmp_path: Path) -> Later:
    """Return what gives the wheels of a later release."""

    def later(number: int = 1, *, judged: bool = True) -> list[Path]:
        return stock.wheels(tmp_path, f"later{number}", f"{wheels.LABEL}.{number}", judged=judged)

    return later


def judge(made: list[Path]) -> None:
    """Put verdicts beside the wheels of a release, by which all may go to verified."""
    for path in made:
        wheels.judge(path, companions=[one for one in made if one != path] if path == made[-1] else ())


def sound(place: Place) -> None:
    """Check that the index is whole, every byte of it."""
    assert index.check(place.root, place.trust, deep=True) == []


def seen(place: Place) -> int:
    """Return the serial that a client sees who checks everything."""
    with indexserver.serve(place.root) as served:
        return Client(served.url, place.trust).look()


class Killed(BaseException):
    """The end of a run, where a step begins."""


def killed_at(begin: str) -> Callable[[str], None]:
    """Return what ends a run at the first step whose name begins so."""

    def observe(step: str) -> None:
        if step.startswith(begin):
            raise Killed

    return observe


def test_what_was_proved_becomes_a_release(empty: Place, made: list[Path], tmp_path: Path) -> None:
    """All wheels and the installer are there, with METADATA, evidence and what is to be edited on site; every byte of it is right."""
    done = empty.publish(made)
    release = ground.release(empty.root, done.address)

    assert (done.release, done.channel, done.serial, done.missing) == ("2026.11.1", "verified", 1, {})
    assert len(done.sent) == 2 * (len(made) + 1)
    assert seen(empty) == 1
    sound(empty)
    assert [wheel.fork for wheel in release.wheels] == ["cutlass", "flashinfer", "flashinfer", "vllm", "sparkwright"]
    assert {fork.name for fork in release.forks} == {"cutlass", "flashinfer", "vllm"}
    assert set(release.locks[0].packages) == {"sparkwright-cutlass", "flashinfer-python", "flashinfer-jit-cache", "vllm", "ray"}
    assert (empty.root / places.onsite(done.address)).exists() == bool(release.onsite)


def test_the_installer_knows_whom_to_trust(place: Place, tmp_path: Path) -> None:
    """The installer in the index carries its address and the key that signed it, so a user of it names neither."""
    wheel = ground.release(place.root, place.manifest().entries[0].release).wheels[-1]
    with zipfile.ZipFile(place.root / wheel.url) as archive:
        (tmp_path / "trust.json").write_bytes(archive.read("sparkwright/release/trust.json"))

    assert trust.carried(tmp_path / "trust.json") == trust.Document(publishing.URL, (place.signer.public.text,))


def test_a_dry_run_writes_nothing(empty: Place, made: list[Path]) -> None:
    """What would be published is said, and there is still no folder."""
    done = empty.publish(made, dry=True)

    assert (done.release, done.serial, empty.root.exists()) == ("2026.11.1", 0, False)


def test_what_was_not_proved_goes_to_candidate_only(empty: Place, later: Later) -> None:
    """Without the verdicts that are asked for there is no release, unless as a candidate, labelled with what is missing."""
    bare = later(judged=False)
    with refusal("verified-refused") as caught:
        empty.publish(bare)
    assert any("vllm: G8: not-run (not-climbed)" in line for line in caught.value.details)
    assert index.current(empty.root) is None

    done = empty.publish(bare, "candidate", url=publishing.URL)
    assert set(done.missing) == {path.name for path in bare}
    assert empty.manifest().entries[0].channel == "candidate"
    assert seen(empty) == 1
    assert not list((empty.root / "verified").glob("simple/vllm"))


def test_the_same_again_does_nothing(place: Place, made: list[Path]) -> None:
    """A second run says that these wheels are published, and no file is another or newer."""
    before = place.files()
    done = place.publish(made)

    assert (done.already, done.release, done.sent) == (True, "2026.11.1", ())
    assert place.files() == before


def test_a_wheel_in_two_releases_is_one_file(place: Place, made: list[Path]) -> None:
    """A later release takes over what did not change: the file, its address and the time of its first publication."""
    first = ground.release(place.root, place.manifest().entries[0].release)
    version = WheelName.of(made[1].name).version
    newer = wheels.vllm(made[0].parent, label=f"{wheels.LABEL}.1", requires=[f"flashinfer-python=={version}"])
    done = place.publish([*made[:3], newer], "candidate")
    after = ground.release(place.root, done.address)

    assert [one.rpartition("/")[2] for one in done.sent] == [newer.name, f"{newer.name}.metadata"]
    assert [one for one in after.wheels if one.project != "vllm"] == [one for one in first.wheels if one.project != "vllm"]
    assert after.before == place.manifest().entries[0].release
    sound(place)


def test_a_name_is_never_used_for_other_bytes(place: Place, tmp_path: Path) -> None:
    """A wheel that was built again under the same version is refused, and the index stays as it was."""
    before = place.files()
    with refusal("wheel-name-taken", match="holds"):
        place.publish(wheels.release(tmp_path / "again", judged=False, size=10), "candidate")

    assert place.files() == before


def test_a_name_that_was_removed_stays_taken(place: Place, tmp_path: Path) -> None:
    """What `retain` took away may come back with the same bytes, and never with others."""
    for number in (1, 2):
        place.publish([wheels.vllm(tmp_path / str(number), label=f"{wheels.LABEL}.{number}")], "candidate")
    changes.retain(place.publisher(), 1)

    with refusal("wheel-name-taken", match="once held"):
        place.publish([wheels.vllm(tmp_path / "other", label=f"{wheels.LABEL}.1", size=10)], "candidate")


def test_a_version_that_pip_would_pass_over_is_refused(empty: Place, made: list[Path], tmp_path: Path) -> None:
    """An older label after a newer one reaches nobody, so it is refused until the newer one is yanked."""
    empty.publish([wheels.vllm(tmp_path, label=f"{wheels.LABEL}.1")], "candidate")
    with refusal("version-order", match="pass over"):
        empty.publish(made, "candidate")
    changes.yank(empty.publisher(), "2026.11.1", "wrong")

    assert empty.publish(made, "candidate").release == "2026.11.2"


def test_what_was_yanked_is_not_offered_again(place: Place, made: list[Path]) -> None:
    """The same wheels cannot come back as another release: whoever saw the reason would see it vanish."""
    changes.yank(place.publisher(), "2026.11.1", "it is slow")

    with refusal("release-yanked"):
        place.publish(made)


def test_a_candidate_is_promoted_and_not_published_again(empty: Place, later: Later) -> None:
    """Verdicts that came later move the candidate; publishing it a second time says how."""
    made = later(judged=False)
    empty.publish(made, "candidate")
    judge(made)

    with refusal("release-name-taken") as caught:
        empty.publish(made)
    assert "promote 2026.11.1" in caught.value.todo


def test_verdicts_about_other_bytes_are_refused(empty: Place, made: list[Path]) -> None:
    """A verdict for another digest is no verdict, in any channel."""
    wheels.judge(made[3], sha256="0" * 64)

    with refusal("verdict-foreign"):
        empty.publish(made, "candidate")


def test_a_new_index_needs_its_address(place: Place, made: list[Path], tmp_path: Path) -> None:
    """The address is signed, so somebody has to say it; a second one for the same index is refused."""
    with refusal("usage", match="where the new index"):
        Place(tmp_path / "new").publish(made, url="")
    with refusal("usage", match="another index"):
        place.publish(made, url="https://elsewhere.example/")


def test_wheels_of_another_stack_are_refused(empty: Place, tmp_path: Path) -> None:
    """A release is of one stack; the error names the one that the wheels are of."""
    with refusal("usage", match=r"stack 2026\.05"):
        empty.publish([wheels.vllm(tmp_path / "dist", stack="2026.05")], "candidate")


def test_an_index_of_somebody_else_is_not_touched(place: Place, tmp_path: Path) -> None:
    """Who cannot verify what is there does not sign over it, unless told whose key it was."""
    other = Place(tmp_path / "other")
    other.root = place.root
    before = place.files()
    with refusal("signer-unknown"):
        changes.refresh(other.publisher())
    assert place.files() == before

    other.trust = trust.Trust((other.signer.public, place.signer.public))
    assert changes.refresh(other.publisher()).serial == 2


def test_a_damaged_index_is_not_added_to(place: Place, later: Later) -> None:
    """A record that a disk changed, or a manifest that somebody edited, ends the publication before it begins."""
    record = place.root / places.release(place.manifest().entries[0].release)
    kept = record.read_bytes()
    record.write_bytes(kept.replace(b"vllm", b"mllv"))
    with refusal("index-damaged"):
        place.publish(later())
    record.write_bytes(kept)
    manifest = (place.root / places.MANIFEST).resolve()
    envelope = json.loads(manifest.read_bytes())
    payload = base64.b64decode(envelope["payload"]).replace(b"verified", b"Verified")
    manifest.write_text(json.dumps(envelope | {"payload": base64.b64encode(payload).decode()}))
    with refusal("signature-invalid"):
        place.publish(later())


def test_what_another_publication_left_is_removed(place: Place, later: Later) -> None:
    """A killed publication that nobody completes leaves nothing behind once anything else was done."""
    changing = ("g/", "current/", "b/", "index.html", "manifest")

    def lasting() -> set[str]:
        return {name for name in place.files() if not name.startswith(changing)}

    before, releases = lasting(), sorted((place.root / "b").iterdir())
    with pytest.raises(Killed):
        place.publish(later(), observe=killed_at("flip"))
    assert lasting() > before
    done = changes.refresh(place.publisher())

    assert done.removed
    assert (lasting(), sorted((place.root / "b").iterdir())) == (before, releases)
    assert [path.name for path in (place.root / ground.WORK).iterdir()] == ["lock"]
    sound(place)


def test_what_a_failing_disk_did_to_a_journal_is_made_again(place: Place, tmp_path: Path) -> None:
    """What a killed run kept for the next is hashed before it is used; what is damaged is made anew."""
    made = [wheels.vllm(tmp_path / "dist", label=f"{wheels.LABEL}.1")]
    with pytest.raises(Killed):
        place.publish(made, "candidate", killed_at("write"))
    for kept in (place.root / ground.WORK).glob("*/*"):
        if kept.name != "journal.json":
            kept.write_bytes(kept.read_bytes()[:-1])

    assert place.publish(made, "candidate").release == "2026.11.2"
    sound(place)


class TestTwoPublishers:
    def test_the_second_is_told(self, place: Place, later: Later, tmp_path: Path) -> None:
        """While one works, another is told so at once, and nothing of the first's work is lost."""
        began, told = threading.Event(), threading.Event()

        def wait(step: str) -> None:
            if step == "generation":
                began.set()
                assert told.wait(60)

        first = threading.Thread(target=place.publish, args=(later(),), kwargs={"observe": wait})
        first.start()
        assert began.wait(60)
        try:
            with refusal("index-busy"):
                place.publish([wheels.vllm(tmp_path / "other", label=f"{wheels.LABEL}.2")], "candidate")
        finally:
            told.set()
            first.join()

        assert [entry.name for entry in place.manifest().entries] == ["2026.11.1", "2026.11.2"]

    @pytest.mark.parametrize("step", ["generation", "flip"])
    def test_one_who_does_not_see_the_lock_wins_or_loses_whole(self, place: Place, later: Later, step: str) -> None:
        """Where a file system has no locks, the serial is looked at before the flip: one of the two is refused; its next run goes on."""

        def other(now: str) -> None:
            if now == step:
                (place.root / ground.WORK / "lock").unlink()
                changes.yank(place.publisher(), "2026.11.1", "wrong")

        with refusal("index-moved"):
            place.publish(later(), observe=other)
        assert [record.action for record in place.manifest().log] == ["publish", "yank"]
        sound(place)
        assert place.publish(later()).release == "2026.11.2"
        sound(place)


#: Publishes on a disk of its own that has no room left at steps that the command line names, one after the other, and then with room.
FULL = """
import subprocess, sys
from pathlib import Path
root, dist, steps = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", root / "index"], check=True)
from tests.support.publishing import Place
from sparkwright.core.errors import SparkwrightError
from sparkwright.release import index
place = Place(root)
made = sorted(dist.glob("*.whl"))
def fill(now):
    if now.startswith(step):
        with open(place.root / "filler", "wb", buffering=0) as stream:
            try:
                while stream.write(b"0" * 4096): pass
            except OSError: pass
for step in steps:
    try:
        place.publish(made, "candidate", fill, url="https://wheels.example/")
    except SparkwrightError as error:
        print(step, error.reference)
    assert index.current(place.root) is None
    (place.root / "filler").unlink()
print(place.publish(made, "candidate", url="https://wheels.example/").release)
assert index.check(place.root, place.trust, deep=True) == []
"""


def test_a_full_disk_is_said_and_leaves_the_index_whole(empty: Place, tmp_path: Path) -> None:
    """Wherever the room ends, clients see no half of it; with room again, the same command completes it."""
    wheels.vllm(tmp_path / "dist")
    empty.root.mkdir()
    apart = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    if subprocess.run([*apart, "mount", "-t", "tmpfs", "none", empty.root], capture_output=True, check=False).returncode:
        pytest.skip("no mount of its own is allowed here")
    environment, steps = {**os.environ, "PYTHONPATH": str(wheels.ROOT)}, ["prepare", "write", "flush", "generation"]
    command = [*apart, sys.executable, "-c", FULL, str(tmp_path / "place"), str(tmp_path / "dist"), *steps]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    assert done.stdout.splitlines() == [*(f"{step} disk-full" for step in steps), "2026.11.1"], done.stderr


def test_a_release_without_room_is_not_begun(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be ended is not begun: the room is looked at before the first file is sent."""
    made, before = [wheels.vllm(tmp_path / "dist", label=f"{wheels.LABEL}.1")], place.files()
    usage = shutil.disk_usage(place.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with refusal("disk-full", match="no room for this release"):
        place.publish(made, "candidate")

    assert place.files() == before


class TestGitHub:
    @pytest.fixture(name="world")
    def _world(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
        monkeypatch.setenv("GITHUB_TOKEN", githubapi.TOKEN)
        with githubapi.serve() as world:
            yield world

    @staticmethod
    def publisher(place: Place, world: World, observe: Observe = unobserved) -> Publisher:
        return place.publisher(observe, mirrors={"https://api.github.com": world.api, "https://uploads.github.com": world.uploads})

    def publish(self, place: Place, world: World, made: list[Path], observe: Observe = unobserved) -> Published:
        asked = Asked(tuple(made), "candidate", repository=world.repository, url=publishing.URL)
        return sequence.publish(self.publisher(place, world, observe), asked)

    @pytest.fixture(name="wheel")
    def _wheel(self, tmp_path: Path) -> list[Path]:
        return [wheels.vllm(tmp_path / "one", label=f"{wheels.LABEL}.1")]

    def test_wheels_lie_there_and_the_index_here(self, empty: Place, world: World, wheel: list[Path]) -> None:
        """The release is immutable, a client finds every wheel by its address, and the folder holds everything but wheels."""
        done = self.publish(empty, world, wheel)

        assert [one.immutable for one in world.releases.values()] == [True]
        assert seen(empty) == 1
        assert not (empty.root / "files").exists()
        assert self.publish(empty, world, wheel).already
        assert len(done.sent) == 4

    def test_a_kill_at_any_step_is_completed(self, empty: Place, world: World, wheel: list[Path]) -> None:
        """Ended before each step in turn, drafts and published releases among them, the next run goes on, to one release."""
        steps = 0
        while True:
            left = steps = steps + 1

            def observe(_: str) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    raise Killed

            try:
                self.publish(empty, world, wheel, observe)
                break
            except Killed:
                assert index.current(empty.root) is None or empty.manifest().entries
            if steps % 8 == 0:
                self.publish(empty, world, wheel)
                assert seen(empty) == 1
                sound(empty)
                assert [(one.draft, len(one.assets)) for one in world.releases.values()] == [(False, 4)]
                shutil.rmtree(empty.root)
                world.releases.clear()
        assert steps > 12
        assert seen(empty) == 1

    @pytest.mark.parametrize("published", [False, True])
    def test_what_a_killed_run_left_there_is_removed(self, place: Place, world: World, wheel: list[Path], published: bool) -> None:
        """Another command removes the draft, or the release that nothing refers to."""
        with pytest.raises(Killed):
            self.publish(place, world, wheel, killed_at("generation" if published else "finish"))
        assert len(world.releases) == 1
        done = changes.refresh(self.publisher(place, world))

        assert not world.releases
        assert done.removed
        sound(place)

    def test_without_a_token_another_verb_still_works(
        self, place: Place, world: World, wheel: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A yank does not wait for a token: what a killed run left at GitHub is told, and stays."""
        with pytest.raises(Killed):
            self.publish(place, world, wheel, killed_at("finish"))
        monkeypatch.delenv("GITHUB_TOKEN")
        changes.yank(self.publisher(place, world), "2026.11.1", "wrong")

        assert place.manifest().entries[0].yanked == "wrong"
        assert len(world.releases) == 1

    def test_a_mutable_release_is_never_referred_to(self, empty: Place, world: World, wheel: list[Path]) -> None:
        """Where releases of the repository can be changed, there is no index."""
        world.immutable = False

        with refusal("release-mutable"):
            self.publish(empty, world, wheel)
        assert index.current(empty.root) is None

    def test_a_host_that_fails_leaves_the_index_as_it_was(self, empty: Place, world: World, wheel: list[Path]) -> None:
        """However long GitHub fails, clients see what they saw; the next run completes the release."""
        world.once("POST", "/assets", githubapi.reply(500), times=100)
        with refusal("github-unreachable"):
            self.publish(empty, world, wheel)
        assert index.current(empty.root) is None
        world.faults.clear()

        assert self.publish(empty, world, wheel).release == "2026.11.1"

    def test_a_candidate_there_is_promoted_from_its_own_bytes(self, empty: Place, world: World, later: Later) -> None:
        """The wheels are fetched again from where users get them, by hash, and decided anew; the release stays where it is."""
        made = later(judged=False)
        self.publish(empty, world, made)
        judge(made)
        for path in made:
            path.unlink()
        changes.promote(self.publisher(empty, world), "2026.11.1", made[0].parent)

        assert empty.manifest().entries[0].channel == "verified"
        assert seen(empty) == 2


class TestChanges:
    def test_promote_asks_for_everything(self, empty: Place, later: Later) -> None:
        """A candidate moves once new verdicts about its very bytes show all; the release stays, its proof is new."""
        made = later(judged=False)
        done = empty.publish(made, "candidate")
        before = empty.manifest().entries[0]
        with refusal("verified-refused"):
            changes.promote(empty.publisher(), "2026.11.1", made[0].parent)
        judge(made)
        told = changes.promote(empty.publisher(), "2026.11.1", made[0].parent, "gated at last")
        after = empty.manifest().entries[0]

        assert (told.action, told.serial, after.channel, after.release) == ("promote", 2, "verified", done.address)
        assert before.proof != after.proof
        assert seen(empty) == 2
        sound(empty)

    def test_promote_keeps_the_order_of_versions(self, empty: Place, made: list[Path], later: Later) -> None:
        """A candidate that is older than what verified offers is not moved there: pip would not take it."""
        empty.publish(made, "candidate")
        empty.publish(later())

        with refusal("version-order"):
            changes.promote(empty.publisher(), "2026.11.1", made[0].parent)

    def test_yank_needs_a_reason_and_keeps_files(self, place: Place) -> None:
        """The release stays listed with the reason, its files stay, and the log says who did it."""
        with refusal("usage"):
            changes.yank(place.publisher(), "2026.11.1", " ")
        changes.yank(place.publisher(), "2026.11.1", "it is slow")
        record = place.manifest().log[-1]

        assert (record.action, record.release, record.reason, record.by) == ("yank", "2026.11.1", "it is slow", place.signer.by)
        assert "it is slow" in (place.root / "verified/simple/vllm/index.html").read_text()
        assert seen(place) == 2

    @pytest.mark.parametrize("step", ["", "generation", "flip", "remove"])
    def test_retain_removes_what_nothing_else_refers_to(self, place: Place, tmp_path: Path, step: str) -> None:
        """Old candidates go with their files, what others share stays; killed before the flip, nothing is gone; the next run ends it."""
        gone, kept = (
            place.publish([wheels.vllm(tmp_path / str(number), label=f"{wheels.LABEL}.{number}")], "candidate") for number in (1, 2)
        )
        if step:
            with pytest.raises(Killed):
                changes.retain(place.publisher(killed_at(step)), 1)
            sound(place)
            assert len(place.manifest().entries) == (2 if step == "remove" else 3)
        told = changes.retain(place.publisher(), 1)

        assert step == "remove" or told.releases == ("2026.11.2",)
        assert [entry.release for entry in place.manifest().entries][1:] == [kept.address]
        assert not (place.root / "b" / gone.address).exists()
        assert len(list((place.root / "files").glob("*/*.whl"))) == 6
        assert seen(place) == place.manifest().serial
        sound(place)

    def test_refresh_signs_again(self, place: Place) -> None:
        """The manifest says the same with a higher serial."""
        before = place.manifest()
        told = changes.refresh(place.publisher(), "still here")

        assert (told.serial, place.manifest().entries) == (2, before.entries)
        assert place.manifest().expires >= before.expires

    def test_without_an_index_nothing_is_changed(self, empty: Place) -> None:
        """What is not there is not yanked from; no folder is made for it."""
        with refusal("index-missing"):
            changes.yank(empty.publisher(), "2026.11.1", "wrong")
        assert not empty.root.exists()
        empty.root.mkdir()
        with refusal("index-missing"):
            changes.yank(empty.publisher(), "2026.11.1", "wrong")

    def test_a_release_that_is_not_there_is_named(self, place: Place) -> None:
        """A typo changes nothing."""
        before = place.files()
        with refusal("release-unknown"):
            changes.yank(place.publisher(), "2026.11.9", "wrong")
        with refusal("release-unknown"):
            changes.promote(place.publisher(), "2026.11.9", place.root)

        assert place.files() == before
