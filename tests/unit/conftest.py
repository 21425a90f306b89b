"""Builders that several unit tests share: real repositories, and the command line as a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import hypothesis
import pytest

from sparkwright.cli.main import parser, session_of
from sparkwright.demo import upstreams
from sparkwright.forks import lock, resolve
from sparkwright.forks.session import Session

# A busy disk is no finding; what must be quick is in ci/bench.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

#: What every patch of ours must say.
TRAILERS = "Upstream-Status: Pending\nReason: the test wants it\nDrop-When: the test ends"

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

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True)
        self.git("init", "--quiet", "--initial-branch=main")

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

    def tree(self, revision: str = "HEAD") -> str:
        return self.git("rev-parse", f"{revision}^{{tree}}")

    def change(self, files: Mapping[str, bytes | None], subject: str = "Change something", trailers: str = TRAILERS) -> bytes:
        """Commit *files* on top and return that commit as ``git format-patch`` writes it, with one line of context."""
        self.commit(files, f"{subject}\n\nAs told.\n\n{trailers}")
        return self.output("format-patch", "-1", "-U1", "--stdout", "--no-signature", "--zero-commit")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """Return an empty repository."""
    return Repository(tmp_path / "upstream")


Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Return a function that runs ``python -m sparkwright`` as people do, in an empty folder, and returns how it ended."""
    folder = tmp_path / "cwd"
    folder.mkdir()

    def run(*words: str | Path, env: Mapping[str, str] | None = None, program: Sequence[str] = ("-m", "sparkwright")) -> object:
        environment = {**os.environ, **(env or {})}
        return subprocess.run(
            [sys.executable, *program, *map(str, words)],
            cwd=folder,
            env=environment,
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

    def session(self) -> Session:
        """Return a run on it, as the command line would make it."""
        return session_of(parser().parse_args(["apply", *self.words]))

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
    upstreams.write(made.upstreams)
    (made.root / "forks" / "demo" / "lock.yaml").write_text(lock.render(resolve.resolve(made.session())), "utf-8")
    shutil.rmtree(made.cache)
    return made


@pytest.fixture
def mini(locked_mini: Mini, tmp_path: Path) -> Mini:
    """Return a copy of the locked project with an empty store."""
    made = Mini(tmp_path / "mini")
    shutil.copytree(locked_mini.root.parent, made.root.parent)
    return made
