"""
Publishing, killed by SIGKILL before each of its steps and file operations in turn, while somebody reads the index over HTTP all the time.

Whatever the reader sees is whole: every manifest verifies, and every file that it or a page of pip's leads to is there with the right
hash. The same command, run again, completes the release; any other removes what nothing refers to.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import indexserver, publishing, wheels
from tests.publishing import Client, Place

from sparkwright.release import index
from sparkwright.release.publish import changes, ground

#: Waits for lines ``<k> <words of Asked>`` and publishes in a copy of itself that ends itself before its k-th step or file operation; says
#: which that was, or that there were fewer. A copy, since importing everything takes longer than publishing.
CHILD = """
import json, os, signal, sys
from pathlib import Path
from tests.publishing import Place
from sparkwright.release import index, notes
from sparkwright.release.evidence import make
from sparkwright.build import program

root = Path(sys.argv[1])

def run(left, wheels, url, told):
    place = Place(root, url)
    def count(step):
        nonlocal left
        left -= 1
        if left == 0:
            os.write(told, step.encode())
            os.kill(os.getpid(), signal.SIGKILL)
    def counted(name, real):
        def call(*words, **options):
            if any(str(word).startswith(str(place.root)) for word in words if isinstance(word, (str, os.PathLike))):
                count(name)
            return real(*words, **options)
        return call
    for name in ("link", "mkdir", "rename", "replace", "rmdir", "symlink", "unlink"):
        setattr(os, name, counted(name, getattr(os, name)))
    place.publish([Path(one) for one in wheels], "candidate", count)
    os.write(told, b"done")

for line in sys.stdin:
    left, wheels, url = json.loads(line)
    hears, told = os.pipe()
    if (child := os.fork()) == 0:
        try:
            run(left, wheels, url, told)
        except BaseException as error:
            os.write(told, f"failed: {error!r}".encode())
        os._exit(0)
    os.close(told)
    os.waitpid(child, 0)
    print(os.read(hears, 1000).decode(), flush=True)
    os.close(hears)
"""


class Killer:
    """A process that publishes until it is killed, again and again."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(wheels.ROOT), *sys.path])}
        self._child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def kill(self, step: int, made: list[Path], url: str) -> str:
        """Publish *made* until the *step*-th step, and return its name; ``done`` where there are fewer."""
        assert self._child.stdin
        assert self._child.stdout
        self._child.stdin.write(json.dumps([step, list(map(str, made)), url]) + "\n")
        self._child.stdin.flush()
        return self._child.stdout.readline().strip()

    def close(self) -> None:
        self._child.communicate()


class Reader:
    """A thread that looks at an index until the block ends; what it finds wrong is raised there."""

    def __init__(self, client: Client) -> None:
        self._client, self._over = client, threading.Event()
        self._failed: BaseException | None = None
        self.looks = 0
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        try:
            while not self._over.wait(0.1):
                self._client.look()
                self.looks += 1
        except BaseException as error:
            self._failed = error

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._failed:
            raise self._failed


@pytest.fixture(name="base")
def _base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Return an index with one release, to be copied; it is served where its manifest says."""
    with publishing.bare_index(tmp_path / "bare") as packages, indexserver.serve(tmp_path / "place" / "index") as served:
        monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", packages)
        place = Place(tmp_path / "place", served.url)
        place.publish([wheels.vllm(tmp_path / "first")], "candidate", url=served.url)
        shutil.copytree(place.root, tmp_path / "base", symlinks=True)
        yield place


@contextlib.contextmanager
def fresh(place: Place) -> Iterator[Place]:
    """Yield *place* with the index as it was at first."""
    shutil.rmtree(place.root)
    shutil.copytree(place.root.parents[1] / "base", place.root, symlinks=True)
    yield place


@pytest.mark.parametrize(
    ("stride", "completing"),
    [
        pytest.param(13, (True, False), id="some"),
        pytest.param(1, (True,), id="all-completed", marks=pytest.mark.long),
        pytest.param(1, (False,), id="all-removed", marks=pytest.mark.long),
    ],
)
def test_a_kill_before_any_step_leaves_the_index_whole(base: Place, tmp_path: Path, stride: int, completing: tuple[bool, ...]) -> None:
    """Killed before each step and file operation, clients see the old release or both; the next run completes, or another removes."""
    made = [wheels.vllm(tmp_path / "second", label=f"{wheels.LABEL}.1")]
    killer, killed = Killer(tmp_path / "place"), []
    try:
        for step in itertools.count(1 + stride // 2, stride):
            with fresh(base), Reader(client := Client(base.url, base.trust)) as reader:
                name = killer.kill(step, made, base.url)
                assert not name.startswith("failed"), name
                if name == "done":
                    break
                killed.append(name)
                client.look()
                if completing[len(killed) % len(completing)]:
                    done = base.publish(made, "candidate")
                    assert done.release == "2026.11.2"
                else:
                    changes.refresh(base.publisher())
            assert reader.looks
            assert client.look() == base.manifest().serial
            assert {entry.name for entry in base.manifest().entries} >= {"2026.11.1"}
            assert index.check(base.root, base.trust, deep=True) == []
            assert [path.name for path in (base.root / ground.WORK).iterdir()] == ["lock"]
    finally:
        killer.close()

    assert len(killed) >= 60 // stride
    sys.stderr.write(f"{len(killed)} kills: {', '.join(dict.fromkeys(name.split(' ')[0] for name in killed))}\n")
