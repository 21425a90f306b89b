"""
May this job run here? Asked by GitHub's runner before the first step of a job, as the job's user.

What it goes by is said by GitHub and cannot be set by a workflow. It is not a wall: a workflow's own ``env`` reaches the shell that starts
the hook, so a prepared one may get past it. Therefore public repositories are refused, and the user that jobs run as can do so little.
"""

from __future__ import annotations

from collections.abc import Mapping

from sparkwright.core.console import one_line
from sparkwright.operate.errors import LabError
from sparkwright.operate.runner.policy import Policy, Settings, allowed

#: What GitHub says of a job ("Default environment variables").
TOLD = ("GITHUB_REPOSITORY", "GITHUB_EVENT_NAME", "GITHUB_REF", "GITHUB_WORKFLOW_REF", "GITHUB_JOB", "GITHUB_RUN_ID")


def admitted(told: Mapping[str, str], policy: Policy, settings: Settings) -> str:
    """Return why a job of which GitHub says *told* may not run here; nothing where it may."""
    repository, event = told.get("GITHUB_REPOSITORY", ""), told.get("GITHUB_EVENT_NAME", "")
    ref, workflow = told.get("GITHUB_REF", ""), told.get("GITHUB_WORKFLOW_REF", "")
    if repository.lower() != settings.repository.lower():
        return f"it is of {one_line(repository, 100) or 'no repository'}, not of {settings.repository}"
    if event not in policy.events:
        return f"it was started by {one_line(event, 100) or 'nothing known'}, which a stranger may be able to cause"
    if not allowed(ref, policy.refs):
        return f"it is of {one_line(ref, 100) or 'no branch'}, from which no job comes here"
    file, _, at = workflow.partition("@")
    if not file.lower().startswith(f"{settings.repository.lower()}/.github/workflows/") or not allowed(at, policy.refs):
        return f"its workflow is {one_line(workflow, 200) or 'unknown'}, not one of this repository's own branches"
    return ""


def admit(told: Mapping[str, str], policy: Policy, settings: Settings) -> None:
    """Raise `runner-refused` if the job may not run here."""
    if reason := admitted(told, policy, settings):
        raise LabError("runner-refused", "This job does not run here.", details=[reason])
