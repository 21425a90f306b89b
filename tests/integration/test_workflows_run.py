"""
The workflows, every step of them, on the demo's three upstreams: what GitHub would run is run here, by bash, with the real verbs.

The repository is a checkout of this one whose only stack is the demo; so the jobs plan with the real CMake, compile with the real nvcc,
publish into a real branch, and install what they published.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
import yaml
from tests.support import githubwork, tufindex, workflows
from tests.support.texts import TEXT, edited
from tests.support.workflows import World, checkout, git
from tests.unit.conftest import Host, Index
from tests.unit.test_bump import Upstream

from sparkwright.core import strict_yaml
from sparkwright.core.github import ADDRESS
from sparkwright.demo import upstreams
from sparkwright.forks.context import RunContext
from sparkwright.release import keys
from sparkwright.release.repository import IndexFolder

# Five minutes, so it has a session of its own.
pytestmark = [pytest.mark.toolchain, pytest.mark.workflows]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
URL = "https://releases.example/"


@pytest.fixture(name="world")
def _world(
    demo_session: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    """Return GitHub, with the lab's repository and settings; its API answers on loopback."""
    # GitHub's machines have no configuration that changes line ends; the one of the tests' home would.
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    demo = demo_session.project.root.parent
    with github(
        tmp_path, demo / "project", demo / "store", {upstreams.HOST: f"{demo}/upstreams/"}
    ) as made:
        yield made


@contextlib.contextmanager
def github(folder: Path, project: Path, store: Path, mirrors: Mapping[str, str]) -> Iterator[World]:
    """Yield GitHub with the lab's repository, in which *project* lies, and the lab's settings."""
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
        variables = {
            "SPARKWRIGHT_CONFIG": strict_yaml.dump({"mirrors": {**mirrors, ADDRESS: api.url}}), "RELEASES_URL": URL, "FILES": "folder",
            "LAB_REPOSITORY": "acme/wheels", "MODELS": str(folder / "models"),
        }  # fmt: skip
        yield World(folder / "world", bare, environment, variables, secrets, api=api)


def first_index(folder: Path, repository: Path) -> dict[str, str]:
    """Make the index as a person does, with the root key, and return the keys that the workflows get."""
    keys.make(folder / "keys")
    branch = folder / "branch"
    with IndexFolder(branch / "index").changing(
        keys.load([folder / "keys"]), tufindex.ROLES
    ) as change:
        change.facts = msgspec.structs.replace(change.facts, url=URL)
    git(folder, "init", "--quiet", "--initial-branch=published", str(branch))
    git(branch, "add", "--all")
    git(branch, "commit", "--quiet", "-m", "The first index")
    git(branch, "push", "--quiet", str(repository), "published")
    return {
        f"{name.upper()}_KEY": (folder / "keys" / f"{name}.pem").read_text()
        for name in ("online", "targets")
    }


def published(world: World, name: str) -> str:
    """Return a file of the branch `published`."""
    return git(world.repository, "show", f"published:{name}")


@pytest.mark.timeout(1500)
def test_a_night_from_sources_to_an_installed_set(world: World) -> None:
    """
    Without a GB10 the gate does not pass, so verified is refused; a candidate is built, audited, published, installed and kept.

    The record of each night says what came of every stage, and the site tells of both.
    """
    inputs = {"stack": "demo", "channel": "candidate", "recipes": "toy-cpu"}
    results = world.run(FOLDER / "pipeline.yml", inputs=inputs)
    wrong = workflows.told([one for one in world.steps if one.job != "gate"])
    assert results == {
        "plan": "success", "build": "success", "audit": "success", "gate": "failure", "decide": "success", "publish": "success",
        "verify": "success", "index": "success",
    }, wrong  # fmt: skip
    # There is no model to serve.
    [refused] = [one for one in world.steps if one.job == "gate" and one.ended]
    assert refused.name == "Record the stock wheel's answers as the reference", refused.said
    listed = git(world.repository, "ls-tree", "-r", "--name-only", "published").splitlines()
    assert {"site/index.html", "site/runs.html"} <= set(listed)
    assert "demo.1" in published(world, "site/index.html")
    [night] = [json.loads(published(world, name)) for name in listed if name.startswith("nights/")]
    states = {one["name"]: one["state"] for one in night["stages"]}
    assert states["gate"] == "fail"
    assert {states[name] for name in ("plan", "build", "audit", "publish", "verify")} == {"pass"}
    assert (world.folder / "pages" / "metadata" / "timestamp.json").is_file()
    assert (world.folder / "pages" / "site" / "index.html").is_file()

    # The same night again, as verified: refused before anything is signed, and that is recorded, too.
    before = git(world.repository, "rev-parse", "published:index")
    results = world.run(FOLDER / "pipeline.yml", inputs={**inputs, "channel": "verified"})
    assert (results["decide"], results["publish"], results["verify"]) == (
        "failure",
        "skipped",
        "skipped",
    )
    assert "verified-refused" in next(
        one.said for one in reversed(world.steps) if one.name == "Decide"
    )
    assert results["index"] == "success", workflows.told(world.steps)
    assert git(world.repository, "rev-parse", "published:index") == before
    listed = git(world.repository, "ls-tree", "-r", "--name-only", "published").splitlines()
    assert len([name for name in listed if name.startswith("nights/")]) == 2

    _afterwards(world)


def _afterwards(world: World) -> None:
    """What release.yml does to the release that the night published: sign again, refuse to promote, yank with a reason."""
    flow = FOLDER / "release.yml"
    assert world.run(flow, event="schedule")["release"] == "success", workflows.told(
        world.steps[-12:]
    )
    shutil.copytree(world.folder / "artifacts" / "2", world.folder / "artifacts" / "77")
    results = world.run(flow, inputs={"action": "promote", "release": "demo.1", "run": "77"})
    assert results["release"] == "failure"
    assert "verified-refused" in next(
        one.said for one in reversed(world.steps) if one.name == "Promote"
    )
    evil = 'it is "$(touch evil)" and `worse`'
    results = world.run(flow, inputs={"action": "yank", "release": "demo.1", "reason": evil})
    assert results["release"] == "success", workflows.told(world.steps[-12:])
    assert results["image"] == "skipped"
    assert not list(world.folder.rglob("evil"))
    world.run(flow, inputs={"action": "prune", "reason": "a drill"})
    step = next(
        one for one in reversed(world.steps) if one.name == "Thin out" and one.ended is not None
    )
    assert step.ended in (0, 1, 4, 5), step.said
    assert "usage:" not in step.said


def test_drift_is_told_in_one_issue(world: World) -> None:
    """Every stack is tried by a job that may write nothing; another one reads the reports and keeps the issue, and the reports stay."""
    flow = only_demo(world, "drift.yml")
    results = world.run(flow, event="schedule")
    assert results == {"drift": "success", "report": "success"}, workflows.told(world.steps)
    assert json.loads(published(world, "drift/drift-demo.json"))["drift"]
    assert world.api is not None
    assert world.api.issues == [], "every patch of the demo applies, so there is nothing to tell"
    assert any(
        name.startswith("nights/")
        for name in git(world.repository, "ls-tree", "-r", "--name-only", "published").splitlines()
    )


def test_a_bump_is_a_pull_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer release on the index becomes one pull request with lock diff, range-diff and predicted recompiles, however often it runs."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
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
            assert world.run(FOLDER / "bump.yml", inputs=inputs) == {"bump": "success"}, (
                workflows.told(world.steps)
            )
            assert world.run(FOLDER / "bump.yml", inputs=inputs) == {"bump": "success"}, (
                workflows.told(world.steps)
            )
            assert world.api is not None
            [pull] = world.api.pulls
            changed = git(
                world.repository, "diff", "--name-only", "main", "bump/test-widget-1.1.0"
            ).splitlines()

    assert pull["title"] == "widget of test to 1.1.0"
    assert "at least 1 of 1 units are compiled anew" in pull["body"]
    assert {"forks/test/stack.yaml", "forks/test/lock.yaml"} <= set(changed)


def test_the_series_of_the_check(world: World) -> None:
    """The job `series` of the check applies every series."""
    made = yaml.safe_load((FOLDER / "check.yml").read_text("utf-8"))
    assert (
        next(step["run"] for step in made["jobs"]["check"]["steps"] if "run" in step) == ".ci/run"
    )
    flow = only_demo(world, "check.yml", drop="check")
    # A check has no settings of the lab; the demo's upstreams are on this disk alone.
    world.folder.mkdir(parents=True, exist_ok=True)
    (config := world.folder / "config.yaml").write_text(world.variables["SPARKWRIGHT_CONFIG"])
    world.environment["SPARKWRIGHT_CONFIG"] = str(config)
    assert world.run(flow, event="push") == {"series": "success"}, workflows.told(world.steps)


def only_demo(world: World, name: str, drop: str = "") -> Path:
    """Return the workflow with the demo in place of the stacks in its matrix, and without the job *drop*."""
    made = yaml.safe_load((FOLDER / name).read_text("utf-8"))
    made["jobs"].pop(drop, None)
    for job in made["jobs"].values():
        if "stack" in (matrix := job.get("strategy", {}).get("matrix", {})):
            matrix["stack"] = ["demo"]
    path = world.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(made, sort_keys=False))
    return path
