"""
GitHub as far as a runner needs it, and a stand-in for GitHub's runner; both real programs that speak over a local socket.

The stand-in does what the program of github.com/actions/runner does on the outside: it reads ``ACTIONS_RUNNER_INPUT_JITCONFIG``, waits for
one job, asks the hook, says the same two lines on standard output, and ends. The real one is never run here.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from tests.support import loopback

from sparkwright.core import strict_yaml
from sparkwright.core.github import GitHub
from sparkwright.operate.runner import once, plan, policy
from sparkwright.operate.runner.ground import Ground
from sparkwright.operate.runner.policy import Policy, Settings

ROOT = Path(__file__).parents[2]
TOKEN = "github_pat_11RUNNERRUNNERRUNNER"
REPOSITORY = "acme/lab"
#: What GitHub says of a job that may run.
GOOD = {
    "GITHUB_REPOSITORY": REPOSITORY, "GITHUB_EVENT_NAME": "schedule", "GITHUB_REF": "refs/heads/main",
    "GITHUB_WORKFLOW_REF": f"{REPOSITORY}/.github/workflows/pipeline.yml@refs/heads/main", "GITHUB_JOB": "gate", "GITHUB_RUN_ID": "1",
}  # fmt: skip

STAND_IN = '''\
#!/usr/bin/python3
import base64, json, os, subprocess, sys, time, urllib.error, urllib.request
told = json.loads(base64.b64decode(os.environ.pop("ACTIONS_RUNNER_INPUT_JITCONFIG")))
say = lambda text: print("2026-11-22 12:00:00Z: " + text, flush=True)
say("Listening for Jobs")
while True:
    try:
        with urllib.request.urlopen(told["hub"] + "/job/" + told["name"], timeout=5) as reply:
            job = json.loads(reply.read() or b"null")
    except OSError:
        job = None
    if job:
        break
    time.sleep(0.05)
say("Running job: " + job["name"])
os.makedirs("_work", exist_ok=True)
told = {**os.environ, **job["told"]}
hook = subprocess.run(["bash", "-e", os.environ["ACTIONS_RUNNER_HOOK_JOB_STARTED"]], env=told).returncode if job["hook"] else 0
status = hook or subprocess.run(["bash", "-e", "-c", job["script"]], env=told, cwd="_work").returncode
say("Job " + job["name"] + " completed with result: " + ("Failed" if status else "Succeeded"))
'''


class Hub(loopback.Server):
    """
    The server.

    Attributes:
        jobs: What the next runners are given, in order. *registered*: the bodies of questions for a configuration.
        faults: Statuses that the next questions for a configuration are answered with, instead.
        busy: Numbers of runners that cannot be taken back. *removed*: those that were.
        refused: Paths that were asked for without the token.
    """

    def __init__(self, port: int = 0) -> None:
        super().__init__(_Handler, port)
        self.jobs: list[dict[str, Any]] = []
        self.registered: list[dict[str, Any]] = []
        self.configs: list[str] = []
        self.faults: list[int] = []
        self.busy: set[int] = set()
        self.removed: list[int] = []
        self.refused: list[str] = []
        self.private, self.approval = True, "first_time_contributors"

    def job(self, script: str, name: str = "gate", *, hook: bool = False, **told: str) -> None:
        """Queue a job of one step."""
        self.jobs.append({"name": name, "script": script, "hook": hook, "told": {**GOOD, **told}})


class _Handler(loopback.Handler):
    server: Hub

    def answer(self, status: int, record: Any = None, **headers: str) -> None:
        with contextlib.suppress(OSError):
            super().answer(status, record, **headers)

    def _serve(self) -> None:
        sent, hub, path = self.body(), self.server, self.path
        if path.startswith("/job/"):
            self.answer(200, hub.jobs.pop(0) if hub.jobs else None)
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            hub.refused.append(path)
            self.answer(401, {"message": "Bad credentials"})
        elif (self.command, path) == ("GET", f"/repos/{REPOSITORY}"):
            self.answer(200, {"private": hub.private})
        elif path.endswith("/fork-pr-contributor-approval"):
            self.answer(200, {"approval_policy": hub.approval})
        elif path == f"/repos/{REPOSITORY}/actions/runners/generate-jitconfig":
            self._configure(json.loads(sent))
        elif found := re.fullmatch(rf"/repos/{REPOSITORY}/actions/runners/(\d+)", path):
            busy = int(found[1]) in hub.busy
            hub.removed += [] if busy else [int(found[1])]
            self.answer(422, {"message": "Runner is currently running a job and cannot be deleted."}) if busy else self.answer(204)
        else:
            self.answer(404, {"message": "Not Found"})

    def _configure(self, asked: dict[str, Any]) -> None:
        hub = self.server
        hub.registered.append(asked)
        if hub.faults:
            self.answer(hub.faults.pop(0), {"message": "as the test asked"})
            return
        number = len(hub.registered)
        config = base64.b64encode(json.dumps({"hub": hub.url, "name": asked["name"], "number": number}).encode()).decode()
        hub.configs.append(config)
        self.answer(201, {"runner": {"id": number, "name": asked["name"]}, "encoded_jit_config": config})

    do_GET = do_POST = do_DELETE = _serve  # noqa: N815  http.server calls them so


@contextlib.contextmanager
def hub(port: int = 0) -> Iterator[Hub]:
    """Yield a hub that answers until the block ends."""
    server = Hub(port)
    with loopback.serving(server):
        yield server


def small(folder: Path, **changes: Any) -> Policy:
    """Return the reviewed policy with folders below *folder*, floors that any machine has, and short times."""
    reviewed = policy.load(ROOT / "ci" / "runner.yaml")
    names = {name: f"{folder}/{name}" for name in ("config", "state", "work", "models", "runner")}
    record = msgspec.to_builtins(reviewed)
    record["folders"] |= {**names, "program": sys.prefix, "scratch": []}
    record["room"] = {"work": 64, "work_floor": 1, "disk_floor": 1, "memory_floor": 1, "work_start": 2, "memory_start": 2}
    record["limits"] |= {"look": 0.05, "stop": 1.0, "job": 5.0, "idle": 5.0}
    record["registration"] = 0.01
    for name, value in changes.items():
        record[name] = {**record[name], **value} if isinstance(value, dict) else value
    return msgspec.convert(record, Policy)


def ground(folder: Path, url: str = "http://127.0.0.1:9", name: str = "spark-a", **changes: Any) -> Ground:
    """
    Return a machine below *folder*, set up by hand: its jobs run as this user, and are known by their environment.

    Its settings are on the disk, so that another process finds them by `found`.
    """
    rules = small(folder, **changes)
    settings = Settings(REPOSITORY, name, tuple(one.name for one in rules.labels), api=url)
    for one in ("config", "state", "work", "models", "runner"):
        (folder / one).mkdir(parents=True, exist_ok=True)
    (folder / "models" / "weights").write_text("0123")
    (folder / "runner" / "run.sh").write_text(STAND_IN)
    (folder / "runner" / "run.sh").chmod(0o755)
    config = folder / "config"
    hook = next(step for step in plan.steps(rules, settings) if step.name == "hook").apply[0]
    (config / plan.HOOK).write_text(hook.text)  # type: ignore[union-attr]  # a file
    (config / policy.POLICY).write_text(strict_yaml.dump(rules))
    (config / policy.SETTINGS).write_text(strict_yaml.dump(settings))
    return found(folder)


def marked(mark: str) -> list[int]:
    """Return the processes whose environment has a ``SPARKWRIGHT_UNIT`` that begins with *mark*, this one left out."""
    wanted, found = f"SPARKWRIGHT_UNIT={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:  # another user's, or gone
                continue
            if environment.startswith(wanted) or b"\0" + wanted in environment:
                found.append(int(folder.name))
    return found


def found(folder: Path) -> Ground:
    """Return the machine that `ground` made in *folder*."""
    config = folder / "config"
    rules, settings = strict_yaml.load(config / policy.POLICY, Policy), policy.settings(config / policy.SETTINGS)
    return Ground(
        policy=rules, settings=settings, config=config, uid=os.getuid(), gid=os.getgid(),
        whose=lambda: marked(f"runner {folder}/state"),
    )  # fmt: skip


def github(url: str, seconds: float = 5.0) -> GitHub:
    """Return the client, with the token that the hub knows."""
    return GitHub(url, TOKEN, seconds=seconds)


def main(words: list[str]) -> None:
    """Run in a process of its own what a test wants to kill: ``once FOLDER``."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    here = found(Path(words[1]))
    if words[0] == "once":
        once.once(here, github(here.settings.api))


if __name__ == "__main__":
    main(sys.argv[1:])

