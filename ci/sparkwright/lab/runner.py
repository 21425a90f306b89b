"""
Check that no stranger can start a program on a runner of a lab.

Three things keep strangers away: the repository's settings at GitHub, its workflow files, and the
configuration of the machine. `settings_findings`, `exposures` and `machine_findings` read them.
Nothing is changed. The files of the runner itself are in ``ci/runner``.
"""

from __future__ import annotations

import base64
import grp
import os
import pwd
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import quote

import msgspec

from sparkwright.builder import host_info
from sparkwright.core import strict_yaml
from sparkwright.core.errors import Advice, FileError, SparkwrightError
from sparkwright.core.files import read_text
from sparkwright.core.github import Repository

#: Events that only somebody with write access to the repository causes (GitHub: "Events that
#: trigger workflows").
TRUSTED_EVENTS = frozenset(
    ("push", "schedule", "workflow_dispatch", "repository_dispatch", "release")
)
#: Labels that GitHub gives to every self-hosted runner of our machines.
COMMON_LABELS = ("self-hosted", "linux", "ARM64", "X64")
CONFIG = Path("/etc/sparkwright")
UNIT = Path("/etc/systemd/system/sparkwright-runner.service")
USERS = ("sparkwright-runner", "sparkwright-server")

Workflow = dict[str, Any]


class RunnerError(SparkwrightError):
    """A machine of a lab cannot take a job, or should not."""

    references: ClassVar[Mapping[str, Advice]] = {
        "runner-busy": Advice(
            "A job runs on this machine, or another process waits for one.",
            "Wait for it to end. A machine has one GPU and does one job at a time.",
        ),
        "runner-disk": Advice(
            "The disk has no room for the file system that a job writes to.",
            "Remove what else fills the disk, or lower DISK in /etc/sparkwright/runner.env. No job"
            " was taken; the unit tries again.",
        ),
        "runner-exposed": Advice(
            "A setting or a workflow lets somebody without write access run a program on a "
            "machine of the lab, or lets any workflow sign a release.",
            "Change the settings named above (docs/howto/set-up-a-runner.md lists them). Keep jobs"
            " with labels of the lab to workflows started by schedule, push or workflow_dispatch.",
        ),
        "runner-unfit": Advice(
            "The machine is not set up as docs/howto/set-up-a-runner.md says, so what a job could"
            " do there was not reviewed.",
            "Follow docs/howto/set-up-a-runner.md for what is named above. No job was taken.",
        ),
        "runner-unregistered": Advice(
            "GitHub gave this machine no configuration for a job: no network, an expired token, a"
            " token without the right, or labels that GitHub refuses.",
            "Read GitHub's answer above. The token needs Administration: write on the repository."
            " The unit tries again.",
            exit_code=5,
        ),
        "runner-unresolved": Advice(
            "A value of runner.env that a person has to look up is still `unresolved`.",
            "Look it up as the comment in ci/runner/runner.env says, and enter it.",
        ),
    }


class RunnerFinding(msgspec.Struct, frozen=True, order=True):
    """
    The result of one check.

    Attributes:
        name: The check.
        message: The reason; it may be empty if the state is ``ok``.
    """

    name: str
    state: Literal["ok", "bad", "not-run"]
    message: str = ""


def _finding(name: str, problem: str, good: str = "") -> RunnerFinding:
    """Return the result of the check *name*, which is bad if there is a *problem*."""
    return RunnerFinding(name, "bad" if problem else "ok", problem or good)


def variables(path: Path) -> dict[str, str]:
    """
    Return the settings of a ``runner.env`` as `run-job` reads them; the last of a name counts.

    Raises:
        file-invalid: The file does not exist or is no text.
    """
    lines = read_text(path).splitlines()
    pairs = (line.partition("=") for line in lines if not line.startswith("#"))
    return {name: value for name, separator, value in pairs if separator}


# Workflow files.


def exposures(texts: Mapping[str, str], machine_labels: Collection[str]) -> list[RunnerFinding]:
    """
    Return each job that somebody without write access can start on a machine with *machine_labels*.

    Every doubt counts against the file: an unknown event, a computed ``runs-on``, a file that
    cannot be read. An ``if:`` is not considered, because one edit makes it wrong. A pull request
    that adds a workflow is not seen; the repository's settings keep it away.

    Args:
        texts: Name of a workflow file → its text.
    """
    workflows: dict[str, Workflow] = {}
    findings = []
    for name, text in texts.items():
        try:
            workflows[name] = _workflow(text, name)
        except FileError as error:
            reason = " ".join((error.what, *error.details))
            findings.append(
                RunnerFinding(f"workflow {name}", "bad", f"it cannot be read: {reason}")
            )
    ours = frozenset(label.lower() for label in machine_labels)
    for name, workflow in workflows.items():
        triggers = sorted(_untrusted_triggers(name, workflows))
        for job, reason in _reaching_jobs(workflow, ours) if triggers else ():
            problems = (f"{job}: {trigger}: {reason}" for trigger in triggers)
            findings += [RunnerFinding(f"workflow {name}", "bad", problem) for problem in problems]
    return sorted(findings)


def _workflow(text: str, name: str) -> Workflow:
    """Return a workflow with ``on`` as a mapping; YAML 1.1 reads that key as a truth value."""
    data = strict_yaml.parse(text, dict[Any, Any], name)
    events, jobs = data.get("on", data.get(True)), data.get("jobs")
    if isinstance(events, str):
        events = [events]
    if isinstance(events, list):
        events = dict.fromkeys(map(str, events))
    if not isinstance(events, dict) or not isinstance(jobs, dict):
        raise FileError("file-invalid", f"{name} has no readable `on` or `jobs`.")
    if not all(isinstance(job, dict) for job in jobs.values()):
        raise FileError("file-invalid", f"{name} has a job that is no mapping.")
    return {"on": events, "jobs": jobs}


def _untrusted_triggers(
    name: str, workflows: Mapping[str, Workflow], visited: frozenset[str] = frozenset()
) -> frozenset[str]:
    """
    Return the events by which a stranger starts the workflow *name*; a called workflow has the
    events of its callers.
    """
    if name in visited:
        return frozenset()
    events = workflows[name]["on"]
    triggers = set(map(str, events)) - TRUSTED_EVENTS - {"workflow_call"}
    for caller, workflow in workflows.items() if "workflow_call" in events else ():
        uses = (str(job.get("uses", "")) for job in workflow["jobs"].values())
        if any(use.startswith("./") and Path(use).name == name for use in uses):
            triggers |= _untrusted_triggers(caller, workflows, visited | {name})
    return frozenset(triggers)


def _reaching_jobs(workflow: Workflow, ours: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield each job of *workflow* that may run on a machine with the labels *ours*, and why."""
    for key, job in workflow["jobs"].items():
        if uses := job.get("uses"):
            if not str(uses).startswith("./"):
                yield key, "it calls a workflow of another repository, which chooses its runner"
            continue
        wanted = _wanted_labels(job.get("runs-on"))
        if wanted is None:
            yield key, "its runner is computed, or any of a group"
        elif common := sorted(wanted & ours):
            yield key, f"it asks for {', '.join(common)}"


def _wanted_labels(runs_on: Any) -> frozenset[str] | None:
    """Return the labels of ``runs-on`` in lower case; None if they are not written out."""
    labels = runs_on.get("labels") if isinstance(runs_on, dict) else runs_on
    if isinstance(labels, str):
        labels = [labels]
    if not isinstance(labels, list) or not labels:
        return None
    if any(not isinstance(label, str) or "${{" in label for label in labels):
        return None
    return frozenset(label.strip().lower() for label in labels)


# Settings of the repository.


class _Repository(msgspec.Struct, frozen=True):
    private: bool
    default_branch: str


class _Environment(msgspec.Struct, frozen=True):
    name: str
    protection_rules: list[dict[str, Any]] = []
    deployment_branch_policy: dict[str, Any] | None = None


class _Policy(msgspec.Struct, frozen=True):
    name: str
    type: str = "branch"


class _File(msgspec.Struct, frozen=True):
    name: str
    content: str = ""


def settings_findings(
    repository: Repository, settings: Mapping[str, str]
) -> Iterator[RunnerFinding]:
    """
    Yield what the settings of *repository* and its workflow files at GitHub let strangers do.

    Args:
        settings: Those of ``runner.env``: labels, and environments that reviewers guard.

    Raises:
        github-refused: The token may not read a setting.
        github-limited, github-unreachable: GitHub does not answer.
    """
    about = repository.request("GET", "", _Repository, "the repository")
    yield _fork_finding(repository, about.private)
    yield from _environment_findings(repository, settings, about.default_branch)
    runners = repository.pages(
        "/actions/runners", dict[str, Any], "registered runners", key="runners"
    )
    lasting = [str(runner.get("name")) for runner in runners if not runner.get("ephemeral")]
    problem = f"not for one job only: {', '.join(lasting)}" if lasting else ""
    yield _finding("registered runners", problem)
    folder = "/contents/.github/workflows"
    files = repository.request("GET", folder, list[_File], "workflow files")
    texts = {}
    for name in [file.name for file in files if file.name.endswith((".yml", ".yaml"))]:
        file = repository.request("GET", f"{folder}/{quote(name)}", _File, f"workflow {name}")
        texts[name] = base64.b64decode(file.content).decode("utf-8", "replace")
    exposed = exposures(texts, (*COMMON_LABELS, *settings.get("LABELS", "").split(",")))
    good = f"no stranger starts a job of {len(texts)} files there"
    yield from exposed or [RunnerFinding("workflows", "ok", good)]


def _fork_finding(repository: Repository, private: bool) -> RunnerFinding:
    """Return whether pull requests of strangers run before somebody approves them."""
    name, path = "workflows of forks", "/actions/permissions/fork-pr-"
    if private:
        path += "workflows-private-repos"
        runs = repository.request("GET", path, dict[str, Any], name)
        problem = "they run" if runs.get("run_workflows_from_fork_pull_requests", True) else ""
        return _finding(name, problem, "the repository is private, and forks run nothing")
    path += "contributor-approval"
    policy = repository.request("GET", path, dict[str, Any], name).get("approval_policy")
    strict = policy == "all_external_contributors"
    problem = "" if strict else f"approval is required of {policy} only"
    return _finding(name, problem, "the repository is public, and every outsider needs approval")


def _environment_findings(
    repository: Repository, settings: Mapping[str, str], branch: str
) -> Iterator[RunnerFinding]:
    """Yield whether the default *branch* alone may deploy to each environment."""
    listed = repository.pages("/environments", _Environment, "environments", key="environments")
    environments = {environment.name: environment for environment in listed}
    reviewed = settings.get("REVIEWED_ENVIRONMENTS", "").split()
    for name in dict.fromkeys((*settings.get("ENVIRONMENTS", "").split(), *reviewed)):
        environment = environments.get(name, _Environment(name))
        problems = {
            "it does not exist": name not in environments,
            "it has no required reviewers": name in reviewed
            and not any(
                rule.get("type") == "required_reviewers" for rule in environment.protection_rules
            ),
            f"others than the branch {branch} may deploy to it": name in environments
            and _deploying(repository, environment) != [_Policy(branch)],
        }
        message = next((problem for problem, applies in problems.items() if applies), "")
        yield _finding(f"environment {name}", message)


def _deploying(repository: Repository, environment: _Environment) -> list[_Policy]:
    """Return the patterns of the branches and tags that may deploy; none if GitHub lists none."""
    if not (environment.deployment_branch_policy or {}).get("custom_branch_policies"):
        return []
    path = f"/environments/{quote(environment.name, safe='')}/deployment-branch-policies"
    what = f"the branches of the environment {environment.name}"
    return list(repository.pages(path, _Policy, what, key="branch_policies"))


# The machine.


def machine_findings(root: Path) -> Iterator[RunnerFinding]:
    """
    Yield whether this machine is set up as docs/howto/set-up-a-runner.md says: the files that only
    root may write, and the users' rights. The script `run-job` checks the rest itself: its
    settings, its token and the archive of GitHub's runner.

    Args:
        root: The checkout that the unit starts the script of.
    """
    path = CONFIG / "runner.env"
    if not path.is_file():
        yield RunnerFinding("machine", "not-run", f"it takes no jobs: there is no {path}")
        return
    script = root / "ci" / "runner" / "run-job"
    writable = [
        str(file)
        for file in (CONFIG, UNIT, script)
        if file.exists() and (file.stat().st_uid or file.stat().st_mode & 0o022)
    ]
    problem = f"others than root can write {', '.join(writable)}" if writable else ""
    yield _finding("files of root", problem)
    for user in USERS:
        yield _user_finding(user)


def _user_finding(user: str) -> RunnerFinding:
    """Return whether *user* has no right but its own."""
    name = f"user {user}"
    try:
        own = pwd.getpwnam(user).pw_gid
    except KeyError:
        return RunnerFinding(name, "bad", "it does not exist")
    others = [group.gr_name for group in grp.getgrall() if user in group.gr_mem]
    if others or own == 0:
        return RunnerFinding(name, "bad", f"it is in {', '.join(others) or 'the group of root'}")
    if not shutil.which("sudo"):
        return RunnerFinding(name, "ok")
    if os.geteuid():
        return RunnerFinding(name, "not-run", "only root can read what sudo lets it do")
    rights = host_info.command_output("sudo", "-n", "-l", "-U", user)
    return _finding(name, "" if "not allowed" in rights else "it may use sudo")
