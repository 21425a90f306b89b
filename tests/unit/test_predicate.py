"""Bisect by measurement: what changed the answer of a command, on real repositories, and nothing named where that is not certain."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refusal

from sparkwright.builder import bisect_search
from sparkwright.builder.bisect_search import Answer
from sparkwright.cherry_picks import ledger
from sparkwright.cherry_picks.ledger import Ledger
from sparkwright.cli import main
from sparkwright.demo import upstreams

if TYPE_CHECKING:
    from tests.unit.conftest import Mini, Repository

# The searches.


@given(st.data())
def test_a_turn_is_found_around_what_gives_no_answer(data: st.DataObject) -> None:
    """Whatever gives no answer: the turn lies between the two places, and all that lie in the midst of them were asked in vain."""
    count = data.draw(st.integers(2, 300))
    turn = data.draw(st.integers(1, count - 1))
    mute = data.draw(st.sets(st.integers(1, max(count - 2, 1)), max_size=30)) - {0, count - 1}
    asked: list[int] = []

    def ask(place: int) -> Answer:
        asked.append(place)
        return "skip" if place in mute else "good" if place < turn else "bad"

    found = bisect_search.turn(count, ask)

    assert found.last < turn <= found.first
    assert found.between == tuple(range(found.last + 1, found.first))
    assert set(found.between) <= mute
    assert len(asked) == len(set(asked)) <= 2 + math.ceil(math.log2(count)) * (1 + len(mute))


@given(st.integers(2, 5000), st.data())
def test_without_silence_a_turn_takes_as_few_questions_as_halving(count: int, data: st.DataObject) -> None:
    """2 + log2 of the number of places, rounded up, at most."""
    turn = data.draw(st.integers(1, count - 1))
    asked: list[int] = []

    def ask(place: int) -> Answer:
        asked.append(place)
        return "bad" if place < turn else "good"

    assert bisect_search.turn(count, ask) == bisect_search.Turn(turn - 1, turn)
    assert len(asked) <= 2 + math.ceil(math.log2(count))


@given(st.integers(1, 40), st.data())
def test_the_set_that_suffices_is_found(count: int, data: st.DataObject) -> None:
    """Where some items together decide, those are found, in their order, and never asked twice about the same set."""
    needed = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    asked: list[tuple[int, ...]] = []

    def ask(chosen: tuple[int, ...]) -> Answer:
        asked.append(chosen)
        return "bad" if needed <= set(chosen) else "good"

    assert bisect_search.minimal(range(count), ask, "bad") == tuple(sorted(needed))
    assert len(asked) == len(set(asked))


@given(st.integers(1, 8), st.data())
def test_of_what_is_found_no_single_item_can_go(count: int, data: st.DataObject) -> None:
    """Whatever the answers are, silence among them, the result suffices, and loses that with any one of its items."""
    answers: dict[tuple[int, ...], Answer] = {tuple(range(count)): "bad", (): "good"}

    def ask(chosen: tuple[int, ...]) -> Answer:
        return answers.setdefault(chosen, data.draw(st.sampled_from(["good", "bad", "skip"])))

    found = bisect_search.minimal(range(count), ask, "bad")

    assert answers[found] == "bad"
    assert all(ask(tuple(one for one in found if one != gone)) != "bad" for gone in found if len(found) > 1)


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
        return ["bisect", *self.mini.words, "--fork", "cutlass", *words, "--run", *self.command(run)]

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
    assert cause["what"] == [f"{made.commits[made.turn][:12]} 2026-11-01 Grow (#17)"]
    assert (cause["last"], cause["first"]) == (made.commits[made.turn - 1][:12], made.commits[made.turn][:12])
    assert (cause["answers"], cause["page"]) == (["good", "bad"], "https://upstream.example/mini/cutlass/pull/17")
    assert {tuple(step["status"]) for step in found["steps"]} <= {(0,), (1,), (0, 0), (1, 1)}
    assert all(Path(step["log"]).read_text().splitlines()[1] == step["name"] for step in found["steps"])


def test_patches_come_along_where_upstream_is_older_or_newer(made: Searched, capsys: pytest.CaptureFixture[str]) -> None:
    """Each commit is judged with our patches on top, unless --alone is said; where a patch conflicts there is no answer."""
    made.patch("a.patch", {"ours.txt": b"ours\n"})
    sees = "both = (tree / 'ours.txt').exists()\nsys.exit(125 if not both else 0 if (tree / 'n.txt').exists() else 1)\n"
    assert made.found(capsys, "--from", "v4.7.1", run=sees)["cause"]["what"][0].startswith(made.commits[0][:12])

    with refusal("bisect-undecided", match="not good at one end"):
        main.run(made.words("--from", "v4.7.1", "--alone", run=sees))


def test_states_that_give_no_answer_are_gone_around(made: Searched, capsys: pytest.CaptureFixture[str]) -> None:
    """125 is no answer: the search asks elsewhere, and names the turn as long as none of its neighbours is mute."""
    mute = "n = tree / 'n.txt'\nn.exists() and n.read_text() in ('3', '7') and sys.exit(125)\n"
    found = made.found(capsys, "--from", "v4.7.1", run=mute + SIZE)

    assert found["cause"]["what"] == [f"{made.commits[made.turn][:12]} 2026-11-01 Grow (#17)"]


def test_a_turn_among_mute_states_is_not_guessed(made: Searched) -> None:
    """Where the commits at the turn give no answer, both sides and the commits between them are named, and no cause."""
    mute = "n = tree / 'n.txt'\nn.exists() and n.read_text() in ('4', '5') and sys.exit(125)\n"

    with refusal("bisect-undecided", match=f"changes after {made.commits[3][:12]} and not later than {made.commits[6][:12]}") as caught:
        main.run(made.words("--from", "v4.7.1", run=mute + SIZE))
    assert caught.value.details == tuple(f"no answer: {made.commits[number][:12]}" for number in (4, 5))


@pytest.mark.parametrize("wavers", ["at the ends", "at the turn"])
def test_a_command_that_wavers_decides_nothing(made: Searched, wavers: str) -> None:
    """Its second word about the same state differs from the first, which is said in place of a commit."""
    only = "True" if wavers == "at the ends" else "(tree / 'n.txt').exists() and (tree / 'n.txt').read_text() == '5'"
    run = f"count = pathlib.Path({str(made.folder / 'count')!r})\nseen = count.exists()\n"
    run += f"if {only}:\n    count.touch()\n    sys.exit(not seen)\n"

    with refusal("bisect-undecided", match="does not answer the same") as caught:
        main.run(made.words("--from", "v4.7.1", run=run + SIZE))
    assert caught.value.details[0] == "exit statuses: 1, 0"


def test_each_state_may_be_asked_more_often(made: Searched, capsys: pytest.CaptureFixture[str]) -> None:
    """With --repeat, every state is asked that often."""
    found = made.found(capsys, "--from", "v4.7.1", "--repeat", "3", run=SIZE)

    assert {len(step["status"]) for step in found["steps"]} == {3}


def test_a_search_that_was_cut_off_goes_on(made: Searched, capsys: pytest.CaptureFixture[str]) -> None:
    """A killed command ends the search; the next one asks nothing again that was answered; --fresh asks everything."""
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
    runs = sum(len(step["status"]) - step["known"] for step in found["steps"])
    assert found["cause"]["what"] == [f"{made.commits[made.turn][:12]} 2026-11-01 Grow (#17)"]
    assert total - before == runs
    assert made.found(capsys, "--from", "v4.7.1", run=run + SIZE)["cause"] == found["cause"]
    assert len(asked.read_text()) == total, "everything is known"
    made.found(capsys, "--from", "v4.7.1", "--fresh", run=run + SIZE)
    assert len(asked.read_text()) > total + runs // 2


def test_no_state_sees_what_the_command_left_in_another(made: Searched, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder holds the tree and nothing else, whatever the command wrote, changed or removed there."""
    files = "sorted(path.relative_to(tree).as_posix() for path in tree.rglob('*') if path.is_file() and path.name != '.git')"
    run = f"left = {files}\nassert 'left.txt' not in left and (tree / 'include/cutlass/version.h').read_text()\n"
    run += "(tree / 'left.txt').write_text('x')\n(tree / 'include/cutlass/version.h').write_text('')\n"

    assert made.found(capsys, "--from", "v4.7.1", run=run + SIZE)["cause"]["what"][0].startswith(made.commits[made.turn][:12])


def test_the_patch_that_changed_an_answer_is_found(made: Searched, capsys: pytest.CaptureFixture[str]) -> None:
    """Of five patches, the third changes the answer, and only together with the first; the second has no part in it."""
    for name in "abcde":
        made.patch(f"{name}.patch", {f"{name}.txt": b"x\n"})
    both = "sys.exit((tree / 'a.txt').exists() and (tree / 'c.txt').exists())\n"
    cause = made.found(capsys, "--over", "patches", run=both)["cause"]

    assert (cause["last"], cause["first"]) == ("up to 2 of 5, b.patch", "up to 3 of 5, c.patch")
    assert cause["what"] == ["a.patch", "c.patch"]


def test_patches_that_cannot_stand_alone_give_no_answer_alone(made: Searched, capsys: pytest.CaptureFixture[str]) -> None:
    """A patch on top of another conflicts without it, so that both are named together."""
    made.patch("a.patch", {"a.txt": b"one\n"})
    made.work.git("checkout", "--quiet", "v4.7.1")
    made.work.commit({"a.txt": b"one\n"})
    data = made.work.change({"a.txt": b"two\n"}, "Go on")
    made.work.git("checkout", "--quiet", "main")
    folder = made.mini.root / "forks" / "demo" / "cutlass"
    (folder / "b.patch").write_bytes(data)
    with (folder / "series").open("a") as listing:
        listing.write("b.patch\n")
    made.patch("c.patch", {"c.txt": b"x\n"})
    second = "sys.exit((tree / 'a.txt').exists() and b'two' in (tree / 'a.txt').read_bytes())\n"
    found = made.found(capsys, "--over", "patches", run=second)

    assert found["cause"]["what"] == ["a.patch", "b.patch"]


@pytest.fixture(name="versioned")
def _versioned(made: Searched) -> Searched:
    """Return the fork in a checkout that is a git repository, with a second revision in which four pieces differ."""
    checkout = type(made.work)(made.mini.root)
    checkout.git("init", "--quiet", "--initial-branch=main")
    checkout.commit({}, "Before")
    made.patch("a.patch", {"a.txt": b"x\n"})
    made.mini.edit("build/demo/environment.yaml", "distribution: mini-cutlass\n", "distribution: mini-cutlass\n    variables: {X: '1'}\n")
    rules = made.mini.root / "build" / "demo" / "archs.yaml"
    rules.write_text(rules.read_text() + "# reviewed again\n")
    tools = made.mini.root / "build" / "demo" / "pylock.toml"
    tools.write_text(tools.read_text().replace('name = "ninja"\nversion = "', 'name = "ninja"\nversion = "9.'))
    checkout.commit({}, "After")
    return made


LOCK = "lock = pathlib.Path(os.environ['SPARKWRIGHT_PROJECT'], 'build/demo/pylock.toml').read_text()\n"


@pytest.mark.parametrize(
    ("run", "what"),
    [
        ("sys.exit((tree / 'a.txt').exists())\n", ["series of cutlass"]),
        (f"{LOCK}sys.exit('\"9.' in lock)\n", ["tool ninja"]),
        (f"{LOCK}sys.exit('\"9.' in lock and (tree / 'a.txt').exists())\n", ["series of cutlass", "tool ninja"]),
    ],
)
def test_the_pieces_that_changed_an_answer_are_found(
    versioned: Searched, capsys: pytest.CaptureFixture[str], run: str, what: list[str]
) -> None:
    """Between two revisions of a checkout, the smallest set of pieces that suffices is named: a series, a tool, or both together."""
    found = versioned.found(capsys, "--over", "locks", "--from", "HEAD~1", "--to", "HEAD", run=run)

    assert found["cause"]["what"] == what
    assert {step["name"] for step in found["steps"]} >= {"HEAD~1", "HEAD"}


def test_a_name_of_no_stack_and_no_revision_is_refused(versioned: Searched) -> None:
    """So is one that git would take for an option; and two that do not differ."""
    for end, says in (("nowhere", "neither a stack nor a revision"), ("--all", "neither a stack"), ("demo", "do not differ")):
        with refusal("not-provided", match=says):
            main.run(versioned.words("--over", "locks", "--from=demo", f"--to={end}", run=SIZE))


def test_wheels_are_built_for_a_command_that_asks_for_them(made: Searched, capsys: pytest.CaptureFixture[str]) -> None:
    """With --build, the command finds the wheel of each state; here it grows at one commit."""
    run = "import zipfile\nwith zipfile.ZipFile(os.environ['SPARKWRIGHT_WHEEL']) as wheel:\n"
    run += "    sys.exit(any(info.file_size == 2000 for info in wheel.infolist()))\n"
    found = made.found(capsys, "--from", "v4.7.1", "--build", run=run)

    assert found["cause"]["what"][0].startswith(made.commits[made.turn][:12])
    assert all(step["wheel"].startswith("mini_cutlass-4.7.1+spark.demo.p0") for step in found["steps"])


def test_wheels_of_a_patched_fork_hold_the_patches(made: Searched, capsys: pytest.CaptureFixture[str]) -> None:
    """Each wheel is built by the real build, from a checkout with as much of the series."""
    made.patch("a.patch", {"include/a.h": b"x\n"})
    made.patch("b.patch", {"include/b.h": b"x\n"})
    run = "import zipfile\nwith zipfile.ZipFile(os.environ['SPARKWRIGHT_WHEEL']) as wheel:\n"
    run += "    sys.exit(any(name.endswith('include/b.h') for name in wheel.namelist()))\n"
    found = made.found(capsys, "--over", "patches", "--build", run=run)

    assert found["cause"]["what"] == ["b.patch"]
    assert len({step["wheel"].split("-")[1] for step in found["steps"]}) == 4, "each patch set has a version of its own"


@pytest.mark.parametrize(
    ("words", "kind", "says"),
    [
        (["a.patch", "--run", "true"], "usage", "a patch, or --run"),
        ([], "usage", "a patch, or --run"),
        (["--over", "locks", "--run", "true"], "usage", "wants two stacks"),
        (["--run", "true"], "not-provided", "needs a commit to start from"),
        (["--over", "patches", "--run", "true"], "not-provided", "has no patches"),
        (["--from", "v4.7.1", "--run", "true"], "bisect-undecided", "not good at one end"),
    ],
)
def test_searches_that_cannot_be_are_refused(made: Searched, words: list[str], kind: str, says: str) -> None:
    """Each with a sentence about what is wrong."""
    with refusal(kind, match=says):
        main.run(["bisect", *made.mini.words, "--fork", "cutlass", *words])


def test_what_was_asked_is_shown_though_nothing_was_found(made: Searched, capsys: pytest.CaptureFixture[str]) -> None:
    """The document of a failed search holds the error and all its steps."""
    assert main.main(["bisect", *made.mini.words, "--fork", "cutlass", "--json", "--from", "v4.7.1", "--run", "true"]) == 1
    document = msgspec.json.decode(capsys.readouterr().out)

    assert (document["error"]["reference"], document["cause"]) == ("bisect-undecided", None)
    assert [step["answer"] for step in document["steps"]] == ["good", "good"]
    assert os.path.dirname(document["steps"][0]["log"]).endswith("bisect")  # noqa: PTH120  a string from a document
