"""
Publishing, killed by SIGKILL before each of its steps and file operations in turn, while somebody reads the index over HTTP all the time.

    python tests/release/kills.py          # prints a Markdown table: killed before | kills | what a client sees | what the next run does

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
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT)]

from tests.release.attacks import table  # noqa: E402
from tests.release.refusals import surroundings  # noqa: E402
from tests.support import (  # noqa: E402
    indexserver,
    publishing,
    wheels,
)
from tests.support.publishing import Client, Place  # noqa: E402

from sparkwright.release import index  # noqa: E402
from sparkwright.release.publish import changes, ground  # noqa: E402

#: Waits for lines ``<k> <words of Asked>`` and publishes in a copy of itself that ends itself before its k-th step or file operation; says
#: which that was, or that there were fewer. A copy, since importing everything takes longer than publishing.
CHILD = """
import json, os, signal, sys
from pathlib import Path
from tests.support.publishing import Place
from sparkwright.release import index, notes
from sparkwright.release.evidence import make
from sparkwright.builder.wheel import source_wheel as program

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
    place.publish([Path(one) for one in wheels], "candidate", count, url=url)
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


#: Whether clients see the new index after the kill, and whether the next run is the same publication → what that run does.
DOES = {
    (False, True): "completes it",
    (False, False): "another one: removes what is left, signs again",
    (True, True): "finds it done",
    (True, False): "another one: signs again",
}


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


class Killed(NamedTuple):
    """
    One kill.

    Attributes:
        before: The step or file operation that was not made any more.
        old: Serial of the manifest before. *seen*: of what clients saw then.
        looks: How often the index was read whole, from the start of the publication to the end of the next run.
        then: Serial after the next run. *completed*: whether that was the same publication, or another command.
    """

    before: str
    old: int
    seen: int
    looks: int
    then: int
    completed: bool


@contextlib.contextmanager
def served(folder: Path, releases: int) -> Iterator[Place]:
    """Yield an index with that many releases (0 or 1), of which ``base`` is a copy; it is served where its manifest says."""
    with (
        publishing.bare_index(folder / "bare") as packages,
        indexserver.serve(folder / "place" / "index") as host,
        surroundings({"SPARKWRIGHT_INDEX_URL": packages}),
    ):
        place = Place(folder / "place", host.url)
        place.root.mkdir()
        if releases:
            place.publish([wheels.vllm(folder / "first")], "candidate", url=host.url)
        shutil.copytree(place.root, folder / "base", symlinks=True)
        yield place


def kills(folder: Path, *, first: int = 1, stride: int = 1, completing: tuple[bool, ...] = (True,), releases: int = 1) -> Iterator[Killed]:
    """
    Kill a publication before its *first* step, *stride* steps later, and so on, each time from the same beginning.

    Args:
        completing: Whether the next run is the same publication (otherwise, another command), in turns.
        releases: How many the index has: 1, or 0 for the very first publication, which nothing but itself can follow.

    Raises:
        AssertionError: A client saw something that was not whole, or the next run did not end it.
    """
    made = [wheels.vllm(folder / "second", label=f"{wheels.LABEL}.1")]
    turns = itertools.cycle(completing)
    # The killer takes over the package index that is served.
    with served(folder, releases) as place, contextlib.closing(Killer(folder / "place")) as killer:
        for step in itertools.count(first, stride):
            shutil.rmtree(place.root)
            shutil.copytree(folder / "base", place.root, symlinks=True)
            with Reader(client := Client(place.url, place.trust)) as reader:
                name = killer.kill(step, made, place.url)
                assert not name.startswith("failed"), name
                if name == "done":
                    return
                seen, completes = client.look(), next(turns)
                if completes:
                    assert place.publish(made, "candidate", url=place.url).release == f"2026.11.{releases + 1}"
                else:
                    changes.refresh(place.publisher())
            assert reader.looks
            _check_whole(place, client)
            yield Killed(name, releases, seen, reader.looks, client.serials[-1], completes)


def _check_whole(place: Place, client: Client) -> None:
    assert client.look() == place.manifest().serial
    assert {entry.name for entry in place.manifest().entries} >= {"2026.11.1"}
    assert index.check(place.root, place.trust, deep=True) == []
    assert [path.name for path in (place.root / ground.WORK).iterdir()] == ["lock"]


def rows(found: list[Killed]) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield a row for kills before the same kind of step that ended alike."""
    kinds: dict[tuple[str, int, int, int, bool], list[Killed]] = {}
    for one in found:
        kinds.setdefault((one.before.partition(" ")[0], one.old, one.seen, one.then, one.completed), []).append(one)
    for (name, old, seen, then, completed), some in kinds.items():
        new = seen > old
        sees = "the new index, whole" if new else "the old index, whole" if old else "no index yet"
        yield name, str(len(some)), sees, f"{DOES[new, completed]}: serial {then}", str(sum(one.looks for one in some))


def main() -> None:
    """Kill before every step, with either kind of next run, and print the table."""
    found: list[Killed] = []
    for releases, completes in ((0, True), (1, True), (1, False)):
        with tempfile.TemporaryDirectory(prefix="kills-") as folder:
            found += kills(Path(folder), completing=(completes,), releases=releases)
    head = ("killed before", "kills", "a client then sees", "the next run", "whole reads meanwhile")
    sys.stdout.write(f"{table(rows(found), head)}\n\n{len(found)} kills, {sum(one.looks for one in found)} whole reads\n")


if __name__ == "__main__":
    main()
