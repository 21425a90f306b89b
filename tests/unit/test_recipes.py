"""Recipes: every one that is reviewed, for both stacks; what each release is told; what is wrong with a bad one; and published figures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from tests.refusals import refusal

from sparkwright.bench.recipes import flags, lint, recipe, workloads
from sparkwright.bench.recipes.cells import is_cell
from sparkwright.bench.recipes.expected import Expected
from sparkwright.bench.recipes.memory import Finding
from sparkwright.bench.recipes.recipe import Recipe, Way
from sparkwright.core import strict_yaml
from sparkwright.gates.contract.policy import ContractPolicy

ROOT = Path(__file__).parents[2]
WORKLOADS = workloads.load(ROOT)
CONTRACT = strict_yaml.load(ROOT / "ci" / "gates" / "contract.yaml", ContractPolicy)
NAMES = recipe.names(ROOT)

#: The releases of both stacks, stock and ours.
STACKS = ("0.33.0", "0.33.0+spark.2026.11.pf71f110a.cu130", "0.20.1", "0.20.1+spark.2026.05.p01234567.cu130")

#: What the issue asks for at the least.
WANTED = {
    "qwen3-next-80b-nvfp4-marlin", "qwen3-next-80b-nvfp4-marlin-mtp", "qwen3-next-80b-awq", "nemotron-3-nano-w4a16-b12x",
    "nemotron-3-nano-w4a4-b12x", "qwen3-30b-a3b-nvfp4", "qwen3-vl-235b-nvfp4", "qwen3-vl-235b-awq", "qwen3.6-35b-a3b-nvfp4-mtp3",
    "gpt-oss-120b-mxfp4", "toy-cpu",
}  # fmt: skip


def references(found: tuple[Finding, ...], weight: str = "error") -> set[str]:
    return {one.reference for one in found if one.weight == weight}


def found(one: Recipe) -> tuple[Finding, ...]:
    return lint.findings(one, WORKLOADS, CONTRACT)


def test_every_configuration_of_the_reports_has_a_recipe() -> None:
    """The seed reports' configurations and today's references are there, one of them in FP8."""
    assert set(NAMES) >= WANTED
    assert any(recipe.load(ROOT, name).model.quantization == "FP8" for name in NAMES)


def test_the_page_of_recipes_lists_them_all() -> None:
    """Each recipe has its row, which says that the figure is not ours."""
    rows = [line for line in (ROOT / "ci" / "recipes" / "README.md").read_text("utf-8").splitlines() if line.startswith("| `")]
    listed = {row.split("`")[1]: row for row in rows if row.endswith("| not measured |")}
    assert set(listed) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_reviewed_recipe_has_no_error(name: str) -> None:
    """Each loads, has no finding but advice, is of some stack, and says that its figures are not ours."""
    one = recipe.load(ROOT, name)

    assert references(found(one)) == set(), found(one)
    assert one.ours == "not measured"
    assert all(not figure.verified and figure.wheel == "not measured" and figure.source for figure in one.expected)
    assert all(is_cell(figure.cell) for figure in one.expected)
    assert bool(one.expected) == (name != "toy-cpu")
    assert set(one.workloads) <= set(WORKLOADS.workloads)


@pytest.mark.parametrize("version", STACKS)
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_launched_or_refused_for_each_stack(name: str, version: str) -> None:
    """A launch says each flag once, with the plan's numbers and the floor; a release that the recipe does not know is refused."""
    one = recipe.load(ROOT, name)
    way = next((way for way in one.ways if way.holds(Version(version))), None)
    if way is None or (way.lacks and "+spark" not in version):
        with refusal("recipe-unfit") as refused:
            recipe.launch(one, version, Path("/env/bin/python"), Path("/model"))
        assert refused.value.details
        return
    launch = recipe.launch(one, version, Path("/env/bin/python"), Path("/model"))
    names = [flags.plain(flag)[0] for flag in launch.flags]
    assert len(set(names)) == len(names)
    assert f"--max-model-len={one.plan.max_model_len}" in launch.flags
    assert ("--tensor-parallel-size=2" in launch.flags) == (one.nodes == 2)
    assert ("--speculative-config" in names) == (one.speculation is not None)
    assert launch.reserve == round(one.plan.floor * 2**30 / 1e6)
    assert not any(flag in names for flag in flags.MEASURING), "the measuring side's"
    assert not any(blank in flag for flag in launch.flags for blank in " \n\t")
    for variable in launch.variables:
        gone = CONTRACT.replaced.get(variable)
        assert not gone or Version(version) < Version(gone.since)


def test_each_stack_serves_what_it_was_made_for() -> None:
    """2026.05 has the report of 74.75 tok/s and no stock wheel of that release has it; 2026.11 serves them all."""
    nemotron = recipe.load(ROOT, "nemotron-3-nano-w4a16-b12x")
    assert nemotron.way("0.20.1+spark.2026.05").variables["VLLM_NVFP4_GEMM_BACKEND"] == "flashinfer-b12x"
    with refusal("recipe-unfit", match="official vLLM") as refused:
        nemotron.way("0.20.1")
    assert "#40082" in refused.value.details[0]
    for name in NAMES:
        recipe.load(ROOT, name).way("0.33.0")


def test_the_same_is_said_in_each_release_s_words() -> None:
    """Marlin is asked for by variables at first, then by --moe-backend, and at last by --linear-backend as well."""
    one = recipe.load(ROOT, "qwen3-next-80b-nvfp4-marlin")
    old, middle, new = (one.way(version) for version in ("0.16.0rc2", "0.20.1", "0.33.0"))

    assert old.variables["VLLM_TEST_FORCE_FP8_MARLIN"] == "1"
    assert not [flag for flag in old.flags if "backend=marlin" in flag]
    assert "--moe-backend=marlin" in middle.flags
    assert middle.variables == {"VLLM_NVFP4_GEMM_BACKEND": "marlin"}
    assert {"--moe-backend=marlin", "--linear-backend=marlin"} <= set(new.flags)
    assert not new.variables


def test_the_layers_that_draft_are_told_apart_where_that_can_be_said() -> None:
    """Their backend is only said beside the model's own, as a release without the one does not know the other."""
    one = recipe.load(ROOT, "qwen3-next-80b-nvfp4-marlin-mtp")
    said = {way.vllm: next(flag for flag in one.flags(way) if flag.startswith("--speculative-config=")) for way in one.ways}

    assert "moe_backend" not in said[">=0.16,<0.17"]
    assert msgspec.json.decode(said[">=0.25,<0.34"].partition("=")[2]) == {
        "method": "mtp", "num_speculative_tokens": 2, "moe_backend": "triton",
    }  # fmt: skip


@pytest.mark.parametrize("version", ["0.15.9", "0.34.0", "1.0", "0.19.0", "newest", "", "0.20.1; rm"])
def test_an_unknown_release_is_refused(version: str) -> None:
    """What nobody has read, and what is no version, is an error with a reference of its own."""
    with refusal("recipe-unfit") as refused:
        recipe.load(ROOT, "gpt-oss-120b-mxfp4").way(version)
    assert refused.value.reference == "recipe-unfit"


@pytest.mark.parametrize("name", ["", "qwen", "../gates/contract", "README", "toy-cpu.yaml"])
def test_an_unknown_recipe_is_refused(name: str) -> None:
    """Only the names of reviewed files are recipes; a path is none."""
    with refusal("usage", match="no recipe"):
        recipe.load(ROOT, name)


def plain() -> dict[str, Any]:
    """Return a recipe without anything wrong, as its file has it."""
    return dict(yaml.safe_load((ROOT / "ci" / "recipes" / "gpt-oss-120b-mxfp4.yaml").read_text()))


def changed(**changes: Any) -> Recipe:
    return msgspec.convert({**plain(), **changes}, Recipe)


def served(*arguments: str, vllm: str = ">=0.20.1,<0.34", **variables: str) -> Recipe:
    return changed(ways=[{"vllm": vllm, "flags": list(arguments), "variables": variables}])


PLAN, MODEL = plain()["plan"], plain()["model"]
MTP = {"method": "mtp", "tokens": 3}

WRONG: dict[str, tuple[Recipe, str]] = {
    "a flag twice": (served("--dtype=auto", "--dtype=half"), "flag-twice"),
    "a flag and its opposite": (served("--async-scheduling", "--no-async-scheduling"), "flag-twice"),
    "a flag of the plan": (served("--max-model-len=4096"), "flag-planned"),
    "a flag of the plan by its other name": (served("--device-memory-utilization=0.9"), "flag-planned"),
    "a flag of speculation": (served('--speculative-config={"method":"ngram"}'), "flag-planned"),
    "a flag of the measuring side": (served("--no-enable-prefix-caching"), "flag-measuring"),
    "a flag that is too new": (served("--linear-backend=marlin"), "flag-unknown"),
    "a flag that is too old": (served("--swap-space=4"), "flag-unknown"),
    "a flag that nobody has read": (served("--make-it-fast"), "flag-unknown"),
    "a value that is too new": (served("--linear-backend=b12x", vllm=">=0.24,<0.34"), "flag-unknown"),
    "a variable that is gone": (served(VLLM_NVFP4_GEMM_BACKEND="marlin"), "variable-ignored"),
    "two ways for one release": (changed(ways=[{"vllm": ">=0.20"}, {"vllm": "<0.24"}]), "ranges-overlap"),
    "drafts without a head": (changed(speculation=MTP), "speculation-headless"),
    "another set": (changed(workloads=["fastest"]), "workload-unknown"),
    "a cell that is too long": (changed(plan={**PLAN, "max_model_len": 4096}), "cell-too-long"),
    "a cell that is too wide": (changed(plan={**PLAN, "max_num_seqs": 8}), "cell-too-wide"),
    "no memory left": (changed(plan={**PLAN, "weights": 110}), "memory-short"),
    "too much at the start": (changed(plan={**PLAN, "gpu_memory_utilization": 0.95}), "memory-utilization"),
    "a short cache": (changed(plan={**PLAN, "cache": 1}), "cache-short"),
    "another contract": (changed(contract="nothing"), "contract-unknown"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_recipe_is_named(case: str) -> None:
    """Each of these errors is found by itself, and has a meaning in the table of reasons."""
    one, reference = WRONG[case]

    assert references(found(one)) == {reference}, found(one)
    assert reference in lint.REASONS


ADVISED: dict[str, tuple[Recipe, str]] = {
    "an estimate that may be negative": (changed(plan={**PLAN, "cache": None, "pinned": False}), "memory-unpinned"),
    "a checkpoint that nobody looked into": (changed(speculation=MTP, model={**MODEL, "drafts": "unknown"}), "speculation-unknown"),
    "a checkpoint without its commit": (changed(), "revision-unresolved"),
    "no contract": (changed(contract=""), "contract-unwritten"),
    "a range that nobody read": (served(vllm=">=0.34"), "range-unread"),
    "a cache full of one cell": (changed(plan={**PLAN, "cache": 8}), "cache-crowded"),
}


@pytest.mark.parametrize("case", ADVISED)
def test_what_could_be_better_is_advice(case: str) -> None:
    """What does not keep a recipe from being used is shown, and is no error."""
    one, reference = ADVISED[case]

    assert reference in references(found(one), "advice")
    assert not references(found(one))
    assert reference in lint.REASONS


def test_a_flag_may_set_two_things_of_one() -> None:
    """``--compilation-config.a`` and ``.b`` are two settings, and twice the same one is not."""
    assert "flag-twice" not in references(found(served("--compilation-config.mode=3", "--compilation-config.level=1")))
    assert "flag-twice" in references(found(served("--compilation-config.mode=3", "--compilation-config.mode=1")))


BROKEN: dict[str, dict[str, Any]] = {
    "a shell in a flag": {"ways": [{"vllm": ">=0.20", "flags": ["--dtype=auto; reboot"]}]},
    "two flags in one": {"ways": [{"vllm": ">=0.20", "flags": ["--dtype auto"]}]},
    "no flag": {"ways": [{"vllm": ">=0.20", "flags": ["dtype"]}]},
    "a variable of another form": {"ways": [{"vllm": ">=0.20", "variables": {"ld-preload": "x"}}]},
    "a number for a variable": {"ways": [{"vllm": ">=0.20", "variables": {"OMP_NUM_THREADS": 1}}]},
    "no range": {"ways": [{"vllm": "newest"}]},
    "no way": {"ways": []},
    "no workload": {"workloads": []},
    "half a commit": {"model": {**MODEL, "revision": "0123456"}},
    "a path for a repository": {"model": {**MODEL, "repository": "../../etc/passwd"}},
    "three nodes": {"nodes": 3},
    "a figure of ours without its wheel": {"ours": []},
    "measured, somehow": {"ours": "about 60"},
    "an unknown field": {"speed": 60},
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_recipe_does_not_load(case: str, tmp_path: Path) -> None:
    """A file that could run something, or say less than it seems to, is refused with its place."""
    path = tmp_path / "gpt-oss-120b-mxfp4.yaml"
    path.write_text(yaml.safe_dump({**plain(), **BROKEN[case]}))
    with refusal("file-invalid"):
        recipe.read(path)


def test_a_file_is_named_as_its_recipe(tmp_path: Path) -> None:
    """A copy under another name would be two recipes with one name."""
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(plain()))
    with refusal("file-invalid", match="says that it is the recipe gpt-oss"):
        recipe.read(path)


FIGURE = {"cell": "128/128 c1", "metric": "tpot", "value": 50.0, "unit": "tok/s", "host": "h", "stack": "s", "source": "a report"}


def test_a_published_rate_of_one_request_is_a_time_per_token() -> None:
    """50 tok/s of one request are 20 ms a token; its interval turns round with it; milliseconds are seconds of the records."""
    one = msgspec.convert({**FIGURE, "low": 40.0, "high": 62.5}, Expected)
    assert (one.native, one.bounds) == (0.02, (0.016, 0.025))

    time = msgspec.convert({**FIGURE, "value": 20.0, "unit": "ms"}, Expected)
    assert (time.native, time.bounds) == (0.02, (None, None))
    assert msgspec.convert({**FIGURE, "metric": "rate"}, Expected).native == 50.0


BAD_FIGURES: dict[str, dict[str, Any]] = {
    "no cell": {"cell": "decode"},
    "a rate in milliseconds": {"metric": "rate", "unit": "ms"},
    "a time to first token in tokens per second": {"metric": "ttft"},
    "an interval beside the value": {"low": 51.0, "high": 60.0},
    "half an interval": {"low": 49.0},
    "nothing": {"value": 0},
    "verified without a wheel": {"verified": True},
    "half a digest": {"wheel": "abc"},
    "no source": {"source": None},
}


@pytest.mark.parametrize("case", BAD_FIGURES)
def test_a_figure_that_says_nothing_does_not_load(case: str) -> None:
    """A figure has a cell, a unit of its metric, an interval around it, and a source."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**FIGURE, **BAD_FIGURES[case]}, Expected)


def test_what_others_published_is_never_verified() -> None:
    """A report cannot mark its figures as ours, and ours name the wheel."""
    figure = {"cell": "1/2 c1", "metric": "rate", "value": 1, "unit": "tok/s", "verified": True}
    marked = {"source": "s", "host": "h", "stack": "s", "figures": [figure]}
    with pytest.raises(msgspec.ValidationError, match="verified"):
        changed(published=[marked])
    with pytest.raises(msgspec.ValidationError, match="figures of our gate"):
        changed(ours=[FIGURE])
    assert changed(ours=[{**FIGURE, "verified": True, "wheel": "0" * 64}]).ours != "not measured"


positive = st.floats(1e-3, 1e3)


@given(positive, positive, positive, st.floats(0, 0.5), st.sampled_from(["tpot", "rate"]))
def test_a_measurement_agrees_or_is_on_one_side(value: float, one: float, other: float, margin: float, metric: str) -> None:
    """An interval in the band holds, one beside it is faster or slower by the metric's own direction, and one across an edge is open."""
    unit = "tok/s" if metric == "rate" else "s"
    claim = msgspec.convert({**FIGURE, "metric": metric, "value": value, "unit": unit}, Expected)
    low, high = sorted((one, other))
    least, most = value / (1 + margin), value * (1 + margin)

    said = claim.agreement(low, high, margin)
    if low >= least and high <= most:
        assert said == "holds"
    elif high < least:
        assert said == ("slower" if metric == "rate" else "faster")
    elif low > most:
        assert said == ("faster" if metric == "rate" else "slower")
    else:
        assert said == "open"


def test_too_little_measured_leaves_a_claim_open() -> None:
    """Without an interval of our own, nothing is said of the claim."""
    claim = msgspec.convert(FIGURE, Expected)
    assert {claim.agreement(None, None, 0.1), claim.agreement(0.02, None, 0.1)} == {"open"}


def test_the_reports_own_figures_agree_with_each_other() -> None:
    """Tokens per second that a report prints are the inverse of its own times per token, as far as both are printed."""
    plainly = recipe.load(ROOT, "qwen3-next-80b-nvfp4-marlin")
    times = {one.cell: one.native for one in plainly.expected if one.metric == "tpot"}
    # Seed 000, decode throughput: tokens by the time behind the first one.
    printed = {
        "128/128 c1": 47.1, "256/256 c1": 44.0, "1024/1024 c1": 41.8, "4096/4096 c1": 40.5, "8192/1024 c1": 40.9, "32768/256 c1": 41.9,
    }  # fmt: skip
    for cell, rate in printed.items():
        answer = workloads.parse(cell).answer
        assert math.isclose(1 / times[cell], rate * (answer - 1) / answer, rel_tol=0.005), cell
    assert set(times) == {cell.name for cell in WORKLOADS.cells("pareto")}


def test_what_is_said_of_flags_covers_only_releases_that_were_read() -> None:
    """Every bound is a release whose sources were read, so that no bound is a guess."""
    bounds = [one for pair in (*flags.BETWEEN.values(), *flags.VALUES.values()) for one in pair if one]
    assert set(bounds) <= set(flags.READ)
    assert [str(version) for version in sorted(map(Version, flags.READ))] == list(flags.READ)


@given(st.sampled_from(flags.READ))
def test_the_releases_of_a_way_are_those_of_its_range(version: str) -> None:
    """A label or a pre-release does not move a release out of its range."""
    way = Way(vllm=f"=={version}")
    assert flags.releases(way) == [version]
    assert way.holds(Version(f"{version}+spark.2026.11"))
    assert way.holds(Version(f"{version}rc1"))
    assert replace(way, vllm=f"!={version}").holds(Version(version)) is SpecifierSet(f"!={version}").contains(version)
