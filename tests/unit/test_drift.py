"""Drift: what becomes of each patch on later releases and on the branch, by name and evidence, without touching the project."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from sparkwright.cherry_picks import series, upstream
from sparkwright.cherry_picks.ledger import Ledger
from sparkwright.cli import main
from sparkwright.core import digest
from sparkwright.demo import base as demo
from sparkwright.forks.lock import FileLock

if TYPE_CHECKING:
    from tests.unit.conftest import Host

TEXT = "".join(f"line {number}\n" for number in range(1, 41))
BLOCK = [f"    block {number}" for number in range(1, 6)]
#: What our patches do, in their order.
OURS = {
    "taken": ("line 5", "line five"),
    "kept": ("line 20", "line twenty"),
    "lost": ("line 35", "line thirty-five"),
    "altered": ("line 28", "\n".join(["line 28", *BLOCK])),
}
#: What upstream did, by release.
RELEASED = {
    "1.1": [OURS["taken"]],
    "1.2": [
        OURS["taken"],
        ("line 1", "above\nline 1"),
        ("line 35", "line XXXV"),
        ("line 28", "\n".join(["line 28", *BLOCK[:4], "    another"])),
    ],
}


def edited(*changes: tuple[str, str], text: str = TEXT) -> bytes:
    for old, new in changes:
        assert text.count(f"{old}\n") == 1
        text = text.replace(f"{old}\n", f"{new}\n", 1)
    return text.encode()


class Index:
    """A package index with sdists of widget, served as long as the block runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "files").mkdir(parents=True, exist_ok=True)

    def offer(self, version: str, text: bytes) -> FileLock:
        """Offer a release with *text* as a.txt, and return what a lock would say of it."""
        path = self.folder / "files" / f"widget-{version}.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name, data in {"a.txt": text, "b.txt": b"one\n", "PKG-INFO": f"Version: {version}\n".encode()}.items():
                member = tarfile.TarInfo(f"widget-{version}/{name}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        page = self.folder / "simple" / "widget" / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        links = (
            f'<a href="../../files/{one.name}#sha256={digest.sha256_file(one)}">{one.name}</a>' for one in sorted(path.parent.iterdir())
        )
        page.write_text(f"<!DOCTYPE html><html><body>{' '.join(links)}</body></html>")
        return FileLock("widget", version, path.name, digest.sha256_file(path), path.stat().st_size)


@pytest.fixture(scope="module", name="made")
def _made(hosts: type[Host], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    Return a folder to copy: a project on release 1.0 with four patches of ours and pick 7, its upstream, and the index.

    The index holds releases 1.0, 1.1, 1.2 and a pre-release; upstream merged 7 after them.
    """
    folder = tmp_path_factory.mktemp("drift")
    index, host = Index(folder / "index"), hosts(folder / "host")
    locked = index.offer("1.0", TEXT.encode())
    for version, changes in {**RELEASED, "2.0rc1": []}.items():
        index.offer(version, edited(*changes))
    host.work.commit({"a.txt": TEXT.encode(), "b.txt": b"one\n"}, "Release 1.0")
    host.lock(sdist=locked)
    host.work.git("checkout", "--quiet", "-b", "ours")
    text = TEXT
    for name, change in OURS.items():
        text = edited(change, text=text).decode()
        (host.series / f"{name}.patch").write_bytes(host.work.change({"a.txt": text.encode()}, name))
    (host.series / "series").write_text("".join(f"{name}.patch\n" for name in OURS))
    host.work.git("checkout", "--quiet", "main")
    head = host.pull(7, {"b.txt": b"two\n"})
    for version, changes in RELEASED.items():
        host.work.commit({"a.txt": edited(*changes)}, f"Release {version}")
    merge = host.squash(7)
    host.work.commit({"b.txt": b"three\n"}, "Change it again")
    host.push()
    seen = series.PullRequestSnapshot("Improve it", "octocat", "merged", head, merge, "main")
    record = series.record(host.session(), Ledger(host.url), seen, 7, "why", "then")
    host.write(msgspec.structs.replace(record, stacks={host.stack: {}}))
    return folder


@pytest.fixture(name="index")
def _index(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """Return the index, which answers."""
    shutil.copytree(made, tmp_path / "drift")
    index = Index(tmp_path / "drift" / "index")
    with demo.serve(index.folder) as address:
        monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", f"{address}/simple/")
        yield index


@pytest.fixture(name="stack")
def _stack(hosts: type[Host], index: Index) -> Host:
    """Return the project and its upstream."""
    return hosts(index.folder.parent / "host")


def told(host: Host, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Run ``drift`` and return what it says of the fork."""
    capsys.readouterr()
    assert main.main(["patch", "drift", *host.words, "--json", *words]) == 0
    [made] = json.loads(capsys.readouterr().out)["drift"]
    return dict(made)


def states(made: dict[str, Any]) -> dict[str, list[str]]:
    """Return the states of each patch in the order of the bases."""
    found: dict[str, list[str]] = {}
    for trial in made["of"]["trials"]:
        found.setdefault(trial["patch"].removesuffix(".patch"), []).append(trial["state"])
    return found


def test_the_tip_of_an_old_mirror_comes_before_newer_releases(
    stack: Host, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The days are those of the index's JSON pages; its HTML pages have none."""
    listed = upstream.releases
    days = {"1.1": "2026-10-01", "1.2": "2026-11-02"}
    monkeypatch.setattr(
        upstream,
        "releases",
        lambda *arguments, **options: [
            msgspec.structs.replace(release, day=days.get(release.version, "")) for release in listed(*arguments, **options)
        ],
    )
    assert told(stack, capsys, "--releases")["of"]["bases"] == ["1.1", "main 2026-11-01", "1.2"]


def test_every_patch_on_every_base(stack: Host, capsys: pytest.CaptureFixture[str]) -> None:
    """Upstream took one as it was and one with a change, moved one, broke one; the pick was merged after the last release."""
    made = told(stack, capsys, "--releases")

    assert made["of"]["bases"] == ["1.1", "1.2", "main 2026-11-01"]
    assert states(made) == {
        "#7": ["applies", "applies", "already-upstream"],
        "taken": ["already-upstream", "already-upstream", "already-upstream"],
        "kept": ["applies", "moves", "moves"],
        "lost": ["applies", "conflict", "conflict"],
        "altered": ["applies", "likely-upstream", "likely-upstream"],
    }


def test_where_each_patch_ended(stack: Host, capsys: pytest.CaptureFixture[str]) -> None:
    """The last base that takes it, the first that has it, what it is now, and why."""
    ended = {one["patch"].removesuffix(".patch"): one for one in told(stack, capsys, "--releases")["absorbed"]}
    merge = stack.ledger.record(7).merge[:12]

    assert {name: (one["last"], one["first"], one["state"]) for name, one in ended.items()} == {
        "#7": ("1.2", "main 2026-11-01", "already-upstream"),
        "taken": ("", "1.1", "already-upstream"),
        "kept": ("main 2026-11-01", "", "moves"),
        "lost": ("1.1", "", "conflict"),
        "altered": ("1.1", "1.2", "likely-upstream"),
    }
    assert ended["taken"]["proof"] == "reverse: 1.1 holds the whole change"
    assert ended["altered"]["proof"] == "4 of its 5 added lines stand there"
    assert ended["#7"]["proof"].startswith(f"ancestor: {merge} is part of main 2026-11-01; patch-id: {merge} ")


# Offline, and out of reach.


def test_offline_what_is_in_the_store_is_used(stack: Host, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases that were looked at before and the branch as it was last seen; nobody is asked, and the rest is left out."""
    whole = told(stack, capsys, "--releases")
    monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", "http://127.0.0.1:9/simple/")
    stack.path.rename(stack.path.with_suffix(".gone"))
    some = told(stack, capsys, "--offline", "--releases")

    assert some == whole
    assert told(stack, capsys, "--offline")["of"]["bases"] == ["1.2", "main 2026-11-01"]


# Bases by name.


def test_a_base_may_be_named(stack: Host, capsys: pytest.CaptureFixture[str]) -> None:
    """A release, a branch, a tag, and a commit; in the order in which they are named."""
    commit = stack.work.git("rev-parse", "main~1")
    names = ["1.1", "main", "v1", commit]
    made = told(stack, capsys, *(word for name in names for word in ("--to", name)))

    assert made["of"]["bases"] == names
    assert states(made)["#7"] == ["applies", "already-upstream", "applies", "already-upstream"]
    assert states(made)["taken"] == ["already-upstream", "already-upstream", "applies", "already-upstream"]
