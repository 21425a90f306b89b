"""
The workflows, every step of them, on the demo's three upstreams: what GitHub would run is run here, by bash, with the real verbs, each job
in a fresh container like GitHub's own.

The lab's repository is a checkout of this one whose only stack is the demo; the public one has the branch `published` and, at a local
server in the place of GitHub, the wheels. So the jobs plan with the real CMake, compile with the real nvcc, publish into a TUF repository,
and install what they published.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml
from tests.support import githubapi, tufindex, workflows
from tests.support.workflows import ROOT, World, checkout, git
from tests.unit.test_serve import PROGRAM

from sparkwright.core import strict_yaml
from sparkwright.demo import upstreams
from sparkwright.forks.context import RunContext
from sparkwright.release import keys
from sparkwright.release.repository import IndexFolder

# Ten minutes, so it has a session of its own.
pytestmark = [pytest.mark.toolchain, pytest.mark.workflows]

FOLDER = ROOT / ".github" / "workflows"
URL = "https://releases.example/"


class Lab:
    """
    A lab that publishes to `acme/wheels`; its jobs run in containers.

    Attributes:
        public: The bare repository of the branch `published`.
    """

    def __init__(self, folder: Path, demo: Path, host: githubapi.World) -> None:
        project = demo / "project"
        mirrored = folder / "upstreams"
        if (demo / "upstreams").exists():
            shutil.copytree(demo / "upstreams", mirrored, symlinks=True)
        mirrored.mkdir(exist_ok=True)
        # The demo's set is for the Python of this machine; the containers have another.
        policy = project / "ci" / "release.yaml"
        policy.write_text(re.sub(r'pythons: \["3.\d+"\]', 'pythons: ["3.12"]', policy.read_text()))
        repository = checkout(folder, project, "acme/lab")
        self.public = repository.with_name("wheels")
        git(folder, "init", "--quiet", "--bare", str(self.public))
        variables = {
            "SPARKWRIGHT_CONFIG": strict_yaml.dump({"mirrors": {upstreams.HOST: f"{mirrored}/"}}),
            "LAB_REPOSITORY": "acme/lab", "PUBLIC_REPOSITORY": "acme/wheels", "MODELS": "/srv",
        }  # fmt: skip
        self.world = World(folder / "world", repository, variables, first_index(folder, self.public, yaml.safe_load(policy.read_text())["gpu"]), (mirrored,), host.url, host.gh(folder / "gh"))
        # Downloads and tools of an earlier test stay, so that not each downloads the compiler; nothing that was built does.
        cache = workflows.hosted_cache() / "sparkwright"
        for path in cache.glob("*"):
            if path.name not in ("downloads", "environments", "CACHEDIR.TAG"):
                shutil.rmtree(path)
        # The official wheel of the demo, which no package index has.
        for base in (demo / "store" / "downloads").glob("*/mini_vllm-*.whl"):
            shutil.copytree(base.parent, cache / "downloads" / base.parent.name, dirs_exist_ok=True)
        for path in (mirrored, cache):
            workflows.own(path)
        workflows.share(self.public)
        workflows.share(self.world.gh.parent)

    def pipeline(self, **inputs: str) -> dict[str, str]:
        """Run the pipeline on hosted machines for the demo, as a candidate unless *inputs* say otherwise."""
        request = {"stack": "demo", "channel": "candidate", "recipes": "toy-cpu"}
        return self.world.run(FOLDER / "pipeline.yml", inputs={**request, **inputs})

    def published(self, name: str) -> str:
        """Return a file of the branch `published`."""
        return git(self.public, "show", f"published:{name}")

    @property
    def failed(self) -> list[tuple[str, str]]:
        """The steps of the last runs that failed: job and name."""
        return [(step.job, step.name) for step in self.world.steps if step.ended]

    def said(self, job: str, name: str) -> str:
        """Return what the last such step printed."""
        return next(one.said for one in self.world.steps[::-1] if (one.job, one.name) == (job, name))


def first_index(folder: Path, repository: Path, gpu: str) -> dict[str, dict[str, str]]:
    """Make the index as a person does, with the root key, and return the secrets of each environment."""
    keys.make(folder / "keys")
    branch = folder / "branch"
    with IndexFolder(branch / "index").changing(keys.load([folder / "keys"]), tufindex.ROLES) as change:
        change.facts = msgspec.structs.replace(change.facts, url=URL, gpu=gpu)
    git(folder, "init", "--quiet", "--initial-branch=published", str(branch))
    git(branch, "add", "--all")
    git(branch, "commit", "--quiet", "-m", "The first index")
    git(branch, "push", "--quiet", str(repository), "published")
    held = {f"{name.upper()}_KEY": (folder / "keys" / f"{name}.pem").read_text() for name in ("online", "targets")}
    return {"release": held, "refresh": {"ONLINE_KEY": held["ONLINE_KEY"]}, "public": {"PUBLIC_TOKEN": githubapi.TOKEN}}


@pytest.fixture(name="host")
def _host() -> Iterator[githubapi.World]:
    """Return GitHub's releases and runs."""
    with githubapi.serve() as host:
        yield host


@pytest.fixture(name="lab")
def _lab(demo_session: RunContext, tmp_path: Path, host: githubapi.World) -> Lab:
    """Return a private lab whose public repository has an index without releases."""
    return Lab(tmp_path, demo_session.project.root.parent, host)


@pytest.mark.timeout(3000)
def test_a_night_from_sources_to_an_installed_set(lab: Lab, host: githubapi.World) -> None:
    """
    Without a GB10 the gate does not pass, so verified is refused; a candidate is built, audited, signed, sent, installed and pushed.
    """
    # As verified: refused by the machine that would gate, before anything is built.
    before = git(lab.public, "rev-parse", "published:index")
    results = lab.pipeline(channel="verified")
    ready = "This machine can gate what is asked for"
    assert lab.failed == [("ready", ready)], workflows.told(lab.world.steps)
    assert (results["build"], results["publish"]) == ("skipped", "skipped")
    assert "request-unfit" in lab.said("ready", ready)
    assert git(lab.public, "rev-parse", "published:index") == before

    # There is no model to serve.
    results = lab.pipeline()
    assert lab.failed[-1] == ("gate", "Has anything changed since the last verdicts")
    assert results == {
        "request": "success", "ready": "skipped", "build": "success", "audit": "success", "gate": "failure", "decide": "success", "approve": "success",
        "publish": "success", "publish/sign": "success", "publish/push": "success",
    }, workflows.told(lab.world.steps)  # fmt: skip
    assert not re.search(r"/mini_.*\.whl$", git(lab.public, "ls-tree", "-r", "--name-only", "published"), re.MULTILINE)
    sent = {path.name.partition("-")[0] for path in host.downloads.glob("acme/wheels/releases/download/*/*.whl")}
    assert sent == {"mini_vllm", "mini_flashinfer", "mini_cutlass"}

    # The release is signed again, not promoted, and yanked with a reason.
    flow, world = FOLDER / "release.yml", lab.world
    assert world.run(flow, event="schedule")["release"] == "success", workflows.told(world.steps[-12:])
    # Of the first night.
    chosen = dict(re.findall(r"^- (\S+): (.*)$", world.summaries["decide"], re.MULTILINE)[:5])
    chosen |= {"action": "promote", "release": "demo.1", "stack": "demo"}
    for branch, step, said in (
        ("topic", "Another run is one of the pipeline", "is no ended run of pipeline.yml"), ("main", "Sign", "verified-refused"),
    ):  # fmt: skip
        host.runs[int(chosen["run"])] = githubapi.run(head_branch=branch)
        assert world.run(flow, inputs=chosen)["release"] == "failure"
        assert said in lab.said("release/sign", step)
    evil = 'it is "$(touch evil)" and `worse`'
    results = world.run(flow, inputs={"action": "yank", "release": "demo.1", "reason": evil})
    assert results["release"] == "success", workflows.told(world.steps[-12:])
    assert not list(world.folder.rglob("evil"))


@pytest.mark.timeout(900)
def test_of_two_who_change_the_index_at_once_the_second_is_refused(lab: Lab) -> None:
    """Whoever signed from a version that another night has replaced meanwhile pushes nothing; one who is alone does."""

    def overtake(job: str, name: str, workspace: Path) -> None:
        if (job, name) == ("release/push", "The new index in place of the old one"):
            git(workspace.parent, "clone", "--quiet", "--branch", "published", str(lab.public), "other")
            other, held = workspace.parent / "other", keys.load([lab.world.folder.parent / "keys"])
            with IndexFolder(other / "index").changing(held, tufindex.ROLES) as change:
                change.schedule_signing()
            git(other, "add", "--all")
            git(other, "commit", "--quiet", "-m", "Another night")
            git(other, "push", "--quiet", str(lab.public), "published")
            workflows.share(lab.public)

    lab.world.tamper = overtake
    assert lab.world.run(FOLDER / "release.yml", event="schedule")["release"] == "failure", (
        workflows.told(lab.world.steps)
    )
    assert "The index changed while this one was signed" in lab.said("release/push", "The new index in place of the old one")
    assert lab.world.steps[-1] == workflows.Step("release/push", "Push", None)
    lab.world.tamper = lambda *_: None
    assert lab.world.run(FOLDER / "release.yml", event="schedule")["release"] == "success"
    assert git(lab.public, "log", "-1", "--format=%s", "published").startswith("refresh")


@pytest.mark.timeout(3000)
def test_wheels_that_passed_what_their_policy_asks_are_verified(demo_session: RunContext, tmp_path: Path, host: githubapi.World) -> None:
    """A lab without a Spark, whose policy asks for the audit alone: the gate is left out, and wheels that passed are verified."""
    demo = demo_session.project.root.parent
    policy = demo / "project" / "ci" / "release.yaml"
    policy.write_text(policy.read_text().replace("gates: [G0, G2]", "gates: [G0]"))
    lab = Lab(tmp_path, demo, host)
    del lab.world.variables["LAB_REPOSITORY"]
    results = lab.pipeline(channel="verified")
    assert {key for key, result in results.items() if result != "success"} == {"ready", "gate"}, workflows.told(lab.world.steps)
    assert (results["gate"], lab.failed) == ("skipped", [])
    # A dry run makes no index, so it has no fingerprint to show.
    assert "fingerprint" not in lab.said("decide", "Decide")
    assert "mini_vllm-" in lab.published("index/simple/verified/mini-vllm/index.html")


#: Starts a server as the gate does, and tries what a hostile one would.
SERVED = """
import json, os, sys
from pathlib import Path
from urllib.request import urlopen
from sparkwright.bench.server.launch import LaunchPlan, Server
verdicts = Path("dist/vllm-1.verdicts.json").absolute()
verdicts.parent.mkdir()
verdicts.write_text("mine")
variables = {"PYTHONPATH": os.path.abspath("modules"), "VERDICTS": str(verdicts), "GATE": str(os.getpid())}
plan = LaunchPlan(Path(sys.executable), Path("model"), (), variables, "toy", 60, grace=0.5, user="sparkwright-server")
with Server(plan, Path("server.log")) as server:
    assert not server.failure, Path("server.log").read_text()
    facts = json.load(urlopen(f"{server.url}/environment"))
    processes = server.processes()
    print({process.username() for process in processes}, facts["HOME"], facts["GITHUB_OUTPUT"] if "GITHUB_OUTPUT" in facts else "")
assert not any(process.is_running() for process in processes)
print(verdicts.read_text(), Path("server.log").read_text())
"""
#: What the server does before it listens.
HOSTILE = """
for path in (os.environ["VERDICTS"], "/proc/" + os.environ["GATE"] + "/mem", os.path.expanduser("~runner/.bashrc")):
    try:
        open(path, "r+b")
        print("written:", path, flush=True)
    except OSError as error:
        print(type(error).__name__, flush=True)
print("sudo:", subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode, flush=True)
"""


@pytest.mark.timeout(900)
def test_a_server_under_test_cannot_write_verdicts(lab: Lab) -> None:
    """The server of a gate runs as another user: neither files nor processes of the gate are its own, and it ends with the gate."""
    program = PROGRAM.format(say="ready", before=HOSTILE, model="toy", health=200)
    script = "mkdir -p modules/vllm/entrypoints/cli\n"
    script += f"cat >modules/vllm/entrypoints/cli/main.py <<'END'\n{program}\nEND\npython - <<'END'\n{SERVED}\nEND\n"
    made = yaml.safe_load((FOLDER / "pipeline.yml").read_text("utf-8"))
    steps = [*made["jobs"]["gate"]["steps"][:3], {"name": "Serve", "run": script}]
    flow = lab.world.folder.parent / "serve.yml"
    started = {"name": "serve", True: {"workflow_dispatch": {}}, "jobs": {"gate": {"steps": steps}}}
    flow.write_text(yaml.safe_dump(started))

    assert lab.world.run(flow) == {"gate": "success"}, workflows.told(lab.world.steps)
    users, *rest = lab.said("gate", "Serve").splitlines()
    home = Path(workflows.HOME).with_name("sparkwright-server")
    assert users == f"{{'sparkwright-server'}} {home} "
    assert rest[0] == "mine ready"
    assert not [line for line in rest if "written" in line]
    assert "sudo: 1" in rest


@pytest.mark.timeout(900)
def test_upkeep(lab: Lab) -> None:
    """
    Drift: every stack is tried by a job that may write nothing, and it fails where a patch is of no use. Check: a fork's pull request
    applies every series, and has no secret.
    """
    results = lab.world.run(only_demo(lab.world, "drift.yml"), event="schedule")
    assert results == {"drift": "success"}, workflows.told(lab.world.steps)
    flow = only_demo(lab.world, "check.yml")
    lab.world.secrets = {}
    # A check has no settings of the lab; the demo's upstreams are on this disk alone.
    flow.write_text(flow.read_text().replace("STACK:", "SITE_CONFIG: ${{ vars.SPARKWRIGHT_CONFIG }}\n      STACK:"))
    results = lab.world.run(flow, event="pull_request")
    assert results == {"series": "success"}, workflows.told(lab.world.steps)


def only_demo(world: World, name: str) -> Path:
    """Return the workflow with the demo in place of the stacks in its matrix, and without the job `check`."""
    flow = yaml.safe_load((FOLDER / name).read_text("utf-8"))
    flow["jobs"].pop("check", None)
    for job in flow["jobs"].values():
        if "strategy" in job:
            job["strategy"]["matrix"]["stack"] = ["demo"]
    (path := world.folder / name).parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(flow, sort_keys=False))
    return path
