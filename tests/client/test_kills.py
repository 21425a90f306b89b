"""Installing and going back, killed before each file operation in turn: `current` leads to a whole release, and the next run finishes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.client.world import User, World, wheel
from tests.support import refused

from sparkwright.client.environment import Prefix

ONE, TWO = "2026.11.1", "2026.11.2"

#: Runs command lines in copies of itself, each of which kills itself before its k-th change of a file below the user's folder.
CHILD = """
import json, os, signal, subprocess, sys
from sparkwright.client import environment, index, install, main

def count(left, told, folder):
    def counted(name, real):
        def call(*words, **options):
            nonlocal left
            writes = name != "open" or words[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and any(folder in str(word) for word in words if isinstance(word, (str, os.PathLike))):
                left -= 1
                if left == 0:
                    os.write(told, name.encode())
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*words, **options)
        return call
    for name in ("link", "mkdir", "rename", "replace", "rmdir", "symlink", "unlink", "open"):
        setattr(os, name, counted(name, getattr(os, name)))
    popen = subprocess.Popen
    class Counted(popen):
        def __init__(self, words, *rest, **options):
            counted("mkdir", lambda *_: None)(" ".join(map(str, words)))
            super().__init__(words, *rest, **options)
    subprocess.Popen = Counted

for line in sys.stdin:
    step, folder, words = json.loads(line)
    hears, told = os.pipe()
    if (child := os.fork()) == 0:
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        count(step, told, folder)
        os.write(told, b"ended %d" % main.main(words))
        os._exit(0)
    os.close(told)
    os.waitpid(child, 0)
    print(os.read(hears, 1000).decode(), flush=True)
    os.close(hears)
"""


class Killer:
    """A process that runs command lines of *user* until it is killed, again and again."""

    def __init__(self, user: User) -> None:
        environment = {**user.environment, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._folder = str(user.folder)
        self._child = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def run(self, step: int, words: Sequence[str]) -> str:
        """Run *words* until the *step*-th operation, and return its name, or how the run ended before it."""
        assert self._child.stdin
        assert self._child.stdout
        self._child.stdin.write(json.dumps([step, self._folder, words]) + "\n")
        self._child.stdin.flush()
        return self._child.stdout.readline().strip()

    def close(self) -> None:
        self._child.communicate()


@pytest.fixture
def user(world: World) -> User:
    """A user who has the first of two releases; uv's cache has both."""
    shared = wheel("other", "2.0")
    world.publish(ONE, [wheel("demo", "1.0")], [shared])
    user = world.user()
    assert user.install().code == 0
    world.publish(TWO, [wheel("demo", "1.1")], [shared])
    assert user.run("install").code == 0
    assert user.run("rollback").code == 0
    assert user.run("uninstall", TWO).code == 0
    return user


@pytest.mark.parametrize("words", [["install"], ["install", "--renew", "--version", ONE]])
def test_installing_killed_anywhere_leaves_the_old_release_or_the_new(
    user: User, words: list[str], record_property: Callable[[str, object], None]
) -> None:
    """Whoever looks finds a whole release at `current`; the same command, run again, finishes."""
    killer, steps = Killer(user), list[str]()
    target = ONE if "--renew" in words else TWO
    try:
        for step in range(1, 1000):
            user.run("uninstall", TWO)
            steps.append(killer.run(step, words))
            if steps[-1].startswith("ended"):
                break
            condition = user.run("doctor", "--deep").document
            releases = condition.get("error", condition)["releases"]
            current = {
                name for name, entry in releases.items() if entry["current"] and not entry["faults"]
            }
            aside = (user.prefix / "releases" / f".{ONE}.old").exists()
            assert current & {ONE, TWO} or (aside and "--renew" in words), (steps[-1], releases)
            if step % 4 == 0:
                assert user.run("rollback").reference in ("", "nothing-installed")
            again = user.run(*words)
            assert again.code == 0, again.said
            assert user.current == target == Prefix(user.prefix).history[-1]
            assert user.run("doctor", "--deep").code == 0
            user.run("install", "--version", ONE)
    finally:
        killer.close()

    record_property(refused.KILLS, len(steps) - 1)
    assert steps[-1] == "ended 0"
    assert len(steps) > 30
    assert not [
        path for path in (user.prefix / "releases").iterdir() if path.name not in (ONE, TWO)
    ]


def test_going_back_and_removing_killed_anywhere(
    user: User, record_property: Callable[[str, object], None]
) -> None:
    """A switch is one rename; a folder that shrinks is not taken for a release."""
    killer, kills = Killer(user), 0
    try:
        for words in (["rollback"], ["uninstall", TWO]):
            for step in range(1, 1000):
                assert user.run("install").code == 0
                (user.prefix / "history.json").write_text(json.dumps([ONE, TWO]))
                ended = killer.run(step, words)
                assert user.current in (ONE, TWO) or (words[0] == "uninstall" and not user.current)
                left = [path.name for path in _whole(user.prefix)]
                assert ONE in left
                assert user.current in ("", *left)
                if words == ["rollback"]:
                    assert user.run("rollback").reference in ("", "nothing-installed")
                    assert user.current == ONE == Prefix(user.prefix).history[-1]
                user.run("install", "--version", ONE)
                assert user.run("install").code == 0
                assert user.run("doctor").code == 0
                if ended.startswith("ended"):
                    break
                kills += 1
            assert ended == "ended 0"
    finally:
        killer.close()
    record_property(refused.KILLS, kills)


def _whole(prefix: Path) -> list[Path]:
    return [
        path for path in (prefix / "releases").iterdir() if (path / "sparkwright.json").exists()
    ]
