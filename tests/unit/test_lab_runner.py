"""Ways in for strangers: workflow files, the repository's settings, and the machine."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refusal
from tests.support import lab_github
from tests.support.lab_github import REPOSITORY, TOKEN, Hub

from sparkwright.cli.main import parse
from sparkwright.lab import runner

ROOT = Path(__file__).parents[2]
OURS = ("self-hosted", "linux", "ARM64", "gb10", "spark-gate")


def exposed(**texts: str) -> list[tuple[str, str]]:
    """Return job and trigger of each exposure of the workflows *texts*."""
    files = {f"{name}.yml": text for name, text in texts.items()}
    return [(item.job, item.trigger) for item in runner.exposures(files, OURS)]


def workflow(on: str, runs_on: str = "[self-hosted, gb10]", more: str = "") -> str:
    """Return a workflow of one job."""
    return f"name: one\non: {on}\njobs:\n  gate:\n    runs-on: {runs_on}\n    steps: []\n{more}"


@pytest.mark.parametrize(
    "event", ["pull_request", "pull_request_target", "issue_comment", "fork", "merge_group"]
)
@pytest.mark.parametrize("form", ["{}", "[push, {}]", "\n  push:\n  {}:\n    branches: [main]"])
def test_event_of_a_stranger_is_reported(event: str, form: str) -> None:
    assert exposed(one=workflow(form.format(event))) == [("gate", event)]


def test_events_that_need_write_access_are_accepted() -> None:
    assert exposed(one=workflow(f"[{', '.join(runner.TRUSTED_EVENTS)}]")) == []


@pytest.mark.parametrize(
    "runs_on",
    [
        "GB10", "[ubuntu-latest, Gb10]", "self-hosted", "{group: lab}", "{labels: [x, gb10]}", "${{ fromJSON(vars.WHERE) }}",
        "[ubuntu-latest, '${{ inputs.more }}']", "${{ matrix.where }}", "[]", "7",
    ],
)  # fmt: skip
def test_our_labels_and_computed_ones_are_reported(runs_on: str) -> None:
    assert exposed(one=workflow("pull_request", runs_on)) == [("gate", "pull_request")]


@pytest.mark.parametrize("runs_on", ["ubuntu-24.04", "{labels: [ubuntu-latest]}"])
def test_hosted_jobs_are_accepted(runs_on: str) -> None:
    assert exposed(one=workflow("pull_request", runs_on)) == []


def test_written_matrix_is_read() -> None:
    text = "on: pull_request\njobs:\n  a:\n    runs-on: ${{{{ matrix.at }}}}\n    strategy:\n      matrix:\n        {}\n    steps: []\n"
    assert exposed(one=text.format("at: [ubuntu-24.04, ubuntu-24.04-arm]")) == []
    for matrix in (
        "at: [ubuntu-24.04, gb10]",
        "include: [{at: [self-hosted, x]}]",
        "at: ${{ fromJSON(inputs.x) }}",
    ):
        assert exposed(one=text.format(matrix)) == [("a", "pull_request")]


def test_called_workflow_has_the_events_of_its_callers() -> None:
    call = "on: {}\njobs:\n  call:\n    uses: {}\n"
    gate, middle = (
        workflow("workflow_call"),
        call.format("workflow_call", "./.github/workflows/gate.yml"),
    )
    top = "./.github/workflows/middle.yml"
    assert exposed(gate=gate, middle=middle, top=call.format("schedule", top)) == []
    assert exposed(gate=gate, middle=middle, top=call.format("pull_request", top)) == [
        ("gate", "pull_request")
    ]
    assert exposed(other=call.format("pull_request", "acme/x/.github/workflows/y.yml@main")) == [
        ("call", "pull_request")
    ]


def test_workflow_run_is_as_trusted_as_what_it_follows() -> None:
    follow = workflow("{workflow_run: {workflows: [check]}}")
    assert exposed(gate=follow) == [("gate", "workflow_run")]
    assert exposed(gate=follow, check="name: check\non: push\njobs: {}\n") == []
    assert exposed(gate=follow, check="name: check\non: [push, issues]\njobs: {}\n") == [
        ("gate", "workflow_run")
    ]
    assert exposed(gate=workflow("workflow_run")) == [("gate", "workflow_run")]


@pytest.mark.parametrize(
    "text",
    [
        "on: [push\n",
        "jobs: {}\n",
        "on: push\njobs: [1]\n",
        "on: push\njobs: {a: 1}\n",
        "- 1\n",
        "on: &a x\njobs: *a\n",
        "\0",
        "",
    ],
)
def test_unreadable_workflow_is_reported(text: str) -> None:
    assert exposed(bad=text) == [("", "")]


@pytest.fixture
def hub() -> Iterator[Hub]:
    """Return a GitHub with good settings and the workflows of this checkout."""
    with lab_github.serving() as hub:
        for path in (ROOT / ".github" / "workflows").glob("*.yml"):
            lab_github.add_workflow(hub, path.name, path.read_text())
        yield hub


def check(hub: Hub, *words: str) -> Any:
    """Run ``lab runner check``."""
    arguments = parse(["lab", "runner", "check", "--root", str(ROOT), "--repository", REPOSITORY,
                       "--mirror", f"https://api.github.com={hub.url}", *words])  # fmt: skip
    return arguments.run(arguments)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a machine's configuration, which does not exist yet."""
    for name in ("CONFIG", "STATE", "UNIT_FOLDER"):
        monkeypatch.setattr(runner, name, tmp_path / name.lower())
    monkeypatch.delenv("GITHUB_TOKEN", raising=False)
    return tmp_path / "config"


def test_check_passes_for_good_settings(hub: Hub, config: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    states = {
        finding.name: finding.state for finding in check(hub, "--token", str(token))["findings"]
    }
    assert states.pop("machine") == "not-run"
    assert set(states.values()) == {"ok"}
    hub.settings[""]["private"] = True
    assert check(hub, "--token", str(token))
    hub.settings["/rules/branches/main"] = [{"type": "deletion"}]
    looks = [one for one in check(hub, "--token", str(token))["findings"] if one.state == "look"]
    assert [one.name for one in looks] == ["branch main"]
    hub.settings["/branches/main"] = {"protected": True}
    hub.settings["/orgs/acme/actions/runner-groups"] = 403
    assert "look" in {finding.state for finding in check(hub, "--token", str(token))["findings"]}
    hub.settings["/environments"] = 403
    with refusal("github-refused"):
        check(hub, "--token", str(token))


def environments(**approve: Any) -> dict[str, Any]:
    """Return the setting with *approve* as the environment of that name, which does not exist without any."""
    record: dict[str, Any] = lab_github.good_settings()["/environments"]
    record["environments"][-1:] = [{"name": "approve", **approve}] if approve else []
    return {"/environments": record}


def deploying(*policies: dict[str, str]) -> dict[str, Any]:
    """Return the setting with *policies* for the branches and tags that may deploy to `release`."""
    path = "/environments/release/deployment-branch-policies"
    return {path: {"branch_policies": list(policies)}}


def workflow_of_the_repository(text: str) -> dict[str, Any]:
    """Return the setting with *text* as its file check.yml."""
    file = {"name": "", "content": base64.b64encode(text.encode()).decode()}
    return {"/contents/.github/workflows/check.yml": file}


PRIVATE = {
    **lab_github.good_settings()[""],
    "private": True,
    "owner": {"login": "acme", "type": "User"},
}
REVIEWED = {"protection_rules": [{"type": "required_reviewers"}]}
FORKS = "/actions/permissions/fork-pr-workflows-private-repos"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"/actions/permissions/fork-pr-contributor-approval": {"approval_policy": "first_time_contributors"}}, "approval is required of first"),
        ({"": PRIVATE, FORKS: {"run_workflows_from_fork_pull_requests": True}}, "they run without approval"),
        ({"/actions/permissions/workflow": {"default_workflow_permissions": "write"}}, "may write to the repository"),
        (environments(), "environment approve: it does not exist"),
        (environments(**lab_github.CHOSEN), "no required reviewers"),
        (environments(**REVIEWED), "others than the branch main may deploy"),
        (environments(**REVIEWED, deployment_branch_policy={"protected_branches": True, "custom_branch_policies": False}), "others than"),
        (deploying({"name": "*"}), "environment release: others than the branch main may deploy"),
        (deploying({"name": "main"}, {"name": "topic/*"}), "others than the branch main may deploy"),
        (deploying({"name": "main", "type": "tag"}), "others than the branch main may deploy"),
        ({"/actions/runners": {"runners": [*({"name": "x", "ephemeral": True},) * 150, {"name": "old"}]}}, "not for one job only: old"),
        ({"/orgs/acme/actions/runner-groups": {"runner_groups": [{"name": "G", "allows_public_repositories": True}]}}, "may use G"),
        (workflow_of_the_repository("on: push\n"), "check.yml: : unreadable"),
        (workflow_of_the_repository(workflow("pull_request")), "check.yml: gate: pull_request"),
    ],
)  # fmt: skip
def test_check_refuses_bad_settings(
    hub: Hub, config: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", TOKEN)
    hub.settings |= changes
    with refusal("runner-exposed") as caught:
        check(hub)
    assert message in "\n".join(caught.value.details)
    assert len(caught.value.details) == 1


def machine(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a machine up, all but its users."""
    archive = (
        runner.STATE / f"actions-runner-linux-{runner.ARCHIVES[os.uname().machine]}-1.2.3.tar.gz"
    )
    for folder in (config, runner.STATE, runner.UNIT_FOLDER):
        folder.mkdir()
    archive.write_bytes(b"runner")
    (config / "runner.env").write_text(
        f"LABELS=x\nRUNNER_VERSION=1.2.3\nRUNNER_SHA256={hashlib.sha256(b'runner').hexdigest()}\n"
    )
    (config / "github-token").write_text(TOKEN)
    (config / "github-token").chmod(0o600)
    (runner.UNIT_FOLDER / runner.UNIT).write_bytes(
        (ROOT / "ci" / "runner" / runner.UNIT).read_bytes()
    )
    monkeypatch.setattr(runner, "USERS", ("nobody",))


def bad_checks() -> set[str]:
    """Return the checks of the machine that fail, those of the checkout's owner left out."""
    return {finding.name for finding in runner.machine_findings(ROOT) if finding.state == "bad"} - {
        "files of root"
    }


def test_check_finds_what_differs_on_the_machine(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(config, monkeypatch)
    owned = os.getuid() == 0
    assert bad_checks() == (set() if owned else {"token"})
    with (config / "runner.env").open("a") as stream:
        stream.write("LABELS=gb10\nRUNNER_VERSION=1.2.4\n")
    (runner.UNIT_FOLDER / runner.UNIT).write_text("[Service]\n")
    (config / "github-token").chmod(0o640)
    config.chmod(0o777)
    monkeypatch.setattr(runner, "USERS", ("root", "no-such-user"))
    assert bad_checks() == {
        "unit",
        "runner software",
        "token",
        "labels",
        "user root",
        "user no-such-user",
    }
    files = next(item for item in runner.machine_findings(ROOT) if item.name == "files of root")
    assert str(config) in files.message


def test_every_reference_of_the_script_is_documented() -> None:
    script = (ROOT / "ci" / "runner" / "run-job").read_text()
    references = {
        line.split("fail ")[1].split()[0] for line in script.splitlines() if "fail runner-" in line
    }
    assert references == set(runner.RunnerError.references) - {"runner-exposed"}
