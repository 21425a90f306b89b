#!/usr/bin/env python3
"""
Refuse jobs while somebody without write access could start one on a machine of the lab.

    check_settings.py               on such a machine, as root: its own repository, and the machine
    check_settings.py OWNER/NAME    anywhere: what GitHub's settings of that repository let in

The token is that of the machine, or elsewhere that of GITHUB_TOKEN. Nothing is changed. Workflow
files are held by the repository's own tests (tests/unit/test_workflows.py).
"""

from __future__ import annotations

import grp
import itertools
import json
import os
import pwd
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

HERE = Path(__file__).resolve().parent
CONFIG = Path(os.environ.get("SPARKWRIGHT_CONFIG_FOLDER", "/etc/sparkwright"))
UNIT = Path("/etc/systemd/system/sparkwright-runner.service")
SUDOERS = Path("/etc/sudoers")
USERS = ("sparkwright-runner", "sparkwright-server")
#: Records of a page, which is GitHub's most; bytes of an answer; and seconds for it.
PAGE, LARGEST, SECONDS = 100, 10_000_000, 60


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The token goes to no other host."""

    def redirect_request(self, *_: Any) -> None:
        """Follow nothing."""


class Repository:
    """The repository *name* at GitHub, asked with *token*."""

    def __init__(self, name: str, token: str) -> None:
        # Tests name an API on this machine.
        api = os.environ.get("SPARKWRIGHT_GITHUB_API", "https://api.github.com")
        if not re.fullmatch(r"https://[\w.:/-]+|http://127\.0\.0\.1:\d+", api):
            raise SystemExit(f"runner-unfit: {api} is no address of GitHub's API.")
        if not re.fullmatch(r"[\w-]+/[\w.-]+", name, re.ASCII):
            raise SystemExit(f"runner-unresolved: {name} is no OWNER/NAME of a repository.")
        self._url, self._token = f"{api}/repos/{name}", token
        self._opener = urllib.request.build_opener(_NoRedirect)

    def ask(self, path: str) -> Any:
        """Return the record at *path* below the repository; exit without one."""
        headers = {"Authorization": f"Bearer {self._token}"}
        request = urllib.request.Request(self._url + path, headers=headers)  # noqa: S310  see above
        try:
            with self._opener.open(request, timeout=SECONDS) as reply:
                return json.loads(reply.read(LARGEST))
        except (OSError, ValueError) as error:
            # Neither the token nor what was answered is shown.
            reason = type(error).__name__
            if isinstance(error, urllib.error.HTTPError):
                reason = str(error.code)
            sys.stderr.write(f"runner-unregistered: {reason} for {path or 'the repository'}.\n")
            raise SystemExit(5) from None

    def pages(self, path: str, key: str) -> Iterator[dict[str, Any]]:
        """Yield the records of a list."""
        for number in itertools.count(1):
            records = self.ask(f"{path}?per_page={PAGE}&page={number}")[key]
            yield from records
            if len(records) < PAGE:
                return


def settings_of(path: Path) -> dict[str, str]:
    """Return the settings of a ``runner.env`` as `run-job` reads them: the last of a name."""
    settings = {}
    for line in path.read_text("utf-8").splitlines():
        name, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            settings[name] = value
    return settings


def exposures(repository: Repository, settings: Mapping[str, str]) -> Iterator[str]:
    """Yield what the settings at GitHub let strangers do."""
    about = repository.ask("")
    branch, forks = about["default_branch"], "/actions/permissions/fork-pr-"
    if about["private"]:
        runs = repository.ask(f"{forks}workflows-private-repos")
        if runs["run_workflows_from_fork_pull_requests"]:
            yield "workflows of forks run"
    else:
        policy = repository.ask(f"{forks}contributor-approval")["approval_policy"]
        if policy != "all_external_contributors":
            yield f"workflows of forks: approval is required of {policy} only"
    listed = repository.pages("/environments", "environments")
    environments = {environment["name"]: environment for environment in listed}
    reviewed = settings.get("REVIEWED_ENVIRONMENTS", "").split()
    for name in dict.fromkeys((*settings.get("ENVIRONMENTS", "").split(), *reviewed)):
        if name not in environments:
            yield f"environment {name}: it does not exist"
            continue
        rules = [rule["type"] for rule in environments[name].get("protection_rules", ())]
        if name in reviewed and "required_reviewers" not in rules:
            yield f"environment {name}: it has no required reviewers"
        policies = environments[name].get("deployment_branch_policy") or {}
        deploying = []
        if policies.get("custom_branch_policies"):
            path = f"/environments/{quote(name, safe='')}/deployment-branch-policies"
            for pattern in repository.pages(path, "branch_policies"):
                deploying.append((pattern["name"], pattern.get("type", "branch")))
        if deploying != [(branch, "branch")]:
            yield f"environment {name}: others than the branch {branch} may deploy to it"
    for runner in repository.pages("/actions/runners", "runners"):
        if not runner.get("ephemeral"):
            yield f"the registered runner {runner['name']} is not for one job only"


def machine_faults() -> Iterator[str]:
    """Yield who besides root may change what root runs, and which rights the users of jobs have."""
    for path in (CONFIG, UNIT, *HERE.glob("*")):
        if path.exists() and (path.stat().st_uid or path.stat().st_mode & 0o022):
            yield f"others than root can write {path}"
    for user in USERS:
        try:
            own = pwd.getpwnam(user).pw_gid
        except KeyError:
            yield f"the user {user} does not exist"
            continue
        groups = [group.gr_name for group in grp.getgrall() if user in group.gr_mem]
        if groups or own == 0:
            yield f"the user {user} is in {', '.join(groups) or 'the group of root'}"
        for path in (SUDOERS, *SUDOERS.with_name("sudoers.d").glob("*")):
            if path.is_file() and user in path.read_text("utf-8", "replace"):
                yield f"{path} names the user {user}"


def main(name: str = "") -> None:
    """Check the repository *name*, or that of this machine; exit with what is wrong."""
    token, folder = os.environ.get("GITHUB_TOKEN", ""), HERE
    if not name:
        folder, path = CONFIG, CONFIG / "github-token"
        if not (path.is_file() and (folder / "runner.env").is_file()):
            raise SystemExit(f"runner-unfit: There is no runner.env or github-token in {CONFIG}.")
        token = path.read_text("utf-8")
    settings = settings_of(folder / "runner.env")
    repository = Repository(name or settings.get("REPOSITORY", "unresolved"), token.strip())
    faults = [f"runner-exposed: {fault}" for fault in exposures(repository, settings)]
    faults += [f"runner-unfit: {fault}" for fault in (() if name else machine_faults())]
    if faults:
        raise SystemExit("\n".join(faults))


if __name__ == "__main__":
    main(*sys.argv[1:2])
