"""The object database, on real repositories: exact trees, checkouts that can be killed, and nobody's configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.refusals import refusal

from sparkwright.core import git
from sparkwright.core.git_store import Objects

if TYPE_CHECKING:
    from tests.unit.conftest import Repository

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


# Trees.


def test_files_are_replaced_and_modes_stay(objects: Objects) -> None:
    """New bytes take the mode of the file that stood there; new files are regular; nothing else changes."""
    before = stored(objects)
    after = objects.with_files(before, {"run.sh": b"#!/bin/dash\n", "new/x": b"x"})
    changed = objects.paths(after)

    assert objects.changes(before, after) == {"new/x": "A", "run.sh": "M"}
    assert {path: mode for path, (mode, _) in changed.items() if mode != git.REGULAR} == {"run.sh": git.EXECUTABLE}
    assert objects.blob(after, "run.sh") == b"#!/bin/dash\n"


def test_files_of_a_folder_are_read_at_once(objects: Objects) -> None:
    """Every regular file below a folder comes with its bytes; a file that is not there is None."""
    tree = stored(objects)

    assert dict(objects.files(tree, "src")) == {"src/b.c": b"int b;\r\n", "src/deep/c.h": b"\x00\x01"}
    assert objects.blob(tree, "src/gone.c") is None
    assert objects.paths(tree, "src").keys() == {"src/b.c", "src/deep/c.h"}
    assert objects.resolve(f"{tree}:src/deep") == objects.store_files([("c.h", git.REGULAR, b"\x00\x01")])


# Nobody's configuration.


def test_variables_of_the_user_do_not_redirect_git(objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIT_DIR and its like, which hooks and rebases leave in a shell, change neither results nor other repositories."""
    expected = stored(objects)
    other = tmp_path / "other"
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
    fresh = Objects(tmp_path / "fresh.git")
    tree = stored(fresh)
    fresh.archive(tree, tmp_path / "out")

    assert tree == expected
    assert content(tmp_path / "out") == FILES
    assert not other.exists()


def test_configuration_of_the_user_does_not_change_bytes(objects: Objects, tmp_path: Path) -> None:
    """autocrlf, attributes, hooks and filters of the home folder have no effect on what is checked out."""
    hook = Path.home() / "hooks" / "post-checkout"
    hook.parent.mkdir()
    hook.write_text(f"#!/bin/sh\ntouch '{tmp_path}/ran'\n")
    hook.chmod(0o755)
    with (Path.home() / ".gitconfig").open("a") as stream:
        stream.write(f'[core]\n\thooksPath = {hook.parent}\n\teol = crlf\n[filter "x"]\n\tsmudge = tr a-z A-Z\n\trequired = true\n')
    attributes = Path.home() / ".config" / "git" / "attributes"
    attributes.parent.mkdir(parents=True)
    attributes.write_text("* text filter=x\n")
    tree = stored(objects, _gitattributes=b"* text eol=crlf filter=x\n")
    objects.checkout(tree, tmp_path / "out", tmp_path / "index")

    assert content(tmp_path / "out") == FILES | {".gitattributes": b"* text eol=crlf filter=x\n"}
    assert not (tmp_path / "ran").exists()


# Checkouts.


def test_a_checkout_touches_only_what_differs(objects: Objects, tmp_path: Path) -> None:
    """Going to another tree rewrites the files that differ; the times of the others stay, so that ninja compiles no more."""
    folder, index = tmp_path / "src", tmp_path / "index"
    objects.checkout(stored(objects), folder, index)
    for path in folder.rglob("*"):
        os.utime(path, (1, 1))
    objects.checkout(stored(objects, a_txt=b"two\n"), folder, index)

    assert content(folder) == FILES | {"a.txt": b"two\n"}
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.stat().st_mtime != 1} == {"a.txt"}


def test_a_checkout_that_was_killed_on_the_way_to_another_tree_leaves_nothing_of_it(objects: Objects, tmp_path: Path) -> None:
    """Files that only the abandoned tree has are removed, although no index knows them; a build's own files stay."""
    folder, index = tmp_path / "src", tmp_path / "index"
    objects.checkout(stored(objects), folder, index)
    abandoned = stored(objects, new_txt=b"new\n")
    Path(f"{index}.pending").write_text(abandoned)
    (folder / "new.txt").write_bytes(b"ne")
    (folder / "generated.cu").write_bytes(b"made by a build\n")
    objects.checkout(stored(objects, a_txt=b"two\n"), folder, index)

    assert content(folder) == FILES | {"a.txt": b"two\n", "generated.cu": b"made by a build\n"}


def test_a_killed_checkout_is_finished(objects: Objects, tmp_path: Path) -> None:
    """`kill -9` in the middle of a real checkout of many files leaves a folder that the next checkout makes whole."""
    many = {f"d{number % 40}/f{number}.c": b"%d\n" % number * 400 for number in range(3000)}
    tree = objects.store_files((name, git.REGULAR, data) for name, data in many.items())
    folder, index = tmp_path / "src", tmp_path / "index"
    folder.mkdir()
    env = {**os.environ, "GIT_INDEX_FILE": str(index), "GIT_WORK_TREE": str(folder), "GIT_DIR": str(objects.path)}
    with subprocess.Popen(["git", "read-tree", "--reset", "-u", tree], env=env) as child:
        while child.poll() is None and not (folder / "d20").exists():
            pass
        child.kill()
    objects.checkout(tree, folder, index)

    assert content(folder) == many


@pytest.mark.parametrize("damage", [b"", b"DIRC", b"\0" * 200])
def test_a_damaged_index_is_made_anew(objects: Objects, tmp_path: Path, damage: bytes) -> None:
    """The folder is right although git's memory of it, its index, was lost."""
    folder, index = tmp_path / "src", tmp_path / "index"
    objects.checkout(stored(objects), folder, index)
    index.write_bytes(damage)
    (folder / "a.txt").write_bytes(b"other")
    objects.checkout(stored(objects), folder, index)

    assert content(folder) == FILES


def test_a_lock_of_a_killed_git_does_not_stop_a_checkout(objects: Objects, tmp_path: Path) -> None:
    """The lock, a half-written file and a missing one are mended."""
    folder, index = tmp_path / "src", tmp_path / "index"
    objects.checkout(stored(objects), folder, index)
    Path(f"{index}.lock").write_bytes(b"half an index")
    (folder / "a.txt").write_bytes(b"tw")
    (folder / "src" / "b.c").unlink()
    objects.checkout(stored(objects, a_txt=b"two\n"), folder, index)

    assert content(folder) == FILES | {"a.txt": b"two\n"}


def test_a_damaged_store_is_not_the_repository_around_it(tmp_path: Path) -> None:
    """Where the cache directory lies in somebody's repository, a store that lost its HEAD is an error, and that repository stays."""
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    objects = Objects(tmp_path / "objects.git")
    tree = stored(objects)
    before = sorted((tmp_path / ".git").rglob("*"))
    (objects.path / "HEAD").write_bytes(b"garbage")
    for use in (lambda: objects.paths(tree), lambda: stored(objects)):
        with refusal("git-failed"):
            use()

    assert sorted((tmp_path / ".git").rglob("*")) == before


def test_a_missing_git_is_refused_by_its_name(objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with refusal("tool-missing", match="git is not installed"):
        objects.has("HEAD")


def test_a_missing_file_is_refused_by_its_path(objects: Objects) -> None:
    with refusal("git-failed", match="git does not have a/b"):
        list(objects.contents({"a/b": "1" * 40}))


# Other repositories.


# Other trees from trees.


def test_a_tree_is_whole_when_everything_below_it_is_there(objects: Objects, repository: Repository) -> None:
    """A tree whose file, or whose folder, was lost is not whole, although the tree itself is there."""
    commit = repository.commit({"a": b"1", "d/b": b"2"})
    repository.git("config", "uploadpack.allowFilter", "true")
    for number, lacking in enumerate(["blob:none", "tree:1"]):
        partial = repository.path.parent / f"lent{number}" / "partial.git"
        repository.git("clone", "--quiet", "--bare", f"--filter={lacking}", repository.url, str(partial))
        lender = Objects(repository.path.parent / f"lender{number}.git")
        lender.borrow(partial.parent)
        assert lender.has(f"{commit}^{{tree}}")
        assert not lender.whole(repository.tree())
    objects.run(["fetch", "-q", "--depth=1", "--no-write-fetch-head", repository.url, commit])

    assert objects.whole(repository.tree())
    assert not objects.whole("0" * 40)


@pytest.mark.parametrize(
    ("gone", "left"),
    [
        ([], {"a.txt", "src/b.c", "src/deep/c.h", "run.sh"}),
        (["src"], {"a.txt", "run.sh"}),
        (["src/deep", "a.txt"], {"src/b.c", "run.sh"}),
        (["sr", "a.tx", "src/b", "deep"], {"a.txt", "src/b.c", "src/deep/c.h", "run.sh"}),
        (["src/b.c", "src/deep/c.h"], {"a.txt", "run.sh"}),
        (["a.txt", "src", "run.sh"], set()),
    ],
)
def test_paths_are_left_out(objects: Objects, gone: list[str], left: set[str]) -> None:
    """Files and folders go by their whole names; what only begins like them stays, and so do modes."""
    tree = objects.without_paths(stored(objects), gone)

    assert objects.paths(tree) == {path: entry for path, entry in objects.paths(stored(objects)).items() if path in left}


def test_folders_take_the_place_of_submodules(objects: Objects, repository: Repository) -> None:
    """A tree gets other trees where it named commits of other repositories; the rest stays as it was."""
    commit = repository.commit({"a": b"1", "third/own.txt": b"own"})
    for path in ("third/party", "x"):
        repository.git("update-index", "--add", "--cacheinfo", f"160000,{commit},{path}")
    repository.git("commit", "--quiet", "-m", "submodules")
    objects.run(["fetch", "-q", "--depth=1", "--no-write-fetch-head", repository.url, repository.git("rev-parse", "HEAD")])
    inner = stored(objects)
    tree = objects.with_folders(repository.tree(), {"third/party": inner, "x": inner})

    assert objects.submodules(tree) == {}
    assert objects.resolve(f"{tree}:third/party") == objects.resolve(f"{tree}:x") == inner
    assert (objects.blob(tree, "a"), objects.blob(tree, "third/own.txt")) == (b"1", b"own")


def test_names_that_are_not_utf_8_survive(objects: Objects, repository: Repository) -> None:
    """A file of another age's encoding comes back under its own bytes."""
    name = b"gr\xfc\xdfe.txt"
    (repository.path / os.fsdecode(name)).write_bytes(b"1")
    commit = repository.commit({"b": b"2"})
    objects.run(["fetch", "-q", "--depth=1", "--no-write-fetch-head", repository.url, commit])
    tree = objects.without_paths(repository.tree(), ["b"])

    assert [os.fsencode(path) for path in objects.paths(tree)] == [name]
    assert objects.changes(tree, repository.tree()) == {"b": "A"}
    assert [*objects.changes(objects.without_paths(tree, objects.paths(tree)), tree).values()] == ["A"]


# Killed, damaged, surrounded.


def test_processes_make_one_store_at_once(tmp_path: Path) -> None:
    """Processes that begin together with a fresh cache directory all end up with the same store."""
    program = "import sys; from pathlib import Path; from sparkwright.core.git_store import Objects; Objects(Path(sys.argv[1]))"
    words = [sys.executable, "-c", program]
    children = [subprocess.Popen([*words, str(tmp_path / "objects.git")]) for _ in range(5)]

    assert [child.wait(60) for child in children] == [0] * 5
    assert stored(Objects(tmp_path / "objects.git"))
