"""Publishing as a whole: what an index admits, promotion, yank, pruning, and what pip, uv and a TUF client then see."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.refusals import refusal
from tests.support import githubapi, newpublisher, tufindex, verdicts, wheels
from tests.support.newpublisher import Place
from tests.support.tufindex import Reader

from sparkwright.core.files import sha256_bytes
from sparkwright.release import keys, locked_set, pages, repository
from sparkwright.release.publisher import PublishRequest
from sparkwright.release.repository import IndexFolder

Wheels = list[Path]


@pytest.fixture(scope="module", name="world")
def _world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with newpublisher.place(tmp_path_factory.mktemp("world")) as place:
        yield place


@pytest.fixture(scope="module", name="made")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    return wheels.release(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module", name="published")
def _published(world: Place, made: Wheels) -> Path:
    world.publish(made)
    return world.root


@pytest.fixture(name="place")
def _place(world: Place, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Return a publisher with a copy of an index that holds the verified release 2026.11.1."""
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    fresh = Place.__new__(Place)
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


def test_release_names_every_file_by_hash(place: Place, made: Wheels, tmp_path: Path) -> None:
    with tufindex.serve(place.root) as url:
        release, state = Reader(
            url, tmp_path / "client", (place.root / "metadata" / "1.root.json").read_bytes()
        ).read()["2026.11.1"]
    assert (state.channel, state.stack, state.missing, state.pythons[0]) == (
        "verified",
        "2026.11",
        (),
        "3.11",
    )
    assert [wheel.name for wheel in release.wheels] == [path.name for path in made]
    assert all(
        sha256_bytes((place.root / file.path).read_bytes()) == file.sha256 for file in release.files
    )
    vllm = release.wheels[-1]
    assert vllm.proof.recipes == (verdicts.RECIPE,)
    assert vllm.proof.verdicts
    assert vllm.provenance
    statement = json.loads((place.root / vllm.provenance.path).read_bytes())
    assert statement["subject"] == [{"name": vllm.name, "digest": {"sha256": vllm.sha256}}]
    assert [
        entry["name"] for entry in statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    ][:3] == [
        "vllm",
        "clamp-the-samples.patch",
        "35568.patch",
    ]
    [lock] = release.locks
    packages = {
        entry["name"]: entry
        for entry in tomllib.loads((place.root / lock.path).read_text())["packages"]
    }
    own = packages["vllm"]["wheels"][0]
    assert (own["hashes"]["sha256"], own["url"]) == (
        vllm.sha256,
        f"{newpublisher.URL}{vllm.path.replace('+', '%2B')}",
    )
    assert lock.packages["ray"] == "2.60.0"
    assert place.index.facts.url == newpublisher.URL


def test_same_wheels_are_published_once_and_restored(place: Place, made: Wheels) -> None:
    before = place.files()
    done = place.publish(made)
    assert (done.release, done.already, done.sent) == ("2026.11.1", True, ())
    assert place.files() == before
    damaged, lost = place.index.entries["2026.11.1"].release.wheels[:2]
    (place.root / damaged.path).write_bytes(b"a faulty disk")
    (place.root / lost.path).unlink()
    place.publish(made)
    assert place.files() == before


def test_dry_run_writes_nothing(place: Place, new: Wheels, tmp_path: Path) -> None:
    before = place.files()
    done = place.publish(new, "candidate", dry_run=True)
    assert done.release == "2026.11.2"
    assert {entry.gate for entries in done.missing.values() for entry in entries} == {"G5"}
    assert place.files() == before
    place.root = tmp_path / "nowhere"
    place.publish(new, "candidate", dry_run=True)
    assert not place.root.exists()


def test_incomplete_release_is_only_a_candidate(place: Place, new: Wheels) -> None:
    before = place.files()
    with refusal("verified-refused") as caught:
        place.publish(new)
    assert any("G5" in line for line in caught.value.details)
    assert place.files() == before
    done = place.publish(new, "candidate")
    assert done.release == "2026.11.2"
    assert place.index.entries["2026.11.2"].state.missing == ("G5",)
    with refusal("release-name-taken"):
        for path in new:
            wheels.judge(path, companions=new[:3] if path == new[-1] else ())
        place.publish(new)


def test_promotion_needs_new_verdicts(place: Place, new: Wheels, tmp_path: Path) -> None:
    place.publish(new, "candidate")
    with refusal("verified-refused"):
        place.publisher().promote("2026.11.2", new[0].parent)
    judged = tmp_path / "judged"
    judged.mkdir()
    for path in new:
        copy = Path(shutil.copy(path, judged))
        wheels.judge(copy, companions=new[:3] if path == new[-1] else ())
        copy.unlink()
    before = place.index.entries["2026.11.2"].release
    place.publisher().promote("2026.11.2", judged)
    entry = place.index.entries["2026.11.2"]
    assert (entry.state.channel, entry.state.missing, entry.release.missing) == ("verified", (), {})
    assert [wheel.sha256 for wheel in entry.release.wheels] == [
        wheel.sha256 for wheel in before.wheels
    ]
    assert entry.release.notes != before.notes
    with refusal("release-unknown", match="no candidate"):
        place.publisher().promote("2026.11.2", judged)
    with refusal("release-unknown"):
        place.publisher().promote("2026.11.9", judged)


def test_promotion_reads_the_published_bytes(place: Place, new: Wheels) -> None:
    place.publish(new, "candidate")
    wheel = place.index.entries["2026.11.2"].release.wheels[-1]
    (place.root / wheel.path).write_bytes(b"other bytes")
    with refusal("index-damaged"):
        place.publisher().promote("2026.11.2", new[0].parent / "nowhere")


def test_yank_keeps_the_files_and_says_why(place: Place, made: Wheels) -> None:
    before = place.files()
    for reason in ("", " ", "two\nlines"):
        with refusal("usage"):
            place.publisher().yank("2026.11.1", reason)
    place.publisher().yank("2026.11.1", 'it "hangs" <b>')
    assert (
        before.items()
        <= {
            **place.files(),
            **{name: data for name, data in before.items() if not name.startswith("files/")},
        }.items()
    )
    page = (place.root / "simple" / "verified" / "vllm" / "index.html").read_text()
    assert 'data-yanked="it &#34;hangs&#34; &lt;b&gt;"' in page
    assert (
        "it &#34;hangs&#34; &lt;b&gt;"
        in (place.root / "releases" / "2026.11.1" / "index.html").read_text()
    )
    with refusal("release-yanked"):
        place.publisher().yank("2026.11.1", "again")
    with refusal("release-yanked"):
        place.publish(made)


def test_pruned_names_stay_taken(place: Place, tmp_path: Path) -> None:
    for number in (2, 3, 4):
        place.publish(
            [wheels.vllm(tmp_path / str(number), label=f"spark.2026.11.{number}")], "candidate"
        )
    place.publisher().yank("2026.11.4", "bad")
    place.publish([wheels.vllm(tmp_path / "5", label="spark.2026.11.5")], "candidate")
    gone = place.index.entries["2026.11.2"].release.wheels[0]
    done = place.publisher().prune(2)
    assert done.releases == ("2026.11.2",)
    assert list(place.index.entries) == ["2026.11.1", "2026.11.3", "2026.11.4", "2026.11.5"]
    assert f"files/{gone.sha256}" in done.removed
    assert not (place.root / "releases" / "2026.11.2").exists()
    assert place.index.facts.retired == {gone.name: gone.sha256}
    with refusal("wheel-name-taken"):
        place.publish(
            [wheels.vllm(tmp_path / "again", label="spark.2026.11.2", size=100)], "candidate"
        )
    assert place.publisher().prune(1, verified=True).releases == ("2026.11.3", "2026.11.4")


def test_index_admits_neither_taken_names_nor_lower_versions(place: Place, tmp_path: Path) -> None:
    before = place.files()
    with refusal("wheel-name-taken"):
        place.publish([wheels.vllm(tmp_path / "a", size=1000)], "candidate")
    with refusal("version-order"):
        place.publish([wheels.vllm(tmp_path / "b", label="spark.2026.10")], "candidate")
    with refusal("usage", match=r"stack 2026\.05"):
        place.publish(
            [wheels.vllm(tmp_path / "c", stack="2026.05", label="spark.2026.12")], "candidate"
        )
    assert place.files() == before


def test_address_of_the_index_is_known_and_kept(place: Place, new: Wheels, tmp_path: Path) -> None:
    request = functools.partial(PublishRequest, tuple(new), "candidate")
    with refusal("usage", match="served at"):
        place.publisher().publish(request(url="https://other.example/"))
    place.root = tmp_path / "fresh"
    for url in ("", "ftp://wheels.example/"):
        with refusal("usage", match="will be served"):
            place.publisher().publish(request(url=url))
    assert not place.root.exists()


def test_publisher_without_keys_changes_nothing(place: Place, new: Wheels, tmp_path: Path) -> None:
    keys.make(tmp_path / "others")
    place.keys, before = tmp_path / "others", place.files()
    for change in (
        lambda: place.publish(new, "candidate"),
        lambda: place.publisher().yank("2026.11.1", "bad"),
        lambda: place.publisher().refresh(),
    ):
        with refusal("key-missing"):
            change()
    assert place.files() == before


def test_there_is_no_index(place: Place, tmp_path: Path) -> None:
    place.root = tmp_path / "nowhere"
    with refusal("index-missing"):
        place.publisher().yank("2026.11.1", "bad")
    with refusal("index-missing"):
        place.publisher().refresh()
    assert not place.root.exists()


def test_slow_publisher_loses(place: Place, new: Wheels, monkeypatch: pytest.MonkeyPatch) -> None:
    real = locked_set.resolve

    def slow(*words: Any, **options: Any) -> Any:
        resolved = real(*words, **options)
        place.publisher().refresh()
        return resolved

    monkeypatch.setattr(locked_set, "resolve", slow)
    with refusal("index-moved"):
        place.publish(new, "candidate")
    assert list(place.index.entries) == ["2026.11.1"]


def test_full_disk_is_refused_before_anything_is_written(
    place: Place, new: Wheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = place.files()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
    with refusal("disk-full"):
        place.publish(new, "candidate")
    assert place.files() == before


def test_file_where_a_folder_belongs_is_refused(place: Place, new: Wheels) -> None:
    (place.root / "files").rename(place.root.with_name("kept"))
    (place.root / "files").write_text("a stray file")
    before = place.files()
    with refusal("index-unwritable"):
        place.publish(new, "candidate")
    assert place.files() == before


def test_folder_of_something_else_is_refused(place: Place, new: Wheels, tmp_path: Path) -> None:
    place.root = tmp_path / "other"
    (place.root / "releases" / "mine").mkdir(parents=True)
    with refusal("index-damaged", match="no sound index"):
        place.publish(new, "candidate")
    assert [path.name for path in place.root.rglob("*")] == ["releases", "mine"]


def test_pinned_root_forbids_a_second_index(place: Place, new: Wheels, tmp_path: Path) -> None:
    fingerprint, place.root = place.index.fingerprint, tmp_path / "second"
    rules = verdicts.release_policy()
    pinned = msgspec.structs.replace(
        rules, file=msgspec.structs.replace(rules.file, root=fingerprint)
    )
    with refusal("index-missing"):
        dataclasses.replace(place.publisher(), policy=pinned).publish(
            PublishRequest(tuple(new), "candidate", url=place.url)
        )
    assert not place.root.exists()


def test_old_pages_are_written_again(place: Place) -> None:
    pages_before = place.files()
    for name in ("index.html", "simple/verified/vllm/index.html", "releases/2026.11.1/index.html"):
        (place.root / name).write_bytes(b"killed")
    (place.root / "simple" / "verified" / "gone").mkdir()
    pages.write(place.index)
    assert place.files() == pages_before
    assert not (place.root / "simple" / "verified" / "gone").exists()


def test_refresh_renews_and_tidies(place: Place) -> None:
    (place.root / "files" / ("0" * 64)).mkdir()
    (place.root / "files" / ("0" * 64) / f"{repository.UNFINISHED}x").write_bytes(b"killed")
    done = place.publisher().refresh()
    assert (done.version, done.removed) == (2, ("files/" + "0" * 64,))
    assert place.index.targets.signed.version == 2


def test_rotation_by_the_publisher(place: Place, tmp_path: Path) -> None:
    keys.make(tmp_path / "new", ["online"])
    place.publisher().rotate(["snapshot", "timestamp"], keys.load([tmp_path / "new"]))
    with refusal("key-missing"):
        place.publisher().refresh()
    shutil.copy(tmp_path / "new" / "online.pem", place.keys / "online-2.pem")
    try:
        assert place.publisher().refresh().version == 3
    finally:
        (place.keys / "online-2.pem").unlink()


def test_role_is_shared_with_the_holder_of_another_key(place: Place, tmp_path: Path) -> None:
    keys.make(tmp_path / "colleague", ["targets"])
    both = [place.keys / "targets.pem", tmp_path / "colleague" / "targets.pub"]
    place.publisher().rotate(["targets"], keys.load(both))
    assert place.index.root
    assert len(place.index.root.signed.roles["targets"].keyids) == 2
    theirs = keys.load([tmp_path / "colleague", place.keys / "online.pem"])
    colleague = dataclasses.replace(place.publisher(), keys=theirs)
    with refusal("index-unpinned"):
        colleague.yank("2026.11.1", "by the colleague")
    rules = colleague.policy
    file = msgspec.structs.replace(rules.file, root=place.index.fingerprint)
    pinned = msgspec.structs.replace(rules, file=file)
    dataclasses.replace(colleague, policy=pinned).yank("2026.11.1", "by the colleague")
    place.publisher().refresh()


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_pip_and_uv_read_the_simple_pages(
    place: Place, new: Wheels, tmp_path: Path, installer: str
) -> None:
    place.publish(new, "candidate")
    place.publisher().yank("2026.11.1", "bad")
    environment = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = str(environment / "bin" / "python")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-cache-dir",
        "--no-deps",
    ]
    uv = [
        "uv",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--python",
        python,
        "--cache-dir",
        str(tmp_path / "cache"),
    ]
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))
    }
    with tufindex.serve(place.root) as url:
        command = [
            *(pip if installer == "pip" else uv),
            "--index-url",
            f"{url}simple/candidate/",
            "sparkwright-cutlass",
            "vllm",
        ]
        subprocess.run(command, check=True, env=clean)
    [info] = environment.glob("lib/*/site-packages/vllm-*.dist-info")
    assert "spark.2026.11.2" in info.name
    document = json.loads((place.root / "simple" / "candidate" / "vllm" / "index.json").read_text())
    assert [(entry["yanked"], entry["size"] > 0) for entry in document["files"]] == [
        (False, True),
        ("bad", True),
    ]


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_pip_and_uv_install_the_locked_set(
    tmp_path: Path, made: Wheels, monkeypatch: pytest.MonkeyPatch, installer: str
) -> None:
    with newpublisher.place(tmp_path) as place:
        for name, value in place.environment.items():
            monkeypatch.setenv(name, value)
        place.root.mkdir()
        with tufindex.serve(place.root) as place.url:
            place.publish(made)
            [lock] = place.index.entries["2026.11.1"].release.locks
            environment = tmp_path / "env"
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
            python = str(environment / "bin" / "python")
            if installer == "uv":
                command = [
                    "uv",
                    "pip",
                    "sync",
                    "--quiet",
                    "--python",
                    python,
                    f"{place.url}{lock.path}",
                ]
            else:
                file = str(place.root / lock.path)
                command = [
                    sys.executable,
                    "-m",
                    "pip",
                    "--python",
                    python,
                    "install",
                    "--quiet",
                    "--no-cache-dir",
                    "-r",
                    file,
                ]
            subprocess.run(command, check=True)
            assert {
                info.name.partition("-")[0]
                for info in environment.glob("lib/*/site-packages/*.dist-info")
            } == {name.replace("-", "_") for name in lock.packages}


def test_client_of_the_index_is_published_with_it(
    place: Place, new: Wheels, tmp_path: Path
) -> None:
    [first] = place.index.facts.clients
    place.publish(new, "candidate")
    assert place.index.facts.clients == (first,)
    keys.make(tmp_path / "next", ["root"])
    place.publisher().rotate(["root"], keys.load([tmp_path / "next"]))
    place.publish([wheels.vllm(tmp_path / "third", label="spark.2026.11.3")], "candidate")
    second = list(place.index.facts.clients)[-1]
    place.publisher().prune(1)
    with tufindex.serve(place.root) as url:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-cache-dir",
            "--dest",
            str(tmp_path / "client"),
        ]
        for wheel in (first, second):
            subprocess.run(
                [
                    *command,
                    "--index-url",
                    f"{url}simple/verified/",
                    f"sparkwright-install=={wheel.version}",
                ],
                check=True,
            )
    for number, wheel in enumerate((first, second), 1):
        with zipfile.ZipFile(tmp_path / "client" / wheel.name) as archive:
            assert (
                archive.read("sparkwright/client/root.json")
                == (place.root / "metadata" / f"{number}.root.json").read_bytes()
            )
            assert archive.read("sparkwright/client/index.txt").decode().strip() == newpublisher.URL
    assert f"sparkwright-install=={second.version}" in (place.root / "index.html").read_text()


def test_wheels_as_assets_of_github(
    place: Place, new: Wheels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", githubapi.TOKEN)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "PIP_CERT", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    with githubapi.serve() as github:
        mirrors = {
            "https://api.github.com": github.api,
            "https://uploads.github.com": github.uploads,
        }
        request = PublishRequest(tuple(new), "candidate", github=github.repository, url=place.url)
        place.publisher(mirrors=mirrors).publish(request)
        release = place.index.entries["2026.11.2"].release
        assert all(
            wheel.url.startswith(f"{github.api}/acme/wheels/releases/download/2026.11.2-")
            for wheel in release.wheels
        )
        assert not any((place.root / wheel.path).exists() for wheel in release.wheels)
        [remote] = github.releases.values()
        assert sorted(asset.name for asset in remote.assets.values()) == sorted(
            [wheel.name for wheel in release.wheels]
            + [f"{wheel.name}.metadata" for wheel in release.wheels]
        )
        assert (
            release.wheels[-1].url
            in (place.root / "simple" / "candidate" / "vllm" / "index.html").read_text()
        )
        lock = (place.root / release.locks[0].path).read_text()
        assert release.wheels[-1].url in lock
        judged = tmp_path / "judged"
        judged.mkdir()
        for path in new:
            copy = Path(shutil.copy(path, judged))
            wheels.judge(copy, companions=new[:3] if path == new[-1] else ())
            copy.unlink()
        place.publisher(mirrors=mirrors).promote("2026.11.2", judged)
    assert place.index.entries["2026.11.2"].state.channel == "verified"


def test_notes_compare_with_the_release_before(place: Place, new: Wheels) -> None:
    place.publish(new, "candidate")
    release = place.index.entries["2026.11.2"].release
    assert release.before == "2026.11.1"
    assert release.notes
    text = (place.root / release.notes.path).read_text()
    assert "## Changes since 2026.11.1" in text
    assert "All forks have the same sources, patches and rules." in text
    assert "| vllm | G5 | – not-run | `not-climbed` |" in text
    assert "spark.2026.11.2" in text


def test_notes_say_which_patches_are_needed(place: Place, tmp_path: Path) -> None:
    patches = (
        (*wheels.PATCHES[0][:2], "another reason", 0),
        ("new.patch", "Something new", "it is needed", 0),
    )
    place.publish([wheels.vllm(tmp_path, label="spark.2026.11.2", patches=patches)], "candidate")
    first, second = (entry.release for entry in place.index.entries.values())
    texts = [
        (place.root / entry.notes.path).read_text() for entry in (first, second) if entry.notes
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


def test_hostile_strings_stay_text(place: Place, tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script> | `x` [a](http://e) \u202e @all"
    patches = (("a.patch", hostile, hostile, 0),)
    place.publish([wheels.vllm(tmp_path, label="spark.2026.11.2", patches=patches)], "candidate")
    release = place.index.entries["2026.11.2"].release
    assert release.notes
    page = (place.root / "releases" / "2026.11.2" / "index.html").read_text()
    text = (place.root / release.notes.path).read_text()
    assert "<script>" not in page
    assert "\u202e" not in page + text
    assert "<script>" not in text
    assert "[a](" not in text


def test_publishing_into_a_large_index_is_quick(place: Place, made: Wheels) -> None:
    """A file of each kind is written for 200 releases of ten wheels; the limit of the benchmark is 3 s, that of a shared machine more."""
    import time

    entry = place.index.entries["2026.11.1"]
    with place.index.changing(keys.load([place.keys]), tufindex.ROLES) as change:
        for number in range(2, 201):
            own = tuple(
                msgspec.structs.replace(
                    wheel,
                    name=wheel.name.replace("spark.2026.11", f"spark.2026.11.{number}"),
                    project=f"{wheel.project}{place_}",
                )
                for place_ in range(3)
                for wheel in entry.release.wheels
            )
            release = msgspec.structs.replace(
                entry.release, name=f"2026.11.{number}", wheels=own[:10]
            )
            change.set_release(release, entry.state)
    began = time.monotonic()
    pages.write(place.index)
    first = time.monotonic() - began
    began = time.monotonic()
    place.publisher().yank("2026.11.200", "slow")
    second = time.monotonic() - began
    assert len(place.index.entries) == 200
    assert first < 30, first
    assert second < 10, second


def test_kill_of_a_publication_is_completed_by_the_next(place: Place, new: Wheels) -> None:
    from tests.release.test_repository import kill_at

    index: Callable[[], IndexFolder] = lambda: IndexFolder(place.root)  # noqa: E731
    start, step = shutil.copytree(place.root, place.root.with_name("start")), 40
    while kill_at(step, lambda: place.publish(new, "candidate")):
        assert list(index().entries) in (["2026.11.1"], ["2026.11.1", "2026.11.2"])
        assert place.publish(new, "candidate").release == "2026.11.2"
        assert (place.root / "releases" / "2026.11.2" / "index.html").exists()
        shutil.rmtree(place.root)
        shutil.copytree(start, place.root)
        step += 40
    assert step > 80
