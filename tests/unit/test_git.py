"""The object database, on real repositories: exact trees, checkouts that can be killed, and nobody's configuration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.refusals import refusal
from tests.support import forked

from sparkwright.core import git
from sparkwright.core.git import Objects

FILES = {"a.txt": b"one\n", "src/b.c": b"int b;\r\n", "src/deep/c.h": b"\x00\x01", "run.sh": b"#!/bin/sh\n"}


@pytest.fixture(name="objects")
def _objects(tmp_path: Path) -> Objects:
    return Objects(tmp_path / "objects.git")


def stored(objects: Objects, **changes: bytes) -> str:
    """Return a tree of `FILES`, where ``run.sh`` is executable, with *changes* (``__`` stands for a slash, ``_`` for a dot)."""
    files = FILES | {name.replace("__", "/").replace("_", "."): data for name, data in changes.items()}
    return objects.store_files((name, git.EXECUTABLE if name == "run.sh" else git.REGULAR, data) for name, data in files.items())


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_variables_and_configuration_of_the_user_have_no_effect(objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    GIT_DIR and its like, which hooks and rebases leave in a shell, redirect nothing; autocrlf, attributes, hooks and filters of the home folder
    change no byte of what is stored and checked out.
    """
    attributes, other = b"* text eol=crlf filter=x\n", tmp_path / "other"
    expected = stored(objects, _gitattributes=attributes)
    for name, value in {
        "GIT_DIR": str(other),
        "GIT_INDEX_FILE": str(other / "index"),
        "GIT_OBJECT_DIRECTORY": str(other / "objects"),
        "GIT_WORK_TREE": str(other),
        "GIT_NAMESPACE": "x",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "core.autocrlf",
        "GIT_CONFIG_VALUE_0": "true",
        "GIT_LITERAL_PATHSPECS": "1",
        "GIT_TRACE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "post-checkout").write_text(f"#!/bin/sh\ntouch '{tmp_path}/ran'\n")
    (tmp_path / "post-checkout").chmod(0o755)
    with (Path.home() / ".gitconfig").open("a") as stream:
        stream.write(f'[core]\n\thooksPath = {tmp_path}\n\teol = crlf\n[filter "x"]\n\tsmudge = tr a-z A-Z\n\trequired = true\n')
    (Path.home() / ".config" / "git").mkdir(parents=True)
    (Path.home() / ".config" / "git" / "attributes").write_text("* text filter=x\n")
    fresh = Objects(tmp_path / "fresh.git")
    tree = stored(fresh, _gitattributes=attributes)
    fresh.archive(tree, tmp_path / "out")

    assert tree == expected
    assert content(tmp_path / "out") == FILES | {".gitattributes": attributes}
    assert not other.exists()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("again", [False, True], ids=["back", "on"])
def test_a_killed_checkout_is_finished(objects: Objects, tmp_path: Path, again: bool) -> None:
    """`kill -9` on the way to another tree leaves a folder that the next checkout makes whole, of that tree or of the one before."""
    many = {f"d{number % 40}/f{number}.c": b"%d\n" % number * 400 for number in range(3000)}
    before, tree = stored(objects), objects.store_files((name, git.REGULAR, data) for name, data in many.items())
    folder, index = tmp_path / "src", tmp_path / "index"
    objects.checkout(before, folder, index)
    assert forked.killed(lambda: objects.checkout(tree, folder, index), (folder / "d20").exists)
    objects.checkout(tree if again else before, folder, index)
    # Nor is anything left that git does not track.
    assert content(folder) == (many if again else FILES)


def test_a_damaged_store_is_not_the_repository_around_it(tmp_path: Path) -> None:
    """Where the cache directory lies in somebody's repository, a store that lost its HEAD is an error, and that repository stays."""
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    objects = Objects(tmp_path / "objects.git")
    tree, before = stored(objects), sorted((tmp_path / ".git").rglob("*"))
    (objects.path / "HEAD").write_bytes(b"garbage")
    for use in (lambda: objects.paths(tree), lambda: stored(objects), lambda: objects.checkout(tree, tmp_path / "src", tmp_path / "index")):
        with refusal("git-failed"):
            use()

    assert sorted((tmp_path / ".git").rglob("*")) == before


def test_processes_make_one_store_at_once(tmp_path: Path) -> None:
    """Processes that begin together with a fresh cache directory all end up with the same store, and leave nothing else."""
    program = "import sys; from pathlib import Path; from sparkwright.core.git import Objects; Objects(Path(sys.argv[1]))"
    words = [sys.executable, "-c", program, str(tmp_path / "store" / "objects.git")]
    children = [subprocess.Popen(words) for _ in range(5)]

    assert [child.wait(60) for child in children] == [0] * 5
    assert stored(Objects(tmp_path / "store" / "objects.git"))
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["objects.git"]
