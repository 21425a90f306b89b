"""Sources: what the lock names, from wherever the mirror map says, verified, and never anything else."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.refusals import refusal
from tests.support import wheels
from tests.unit.conftest import INNER, PARTY, Host, Index, Nest

from sparkwright.cli import main
from sparkwright.core import config, strict_yaml
from sparkwright.core.files import sha256_file
from sparkwright.core.store import Store
from sparkwright.forks import fetch, resolve
from sparkwright.forks.context import RunContext
from sparkwright.forks.fetch import FetchedSource
from sparkwright.forks.mirror import mirrored
from sparkwright.forks.stack import (
    UNRESOLVED,
    FileLock,
    ForkSpec,
    GitSpec,
    Lock,
    Project,
    SourceProof,
    SourceSpecs,
    VendoredLock,
    render_lock,
)

SDIST = FileLock("widget-kit", "1", "widget_kit-1.tar.gz", "0" * 64, 1, tree="0" * 40)


@pytest.fixture(name="commit")
def _commit(host: Host) -> str:
    """Return a commit of the host."""
    return host.work.commit({"a.txt": b"1\r\n"})


def fetched_by(host: Host, *words: str) -> FetchedSource:
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
        with refusal(reference) as caught:
            fetched_by(host, "--source", source)
        assert caught.value.details == details
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
    with refusal("source-unresolved", match="submodules that the lock does not name") as caught:
        fetched_by(host)

    assert caught.value.details == (f"{path.removeprefix('third/party/')} @ {entry.commit}",)


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
    with refusal("file-invalid", match="has nothing of what `without` leaves out") as caught:
        fetched_by(host)
    assert caught.value.details == ("media",)


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
        with refusal("not-provided", match="no arch rules for") as caught:
            Project(host.root, host.stack, arch)
        assert caught.value.details == ("architectures: 12.1f, 9.0a",)


def test_auto_takes_git_if_it_can_be_had(host: Host, commit: str, offered: Index, capsys: pytest.CaptureFixture[str]) -> None:
    """The commit decides, not the name of its tag; what is in the store needs no host. The reason for the sdist is said."""
    path = offered.release("1", {"a.txt": b"1\r\n"})
    sdist = msgspec.structs.replace(SDIST, sha256=sha256_file(path), size=path.stat().st_size, tree=host.work.tree())
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
    with refusal("source-mismatch") as caught:
        resolve.resolve(host.context())
    assert caught.value.details == (f"stack.yaml: {'0' * 9}", f"host: {commit}")


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
        host.lock(msgspec.structs.replace(SDIST, sha256=sha256_file(path), size=path.stat().st_size), generated=(generated,))
    else:
        wheel = offered.add(wheels.plain(offered.root, "widget-kit", "1", files={"kit/third/a.txt": text}).name)
        lock = FileLock("widget-kit", "1", wheel.name, sha256_file(wheel), wheel.stat().st_size, "kit/third")
        host.lock(wheel=lock)

    with refusal("sdist-differs") if details is not None else contextlib.nullcontext() as caught:
        assert resolve.resolve(host.context()).forks[host.fork].proof
    assert caught is None or list(caught.value.details) == details


@pytest.fixture(name="whole")
def _whole(host: Host, nest: Nest, offered: Index) -> Lock:
    """Return the lock of a release with submodules, an sdist that proves it, a base, and a FetchContent source."""
    path = offered.release("1", {"a.txt": b"1\n", "third/party/party.txt": b"party\n"})
    base = offered.add(wheels.plain(offered.root, "widget-kit", "1").name)
    host.lock(msgspec.structs.replace(SDIST, sha256=sha256_file(path), size=path.stat().st_size), generated=("PKG-INFO",))
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


def test_lock_moves_what_it_is_asked_to(host: Host, whole: Lock, offered: Index) -> None:
    """Of the forks, those of --fork; the tools only with --tools, or if their lock lacks what they are to be. A fork that stack.yaml has anew is locked, too."""
    project = host.context().project
    tools = project.build_folder / "pylock.toml"
    tools.write_text(text := '[[packages]]\nname = "absent-tool"\nversion = "1"\n')
    (project.build_folder / "requirements.in").write_text("absent-tool\n")
    other = GitSpec(PARTY, "main")
    spec = msgspec.structs.replace(project.spec, forks={**project.spec.forks, "other": ForkSpec("headers", SourceSpecs(git=other))})
    project.stack_file.write_text(strict_yaml.dump(spec))
    (project.build_folder / "environment.yaml").write_text("forks: {widget: {distribution: widget}, other: {distribution: other}}\n")
    assert lock_verb(host, "--fork", "other") == 0
    locked = host.context().lock
    assert locked.forks[host.fork] == whole.forks[host.fork]
    assert locked.forks["other"].is_resolved
    assert lock_verb(host) == 0
    with refusal("source-unreachable", match=r"requirements\.in cannot be resolved"):
        lock_verb(host, "--tools")
    assert tools.read_text() == text
    for changed in ("absent-tool==2\n", "absent-tool\nother-tool\n"):
        (project.build_folder / "requirements.in").write_text(changed)
        with refusal("source-unreachable", match=r"requirements\.in cannot be resolved"):
            lock_verb(host)
    (project.build_folder / "requirements.in").write_text("absent-tool\n")
    tools.unlink()
    with refusal("source-unreachable", match=r"requirements\.in cannot be resolved"):
        lock_verb(host)


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
        assert mirrored(mirrors, url) == address


def test_a_mirror_of_the_command_line_comes_before_those_of_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the length of their beginnings, for every address that the option covers."""
    path = tmp_path / "config.yaml"
    path.write_text(strict_yaml.dump({"mirrors": {"https://github.com/NVIDIA/": "ssh://own/", "https://other.example/": "ssh://own/"}}))
    monkeypatch.setenv("SPARKWRIGHT_CONFIG", str(path))
    mirrors = config.mirror_map(["https://github.com/=ssh://option/"])

    assert mirrored(mirrors, "https://github.com/nvidia/cutlass.git") == "ssh://option/nvidia/cutlass.git"
    assert mirrored(mirrors, "https://other.example/a.git") == "ssh://own/a.git"
