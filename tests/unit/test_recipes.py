"""Recipes, workloads, preflight and known traps: the reviewed files, launches for each release, and refusals."""

import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, strategies as st
from msgspec.structs import replace
from tests.refusals import outcome, refusal
from tests.support import checkpoints, standin

from sparkwright.bench.model import checkpoint, modules
from sparkwright.bench.recipes import preflight, recipe, workloads
from sparkwright.bench.server import flags, wheel_identity
from sparkwright.bench.server.launch import RESERVE, SLEEP, LaunchPlan
from sparkwright.core import config, files, memory, strict_yaml
from sparkwright.gates.core.server_under_test import GateOptions, launch_plan
from sparkwright.gates.throughput_run import ThroughputPolicy

ROOT = Path(__file__).parents[2]
WORKLOADS = workloads.load(ROOT)
RULE = strict_yaml.load(ROOT / "ci" / "gates" / "throughput.yaml", ThroughputPolicy)
NAMES = tuple(recipe.files(ROOT))
#: A DGX Spark (119.7 GiB in seed reports 000 and 001) on which nothing runs.
SPARK = memory.MachineMemory(119.7, 119.7, 1, unified=True)
def plain() -> dict[str, Any]:
    """Return a recipe without faults, and without a class."""
    return {**msgspec.to_builtins(recipe.load(ROOT, "gpt-oss-120b-mxfp4")), "inherits": ""}


def fits(name: str) -> str:
    """Return the smallest Spark that the plan of the recipe *name* fits, as the page says it."""
    reviewed = recipe.load(ROOT, name)
    sizes = [size for size in ("64 GB", "128 GB") if not preflight.findings(reviewed, (), memory.SPARKS[size])]
    return ("2 × " if reviewed.nodes == 2 else "") + sizes[0]


def test_page_of_recipes_lists_each_of_them_and_what_it_fits() -> None:
    text = (ROOT / "ci" / "recipes" / "README.md").read_text("utf-8")
    assert dict(re.findall(r"(?m)^\| `([^`]+)` \|.*\| ([^|]*GB) \|", text)) == {name: fits(name) for name in recipe.names(ROOT)}
    assert set(re.findall(r"`([^`]+)`", text[text.index("| recipe |") : text.index("See [serve]")])) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_reviewed_recipe_is_sound(name: str) -> None:
    reviewed = recipe.load(ROOT, name)
    assert preflight.findings(reviewed, WORKLOADS.cells(*reviewed.workloads), SPARK) == []
    assert bool(reviewed.published) == (reviewed.model.repository != "any")
    for contract in (reviewed.contract, *(variant.contract for variant in reviewed.versions if variant.contract)):
        # Nothing of a contract waits for a machine: `unresolved` kernels made G3 not-run on every Spark.
        assert "unresolved" not in msgspec.json.encode(contract).decode()
        assert {"attention", "linear"} <= set(contract.serves)
        # A recipe of a Spark runs by torch.compile and CUDA graphs, and its gate looks for both.
        assert (contract.compiled and contract.graphs) or name not in recipe.names(ROOT)


# The releases of the stacks, stock and ours.
@pytest.mark.parametrize(
    "version",
    ["newest", "0.34.0", "0.33.0", "0.33.0+spark.2026.11.pf71f110a.cu130", "0.23.0+spark.2026.06.p0", "0.20.1", "0.20.1+spark.2026.05.p0.cu130"],
)
@pytest.mark.parametrize("name", NAMES)
def test_recipe_is_launched_or_refused_for_each_stack(name: str, version: str) -> None:
    reviewed = recipe.load(ROOT, name)
    variant = reviewed.find_variant(version)
    if variant is None or (variant.lacks and "+spark" not in version):
        with refusal("recipe-unfit"):
            recipe.launch(reviewed, version, Path("/env/bin/python"), Path("/model"))
        return
    address = {"VLLM_HOST_IP": "127.0.0.1"} if reviewed.nodes == 2 else {}
    launch = recipe.launch(reviewed, version, Path("/env/bin/python"), Path("/model"), variables=address)
    names = [flags.setting(flag) for flag in launch.flags]
    assert len(set(names)) == len(names)
    assert not any(blank in flag for flag in launch.flags for blank in " \n\t")
    two = {"--tensor-parallel-size=2", "--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", "--distributed-executor-backend=mp"}
    assert (two <= set(launch.flags)) == bool(launch.machines) == (reviewed.nodes == 2)
    assert ("--speculative-config" in names) == bool(reviewed.speculation)


@pytest.mark.parametrize("name", ["", "qwen", "../gates/contract", "README", "toy-cpu.yaml", "rehearsal/toy-cpu", "classes/qwen3-next", "qwen3-next"])
def test_unknown_recipe_is_refused_and_those_for_a_spark_are_offered(name: str) -> None:
    """A rehearsal is found by its name; nobody who owns a Spark is offered one."""
    with refusal("usage", match="no recipe") as caught:
        recipe.load(ROOT, name)
    offered = caught.value.todo.removeprefix("Choose from: ").removesuffix(".").split(", ")
    assert set(offered) == {path.stem for path in (ROOT / "ci" / "recipes").glob("*.yaml")}
    assert not [rehearsal for rehearsal in offered if rehearsal.startswith(("rehearsal", "layers", "toy", "compiled"))]
    assert recipe.load(ROOT, "rehearsal-bf16").model.repository == "any"


CLASS: dict[str, Any] = {"workloads": ["quick"], "plan": {"cache": 8, "reserve": 2, "max_num_seqs": 4}, "contract": {"serves": {"attention": "bf16", "linear": "bf16"}}}
#: Ten lines, of which two say what the model is for.
TEN = """\
name: mine
title: My model
inherits: hybrid
why: >-
  For this test, which asks whether
  ten lines are enough.
model: {repository: me/mine, revision: unresolved, quantization: NVFP4}
plan: {weights: 20, weights_from: "Estimate", max_model_len: 4096, cache: 4}
versions: [{vllm: ">=0.33,<0.34", flags: [--kv-cache-dtype=fp8]}]
published: ["unresolved"]
"""


def write_class(root: Path, own: str, **fields: Any) -> None:
    """Write the recipe `mine` and the class `hybrid` into *root*."""
    classes = root / "ci" / "recipes" / "classes"
    classes.mkdir(parents=True, exist_ok=True)
    (classes / "hybrid.yaml").write_text(yaml.safe_dump({**CLASS, **fields}))
    (classes.parent / "mine.yaml").write_text(own)


def test_recipe_of_ten_lines_inherits_what_it_does_not_state(tmp_path: Path) -> None:
    write_class(tmp_path, TEN, versions=[{"vllm": ">=0.20"}], tool_parser="hermes")
    mine = recipe.load(tmp_path, "mine")
    assert len(TEN.splitlines()) == 10
    assert (mine.plan.cache, mine.plan.reserve, mine.plan.max_num_seqs, mine.plan.max_model_len) == (4, 2, 4, 4096)
    assert (mine.tool_parser, mine.workloads, [variant.vllm for variant in mine.versions]) == ("hermes", ("quick",), [">=0.33,<0.34"])


@pytest.mark.parametrize(
    ("inherits", "fields", "details"),
    [
        ("other", {}, "classes: hybrid"),
        ("../hybrid", {}, "classes: hybrid"),
        ("[hybrid]", {}, "classes: hybrid"),
        ("hybrid", {"speed": 60}, "speed"),
        ("hybrid\ncontract: {5: 6}", {}, "str"),
        ("hybrid", {"plan": {"cache": "much"}}, "required field"),
        ("hybrid", {"inherits": "other", "plan": {**CLASS["plan"], "weight": 1}}, "weight"),
    ],
)
def test_class_that_is_missing_or_wrong_is_refused(inherits: str, fields: dict[str, Any], details: str, tmp_path: Path) -> None:
    write_class(tmp_path, TEN.replace("hybrid", inherits), **fields)
    with refusal("file-invalid", says=details):
        recipe.load(tmp_path, "mine")


def test_recipe_of_the_guide_has_ten_lines_and_is_sound(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "howto" / "write-a-recipe.md").read_text("utf-8")
    text = textwrap.dedent(guide[guide.index("```yaml\n") + 8 : guide.index("   ```\n")])
    shutil.copytree(ROOT / "ci" / "recipes" / "classes", tmp_path / "ci" / "recipes" / "classes")
    name = yaml.safe_load(text)["name"]
    (tmp_path / "ci" / "recipes" / f"{name}.yaml").write_text(text)
    assert len(text.splitlines()) == 10
    loaded = recipe.load(tmp_path, name)
    assert preflight.findings(loaded, WORKLOADS.cells(*loaded.workloads), SPARK) == []


def served(*arguments: str) -> dict[str, Any]:
    return {"versions": [{"vllm": ">=0.20.1,<0.34", "flags": list(arguments)}]}


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
    "a share typed for one size": {"plan": {**plain()["plan"], "gpu_memory_utilization": 0.5}},
    "three nodes": {"nodes": 3},
    "a blank in a flag of drafts": {"speculation": '{"method": "mtp"}'},
    "settings of drafts without drafts": {"versions": [{"vllm": ">=0.33,<0.34", "drafting": {"draft_lm_head_quantization": "fp8"}}]},
    "a draft vocabulary elsewhere": {"speculation": "{}", "versions": [{"vllm": ">=0.33,<0.34", "draft_vocabulary": "../tokens.json"}]},
    "drafts that are no JSON": {"speculation": "{mtp}"},
    "an unknown field": {"speed": 60},
    "no such cell": {"decides": {"decode": ["rate"]}},
    "another file's name": {"name": "mine"},
    "a flag twice": served("--dtype=auto", "--dtype=half"),
    "a flag and its opposite": served("--async-scheduling", "--no-async-scheduling"),
    "a dotted flag twice": served("--compilation-config.mode=3", "--compilation-config.mode=1"),
    "a flag of the plan": served("--max-model-len=4096"),
    "a flag of the plan by its other name": served("--device-memory-utilization=0.9"),
    "a flag of the measurement": served("--no-enable-prefix-caching"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_recipe_does_not_load(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "ci" / "recipes"
    folder.mkdir(parents=True)
    (folder / "gpt-oss-120b-mxfp4.yaml").write_text(yaml.safe_dump({**plain(), **BROKEN[case]}))
    with refusal("file-invalid"):
        recipe.load(tmp_path, "gpt-oss-120b-mxfp4")


def changed(**changes: Any) -> recipe.Recipe:
    return msgspec.convert({**plain(), **changes}, recipe.Recipe)


def planned(**changes: Any) -> recipe.Recipe:
    return changed(plan={**plain()["plan"], **changes})


def model(folder: Path, config: dict[str, Any], *tensors: str) -> Path:
    """Write a model whose tensors are 64 x 64 of bfloat16."""
    return checkpoints.write(folder, config, [(name, "BF16", [64, 64]) for name in tensors])


CONFIG = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 64}
TENSORS = ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight")


@pytest.mark.parametrize(
    ("changes", "tensors", "drafts"),
    [
        ({}, (), False),
        ({}, ("mtp.fc.weight",), True),
        ({"model_type": "nemotron_h"}, ("mtp.fc.weight",), False),
        ({"model_type": "nemotron_h", "num_nextn_predict_layers": 1}, ("mtp.fc.weight",), True),
    ],
)
def test_checkpoint_has_its_bytes_and_drafting_layers(changes: dict[str, Any], tensors: tuple[str, ...], drafts: bool, tmp_path: Path) -> None:
    """Nemotron-H drafts only if its config says so."""
    size = modules.audit(checkpoint.read(model(tmp_path / "model", CONFIG | changes, *TENSORS, *tensors)))
    assert (size.bytes, size.drafts) == ((2 + len(tensors)) * 2 * 64 * 64, drafts)


GOOD = modules.ModuleAudit("qwen3_next", "NVFP4 (modelopt)", 48, (512, 10), round(44.2 * 2**30), True, 1e9, ())
MTP = recipe.load(ROOT, "qwen3-next-80b-nvfp4-marlin-mtp")
#: A recipe and its checkpoint, or None if that is not at hand → what is wrong with them; the checkpoint on disk decides over the plan.
WRONG: dict[str, tuple[recipe.Recipe, modules.ModuleAudit | None, set[str]]] = {
    "drafts without a head": (changed(speculation='{"method":"mtp"}'), None, {"speculation-headless"}),
    "drafts of another model": (changed(speculation='{"method":"mtp","model":"a/b"}'), None, set()),
    "a cell that is too long": (planned(max_model_len=2048), None, {"cell-too-long"}),
    "a cell that is too wide": (planned(max_num_seqs=8), None, {"cell-too-wide"}),
    "no memory left": (planned(weights=110), None, {"memory-short"}),
    "a short cache": (planned(cache=1), None, {"cache-short"}),
    "two settings behind a dot": (changed(**served("--compilation-config.mode=3", "--compilation-config.level=1")), None, set()),
    "the model": (MTP, GOOD, set()),
    "no drafting layers": (MTP, replace(GOOD, drafts=False), {"speculation-headless"}),
    "somewhat larger": (MTP, replace(GOOD, bytes=50 * 2**30), set()),
    "twice as large": (MTP, replace(GOOD, bytes=90 * 2**30), {"memory-short", "checkpoint-other"}),
}


@pytest.mark.parametrize(("wrong", "audit", "references"), WRONG.values(), ids=WRONG)
def test_error_of_a_recipe_has_its_reference(wrong: recipe.Recipe, audit: modules.ModuleAudit | None, references: set[str]) -> None:
    # The second recipe needs a file of prompts, and has cells that are longer than it serves.
    cells = () if audit else WORKLOADS.cells(*wrong.workloads)
    assert {finding.reference for finding in preflight.findings(wrong, cells, SPARK, audit)} == references


def drafted(**changes: Any) -> recipe.Recipe:
    """Return a recipe with MTP whose only release has *changes*."""
    mtp = '{"method":"mtp","num_speculative_tokens":2}'
    return changed(speculation=mtp, versions=[{"vllm": ">=0.33,<0.34", **changes}])


@pytest.fixture(name="data")
def _data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of reviewed data with the draft vocabulary ``tokens.json``."""
    (tmp_path / "ci" / "recipes").mkdir(parents=True)
    (tmp_path / "ci" / "recipes" / "tokens.json").write_text("{}", "utf-8")
    monkeypatch.setattr(config, "root", lambda: tmp_path)
    return tmp_path


def test_a_draft_vocabulary_is_given_to_our_wheels_alone(data: Path) -> None:
    """The official wheel ends with an error at an option that it does not know; what it knows it is given, too. Only the command has a path."""
    reduced = drafted(draft_vocabulary="tokens.json", drafting={"draft_lm_head_quantization": "fp8"})
    settings = {version: flags.speculation(reduced.flags(version)) for version in ("0.33.0", "0.33.0+spark.2026.11.p0.cu130")}
    stock, ours = settings.values()
    named = ours.pop("draft_vocabulary")
    assert stock == ours == {"method": "mtp", "num_speculative_tokens": 2, "draft_lm_head_quantization": "fp8"}
    assert named == f"tokens.json@{files.sha256_bytes(b'{}')}"
    plan = LaunchPlan(Path("/env/bin/python"), Path("/model"), reduced.flags("0.33.0+spark.2026.11.p0.cu130"))
    assert not any(str(data) in flag for flag in plan.flags)
    assert flags.speculation([word for word in plan.command(1) if word.startswith("--spec")])["draft_vocabulary"] == str(data / "ci" / "recipes" / "tokens.json")
    (data / "ci" / "recipes" / "tokens.json").unlink()
    with refusal("file-invalid", match="tokens.json"):
        reduced.flags("0.33.0+spark.2026.11.p0.cu130")


@pytest.mark.parametrize("given", [recipe.load(ROOT, "toy-cpu"), None], ids=["recipe", "model"])
def test_a_gate_starts_a_server_with_the_variables_of_serve(given: recipe.Recipe | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the installed vLLM reads, as `test_serving` has them; what the user states stays."""
    python = standin.environment(tmp_path / "env")
    next(tmp_path.rglob("vllm/envs.py")).write_text(f'"{RESERVE}": None,\n"{SLEEP}": None,', "utf-8")
    monkeypatch.setattr(memory.MachineMemory, "here", lambda: SPARK)
    variables = recipe.launch(given, "0.33.0", python, Path("/model"), variables={SLEEP: "0"}).variables
    own = given.variant("0.33.0").variables if given else {}
    assert variables == {**own, RESERVE: f"{SPARK.floor(given.plan.floor if given else None):g}", SLEEP: "0"}


@pytest.mark.parametrize(
    ("changes", "copied"),
    [
        ({}, 0),
        ({"drafting": {"draft_lm_head_quantization": "fp8"}}, 8),
        ({"drafting": {"draft_lm_head_quantization": "nvfp4"}}, 4.5),
        ({"draft_vocabulary": "tokens.json"}, 16),
    ],
)
@pytest.mark.parametrize("group", ["lm_head", "embeddings"])
def test_a_copy_of_the_head_for_drafts_is_counted(changes: dict[str, Any], copied: float, group: str) -> None:
    """Of a head of 16 GiB, or of the embeddings in its place; the machine has just what the rest needs, and half a GiB more."""
    rows = (modules.ModuleRow(group, "head", "BF16", False, 1, 16 << 30, 0.0), modules.ModuleRow("layers", "q", "FP8", True, 1, 44 << 30, 0.0))
    plan, audit = drafted().plan, replace(GOOD, model="gpt_oss", scheme="MXFP4", bytes=60 << 30, rows=rows)
    needed = (60 + plan.cache + plan.reserve + copied) / (1 - memory.FLOOR)
    for spare, short in ((0.5, False), (-0.5, True)):
        found = preflight.findings(drafted(**changes), (), memory.MachineMemory(needed + spare, needed + spare), audit)
        assert ("memory-short" in {finding.reference for finding in found}) == short


def test_old_release_that_has_b12x_by_a_variable_is_tuned_too() -> None:
    nano = recipe.load(ROOT, "nemotron-3-nano-w4a16-b12x")
    alone = replace(nano, versions=nano.versions[:1])
    assert alone.memory(SPARK, version="0.20.1+spark.2026.05.p0.cu130").autotune == memory.AUTOTUNE


@pytest.mark.parametrize(
    ("name", "changes", "sound"),
    [
        ("qwen3-next-80b-nvfp4-marlin", {}, True),
        ("qwen3-next-80b-nvfp4-marlin", {"model": "qwen3_moe"}, False),
        ("qwen3-next-80b-nvfp4-marlin", {"scheme": "FP8"}, False),
        ("qwen3-next-80b-nvfp4-marlin", {"scheme": ""}, False),
        ("qwen3-next-80b-nvfp4-marlin", {"bytes": 20 * 2**30}, False),
        ("nemotron-3-nano-w4a4-b12x", {"model": "nemotron_h", "scheme": "NVFP4 (modelopt, W4A16)", "bytes": 19 * 2**30}, False),
        ("qwen3-next-80b-awq", {"scheme": "INT (awq)"}, True),
        ("toy-cpu", {"scheme": ""}, True),
    ],
)
def test_checkpoint_of_another_model_is_refused(
    name: str, changes: dict[str, Any], sound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Architecture, format and size decide, not the name of the folder; a recipe for any model takes any."""
    monkeypatch.setattr(preflight, "read", lambda _: None)
    monkeypatch.setattr(modules, "audit", lambda _: replace(GOOD, **changes))
    with outcome("" if sound else "recipe-unfit", match="cannot be served here"):
        preflight.check(recipe.load(ROOT, name), (), Path("model"), SPARK)


@pytest.mark.parametrize(
    ("vllm", "given", "scheme", "experts", "reference"),
    [
        ("0.33.0", ("--moe-backend=triton",), "MXFP4", 8, "mxfp4-triton"),
        ("0.33.1+spark.2026.12.p0.cu130", ("--moe-backend", "triton_unfused"), "MXFP4 (compressed-tensors)", 8, "mxfp4-triton"),
        ("0.40.0", ("--moe_backend=triton",), "MXFP4", 8, "mxfp4-triton"),
        ("0.32.1", ("--moe-backend=triton",), "MXFP4", 8, ""),
        ("0.33.0", ("--moe-backend=flashinfer_b12x",), "NVFP4 (modelopt)", 512, "b12x-experts"),
        ("0.33.0", ("--moe-backend=marlin",), "MXFP4", 512, ""),
        ("0.33.0", ("--moe-backend=triton",), "FP8", 8, ""),
        ("0.33.0", ("--moe-backend=flashinfer_b12x",), "NVFP4 (modelopt)", 256, ""),
        ("0.33.0", (), "MXFP4", 512, ""),
    ],
)
def test_kernels_that_compute_wrongly_are_refused_before_a_gate(
    vllm: str, given: tuple[str, ...], scheme: str, experts: int, reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the version and the arguments of the server, those of ``gate --flag`` among them."""
    python = standin.environment(tmp_path / "env")
    monkeypatch.setattr(wheel_identity, "version", lambda _: vllm)
    monkeypatch.setattr(preflight, "read", lambda _: None)
    monkeypatch.setattr(modules, "audit", lambda _: replace(GOOD, scheme=scheme, experts=(experts, 2)))
    with outcome("recipe-unfit" if reference else "", says=reference):
        launch_plan(GateOptions(python=python, serve=Path("model"), flag=given), None, python, (), gated=False)


@pytest.mark.parametrize(("total", "fits", "two"), [(4, False, False), (8, True, False), (16, True, True)])
def test_recipe_that_does_not_fit_is_refused(total: float, fits: bool, two: bool, tmp_path: Path) -> None:
    toy, here = recipe.load(ROOT, "toy-cpu"), model(tmp_path / "model", CONFIG, *TENSORS)
    with outcome("" if fits else "recipe-unfit", match="toy-cpu"):
        preflight.check(toy, WORKLOADS.cells(*toy.workloads), here, memory.MachineMemory(total, total))
    assert preflight.both_fit(toy, here, memory.MachineMemory(total, total)) == two


cells = st.builds(
    workloads.WorkloadCell,
    prompt=st.integers(1, 1 << 20),
    answer=st.integers(1, 1 << 20),
    concurrency=st.integers(1, 1024),
    texts=st.sampled_from(["", "sharegpt", "speed-bench"]),
)


@given(cells, st.floats(0.0, 1e4), st.floats(1.0, 10.0))
def test_leg_of_a_named_cell_has_enough_requests_in_whole_rounds(cell: workloads.WorkloadCell, needed: float, more: float) -> None:
    assert workloads.WorkloadCell.parse(cell.name) == cell
    count, fewest = RULE.requests(cell, needed), max(RULE.fewest_requests, cell.concurrency)
    assert fewest <= count <= max(fewest, RULE.most_requests) + cell.concurrency - 1
    assert count % cell.concurrency == 0
    assert count <= RULE.requests(cell, needed * more)


@pytest.mark.parametrize("name", ["", "1024/1024", "1/1 c0", "0/1 c1", "1/1 c1025", "9999999/1 c1", "1/1 c1 ", "fastest"])
def test_name_of_no_workload_is_refused(name: str) -> None:
    with refusal("usage", match="no workload"):
        WORKLOADS.cells(name)


@pytest.mark.parametrize("name", recipe.names(ROOT))
def test_no_recipe_is_measured_with_more_requests_at_a_time_than_it_takes(name: str) -> None:
    """Eight and 32 at a time were asked of recipes with two, four and eight seats; the rate of those was that of a queue."""
    reviewed = recipe.load(ROOT, name)
    seats, named = reviewed.plan.max_num_seqs, WORKLOADS.cells("primary")
    measured = {cell.name: cell for cell in workloads.deciding(named, reviewed.decides, seats)}
    assert preflight.findings(reviewed, [*measured.values()], SPARK) == []
    assert "tpot" in measured[f"1024/256 c{min(8, seats)}"].primary
    assert "rate" in measured[f"1024/256 c{min(32, seats)}"].primary
    assert sum(len(cell.primary) for cell in workloads.deciding(named, {}, seats)) == 4


CELL = {"prompt": 1, "answer": 1}


@pytest.mark.parametrize(
    "cells",
    [[], [{**CELL, "prompt": 0}], [{**CELL, "primary": ["speed"]}]],
)
def test_broken_workload_is_refused(cells: list[dict[str, Any]]) -> None:
    document = {"workloads": {"a": {"why": "w", "source": "s", "cells": cells}}}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(document, workloads.Workloads)


def facts_of(model: str = "", scheme: str = "", experts: int = 0, head_size: int = 0, *, drafts: bool = True) -> modules.ModuleAudit:
    return replace(preflight.UNREAD, model=model, scheme=scheme, experts=(experts, 0), head_size=head_size, drafts=drafts)



DRAFTS = '--speculative-config={"method":"mtp","num_speculative_tokens":2%s}'
FACTS = facts_of("qwen3_next", "NVFP4 (modelopt)", 128, 256, drafts=True)
GPT = facts_of("gpt_oss", "MXFP4", 32, 64, drafts=False)

#: Trap → arguments, release and facts that meet it, and the same but for one, which does not.
CASES: dict[str, list[tuple[list[str], str, modules.ModuleAudit, bool]]] = {
    "mxfp4-triton": [
        (["--moe-backend=triton"], "0.33.0+spark.2026.11.p0.cu130", GPT, True),
        (["--moe_backend", "triton_unfused"], "0.40.0", GPT, True),
        (["--moe-backend=triton"], "0.32.1", GPT, False),
        (["--moe-backend=triton"], "", GPT, False),
        (["--moe-backend=triton"], "0.33.0", FACTS, False),
        (["--moe-backend=triton", "--moe-backend=marlin"], "0.33.0", GPT, False),
    ],
    "b12x-experts": [
        (["--moe-backend=flashinfer_b12x"], "0.33.0", facts_of(experts=512), True),
        (["--moe-backend=flashinfer_b12x"], "0.33.0", facts_of(experts=256), False),
        (["--moe-backend=marlin"], "0.33.0", facts_of(experts=512), False),
    ],
    "draft-b12x": [
        ([DRAFTS % "", "--moe-backend=b12x"], "0.33.0", FACTS, True),
        (["--spec-model=a/b", "--moe-backend=b12x"], "0.33.0", FACTS, True),
        ([DRAFTS % ',"moe_backend":"triton"', "--moe-backend=b12x"], "0.33.0", FACTS, False),
        (["--speculative-config.method=ngram", "--moe-backend=b12x"], "0.33.0", FACTS, False),
    ],
    "speculation-headless": [
        ([DRAFTS % ""], "0.33.0", facts_of(drafts=False), True),
        ([DRAFTS % ""], "0.33.0", facts_of(), False),
        ([DRAFTS % ',"model":"a/b"'], "0.33.0", facts_of(drafts=False), False),
    ],
    "nvfp4-kv-head-64": [
        (["--kv-cache-dtype=nvfp4"], "0.33.0", facts_of("llama", head_size=64), True),
        (["--kv-cache-dtype=nvfp4"], "0.33.0", facts_of("llama", head_size=128), False),
        (["--kv-cache-dtype=fp8"], "0.33.0", facts_of("llama", head_size=64), False),
    ],
    "nvfp4-kv-sinks": [
        (["--kv-cache-dtype", "nvfp4"], "0.33.0", facts_of("gpt_oss"), True),
        (["--kv-cache-dtype", "nvfp4"], "0.33.0", FACTS, False),
    ],
    "mla-projection": [
        ([], "0.23.0", facts_of("glm4_moe_lite", "INT (compressed-tensors)"), True),
        ([], "0.33.0", facts_of("glm4_moe_lite", "INT (compressed-tensors)"), False),
        ([], "0.23.0", facts_of("glm4_moe_lite", "NVFP4 (modelopt)"), False),
    ],
    "draft-head-gemma": [
        ([DRAFTS % ',"draft_lm_head_quantization":"fp8"'], "0.33.0", facts_of("gemma4_text"), True),
        ([DRAFTS % ',"draft_lm_head_quantization":"fp8"'], "0.33.0", FACTS, False),
    ],
    "draft-head-method": [
        (['--speculative-config={"method":"dflash","model":"a/b","draft_lm_head_quantization":"fp8"}'], "0.33.0", FACTS, True),
        (['--speculative-config={"method":"eagle3","model":"a/b","draft_lm_head_quantization":"fp8"}'], "0.33.0", FACTS, False),
        ([DRAFTS % ',"draft_lm_head_quantization":"nvfp4"'], "0.33.0", FACTS, False),
    ],
}  # fmt: skip


def test_a_trap_with_a_broken_pattern_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "when.yaml").write_text('settings: {--dtype: "(["}\n')
    with refusal("file-invalid"):
        strict_yaml.load(tmp_path / "when.yaml", preflight.Condition)


@pytest.mark.parametrize("trap", preflight.load_traps(), ids=lambda trap: trap.id)
def test_trap_holds_for_what_it_describes_and_nothing_beside(trap: preflight.Trap) -> None:
    cases = CASES[trap.id]
    assert {met for *_, met in cases} == {True, False}
    for words, vllm, facts, met in cases:
        assert (trap.id in {each.reference for each in preflight.find_traps(words, vllm, facts)}) == met, words


def test_recipes_meet_no_trap() -> None:
    """With the arguments of each release that a recipe knows."""
    for name in recipe.names(ROOT):
        spec = recipe.load(ROOT, name)
        facts = facts_of(spec.model.architecture, spec.model.quantization, drafts=spec.model.drafts is not False)
        for version in ("0.20.1", "0.23.0", "0.33.0"):
            if variant := spec.find_variant(version):
                words = [*variant.flags, f"--speculative-config={msgspec.json.encode(spec.drafting(variant)).decode()}"]
                assert not [trap.reference for trap in preflight.find_traps(words, version, facts)], name
