"""Upkeep on GitHub: the one issue about drift, and a bump as a pull request, at a server on a real repository."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import pytest
from tests.refusals import refusal
from tests.support.githubwork import REPOSITORY, World
from tests.unit import conftest
from tests.unit.conftest import Repository as Work

from sparkwright.cherry_picks.drift import Bump, Document, Drift, DriftEntry, Trial, TrialState
from sparkwright.cherry_picks.upstream import Base
from sparkwright.cli import main
from sparkwright.core.github import ADDRESS, GitHub, Repository
from sparkwright.lab import upkeep
from sparkwright.lab.upkeep import IssueUpdate


def client(world: World) -> Repository:
    return Repository(GitHub.from_environment(world.url, seconds=5), REPOSITORY)


def trial(state: str, patch: str = "a.patch", says: tuple[str, ...] = ()) -> Trial:
    return Trial(patch, "0" * 64, "1.1.0", cast("TrialState", state), (3, 4), (), says)


def drift(*trials: Trial) -> Drift:
    return Drift("vllm", "2026.11", "2026-11-22", ("1.1.0",), trials)


def update(world: World, *trials: Trial) -> IssueUpdate:
    return upkeep.update_issue(client(world), [drift(*trials)], author="github-actions[bot]")


def test_one_issue_is_opened_updated_and_closed(github: World) -> None:
    """That of a stranger with our mark is left alone."""
    github.file("Hello", text := f"text {upkeep.MARK}", "stranger")
    actions = [
        update(github, trial(state, says=(says,))).action
        for state, says in (
            ("applies", ""), ("conflict", "a.c:10"), ("conflict", "a.c:10"), ("conflict", "a.c:12"),
            ("applies", ""), ("applies", ""),
        )
    ]  # fmt: skip
    assert actions == ["none", "opened", "updated", "updated", "closed", "none"]
    assert github.issues[1]["state"] == "closed"
    assert "every patch applies" in github.issues[1]["body"]
    assert update(github, trial("conflict", says=("a.c:12",))).number == 3
    assert "a.c:12" in github.issues[2]["body"]
    assert github.issues[0]["body"] == text


def test_text_of_upstream_is_no_markup_in_the_issue_and_a_long_one_is_cut() -> None:
    hostile = trial("conflict", "@octocat <b>#1.patch", ("```", "@octocat https://evil.example <img>"))
    text = upkeep.drift_text([drift(hostile, *(trial("conflict", f"{number}.patch", ("x" * 500,)) for number in range(300)))])
    outside = "".join(part for number, part in enumerate(text.split("````")) if number % 2 == 0)

    assert "@octocat" not in outside
    assert "<b>" not in outside
    assert "\n````text\n```\n@octocat" in text
    assert len(text) < 65_536
    assert text.endswith("has the rest.*\n")


@pytest.mark.parametrize(
    ("read", "text"),
    [
        *((upkeep.read_drift, text) for text in ("{", '{"drift": [{"of": 3}]}', '{"error": {"reference": "offline", "what": "no"}}')),
        *((upkeep.read_proposal, text) for text in (
            "{", '{"error": {"reference": "offline"}}', '{"files": {".github/workflows/x.yml": ""}}', '{"files": {"forks/../ci/x": ""}}',
            '{"files": {"forks": ""}}', '{"files": {"forks/x": 3}}',
        )),
    ],
)  # fmt: skip
def test_a_file_without_drift_or_a_bump_is_refused(tmp_path: Path, read: Callable[[Path], object], text: str) -> None:
    (path := tmp_path / "report.json").write_text(text)
    with refusal("file-invalid"):
        read(path)


def test_a_pull_request_holds_exactly_the_changed_files(github: World, tmp_path: Path) -> None:
    """Another run with the same files leaves it; with others, it is updated; without a later release there is none."""
    checkout, folder = Work(tmp_path / "work"), tmp_path / "work" / "forks" / "s"
    base = checkout.commit({"forks/s/stack.yaml": b"a\n", "forks/s/vllm/old.patch": b"x\n", "README.md": b"r\n"})
    checkout.git("push", "--quiet", str(github.path), "main")
    assert upkeep.propose(client(github), checkout.path, upkeep.Proposal(), base="main").action == "none"
    bump = Bump("vllm", Base("1.1 rc", "", ""), (trial("moves"),), {"a.patch": "upstream has it"}, {})
    names = [f"written: forks/s/{name}" for name in ("stack.yaml", "vllm/old.patch", "new file.patch")]
    (folder / "vllm" / "old.patch").unlink()
    (folder / "new file.patch").write_bytes(b"\x00\xff")
    (checkout.path / "README.md").write_bytes(b"not ours\n")
    for content, action in ((b"b\n", "opened"), (b"b\n", "unchanged"), (b"c\n", "updated")):
        (folder / "stack.yaml").write_bytes(content)
        proposal = upkeep.Proposal("s", bump, ("range",), upkeep.contents(checkout.path, names))
        # It goes from the job that reads upstream to the one that may write as a file.
        (path := tmp_path / "bump.json").write_bytes(msgspec.json.encode(proposal))
        assert upkeep.propose(client(github), checkout.path, upkeep.read_proposal(path), base="main").action == action

    (pull,), branch = github.pulls, "bump/s-vllm-1.1-rc"
    assert (pull["title"], pull["head"]["ref"], pull["base"]) == ("vllm of s to 1.1 rc", branch, "main")
    assert "| a.patch | applies at other lines | upstream has it |" in pull["body"]
    assert github.git("ls-tree", "-r", "--name-only", branch).splitlines() == ["README.md", "forks/s/new file.patch", "forks/s/stack.yaml"]
    assert github.git("show", f"{branch}:forks/s/stack.yaml", f"{branch}:README.md") == "c\nr"
    assert github.git("rev-parse", f"{branch}^", "main").split() == [base, base]


def test_output_of_drift_becomes_the_issue_and_a_bump_of_a_changed_checkout_is_refused(
    github: World, host: conftest.Host, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Another machine, which has only the report, files it. Before a checkout with changes is bumped, GitHub is not asked."""
    host.work.commit({})
    host.lock()
    Work(host.root / "forks").git("init", "--quiet", "..")
    with refusal("usage", match="has changes"):
        main.run(["patch", "bump", *host.words, "--to", "2.0", "--pull", REPOSITORY])
    assert not github.asked
    (tmp_path / "drift.json").write_bytes(msgspec.json.encode(Document((DriftEntry(drift(trial("conflict"))),))))
    host.mirrors[ADDRESS] = github.url
    assert main.main(["patch", "drift", *host.words, "--given", str(tmp_path / "drift.json"), "--issue", REPOSITORY, "--json"]) == 0

    url = f"{github.url}/{REPOSITORY}/issues/1"
    assert json.loads(capsys.readouterr().out)["issue"] == {"action": "opened", "number": 1, "url": url}
    assert github.issues[0]["title"] == "Drift: patches to mend or drop in 2026.11: 1"
