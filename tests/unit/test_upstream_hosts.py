"""Upstream hosts in good and bad states: git over HTTP is taken where an archive proves it, else the archive, and no fork is stranded."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from tests.refusals import refusal
from tests.support import wheels
from tests.support.githost import GitHost
from tests.unit.conftest import PARTY, ROOT, Host, Index, Nest

from sparkwright.builder import pipeline
from sparkwright.builder.wheel.archive import BUILD_RECORD, WheelName
from sparkwright.builder.workspace import source_tree
from sparkwright.cli import main, options
from sparkwright.core import git, strict_yaml
from sparkwright.core.files import sha256_file
from sparkwright.forks import fetch, resolve
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import (
    UNRESOLVED,
    ForkLock,
    ForkSpec,
    GitSpec,
    SdistSpec,
    SourceProof,
    SourceSpecs,
    StackSpec,
    VendoredLock,
    WheelSpec,
)

HEADERS = {
    "include/cutlass/version.h": b"#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 8\n#define CUTLASS_PATCH 0\n",
    "include/cutlass/a.h": b"int a;\r\n",
}
#: What a commit has and its release lacks.
UNRELEASED = {"test/forged.h": b"int forged;\n"}
GENERATED = {"PKG-INFO": b"Name: widget-kit\n", "widget.egg-info/SOURCES.txt": b"a\n"}
FOLDER = "kit/third/cutlass"
Kind = Literal["sdist", "sdist with submodules", "folder of a wheel"]
KINDS: tuple[Kind, ...] = ("sdist", "sdist with submodules", "folder of a wheel")
NESTED = ("third/party", "third/party/deps/inner")


class World:
    """A release of one kind at its hosts and on the index, and a stack that was locked while no host answered."""

    def __init__(self, host: Host, index: Index, kind: Kind, server: GitHost, changed: Mapping[str, bytes]) -> None:
        self.host, self.server, self.archive = host, server, "wheel" if kind == "folder of a wheel" else "sdist"
        host.work.commit({**HEADERS, **UNRELEASED})
        self.nest = Nest(host) if kind == "sdist with submodules" else None
        self.commit = host.work.git("rev-parse", "HEAD")
        released = {**HEADERS, **({"third/party/deps/inner/inner.txt": b"inner\n"} if self.nest else {})}
        self.last = [*released][-1]
        self.released = released | {path or self.last: data for path, data in changed.items()}
        if self.archive == "sdist":
            self.released |= GENERATED
            index.release("1", self.released)
            archive: dict[str, Any] = {"sdist": SdistSpec("widget-kit", "1", ("PKG-INFO", "*.egg-info/*"))}
        else:
            with zipfile.ZipFile(index.root / "widget_kit-1-py3-none-any.whl", "w") as wheel:
                for name, data in {**self.released, "../../__init__.py": b""}.items():
                    wheel.writestr(os.path.normpath(f"{FOLDER}/{name}"), data)
            index.add("widget_kit-1-py3-none-any.whl")
            archive = {"wheel": WheelSpec("widget-kit", "1", "py3-none-any", FOLDER), "upstream": "v0", "accepted": "it is the later release"}
        host.lock()
        # A release carries the beginning of its commit, a folder of a wheel none.
        git = GitSpec(host.url, "v1", self.commit[:9] if self.archive == "sdist" else "")
        stack = StackSpec(host.stack, "12.1f", "spark.t", {host.fork: ForkSpec("headers", SourceSpecs(git=git, **archive))})
        (host.root / "forks" / host.stack / "stack.yaml").write_text(strict_yaml.dump(stack))
        (host.root / "forks" / host.stack / "lock.yaml").unlink()
        build = host.root / "build" / host.stack
        (build / "archs.yaml").write_text("rules: []\n")
        shutil.copyfile(ROOT / "build" / "2026.11" / "pylock.toml", build / "pylock.toml")
        self.lock(answers=False)

    def lock(self, *, answers: bool) -> ForkLock:
        """Lock the stack as the command does, and return the lock of the fork."""
        assert main.run(["lock", *self.words(answers=answers)]) == 0
        return self.run().lock.forks[self.host.fork]

    def words(self, *, answers: bool) -> list[str]:
        """Return what a command line says to reach the hosts, or hosts that refuse any connection, from an empty store."""
        places = {self.host.url: str(self.host.path), **self.host.mirrors}
        mirrors = list[str]()
        for url, place in places.items():
            path = Path(place).relative_to(self.server.folder)
            mirrors += ["--mirror", f"{url}={self.server.url}/{path}" if answers else f"{url}=http://127.0.0.1:9/"]
        cache = self.host.root.parent / ("cache" if answers else "alone")
        return ["--stack", self.host.stack, "--root", str(self.host.root), "--cache-dir", str(cache), *mirrors]

    def run(self, *words: str, answers: bool = True) -> RunContext:
        """Return a run that reaches the hosts, or none."""
        output = self.host.root.parent / f"dist-{answers}"
        return options.checkout(main.parse(["build", *self.words(answers=answers), "--output", str(output), *words]))

    def written(self, context: RunContext) -> Mapping[str, bytes]:
        """Return what a wheel says of its making: the build record and the bill of materials."""
        made = pipeline.dist_info(context, source_tree(context, self.host.fork))
        assert callable(made)
        return made(WheelName("widget", "1", "py3-none-any"))

    def deviations(self, context: RunContext) -> list[str]:
        """Return the deviations in the build record."""
        return list(json.loads(self.written(context)[BUILD_RECORD]).get("deviations", []))


@pytest.fixture(name="server")
def _server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GitHost]:
    monkeypatch.setitem(git._CONFIG, "http.lowSpeedTime", "1")
    with GitHost(tmp_path) as server:
        yield server


def _silent(world: World) -> None:
    """Let the host of the inner submodule be silent, or the only host once it has named the tag."""
    world.server.sound = lambda path, sent: "/inner" not in path if world.nest else b"command=fetch" not in sent


def _add_fork(world: World, needs: tuple[str, ...] = ()) -> None:
    """Add a fork to the stack that is cloned from the same host, and not locked yet."""
    project = world.run().project
    other = ForkSpec("headers", SourceSpecs(git=GitSpec(world.host.url, "v1")), needs=needs)
    spec = msgspec.structs.replace(project.spec, forks={**project.spec.forks, "other": other})
    project.stack_file.write_text(strict_yaml.dump(spec))
    (project.build_folder / "environment.yaml").write_text("forks: {widget: {distribution: widget}, other: {distribution: other}}\n")


def _hanging(world: World) -> None:
    _silent(world)
    world.server.hangs = True


def _moved(world: World) -> None:
    """Move the tag, at the host, to a commit with another file."""
    world.host.work.commit({"include/cutlass/a.h": b"int b;\n"})
    world.host.work.git("tag", "--force", "v1")
    world.host.push("v1")


#: What the archive has that the commit has not (an empty path is that of its last file), what the hosts do, and the reference.
STATES: dict[str, tuple[Mapping[str, bytes], Callable[[World], None] | None, str]] = {
    "equal": ({}, None, ""),
    "one file more": ({"include/more.h": b""}, None, "sdist-differs"),
    "one byte other": ({"": b"other\n"}, None, "sdist-differs"),
    "silent submodule": ({}, _silent, "source-unreachable"),
    "hanging submodule": ({}, _hanging, "source-unreachable"),
    "moved tag": ({}, _moved, "source-mismatch"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", STATES)
def test_git_is_taken_if_the_archive_proves_it_and_else_the_archive(
    host: Host, offered: Index, server: GitHost, kind: Kind, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    Whatever the hosts do, the tree is that of the locked archive, as without a network, and what the archive lacks is not in it. A proved commit
    and a silent host change no byte of a wheel; a refused commit is named in it, and --source git refuses. A host that says nothing costs seconds.
    """
    changed, happens, reference = STATES[state]
    # Without the beginning of a commit, its files tell.
    reference = "sdist-differs" if (kind, state) == ("folder of a wheel", "moved tag") else reference
    world = World(host, offered, kind, server, changed)
    if happens:
        happens(world)
    begun = time.monotonic()
    if reference:
        with refusal(reference) as caught:
            fetch.fetch(world.run("--source", "git"), host.fork)
        wrong = [f"{path} is not in the commit" if path else f"{world.last} differs" for path in changed]
        assert caught.value.todo.endswith(f"Or take the locked archive: --source {world.archive}.")
        assert not changed or list(caught.value.details) == wrong
    capsys.readouterr()
    run, alone = world.run(), world.run(answers=False)
    fetched, said, without = fetch.fetch(run, host.fork), capsys.readouterr().err, fetch.fetch(alone, host.fork)
    locked, recorded = run.lock.forks[host.fork], "" if reference == "source-unreachable" else reference

    assert time.monotonic() - begun < 30
    assert (fetched.kind, fetched.resolved, fetched.git_error) == (world.archive if reference else "git", True, recorded)
    assert fetched.pin == (getattr(locked, world.archive).sha256 if reference else world.commit)
    assert dict(run.objects.files(fetched.tree)) == world.released
    assert (without.kind, without.tree, without.git_error) == (world.archive, fetched.tree, "")
    assert (f"taking the {world.archive}, because the git source fails ({reference};" if reference else "are the commit's") in said
    named = f"from {fetched.origin} in place of git ({reference})."
    assert [text for text in world.deviations(run) if named in text] == world.deviations(run)[: bool(recorded)]
    assert (world.written(run) == world.written(alone)) == (not recorded)


def test_a_damaged_object_database_is_not_blamed_on_the_upstream(host: Host, offered: Index, server: GitHost) -> None:
    """No archive is put over it."""
    world = World(host, offered, "sdist", server, {})
    run = world.run()
    fetch.fetch(run, host.fork)
    for path in (run.objects.path / "objects").glob("??/*"):
        path.chmod(0o644)
        path.write_bytes(b"\xff" * 9)
    for again in (False, True):
        with refusal("git-failed"):
            fetch.fetch(run, host.fork, again=again)


def test_a_source_whose_submodules_cannot_be_read_is_unresolved(host: Host, offered: Index, server: GitHost) -> None:
    """The lock does not call it whole, and a build does not leave out a submodule that the lock lacks."""
    world = World(host, offered, "sdist with submodules", server, {})
    assert world.nest
    # A host that brings files by request alone, as the real ones do.
    for allowed in ("uploadpack.allowFilter", "uploadpack.allowAnySHA1InWant"):
        world.nest.party.git("config", allowed, "true")
    blob = world.nest.party.git("rev-parse", "HEAD:.gitmodules").encode()
    run, source = world.run(), VendoredLock(PARTY, "main", UNRESOLVED, UNRESOLVED, kind="fetchcontent")
    server.sound = lambda _, sent: blob not in sent
    assert [(name, entry.resolved) for name, entry in resolve.pin(run, run.project.fork(host.fork), "parts", source).items()] == [("parts", False)]

    server.sound = lambda *_: True
    locked = resolve.pin(run, run.project.fork(host.fork), "parts", source)
    assert [*locked] == ["parts", "parts/deps/inner"]
    tree = fetch.vendored_tree(run, host.fork, "parts", locked, ())
    assert run.objects.blob(tree, "deps/inner/inner.txt") == b"inner\n"
    with refusal("source-unresolved", match="submodules that the lock does not name"):
        fetch.vendored_tree(run, host.fork, "parts", {"parts": locked["parts"]}, ())
    left_out = fetch.vendored_tree(run, host.fork, "parts", {"parts": locked["parts"]}, ("parts/deps/inner",))
    assert run.objects.submodules(left_out) == {}


def test_a_host_that_came_back_is_asked_again_by_fetch(host: Host, offered: Index, server: GitHost) -> None:
    """
    A run goes on with what an earlier one took; the command that brings sources tries git again. A wheel that says why it is not made of git is
    not reused then.
    """
    world = World(host, offered, "sdist with submodules", server, {})
    _silent(world)
    first = pipeline.build(world.run(), host.fork)
    taken = fetch.fetch(world.run(), host.fork)
    server.sound = lambda *_: True

    assert fetch.fetch(world.run(), host.fork) == taken
    assert pipeline.build(world.run(), host.fork) == first
    assert fetch.fetch(world.run(), host.fork, again=True).kind == "git"
    assert fetch.fetch(world.run(), host.fork).pin == world.commit
    again = pipeline.build(world.run(), host.fork)
    assert wheels.build_record(pipeline.wheel_path(world.run(), again)).deviations == ()


def test_a_failed_proof_strands_no_other_fork(host: Host, offered: Index, server: GitHost) -> None:
    """The lock stays as it was, and --fork locks the others."""
    world = World(host, offered, "sdist", server, {"include/more.h": b""})
    before = world.run().lock
    _add_fork(world)
    with refusal("sdist-differs"):
        world.lock(answers=True)
    assert main.run(["lock", "--fork", "other", *world.words(answers=True)]) == 0
    locked = world.run().lock.forks
    assert (locked[host.fork], locked["other"].is_resolved) == (before.forks[host.fork], True)


def test_a_damaged_wheel_in_the_store_is_made_again(host: Host, offered: Index, server: GitHost) -> None:
    """Also where the output folder has a link to it."""
    world = World(host, offered, "sdist", server, {})
    built = pipeline.build(world.run(), host.fork)
    path = pipeline.wheel_path(world.run(), built)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert pipeline.last_wheel(world.run(), host.fork) is None
    again = pipeline.build(world.run(), host.fork)
    assert (again, sha256_file(path)) == (built, built.sha256)


@pytest.mark.parametrize("kind", KINDS)
def test_lock_records_what_a_host_proved_and_changes_no_tree(host: Host, offered: Index, server: GitHost, kind: Kind) -> None:
    """
    Commit, tree, submodules and proof are in the lock. The tree stays that of the archive; a wheel names the commit, and has the same bytes with
    the host as without a network. What makes the release another than upstream's stays in it, with the reason.
    """
    world = World(host, offered, kind, server, {})
    before = fetch.fetch(world.run(), host.fork)
    locked = world.lock(answers=True)
    run, alone = world.run(), world.run(answers=False)
    fetched = fetch.fetch(run, host.fork)

    assert locked.git
    assert (locked.git.commit, locked.git.tree, sorted(locked.submodules)) == (world.commit, host.work.tree(), [*(NESTED if world.nest else ())])
    generated = tuple(GENERATED) if world.archive == "sdist" else ()
    assert locked.proof == SourceProof(len(world.released) - len(generated), generated, absent=8 if world.nest else 1)
    assert (fetched.kind, fetched.pin, fetched.tree) == ("git", world.commit, before.tree)
    assert fetch.fetch(alone, host.fork) == fetched
    assert world.written(run) == world.written(alone)
    said = "widget packs widget v1, although upstream pins v0; accepted, because it is the later release."
    assert world.deviations(alone) == [said] * (world.archive == "wheel")


def test_an_archive_with_another_content_than_the_locked_tree_is_refused(host: Host, offered: Index, server: GitHost) -> None:
    """The hash of its file does not help; nor is git taken then, whose proof it is."""
    world = World(host, offered, "sdist", server, {})
    path = world.run().project.lock_file
    path.write_text(re.sub(r"tree: [0-9a-f]{40}", f"tree: {'f' * 40}", path.read_text()))
    for source in ("auto", "git", "sdist"):
        with refusal("source-mismatch", match=r"content of widget_kit-1\.tar\.gz is not the tree"):
            fetch.fetch(world.run("--source", source), host.fork)
