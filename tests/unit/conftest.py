"""Builders that several unit tests share: real repositories, and the command line as a process of its own."""

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support import processes
from tests.support.badserver import Listener, Say
from tests.support.standin import _machine, _standin

from sparkwright.cherry_picks import ledger, pick
from sparkwright.cherry_picks.ledger import Ledger, PickRecord
from sparkwright.cli import main, options
from sparkwright.core import strict_yaml
from sparkwright.core.files import sha256_file
from sparkwright.core.git import Objects
from sparkwright.demo import upstreams
from sparkwright.forks import resolve
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import (
    FileLock,
    ForkLock,
    ForkSpec,
    GitLock,
    GitSpec,
    Lock,
    SdistSpec,
    SourceSpecs,
    StackSpec,
    VendoredLock,
    WheelSpec,
    render_lock,
)

__all__ = ["_machine", "_standin"]

# The programs under test compute on no GPU that this machine may have: their verdicts would differ,
# and tests that run at the same time would disturb each other on it.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

ROOT = Path(__file__).parents[2]

#: What every patch of ours must say.
TRAILERS = "Upstream-Status: Pending\nReason: the test wants it\nDrop-When: the test ends"

#: A file of sixty numbered lines.
TEXT = "".join(f"line {number}\n" for number in range(1, 61)).encode()


def append_patch(series: Path, name: str, data: bytes) -> None:
    """Put the patch *data* to the end of the series in the folder *series*."""
    (series / name).write_bytes(data)
    with (series / "series").open("a", encoding="utf-8") as listing:
        listing.write(f"{name}\n")


def edited(*changes: tuple[int, str], text: bytes = TEXT) -> bytes:
    """Return *text* with other lines in place of some, by their numbers in `TEXT`."""
    for number, line in changes:
        old = f"line {number}\n".encode()
        assert text.count(old) == 1
        text = text.replace(old, line.encode())
    return text


#: git as the specification has it: no configuration, and a fixed person at a fixed time.
PLAIN = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    **{f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in (("NAME", "T"), ("EMAIL", "t@t.example"))},
    "GIT_AUTHOR_DATE": "2026-11-01T12:00:00Z",
    "GIT_COMMITTER_DATE": "2026-11-01T12:00:00Z",
    "LC_ALL": "C.UTF-8",
}


class Repository:
    """A real repository with a work tree, driven by git's own command line and by nothing of sparkwright's."""

    def __init__(self, path: Path, *options: str) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.git("init", "--quiet", "--initial-branch=main", *options)
        # As the large hosts, which bring a commit, and its files, by request alone.
        for name in ("uploadpack.allowFilter", "uploadpack.allowAnySHA1InWant"):
            self.git("config", name, "true")

    @property
    def url(self) -> str:
        return self.path.as_uri()

    def output(self, *arguments: str) -> bytes:
        """Return what git prints."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | PLAIN
        return subprocess.run(["git", *arguments], cwd=self.path, env=environment, capture_output=True, check=True).stdout

    def git(self, *arguments: str) -> str:
        """Return what git prints, less the last line end."""
        return self.output(*arguments).decode().rstrip("\n")

    def commit(self, files: Mapping[str, bytes | None], message: str = "Change") -> str:
        """Write *files* (None removes one), commit everything, and return the commit."""
        for name, data in files.items():
            path = self.path / name
            if data is None:
                path.unlink()
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        self.git("add", "--all", "--force")
        self.git("commit", "--quiet", "--allow-empty", "-m", message)
        return self.git("rev-parse", "HEAD")

    def patch(self, files: Mapping[str, bytes | None], subject: str = "Change something") -> bytes:
        """Commit *files* on top and return that commit as ``git format-patch`` writes it, with one line of context."""
        self.commit(files, f"{subject}\n\nAs told.\n\n{TRAILERS}")
        return self.output("format-patch", "-1", "-U1", "--stdout", "--no-signature", "--zero-commit")

    def tree(self, revision: str = "HEAD") -> str:
        return self.git("rev-parse", f"{revision}^{{tree}}")

    def link(self, path: str, commit: str) -> None:
        """Put a submodule at *commit* into the index, to be committed."""
        self.git("update-index", "--add", "--cacheinfo", f"160000,{commit},{path}")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """Return an empty repository."""
    return Repository(tmp_path / "upstream")


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    """Return an empty object database."""
    return Objects(tmp_path / "objects.git")


@pytest.fixture(name="listen")
def _listen() -> Iterator[Callable[[Say], Listener]]:
    """Return what starts a server that does what it is told with each connection."""
    with contextlib.ExitStack() as stack:
        yield lambda say: stack.enter_context(contextlib.closing(Listener(say)))


Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Return a function that runs ``python -m sparkwright`` as people do, in an empty folder, and returns how it ended."""
    folder = tmp_path / "cwd"
    folder.mkdir()

    def run(*words: str | Path, env: Mapping[str, str] | None = None, program: Sequence[str] = ("-m", "sparkwright")) -> object:
        return subprocess.run(
            [sys.executable, *program, *map(str, words)],
            cwd=folder,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    return run  # type: ignore[return-value]  # the alias leaves the arguments open


class Mini:
    """The demo's project without its graft bases, locked against its upstreams, and what a command line says to reach it."""

    def __init__(self, folder: Path) -> None:
        self.root, self.upstreams, self.cache = folder / "project", folder / "upstreams", folder / "cache"

    @property
    def words(self) -> list[str]:
        return [
            "--stack",
            "demo",
            "--root",
            str(self.root),
            "--cache-dir",
            str(self.cache),
            "--mirror",
            f"{upstreams.HOST}={self.upstreams}/",
        ]

    def context(self) -> RunContext:
        """Return a run on it, as the command line would make it."""
        return options.checkout(main.parse(["apply", *self.words]))

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace *old*, which must be there once, in a reviewed file."""
        path = self.root / name
        text = path.read_text("utf-8")
        assert text.count(old) == 1
        path.write_text(text.replace(old, new), "utf-8")


@pytest.fixture(scope="session")
def locked_mini(tmp_path_factory: pytest.TempPathFactory) -> Mini:
    """Return the locked project, made once, to be copied."""
    made = Mini(tmp_path_factory.mktemp("mini"))
    shutil.copytree(Path(upstreams.__file__).parent / "project", made.root)
    stack = made.root / "forks" / "demo" / "stack.yaml"
    lines = stack.read_text("utf-8").splitlines(keepends=True)
    stack.write_text("".join(line for line in lines if "bases:" not in line and "mini-vllm" not in line), "utf-8")
    upstreams.write_repositories(made.upstreams)
    (made.root / "forks" / "demo" / "lock.yaml").write_text(render_lock(resolve.resolve(made.context())), "utf-8")
    shutil.rmtree(made.cache)
    return made


@pytest.fixture
def mini(locked_mini: Mini, tmp_path: Path) -> Mini:
    """Return a copy of the locked project with an empty store."""
    made = Mini(tmp_path / "mini")
    shutil.copytree(locked_mini.root.parent, made.root.parent, ignore=shutil.ignore_patterns(locked_mini.cache.name))
    return made


class Host:
    """
    An upstream at its host, and a project whose only fork it is; in a new folder.

    Attributes:
        work: The repository of its people; nothing of it is at the host before `push`.
        path: The bare repository that the host serves; the mirror map says that it is there.
        mirrors: The rest of the mirror map.
    """

    url, fork, stack = "https://github.com/acme/widget.git", "widget", "test"

    def __init__(self, folder: Path) -> None:
        self.work = Repository(folder / "work")
        self.path, self.root, self.cache = Repository(folder / "widget.git", "--bare").path, folder / "project", folder / "cache"
        self.mirrors: dict[str, str] = {}

    def push(self, *refs: str) -> None:
        """Put *refs*, each as ``git push`` has it, to the host, with force; without any, the branch main."""
        self.work.git("push", "--quiet", "--force", str(self.path), *(refs or ("main",)))

    def pull(self, number: int, *changes: Mapping[str, bytes | None], start: str = "main") -> str:
        """Open, or push to, pull request *number* with a commit for each of *changes* on top of *start*, and return its head."""
        self.work.git("checkout", "--quiet", "-B", f"pr{number}", start)
        head = [self.work.commit(files, f"pr{number} {count}") for count, files in enumerate(changes, 1)][-1]
        self.work.git("checkout", "--quiet", "main")
        self.push(f"+{head}:refs/pull/{number}/head")
        return head

    def squash(self, number: int) -> str:
        """Merge pull request *number* into main as GitHub's squash does, and return that commit."""
        self.work.git("merge", "--quiet", "--squash", f"pr{number}")
        self.work.git("commit", "--quiet", "--allow-empty", "-m", f"Improve it (#{number})")
        self.push()
        return self.work.git("rev-parse", "HEAD")

    def lock(
        self,
        sdist: FileLock | None = None,
        *,
        wheel: FileLock | None = None,
        generated: tuple[str, ...] = (),
        vendored: Mapping[str, VendoredLock] = {},
        **pins: Any,
    ) -> None:
        """
        Tag the commit as v1, and write a project that takes it from there or, where they are given, from *sdist* or a folder of *wheel*;
        *pins* change its lock.
        """
        self.work.git("tag", "--force", "v1")
        self.push("v1", "main")
        git = GitLock(self.url, "v1", self.work.git("rev-parse", "v1"), self.work.tree("v1"))
        git = msgspec.structs.replace(git, **pins)
        spec = SdistSpec(sdist.name, sdist.version, generated) if sdist else None
        folder_spec = WheelSpec(wheel.name, wheel.version, "py3-none-any", wheel.folder) if wheel else None
        sources = SourceSpecs(git=GitSpec(self.url, git.ref), sdist=spec, wheel=folder_spec)
        stack = StackSpec(self.stack, "12.1f", "spark.t", {self.fork: ForkSpec("backend", sources)})
        build = self.root / "build" / self.stack
        for folder in (self.series, self.root / "cherry_picks", build):
            folder.mkdir(parents=True, exist_ok=True)
        (build / "environment.yaml").write_text(f"forks: {{{self.fork}: {{distribution: {self.fork}}}}}\n", "utf-8")
        (self.root / "forks" / self.stack / "stack.yaml").write_text(strict_yaml.dump(stack), "utf-8")
        locked = ForkLock(git=git, sdist=sdist, wheel=wheel, vendored=dict(vendored))
        (self.root / "forks" / self.stack / "lock.yaml").write_text(render_lock(Lock(1, self.stack, {self.fork: locked})), "utf-8")
        self.write()

    def files(self) -> dict[str, bytes]:
        """Return every file of the project but those of worktrees: path → bytes."""
        files = {str(path.relative_to(self.root)): path.read_bytes() for path in self.root.rglob("*") if path.is_file()}
        return {name: data for name, data in files.items() if not name.startswith(".rebase")}

    @property
    def series(self) -> Path:
        """The folder of our patches."""
        return self.root / "forks" / self.stack / self.fork

    def ours(self, name: str, files: Mapping[str, bytes | None], subject: str = "Change something", text: str = "As told.") -> None:
        """Put a patch to the end of the series, in the form that `export` writes, made after those that are there."""
        known = self.work.git("branch", "--list", "ours")
        self.work.git("checkout", "--quiet", *(["ours"] if known else ["-b", "ours", "v1"]))
        self.work.commit(files, subject)
        change = self.work.output("diff", "-U1", "--full-index", "--binary", "--no-renames", "--no-indent-heuristic", "HEAD~1", "HEAD")
        self.work.git("checkout", "--quiet", "main")
        top = f"From: T <t@t.example>\nDate: Sun, 1 Nov 2026 12:00:00 +0000\nSubject: [PATCH] {subject}\n"
        top += f"\n{text}\n\n{TRAILERS}\n---\n"
        append_patch(self.series, name, top.encode() + change)

    @property
    def ledger(self) -> Ledger:
        return ledger.load_ledger(self.root, self.fork)

    def write(self, *records: PickRecord) -> Ledger:
        """Write a ledger of *records*, and return it."""
        ledger.path_of(self.root, self.fork).write_text(ledger.render(Ledger(self.url, records=records)))
        return self.ledger

    def carry(
        self, number: int, head: str, merge: str = "", *, stacks: Sequence[str] = (), excluded: Sequence[str] = ()
    ) -> PickRecord:
        """Pin pull request *number*, and let the stack, and *stacks*, carry it, less the files *excluded*."""
        pull = pick.PullRequest(head, merge, f"Improve number {number}")
        record = pick.record(self.context(), self.ledger, pull, number, "the test wants it", "the test ends")
        paths = dict.fromkeys(excluded, "the test leaves it out")
        record = msgspec.structs.replace(record, stacks=dict.fromkeys((self.stack, *stacks), paths))
        self.write(*self.ledger.records, record)
        return record

    @property
    def words(self) -> list[str]:
        """What a command line says to reach all this."""
        places = {self.url: str(self.path), **self.mirrors}
        mirrors = [word for url, place in places.items() for word in ("--mirror", f"{url}={place}")]
        return ["--stack", self.stack, "--root", str(self.root), "--cache-dir", str(self.cache), *mirrors]

    def killed(self, place: str, after: int, verb: str, *words: str) -> bool:
        """Run the command line and kill it before its file operation number *after* below *place*; return whether it came that far."""
        return processes.kill_at(after, lambda: main.main([*verb.split(), *self.words, *words]), place)

    def context(self, *words: str) -> RunContext:
        """Return a run on it, as the command line would make it with *words*."""
        return options.checkout(main.parse(["apply", *self.words, *words]))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Return an upstream without a commit, and no project yet."""
    return Host(tmp_path / "host")


PARTY, INNER = "https://upstream.example/party.git", "https://upstream.example/inner.git"


class Nest:
    """A source with a submodule that has one itself: ``third/party`` and in it ``deps/inner``."""

    def __init__(self, host: Host) -> None:
        self.top, self.party, self.inner = host.work, Repository(host.root.parent / "party"), Repository(host.root.parent / "inner")
        self.inner.commit({"inner.txt": b"inner\n", "docs/big.txt": b"big\n"})
        self.party.commit({"party.txt": b"party\n"})
        self.link(self.party, "deps/inner", self.inner, INNER)
        self.top.commit({"a.txt": b"1\n", "docs/guide.txt": b"guide\n", "docsy.txt": b"stays\n"})
        self.link(self.top, "third/party", self.party, PARTY)
        host.mirrors |= {PARTY: str(self.party.path), INNER: str(self.inner.path)}

    @staticmethod
    def link(repository: Repository, path: str, other: Repository, url: str) -> None:
        repository.commit({".gitmodules": f'[submodule "it"]\n\tpath = {path}\n\turl = {url}\n'.encode()})
        repository.link(path, other.git("rev-parse", "HEAD"))
        repository.git("commit", "--quiet", "-m", "submodule")

    def locked(self, **without: tuple[str, ...]) -> dict[str, VendoredLock]:
        """Return what a lock says of both submodules."""
        entries = {"third/party": (PARTY, self.party), "third/party/deps/inner": (INNER, self.inner)}
        return {
            path: VendoredLock(url, "main", one.git("rev-parse", "HEAD"), one.tree(), without.get(one.path.name, ()), kind="submodule")
            for path, (url, one) in entries.items()
        }


class Index:
    """A package index with the files of one project, by default the release of `Host`'s upstream."""

    def __init__(self, root: Path, project: str = "widget-kit") -> None:
        self.root, self.project = root, project
        self.page = root / "simple" / project / "index.html"
        self.page.parent.mkdir(parents=True)
        self.page.write_text("<!DOCTYPE html>\n")

    def release(self, version: str, files: Mapping[str, bytes], marks: str = "") -> Path:
        """Offer the sdist of *version*, and return it; *marks* are further attributes of its link."""
        name = f"{self.project.replace('-', '_')}-{version}.tar.gz"
        with tarfile.open(self.root / name, "w:gz") as archive:
            for path, data in files.items():
                member = tarfile.TarInfo(f"{name.removesuffix('.tar.gz')}/{path}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        return self.add(name, marks=marks)

    def add(self, name: str, data: bytes | None = None, marks: str = "") -> Path:
        """Offer the file *name*, which is in the folder or has *data*, and return it."""
        if data is not None:
            (self.root / name).write_bytes(data)
        with self.page.open("a") as page:
            page.write(f'<a {marks} href="../../{name}#sha256={sha256_file(self.root / name)}">{name}</a>\n')
        return self.root / name


@pytest.fixture(name="offered")
def _offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """Return an empty index, served on a loopback address."""
    made = Index(tmp_path / "index")
    with upstreams.serve(made.root) as address:
        monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", f"{address}/simple/")
        yield made
