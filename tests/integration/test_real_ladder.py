"""The demo's wheels climb the real ladder: real gate code, no fabricated verdict, and what `publish` says of the result."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from tests.refusals import refusal
from tests.support import refserved, standin
from tests.support.fake_openai_server import Behaviour

from sparkwright.builder import pipeline
from sparkwright.cli import gate
from sparkwright.forks.context import RunContext
from sparkwright.gates.core.ladder import GATES, SERVED, STOPPED, host_facts
from sparkwright.gates.core.server_under_test import GateOptions
from sparkwright.release import keys, policy
from sparkwright.release.publisher import Publisher

ROOT = Path(__file__).parents[2]
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
            audit = gate.climb(demo_session, GateOptions(wheel=path, only=("G0",)))
            assert audit.states == {"G0": "pass"}
    options = GateOptions(
        wheel=paths["vllm"], python=refserved.environment(tmp_path / "environment", Behaviour()), serve=standin.model(tmp_path / "model"),
        recipe=RECIPE, profile="random", only=tuple(name for name in GATES if name not in ("G3", "G7")),
    )  # fmt: skip
    ladder = gate.climb(demo_session, options, keep_going=True)
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
