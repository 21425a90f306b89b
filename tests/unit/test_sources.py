"""Sources from git: what the lock names, from wherever the mirror map says, verified, and never anything else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.refusals import refusal
from tests.unit.conftest import Repository, write_sdist

from sparkwright.core import strict_yaml
from sparkwright.core.config import mirror_map
from sparkwright.core.files import sha256_file
from sparkwright.core.store import Store
from sparkwright.forks import fetch, lock, package_index, resolve
from sparkwright.forks.context import RunContext
from sparkwright.forks.lock import (
    UNRESOLVED,
    FileLock,
    ForkLock,
    GitLock,
    Lock,
    SdistProof,
    VendoredLock,
)
from sparkwright.forks.mirror import mirrored
from sparkwright.forks.stack import ForkSpec, GitSpec, Project, SdistSpec, SourceSpecs, StackSpec

ROOT = Path(__file__).parents[2]
HOST = "https://upstream.example/"
URL = f"{HOST}mini.git"

Make = Callable[..., RunContext]


@pytest.fixture(name="make")
def _make(tmp_path: Path, repository: Repository) -> Make:
    """Return a function that writes a project with one git source and returns a run on it, mapped to the repository."""

    def make(
        commit: str = UNRESOLVED,
        tree: str = UNRESOLVED,
        ref: str = "v1",
        *,
        sdist: FileLock | None = None,
        generated: tuple[str, ...] = (),
    ) -> RunContext:
        root = tmp_path / "project"
        folder = root / "forks" / "test"
        folder.mkdir(parents=True, exist_ok=True)
        released = SdistSpec("mini", "1", generated) if sdist else None
        sources = SourceSpecs(git=GitSpec(URL, ref), sdist=released)
        spec = StackSpec("test", "12.1f", "t", {"mini": ForkSpec("backend", sources)})
        (folder / "stack.yaml").write_text(strict_yaml.dump(spec))
        (folder / "lock.yaml").write_text(
            lock.render(Lock(1, "test", {"mini": ForkLock(git=GitLock(URL, ref, commit, tree), sdist=sdist)}))
        )
        mirrors = {URL: str(repository.path)}
        return RunContext(Project(root, "test"), Store(tmp_path / "store"), ("mini",), tmp_path / "dist", source="git", mirrors=mirrors)

    return make


@pytest.fixture(name="commit")
def _commit(repository: Repository) -> str:
    """Return a commit that the tag v1 names."""
    commit = repository.commit({"a.txt": b"1\r\n"})
    repository.git("tag", "-a", "-m", "first", "v1")
    return commit


def test_a_prefix_is_resolved_by_the_ref(make: Make, repository: Repository, commit: str) -> None:
    """The beginning of a commit is enough where the locked tag names a commit that begins so; it stays marked unresolved."""
    fetched = fetch.fetch(make(commit[:7]), "mini")

    assert (fetched.pin, fetched.tree, fetched.resolved) == (commit, repository.tree(), False)
    assert fetched.origin == f"{URL} @ {commit}"


def test_another_source_than_the_locked_one_is_refused(make: Make, repository: Repository, commit: str) -> None:
    """Another tree, a moved tag, a lock without a commit, and a kind that is not locked are errors that show both sides."""
    moved = repository.commit({"a.txt": b"2\n"})
    repository.git("tag", "--force", "v1")
    for locked, source, reference, details in (
        ((commit, "0" * 40), "git", "source-mismatch", (f"lock:   {'0' * 40}", f"commit: {repository.tree(commit)}")),
        ((commit[:9],), "git", "source-mismatch", (f"lock: {commit[:9]}…", f"host: {moved}")),
        ((), "git", "source-unresolved", None),
        ((commit,), "sdist", "not-provided", ("locked: git",)),
    ):
        with refusal(reference) as caught:
            fetch.fetch(dataclasses.replace(make(*locked), source=source), "mini")
        assert details in (caught.value.details, None)


# Submodules, and what is left out.

PARTY = f"{HOST}party.git"
INNER = f"{HOST}inner.git"


class Nest:
    """A source with a submodule that has one itself: ``third/party`` and in it ``deps/inner``."""

    def __init__(self, repository: Repository, folder: Path) -> None:
        self.top = repository
        self.party, self.inner = type(repository)(folder / "party"), type(repository)(folder / "inner")
        self.inner.commit({"inner.txt": b"inner\n", "docs/big.txt": b"big\n"})
        self.party.commit({"party.txt": b"party\n"})
        self.link(self.party, "deps/inner", self.inner, INNER)
        self.top.commit({"a.txt": b"1\n", "docs/guide.txt": b"guide\n", "docsy.txt": b"stays\n"})
        self.commit = self.link(self.top, "third/party", self.party, PARTY)

    @staticmethod
    def link(repository: Repository, path: str, other: Repository, url: str) -> str:
        repository.commit({".gitmodules": f'[submodule "it"]\n\tpath = {path}\n\turl = {url}\n'.encode()})
        repository.git("update-index", "--add", "--cacheinfo", f"160000,{other.git('rev-parse', 'HEAD')},{path}")
        repository.git("commit", "--quiet", "-m", "submodule")
        return repository.git("rev-parse", "HEAD")

    def locked(self, **without: tuple[str, ...]) -> dict[str, VendoredLock]:
        """Return what a lock says of both submodules."""
        entries = {"third/party": (PARTY, self.party), "third/party/deps/inner": (INNER, self.inner)}
        return {
            path: VendoredLock(url, "main", one.git("rev-parse", "HEAD"), one.tree(), without.get(one.path.name, ()), kind="submodule")
            for path, (url, one) in entries.items()
        }

    def run(self, run: RunContext, vendored: dict[str, VendoredLock], without: tuple[str, ...] = ()) -> RunContext:
        """Return *run* with a lock of the top commit and of what it vendors, all repositories mapped."""
        git = GitLock(URL, "main", self.commit, self.top.tree(self.commit), without)
        run.project.lock_file.write_text(lock.render(Lock(1, "test", {"mini": ForkLock(git=git, vendored=vendored)})))
        mirrors = {URL: self.top.url, PARTY: self.party.url, INNER: self.inner.url}
        return dataclasses.replace(run, mirrors=mirrors)


@pytest.fixture(name="nest")
def _nest(repository: Repository, tmp_path: Path) -> Nest:
    return Nest(repository, tmp_path)


def test_locked_submodules_are_part_of_the_tree(make: Make, nest: Nest) -> None:
    """Files of submodules, and of theirs, stand where the build looks for them; nothing is left of the links."""
    run = nest.run(make(nest.commit), nest.locked())
    fetched = fetch.fetch(run, "mini")

    assert dict(run.objects.files(fetched.tree)) == {
        ".gitmodules": run.objects.blob(nest.top.tree(), ".gitmodules"),
        "third/party/.gitmodules": run.objects.blob(nest.party.tree(), ".gitmodules"),
        "a.txt": b"1\n",
        "docs/guide.txt": b"guide\n",
        "docsy.txt": b"stays\n",
        "third/party/party.txt": b"party\n",
        "third/party/deps/inner/inner.txt": b"inner\n",
        "third/party/deps/inner/docs/big.txt": b"big\n",
    }
    assert run.objects.submodules(fetched.tree) == {}
    assert run.objects.whole(fetched.tree)


@pytest.mark.parametrize("locked_at", [None, "1" * 40], ids=["not locked", "locked at another commit"])
@pytest.mark.parametrize("path", ["third/party", "third/party/deps/inner"])
def test_a_submodule_that_is_not_locked_as_the_tree_names_it_is_refused(
    make: Make, nest: Nest, path: str, locked_at: str | None
) -> None:
    """The lock names each submodule, and those of submodules, at the tree's commit; the error says which that is."""
    locked = nest.locked()
    entry = locked.pop(path)
    if locked_at:
        locked[path] = msgspec.structs.replace(entry, commit=locked_at)
    with refusal("source-unresolved", match="submodules that the lock does not name") as caught:
        fetch.fetch(nest.run(make(nest.commit), locked), "mini")

    assert caught.value.details == (f"{path.removeprefix('third/party/')} @ {entry.commit}",)


def test_what_is_left_out_is_not_part_of_the_source(make: Make, nest: Nest) -> None:
    """Folders that the lock leaves out, of the source and of a submodule, neither come nor count; the rest is as it was."""
    run = nest.run(make(nest.commit), nest.locked(inner=("docs",)), without=("docs",))
    fetched = fetch.fetch(run, "mini")

    assert set(run.objects.paths(fetched.tree)) == {
        ".gitmodules", "a.txt", "docsy.txt",
        "third/party/.gitmodules", "third/party/party.txt", "third/party/deps/inner/inner.txt",
    }  # fmt: skip
    assert run.objects.missing([nest.top.git("rev-parse", f"{nest.commit}:docs/guide.txt")])


# Kinds.

SDIST = FileLock("mini", "1", "mini-1.tar.gz", "0" * 64, 1, tree="0" * 40)


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        *(("label: t", f"label: '{label}'") for label in ("spark.2026.06", "Spark", "a-b", "a+b", "")),
        ("12.1f", "121f"),
        ("sources:", "sources:\n      wheel: {name: a, version: '1', tag: py3-none-any, release: '2'}"),
    ],
)
def test_a_stack_that_cannot_be_meant_is_refused(make: Make, line: str, changed: str) -> None:
    """A label that PEP 440 would change, an architecture that is none, and another release than the pinned one without a reason."""
    project = make().project
    text = project.stack_file.read_text()
    assert line in text
    project.stack_file.write_text(text.replace(line, changed))
    with refusal("file-invalid"):
        Project(project.root, "test")


def test_another_architecture_has_rules_and_a_label_of_its_own(make: Make) -> None:
    """One without rules is refused, and the error lists those that there are."""
    root = make().project.root
    folder = root / "build" / "test"
    folder.mkdir(parents=True)
    (folder / "archs-9.0a.yaml").write_text("rules: []\n")

    assert (Project(root, "test").spec.arch, Project(root, "test", "12.1f").suffix) == ("12.1f", "")
    other = Project(root, "test", "9.0a")
    assert (other.spec.arch, other.spec.label, other.audit_file.name) == ("9.0a", "t.sm90a", "test-9.0a.yaml")
    for arch in ("12.1", "13.0", "../../x", "x/../archs-9.0a", "*"):
        with refusal("not-provided", match="no arch rules for") as caught:
            Project(root, "test", arch)
        assert caught.value.details == ("architectures: 12.1f, 9.0a",)


def test_auto_takes_git_if_the_commit_is_here_or_reachable(
    make: Make, repository: Repository, commit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    The commit decides, not the name of its tag. It comes with `lock`, its files with `fetch`; those that are left out need not come. The
    reason for the sdist is said.
    """

    def choice(run: RunContext, *without: str) -> str:
        locked = run.lock.forks["mini"]
        assert locked.git
        git = msgspec.structs.replace(locked.git, without=without)
        return fetch.choose(dataclasses.replace(run, source="auto"), "mini", msgspec.structs.replace(locked, git=git))

    tree = repository.tree()
    run = make(commit, tree, ref="v7", sdist=SDIST)
    gone = dataclasses.replace(run, mirrors={URL: str(repository.path / "gone")})
    assert (choice(run), choice(gone), choice(make("1" * 40, tree, sdist=SDIST))) == ("git", "sdist", "sdist")
    assert "mini: taking the sdist, because the git source is not reachable from here" in capsys.readouterr().err
    assert choice(make(commit[:9], tree, sdist=SDIST)) == "sdist"
    assert "mini: taking the sdist, because the git source is not resolved in the lock" in capsys.readouterr().err
    run.mirror(URL).commit(commit)
    assert (choice(gone), choice(gone, "a.txt")) == ("sdist", "git")
    fetch.fetch(run, "mini")
    assert choice(gone) == "git"


@pytest.mark.parametrize("stack", ["2026.05", "2026.11"])
def test_a_stack_builds_from_the_index_alone(stack: str, store: Store) -> None:
    """Without an upstream host, every fork has an archive of the package index to be taken in place of git."""
    run = RunContext(Project(ROOT, stack), store, (), Path(), offline=True)

    kinds = {fork: fetch.choose(run, fork, locked) for fork, locked in run.lock.forks.items()}
    assert kinds == {"cutlass": "wheel", "flashinfer": "sdist", "vllm": "sdist"}


# A commit that the source distribution proves.

GENERATED = ("PKG-INFO", "*.egg-info/*")


@pytest.fixture(name="released")
def _released(tmp_path: Path, make: Make) -> Callable[..., RunContext]:
    """Return a function that locks a source distribution of these files beside the beginning of a commit."""

    def released(commit: str, files: dict[str, bytes], **further: Any) -> RunContext:
        path = tmp_path / "mini-1.tar.gz"
        write_sdist(path, files)
        run = make(sdist=SDIST)
        stored = run.store.folder("downloads", sha256_file(path)) / path.name
        path.rename(stored)
        file = msgspec.structs.replace(SDIST, sha256=stored.parent.name)
        file = msgspec.structs.replace(file, tree=package_index.import_file(run, file))
        return dataclasses.replace(make(commit, sdist=file, generated=GENERATED, **further), source="auto")

    return released


def test_a_release_proves_the_commit_that_its_tag_names(
    released: Callable[..., RunContext], repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    """Git is taken although the lock has no tree; lock records what was compared. A sdist with another tree than the locked one is refused."""
    commit = repository.commit({"a.txt": b"1\r\n", "tests/t.py": b"pass\n"})
    repository.git("tag", "v1")
    run = released(commit[:9], {"a.txt": b"1\r\n", "PKG-INFO": b"Name: mini\n", "mini.egg-info/SOURCES.txt": b"a.txt\n"})
    fetched, locked = fetch.fetch(run, "mini"), run.lock.forks["mini"]

    assert (fetched.kind, fetched.pin, fetched.tree, fetched.resolved) == ("git", commit, repository.tree(), True)
    said = "1 of 3 files of mini-1.tar.gz are the commit's, 2 are generated, 1 of the commit are not in it"
    assert said in capsys.readouterr().err
    proof = resolve.prove(run, "mini", msgspec.structs.replace(locked, git=GitLock(URL, "v1", commit, repository.tree())), GENERATED)
    assert proof == SdistProof(equal=1, generated=("PKG-INFO", "mini.egg-info/SOURCES.txt"), absent=1)
    assert locked.sdist
    other = msgspec.structs.replace(locked, sdist=msgspec.structs.replace(locked.sdist, tree="0" * 40))
    with refusal("source-mismatch", match=r"content of mini-1\.tar\.gz is not the tree"):
        fetch.fetch(dataclasses.replace(run, source="sdist"), "mini", other)


@pytest.mark.parametrize(
    ("files", "fault"),
    [({"a.txt": b"1\n"}, "a.txt differs"), ({"a.txt": b"1\r\n", "b.txt": b""}, "b.txt is not in the commit")],
)
def test_a_commit_that_was_not_released_is_refused(
    released: Callable[..., RunContext], commit: str, files: dict[str, bytes], fault: str
) -> None:
    """One byte, or one file that the commit lacks, and the files are named; the right prefix and the tag do not help."""
    with refusal("sdist-differs") as caught:
        fetch.fetch(released(commit[:9], files), "mini")
    assert caught.value.details == (fault,)


def test_files_of_submodules_take_part_in_the_proof(nest: Nest, released: Callable[..., RunContext]) -> None:
    """A sdist carries them in their folders; the proven commit names them, so the lock need not. A host that lacks one is named."""
    files = {"a.txt": b"1\n", "third/party/party.txt": b"party\n", "third/party/deps/inner/inner.txt": b"inner\n"}
    run, mirrors = released(nest.commit[:9], files, ref="main"), {URL: nest.top.url, PARTY: nest.party.url}
    with refusal("source-unreachable", match="inner/gone"):
        fetch.fetch(dataclasses.replace(run, mirrors={**mirrors, INNER: str(nest.inner.path / "gone")}), "mini")
    fetched = fetch.fetch(dataclasses.replace(run, mirrors={**mirrors, INNER: nest.inner.url}), "mini")

    assert (fetched.pin, fetched.resolved) == (nest.commit, True)
    assert {path: entry.tree for path, entry in fetched.submodules.items()} == {path: entry.tree for path, entry in nest.locked().items()}


# Locking.


def test_lock_leaves_unresolved_what_does_not_answer(make: Make, repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the host, or without the ref, nothing is made up; the command goes on, and says so."""
    repository.commit({"a.txt": b"1\n"})
    run = make(ref="v7")
    for mirrors in (run.mirrors, {URL: str(repository.path / "gone")}):
        locked = resolve.resolve(dataclasses.replace(run, mirrors=mirrors))
        assert resolve.unresolved(run.project, locked) == [f"mini: v7 of {URL}"]
        assert "left unresolved" in capsys.readouterr().err


def test_lock_refuses_a_tag_that_names_another_commit(make: Make, repository: Repository, commit: str) -> None:
    run = make()
    spec = msgspec.structs.replace(run.project.spec.forks["mini"], sources=SourceSpecs(git=GitSpec(URL, "v1", "0" * 9)))
    run.project.spec = msgspec.structs.replace(run.project.spec, forks={"mini": spec})

    with refusal("source-mismatch") as caught:
        resolve.resolve(run)

    assert caught.value.details == (f"stack.yaml: {'0' * 9}", f"host: {commit}")


# The mirror map.

def test_the_longest_beginning_wins_and_githubs_case_does_not_count() -> None:
    """GitHub takes NVIDIA/cutlass and nvidia/cutlass for one repository; other hosts need not."""
    mirrors = {HOST: "ssh://c.example/", "https://github.com/NVIDIA/": "ssh://a.example/", f"{HOST}Big/": "ssh://b.example/"}
    for url, address in (
        ("https://GitHub.com/nvidia/cutlass.git", "ssh://a.example/cutlass.git"),
        (f"{HOST}Big/x", "ssh://b.example/x"),
        (f"{HOST}big/x", "ssh://c.example/big/x"),
    ):
        assert mirrored(mirrors, url) == address


@pytest.mark.parametrize("value", ["", "=", "https://a.example", "https://a.example=", "=there"])
def test_a_malformed_mirror_is_wrong_usage(value: str) -> None:
    """An option without both sides is quoted in the error."""
    with refusal("usage") as caught:
        mirror_map(["https://a.example/=https://b.example/", value])

    assert repr(value) in caught.value.what


def test_leaving_out_what_is_not_there_is_refused(make: Make, nest: Nest) -> None:
    """A path under `without` that the source does not have would leave nothing out, in silence."""
    run = nest.run(make(nest.commit), nest.locked(), without=("media",))
    with refusal("file-invalid", match="has nothing of what `without` leaves out") as caught:
        fetch.fetch(run, "mini")
    assert caught.value.details == ("media",)
