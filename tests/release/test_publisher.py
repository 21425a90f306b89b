"""Publishing as a whole: what an index admits, promotion, yank, pruning, and what pip, uv and a TUF client then see."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.refusals import refusal
from tests.support import githubapi, installers, publisher, refused, tufindex, verdicts, wheels
from tests.support.publisher import IndexOwner
from tests.support.tufindex import Reader

from sparkwright.core.files import sha256_bytes
from sparkwright.release import keys, locked_set, pages
from sparkwright.release.repository import IndexFolder

Wheels = list[Path]


@pytest.fixture(scope="module", name="world")
def _world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IndexOwner]:
    with publisher.index_owner(tmp_path_factory.mktemp("world")) as owner:
        yield owner


@pytest.fixture(scope="module", name="made")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    return wheels.release(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module", name="published")
def _published(world: IndexOwner, made: Wheels) -> Path:
    world.publish(made)
    return world.root


@pytest.fixture(name="owner")
def _owner(
    world: IndexOwner, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> IndexOwner:
    """Return a publisher with a copy of an index that holds the verified release 2026.11.1."""
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    fresh = IndexOwner.__new__(IndexOwner)
    fresh.__dict__.update(world.__dict__)
    fresh.root = shutil.copytree(published, tmp_path / "index")
    return fresh


@pytest.fixture(name="new")
def _new(tmp_path: Path) -> Wheels:
    """Return the wheels of a second release, without the gates of a served model."""
    made = wheels.release(tmp_path / "new", judged=False, label="spark.2026.11.2")
    for path in made:
        wheels.judge(path, companions=made[:3], without=("G5",))
    return made


def judge(paths: Wheels, folder: Path) -> Path:
    """Write sound verdicts about *paths* into the new *folder*, and return it."""
    folder.mkdir()
    for path in paths:
        copy = Path(shutil.copy(path, folder))
        wheels.judge(copy, companions=paths[:3] if path == paths[-1] else ())
        copy.unlink()
    return folder


def test_release_names_every_file_by_hash(owner: IndexOwner, made: Wheels, tmp_path: Path) -> None:
    with tufindex.serve(owner.root) as url:
        release, state = Reader(
            url, tmp_path / "client", (owner.root / "metadata" / "1.root.json").read_bytes()
        ).read()["2026.11.1"]
    assert (state.channel, state.stack, state.missing, state.pythons[0]) == (
        "verified",
        "2026.11",
        (),
        "3.11",
    )
    assert [wheel.name for wheel in release.wheels] == [path.name for path in made]
    assert all(
        sha256_bytes((owner.root / file.path).read_bytes()) == file.sha256 for file in release.files
    )
    vllm = release.wheels[-1]
    assert vllm.proof.recipes == (verdicts.RECIPE,)
    assert vllm.proof.verdicts
    assert vllm.provenance
    [lock] = release.locks
    packages = {
        entry["name"]: entry
        for entry in tomllib.loads((owner.root / lock.path).read_text())["packages"]
    }
    own = packages["vllm"]["wheels"][0]
    assert (own["hashes"]["sha256"], own["url"]) == (
        vllm.sha256,
        f"{publisher.URL}{vllm.path.replace('+', '%2B')}",
    )
    assert lock.packages["ray"] == "2.60.0"
    assert owner.index.facts.url == publisher.URL


def test_same_wheels_are_published_once_and_restored(owner: IndexOwner, made: Wheels) -> None:
    before = owner.files()
    done = owner.publish(made)
    assert (done.release, done.already, done.sent, done.gated) == ("2026.11.1", True, (), True)
    assert owner.files() == before
    damaged, lost = owner.index.entries["2026.11.1"].release.wheels[:2]
    (owner.root / damaged.path).write_bytes(b"a faulty disk")
    (owner.root / lost.path).unlink()
    owner.publish(made)
    assert owner.files() == before


def test_dry_run_writes_nothing(owner: IndexOwner, new: Wheels, tmp_path: Path) -> None:
    before = owner.files()
    done = owner.publish(new, "candidate", dry_run=True)
    assert done.release == "2026.11.2"
    assert {entry.gate for entries in done.missing.values() for entry in entries} == {"G5"}
    assert owner.files() == before
    owner.root = tmp_path / "nowhere"
    owner.publish(new, "candidate", dry_run=True)
    assert not owner.root.exists()


def test_incomplete_release_is_only_a_candidate(owner: IndexOwner, new: Wheels) -> None:
    before = owner.files()
    with refusal("verified-refused") as caught:
        owner.publish(new)
    assert any("G5" in line for line in caught.value.details)
    assert owner.files() == before
    done = owner.publish(new, "candidate")
    assert done.release == "2026.11.2"
    again = owner.publish(new, "candidate", dry_run=True)
    assert (again.already, again.gated) == (True, False)
    assert owner.index.entries["2026.11.2"].state.missing == ("G5",)
    page = (owner.root / "releases" / "2026.11.2" / "index.html").read_text()
    assert "G5: not run with these bytes (not-climbed); recipes: " in page


def test_promotion_needs_new_verdicts(owner: IndexOwner, new: Wheels, tmp_path: Path) -> None:
    owner.publish(new, "candidate")
    with refusal("verified-refused"):
        owner.publisher().promote("2026.11.2", new[0].parent)
    judged = judge(new, tmp_path / "judged")
    before = owner.index.entries["2026.11.2"].release
    owner.publisher().promote("2026.11.2", judged)
    entry = owner.index.entries["2026.11.2"]
    assert (entry.state.channel, entry.state.missing, entry.release.missing) == ("verified", (), {})
    assert [wheel.sha256 for wheel in entry.release.wheels] == [
        wheel.sha256 for wheel in before.wheels
    ]
    assert entry.release.notes != before.notes


def test_yank_keeps_the_files_and_says_why(owner: IndexOwner, made: Wheels) -> None:
    before = owner.files()
    owner.publisher().yank("2026.11.1", 'it "hangs" <b>')
    assert (
        before.items()
        <= {
            **owner.files(),
            **{name: data for name, data in before.items() if not name.startswith("files/")},
        }.items()
    )
    page = (owner.root / "simple" / "verified" / "vllm" / "index.html").read_text()
    assert 'data-yanked="it &#34;hangs&#34; &lt;b&gt;"' in page
    assert (
        "it &#34;hangs&#34; &lt;b&gt;"
        in (owner.root / "releases" / "2026.11.1" / "index.html").read_text()
    )


def test_pruned_names_stay_taken(owner: IndexOwner, tmp_path: Path) -> None:
    for number in (2, 3, 4):
        owner.publish(
            [wheels.vllm(tmp_path / str(number), label=f"spark.2026.11.{number}")], "candidate"
        )
    owner.publisher().yank("2026.11.4", "bad")
    owner.publish([wheels.vllm(tmp_path / "5", label="spark.2026.11.5")], "candidate")
    gone = owner.index.entries["2026.11.2"].release.wheels[0]
    done = owner.publisher().prune(2)
    assert done.releases == ("2026.11.2",)
    assert list(owner.index.entries) == ["2026.11.1", "2026.11.3", "2026.11.4", "2026.11.5"]
    assert f"files/{gone.sha256}" in done.removed
    assert not (owner.root / "releases" / "2026.11.2").exists()
    assert owner.index.facts.retired == {gone.name: gone.sha256}
    assert owner.publisher().prune(1, verified=True).releases == ("2026.11.3", "2026.11.4")


def test_slow_publisher_loses(
    owner: IndexOwner, new: Wheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = locked_set.resolve

    def slow(*words: Any, **options: Any) -> Any:
        resolved = real(*words, **options)
        owner.publisher().refresh()
        return resolved

    monkeypatch.setattr(locked_set, "resolve", slow)
    with refusal("index-moved"):
        owner.publish(new, "candidate")
    assert list(owner.index.entries) == ["2026.11.1"]


def test_full_disk_is_refused_before_anything_is_written(
    owner: IndexOwner, new: Wheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = owner.files()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
    with refusal("disk-full"):
        owner.publish(new, "candidate")
    assert owner.files() == before


def test_pinned_root_forbids_a_second_index(owner: IndexOwner, new: Wheels, tmp_path: Path) -> None:
    fingerprint, owner.root = owner.index.fingerprint, tmp_path / "second"
    rules = verdicts.release_policy()
    pinned = msgspec.structs.replace(
        rules, file=msgspec.structs.replace(rules.file, root=fingerprint)
    )
    with refusal("index-missing"):
        dataclasses.replace(owner.publisher(), policy=pinned).publish(
            new, "candidate", url=owner.url
        )
    assert not owner.root.exists()


def test_old_pages_are_written_again(owner: IndexOwner) -> None:
    pages_before = owner.files()
    for name in ("index.html", "simple/verified/vllm/index.html", "releases/2026.11.1/index.html"):
        (owner.root / name).write_bytes(b"killed")
    (owner.root / "simple" / "verified" / "gone").mkdir()
    pages.write(owner.index)
    assert owner.files() == pages_before
    assert not (owner.root / "simple" / "verified" / "gone").exists()


def test_unwritable_pages_are_said_to_follow_the_publication(
    owner: IndexOwner, new: Wheels
) -> None:
    page = owner.root / "simple" / "verified" / "index.html"
    page.unlink()
    page.mkdir()
    with refusal("index-unwritable", match="Version 2 of the index is published") as caught:
        owner.publish(new, "candidate")
    assert "release refresh" in caught.value.todo
    assert list(owner.index.entries) == ["2026.11.1", "2026.11.2"]
    page.rmdir()
    owner.publisher().refresh()
    assert "2026.11.2" in (owner.root / "index.html").read_text()


def test_rotation_by_the_publisher(owner: IndexOwner, tmp_path: Path) -> None:
    keys.make(tmp_path / "new", ["online"])
    owner.publisher().rotate(["snapshot", "timestamp"], keys.load([tmp_path / "new"]))
    with refusal("key-missing"):
        owner.publisher().refresh()
    shutil.copy(tmp_path / "new" / "online.pem", owner.keys / "online-2.pem")
    try:
        assert owner.publisher().refresh().version == 3
    finally:
        (owner.keys / "online-2.pem").unlink()


def test_role_is_shared_with_the_holder_of_another_key(owner: IndexOwner, tmp_path: Path) -> None:
    keys.make(tmp_path / "colleague", ["targets"])
    both = [owner.keys / "targets.pem", tmp_path / "colleague" / "targets.pub"]
    owner.publisher().rotate(["targets"], keys.load(both))
    assert owner.index.root
    assert len(owner.index.root.signed.roles["targets"].keyids) == 2
    theirs = keys.load([tmp_path / "colleague", owner.keys / "online.pem"])
    colleague = dataclasses.replace(owner.publisher(), keys=theirs)
    with refusal("index-unpinned"):
        colleague.yank("2026.11.1", "by the colleague")
    rules = colleague.policy
    file = msgspec.structs.replace(rules.file, root=owner.index.fingerprint)
    pinned = msgspec.structs.replace(rules, file=file)
    dataclasses.replace(colleague, policy=pinned).yank("2026.11.1", "by the colleague")
    owner.publisher().refresh()


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_pip_and_uv_read_the_simple_pages(
    owner: IndexOwner, new: Wheels, tmp_path: Path, installer: str
) -> None:
    owner.publish(new, "candidate")
    owner.publisher().yank("2026.11.1", "bad")
    python = installers.environment(tmp_path / "env")
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))
    }
    with tufindex.serve(owner.root) as url:
        words = [
            "--no-deps",
            "--index-url",
            f"{url}simple/candidate/",
            "sparkwright-cutlass",
            "vllm",
        ]
        subprocess.run([*installers.install(installer, python), *words], check=True, env=clean)
    [info] = tmp_path.glob("env/lib/*/site-packages/vllm-*.dist-info")
    assert "spark.2026.11.2" in info.name
    document = json.loads((owner.root / "simple" / "candidate" / "vllm" / "index.json").read_text())
    assert [(entry["yanked"], entry["size"] > 0) for entry in document["files"]] == [
        (False, True),
        ("bad", True),
    ]


@pytest.mark.parametrize("suffix", ["", ".metadata"])
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_pip_and_uv_refuse_a_changed_file_by_its_hash(
    owner: IndexOwner, tmp_path: Path, installer: str, suffix: str
) -> None:
    [path] = owner.root.glob(f"files/*/sparkwright_cutlass-*.whl{suffix}")
    path.write_bytes(path.read_bytes().replace(b"4.7.1", b"4.7.2"))
    command = installers.install(installer, installers.environment(tmp_path / "env"))
    with tufindex.serve(owner.root) as url:
        words = ["--index-url", f"{url}simple/verified/", "sparkwright-cutlass"]
        done = subprocess.run([*command, *words], check=False, capture_output=True, text=True)
    assert done.returncode
    assert "hash" in done.stderr.lower()
    assert not list(tmp_path.glob("env/lib/*/site-packages/sparkwright_cutlass*"))


def test_reference_parser_reads_the_same_from_both_pages(owner: IndexOwner) -> None:
    from pypi_simple import ProjectPage

    owner.publisher().yank("2026.11.1", "it hangs")
    for channel, project in (("verified", "vllm"), ("candidate", "sparkwright-install")):
        folder = owner.root / "simple" / channel / project
        url = f"{publisher.URL}simple/{channel}/{project}/"
        html = ProjectPage.from_html(project, (folder / "index.html").read_text(), url)
        document = json.loads((folder / "index.json").read_text())
        both = (html, ProjectPage.from_json_data(document, url))
        first, second = (
            [(file.filename, file.url, file.digests, file.is_yanked, file.metadata_digests, file.requires_python) for file in page.packages]
            for page in both
        )  # fmt: skip
        assert first == second
        assert first


def test_wheel_of_two_releases_is_one_file_and_yanked_with_both(
    owner: IndexOwner, made: Wheels, tmp_path: Path
) -> None:
    shared, vllm = made[0], wheels.vllm(tmp_path, label="spark.2026.11.2")
    owner.publish([shared, vllm], "candidate")
    first, second = (entry.release for entry in owner.index.entries.values())
    assert msgspec.structs.replace(second.wheels[0], proof=first.wheels[0].proof) == first.wheels[0]
    page = owner.root / "simple/candidate/sparkwright-cutlass/index.json"

    def yanked() -> list[object]:
        return [file["yanked"] for file in json.loads(page.read_text())["files"]]

    owner.publisher().yank("2026.11.1", "it hangs")
    assert yanked() == [False]
    owner.publisher().yank("2026.11.2", "it hangs, too")
    assert yanked() == ["it hangs, too"]


def test_stacks_are_pruned_apart(owner: IndexOwner, tmp_path: Path) -> None:
    held = keys.load([owner.keys])
    for name in ("2026.05.1", "2026.05.2", "2026.06.1"):
        tufindex.publish(owner.root, held, name)
    assert owner.publisher().prune(1).releases == ("2026.05.1",)


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_pip_and_uv_install_the_locked_set(tmp_path: Path, made: Wheels, installer: str) -> None:
    with publisher.index_owner(tmp_path) as owner:
        owner.root.mkdir()
        with tufindex.serve(owner.root) as owner.url:
            owner.publish(made)
            [lock] = owner.index.entries["2026.11.1"].release.locks
            python = installers.environment(tmp_path / "env")
            command = [*installers.install("pip", python), "-r", owner.root / lock.path]
            if installer == "uv":
                command = ["uv", "pip", "sync", "--quiet", "--python", python]
                command.append(f"{owner.url}{lock.path}")
            subprocess.run(command, check=True)
            assert {
                info.name.partition("-")[0]
                for info in tmp_path.glob("env/lib/*/site-packages/*.dist-info")
            } == {name.replace("-", "_") for name in lock.packages}


def test_client_of_the_index_is_published_with_it(
    owner: IndexOwner, new: Wheels, tmp_path: Path
) -> None:
    [first] = owner.index.facts.clients
    owner.publish(new, "candidate")
    assert owner.index.facts.clients == (first,)
    keys.make(tmp_path / "next", ["root"])
    owner.publisher().rotate(["root"], keys.load([tmp_path / "next"]))
    owner.publish([wheels.vllm(tmp_path / "third", label="spark.2026.11.3")], "candidate")
    second = list(owner.index.facts.clients)[-1]
    owner.publisher().prune(1)
    command = installers.install("uv", Path(sys.executable))
    with tufindex.serve(owner.root) as url:
        for number, wheel in enumerate((first, second), 1):
            place = tmp_path / "client" / wheel.version
            words: list[str | Path] = ["--no-deps", "--target", place]
            words += ["--index-url", f"{url}simple/verified/"]
            name = f"sparkwright-install=={wheel.version}"
            subprocess.run([*command, *words, name], check=True)
            client = place / "sparkwright" / "client"
            root = owner.root / "metadata" / f"{number}.root.json"
            assert (client / "root.json").read_bytes() == root.read_bytes()
            carried = (client / "index.txt").read_text().split()
            assert carried == [publisher.URL, owner.index.fingerprint]
    assert f"sparkwright-install=={second.version}" in (owner.root / "index.html").read_text()


def test_wheels_are_sent_after_the_release_is_signed(
    owner: IndexOwner, new: Wheels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who signs needs no token that writes, who sends needs no key, and other wheels than the signed ones are not sent."""
    with githubapi.serve() as github:
        mirrors = {
            "https://api.github.com": github.api,
            "https://uploads.github.com": github.uploads,
        }
        signer = owner.publisher(mirrors=mirrors)
        monkeypatch.setenv("GITHUB_TOKEN", "ghs_reads")
        signer.publish(new, "candidate", github=github.repository, url=owner.url, send=False)
        assert not github.releases
        sender = dataclasses.replace(signer, keys=keys.load([]))
        monkeypatch.setenv("GITHUB_TOKEN", githubapi.TOKEN)
        other = wheels.vllm(tmp_path / "other", label="spark.2026.11.9")
        for others in (new[:-1], [*new[:-1], other]):
            with refusal("release-unknown"):
                sender.upload(others, github.repository)
        assert not github.releases
        assert len(sender.upload(new, github.repository)) == 2 * len(new)
        assert sender.upload(new, github.repository) == []
        (remote,) = github.releases.values()
    assert {wheel.name for wheel in owner.index.entries["2026.11.2"].release.wheels} < {
        asset.name for asset in remote.assets.values()
    }


def test_wheels_as_assets_of_github(
    owner: IndexOwner, new: Wheels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", githubapi.TOKEN)
    with githubapi.serve() as github:
        mirrors = {
            "https://api.github.com": github.api,
            "https://uploads.github.com": github.uploads,
        }
        publish = owner.publisher(mirrors=mirrors).publish
        before = owner.files()
        github.once("POST", "/assets", githubapi.reply(500), times=100)
        with refusal("github-unreachable"):
            publish(new, "candidate", github=github.repository, url=owner.url)
        assert owner.files() == before
        github.faults.clear()
        # Another publisher takes the number; the draft of these wheels is used nevertheless.
        owner.publish([wheels.vllm(tmp_path / "other", label="spark.2026.11.1")], "candidate")
        publish(new, "candidate", github=github.repository, url=owner.url)
        release = owner.index.entries["2026.11.3"].release
        assert all(
            wheel.url.startswith(f"{github.api}/acme/wheels/releases/download/2026.11-")
            for wheel in release.wheels
        )
        assert not any((owner.root / wheel.path).exists() for wheel in release.wheels)
        [remote] = github.releases.values()
        assert sorted(asset.name for asset in remote.assets.values()) == sorted(
            [wheel.name for wheel in release.wheels]
            + [f"{wheel.name}.metadata" for wheel in release.wheels]
        )
        assert (
            release.wheels[-1].url
            in (owner.root / "simple" / "candidate" / "vllm" / "index.html").read_text()
        )
        lock = (owner.root / release.locks[0].path).read_text()
        assert release.wheels[-1].url in lock
        judged = judge(new, tmp_path / "judged")
        owner.publisher(mirrors=mirrors).promote("2026.11.3", judged)
    assert owner.index.entries["2026.11.3"].state.channel == "verified"
    monkeypatch.delenv("GITHUB_TOKEN")
    owner.publisher(mirrors=mirrors).yank("2026.11.3", "it hangs")


def test_notes_say_which_patches_are_needed(owner: IndexOwner, tmp_path: Path) -> None:
    patches = (
        (*wheels.PATCHES[0][:2], "another reason", 0),
        ("new.patch", "Something new", "it is needed", 0),
    )
    owner.publish([wheels.vllm(tmp_path, label="spark.2026.11.2", patches=patches)], "candidate")
    first, second = (entry.release for entry in owner.index.entries.values())
    texts = [
        (owner.root / entry.notes.path).read_text() for entry in (first, second) if entry.notes
    ]
    assert (
        "| vllm | `#35568` | Use native FP4 conversion | carried | upstream: merged as" in texts[0]
    )
    assert "faster in 0, slower in 0 of 12 measured figures" in texts[0]
    assert "| 1024/1024 c1 | time per token (less is better) | pass |" in texts[0]
    assert "| vllm | `#35568` | Use native FP4 conversion | dropped |" in texts[1]
    assert (
        "| vllm | `new.patch` | Something new | added | unknown: not tried on anything later |"
        in texts[1]
    )
    assert "| vllm | patches | `2` | `2` |" not in texts[1]
    assert "It was not shown that this release is faster than the stock wheel." in texts[1]


def test_kill_of_a_publication_is_completed_by_the_next(
    owner: IndexOwner, new: Wheels, record_property: Callable[[str, object], None]
) -> None:
    from tests.release.test_repository import kill_at

    index: Callable[[], IndexFolder] = lambda: IndexFolder(owner.root)  # noqa: E731
    start, step = shutil.copytree(owner.root, owner.root.with_name("start")), 40
    while kill_at(step, lambda: owner.publish(new, "candidate")):
        assert list(index().entries) in (["2026.11.1"], ["2026.11.1", "2026.11.2"])
        assert owner.publish(new, "candidate").release == "2026.11.2"
        assert (owner.root / "releases" / "2026.11.2" / "index.html").exists()
        shutil.rmtree(owner.root)
        shutil.copytree(start, owner.root)
        step += 40
    record_property(refused.KILLS, step // 40 - 1)
    assert step > 80
