"""Sources: what the lock names, from wherever the mirror map says and in whatever state hosts are, verified, and never anything else; mirrors."""

import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from tests.refusals import refusal
from tests.support import badserver, processes, wheels
from tests.support.loopback import GitHost
from tests.unit.conftest import INNER, PARTY, ROOT, Host, Index, Nest, Repository

from sparkwright.builder import pipeline, workspace
from sparkwright.builder.wheel.archive import BUILD_RECORD, WheelName
from sparkwright.cli import main, options
from sparkwright.core import config, files, git, strict_yaml
from sparkwright.core.store import Store
from sparkwright.demo import upstreams
from sparkwright.forks import fetch, mirror, resolve
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import (
    UNRESOLVED,
    FileLock,
    ForkLock,
    ForkSpec,
    GitSpec,
    Lock,
    Project,
    SdistSpec,
    SourceProof,
    SourceSpecs,
    StackSpec,
    VendoredLock,
    WheelSpec,
    render_lock,
)

SDIST = FileLock("widget-kit", "1", "widget_kit-1.tar.gz", "0" * 64, 1, tree="0" * 40)


@pytest.fixture(name="commit")
def _commit(host: Host) -> str:
    """Return a commit of the host."""
    return host.work.commit({"a.txt": b"1\r\n"})


def fetched_by(host: Host, *words: str) -> fetch.FetchedSource:
    """Return the source that a run with *words* fetches."""
    return fetch.fetch(host.context(*words), host.fork)


def without_host(host: Host, run: RunContext, url: str = "") -> RunContext:
    """Return *run* without the host of the fork, or of *url*."""
    return dataclasses.replace(run, mirrors={**run.mirrors, url or host.url: str(host.root / "gone")})


def test_a_prefix_is_resolved_by_the_ref(host: Host, commit: str) -> None:
    """The beginning of a commit is enough where the locked tag names a commit that begins so; it stays marked unresolved."""
    host.lock(commit=commit[:7], tree=UNRESOLVED)
    fetched = fetched_by(host)

    assert (fetched.pin, fetched.tree, fetched.resolved) == (commit, host.work.tree(), False)
    assert fetched.origin == f"{host.url} @ {commit}"


def test_another_source_than_the_locked_one_is_refused(host: Host, commit: str) -> None:
    """
    Another tree, a moved tag, a lock without a commit, and a kind that is not locked are errors that show both sides. A tag that a mirror merely
    lacks is no other source.
    """
    moved = host.work.commit({"a.txt": b"2\n"})
    for pins, source, reference, details in (
        (dict[str, Any](tree="0" * 40), "git", "source-mismatch", (f"lock:   {'0' * 40}", f"commit: {host.work.tree()}")),
        (dict[str, Any](commit=commit[:9]), "git", "source-mismatch", (f"lock: {commit[:9]}…", f"host: {moved}")),
        (dict[str, Any](commit=UNRESOLVED), "git", "source-unresolved", ()),
        (dict[str, Any](), "sdist", "not-provided", ("locked: git",)),
    ):
        host.lock(**pins)
        with refusal(reference, details=details):
            fetched_by(host, "--source", source)
    host.lock(commit=commit[:9])
    host.push(":refs/tags/v1")
    with refusal("source-unreachable", match=r"does not offer v1 of widget"):
        fetched_by(host, "--source", "git")


# Submodules, and what is left out.

@pytest.fixture(name="nest")
def _nest(host: Host) -> Nest:
    return Nest(host)


def test_locked_submodules_are_part_of_the_tree(host: Host, nest: Nest) -> None:
    """Files of submodules, and of theirs, stand where the build looks for them; nothing is left of the links."""
    host.lock(vendored=nest.locked())
    tree, objects = fetched_by(host).tree, host.context().objects

    assert dict(objects.files(tree)) == {
        ".gitmodules": objects.blob(nest.top.tree(), ".gitmodules"),
        "third/party/.gitmodules": objects.blob(nest.party.tree(), ".gitmodules"),
        "a.txt": b"1\n",
        "docs/guide.txt": b"guide\n",
        "docsy.txt": b"stays\n",
        "third/party/party.txt": b"party\n",
        "third/party/deps/inner/inner.txt": b"inner\n",
        "third/party/deps/inner/docs/big.txt": b"big\n",
    }
    assert objects.submodules(tree) == {}
    assert objects.is_complete(tree)


@pytest.mark.parametrize("locked_at", [None, "1" * 40], ids=["not locked", "locked at another commit"])
@pytest.mark.parametrize("path", ["third/party", "third/party/deps/inner"])
def test_a_submodule_that_is_not_locked_as_the_tree_names_it_is_refused(host: Host, nest: Nest, path: str, locked_at: str | None) -> None:
    """The lock names each submodule, and those of submodules, at the tree's commit; the error says which that is."""
    locked = nest.locked()
    entry = locked.pop(path)
    if locked_at:
        locked[path] = msgspec.structs.replace(entry, commit=locked_at)
    host.lock(vendored=locked)
    details = [f"{path.removeprefix('third/party/')} @ {entry.commit}"]
    with refusal("source-unresolved", match="submodules that the lock does not name", details=details):
        fetched_by(host)


def test_what_is_left_out_is_not_part_of_the_source(host: Host, nest: Nest) -> None:
    """Folders that the lock leaves out neither come nor count; one that the source does not have would leave nothing out, in silence."""
    host.lock(vendored=nest.locked(inner=("docs",)), without=("docs",))
    objects = host.context().objects

    assert set(objects.paths(fetched_by(host).tree)) == {
        ".gitmodules", "a.txt", "docsy.txt",
        "third/party/.gitmodules", "third/party/party.txt", "third/party/deps/inner/inner.txt",
    }  # fmt: skip
    assert objects.missing([nest.top.git("rev-parse", "HEAD:docs/guide.txt")])
    host.lock(vendored=nest.locked(), without=("media",))
    with refusal("file-invalid", match="has nothing of what `without` leaves out", details=("media",)):
        fetched_by(host)


# Kinds.


@pytest.mark.parametrize(
    ("name", "line", "values"),
    [
        ("stack.yaml", "label: {}", ("spark.2026.06", "spark.A", "spark.a-b", "spark.a+b", "", "nightly", "sparks.1")),
        ("stack.yaml", "arch: {}", ("121f",)),
        ("stack.yaml", "upstream: {}", ("2",)),
        ("lock.yaml", "format: 2", ("",)),
        ("lock.yaml", "stack: {}", ("other",)),
        ("lock.yaml", "commit: {}", ("a1a1a1", "A1" * 20, "v0.33.0", "a1" * 20 + "0", "")),
        ("lock.yaml", "tree: {}", ("b2" * 6, "HEAD^{tree}")),
        ("lock.yaml", "sha256: {}", ("c3" * 31 + "c", "C3" * 32)),
        ("lock.yaml", "filename: {}", ("../widget_kit-1.tar.gz", "/widget_kit-1.tar.gz", ".part")),
    ],
)
def test_a_stack_or_lock_that_cannot_be_meant_is_refused(host: Host, commit: str, name: str, line: str, values: tuple[str, ...]) -> None:
    """
    A label that PEP 440 would change, or by which our wheels would count as official ones; an architecture that is none, and another release than the pinned one without a reason; the lock of
    another stack, or of a later format; ids that are short, uppercase or invented, and file names that are paths.
    """
    host.lock(SDIST)
    path = host.root / "forks" / host.stack / name
    text = path.read_text()
    for value in values:
        path.write_text(re.sub(rf"\b{line.partition(':')[0]}: .*", line.format(f"'{value}'"), text, count=1))
        with refusal("file-invalid"):
            assert host.context().lock


def test_another_architecture_has_rules_and_a_label_of_its_own(host: Host, commit: str) -> None:
    """One without rules is refused, and the error lists those that there are."""
    host.lock()
    (host.root / "build" / host.stack / "archs-9.0a.yaml").write_text("rules: []\n")
    same, other = (Project(host.root, host.stack, arch) for arch in ("12.1f", "9.0a"))

    assert (same.spec.arch, same.suffix) == ("12.1f", "")
    assert (other.spec.arch, other.spec.label, other.audit_file.name) == ("9.0a", "spark.t.sm90a", "test-9.0a.yaml")
    for arch in ("12.1", "13.0", "../../x", "x/../archs-9.0a", "*"):
        with refusal("not-provided", match="no arch rules for", details=("architectures: 12.1f, 9.0a",)):
            Project(host.root, host.stack, arch)


@pytest.mark.usefixtures("commit")
def test_stack_has_the_name_of_its_folder(host: Host) -> None:
    """Else its lock would be of another stack, and no command could mend that."""
    host.lock()
    (host.root / "forks" / host.stack).rename(host.root / "forks" / "other")
    with refusal("file-invalid", match="its folder"):
        Project(host.root, "other")


def test_auto_takes_git_if_it_can_be_had(host: Host, commit: str, offered: Index, capsys: pytest.CaptureFixture[str]) -> None:
    """The commit decides, not the name of its tag; what is in the store needs no host. The reason for the sdist is said."""
    path = offered.release("1", {"a.txt": b"1\r\n"})
    sdist = msgspec.structs.replace(SDIST, sha256=files.sha256_file(path), size=path.stat().st_size, tree=host.work.tree())
    host.lock(sdist, ref="v7")
    run = host.context()
    gone = without_host(host, run)
    empty = dataclasses.replace(gone, store=Store(host.root / "empty"))
    kinds = [(source.kind, source.git_error) for source in (fetch.fetch(each, host.fork) for each in (run, gone, empty))]
    assert kinds == [("git", ""), ("git", ""), ("sdist", "source-unreachable")]
    assert "taking the sdist, because the git source fails (source-unreachable;" in " ".join(capsys.readouterr().err.split())
    for pin, why in (("1" * 40, "does not offer commit 1111"), (commit[:9], "the lock does not resolve git")):
        host.lock(sdist, commit=pin)
        assert fetched_by(host).kind == "sdist"
        assert why in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("stack", ["2026.05", "2026.11"])
def test_a_stack_builds_from_the_index_alone(stack: str, store: Store) -> None:
    """Every fork has an archive of the package index to be taken in place of git."""
    run = RunContext(Project(Path(__file__).parents[2], stack), store, (), Path(), offline=True)
    archives = {fork: [kind for kind in locked.kinds if kind != "git"] for fork, locked in run.lock.forks.items()}
    assert archives == {"cutlass": ["wheel"], "flashinfer": ["sdist"], "vllm": ["sdist"]}


# Locking.


def test_lock_leaves_unresolved_what_does_not_answer(host: Host, commit: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the host, or without the ref, nothing is made up; the command goes on, and says so. Nor is a tag taken that names another commit."""
    host.lock(ref="v7")
    run = host.context()
    for context in (run, without_host(host, run)):
        locked = resolve.resolve(context)
        assert resolve.unresolved(run.project, locked) == [f"widget: v7 of {host.url}"]
        assert "left unresolved" in capsys.readouterr().err
    text = run.project.stack_file.read_text()
    run.project.stack_file.write_text(text.replace("ref: v7", "ref: v1").replace("commit: ''", "commit: '000000000'"))
    with refusal("source-mismatch", details=(f"stack.yaml: {'0' * 9}", f"host: {commit}")):
        resolve.resolve(host.context())


@pytest.mark.parametrize(
    ("mode", "text", "archive", "generated", "details"),
    [
        (0o755, b"1\n", "sdist", "PKG-INFO", ["a.txt differs"]),
        (0o755, b"1\n", "wheel", "", None),
        (None, b"b.txt", "sdist", "PKG-INFO", ["a.txt differs"]),
        (None, b"b.txt", "wheel", "", ["a.txt differs"]),
        (0o644, b"2\n", "sdist", "*", []),
    ],
    ids=["executable", "executable, in a wheel", "link", "link, in a wheel", "all generated"],
)
def test_a_proof_compares_modes_and_wants_a_file_that_is_not_generated(
    host: Host, offered: Index, mode: int | None, text: bytes, archive: str, generated: str, details: list[str] | None
) -> None:
    """A file of the commit may be executable, or a link; a wheel does not say which of its files are the former."""
    path = host.work.path / "a.txt"
    if mode is None:
        path.symlink_to(text.decode())
    else:
        path.write_bytes(b"1\n")
        path.chmod(mode)
    host.work.commit({})
    if archive == "sdist":
        path = offered.release("1", {"a.txt": text})
        host.lock(msgspec.structs.replace(SDIST, sha256=files.sha256_file(path), size=path.stat().st_size), generated=(generated,))
    else:
        wheel = offered.add(wheels.plain(offered.root, "widget-kit", "1", files={"kit/third/a.txt": text}).name)
        lock = FileLock("widget-kit", "1", wheel.name, files.sha256_file(wheel), wheel.stat().st_size, "kit/third")
        host.lock(wheel=lock)

    with refusal("sdist-differs", details=details) if details is not None else contextlib.nullcontext():
        assert resolve.resolve(host.context()).forks[host.fork].proof


@pytest.fixture(name="whole")
def _whole(host: Host, nest: Nest, offered: Index) -> Lock:
    """Return the lock of a release with submodules, an sdist that proves it, a base, and a FetchContent source."""
    path = offered.release("1", {"a.txt": b"1\n", "third/party/party.txt": b"party\n"})
    base = offered.add(wheels.plain(offered.root, "widget-kit", "1").name)
    host.lock(msgspec.structs.replace(SDIST, sha256=files.sha256_file(path), size=path.stat().st_size), generated=("PKG-INFO",))
    spec = "    bases:\n      aarch64: {name: widget-kit, version: '1', tag: py3-none-any}\n"
    stack = host.context().project.stack_file
    stack.write_text(stack.read_text().replace("    bases: {}\n", spec))
    context = host.context()
    fetched = VendoredLock(PARTY, "main", UNRESOLVED, UNRESOLVED, kind="fetchcontent")
    fork = msgspec.structs.replace(context.lock.forks[host.fork], vendored={"parts": fetched})
    lock = resolve.resolve(context, Lock(1, host.stack, {host.fork: fork}))
    fork = lock.forks[host.fork]
    assert (fork.proof, base.name) == (SourceProof(equal=2, absent=6), fork.bases["aarch64"].filename)
    context.project.lock_file.write_text(render_lock(lock))
    return lock


def test_lock_keeps_what_it_cannot_see(host: Host, whole: Lock, offered: Index, capsys: pytest.CaptureFixture[str]) -> None:
    """
    Entries of silent hosts stay to the letter, with what was read from them and the proof; an index that answers every address with a page of its
    own is silent. Only what another stack.yaml names is unresolved.
    """
    run = host.context()
    assert resolve.resolve(run, whole) == whole
    offered.page.write_text('<!DOCTYPE html><a href="/login">Sign in to the network</a>\n')
    silent = dataclasses.replace(without_host(host, run), store=Store(host.root / "empty"))
    assert resolve.resolve(silent, whole) == whole
    said = capsys.readouterr().err
    assert {entry for entry in ("git", "sdist", "bases/aarch64", "vendored/parts") if f"{entry}: kept as locked" in said} == {"git", "sdist", "bases/aarch64"}
    assert "lists no file of 'widget-kit'" in said
    for url in (PARTY, INNER):
        silent = without_host(host, silent, url)
    assert resolve.resolve(dataclasses.replace(silent, store=Store(host.root / "other")), whole) == whole
    host.lock(ref="v7")
    moved = resolve.resolve(dataclasses.replace(host.context(), mirrors=silent.mirrors, store=silent.store), whole)
    assert resolve.unresolved(run.project, moved)[0] == f"widget: v7 of {host.url}"


def lock_verb(host: Host, *words: str) -> int:
    return main.run(["lock", *host.words, *words])


def add_fork(run: RunContext, url: str, ref: str) -> None:
    """Add the fork ``other``, which is cloned from *url*, to the stack, whose lock does not have it yet."""
    project = run.project
    other = ForkSpec("headers", SourceSpecs(git=GitSpec(url, ref)))
    project.stack_file.write_text(strict_yaml.dump(msgspec.structs.replace(project.spec, forks={**project.spec.forks, "other": other})))
    (project.build_folder / "environment.yaml").write_text("forks: {widget: {distribution: widget}, other: {distribution: other}}\n")


def test_lock_moves_what_it_is_asked_to(host: Host, whole: Lock, offered: Index) -> None:
    """Of the forks, those of --fork; the tools only with --tools, or if their lock lacks what they are to be. A fork that stack.yaml has anew is locked, too."""
    project = host.context().project
    text, wanted = '[[packages]]\nname = "absent-tool"\nversion = "1"\n', "absent-tool\n"
    tools, requirements = project.build_folder / "pylock.toml", project.build_folder / "requirements.in"
    tools.write_text(text)
    requirements.write_text(wanted)
    add_fork(host.context(), PARTY, "main")
    assert lock_verb(host, "--fork", "other") == 0
    locked = host.context().lock
    assert locked.forks[host.fork] == whole.forks[host.fork]
    assert locked.forks["other"].is_resolved
    assert lock_verb(host) == 0
    for words, kept, changed in ((["--tools"], text, wanted), ([], text, "absent-tool==2\n"), ([], text, f"{wanted}other-tool\n"), ([], "", wanted)):
        tools.write_text(kept)
        requirements.write_text(changed)
        with refusal("source-unreachable", match=r"requirements\.in cannot be resolved"):
            lock_verb(host, *words)
        assert tools.read_text() == kept


def test_runs_that_write_the_lock_take_turns(host: Host, whole: Lock) -> None:
    """The second begins when the first has ended, whatever its cache is, and reads what that wrote; one that is killed leaves a whole file."""
    project = host.context().project
    words = [sys.executable, "-m", "sparkwright", "lock", *host.words, "--cache-dir", str(host.root / "own")]
    with project.editing():
        second = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        assert second.stderr
        assert "another sparkwright works on the checkout" in second.stderr.readline()
        project.lock_file.write_text(render_lock(whole).replace("name: widget-kit\n", "name: Widget-Kit\n"))
    second.communicate(timeout=120)
    assert second.returncode == 0
    assert host.context().lock.forks[host.fork].bases["aarch64"].name == "Widget-Kit"
    count = 0
    while host.killed(str(host.root), count := count + 1, "lock"):
        assert host.context().lock.forks[host.fork].is_resolved
    assert count > 1


# The mirror map.


def test_the_longest_beginning_wins_and_githubs_case_does_not_count() -> None:
    """GitHub takes NVIDIA/cutlass and nvidia/cutlass for one repository; other hosts need not."""
    other = "https://upstream.example/"
    mirrors = {other: "ssh://c.example/", "https://github.com/NVIDIA/": "ssh://a.example/", f"{other}Big/": "ssh://b.example/"}
    for url, address in (
        ("https://GitHub.com/nvidia/cutlass.git", "ssh://a.example/cutlass.git"),
        (f"{other}Big/x", "ssh://b.example/x"),
        (f"{other}big/x", "ssh://c.example/big/x"),
    ):
        assert mirror.mirrored(mirrors, url) == address


def test_a_mirror_of_the_command_line_comes_before_those_of_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the length of their beginnings, for every address that the option covers."""
    path = tmp_path / "config.yaml"
    path.write_text(strict_yaml.dump({"mirrors": {"https://github.com/NVIDIA/": "ssh://own/", "https://other.example/": "ssh://own/"}}))
    monkeypatch.setenv("SPARKWRIGHT_CONFIG", str(path))
    mirrors = config.mirror_map(["https://github.com/=ssh://option/"])

    assert mirror.mirrored(mirrors, "https://github.com/nvidia/cutlass.git") == "ssh://option/nvidia/cutlass.git"
    assert mirror.mirrored(mirrors, "https://other.example/a.git") == "ssh://own/a.git"


# Upstream hosts in good and bad states: git over HTTP is taken where an archive proves it, else the archive.


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
        return pipeline.dist_info(context, WheelName("widget", "1", "py3-none-any"), workspace.source_tree(context, self.host.fork))

    def deviations(self, context: RunContext) -> list[str]:
        """Return the deviations in the build record."""
        return list(json.loads(self.written(context)[BUILD_RECORD]).get("deviations", []))


def _waits(monkeypatch: pytest.MonkeyPatch, folder: Path, seconds: int) -> None:
    """Let git wait that long for a silent host."""
    settings = Path(git._ENVIRONMENT["GIT_CONFIG_GLOBAL"]).read_text()
    (folder / "gitconfig").write_text(settings.replace("lowSpeedTime = 60", f"lowSpeedTime = {seconds}"))
    monkeypatch.setitem(git._ENVIRONMENT, "GIT_CONFIG_GLOBAL", str(folder / "gitconfig"))


@pytest.fixture(name="server")
def _server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GitHost]:
    _waits(monkeypatch, tmp_path, 1)
    with GitHost(tmp_path) as server:
        yield server


def _silent(world: World) -> None:
    """Let the host of the inner submodule be silent, or the only host once it has named the tag."""
    world.server.sound = lambda path, sent: "/inner" not in path if world.nest else b"command=fetch" not in sent


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
        wrong = [f"{path} is not in the commit" if path else f"{world.last} differs" for path in changed]
        with refusal(reference, details=wrong or None, says=f"Or take the locked archive: --source {world.archive}."):
            fetch.fetch(world.run("--source", "git"), host.fork)
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
    add_fork(world.run(), host.url, "v1")
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
    assert (again, files.sha256_file(path)) == (built, built.sha256)


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


# Mirrors: one copy of each upstream in the store, from hosts in every mood, and whole again after a killed git.


URL = "https://upstream.example/mini.git"


def context(address: str, store: Store) -> RunContext:
    return RunContext(Project(Path(__file__).parents[2], "2026.11"), store, (), Path(), mirrors={URL: address})


@pytest.fixture(name="commits")
def _commits(repository: Repository) -> list[str]:
    """Fill the repository, and return its commits."""
    return [
        repository.commit({"a.txt": b"%d\n" % number * 99, "d/b.txt": b"b%d\n" % number * 99, "d/same.txt": b"same\n"})
        for number in range(5)
    ]


@pytest.fixture(name="run")
def _run(repository: Repository, store: Store) -> RunContext:
    """Return a run that reaches the upstream."""
    return context(repository.url, store)


def test_a_commit_comes_without_its_history_and_its_files(run: RunContext, repository: Repository, commits: list[str]) -> None:
    """The commit and its folders are there, its parent and its files are not; the files come when they are asked for."""
    run.mirror(URL).commit(commits[2])
    names = (commits[2], f"{commits[2]}:d", commits[1], repository.git("rev-parse", f"{commits[2]}:a.txt"))

    assert [run.objects.has(name) for name in names] == [True, True, False, False]
    assert dict(run.objects.files(run.mirror(URL).tree(repository.tree(commits[2]))))["a.txt"] == b"2\n" * 99


def test_a_history_stays_whole_and_follows_the_host_if_that_is_asked_for(run: RunContext, repository: Repository, commits: list[str]) -> None:
    """A history that is asked for after a single commit is whole, also after another commit; asking for the newest follows a forced push."""
    upstream = run.mirror(URL)
    upstream.commit(commits[2])
    assert upstream.history("main") == commits[4]
    repository.git("checkout", "--quiet", "-b", "side", commits[1])
    other = repository.commit({"c.txt": b"c\n"})
    upstream.commit(other)
    repository.git("branch", "--force", "main", "side")

    assert run.objects.run(["rev-list", "--count", commits[4]])[1] == b"5\n"
    assert (upstream.history("main"), upstream.history("main", newest=True), upstream.fetched("main")) == (commits[4], other, other)
    assert upstream.history("gone") is None


def test_ref_is_the_commit_of_a_tag_before_that_of_a_branch(run: RunContext, repository: Repository, commits: list[str]) -> None:
    """Annotated tags give the commit that they name, light tags and branches theirs; None where there is none."""
    repository.git("tag", "-a", "-m", "first", "annotated", commits[0])
    repository.git("tag", "both", commits[1])
    repository.git("branch", "both", commits[2])
    names = ("annotated", "both", "main", "refs/heads/both", "gone")

    assert [run.mirror(URL).ref(name) for name in names] == [commits[0], commits[1], commits[4], commits[2], None]


# Hosts that do not do as they are asked.


def refused(run: RunContext, act: Callable[[mirror.Mirror], object]) -> str:
    """Return everything that is said of a host that counts as unreachable."""
    with refusal("source-unreachable") as caught:
        act(run.mirror(URL))
    return "\n".join([caught.value.what, *caught.value.details, caught.value.todo])


def test_a_mirror_without_some_files_is_refused_unless_they_are_left_out(run: RunContext, repository: Repository, commits: list[str]) -> None:
    tree = repository.tree()
    run.mirror(URL).commit(commits[4])
    for path in ("d/b.txt", "d/same.txt"):
        blob = repository.git("rev-parse", f"HEAD:{path}")
        (repository.path / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    assert "does not offer 3 files of its own commits" in refused(run, lambda upstream: upstream.tree(tree))
    assert run.objects.is_complete(run.mirror(URL).tree(tree, ("d",)))


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_a_connection_that_is_cut_is_not_damage(repository: Repository, commits: list[str], store: Store, tmp_path: Path, share: float) -> None:
    """Wherever a fetch is cut, the host is unreachable and the mirror stays usable; nor need the host have the branch that its HEAD names."""
    commit, tree = repository.commit({"big": random.Random(1).randbytes(300_000)}), repository.tree()
    repository.git("symbolic-ref", "HEAD", "refs/heads/unborn")

    def fetch(upstream: mirror.Mirror) -> None:
        upstream.commit(commit)
        upstream.tree(tree)

    with GitHost(repository.path.parent) as host:
        address = f"{host.url}/upstream/.git"
        fetch(context(address, Store(tmp_path / "other")).mirror(URL))
        assert host.largest > 300_000
        host.limit, run = int(host.largest * share), context(address, store)
        assert "127.0.0.1" in refused(run, fetch)
        host.limit = None
        fetch(run.mirror(URL))
    assert run.objects.is_complete(tree)


def test_a_damaged_file_of_a_local_mirror_is_blamed_on_that_mirror(run: RunContext, repository: Repository, commits: list[str]) -> None:
    """The folder of the map is named; nobody is told to remove the copy in the store, which is whole."""
    blob = repository.git("rev-parse", "HEAD:a.txt")
    path = repository.path / ".git" / "objects" / blob[:2] / blob[2:]
    path.chmod(0o644)
    path.write_bytes(b"\xff" * 40)
    run.mirror(URL).commit(commits[4])
    said = refused(run, lambda upstream: upstream.tree(repository.tree()))

    assert str(repository.path) in said
    assert str(run.store.root) not in said


@pytest.mark.parametrize("address", ["ext::touch {folder}/ran", "--upload-pack=touch {folder}/ran"])
def test_address_cannot_run_a_command(store: Store, tmp_path: Path, address: str) -> None:
    """git's ext:: transport is off, and an address is never an option."""
    refused(context(address.format(folder=tmp_path), store), lambda upstream: upstream.ref("main"))

    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("page", ["", "<html><form>Log in</form></html>", "<html>\n<form>Log in</form>\n</html>\n"])
def test_an_answer_that_is_none(run: RunContext, tmp_path: Path, page: str) -> None:
    """A missing page and a login page are unreachable, in git's words and without credentials."""
    (tmp_path / "mini.git" / "info").mkdir(parents=True)
    if page:
        (tmp_path / "mini.git" / "info" / "refs").write_text(page)
    with upstreams.serve(tmp_path) as address:
        place = f"{address}/mini.git".replace("://", "://user:secret%2Fword@")
        text = refused(dataclasses.replace(run, mirrors={URL: place}), lambda upstream: upstream.ref("main"))

    assert f"{address}/mini.git" in text
    assert "secret" not in text


@pytest.mark.parametrize(
    ("kind", "patience", "act"),
    [
        ("http", 60, lambda upstream: upstream.ref("main")),
        # git has started its helper by then, which has to end with it, also where there is no `ps`.
        ("http", 3, lambda upstream: upstream.commit("1" * 40)),
        ("git", 0.5, lambda upstream: upstream.commit("1" * 40)),
    ],
)
def test_silent_host_is_given_up(
    store: Store, kind: str, patience: float, act: Callable[[mirror.Mirror], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the protocol, a host that takes the connection and is silent counts as unreachable after its time."""
    # git does not count the time in which no connection comes about.
    _waits(monkeypatch, store.root, 1 if patience > 3 else 600)
    monkeypatch.setattr(mirror, "PATIENCE", patience)
    listener = badserver.Listener(badserver.silent)

    assert "127.0.0.1" in refused(context(f"{listener.url.replace('http', kind)}/mini.git", store), act)
    listener.close()


def test_a_local_mirror_executes_nothing(run: RunContext, repository: Repository, commits: list[str], tmp_path: Path) -> None:
    """Hooks and the configuration of a repository that --mirror names belong to others, and do not run."""
    for line in ("uploadpack.packObjectsHook", "core.fsmonitor", "core.sshCommand", "core.gitProxy"):
        repository.git("config", line, f"touch {tmp_path}/ran;")
    processes.script(repository.path / ".git" / "hooks" / "reference-transaction", f"touch '{tmp_path}/ran'")
    prepared(run, repository, commits)

    assert not (tmp_path / "ran").exists()


# Damage.


def prepared(run: RunContext, repository: Repository, commits: list[str]) -> mirror.Mirror:
    """Return a mirror that holds a commit with its files, and a history."""
    upstream = run.mirror(URL)
    upstream.commit(commits[2])
    upstream.tree(repository.tree(commits[2]))
    upstream.history("main")
    return upstream


def test_a_damaged_mirror_is_whole_again_once_it_was_removed(run: RunContext, repository: Repository, commits: list[str]) -> None:
    """As the advice says."""
    path, later = prepared(run, repository, commits).path, repository.commit({"later.txt": b"later\n"})
    for pack in (path / "objects" / "pack").glob("*.pack"):
        pack.chmod(0o644)
        pack.write_bytes(pack.read_bytes()[:20] + b"\xff" * 40)
    with refusal("git-failed", says="After objects.git and mirrors are removed from the cache directory, the next run fetches"):
        run.mirror(URL).commit(later)

    shutil.rmtree(path)
    assert prepared(context(repository.url, run.store), repository, commits).history("main", newest=True) == later


def test_a_killed_fetch_is_finished_by_the_next_run(run: RunContext, repository: Repository, commits: list[str]) -> None:
    """`kill -9` of sparkwright and every git of its with half a pack on the disk: that is not taken for whole, nor in the next run's way."""
    later = repository.commit({"big": random.Random(1).randbytes(30_000_000)})
    tree, packs = repository.tree(), run.mirror(URL).path / "objects" / "pack"

    def fetch() -> None:
        upstream = context(repository.url, run.store).mirror(URL)
        upstream.commit(later)
        upstream.tree(tree)

    def halfway() -> bool:
        with contextlib.suppress(FileNotFoundError):
            return any(path.stat().st_size > 1_000_000 for path in packs.glob("tmp_pack*"))
        return False

    assert processes.killed(fetch, halfway)
    assert not run.objects.is_complete(tree)
    fetch()
    assert run.objects.is_complete(tree)
    assert not [*packs.parents[1].rglob("*.lock"), *packs.parents[1].rglob("*tmp*")]
