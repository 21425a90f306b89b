"""Ways in for strangers: workflow files, the repository's settings, and the machine."""

from __future__ import annotations

import base64
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



@pytest.mark.parametrize(
    "text",
    [
        *(
            workflow(form.format(event))
            for event in ("pull_request", "pull_request_target", "issue_comment", "fork", "workflow_run")
            for form in ("{}", "[push, {}]", "\n  push:\n  {}:\n    branches: [main]")
        ),
        *(
            workflow("pull_request", where)
            for where in (
                "GB10", "[ubuntu-latest, Gb10]", "self-hosted", "{group: lab}", "{labels: [x, gb10]}", "${{ fromJSON(vars.WHERE) }}",
                "[ubuntu-latest, '${{ inputs.more }}']", "${{ matrix.where }}", "[]", "7",
            )
        ),
    ],
)  # fmt: skip
def test_stranger_who_reaches_our_labels_or_computed_ones_is_reported(text: str) -> None:
    assert [job for job, trigger in exposed(one=text) if trigger in text] == ["gate"]


@pytest.mark.parametrize(
    "text",
    [
        workflow(f"[{', '.join(runner.TRUSTED_EVENTS)}]"), workflow("pull_request", "ubuntu-24.04"),
        workflow("pull_request", "{labels: [ubuntu-latest]}"),
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
        for file in (ROOT / ".github" / "workflows").glob("*.yml"):
            hub.settings["/contents/.github/workflows"].append({"name": file.name})
            hub.settings |= workflow_of_the_repository(file.read_text("utf-8"), file.name)
        yield hub


def check(hub: Hub, *words: str) -> Any:
    """Run ``lab runner check``."""
    arguments = parse(["lab", "runner", "check", "--root", str(ROOT), "--repository", REPOSITORY,
                       "--mirror", f"https://api.github.com={hub.url}", *words])  # fmt: skip
    return arguments.run(arguments)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a machine's configuration, which does not exist yet."""
    monkeypatch.setattr(runner, "CONFIG", tmp_path / "config")
    monkeypatch.delenv("GITHUB_TOKEN", raising=False)
    return tmp_path / "config"


def test_check_passes_for_good_settings(hub: Hub, config: Path, tmp_path: Path) -> None:
    (token := tmp_path / "token").write_text(f"{TOKEN}\n")

    states = {finding.name: finding.state for finding in check(hub, "--token", str(token))["findings"]}
    assert {name for name, state in states.items() if state != "ok"} == {"machine"}, "this machine takes no jobs"
    hub.settings[""]["private"] = True
    assert check(hub, "--token", str(token))
    hub.settings["/environments"] = 403
    with refusal("github-refused"):
        check(hub, "--token", str(token))


def environments(**approve: Any) -> dict[str, Any]:
    """Return the setting with *approve* as the environment of that name, which does not exist without any."""
    *others, _ = lab_github.good_settings()["/environments"]["environments"]
    return {"/environments": {"environments": [*others, *[{"name": "approve", **approve}] * bool(approve)]}}


def deploying(*policies: dict[str, str]) -> dict[str, Any]:
    """Return the setting with *policies* for the branches and tags that may deploy to `release`."""
    return {"/environments/release/deployment-branch-policies": {"branch_policies": list(policies)}}


def workflow_of_the_repository(text: str, name: str = "check.yml") -> dict[str, Any]:
    """Return the setting with *text* as its file *name*."""
    return {f"/contents/.github/workflows/{name}": {"name": name, "content": base64.encodebytes(text.encode()).decode()}}


REVIEWED = {"protection_rules": [{"type": "required_reviewers"}]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"/actions/permissions/fork-pr-contributor-approval": {"approval_policy": "first_time_contributors"}}, "approval is required of first"),
        (
            {
                "": {**lab_github.good_settings()[""], "private": True},
                "/actions/permissions/fork-pr-workflows-private-repos": {"run_workflows_from_fork_pull_requests": True},
            },
            "workflows of forks: they run",
        ),
        (environments(), "environment approve: it does not exist"),
        (environments(**lab_github.CHOSEN), "no required reviewers"),
        (environments(**REVIEWED), "others than the branch main may deploy"),
        (environments(**REVIEWED, deployment_branch_policy={"protected_branches": True, "custom_branch_policies": False}), "others than"),
        (deploying({"name": "*"}), "environment release: others than the branch main may deploy"),
        (deploying({"name": "main"}, {"name": "topic/*"}), "others than the branch main may deploy"),
        (deploying({"name": "main", "type": "tag"}), "others than the branch main may deploy"),
        ({"/actions/runners": {"runners": [*({"name": "x", "ephemeral": True},) * 150, {"name": "old"}]}}, "not for one job only: old"),
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


def test_check_finds_who_else_may_write_and_users_with_rights(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.mkdir()
    (config / "runner.env").touch()
    monkeypatch.setattr(runner, "USERS", ("nobody",))

    def bad() -> dict[str, str]:
        return {finding.name: finding.message for finding in runner.machine_findings(ROOT) if finding.state == "bad"}

    assert bad().keys() <= {"files of root"}, "the checkout of a test is not root's"
    config.chmod(0o777)
    monkeypatch.setattr(runner, "USERS", ("root", "no-such-user"))
    assert bad().keys() == {"user root", "user no-such-user", "files of root"}
    assert str(config) in bad()["files of root"]


def test_every_reference_of_the_script_is_documented() -> None:
    script = (ROOT / "ci" / "runner" / "run-job").read_text()
    references = {
        line.split("fail ")[1].split()[0] for line in script.splitlines() if "fail runner-" in line
    }
    assert references == set(runner.RunnerError.references) - {"runner-exposed"}
