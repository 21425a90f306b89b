"""Emptying what somebody hostile wrote, and ending what does not want to end."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.runnerhub import marked

from sparkwright.operate.runner import condition, emptied, processes

#: A tree of files, links and folders; a name may be anything that a file system takes.
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..") and len(name.encode()) < 200
)
TREES = st.recursive(
    st.sampled_from(["file", "link", "broken", "fifo"]), lambda inner: st.dictionaries(NAMES, inner, max_size=4), max_leaves=12
)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Return a folder that nothing may touch."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "kept").write_text("kept")
    return folder


def grow(folder: Path, tree: object, outside: Path, modes: Iterator[int]) -> None:
    """Make *tree* in *folder*."""
    assert isinstance(tree, dict)
    for name, what in tree.items():
        path = folder / name
        if isinstance(what, dict):
            path.mkdir()
            grow(path, what, outside, modes)
            path.chmod(next(modes))
        elif what == "file":
            path.write_text(name)
            path.chmod(next(modes))
        elif what == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to(outside if what == "link" else "/nowhere/at/all")


@settings(max_examples=40)
@given(tree=st.dictionaries(NAMES, TREES, max_size=4), seed=st.randoms(use_true_random=False))
def test_whatever_lies_in_a_folder_goes_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, object], seed: random.Random
) -> None:
    """Any tree of files, folders without rights, pipes and links goes; the folder and what links point to stay."""
    base = tmp_path_factory.mktemp("tree")
    folder, outside = base / "work", base / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "kept").write_text("kept")
    grow(folder, tree, outside, iter(lambda: seed.choice((0, 0o111, 0o444, 0o700, 0o4755, 0o2777)), -1))

    found = emptied.empty(folder)

    assert list(folder.iterdir()) == []
    assert found.stubborn == ()
    assert (outside / "kept").read_text() == "kept"
    shutil.rmtree(base)


@pytest.mark.parametrize("mode", [0, 0o111, 0o222, 0o444, 0o555], ids=oct)
def test_a_folder_goes_whatever_its_owner_may_do_in_it(tmp_path: Path, outside: Path, mode: int) -> None:
    """An owner who is not root and took rights away from a folder gets rid of it and of what is in it."""
    work = tmp_path / "work"
    (work / "folder" / "inner").mkdir(parents=True)
    (work / "folder" / "link").symlink_to(outside)
    (work / "folder" / "inner" / "file").write_text("x")
    (work / "folder" / "inner").chmod(mode)
    (work / "folder").chmod(mode)

    assert emptied.empty(work).stubborn == ()
    assert list(work.iterdir()) == []


def test_depth_and_number_do_not_matter(tmp_path: Path) -> None:
    """Folders nested deeper than a path may be long, and than files may be open, are emptied like any others."""
    work = tmp_path / "work"
    work.mkdir()
    at = os.open(work, os.O_DIRECTORY)
    for _ in range(1200):
        os.mkdir("d" * 60, dir_fd=at)
        inner = os.open("d" * 60, os.O_DIRECTORY, dir_fd=at)
        os.close(at)
        at = inner
    os.close(at)

    found = emptied.empty(work)

    assert found.entries == 1200
    assert list(work.iterdir()) == []


def test_a_folder_that_is_a_link_is_not_entered(tmp_path: Path, outside: Path) -> None:
    """A link in the place of the folder itself is refused."""
    (tmp_path / "work").symlink_to(outside)

    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        emptied.empty(tmp_path / "work")
    assert (outside / "kept").exists()
    assert emptied.empty(tmp_path / "nowhere") == emptied.Emptied()


def test_only_what_belongs_to_the_user_goes(tmp_path: Path) -> None:
    """In a folder of many users, entries of others stay."""
    shared = tmp_path / "shared"
    (shared / "mine").mkdir(parents=True)
    (shared / "mine" / "x").write_text("x")

    assert emptied.empty(shared, owner=os.getuid() + 1).entries == 0
    assert emptied.empty(shared, owner=os.getuid()).entries == 2


def test_bytes_are_counted_once(tmp_path: Path) -> None:
    """A second name of a file gives nothing back while the first is left."""
    (tmp_path / "work").mkdir()
    (tmp_path / "kept").write_bytes(bytes(1 << 20))
    os.link(tmp_path / "kept", tmp_path / "work" / "second")
    (tmp_path / "work" / "own").write_bytes(b"x" * (1 << 16))

    found = emptied.empty(tmp_path / "work")

    assert found.entries == 2
    assert found.bytes < 1 << 20
    assert (tmp_path / "kept").exists()


def test_processes_that_multiply_and_ignore_are_ended() -> None:
    """A program that ignores every signal it can and starts itself anew again and again is gone."""
    mark = f"runner-test-{os.getpid()}"
    script = """
import os, signal, time
for number in (1, 2, 15):
    signal.signal(number, signal.SIG_IGN)
# A test that is cut off must not leave it behind for good.
end = time.monotonic() + 90
while time.monotonic() < end:
    time.sleep(0.3)
    if os.fork():
        os._exit(0)
    os.setsid()
"""
    child = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "SPARKWRIGHT_UNIT": mark})
    child.wait(30)
    try:
        deadline = time.monotonic() + 30
        while not marked(mark):
            assert time.monotonic() < deadline

        ended, left = processes.end(lambda: marked(mark), 30)
    finally:
        processes.end(lambda: marked(mark), 30)

    assert left == []
    assert ended > 0
    assert marked(mark) == []


def test_processes_of_a_user_are_found() -> None:
    """This process is among those of its user, with its name; an unused number has none."""
    assert os.getpid() in processes.of_user(os.getuid())
    assert processes.of_user(4_000_000_001) == []
    assert str(os.getpid()) in processes.shown([os.getpid()])[0]


def test_who_ends_when_asked_is_not_killed(tmp_path: Path) -> None:
    """A program that takes SIGTERM has the time to do what it does at its end."""
    mark, mine = f"runner-ask-{os.getpid()}", tmp_path / "ended"
    script = f"trap 'touch {mine}; exit' TERM; echo; while :; do sleep 0.05; done"
    with subprocess.Popen(["sh", "-c", script], env={**os.environ, "SPARKWRIGHT_UNIT": mark}, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        processes.ask_to_end(lambda: [child.pid] if child.poll() is None else [], 30)
        assert child.poll() is not None
        child.send_signal(signal.SIGKILL)

    assert mine.exists()


def test_models_are_known_by_what_could_change(tmp_path: Path) -> None:
    """Another size, time, mode, name or file is another print; reading is not."""
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "weights"
    file.write_text("0123")
    before = condition.print_of(tmp_path)
    file.read_text()
    assert condition.print_of(tmp_path) == before

    link = tmp_path / "b"
    for change in (lambda: os.utime(file, (1, 1)), lambda: file.chmod(0o600), lambda: link.symlink_to("a"), lambda: file.write_text("4")):
        change()
        after = condition.print_of(tmp_path)
        assert after != before
        before = after
