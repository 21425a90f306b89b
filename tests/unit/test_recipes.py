"""Recipes: the reviewed ones, their variants for each release, published results, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from tests.refusals import refusal

from sparkwright.bench.recipes import preflight, recipe, workloads
from sparkwright.bench.recipes.recipe import PublishedFigure
from sparkwright.core import strict_yaml
from sparkwright.gates.contract.policy import ContractPolicy

ROOT = Path(__file__).parents[2]
WORKLOADS = workloads.load(ROOT)
NAMES = recipe.names(ROOT)
POLICY = strict_yaml.load(ROOT / "ci" / "gates" / "contract.yaml", ContractPolicy)
#: The releases of the stacks, stock and ours.
STACKS = ("0.33.0", "0.33.0+spark.2026.11.pf71f110a.cu130", "0.23.0+spark.2026.06.p0", "0.20.1", "0.20.1+spark.2026.05.p0.cu130")


def plain() -> dict[str, Any]:
    """Return a recipe without faults, as its file has it."""
    return dict(yaml.safe_load((ROOT / "ci" / "recipes" / "gpt-oss-120b-mxfp4.yaml").read_text()))


def test_page_of_recipes_lists_each_of_them_as_not_measured() -> None:
    lines = (ROOT / "ci" / "recipes" / "README.md").read_text("utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| `") and line.endswith("| not measured |")]
    assert {row.split("`")[1] for row in rows} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_reviewed_recipe_has_only_advice(name: str) -> None:
    reviewed = recipe.load(ROOT, name)
    found = preflight.findings(reviewed, WORKLOADS)
    assert [finding for finding in found if finding.weight == "error"] == []
    assert bool(reviewed.published) == (name != "toy-cpu")
    reviewed.variant("0.33.0")
    for contract in (reviewed.contract, *(variant.contract for variant in reviewed.versions if variant.contract)):
        assert set(contract.lines) <= set(POLICY.lines)
        assert set(contract.allows) <= set(POLICY.fallback_kernels)


@pytest.mark.parametrize("version", STACKS)
@pytest.mark.parametrize("name", NAMES)
def test_recipe_is_launched_or_refused_for_each_stack(name: str, version: str) -> None:
    reviewed = recipe.load(ROOT, name)
    variant = next((one for one in reviewed.versions if one.holds(Version(version))), None)
    if variant is None or (variant.lacks and "+spark" not in version):
        with refusal("recipe-unfit"):
            recipe.launch(reviewed, version, Path("/env/bin/python"), Path("/model"))
        return
    launch = recipe.launch(reviewed, version, Path("/env/bin/python"), Path("/model"))
    flags = [preflight.setting(flag) for flag in launch.flags]
    assert len(set(flags)) == len(flags)
    assert not any(blank in flag for flag in launch.flags for blank in " \n\t")
    assert ("--tensor-parallel-size=2" in launch.flags) == (reviewed.nodes == 2)
    assert ("--speculative-config" in flags) == (reviewed.speculation is not None)
    assert launch.reserve == round(reviewed.plan.floor * 2**30 / 1e6)


def test_same_backend_is_chosen_in_the_words_of_each_release() -> None:
    marlin = recipe.load(ROOT, "qwen3-next-80b-nvfp4-marlin")
    assert marlin.variant("0.16.0rc2").variables["VLLM_TEST_FORCE_FP8_MARLIN"] == "1"
    assert marlin.variant("0.20.1").variables == {"VLLM_NVFP4_GEMM_BACKEND": "marlin"}
    assert {"--moe-backend=marlin", "--linear-backend=marlin"} <= set(marlin.variant("0.33.0").flags)
    assert not marlin.variant("0.33.0").variables


def test_drafting_layers_have_their_own_backend_only_beside_the_model_s() -> None:
    drafting = recipe.load(ROOT, "qwen3-next-80b-nvfp4-marlin-mtp")
    assert drafting.speculation
    old, new = (drafting.speculation.flag(drafting.variant(version)) for version in ("0.16.0+spark.1", "0.33.0"))
    assert "moe_backend" not in old
    assert msgspec.json.decode(new.partition("=")[2])["moe_backend"] == "triton"


@pytest.mark.parametrize("version", ["0.15.9", "0.34.0", "0.19.0", "newest", "", "0.20.1; rm"])
def test_unknown_release_is_refused(version: str) -> None:
    with refusal("recipe-unfit"):
        recipe.load(ROOT, "gpt-oss-120b-mxfp4").variant(version)


def test_official_wheel_without_the_kernels_of_a_recipe_is_refused() -> None:
    b12x = recipe.load(ROOT, "nemotron-3-nano-w4a16-b12x")
    b12x.variant("0.20.1+spark.2026.05")
    with refusal("recipe-unfit", match="official vLLM"):
        b12x.variant("0.20.1")


@pytest.mark.parametrize("name", ["", "qwen", "../gates/contract", "README", "toy-cpu.yaml"])
def test_unknown_recipe_is_refused(name: str) -> None:
    with refusal("usage", match="no recipe"):
        recipe.load(ROOT, name)


FIGURE = {"cell": "128/128 c1", "metric": "tpot", "value": 50.0, "unit": "tok/s"}
REPORT = {"source": "s", "host": "h", "stack": "s", "figures": [FIGURE]}

BROKEN: dict[str, dict[str, Any]] = {
    "a shell in a flag": {"versions": [{"vllm": ">=0.20", "flags": ["--dtype=auto; reboot"]}]},
    "two flags in one": {"versions": [{"vllm": ">=0.20", "flags": ["--dtype auto"]}]},
    "a variable of another form": {"versions": [{"vllm": ">=0.20", "variables": {"ld-preload": "x"}}]},
    "no range": {"versions": [{"vllm": "newest"}]},
    "no version": {"versions": []},
    "no workload": {"workloads": []},
    "half a commit": {"model": {**plain()["model"], "revision": "0123456"}},
    "a path for a repository": {"model": {**plain()["model"], "repository": "../../etc/passwd"}},
    "a cache without size": {"plan": {**plain()["plan"], "cache": None}},
    "a share above one": {"plan": {**plain()["plan"], "gpu_memory_utilization": 1.5}},
    "three nodes": {"nodes": 3},
    "our result without its wheel": {"ours": [REPORT]},
    "a stranger's result with a wheel of ours": {"published": [{**REPORT, "wheel": "0" * 64}]},
    "an unknown field": {"speed": 60},
    "another file's name": {"name": "mine"},
    "no such cell": {"published": [{**REPORT, "figures": [{**FIGURE, "cell": "decode"}]}]},
    "a rate in milliseconds": {"published": [{**REPORT, "figures": [{**FIGURE, "metric": "rate", "unit": "ms"}]}]},
    "an interval beside the value": {"published": [{**REPORT, "figures": [{**FIGURE, "runs": [51.0, 60.0]}]}]},
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_recipe_does_not_load(case: str, tmp_path: Path) -> None:
    path = tmp_path / "ci" / "recipes" / "gpt-oss-120b-mxfp4.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(yaml.safe_dump({**plain(), **BROKEN[case]}))
    with refusal("file-invalid"):
        recipe.load(tmp_path, path.stem)


def test_published_rate_of_one_request_is_a_time_per_token() -> None:
    figure = msgspec.convert({**FIGURE, "runs": [40.0, 62.5]}, PublishedFigure)
    assert (figure.native, figure.interval) == (0.02, (0.016, 0.025))
    assert msgspec.convert({**FIGURE, "value": 20, "unit": "ms"}, PublishedFigure).interval == (0.02, 0.02)
    assert msgspec.convert({**FIGURE, "metric": "rate"}, PublishedFigure).native == 50.0


positive = st.floats(1e-3, 1e3)


@given(positive, positive, positive, st.floats(0, 0.5), st.booleans())
def test_measured_interval_agrees_is_on_one_side_or_open(value: float, one: float, other: float, margin: float, rate: bool) -> None:
    figure = PublishedFigure("1/1 c1", "rate" if rate else "ttft", value, "tok/s" if rate else "s")
    low, high = sorted((one, other))
    agreement = figure.agreement(low, high, margin)
    assert (agreement == "holds") == (value / (1 + margin) <= low and high <= value * (1 + margin))
    assert (agreement == ("faster" if rate else "slower")) == (low > value * (1 + margin))
    assert (agreement == ("slower" if rate else "faster")) == (high < value / (1 + margin))
    assert figure.agreement(None, high, margin) == "open"
