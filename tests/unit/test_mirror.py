"""Mirrors: one copy of each upstream in the store, from hosts in every mood, and whole again after a killed git."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import socketserver
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.refusals import refusal
from tests.support import badserver, processes
from tests.unit.conftest import Repository

from sparkwright.core import git
from sparkwright.core.store import Store
from sparkwright.demo import upstreams
from sparkwright.forks import mirror
from sparkwright.forks.context import RunContext
from sparkwright.forks.mirror import Mirror
from sparkwright.forks.stack import Project

URL = "https://upstream.example/mini.git"


def context(address: str, store: Store) -> RunContext:
    return RunContext(Project(Path(__file__).parents[2], "2026.11"), store, (), Path(), mirrors={URL: address})


@pytest.fixture(name="commits")
def _commits(repository: Repository) -> list[str]:
    """Fill the repository, which allows filters as the large hosts do, and return its commits."""
    repository.git("config", "uploadpack.allowFilter", "true")
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


class Daemon(socketserver.ThreadingTCPServer):
    """
    git's own server of every repository in *folder*, over git://.

    Attributes:
        limit: Bytes after which an answer is cut off; 0 for no limit.
        largest: Bytes of the largest answer.
    """

    daemon_threads, limit, largest = True, 0, 0

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.command = ["git", "daemon", "--inetd", "--export-all", f"--base-path={folder}", str(folder)]
        self.url = f"git://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


class _Connection(socketserver.BaseRequestHandler):
    server: Daemon

    def handle(self) -> None:
        sent, limit = 0, self.server.limit
        with contextlib.suppress(OSError), subprocess.Popen(self.server.command, stdin=self.request, stdout=subprocess.PIPE) as child:
            assert child.stdout
            pipe = child.stdout.fileno()
            while (not limit or sent < limit) and (data := os.read(pipe, min(4096, limit - sent if limit else 4096))):
                self.request.sendall(data)
                sent += len(data)
            child.kill()
        self.server.largest = max(self.server.largest, sent)


@pytest.fixture(name="daemon")
def _daemon(repository: Repository, commits: list[str]) -> Iterator[Daemon]:
    """Serve the upstream, which has no branch of the name in its HEAD."""
    repository.git("symbolic-ref", "HEAD", "refs/heads/unborn")
    with Daemon(repository.path.parent) as server:
        yield server
        server.shutdown()


# Hosts that do not do as they are asked.


def refused(run: RunContext, act: Callable[[Mirror], object]) -> str:
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
def test_a_connection_that_is_cut_is_not_damage(daemon: Daemon, repository: Repository, store: Store, tmp_path: Path, share: float) -> None:
    """Wherever a fetch is cut, the host is unreachable and the mirror stays usable."""
    repository.git("checkout", "--quiet", "main")
    commit, tree = repository.commit({"big": random.Random(1).randbytes(300_000)}), repository.tree()

    def fetch(upstream: Mirror) -> None:
        upstream.commit(commit)
        upstream.tree(tree)

    fetch(context(f"{daemon.url}/upstream", Store(tmp_path / "other")).mirror(URL))
    processes.until(lambda: daemon.largest > 300_000)
    daemon.limit, run = int(daemon.largest * share), context(f"{daemon.url}/upstream", store)
    assert "127.0.0.1" in refused(run, fetch)
    daemon.limit = 0
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
    store: Store, kind: str, patience: float, act: Callable[[Mirror], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the protocol, a host that takes the connection and is silent counts as unreachable after its time."""
    # git does not count the time in which no connection comes about.
    monkeypatch.setitem(git._CONFIG, "http.lowSpeedTime", "1" if patience > 3 else "600")
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


def prepared(run: RunContext, repository: Repository, commits: list[str]) -> Mirror:
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
    with refusal("git-failed") as caught:
        run.mirror(URL).commit(later)
    assert "After objects.git and mirrors are removed from the cache directory, the next run fetches" in caught.value.todo

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
