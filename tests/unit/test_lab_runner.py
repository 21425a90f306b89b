"""Ways in for strangers: workflow files, the repository's settings, and the machine."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
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
    return [tuple(item.message.split(": ")[:2]) for item in runner.exposures(files, OURS)]  # type: ignore[misc]


def workflow(on: str, runs_on: str = "[self-hosted, gb10]", more: str = "") -> str:
    """Return a workflow of one job."""
    return f"name: one\non: {on}\njobs:\n  gate:\n    runs-on: {runs_on}\n    steps: []\n{more}"


MATRIX = "{{on: pull_request, jobs: {{gate: {{runs-on: '${{{{ matrix.at }}}}', strategy: {{matrix: {}}}, steps: []}}}}}}"


@pytest.mark.parametrize(
    "text",
    [
        *(
            workflow(form.format(event))
            for event in ("pull_request", "pull_request_target", "issue_comment", "fork", "merge_group")
            for form in ("{}", "[push, {}]", "\n  push:\n  {}:\n    branches: [main]")
        ),
        *(
            workflow("pull_request", where)
            for where in (
                "GB10", "[ubuntu-latest, Gb10]", "self-hosted", "{group: lab}", "{labels: [x, gb10]}", "${{ fromJSON(vars.WHERE) }}",
                "[ubuntu-latest, '${{ inputs.more }}']", "${{ matrix.where }}", "[]", "7",
            )
        ),
        *map(MATRIX.format, ("{at: [x, gb10]}", "{include: [{at: [self-hosted, x]}]}", "{at: '${{ fromJSON(inputs.x) }}'}")),
    ],
)  # fmt: skip
def test_stranger_who_reaches_our_labels_or_computed_ones_is_reported(text: str) -> None:
    assert [job for job, trigger in exposed(one=text) if trigger in text] == ["gate"]


@pytest.mark.parametrize(
    "text",
    [
        workflow(f"[{', '.join(runner.TRUSTED_EVENTS)}]"), workflow("pull_request", "ubuntu-24.04"),
        workflow("pull_request", "{labels: [ubuntu-latest]}"), MATRIX.format("{at: [ubuntu-24.04, ubuntu-24.04-arm]}"),
    ],
)  # fmt: skip
def test_trusted_events_and_hosted_jobs_are_accepted(text: str) -> None:
    assert exposed(one=text) == []


def test_called_workflow_has_the_events_of_its_callers() -> None:
    call = "on: {}\njobs:\n  call:\n    uses: {}\n"
    called = {"gate": workflow("workflow_call"), "middle": call.format("workflow_call", "./.github/workflows/gate.yml")}
    top = "./.github/workflows/middle.yml"
    assert exposed(**called, top=call.format("schedule", top)) == []
    assert exposed(**called, top=call.format("pull_request", top)) == [("gate", "pull_request")]
    assert exposed(other=call.format("pull_request", "acme/x/.github/workflows/y.yml@main")) == [("call", "pull_request")]


def test_workflow_run_is_as_trusted_as_what_it_follows() -> None:
    follow = workflow("{workflow_run: {workflows: [check]}}")
    assert exposed(gate=follow) == exposed(gate=workflow("workflow_run")) == [("gate", "workflow_run")]
    assert exposed(gate=follow, check="name: check\non: push\njobs: {}\n") == []
    assert exposed(gate=follow, check="name: check\non: [push, issues]\njobs: {}\n") == [("gate", "workflow_run")]


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
    assert [job for job, _ in exposed(bad=text)] == ["it cannot be read"]


@pytest.fixture
def hub() -> Iterator[Hub]:
    """Return a GitHub with good settings and the workflows of this checkout."""
    with Hub() as hub:
        lab_github.add_workflows(hub, ROOT / ".github" / "workflows")
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
    (token := tmp_path / "token").write_text(f"{TOKEN}\n")

    def names(state: str) -> list[str]:
        return [finding.name for finding in check(hub, "--token", str(token))["findings"] if finding.state == state]

    assert (names("look"), names("not-run")) == ([], ["machine"]), "this machine takes no jobs"
    hub.settings[""]["private"] = True
    assert names("look") == []
    hub.settings["/rules/branches/main"] = [{"type": "deletion"}]
    assert names("look") == ["branch main"]
    hub.settings["/branches/main"] = {"protected": True}
    hub.settings["/orgs/acme/actions/runner-groups"] = 403
    assert names("look") == ["runner groups"]
    hub.settings["/environments"] = 403
    with refusal("github-refused"):
        names("look")


def environments(**approve: Any) -> dict[str, Any]:
    """Return the setting with *approve* as the environment of that name, which does not exist without any."""
    *others, _ = lab_github.good_settings()["/environments"]["environments"]
    return {"/environments": {"environments": [*others, *[{"name": "approve", **approve}] * bool(approve)]}}


def deploying(*policies: dict[str, str]) -> dict[str, Any]:
    """Return the setting with *policies* for the branches and tags that may deploy to `release`."""
    path = "/environments/release/deployment-branch-policies"
    return {path: {"branch_policies": list(policies)}}


def workflow_of_the_repository(text: str) -> dict[str, Any]:
    """Return the setting with *text* as its file check.yml."""
    return {"/contents/.github/workflows/check.yml": {"name": "", "content": base64.b64encode(text.encode()).decode()}}


PRIVATE = {**lab_github.good_settings()[""], "private": True, "owner": {"login": "acme", "type": "User"}}
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
        (workflow_of_the_repository("on: push\n"), "check.yml: it cannot be read"),
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
    [detail] = caught.value.details
    assert message in detail


def test_check_finds_what_differs_on_the_machine(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (config, runner.STATE, runner.UNIT_FOLDER):
        folder.mkdir()
    machine = runner.ARCHIVES[os.uname().machine]
    (runner.STATE / f"actions-runner-linux-{machine}-1.2.3.tar.gz").write_bytes(b"runner")
    settings = f"LABELS=x\nRUNNER_VERSION=1.2.3\nRUNNER_SHA256={hashlib.sha256(b'runner').hexdigest()}\n"
    (config / "runner.env").write_text(settings)
    (config / "github-token").write_text(TOKEN)
    (config / "github-token").chmod(0o600)
    shutil.copy(ROOT / "ci" / "runner" / runner.UNIT, runner.UNIT_FOLDER)
    monkeypatch.setattr(runner, "USERS", ("nobody",))

    def bad() -> dict[str, str]:
        # The checkout of a test is not root's, nor is a file of an ordinary user.
        found = {finding.name: finding.message for finding in runner.machine_findings(ROOT) if finding.state == "bad"}
        return {name: message for name, message in found.items() if name != "token" or os.getuid() == 0}

    assert bad().keys() <= {"files of root"}
    (config / "runner.env").write_text(settings + "LABELS=gb10\nRUNNER_VERSION=1.2.4\n")
    (runner.UNIT_FOLDER / runner.UNIT).write_text("[Service]\n")
    (config / "github-token").chmod(0o640)
    config.chmod(0o777)
    monkeypatch.setattr(runner, "USERS", ("root", "no-such-user"))
    assert bad().keys() | {"token"} == {"unit", "runner software", "token", "labels", "user root", "user no-such-user", "files of root"}
    assert str(config) in bad()["files of root"]


def test_every_reference_of_the_script_is_documented() -> None:
    script = (ROOT / "ci" / "runner" / "run-job").read_text()
    references = {
        line.split("fail ")[1].split()[0] for line in script.splitlines() if "fail runner-" in line
    }
    assert references == set(runner.RunnerError.references) - {"runner-exposed"}
