"""Installing and going back, killed before file operations in turn: `current` leads to a whole release, and the next run finishes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from tests.client.world import ONE, TWO, User

from sparkwright.client.environment import Prefix

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


def run_killed(child: Any, step: int, folder: str, words: list[str]) -> str:
    """Run *words* until their *step*-th operation below *folder*; return its name, or how the run ended before it."""
    print(json.dumps([step, folder, words]), file=child.stdin, flush=True)
    return str(child.stdout.readline().strip())


@pytest.mark.parametrize(
    ("command", "before", "after", "first", "stride"),
    [
        # Each takes seconds, so that these two share the operations, which are the same.
        ("install", ONE, TWO, 1, 4),
        (f"install --renew --version {ONE}", ONE, ONE, 3, 4),
        ("rollback", TWO, ONE, 1, 1),
        (f"uninstall {TWO}", TWO, "", 1, 1),
    ],
)
def test_kill_anywhere_leaves_a_whole_release_and_the_next_run_finishes(
    both: User, command: str, before: str, after: str, first: int, stride: int
) -> None:
    """Of an environment that is made anew, the old one may stand aside meanwhile."""
    user, words, ended, step = both, command.split(), "", first
    line = [sys.executable, "-c", CHILD]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, env=user.environment, **pipes) as child:
        while not ended.startswith("ended"):
            if before == ONE:
                user.run("uninstall", TWO)
            assert user.run("install", "--version", before).code == 0
            history = [ONE] if before == ONE else [ONE, TWO]
            (user.prefix / "history.json").write_text(json.dumps(history))
            ended = run_killed(child, step, str(user.folder), words)
            condition = user.run("doctor").document
            releases = condition.get("error", condition)["releases"]
            whole = {name for name, entry in releases.items() if not entry["faults"]}
            aside = "--renew" in words and any(user.prefix.glob("releases/.unfinished-*/.old"))
            assert user.current in (whole if after else {*whole, ""}) or aside, (ended, releases)
            if step % 3 == 0 and words[0] == "install":
                assert user.run("rollback").reference in ("", "nothing-installed")
            again = user.run(*words)
            assert again.code == 0 or again.reference == "nothing-installed", again.said
            assert user.current == after
            assert user.run("doctor", "--deep").code == 0
            assert Prefix(user.prefix).history[-1] == (after or TWO)
            assert {path.name for path in user.prefix.glob("releases/*")} - {TWO} == {ONE}
            step += stride
    assert (ended, step > (30 if stride > 1 else 5)) == ("ended 0", True), step
