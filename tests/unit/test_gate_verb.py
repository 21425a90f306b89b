"""``sparkwright gate`` as people and programs meet it: what was not named did not run, failures stop it, and verdicts are kept."""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.refusals import refusal
from tests.support import refserved, verdicts, wheels
from tests.support.fake_openai_server import Behaviour
from tests.unit.conftest import ROOT, Cli

from sparkwright.bench.recipes import recipe as recipes
from sparkwright.cli import gate as gate_verb
from sparkwright.cli.main import parse
from sparkwright.cli.options import checkout
from sparkwright.core.errors import UsageError
from sparkwright.forks.stack import Project
from sparkwright.gates.core import policy
from sparkwright.gates.core.builder import GateBuilder
from sparkwright.gates.core.server_under_test import REASONS, GateOptions
from sparkwright.gates.throughput import Experiment
from sparkwright.release import policy as release_policy

Built = Callable[[GateOptions], GateBuilder]


@pytest.fixture(name="common")
def _common(tmp_path: Path) -> list[str]:
    """Return the options for this checkout with a store and an output folder of its own."""
    return ["--root", str(ROOT), "--cache-dir", str(tmp_path / "cache"), "--output", str(tmp_path / "out"), "--json"]


@pytest.fixture(name="built")
def _built(common: list[str]) -> Built:
    """Return what builds the gates of some options, offline."""
    return lambda options: GateBuilder(checkout(parse(["gate", "--offline", *common])), options, {})


@pytest.fixture(name="wheel")
def _wheel(tmp_path: Path) -> Path:
    """Return a wheel with next to nothing in it."""
    return wheels.plain(tmp_path, "tiny", "1.0")


def test_gates_without_their_options_did_not_run(cli: Cli, common: list[str]) -> None:
    """Gates without their server are listed with the option that names it, and are no pass."""
    served = [word for gate in ("G0", "G3", "G4", "G5", "G6", "G7", "G8") for word in ("--only", gate)]
    done = cli("gate", *served, *common)
    document = json.loads(done.stdout)

    assert (done.returncode, document["error"]["reference"], document["ladder"]["state"]) == (4, "gate-not-run", "not-run")
    assert {verdict["state"] for verdict in document["ladder"]["verdicts"]} == {"not-run"}
    checks = [check for verdict in document["ladder"]["verdicts"] for check in verdict["checks"]]
    assert {check["reason"] for check in checks} == {"not-asked"}
    assert all("name" in check["message"] for check in checks)


def test_the_newest_wheel_is_of_the_stack_the_architecture_and_the_machine(tmp_path: Path) -> None:
    """Others that lie in the output folder, and were built later, are not taken."""
    (out := tmp_path / "out").mkdir()
    names = (
        "vllm-0.33.0+spark.2026.11.p00000000.cu130-cp38-abi3-linux_aarch64.whl", "vllm-0.33.0+spark.2026.11.p11111111.cu130-cp38-abi3-linux_aarch64.whl",
        "vllm-0.33.0+spark.2026.11.sm90a.p22222222.cu130-cp38-abi3-linux_aarch64.whl", "vllm-0.33.0+spark.2026.11.p33333333.cu130-cp38-abi3-linux_x86_64.whl",
        "vllm-0.23.0+spark.r202606.p44444444.cu130-cp38-abi3-linux_aarch64.whl", "vllm-0.33.0-cp38-abi3-linux_aarch64.whl",
    )  # fmt: skip
    for second, name in enumerate(names):
        (out / name).touch()
        os.utime(out / name, (second, second))
    context = checkout(parse(["gate", "--root", str(ROOT), "--cache-dir", str(tmp_path / "cache"), "--output", str(out)]))
    newest = {}
    for stack, arch, machine in (("2026.11", "", "aarch64"), ("2026.11", "9.0a", "aarch64"), ("2026.11", "", "x86_64"), ("2026.06", "", "x86_64")):
        path = gate_verb._newest_wheel(dataclasses.replace(context, project=Project(ROOT, stack, arch), target=machine))
        newest[stack, arch, machine] = path and names.index(path.name)
    assert [*newest.values()] == [1, 2, 3, None]


def test_policies_of_the_gates_that_the_soak_runs_again_are_part_of_its_digest() -> None:
    policies = policy.load(ROOT)
    weaker = {
        "generation": replace(policies.generation, tokens=9),
        "logprobs": replace(policies.logprobs, perplexity_max=9.0),
        "soak": replace(policies.soak, least=9),
    }
    digests = {replace(policies, **{name: one}).digest("G7") for name, one in weaker.items()}
    assert len(digests - {policies.digest("G7")}) == 3


def test_two_runs_of_a_recipe_do_not_share_a_server_log(built: Built, served: GateOptions, tmp_path: Path) -> None:
    """The second run of a recipe is refused; other gates are not."""
    options = replace(served, recipe="toy-cpu")
    with built(options):
        with refusal("store-busy", match="toy-cpu"):
            built(options)
        with built(replace(options, only=("G7",))):
            pass
    assert not list((tmp_path / "cache" / "work").glob("gate-*"))


@pytest.fixture(name="served")
def _served(tmp_path: Path) -> GateOptions:
    """Return an environment that says it has vLLM, and a model to serve from it."""
    model = tmp_path / "Toy-1M"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return GateOptions(python=refserved.environment(tmp_path / "environment", Behaviour()), serve=model)


def test_a_model_without_a_floor_stops_no_other_gate(built: Built, served: GateOptions, tmp_path: Path) -> None:
    """G6 is not run, and says why before hours are spent; the gates around it are, and a model that has a floor is asked."""
    options = replace(served, recipe="toy-cpu", against=tmp_path)
    for file in ("logprobs.json", "gsm8k.json"):
        (tmp_path / file).touch()
    with built(options) as builder:
        blocked = [(name, gate.blocked and gate.blocked.reason) for name in ("G4", "G5", "G6", "G7") if (gate := builder.gate(name))]
        assert blocked == [("G4", None), ("G5", None), ("G6", "floor-missing"), ("G7", None)]
        assert {len(builder.gate(name).model) for name in ("G1", "G6")} == {0, 64}
        assert builder.gate("G6").policy
    with refusal("model-missing"):
        built(replace(options, recipe="qwen3-30b-a3b-nvfp4"))


def test_an_environment_that_cannot_serve_is_refused_before_any_gate(built: Built, served: GateOptions, wheel: Path, tmp_path: Path) -> None:
    """Neither the gates before it nor, for G8, the probe of the machine run."""
    old = refserved.environment(tmp_path / "old", Behaviour(), "0.16.0")
    for python, reference in ((tmp_path / "python", "environment-unusable"), (old, "recipe-unfit")):
        options = replace(served, recipe="toy-cpu", wheel=wheel, baseline=wheel, baseline_python=python)
        with built(options) as builder, refusal(reference):
            builder.gate("G8")
        with built(replace(served, recipe="toy-cpu", python=python)) as builder, refusal(reference):
            builder.gate("G4")


def test_a_verdict_counts_only_for_the_wheel_that_the_server_was_installed_from(
    built: Built, served: GateOptions, wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    An environment with other files fails each served gate, and cannot be recorded as that wheel.

    A server that does not start says so at each gate and leaves its log, and nothing is recorded of it.
    """
    (wheel.parent / "logprobs.json").touch()
    options = replace(served, wheel=wheel, against=wheel.parent, recipe="toy-cpu", variable=(("REFERENCE", "starts-never"),))
    with built(options) as builder:
        for name in ("G4", "G5", "G7"):
            rows = {check.name: check for check in builder.gate(name).run()}
            assert (rows["wheel-served"].state, rows["wheel-served"].reason, rows["wheel-served"].required) == ("fail", "wheel-not-served", True)
            assert (rows["ladder"].state, rows["ladder"].reason in REASONS) == ("invalid", True)
        with refusal("measurement-invalid", match="would name a wheel that did not answer"):
            list(builder.record(wheel.parent / "reference"))
    (log,) = (tmp_path / "cache").rglob("server.log")
    assert str(log) in capsys.readouterr().err.replace("\n", "")


def test_a_server_that_dies_at_one_file_of_the_reference_is_started_again_for_the_next(built: Built, served: GateOptions, wheel: Path, tmp_path: Path) -> None:
    """The error names wheel, file and what was seen, and the log of the death stays."""
    (site,) = (tmp_path / "environment").glob("lib/python3.*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # The first five requests are those of the pace. The text is not answered by a server that states no prefix cache.
    behaviour = Behaviour(faults={"dies": 6})
    (tmp_path / "environment" / "behaviour.json").write_bytes(msgspec.json.encode(behaviour))
    options, folder = replace(served, recipe="toy-cpu", wheel=wheel, only=("G4", "G5")), tmp_path / "reference"
    with built(options) as builder, refusal("measurement-invalid", match=wheel.name) as error:
        list(builder.record(folder))
    assert [detail.rsplit(": ")[:2] for detail in error.value.details] == [
        ["logprobs.json", "server-unreachable"],
        ["text.json", "answer-unreadable"],
        ["answers.json", "server-unreachable"],
    ]
    assert [path.name for path in folder.iterdir()] == ["pace.json"]
    assert list((tmp_path / "cache").rglob("logprobs.json.server.log"))


def test_hours_of_measuring_outlive_verdicts_that_cannot_be_stored(
    built: Built, served: GateOptions, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G8's result is on the disk before its checks are judged, and its verdict names the policy that a release asks for."""
    monkeypatch.setattr("sparkwright.bench.load.vllm_bench.obtain", lambda *_, **__: None)
    monkeypatch.setattr(Experiment, "result", lambda *_: verdicts.result(wheel))
    with built(replace(served, recipe="toy-cpu", wheel=wheel, baseline=wheel, baseline_python=served.python, workload=("quick",))) as builder:
        assert builder.gate("G8").run()
    file = replace(release_policy.load(ROOT).file, recipes={"toy": ("toy-cpu",)})
    with built(replace(served, wheel=wheel, baseline=wheel, baseline_python=served.python, recipe="toy-cpu")) as builder:
        assert builder.gate("G8").policy == release_policy._gate_digests(ROOT, file)["G8 toy-cpu"]
    assert (tmp_path / "out" / f"tiny-1.0-py3-none-any.{verdicts.RECIPE}.throughput.json").exists()


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({}, True), ({"profile": "chatml"}, True), ({"profile": "learnt"}, False), ({"flag": ("--enforce-eager",)}, False),
        ({"variable": (("VLLM_USE_V1", "1"),)}, False),
    ],
)  # fmt: skip
def test_a_gate_that_asks_less_or_serves_otherwise_is_judged_by_another_policy(built: Built, served: GateOptions, changed: dict[str, Any], same: bool) -> None:
    """`verified` counts the digests of the reviewed policy and recipe alone."""
    plan = recipes.load(ROOT, "toy-cpu")
    with built(replace(served, recipe="toy-cpu", **changed)) as builder:
        for name in ("G4", "G7"):
            assert (builder.gate(name).policy == policy.load(ROOT).digest(name, plan)) is same


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--serve", "model"], "--python"),
        (["--recipe", "no-such"], "There is no recipe"),
        (["--profile", "no-such"], "default"),
        (["--against", "folder", "--task", "no-such"], "gsm8k"),
        (["--record", "folder"], "WHEEL"),
        (["--model-folder", "no-folder"], "no-folder"),
        (["no-wheel-1-py3-none-any.whl"], "no-wheel"),
    ],
)
def test_options_that_do_not_go_together_are_wrong_usage(common: list[str], options: list[str], names: str) -> None:
    """Nothing is started, and the message names what there is."""
    gates = [word for name in ("G3", "G4", "G6") for word in ("--only", name)]
    with pytest.raises(UsageError) as refused:
        gate_verb.gate(parse(["gate", *gates, *options, *common]))
    assert names in f"{refused.value.what} {refused.value.todo}"
