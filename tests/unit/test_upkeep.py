"""Upkeep on GitHub: the one issue about drift, and a bump as a pull request, at a server on a real repository."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refusal
from tests.support import githubwork
from tests.support.githubwork import REPOSITORY, TOKEN, World
from tests.unit import conftest
from tests.unit.conftest import Repository as Work

from sparkwright.cherry_picks.bump import Bump
from sparkwright.cherry_picks.drift import Drift, Trial, TrialState
from sparkwright.cherry_picks.upstream import Base
from sparkwright.cli import main
from sparkwright.core.console import markdown_block, markdown_text
from sparkwright.core.git import Objects
from sparkwright.core.github import ADDRESS, GitHub, Repository
from sparkwright.lab import upkeep
from sparkwright.lab.upkeep import Published


@pytest.fixture(name="world")
def _world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Return GitHub, with an empty repository, and a token of ours."""
    path = tmp_path / "github.git"
    Work(tmp_path / "seed").git("init", "--quiet", "--bare", str(path))
    monkeypatch.setenv("GITHUB_TOKEN", TOKEN)
    with githubwork.serving(World(path)) as world:
        yield world


def client(world: World) -> Repository:
    return Repository(GitHub.from_environment(world.url, seconds=5), REPOSITORY)


def trial(state: str, patch: str = "a.patch", says: tuple[str, ...] = ()) -> Trial:
    return Trial(patch, "0" * 64, "1.1.0", cast("TrialState", state), (3, 4), (), says)


def drift(*trials: Trial) -> Drift:
    return Drift("vllm", "2026.11", "2026-11-22", ("1.1.0",), trials)


def update(world: World, *trials: Trial) -> Published:
    return upkeep.update_issue(client(world), [drift(*trials)], author="github-actions[bot]")


def test_one_issue_is_opened_updated_and_closed(world: World) -> None:
    actions = [
        update(world, trial(state, says=(says,))).action
        for state, says in (
            ("applies", ""), ("conflict", "a.c:10"), ("conflict", "a.c:10"), ("conflict", "a.c:12"),
            ("applies", ""), ("applies", ""),
        )
    ]  # fmt: skip
    assert actions == ["none", "opened", "unchanged", "updated", "closed", "none"]
    (issue,) = world.issues
    assert issue["state"] == "closed"
    assert "every patch applies" in issue["body"]
    assert update(world, trial("conflict", says=("a.c:12",))).number == 2
    assert "a.c:12" in world.issues[1]["body"]


def test_an_issue_of_a_stranger_with_our_mark_is_left_alone(world: World) -> None:
    world.file("Hello", text := f"text {upkeep.MARK}", "stranger")
    assert update(world, trial("conflict")).number == 2
    assert world.issues[0]["body"] == text


def test_text_of_upstream_is_no_markup_in_the_issue() -> None:
    hostile = trial(
        "conflict", "@octocat <b>#1.patch", ("```", "@octocat https://evil.example <img>")
    )
    text = upkeep.drift_text([drift(hostile)])
    outside = "".join(part for number, part in enumerate(text.split("````")) if number % 2 == 0)

    assert "@octocat" not in outside
    assert "<b>" not in outside
    assert "\n````text\n```\n@octocat" in text


def test_a_long_text_is_cut() -> None:
    trials = (trial("conflict", f"{number}.patch", ("x" * 500,)) for number in range(300))
    text = upkeep.drift_text([drift(*trials)])
    assert len(text) < 65_536
    assert text.endswith("has the rest.*\n")


@pytest.mark.parametrize(
    "text", ["{", '{"drift": [{"of": 3}]}', '{"error": {"reference": "offline", "what": "no"}}']
)
def test_a_file_without_drift_is_refused(tmp_path: Path, text: str) -> None:
    (path := tmp_path / "drift.json").write_text(text)
    with refusal("file-invalid"):
        upkeep.read_drift(path)


@pytest.fixture(name="checkout")
def _checkout(world: World, tmp_path: Path) -> Work:
    """Return a checkout with a commit that GitHub has, too."""
    work = Work(tmp_path / "work")
    files = {"forks/s/stack.yaml": b"a\n", "forks/s/vllm/old.patch": b"x\n", "README.md": b"r\n"}
    work.commit(dict(files))
    work.git("push", "--quiet", str(world.path), "main")
    return work


def propose(world: World, work: Work) -> Published:
    bump = Bump(
        "vllm", Base("1.1 rc", "", ""), (trial("moves"),), {"a.patch": "upstream has it"}, {}
    )
    names = ("stack.yaml", "vllm/old.patch", "new file.patch")
    files = upkeep.contents(work.path, [f"written: forks/s/{name}" for name in names])
    proposal = upkeep.Proposal("s", bump, ("range",), "Upstream", files)
    # It goes from the job that reads upstream to the one that may write as a file.
    (path := work.path.with_name("bump.json")).write_bytes(msgspec.json.encode(proposal))
    return upkeep.propose(client(world), work.path, upkeep.read_proposal(path), base="main")


@pytest.mark.parametrize(
    "text",
    [
        "{", '{"error": {"reference": "offline"}}', '{"files": {".github/workflows/x.yml": ""}}', '{"files": {"forks/../ci/x": ""}}',
        '{"files": {"forks": ""}}', '{"files": {"forks/x": 3}}',
    ],
)  # fmt: skip
def test_a_file_without_a_bump_is_refused(tmp_path: Path, text: str) -> None:
    (path := tmp_path / "bump.json").write_text(text)
    with refusal("file-invalid"):
        upkeep.read_proposal(path)


def test_no_later_release_is_no_pull_request(world: World, checkout: Work) -> None:
    done = upkeep.propose(client(world), checkout.path, upkeep.Proposal(), base="main")
    assert (done.action, world.pulls) == ("none", [])


def test_a_pull_request_holds_exactly_the_changed_files(world: World, checkout: Work) -> None:
    folder = checkout.path / "forks" / "s"
    (folder / "stack.yaml").write_bytes(b"b\n")
    (folder / "vllm" / "old.patch").unlink()
    (folder / "new file.patch").write_bytes(b"\x00\xff")
    (checkout.path / "README.md").write_bytes(b"not ours\n")
    first, again = propose(world, checkout), propose(world, checkout)
    (folder / "stack.yaml").write_bytes(b"c\n")
    other, branch = propose(world, checkout), "bump/s-vllm-1.1-rc"

    assert [done.action for done in (first, again, other)] == ["opened", "unchanged", "updated"]
    (pull,) = world.pulls
    assert (pull["title"], pull["head"]["ref"], pull["base"]) == (
        "vllm of s to 1.1 rc",
        branch,
        "main",
    )
    assert "| a.patch | applies at other lines | upstream has it |" in pull["body"]
    listed = world.git("ls-tree", "-r", "--name-only", branch).splitlines()
    assert listed == ["README.md", "forks/s/new file.patch", "forks/s/stack.yaml"]
    assert world.git("show", f"{branch}:forks/s/stack.yaml") == "c"
    assert world.git("show", f"{branch}:README.md") == "r"
    assert world.git("rev-parse", f"{branch}^") == checkout.git("rev-parse", "HEAD")
    assert world.git("rev-parse", "main") == checkout.git("rev-parse", "HEAD")


def test_a_token_that_may_not_write_is_refused(
    world: World, checkout: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", "ghs_other")
    with refusal("github-refused"):
        propose(world, checkout)


def test_changed_sources_are_counted_by_kind(tmp_path: Path) -> None:
    work = Work(tmp_path / "work")
    work.commit({"a.cu": b"1\n", "b.h": b"1\n", "CMakeLists.txt": b"1\n", "README.md": b"1\n"})
    before = work.tree()
    work.commit({"a.cu": b"2\n", "b.h": None, "c.cpp": b"1\n", "CMakeLists.txt": b"2\n"})
    objects = Objects(tmp_path / "objects.git")
    objects.borrow(work.path)

    text = upkeep.changed_sources(objects, before, work.tree())
    assert text == "Upstream changed 4 files: 2 compiled, 1 headers, 1 build files."


def test_output_of_drift_becomes_the_issue(
    world: World, host: conftest.Host, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    host.work.commit({"a.txt": b"one\ntwo\nthree\n"}, "Begin")
    host.lock()
    host.ours("first.patch", {"a.txt": b"one\nours\nthree\n"})
    host.work.commit({"a.txt": b"one\ntheirs\nthree\n"}, "Go on")
    host.push()
    assert main.main(["patch", "drift", *host.words, "--to", "main", "--json"]) == 0
    (report := tmp_path / "drift.json").write_text(capsys.readouterr().out)
    words = [
        "--stack",
        host.stack,
        "--root",
        str(host.root),
        "--cache-dir",
        str(tmp_path / "empty"),
        "--mirror",
        f"{ADDRESS}={world.url}",
    ]
    assert (
        main.main(
            ["patch", "drift", *words, "--given", str(report), "--issue", REPOSITORY, "--json"]
        )
        == 0
    )
    document = json.loads(capsys.readouterr().out)

    url = f"{world.url}/{REPOSITORY}/issues/1"
    assert document["issue"] == {"action": "opened", "number": 1, "url": url}
    assert world.issues[0]["title"] == "Drift: patches to mend or drop in test: 1"
    assert "first.patch" in world.issues[0]["body"]


def test_a_bump_of_a_changed_checkout_is_refused(world: World, host: conftest.Host) -> None:
    host.work.commit({"a.txt": b"a\n"}, "Begin")
    host.lock()
    work = Work(host.root)
    work.git("init", "--quiet", "--initial-branch=main")
    work.commit({})
    (host.root / "forks" / "stray").write_text("x")

    with refusal("usage", match="has changes"):
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
