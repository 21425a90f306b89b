"""Ways in for strangers: the settings of the lab's repository, and the machine that takes its jobs."""

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import lab_github

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "ci" / "runner" / "check_settings.py"
REVIEWED = {"protection_rules": [{"type": "required_reviewers"}]}


@pytest.fixture(name="hub")
def _hub() -> Iterator[lab_github.Hub]:
    with lab_github.Hub() as hub:
        yield hub


def check(hub: lab_github.Hub, *words: str, **variables: str) -> tuple[int, str]:
    """Return the status of the check, and what it said."""
    env = {"PATH": "/usr/bin:/bin", "SPARKWRIGHT_GITHUB_API": hub.url, "GITHUB_TOKEN": lab_github.TOKEN, **variables}
    done = subprocess.run([sys.executable, "-I", str(SCRIPT), *words], env=env, capture_output=True, text=True, check=False)
    assert lab_github.TOKEN not in done.stdout + done.stderr
    return done.returncode, done.stderr


def test_good_settings_pass_and_those_that_cannot_be_read_do_not(hub: lab_github.Hub) -> None:
    assert check(hub, lab_github.REPOSITORY) == (0, "")
    hub.settings[""]["private"] = True
    assert check(hub, lab_github.REPOSITORY) == (0, "")
    hub.settings["/environments"] = 403
    assert check(hub, lab_github.REPOSITORY) == (5, "runner-unregistered: 403 for /environments?per_page=100&page=1.\n")
    assert check(hub, lab_github.REPOSITORY, GITHUB_TOKEN="wrong")[0] == 5
    assert check(hub, lab_github.REPOSITORY, SPARKWRIGHT_GITHUB_API="http://192.0.2.1")[1].startswith("runner-unfit")
    assert check(hub, "unresolved")[1].startswith("runner-unresolved")


def environments(**approve: Any) -> dict[str, Any]:
    """Return the setting with *approve* as the environment of that name, which does not exist without any."""
    *others, _ = lab_github.good_settings()["/environments"]["environments"]
    return {"/environments": {"environments": [*others, *[{"name": "approve", **approve}] * bool(approve)]}}


def deploying(*policies: dict[str, str]) -> dict[str, Any]:
    """Return the setting with *policies* for the branches and tags that may deploy to `release`."""
    return {"/environments/release/deployment-branch-policies": {"branch_policies": list(policies)}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"/actions/permissions/fork-pr-contributor-approval": {"approval_policy": "first_time_contributors"}}, "approval is required of first"),
        (
            {
                "": {**lab_github.good_settings()[""], "private": True},
                "/actions/permissions/fork-pr-workflows-private-repos": {"run_workflows_from_fork_pull_requests": True},
            },
            "workflows of forks run",
        ),
        (environments(), "environment approve: it does not exist"),
        (environments(**lab_github.CHOSEN), "no required reviewers"),
        (environments(**REVIEWED), "others than the branch main may deploy"),
        (environments(**REVIEWED, deployment_branch_policy={"protected_branches": True, "custom_branch_policies": False}), "others than"),
        (deploying({"name": "*"}), "environment release: others than the branch main may deploy"),
        (deploying({"name": "main"}, {"name": "topic/*"}), "others than the branch main may deploy"),
        (deploying({"name": "main", "type": "tag"}), "others than the branch main may deploy"),
        ({"/actions/runners": {"runners": [*({"name": "x", "ephemeral": True},) * 150, {"name": "old"}]}}, "runner old is not for one job only"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(hub: lab_github.Hub, changes: dict[str, Any], message: str) -> None:
    hub.settings |= changes
    status, said = check(hub, lab_github.REPOSITORY)
    assert (status, said.count("\n"), said.startswith("runner-exposed: ")) == (1, 1, True)
    assert message in said


def test_machine_where_others_may_write_or_its_users_have_rights_is_refused(hub: lab_github.Hub, tmp_path: Path) -> None:
    # Other fixtures have folders beside it.
    (folder := tmp_path / "machine").mkdir()
    assert "There is no runner.env or github-token" in check(hub, SPARKWRIGHT_CONFIG_FOLDER=str(folder))[1]
    script = runpy.run_path(str(SCRIPT))
    faults = script["machine_faults"]
    faults.__globals__.update(CONFIG=folder, HERE=folder, UNIT=folder / "none", SUDOERS=folder / "sudoers", USERS=("nobody",))
    assert [*faults()] == ([f"others than root can write {folder}"] if os.geteuid() else [])
    folder.chmod(0o777)
    (folder / "sudoers").write_text("nobody ALL=(ALL) NOPASSWD: ALL")
    faults.__globals__["USERS"] = ("nobody", "root", "no-such-user")
    said = "\n".join(faults())
    for fault in (f"write {folder}\n", "sudoers names the user nobody", "the user root is in", "no-such-user does not exist"):
        assert fault in said


def test_every_reference_of_the_scripts_is_in_the_guide() -> None:
    """They are no errors of the program, whose page has the others."""
    guide = (ROOT / "docs" / "howto" / "set-up-a-runner.md").read_text()
    for script in (SCRIPT, SCRIPT.with_name("run-job")):
        for word in script.read_text().replace(":", " ").replace('"', " ").split():
            assert not word.startswith("runner-") or f"`{word}`" in guide or word.endswith((".env", "$version")), word
