"""Upkeep that runs by itself: one issue that tells of drift, and a bump as a pull request, at a real server on a real repository."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refusal
from tests.support import githubwork
from tests.support.githubwork import REPOSITORY, TOKEN, World
from tests.unit import conftest
from tests.unit.conftest import Repository as Work

from sparkwright.cherry_picks.drift import Drift, Trial
from sparkwright.cli import main
from sparkwright.core.console import markdown_block, markdown_text
from sparkwright.core.git import Objects
from sparkwright.core.github import ADDRESS, GitHub, Repository
from sparkwright.operate.upkeep import driftreport, foreseen, issue, proposal


@pytest.fixture(name="world")
def _world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Return GitHub, with an empty repository, and a token of ours."""
    path = tmp_path / "github.git"
    Work(tmp_path / "seed").git("init", "--quiet", "--bare", str(path))
    monkeypatch.setenv("GITHUB_TOKEN", TOKEN)
    with githubwork.serving(World(path)) as made:
        yield made


def repository(world: World) -> Repository:
    """Return the client's end."""
    return Repository(GitHub.from_environment(world.url, seconds=5), REPOSITORY)


def trial(state: str, patch: str = "a.patch", says: tuple[str, ...] = ()) -> Trial:
    return Trial(patch, "0" * 64, "1.1.0", state, (3, 4), (), says)  # type: ignore[arg-type]


def night(*trials: Trial) -> Drift:
    return Drift("vllm", "2026.11", "2026-11-22", ("1.1.0",), trials)


def keep(world: World, *trials: Trial, author: str = "github-actions[bot]") -> issue.Kept:
    made = [night(*trials)]
    asking = driftreport.asking(made)
    return issue.keep(repository(world), "drift", "Drift", driftreport.body(made), author=author, wanted=bool(asking))


def test_one_issue_is_filed_and_then_rewritten(world: World) -> None:
    """The first conflict files an issue, the next night rewrites the same one, and the same night again changes nothing."""
    first = keep(world, trial("conflict", says=("a.c:10 differs",)))
    again = keep(world, trial("conflict", says=("a.c:10 differs",)))
    later = keep(world, trial("conflict", says=("a.c:12 differs",)))

    assert (first.done, again.done, later.done) == ("filed", "unchanged", "updated")
    assert {one.number for one in (first, again, later)} == {1}
    assert "a.c:12 differs" in world.issues[0]["body"]


def test_the_issue_is_closed_when_all_applies_and_nothing_is_filed_then(world: World) -> None:
    """A night on which every patch applies closes the open issue; the next one finds nothing to do."""
    keep(world, trial("conflict"))
    assert keep(world, trial("applies")).done == "closed"
    assert world.issues[0]["state"] == "closed"
    assert keep(world, trial("applies")).done == "nothing to tell"
    assert keep(world, trial("conflict")).number == 2


def test_a_strangers_issue_with_our_mark_is_left_alone(world: World) -> None:
    """Whoever copies the mark into an issue of theirs does not make us write there, or close it."""
    world.file("Hello", "text <!-- sparkwright:drift -->", "stranger")
    assert keep(world, trial("conflict")).number == 2
    assert world.issues[0]["body"] == "text <!-- sparkwright:drift -->"


def test_a_lost_answer_files_no_second_issue(world: World) -> None:
    """When the answer to the filing never comes, the issue that was filed all the same is found."""
    world.lost = 1
    assert keep(world, trial("conflict")).done == "filed"
    assert len(world.issues) == 1


def test_upstreams_words_are_text_in_the_issue() -> None:
    """What a conflict says cannot mention people, make links, or end the block that it stands in."""
    evil = trial("conflict", "@octocat <b>#1.patch", ("```", "@octocat https://evil.example <img>"))
    text = driftreport.body([night(evil)])
    outside = "".join(part for number, part in enumerate(text.split("````")) if number % 2 == 0)

    assert "@octocat" not in outside
    assert "<b>" not in outside
    assert "\n````text\n```\n@octocat" in text


def test_a_long_report_is_cut_and_says_so() -> None:
    """GitHub takes 65,536 characters; a report of more ends with the word that it was cut."""
    text = driftreport.body([night(*(trial("conflict", f"{n}.patch", ("x" * 500,)) for n in range(300)))])
    assert len(text) < 65_536
    assert text.endswith("has the rest.*\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "no report"), ('{"drift": [{"of": 3}]}', "no report"), ('{"error": {"reference": "offline", "what": "no"}}', "failed")],
)
def test_a_report_that_is_none_is_refused(tmp_path: Path, text: str, says: str) -> None:
    """A file that is not what `drift --json` prints, or tells of a failure, is no night without conflicts."""
    path = tmp_path / "drift.json"
    path.write_text(text)
    with refusal("file-invalid", match=says):
        driftreport.read(path)


@pytest.fixture(name="seeded")
def _seeded(world: World, tmp_path: Path) -> Work:
    """Return a work tree with a commit that GitHub has, too."""
    work = Work(tmp_path / "work")
    work.commit({"forks/s/stack.yaml": b"a\n", "forks/s/vllm/old.patch": b"x\n", "README.md": b"r\n"})
    work.git("push", "--quiet", str(world.path), "main")
    return work


def propose(world: World, work: Work, files: dict[str, bytes | None]) -> proposal.Proposed:
    return proposal.propose(repository(world), "main", work.git("rev-parse", "HEAD"), "bump/x", files, title="Bump", body="Because.")


def test_a_proposal_is_a_commit_that_holds_exactly_the_files(world: World, seeded: Work) -> None:
    """The commit stands on the checkout's, changes what was given, removes what was None, and leaves the rest."""
    done = propose(world, seeded, {"forks/s/stack.yaml": b"b\n", "forks/s/vllm/old.patch": None, "forks/s/new file.patch": b"\x00\xff"})
    listed = world.git("ls-tree", "-r", "--name-only", done.commit).splitlines()

    assert done.done == "opened"
    assert world.git("rev-parse", f"{done.commit}^") == seeded.git("rev-parse", "HEAD")
    assert listed == ["README.md", "forks/s/new file.patch", "forks/s/stack.yaml"]
    assert world.git("show", f"{done.commit}:forks/s/stack.yaml") == "b"
    assert world.git("rev-parse", "refs/heads/bump/x") == done.commit
    assert world.git("rev-parse", "refs/heads/main") == seeded.git("rev-parse", "HEAD")


def test_the_same_proposal_again_changes_nothing_and_another_sets_the_branch(world: World, seeded: Work) -> None:
    """A second run finds its pull request; a run with other files sets the branch of the same one to them."""
    first, again = (propose(world, seeded, {"forks/s/stack.yaml": b"b\n"}) for _ in range(2))
    other = propose(world, seeded, {"forks/s/stack.yaml": b"c\n"})

    assert (first.done, again.done, other.done) == ("opened", "unchanged", "updated")
    assert len(world.pulls) == 1
    assert world.git("show", "refs/heads/bump/x:forks/s/stack.yaml") == "c"


def test_a_proposal_without_a_change_or_a_right_is_refused(world: World, seeded: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """What equals the branch is no proposal, and a token that may not write is told so."""
    with refusal("github-refused", match="changes nothing"):
        propose(world, seeded, {"forks/s/stack.yaml": b"a\n"})
    monkeypatch.setenv("GITHUB_TOKEN", "ghs_other")
    with refusal("github-refused"):
        propose(world, seeded, {"forks/s/stack.yaml": b"b\n"})


def words_of(work: Work) -> dict[str, bytes]:
    return {
        "csrc/a.cu": b'#include "inc/x.cuh"\n', "csrc/b.cu": b'#include <vector>\n#include "y.h"\n', "csrc/c.cpp": b"int c;\n",
        "csrc/inc/x.cuh": b'#include "../y.h"\n', "csrc/y.h": b"int y;\n", "CMakeLists.txt": b"project(x)\n",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "units", "deciding"),
    [
        ({"csrc/c.cpp": b"int d;\n"}, ["csrc/c.cpp"], []),
        ({"csrc/y.h": b"long y;\n"}, ["csrc/a.cu", "csrc/b.cu"], []),
        ({"csrc/inc/x.cuh": b"int x;\n"}, ["csrc/a.cu"], []),
        ({"csrc/new.cu": b"int n;\n"}, ["csrc/new.cu"], []),
        ({"README.md": b"words\n"}, [], []),
        ({"CMakeLists.txt": b"project(y)\n"}, [], ["CMakeLists.txt"]),
    ],
)
def test_what_is_compiled_anew_is_foreseen(
    tmp_path: Path, changes: dict[str, bytes | None], units: list[str], deciding: list[str]
) -> None:
    """A unit counts when its file or one that it includes, through others too, differs; files that decide flags are told apart."""
    work = Work(tmp_path / "work")
    work.commit(dict(words_of(work)))
    before = work.tree()
    work.commit(changes)
    objects = Objects(tmp_path / "objects.git")
    objects.borrow(work.path)
    found = foreseen.foresee(objects, before, work.tree())

    assert list(found.units) == units
    assert list(found.deciding) == deciding
    assert foreseen.lines(found)[0].startswith(f"at least {len(units)} of {found.of} units")


def test_a_circle_of_includes_has_an_end(tmp_path: Path) -> None:
    """Headers that include each other are read once."""
    work = Work(tmp_path / "work")
    work.commit({"a.cu": b'#include "b.h"\n', "b.h": b'#include "c.h"\n', "c.h": b'#include "b.h"\n'})
    before = work.tree()
    work.commit({"c.h": b'#include "b.h"\nint c;\n'})
    objects = Objects(tmp_path / "objects.git")
    objects.borrow(work.path)

    assert foreseen.foresee(objects, before, work.tree()).units == ("a.cu",)


def test_drift_json_becomes_the_issue(world: World, host: conftest.Host, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What `drift --json` printed is told by another run, which asks no upstream, in one issue of the repository."""
    host.work.commit({"a.txt": b"one\ntwo\nthree\n"}, "Begin")
    host.lock()
    host.ours("first.patch", {"a.txt": b"one\nours\nthree\n"})
    host.work.commit({"a.txt": b"one\ntheirs\nthree\n"}, "Go on")
    host.push()
    assert main.main(["patch", "drift", *host.words, "--to", "main", "--json"]) == 0
    (report := tmp_path / "drift.json").write_text(capsys.readouterr().out)
    words = ["--stack", host.stack, "--root", str(host.root), "--cache-dir", str(tmp_path / "empty"), "--mirror", f"{ADDRESS}={world.url}"]
    assert main.main(["patch", "drift", *words, "--given", str(report), "--issue", REPOSITORY, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)

    assert document["issue"] == {"done": "filed", "number": 1, "url": f"{world.url}/{REPOSITORY}/issues/1"}
    assert world.issues[0]["title"] == "Drift: a patch of test asks for a person"
    assert "first.patch" in world.issues[0]["body"]


def test_a_dirty_checkout_is_not_offered(world: World, host: conftest.Host) -> None:
    """A bump with --pull begins on a clean checkout, so that the pull request holds the bump alone."""
    host.work.commit({"a.txt": b"a\n"}, "Begin")
    host.lock()
    work = Work(host.root)
    work.git("init", "--quiet", "--initial-branch=main")
    work.commit({})
    (host.root / "forks" / "stray").write_text("x")

    with refusal("usage", match="changes of its own"):
        main.run(["patch", "bump", *host.words, "--to", "2.0", "--pull", REPOSITORY])
    assert not world.asked


@given(st.text(max_size=60))
def test_plain_text_has_no_markup(text: str) -> None:
    """Whatever a stranger wrote is one line without a live mark of Markdown or a mention."""
    found = markdown_text(text)
    bare = found.replace("\\", "")
    assert "\n" not in found
    assert "@" not in bare or "@\u200b" in bare
    for mark in "`*_{}[]<>|~#!&$":
        assert found.count(mark) == found.count(f"\\{mark}")


@given(st.lists(st.text(alphabet=st.sampled_from("`a \t")), max_size=5))
def test_no_line_ends_its_block(lines: list[str]) -> None:
    """The fence of a block is longer than every run of its own marks inside."""
    first, *_, last, end = markdown_block(lines).split("\n")
    fence = first.removesuffix("text")
    assert (last, end) == (fence, "")
    assert all(fence not in line for line in lines)
