"""What is real: the releases of stack 2026.11 as it is reviewed, fetched and patched; and the demo's wheels, which climb the real ladder up to publish."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.refusals import refusal
from tests.support import fake_openai_server, refserved, standin

from sparkwright.builder import pipeline, toolchain, workspace
from sparkwright.cherry_picks import patch
from sparkwright.cli import climb
from sparkwright.core import store, strict_yaml
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.gates import numerics
from sparkwright.gates.core.ladder import GATES, SERVED, STOPPED, host_facts
from sparkwright.gates.core.server_under_test import GateOptions
from sparkwright.release import keys, policy
from sparkwright.release.publisher import Publisher

ROOT = Path(__file__).parents[2]
PROJECT = Project(ROOT, "2026.11")


@pytest.fixture(name="context")
def _context(user_store: store.Store) -> RunContext:
    return RunContext(PROJECT, user_store, tuple(PROJECT.spec.forks), ROOT / "dist")


@pytest.mark.network
@pytest.mark.parametrize("fork", PROJECT.spec.forks)
def test_what_the_lock_names_is_patched_and_rewritten(context: RunContext, fork: str) -> None:
    """The index delivers it; each patch of the series and each rule is applied once, and changes only the files that they name."""
    locked = context.lock.forks[fork]
    made, file = workspace.source_tree(context, fork), locked.sdist or locked.wheel
    patches = patch.load_folder(PROJECT.series_folder(fork))
    rules = workspace.rules_of(context, fork).rules
    trees = [made.source.tree, *(step.tree for step in made.steps)]
    named = {path for patch in patches for path in patch.files} | {site.file for site in made.sites}

    assert file
    assert made.source.tree == file.tree
    # The commit, once `lock` has recorded that the archive proves it.
    assert made.source.pin == (locked.git.commit if locked.proof and locked.git else file.sha256)
    assert [step.name for step in made.steps] == [patch.name for patch in patches]
    # Rules for vendored sources are applied where CMake is configured.
    assert [site.rule for site in made.sites] == [rule.name for rule in rules if not rule.source]
    assert len(set(trees)) == len(trees)
    assert context.objects.changes(made.source.tree, made.tree).keys() == named


@pytest.mark.network
def test_a_session_that_was_installed_needs_no_network(tmp_path: Path) -> None:
    """Nox runs a command of a checkout again where no index is reached and no cache holds its build requirements."""
    subprocess.run(["git", "clone", "--quiet", ROOT, tmp_path / "checkout"], check=True)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "nox"], check=True)
    subprocess.run([f"{tmp_path}/nox/bin/pip", "install", "--quiet", "nox", "uv"], check=True)
    nowhere = {"UV_OFFLINE": "1", "PIP_NO_INDEX": "1", "UV_CACHE_DIR": str(tmp_path / "cache")}
    session = [f"{tmp_path}/nox/bin/nox", "-s", "audit", "--", "--help"]
    subprocess.run(session, cwd=tmp_path / "checkout", check=True)
    again = subprocess.run(session, cwd=tmp_path / "checkout", env={**os.environ, **nowhere}, check=False)

    assert again.returncode == 0


@pytest.mark.network
@pytest.mark.long
@pytest.mark.toolchain
def test_the_converters_of_the_default_stack_are_right(context: RunContext, tmp_path: Path) -> None:
    """G1: every converter that the reviewed policy names is found, compiled and right: vLLM's, FlashInfer's, CUTLASS's and CUDA's own."""
    policy = strict_yaml.load(ROOT / "ci" / "gates" / "numerics.yaml", numerics.NumericsPolicy)
    trees, includes = numerics.source_trees(context, policy), numerics.include_folders(toolchain.obtain(context))
    checks = numerics.run(trees, policy, includes, tmp_path)

    assert checks
    assert [check for check in checks if check.state != "pass"] == []


# The demo's wheels climb the real ladder: real gate code, no fabricated verdict, and what `publish` says of the result.


RECIPE = "toy-cpu"


@pytest.mark.toolchain
@pytest.mark.skipif(host_facts()["gpu"] != "none", reason="G2 runs here")
def test_the_demo_climbs_the_real_ladder_up_to_publish(
    demo_session: RunContext, tmp_path: Path
) -> None:
    """
    A CPU proves the bytes of every wheel and asks a server; `verified` is refused with exactly what did not pass, and a candidate says it.

    The rules are the repository's own. The server is not vLLM: only gates that any OpenAI server can answer are asked of it.
    """
    project = demo_session.project.root
    for name in ("gates", "recipes"):
        shutil.rmtree(project / "ci" / name, ignore_errors=True)
        shutil.copytree(ROOT / "ci" / name, project / "ci" / name)
    rules = (ROOT / "ci" / "release.yaml").read_text().partition("# Stack →")[0]
    python = "{}.{}".format(*sys.version_info)
    (project / "ci" / "release.yaml").write_text(
        f'{rules}sets:\n  demo: {{pythons: ["{python}"]}}\n'
    )
    paths = {
        fork: pipeline.wheel_path(demo_session, pipeline.build(demo_session, fork))
        for fork in demo_session.forks
    }
    for fork, path in paths.items():
        if fork != "vllm":
            audit = climb.climb(demo_session, GateOptions(wheel=path, only=("G0",)))
            assert audit.states == {"G0": "pass"}
    options = GateOptions(
        wheel=paths["vllm"], python=refserved.environment(tmp_path / "environment", fake_openai_server.Behaviour()), serve=standin.model(tmp_path / "model"),
        recipe=RECIPE, profile="random", only=tuple(name for name in GATES if name not in ("G3", "G7")),
    )  # fmt: skip
    ladder = climb.climb(demo_session, options, keep_going=True)
    keys.make(tmp_path / "keys")
    publisher = Publisher(
        demo_session, tmp_path / "releases", keys.load([tmp_path / "keys"]), policy.load(project)
    )
    wheels, url = tuple(paths.values()), "https://releases.example/"
    with refusal("verified-refused") as refused:
        publisher.publish(wheels, url=url)
    release = publisher.publish(wheels, "candidate", url=url)
    assert refused.value.data == {"missing": release.missing}
    missing = {
        fork: [(one.gate, one.state, one.reference) for one in release.missing.get(path.name, ())]
        for fork, path in paths.items()
    }
    # The miniature sources lack the real converters, and the server is not installed from the wheel: both gates say so.
    found = [
        ("G1", "fail", "converter-missing"),
        ("G2", "not-run", "no-gpu"),
        ("G4", "fail", "wheel-not-served"),
    ]
    # Throughput is asked for once, the other served gates for a recipe of each group.
    wanted = [(name, "not-run", "not-climbed") for name in (*SERVED, *SERVED[:-1])]
    assert sorted(missing["vllm"]) == sorted([*found, *wanted])
    assert missing["flashinfer"] == missing["cutlass"] == [("set", "not-run", "companion-unbound")]
    assert {verdict.recipe for verdict in ladder.verdicts} == {"", RECIPE}
    log = next(demo_session.output.glob("mini_vllm-*.attempts.jsonl")).read_text().splitlines()
    # Two lines for each gate that began: its beginning and its end.
    begun = [verdict for verdict in ladder.verdicts if [check.name for check in verdict.checks] != [STOPPED[0].name]]
    assert len(log) == 2 * len(begun)
