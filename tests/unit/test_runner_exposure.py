"""Ways in for strangers, read off workflow files: what must be found, and what must not."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkwright.operate.runner import policy
from sparkwright.operate.runner.exposure import TRUSTED, exposed

ROOT = Path(__file__).parents[2]
OURS = ("self-hosted", "linux", "ARM64", "gb10", "spark-gate")


def found(folder: Path, **files: str) -> list[tuple[str, str]]:
    """Return job and trigger of each exposure of *files*."""
    for name, text in files.items():
        (folder / f"{name}.yml").write_text(text)
    return [(one.job, one.trigger) for one in exposed(folder, OURS)]


def workflow(on: str, runs_on: str = "[self-hosted, gb10]", more: str = "") -> str:
    """Return a workflow of one job."""
    return f"name: one\non: {on}\njobs:\n  gate:\n    runs-on: {runs_on}\n    steps: []\n{more}"


def test_our_own_workflows_let_no_stranger_in() -> None:
    """No job of this repository that a stranger can start asks for a Spark."""
    labels = policy.load(ROOT / "ci" / "runner.yaml").all_labels()

    assert exposed(ROOT / ".github" / "workflows", labels) == ()


@pytest.mark.parametrize("event", ["pull_request", "pull_request_target", "issue_comment", "issues", "fork", "watch", "merge_group"])
@pytest.mark.parametrize("form", ["{}", "[push, {}]", "\n  push:\n  {}:\n    branches: [main]"])
def test_a_stranger_s_event_is_found(tmp_path: Path, event: str, form: str) -> None:
    """Every event that needs no write access counts, in each form that GitHub takes, whatever its filters."""
    assert found(tmp_path, one=workflow(form.format(event))) == [("gate", event)]


@pytest.mark.parametrize("event", sorted(TRUSTED))
def test_what_needs_write_access_is_let_be(tmp_path: Path, event: str) -> None:
    """A schedule, a push, a dispatch or a release lets nobody in."""
    assert found(tmp_path, one=workflow(event)) == []


@pytest.mark.parametrize(
    "runs_on",
    [
        "gb10", "GB10", "[gb10]", "[ubuntu-latest, Gb10]", "self-hosted", "{group: lab}", "{group: x, labels: gb10}", "{labels: [x, gb10]}",
        "${{ inputs.where }}", "${{ fromJSON(vars.WHERE) }}", "[ubuntu-latest, '${{ inputs.more }}']", "${{ matrix.where }}", "[]", "7",
    ],
)  # fmt: skip
def test_a_job_that_may_run_here_is_found(tmp_path: Path, runs_on: str) -> None:
    """Our labels in any form count, and so does what cannot be read off."""
    assert found(tmp_path, one=workflow("pull_request", runs_on)) == [("gate", "pull_request")]


@pytest.mark.parametrize("runs_on", ["ubuntu-24.04", "[ubuntu-24.04-arm]", "{labels: [ubuntu-latest]}"])
def test_a_hosted_job_is_let_be(tmp_path: Path, runs_on: str) -> None:
    """A pull request may run on GitHub's own machines."""
    assert found(tmp_path, one=workflow("pull_request", runs_on)) == []


def test_a_matrix_is_read_where_it_is_written_out(tmp_path: Path) -> None:
    """Values of a matrix count, those of include, too; hosted ones are let be."""
    text = "on: pull_request\njobs:\n  a:\n    runs-on: ${{{{ matrix.at }}}}\n    strategy:\n      matrix:\n        {}\n    steps: []\n"
    assert found(tmp_path, one=text.format("at: [ubuntu-24.04, ubuntu-24.04-arm]")) == []
    assert found(tmp_path, one=text.format("at: [ubuntu-24.04, gb10]")) == [("a", "pull_request")]
    assert found(tmp_path, one=text.format("include: [{at: [self-hosted, x]}]")) == [("a", "pull_request")]
    assert found(tmp_path, one=text.format("at: ${{ fromJSON(inputs.x) }}")) == [("a", "pull_request")]


def test_an_if_is_not_believed(tmp_path: Path) -> None:
    """A job that a condition keeps from strangers counts nevertheless."""
    guarded = workflow("[push, pull_request]", more="    if: github.event_name != 'pull_request'\n")

    assert found(tmp_path, one=guarded) == [("gate", "pull_request")]


def test_a_workflow_is_as_exposed_as_its_callers(tmp_path: Path) -> None:
    """A called workflow counts by those that call it, over any number of calls; workflows of others choose their own machine."""
    call = "on: {}\njobs:\n  call:\n    uses: ./.github/workflows/{}.yml\n"
    gate = workflow("workflow_call")
    assert found(tmp_path, gate=gate, middle=call.format("workflow_call", "gate"), top=call.format("schedule", "middle")) == []
    assert found(tmp_path, top=call.format("pull_request", "middle")) == [("gate", "pull_request")]

    other = "on: pull_request\njobs:\n  call:\n    uses: acme/x/.github/workflows/y.yml@main\n"
    assert ("call", "pull_request") in found(tmp_path, other=other)


def test_a_workflow_is_as_exposed_as_those_it_follows(tmp_path: Path) -> None:
    """workflow_run counts where what it follows can be started by a stranger, is unknown, or goes in a circle with one."""
    follow = workflow("{workflow_run: {workflows: [check]}}")
    assert found(tmp_path, gate=follow) == [("gate", "workflow_run")]
    assert found(tmp_path, check="name: check\non: push\njobs: {}\n") == []
    assert found(tmp_path, check="name: check\non: [push, pull_request]\njobs: {}\n") == [("gate", "workflow_run")]
    assert found(tmp_path, gate=workflow("workflow_run")) == [("gate", "workflow_run")]


@pytest.mark.parametrize(
    "text",
    ["on: [push\n", "jobs: {}\n", "on: push\n", "on: push\njobs: [1]\n", "on: 7\njobs: {}\n", "- 1\n", "on: &a push\njobs: *a\n", "\0", ""],
)
def test_what_cannot_be_read_counts(tmp_path: Path, text: str) -> None:
    """A workflow file that is not one, or that uses what hides its meaning, is an exposure of its own."""
    (tmp_path / "bad.yaml").write_text(text)

    [one] = exposed(tmp_path, OURS)

    assert (one.workflow, one.job, one.trigger) == ("bad.yaml", "", "")
    assert str(tmp_path) not in one.reason


def test_no_folder_holds_no_workflow(tmp_path: Path) -> None:
    """A checkout without workflows lets nobody in."""
    assert exposed(tmp_path / "none", OURS) == ()
