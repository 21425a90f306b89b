"""Bisect by measurement: what changed the answer of a command, on real repositories, and nothing named where that is not certain."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.refusals import refusal

from sparkwright.builder import bisect
from sparkwright.builder.bisect import BisectAnswer
from sparkwright.cherry_picks import ledger
from sparkwright.cherry_picks.ledger import Ledger
from sparkwright.cli import main
from sparkwright.demo import upstreams

if TYPE_CHECKING:
    from tests.unit.conftest import Mini, Repository

# The searches.


@settings(max_examples=12)
@given(st.data())
def test_a_turn_is_found_around_what_gives_no_answer(data: st.DataObject) -> None:
    """Whatever gives no answer: the turn lies between the two places, and all that lie in the midst of them were asked in vain."""
    count = data.draw(st.integers(2, 100))
    turn = data.draw(st.integers(1, count - 1))
    mute = data.draw(st.sets(st.integers(1, max(count - 2, 1)), max_size=30)) - {0, count - 1}
    asked: list[int] = []

    def ask(place: int) -> BisectAnswer:
        asked.append(place)
        return "skip" if place in mute else "good" if place < turn else "bad"

    last, first = bisect.search(list(map(str, range(count))), ask)

    assert last < turn <= first
    assert set(range(last + 1, first)) <= mute
    assert len(asked) == len(set(asked)) <= 3 + math.ceil(math.log2(count)) + len(mute)


# On real repositories.


class Searched:
    """
    The mini CUTLASS with a history and a series, and commands that judge a state of it.

    Attributes:
        commits: Of upstream after the locked one; the one at `turn` makes ``include/size.h`` large.
    """

    turn = 5

    def __init__(self, mini: Mini, repository: Repository, folder: Path) -> None:
        self.mini, self.folder = mini, folder
        self.url = f"{upstreams.HOST}cutlass.git"
        self.work = repository
        self.work.git("fetch", "--quiet", str(mini.upstreams / "cutlass.git"), "+refs/heads/*:refs/remotes/up/*", "--tags")
        self.work.git("checkout", "--quiet", "-B", "main", "v4.7.1")
        self.commits: list[str] = []
        for number in range(10):
            size = 2000 if number >= self.turn else 10
            subject = "Grow (#17)" if number == self.turn else f"Go on {number}"
            self.commits.append(self.work.commit({"include/size.h": b"/" * size, "n.txt": str(number).encode()}, subject))
        self.work.git("push", "--quiet", "--force", str(mini.upstreams / "cutlass.git"), "main")
        (mini.root / "cherry_picks").mkdir()
        ledger.write(mini.root, "cutlass", Ledger(self.url, ()))

    def patch(self, name: str, files: Mapping[str, bytes | None]) -> None:
        """Put a patch made on the locked source to the end of the series."""
        self.work.git("checkout", "--quiet", "v4.7.1")
        data = self.work.change(files, f"Do {name}")
        self.work.git("checkout", "--quiet", "main")
        folder = self.mini.root / "forks" / "demo" / "cutlass"
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
        with (folder / "series").open("a") as listing:
            listing.write(f"{name}\n")

    def command(self, text: str) -> list[str]:
        """Return a command that runs the Python *text*, in which ``tree`` is the checked-out folder and ``exit`` ends it."""
        script = self.folder / "judge.py"
        head = "import os, pathlib, sys\ntree = pathlib.Path(os.environ['SPARKWRIGHT_TREE'])\nprint(os.environ['SPARKWRIGHT_NAME'])\n"
        script.write_text(head + text)
        return [sys.executable, str(script)]

    def words(self, *words: str, run: str) -> list[str]:
        return ["patch", "bisect", *self.mini.words, "--fork", "cutlass", *words, "--run", *self.command(run)]

    def found(self, capsys: pytest.CaptureFixture[str], *words: str, run: str) -> Any:
        """Return the document of a search that ends well."""
        capsys.readouterr()
        assert main.main(self.words("--json", *words, run=run)) == 0, capsys.readouterr().err
        return msgspec.json.decode(capsys.readouterr().out)


@pytest.fixture(name="made")
def _made(mini: Mini, repository: Repository, tmp_path: Path) -> Searched:
    """Return a fork with ten commits after the locked one."""
    return Searched(mini, repository, tmp_path)


#: Good as long as the file that upstream grows is small, or not there.
SIZE = "path = tree / 'include/size.h'\nsys.exit(path.exists() and path.stat().st_size > 1000)\n"


def test_the_upstream_commit_that_changed_a_size_is_found(made: Searched, capsys: pytest.CaptureFixture[str]) -> None:
    """By halves between two names; the commit, its pull request and every state that was asked about are told."""
    found = made.found(capsys, "--from", "v4.7.1", "--to", "main", run=SIZE)

    cause = found["cause"]
    assert cause["what"] == f"{made.commits[made.turn][:12]} 2026-11-01 Grow (#17)"
    assert (cause["last"], cause["first"]) == (made.commits[made.turn - 1][:12], made.commits[made.turn][:12])
    assert (cause["answers"], cause["page"]) == (["good", "bad"], "https://upstream.example/mini/cutlass/pull/17")
    assert {step["status"] for step in found["steps"]} == {0, 1}
    assert all(Path(step["log"]).read_text().splitlines()[1] == step["name"] for step in found["steps"])


def test_a_turn_among_mute_states_is_not_guessed(made: Searched) -> None:
    """Where the commits at the turn give no answer, both sides and the commits between them are named, and no cause."""
    mute = "n = tree / 'n.txt'\nn.exists() and n.read_text() in ('4', '5') and sys.exit(125)\n"

    with refusal("bisect-undecided", match=f"changes after {made.commits[3][:12]} and not later than {made.commits[6][:12]}") as caught:
        main.run(made.words("--from", "v4.7.1", run=mute + SIZE))
    assert caught.value.details == tuple(f"no answer: {made.commits[number][:12]}" for number in (4, 5))


def test_an_unstable_command_decides_nothing(made: Searched) -> None:
    """Its second answer about a side of the change differs from the first, which is said in place of a commit."""
    only = f"(tree / 'n.txt').exists() and (tree / 'n.txt').read_text() == '{made.turn - 1}'"
    run = f"count = pathlib.Path({str(made.folder / 'count')!r})\nseen = count.exists()\n"
    run += f"if {only}:\n    count.touch()\n    sys.exit(not seen)\n"

    with refusal("bisect-undecided", match="gives several answers") as caught:
        main.run(made.words("--from", "v4.7.1", run=run + SIZE))
    assert caught.value.details[0] == "exit statuses: 1, 0"


def test_a_search_that_was_cut_off_goes_on(made: Searched, capsys: pytest.CaptureFixture[str]) -> None:
    """A killed command ends the search; the next one asks nothing again that was answered."""
    asked = made.folder / "asked"
    count = f"open({str(asked)!r}, 'a').write('x')\n"
    stop = made.folder / "stop"
    run = f"{count}n = tree / 'n.txt'\nn.exists() and n.read_text() == '5' and os.path.exists({str(stop)!r}) and os.kill(os.getpid(), 9)\n"
    stop.touch()
    with refusal("predicate-failed", match="was ended about"):
        main.run(made.words("--from", "v4.7.1", run=run + SIZE))
    before = len(asked.read_text())
    stop.unlink()

    found = made.found(capsys, "--from", "v4.7.1", run=run + SIZE)
    total = len(asked.read_text())
    assert found["cause"]["what"] == f"{made.commits[made.turn][:12]} 2026-11-01 Grow (#17)"
    # The answers of the first search count; both sides of the change are asked again.
    assert total - before < len(found["steps"])
    made.found(capsys, "--from", "v4.7.1", run=run + SIZE)
    assert len(asked.read_text()) == total + 2


def test_the_patch_that_changed_an_answer_is_found(made: Searched, capsys: pytest.CaptureFixture[str]) -> None:
    """Of five patches, the third changes the answer, together with the first."""
    for name in "abcde":
        made.patch(f"{name}.patch", {f"{name}.txt": b"x\n"})
    both = "sys.exit((tree / 'a.txt').exists() and (tree / 'c.txt').exists())\n"
    cause = made.found(capsys, "--over", "patches", run=both)["cause"]

    assert (cause["last"], cause["first"]) == ("up to 2 of 5, b.patch", "up to 3 of 5, c.patch")
    assert cause["what"] == "c.patch"


def test_wheels_are_built_for_a_command_that_asks_for_them(made: Searched, capsys: pytest.CaptureFixture[str]) -> None:
    """With --build, the command finds the wheel of each state; here it grows at one commit."""
    run = "import zipfile\nwith zipfile.ZipFile(os.environ['SPARKWRIGHT_WHEEL']) as wheel:\n"
    run += "    sys.exit(any(info.file_size == 2000 for info in wheel.infolist()))\n"
    found = made.found(capsys, "--from", "v4.7.1", "--build", run=run)

    assert found["cause"]["what"].startswith(made.commits[made.turn][:12])
    assert all(step["wheel"].startswith("mini_cutlass-4.7.1+spark.demo.p0") for step in found["steps"])


@pytest.mark.parametrize(
    ("words", "kind", "says"),
    [
        (["a.patch", "--run", "true"], "usage", "a patch, or --run"),
        ([], "usage", "a patch, or --run"),
        (["--run", "true"], "not-provided", "needs a commit to start from"),
        (["--over", "patches", "--run", "true"], "not-provided", "has no patches"),
        (["--from", "v4.7.1", "--run", "true"], "bisect-undecided", "not good at one end"),
    ],
)
def test_searches_that_cannot_be_are_refused(made: Searched, words: list[str], kind: str, says: str) -> None:
    """Each with a sentence about what is wrong."""
    with refusal(kind, match=says):
        main.run(["patch", "bisect", *made.mini.words, "--fork", "cutlass", *words])
