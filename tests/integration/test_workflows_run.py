"""
The workflows, every step of them, on the demo's three upstreams: what GitHub would run is run here, by bash, with the real verbs, each job
in a fresh container like GitHub's own.

The lab's repository is a checkout of this one whose only stack is the demo; the public one has the branch `published` and, at a local
server in the place of GitHub, the wheels. So the jobs plan with the real CMake, compile with the real nvcc, publish into a TUF repository,
and install what they published.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from tests.support import githubapi, githubwork, tufindex, workflows
from tests.support.texts import TEXT, edited
from tests.support.workflows import World, checkout, git
from tests.unit.conftest import Host, Index
from tests.unit.test_drift import Upstream
from tests.unit.test_serve import PROGRAM

from sparkwright.core import strict_yaml
from sparkwright.core.github import ADDRESS
from sparkwright.demo import upstreams
from sparkwright.forks.context import RunContext
from sparkwright.release import keys
from sparkwright.release.github_assets import UPLOADS
from sparkwright.release.repository import IndexFolder

# Ten minutes, so it has a session of its own.
pytestmark = [pytest.mark.toolchain, pytest.mark.workflows]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
URL = "https://releases.example/"
#: Wheels and verdicts of a ladder that a real GPU passed, as ``docs/rehearsal`` records it; unset until somebody has them here.
PASSED = os.environ.get("SPARKWRIGHT_PASSED", "")


@pytest.fixture(autouse=True)
def _own_gitconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Let git on this machine read repositories that belong to the user of the containers. GitHub's machines have no configuration that
    changes line ends; the one of the tests' home would.
    """
    (tmp_path / "gitconfig").write_text("[safe]\n\tdirectory = *\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", str(tmp_path / "gitconfig"))


@pytest.fixture(name="world")
def _world(demo_session: RunContext, tmp_path: Path) -> Iterator[World]:
    """Return GitHub, with the lab's repository and settings; its API answers on loopback."""
    demo = demo_session.project.root.parent
    with github(
        tmp_path, demo / "project", demo / "store", {upstreams.HOST: f"{demo}/upstreams/"}
    ) as made:
        yield made


@contextlib.contextmanager
def github(folder: Path, project: Path, store: Path, mirrors: Mapping[str, str]) -> Iterator[World]:
    """Yield GitHub with one public repository that is its own lab, in which *project* lies, on this machine."""
    bare = checkout(folder, project)
    secrets = first_index(folder, bare)
    with githubwork.serving(githubwork.World(bare)) as api:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("GITHUB_", "PYTEST_"))
        }
        environment |= {
            "SPARKWRIGHT_CACHE_DIR": str(store),
            "SPARKWRIGHT_STATE_DIR": str(folder / "state"),
        }
        variables = {"SPARKWRIGHT_CONFIG": strict_yaml.dump({"mirrors": {**mirrors, ADDRESS: api.url}})}  # fmt: skip
        yield World(folder / "world", bare, environment, variables, secrets, api=api)


def first_index(folder: Path, repository: Path, gpu: str = "12.1") -> dict[str, Any]:
    """Make the index as a person does, with the root key, and return the secrets of each environment."""
    keys.make(folder / "keys")
    branch = folder / "branch"
    with IndexFolder(branch / "index").changing(
        keys.load([folder / "keys"]), tufindex.ROLES
    ) as change:
        change.facts = msgspec.structs.replace(change.facts, url=URL, gpu=gpu)
    git(folder, "init", "--quiet", "--initial-branch=published", str(branch))
    git(branch, "add", "--all")
    git(branch, "commit", "--quiet", "-m", "The first index")
    git(branch, "push", "--quiet", str(repository), "published")
    held = {
        f"{name.upper()}_KEY": (folder / "keys" / f"{name}.pem").read_text()
        for name in ("online", "targets")
    }
    return {
        "release": held,
        "refresh": {"ONLINE_KEY": held["ONLINE_KEY"]},
        "public": {"PUBLIC_TOKEN": githubapi.TOKEN},
    }


class Lab:
    """
    A private lab, `acme/lab`, that publishes to `acme/wheels`; its jobs run in containers.

    Attributes:
        public: The bare repository of the branch `published`. *host*: GitHub's releases.
    """

    def __init__(self, folder: Path, demo: Path, host: githubapi.World) -> None:
        project, mirrored = demo / "project", folder / "upstreams"
        if (demo / "upstreams").exists():
            shutil.copytree(demo / "upstreams", mirrored, symlinks=True)
        mirrored.mkdir(exist_ok=True)
        # The demo's set is for the Python of this machine; the containers have another.
        policy = project / "ci" / "release.yaml"
        policy.write_text(re.sub(r'pythons: \["3.\d+"\]', 'pythons: ["3.12"]', policy.read_text()))
        lab = checkout(folder, project, "acme/lab")
        self.public, self.host = lab.with_name("wheels"), host
        git(folder, "init", "--quiet", "--bare", str(self.public))
        secrets = first_index(folder, self.public, yaml.safe_load(policy.read_text())["gpu"])
        addresses = {ADDRESS: host.api, UPLOADS: host.uploads, upstreams.HOST: f"{mirrored}/"}
        variables = {
            "SPARKWRIGHT_CONFIG": strict_yaml.dump({"mirrors": addresses}),
            "LAB_REPOSITORY": "acme/lab", "PUBLIC_REPOSITORY": "acme/wheels", "MODELS": "/srv/models",
        }  # fmt: skip
        self.world = World(
            folder / "world", lab, {}, variables, secrets, workflows.hosted_image(), (mirrored,)
        )
        self.world.api_url = host.api
        # Downloads and tools of an earlier test stay, so that not each downloads the compiler; nothing that was built does.
        cache = workflows.hosted_cache() / "sparkwright"
        for path in cache.glob("*"):
            if path.name not in ("downloads", "environments", "CACHEDIR.TAG"):
                shutil.rmtree(path)
        # The official wheel of the demo, which no package index has.
        for base in (demo / "store" / "downloads").glob("*/mini_vllm-*.whl"):
            shutil.copytree(base.parent, cache / "downloads" / base.parent.name, dirs_exist_ok=True)
        for path in (lab, self.public, mirrored, cache):
            self.world._own(path)

    def pipeline(self, **inputs: str) -> dict[str, str]:
        """Run the pipeline on hosted machines for the demo, as a candidate unless *inputs* say otherwise."""
        request = {"stack": "demo", "channel": "candidate", "recipes": "toy-cpu"}
        self.host.runs[self.world.run_id + 1] = githubapi.run()
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
        return next(
            one.said for one in self.world.steps[::-1] if (one.job, one.name) == (job, name)
        )


@pytest.fixture(name="lab")
def _lab(demo_session: RunContext, tmp_path: Path) -> Iterator[Lab]:
    """Return a lab whose public repository has an index without releases."""
    with githubapi.serve() as host:
        yield Lab(tmp_path, demo_session.project.root.parent, host)


@pytest.mark.timeout(3000)
def test_a_night_from_sources_to_an_installed_set(lab: Lab) -> None:
    """
    Without a GB10 the gate does not pass, so verified is refused; a candidate is built, audited, signed, sent, installed and pushed.

    The status page shows the release.
    """
    results = lab.pipeline()
    assert results == {
        "request": "success", "build": "success", "audit": "success", "gate": "failure", "decide": "success",
        "approve": "success", "publish": "success", "publish/sign": "success", "publish/push": "success", "record": "success",
    }, workflows.told(lab.world.steps)  # fmt: skip
    # There is no model to serve.
    reference = "Record the stock wheel's answers as the reference"
    assert lab.failed == [("gate", reference)], workflows.told(lab.world.steps)
    names = git(lab.public, "ls-tree", "-r", "--name-only", "published").splitlines()
    assert {"index/metadata/timestamp.json", "site/index.html", ".nojekyll"} <= set(names)
    assert not [name for name in names if name.endswith(".whl") and "sparkwright" not in name]
    sent = {one.name for release in lab.host.releases.values() for one in release.assets.values()}
    assert {name.partition("-")[0] for name in sent} == {
        "mini_vllm", "mini_flashinfer", "mini_cutlass",
    }  # fmt: skip
    made = {
        kind: Path(shutil.copytree(path, lab.world.folder / "night" / kind))
        for kind, path in lab.world.artifacts.items()
        if kind in ("wheels", "audited", "gated")
    }
    assert "demo.1" in lab.published("site/index.html")

    # The same wheels, as verified: refused before the gate, and by the decision before anything is signed.
    before = git(lab.public, "rev-parse", "published:index")
    results = lab.pipeline(channel="verified")
    assert (results["audit"], results["gate"], results["publish"], results["record"]) == (
        "failure", "skipped", "skipped", "success",
    )  # fmt: skip
    assert "These wheels are the candidate demo.1" in lab.said("audit", "Are these wheels published")
    stubbed(lab, made)
    results = lab.pipeline(channel="verified")
    lab.world.stub = {}
    assert (results["decide"], results["publish"], results["record"]) == (
        "failure", "skipped", "success",
    )  # fmt: skip
    assert "verified-refused" in lab.said("decide", "Decide")
    assert git(lab.public, "rev-parse", "published:index") == before
    _attacks(lab, made)
    _afterwards(lab)


def _afterwards(lab: Lab) -> None:
    """What release.yml does to the release that the night published: sign again, refuse to promote, yank with a reason."""
    flow, world = FOLDER / "release.yml", lab.world
    assert world.run(flow, event="schedule")["release"] == "success", workflows.told(
        world.steps[-12:]
    )
    # Of the first night.
    printed = world.summaries["decide"].splitlines()[1:6]
    chosen = dict(line.removeprefix("- ").split(": ", 1) for line in printed)
    chosen |= {"action": "promote", "release": "demo.1", "stack": "demo"}
    lab.host.runs[int(chosen["run"])]["head_branch"] = "topic"
    assert world.run(flow, inputs=chosen)["release"] == "failure"
    assert "is no ended run of pipeline.yml" in lab.said("release/sign", "Another run is one of the pipeline")
    lab.host.runs[int(chosen["run"])] = githubapi.run()
    assert world.run(flow, inputs=chosen)["release"] == "failure"
    assert "verified-refused" in lab.said("release/sign", "Sign")
    evil = 'it is "$(touch evil)" and `worse`'
    results = world.run(flow, inputs={"action": "yank", "release": "demo.1", "reason": evil})
    assert results["release"] == "success", workflows.told(world.steps[-12:])
    assert results["image"] == "skipped"
    assert not list(world.folder.rglob("evil"))


def stubbed(lab: Lab, artifacts: Mapping[str, Path]) -> None:
    """Put the files of *artifacts* (`wheels`, `audited`, `gated`) in the place of the next run's jobs that make them."""
    request = {"result": "success", "outputs": {"began": "2026-11-23T00:00:00Z"}}
    lab.world.stub = {"request": request, "gate": {"result": "skipped", "outputs": {}}}
    for number, (kind, folder) in enumerate(artifacts.items(), 900):
        name = f"{lab.world.run_id + 1}{number}"
        target = shutil.copytree(folder, lab.world.folder / "artifacts" / name / kind)
        digests = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in target.iterdir()
        }
        job, output = {"wheels": ("build", "wheels"), "audited": ("audit", "verdicts")}.get(
            kind, ("gate", "verdicts")
        )
        outputs = {output: name, "digests": json.dumps(digests)}
        lab.world.stub[job] = {"result": "success", "outputs": outputs}


def _attacks(lab: Lab, made: Mapping[str, Path]) -> None:
    """What lies between two jobs is exchanged, or a gate gives out a wheel: refused."""
    before = git(lab.public, "rev-parse", "published:index")

    def swap(job: str, name: str, workspace: Path) -> None:
        if (job, name) == ("decide", "The wheels are the builder's"):
            (wheel,) = (workspace / "wheels").glob("*vllm-*")
            wheel.write_bytes(wheel.read_bytes() + b"\0")

    lab.world.tamper = swap
    stubbed(lab, made)
    results = lab.pipeline()
    assert (results["decide"], results["publish"]) == ("failure", "skipped")
    refused = lab.said("decide", "The wheels are the builder's")
    assert "is not what the job that made it states: mini_vllm-" in refused

    lab.world.tamper = lambda *_: None
    gated = lab.world.folder / "hostile"
    shutil.copytree(made["gated"], gated)
    (gated / "mini_vllm-9.whl").write_bytes(b"another")
    stubbed(lab, {**made, "gated": gated})
    results = lab.pipeline()
    assert (results["decide"], results["publish"]) == ("failure", "skipped")
    assert "mini_vllm-9.whl is no verdict" in lab.said("decide", "Decide")
    lab.world.stub = {}
    assert git(lab.public, "rev-parse", "published:index") == before


@pytest.mark.timeout(900)
def test_of_two_who_change_the_index_at_once_the_second_is_refused(lab: Lab) -> None:
    """Whoever signed from a version that another night has replaced meanwhile pushes nothing; one who is alone does."""

    def overtake(job: str, name: str, workspace: Path) -> None:
        if (job, name) == ("release/push", "The new index in place of the old one"):
            other = workspace.parent / "other"
            git(other.parent, "clone", "--quiet", "--branch", "published", str(lab.public), "other")
            held = keys.load([lab.world.folder.parent / "keys"])
            with IndexFolder(other / "index").changing(held, tufindex.ROLES) as change:
                change.schedule_signing()
            git(other, "add", "--all")
            git(other, "commit", "--quiet", "-m", "Another night")
            git(other, "push", "--quiet", str(lab.public), "published")
            lab.world._own(lab.public)

    lab.world.tamper = overtake
    assert lab.world.run(FOLDER / "release.yml", event="schedule")["release"] == "failure", (
        workflows.told(lab.world.steps)
    )
    moved = lab.said("release/push", "The new index in place of the old one")
    assert "The index changed while this one was signed" in moved
    assert lab.world.steps[-1] == workflows.Step("release/push", "Push", None)
    assert git(lab.public, "log", "-1", "--format=%s", "published") == "Another night"
    lab.world.tamper = lambda *_: None
    assert lab.world.run(FOLDER / "release.yml", event="schedule")["release"] == "success"
    assert git(lab.public, "log", "-1", "--format=%s", "published").startswith("refresh")


@pytest.mark.timeout(3000)
def test_wheels_that_passed_what_their_policy_asks_are_verified(
    demo_session: RunContext, tmp_path: Path
) -> None:
    """
    A lab without a Spark, whose policy asks for the audit alone: the gate is left out, and wheels that passed are verified.

    A policy that asks for a GPU is answered by verdicts of a GPU alone (the next test).
    """
    demo = demo_session.project.root.parent
    policy = demo / "project" / "ci" / "release.yaml"
    policy.write_text(policy.read_text().replace("gates: [G0, G2]", "gates: [G0]"))
    with githubapi.serve() as host:
        lab = Lab(tmp_path, demo, host)
        del lab.world.variables["LAB_REPOSITORY"]
        results = lab.pipeline(channel="verified")
    assert results == {
        "request": "success", "build": "success", "audit": "success", "gate": "skipped", "decide": "success",
        "approve": "success", "publish": "success", "publish/sign": "success", "publish/push": "success", "record": "success",
    }, workflows.told(lab.world.steps)  # fmt: skip
    assert lab.failed == []
    # A dry run makes no index, so it has no fingerprint to show.
    assert "fingerprint" not in lab.said("decide", "Decide")
    assert "mini_vllm-" in lab.published("index/simple/verified/mini-vllm/index.html")


@pytest.mark.skipif(
    not PASSED,
    reason="not run: SPARKWRIGHT_PASSED names no folder with wheels that passed on a GPU",
)
def test_wheels_that_passed_for_real_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Wheels and verdicts of a real GPU go through decide, sign and push to the channel `verified`.

    The folder has `stack`, a file with its name, `wheels`, `audited`, `gated`, and `project`: the files of the lab's checkout that are for
    that GPU. For the rehearsal these are ci/release-9.0.yaml as ci/release.yaml, `arch: "9.0a"` and the label with `.sm90a` in stack.yaml, and
    the arch rules and the audit policy of 9.0a under the names without it.
    """
    folder = Path(PASSED)
    (wheel, *_) = (folder / "wheels").glob("vllm-*.whl")
    stack = (folder / "stack").read_text().strip()
    certificates = os.environ.get("SSL_CERT_FILE", "")
    with githubapi.serve() as host:
        # The set of a real wheel is resolved with the package index.
        monkeypatch.setenv("SSL_CERT_FILE", certificates)
        lab = Lab(tmp_path, folder, host)
        stubbed(lab, {kind: folder / kind for kind in ("wheels", "audited", "gated")})
        results = lab.pipeline(stack=stack, channel="verified")
        assert results["decide"] == results["publish"] == results["record"] == "success", (
            workflows.told(lab.world.steps)
        )
    assert wheel.name in {one.name for one in lab.host.releases[1].assets.values()}
    assert wheel.name.replace("+", "%2B") in lab.published("index/simple/verified/vllm/index.html")


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
    assert server.ready, Path("server.log").read_text()
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


def only_demo(world: World, name: str) -> Path:
    """Return the workflow with the demo in place of the stacks in its matrix; of the check only the job that has one."""
    made = yaml.safe_load((FOLDER / name).read_text("utf-8"))
    made["jobs"].pop("check", None)
    for job in made["jobs"].values():
        if "strategy" in job:
            job["strategy"]["matrix"]["stack"] = ["demo"]
    path = world.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(made, sort_keys=False))
    return path


def test_every_stack_is_tried(world: World) -> None:
    """
    Drift by a job that may write nothing; another one reads the reports and keeps the issue, and the reports stay. The job `series` of
    the check applies every series, for a fork's pull request as well, which has no secret.
    """
    results = world.run(only_demo(world, "drift.yml"), event="schedule")
    assert results == {"drift": "success", "report": "success"}, workflows.told(world.steps)
    assert json.loads(git(world.repository, "show", "published:drift/drift-demo.json"))["drift"]
    assert world.api is not None
    assert world.api.issues == [], "every patch of the demo applies, so there is nothing to tell"
    # A check has no settings of the lab; the demo's upstreams are on this disk alone.
    (config := world.folder / "config.yaml").write_text(world.variables["SPARKWRIGHT_CONFIG"])
    world.environment["SPARKWRIGHT_CONFIG"], world.secrets = str(config), {}
    results = world.run(only_demo(world, "check.yml"), event="pull_request")
    assert results == {"series": "success"}, workflows.told(world.steps)


def test_a_bump_is_a_pull_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer release on the index becomes one pull request with lock diff and range-diff, however often it runs."""
    offered = Index(tmp_path / "index")
    with upstreams.serve(offered.root) as address:
        monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", f"{address}/simple/")
        upstream = Upstream(Host(tmp_path / "host"), offered)
        upstream.host.work.commit({"a.txt": TEXT, "b.cu": TEXT}, "Begin")
        upstream.host.lock()
        upstream.release("1.0.0", {"version": b"1.0.0\n"})
        upstream.write("1.0.0")
        upstream.host.ours("first.patch", {"a.txt": edited((10, "first\n"))}, "Do the first")
        upstream.release("1.1.0", {"version": b"1.1.0\n", "b.cu": b"int b;\n"})
        host = upstream.host
        with github(tmp_path, host.root, host.cache, {host.url: str(host.path)}) as world:
            inputs = {"stack": host.stack, "fork": host.fork, "to": "newest"}
            results = [world.run(FOLDER / "bump.yml", inputs=inputs) for _ in range(2)]
            assert results == [{"bump": "success", "propose": "success"}] * 2, workflows.told(world.steps)
            assert world.api is not None
            [pull] = world.api.pulls
            changed = git(
                world.repository, "diff", "--name-only", "main", "bump/test-widget-1.1.0"
            ).splitlines()

    assert pull["title"] == "widget of test to 1.1.0"
    assert "Upstream changed 2 files: 1 compiled" in pull["body"]
    assert {"forks/test/stack.yaml", "forks/test/lock.yaml"} <= set(changed)
