"""GitHub's API as far as a runner and the check of its settings need it: settings, workflow files, and configurations for one job."""

import base64
import contextlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support import loopback

TOKEN = "github_pat_11RUNNERRUNNERRUNNER"
REPOSITORY = "acme/lab"
#: Branches of one's own choice may deploy; of every environment these are MAIN.
CHOSEN: dict[str, Any] = {
    "deployment_branch_policy": {"protected_branches": False, "custom_branch_policies": True}
}
MAIN = {"branch_policies": [{"id": 1, "name": "main", "type": "branch"}]}
ENVIRONMENTS = ("spark", "release", "refresh", "public", "approve")


class Hub(loopback.Server):
    """
    The server.

    Attributes:
        settings: Path below the repository → the answer; a number is the status of a refusal.
        jobs: Scripts; the next registrations get one each as their configuration.
        registered: The bodies of requests for a configuration.
        leaks: Command lines that held the token during such a request.
        answer: What is answered to it instead, as status and record.
    """

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.settings = good_settings()
        self.jobs: list[str] = []
        self.registered: list[dict[str, Any]] = []
        self.leaks: list[bytes] = []
        self.answer: tuple[int, Any] | None = None


def good_settings() -> dict[str, Any]:
    """Return the settings of a public repository that no stranger gets into, without a workflow."""
    environments = [{**CHOSEN, "name": name} for name in ENVIRONMENTS]
    environments[-1]["protection_rules"] = [{"type": "required_reviewers"}]
    return {
        "": {"private": False, "default_branch": "main"},
        "/actions/permissions/fork-pr-contributor-approval": {"approval_policy": "all_external_contributors"},
        "/actions/permissions/fork-pr-workflows-private-repos": {"run_workflows_from_fork_pull_requests": False},
        "/environments": {"environments": environments},
        **{f"/environments/{name}/deployment-branch-policies": MAIN for name in ENVIRONMENTS},
        "/actions/runners": {"runners": [{"name": "spark-1", "ephemeral": True}]},
        "/contents/.github/workflows": [],
    }  # fmt: skip


class _Handler(loopback.Handler):
    server: Hub

    def do_GET(self) -> None:  # noqa: N802  http.server calls it so
        parts = urlsplit(self.path)
        path = unquote(parts.path).removeprefix(f"/repos/{REPOSITORY}")
        record = self.server.settings.get(path, 404)
        if path == "/actions/runners" and isinstance(record, dict):
            record = {"runners": loopback.page(record["runners"], parse_qs(parts.query))}
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            record = 401
        self.answer(*(record, {"message": "refused"}) if isinstance(record, int) else (200, record))

    def do_POST(self) -> None:  # noqa: N802
        hub, body = self.server, json.loads(self.body())
        hub.registered.append(body)
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                hub.leaks += [line for line in [path.read_bytes()] if TOKEN.encode() in line]
        assert self.path == f"/repos/{REPOSITORY}/actions/runners/generate-jitconfig"
        assert self.headers["Authorization"] == f"Bearer {TOKEN}"
        script = hub.jobs.pop(0) if hub.jobs else "sleep 600"
        reply = (
            201,
            {"runner": {"id": 1}, "encoded_jit_config": base64.b64encode(script.encode()).decode()},
        )
        self.answer(*(hub.answer or reply))
