"""Mirrors: one copy of each upstream in the store, from real hosts in every mood, and whole again after whatever happens to it."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.refusals import refusal
from tests.support import badserver

from sparkwright.core import git
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.git_store import Objects
from sparkwright.core.store import Store
from sparkwright.forks import mirror
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError
from sparkwright.forks.mirror import Mirror
from sparkwright.forks.stack import Project

if TYPE_CHECKING:
    from tests.unit.conftest import Repository

ROOT = Path(__file__).parents[2]
URL = "https://upstream.example/mini.git"

Answer = Callable[[BaseHTTPRequestHandler], None]


class GitHost(ThreadingHTTPServer):
    """
    The repositories below *root*, served by git's own ``http-backend`` with the repositories' own configuration.

    Attributes:
        asked: The path of every request.
        answer: What to do instead of asking git.
        stall: Bytes of a reply after which nothing more comes; 0 lets everything come.
    """

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root, self.asked = root, list[str]()
        self.stall = 0
        self.answer: Answer | None = None
        self.stalled = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that went away."""


class _Handler(BaseHTTPRequestHandler):
    server: GitHost

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        (self.server.answer or _ask_git)(self)

    def do_POST(self) -> None:
        self.do_GET()


def _ask_git(handler: BaseHTTPRequestHandler) -> None:
    host = handler.server
    assert isinstance(host, GitHost)
    path, _, query = handler.path.partition("?")
    body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
        "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_HTTP_EXPORT_ALL": "1", "GIT_PROJECT_ROOT": str(host.root),
        "GIT_PROTOCOL": handler.headers.get("Git-Protocol", ""), "PATH_INFO": path, "QUERY_STRING": query,
        "REQUEST_METHOD": handler.command, "CONTENT_TYPE": handler.headers.get("Content-Type", ""), "CONTENT_LENGTH": str(len(body)),
        "HTTP_CONTENT_ENCODING": handler.headers.get("Content-Encoding", ""), "REMOTE_ADDR": "127.0.0.1",
    }  # fmt: skip
    done = subprocess.run(["git", "http-backend"], input=body, env=environment, capture_output=True, check=False).stdout
    head, _, content = done.partition(b"\r\n\r\n")
    fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
    handler.send_response(int(fields.pop("Status", "200").split()[0]))
    for name, value in {**fields, "Content-Length": str(len(content))}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if 0 < host.stall < len(content):
        handler.wfile.write(content[: host.stall])
        handler.wfile.flush()
        host.stalled.set()
        threading.Event().wait(60)
    handler.wfile.write(content)


def replying(status: int, text: str, kind: str = "text/html") -> Answer:
    """Return an answer that is the same to every question."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(text)), "Retry-After": "1"}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(text.encode())

    return answer


@pytest.fixture(name="template", scope="module")
def _template(tmp_path_factory: pytest.TempPathFactory, repositories: type[Repository]) -> Repository:
    """Return a repository of five commits, in which two files change each time, to be copied."""
    template = repositories(tmp_path_factory.mktemp("template") / "upstream")
    for number in range(5):
        template.commit({"a.txt": b"%d\n" % number * 99, "d/b.txt": b"b%d\n" % number * 99, "d/same.txt": b"same\n"})
    return template


@pytest.fixture(name="repository")
def _repository(template: Repository, tmp_path: Path) -> Repository:
    """Return a copy of the repository."""
    shutil.copytree(template.path, tmp_path / "upstream")
    return type(template)(tmp_path / "upstream")


@pytest.fixture(name="commits", scope="module")
def _commits(template: Repository) -> list[str]:
    """Return the commits of the repository."""
    return template.git("rev-list", "--reverse", "main").splitlines()


@pytest.fixture(name="host")
def _host(repository: Repository, commits: list[str]) -> Iterator[GitHost]:
    """Return a host of the repository that allows filters, as the large ones do."""
    repository.git("config", "uploadpack.allowFilter", "true")
    with GitHost(repository.path) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def session(place: str, store: Store, *, offline: bool = False) -> RunContext:
    return RunContext(Project(ROOT, "2026.11"), store, (), Path(), offline=offline, mirrors={URL: place})


@pytest.fixture(name="run")
def _run(host: GitHost, store: Store) -> RunContext:
    """Return a run that reaches the upstream at the host."""
    return session(f"{host.url}.git", store)


def there(run: RunContext, *names: str) -> list[bool]:
    return [run.objects.has(name) for name in names]


def said(error: SparkwrightError) -> str:
    return "\n".join([error.what, *error.details, error.todo])


# What is brought.


def test_a_commit_comes_without_its_history_and_its_files(run: RunContext, repository: Repository, commits: list[str]) -> None:
    """The commit and its folders are there; its parent and its files are not."""
    run.mirror(URL).commit(commits[2])
    inner = repository.git("rev-parse", f"{commits[2]}:d")
    file = repository.git("rev-parse", f"{commits[2]}:a.txt")

    assert there(run, commits[2], inner, commits[1], file) == [True, True, False, False]


def test_the_files_of_a_tree_come_in_one_request(run: RunContext, host: GitHost, repository: Repository, commits: list[str]) -> None:
    """However many files are missing, the host is asked once for them; what the store has is not asked for."""
    run.mirror(URL).commit(commits[2])
    host.asked.clear()
    tree = run.mirror(URL).tree(repository.tree(commits[2]))
    packs = [path for path in host.asked if path.endswith("git-upload-pack") and "info/refs" not in path]
    again = len(host.asked)
    run.mirror(URL).tree(tree)

    assert dict(run.objects.files(tree))["a.txt"] == b"2\n" * 99
    assert len(packs) == 1
    assert len(host.asked) == again


def test_a_commit_then_its_history_then_another_commit(run: RunContext, host: GitHost, repository: Repository, commits: list[str]) -> None:
    """A history that is asked for after a single commit is whole, and stays whole when another commit comes after it."""
    upstream = run.mirror(URL)
    upstream.commit(commits[2])
    tip = upstream.history("main")
    count = ["rev-list", "--count", "main"]
    repository.git("checkout", "--quiet", "-b", "side", commits[1])
    other = repository.commit({"c.txt": b"c\n"})
    upstream.commit(other)

    assert tip == commits[4]
    assert run.objects.run(["rev-list", "--count", commits[4]])[1].decode().strip() == repository.git(*count) == "5"
    assert run.objects.run(["merge-base", other, commits[4]])[1].decode().strip() == commits[1]
    assert not (upstream.path / "shallow").exists()


def test_a_history_is_as_the_host_had_it_until_its_newest_is_asked_for(run: RunContext, host: GitHost, repository: Repository) -> None:
    """What is known is answered without the host; asking for the newest brings what came since, and follows a forced push."""
    upstream = run.mirror(URL)
    first = upstream.history("main")
    asked = len(host.asked)
    repository.git("commit", "--quiet", "--amend", "-m", "another one")
    moved = repository.git("rev-parse", "HEAD")

    assert upstream.history("main") == first
    assert len(host.asked) == asked
    assert upstream.history("main", newest=True) == moved == upstream.fetched("main")
    assert upstream.history("gone") is None


# Hosts that do not do as they are asked.


def refused(run: RunContext, act: Callable[[Mirror], object]) -> str:
    with refusal("source-unreachable") as caught:
        act(run.mirror(URL))
    return said(caught.value)


def test_a_host_that_lacks_a_commit(run: RunContext) -> None:
    """A commit that the host does not have is named, with git's words."""
    words = refused(run, lambda one: one.commit("1" * 40))

    assert f"does not offer commit {'1' * 40}" in words
    assert "not our ref" in words



def test_ref_is_the_commit_of_a_tag_before_that_of_a_branch(run: RunContext, repository: Repository, commits: list[str]) -> None:
    """Annotated tags give the commit that they name, light tags and branches theirs; None where there is none."""
    repository.git("tag", "-a", "-m", "first", "annotated", commits[0])
    repository.git("tag", "both", commits[1])
    repository.git("branch", "both", commits[2])
    names = ("annotated", "both", "main", "refs/heads/both", "gone")

    assert [run.mirror(URL).ref(name) for name in names] == [commits[0], commits[1], commits[4], commits[2], None]


@pytest.mark.parametrize("address", ["ext::touch {folder}/ran", "--upload-pack=touch {folder}/ran"])
def test_address_cannot_run_a_command(store: Store, tmp_path: Path, address: str) -> None:
    """git's ext:: transport is off, and an address is never an option."""
    refused(session(address.format(folder=tmp_path), store), lambda one: one.ref("main"))

    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("answer", "words", "act"),
    [
        (replying(403, "<html>no</html>"), "The requested URL returned error: 403", lambda one: one.ref("main")),
        (replying(404, "<html>gone</html>"), "not found", lambda one: one.commit("1" * 40)),
        (replying(401, "<html>who?</html>"), "terminal prompts disabled", lambda one: one.history("main")),
        (
            replying(200, "<html><form>Log in</form></html>"),
            "fatal: dumb http|is this a git repository?",
            lambda one: one.ref("main"),
        ),
        (
            replying(200, "<html>\n<form>Log in</form>\n</html>\n"),
            "is this a git repository?",
            lambda one: one.commit("1" * 40),
        ),
        (
            replying(200, "001e# service=git-upload-pack\n0000zzzz", "application/x-git-upload-pack-advertisement"),
            "fatal: ",
            lambda one: one.history("main"),
        ),
    ],
)
def test_an_answer_that_is_none(
    run: RunContext, host: GitHost, answer: Answer, words: str, act: Callable[[Mirror], object]
) -> None:
    """A refusal, a limit, a fault, a login page and plain nonsense are all unreachable, in git's words and without credentials."""
    host.answer = answer
    guarded = dataclasses.replace(run, mirrors={URL: host.url.replace("://", "://user:secret%2Fword@") + ".git"})
    if words.startswith("terminal"):
        guarded = run
    text = refused(guarded, act)

    assert any(one in text for one in words.split("|"))
    assert f"{host.url}.git" in text
    assert "secret" not in text


@pytest.mark.parametrize(
    ("kind", "patience", "act"),
    [("http", 60, lambda one: one.ref("main")), ("git", 0.5, lambda one: one.commit("1" * 40))],
)
def test_silent_host_is_given_up(store: Store, kind: str, patience: float, act: Callable[[Mirror], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the protocol, a host that takes the connection and is silent counts as unreachable after its time."""
    monkeypatch.setitem(git._CONFIG, "http.lowSpeedTime", "1")
    monkeypatch.setattr(mirror, "PATIENCE", patience)
    listener = badserver.Listener(badserver.silent)

    assert "127.0.0.1" in refused(session(f"{listener.url.replace('http', kind)}/mini.git", store), act)
    listener.close()


def test_fetched_commits_need_no_host(run: RunContext, host: GitHost, repository: Repository, commits: list[str]) -> None:
    """Commit, files and history that came once are there offline; everything else is `offline`, and no host is asked."""
    upstream = prepared(run, repository, commits)
    host.asked.clear()
    offline = session(run.mirrored(URL), run.store, offline=True).mirror(URL)
    offline.commit(commits[2])
    offline.tree(repository.tree(commits[2]))

    assert offline.history("main") == upstream.fetched("main") == commits[4]
    with refusal("offline"):
        offline.commit("1" * 40)
    with refusal("offline"):
        offline.history("other")
    assert host.asked == []


def test_a_host_without_any_ref_is_no_host(store: Store, tmp_path: Path) -> None:
    """That a repository offers nothing at all does not mean that the ref is gone."""
    subprocess.run(["git", "init", "-q", "--bare", "empty.git"], cwd=tmp_path, check=True)
    with refusal("source-unreachable", match="does not answer") as caught:
        session((tmp_path / "empty.git").as_uri(), store).mirror(URL).ref("main")

    assert caught.value.details == ("no branch and no tag is offered: is this a git repository?",)


# Nobody's configuration.


def test_a_local_mirror_executes_nothing(store: Store, repository: Repository, commits: list[str], tmp_path: Path) -> None:
    """Hooks and the configuration of a repository that --mirror names belong to others, and do not run."""
    for line in ("uploadpack.packObjectsHook", "core.fsmonitor", "core.sshCommand", "core.gitProxy"):
        repository.git("config", line, f"touch {tmp_path}/ran;")
    hooks = repository.path / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    for name in ("post-checkout", "pre-upload", "reference-transaction"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch '{tmp_path}/ran'\n")
        (hooks / name).chmod(0o755)
    run = session(repository.url, store)
    run.mirror(URL).commit(commits[2])
    run.mirror(URL).tree(repository.tree(commits[2]))

    assert not (tmp_path / "ran").exists()


# Damage.


def prepared(run: RunContext, repository: Repository, commits: list[str]) -> Mirror:
    """Return a mirror that holds a commit with its files, and a history."""
    upstream = run.mirror(URL)
    upstream.commit(commits[2])
    upstream.tree(repository.tree(commits[2]))
    upstream.history("main")
    return upstream


def _overwrite_packs(path: Path) -> None:
    for pack in (path / "objects" / "pack").glob("*.pack"):
        pack.chmod(0o644)
        data = pack.read_bytes()
        pack.write_bytes(data[:20] + b"\xff" * 40 + data[60:])


def _file_instead(path: Path) -> None:
    shutil.rmtree(path)
    path.touch()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "packs": _overwrite_packs,
    "objects gone": lambda path: shutil.rmtree(path / "objects"),
    "HEAD": lambda path: (path / "HEAD").write_bytes(b"\xff\0garbage"),
    "config": lambda path: (path / "config").write_bytes(b"[[[garbage"),
    "shallow": lambda path: (path / "shallow").write_bytes(b"garbage\n"),
    "a file instead": _file_instead,
    "nothing instead": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_mirror_heals_or_says_what_to_remove(
    run: RunContext, host: GitHost, repository: Repository, commits: list[str], damage: str
) -> None:
    """
    After any damage, what the next run brings is right, or the error names the folder to remove, and removing it mends everything.

    The cache directory lies in somebody's repository here, and that one is never taken for the mirror.
    """
    outer = run.store.root.parent
    subprocess.run(["git", "init", "-q", "."], cwd=outer, check=True)
    before = sorted((outer / ".git").rglob("*"))
    path = prepared(run, repository, commits).path
    DAMAGE[damage](path)
    later = repository.commit({"later.txt": b"later\n"})

    def use() -> None:
        fresh = session(run.mirrored(URL), run.store)
        upstream = fresh.mirror(URL)
        for commit in (later, commits[2]):
            upstream.commit(commit)
            assert fresh.objects.whole(upstream.tree(repository.tree(commit)))
        assert upstream.history("main", newest=True) == later
        assert fresh.objects.run(["rev-list", "--count", later])[1] == b"6\n"

    told = None
    try:
        use()
    except SourceError as error:
        if error.reference != "mirror-damaged":
            raise
        told = error
    if told:
        assert str(path) in told.todo
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
        use()
    assert sorted((outer / ".git").rglob("*")) == before


def test_damage_is_not_the_hosts_fault(run: RunContext, repository: Repository, commits: list[str]) -> None:
    """A fetch that fails for a broken mirror is not reported as a host that does not answer."""
    path = prepared(run, repository, commits).path
    _overwrite_packs(path)
    later = repository.commit({"later.txt": b"later\n"})
    with refusal("mirror-damaged", match=r"The mirror of https://upstream\.example/mini\.git is damaged") as caught:
        run.mirror(URL).commit(later)

    assert str(path) in caught.value.todo


def test_locks_of_a_killed_git_are_cleared_up(run: RunContext, repository: Repository, commits: list[str]) -> None:
    """Lock files and half packs that a killed git left do not stop the next fetch, and do not stay."""
    upstream = prepared(run, repository, commits)
    later = repository.commit({"later.txt": b"later\n"})
    names = ("shallow.lock", "packed-refs.lock", "refs/fetched/main.lock", f"refs/pinned/{later}.lock", "objects/pack/tmp_pack_x1")
    left = [upstream.path / name for name in names]
    for path in left:
        path.write_bytes(b"half")
    upstream.history("main", newest=True)
    upstream.commit(later)

    assert run.objects.has(f"{later}^{{commit}}")
    assert not [path for path in left if path.exists()]


# Several processes, and dead ones.

PROGRAM = """
import sys
from pathlib import Path
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.core.store import Store
url, place, store, root, commit, tree = sys.argv[1:]
run = RunContext(Project(Path(root), "2026.11"), Store(Path(store)), (), Path(), mirrors={url: place})
mirror = run.mirror(url)
mirror.commit(commit)
mirror.tree(tree)
print(mirror.history("main"))
print(run.objects.whole(tree))
"""


def started(run: RunContext, commit: str, tree: str, url: str = URL) -> subprocess.Popen[str]:
    words = [url, run.mirrored(URL), str(run.store.root), str(ROOT), commit, tree]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def test_a_killed_fetch_is_finished_by_the_next_run(
    run: RunContext, host: GitHost, repository: Repository, commits: list[str]
) -> None:
    """`kill -9` of sparkwright and of every git of its while a reply is under way leaves nothing in the way of the next run."""
    host.stall = 1000
    with started(run, commits[2], repository.tree(commits[2])) as child:
        assert host.stalled.wait(60)
        os.killpg(child.pid, signal.SIGKILL)
    host.stall = 0
    upstream = prepared(run, repository, commits)

    assert run.objects.whole(repository.tree(commits[2]))
    assert not [*upstream.path.rglob("*.lock"), *upstream.path.rglob("*tmp*")]


# Borrowing.


def test_an_object_store_borrows_from_others(tmp_path: Path) -> None:
    """Objects of a borrowed repository count as being here, those of one that is gone do not, and nothing is written twice."""
    one, two, mine = (Objects(tmp_path / name) for name in ("lent/one.git", "lent/two.git", "mine.git"))
    first, second = one.store_files([("a", git.REGULAR, b"1")]), two.store_files([("a", git.REGULAR, b"2")])
    alternates = mine.path / "objects" / "info" / "alternates"
    mine.borrow(one.path.parent)
    written = alternates.stat()
    mine.borrow(one.path.parent)

    assert (mine.has(first), mine.has(second)) == (True, True)
    assert alternates.stat().st_mtime_ns == written.st_mtime_ns
    shutil.rmtree(two.path)
    mine.borrow(one.path.parent)
    assert (mine.has(first), mine.has(second)) == (True, False)
    assert "two" not in alternates.read_text()
