"""Tuned configurations of experts: their names, the tuner's process, and their way into the source tree."""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refusal
from tests.support import standin, wheels
from tests.support.checkpoints import moe, write
from tests.unit.conftest import Cli, Mini

from sparkwright.bench.model import checkpoint, modules, tuning
from sparkwright.builder import moe_configs, toolchain
from sparkwright.builder.moe_configs import TuningRecord
from sparkwright.builder.wheel import archive, graft, sbom
from sparkwright.builder.workspace import source_tree
from sparkwright.core import strict_yaml
from sparkwright.forks.stack import MOE_CONFIGS
from sparkwright.serving import launch, preflight

ROOT = Path(__file__).parents[2]
#: The module in which vLLM's kernels look up a file; it keeps what it read, as vLLM does.
READER = """
import functools, json, os, pathlib
NAME = {name!r}
@functools.lru_cache
def get_moe_configs(experts, size, dtype):
    path = pathlib.Path(os.environ.get("VLLM_TUNED_CONFIG_FOLDER", "/nonexistent"), NAME)
    return json.loads(path.read_text()) if path.exists() else None
"""
#: A tuner that uses Ray, and the command line, as vLLM's does. The latency of a configuration is its number.
TUNER = """
import argparse, json, ray
from ray.experimental.tqdm_ray import tqdm
from vllm.model_executor.layers.fused_moe.fused_moe import NAME, get_moe_configs
@ray.remote(num_gpus=1)
class Worker:
    def __init__(self, seed):
        assert int(ray.get_gpu_ids()[0]) == 0
    def benchmark(self, tokens, size):
        configs = get_moe_configs(8, size, None)
        config = configs[str(tokens)] if configs else {"BLOCK_SIZE_M": 500}
        return config, float(tokens * config["BLOCK_SIZE_M"])
    def tune(self, tokens, size, space):
        best = min(enumerate(tqdm(space)), key=lambda pair: pair[1]["BLOCK_SIZE_M"])[1]
        print(f"Completed tuning for batch_size={tokens}")
        return best
parser = argparse.ArgumentParser()
parser.add_argument("--model"), parser.add_argument("--tp-size", type=int), parser.add_argument("--dtype"), parser.add_argument("--save-dir")
parser.add_argument("--batch-size", type=int, nargs="+"), parser.add_argument("--tune", action="store_true")
args = parser.parse_args()
assert (args.dtype, args.tp_size) == ("auto", 1) and json.load(open(f"{args.model}/config.json"))
ray.init()
workers = [Worker.remote(0) for _ in range(int(ray.available_resources()["GPU"]))]
space = [{"BLOCK_SIZE_M": number} for number in range(10, 400)]
inputs = [(tokens, 1536, space) if args.tune else (tokens, 1536) for tokens in args.batch_size]
results = ray.get([getattr(workers[0], "tune" if args.tune else "benchmark").remote(*each) for each in inputs])
if args.tune:
    with open(f"{args.save_dir}/{NAME}", "w") as sink:
        json.dump(dict(zip(args.batch_size, results)), sink)
"""

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


# Names.


def test_files_have_the_names_of_vllm(tmp_path: Path) -> None:
    """Upstream's own files of these shapes and devices, in 0.23.0 and 0.33.0, have these names."""
    fp8 = checkpoint.read(moe(tmp_path / "fp8", "F8_E4M3", 512, 512, quantization_config=FP8))
    name = "E=512,N=512,device_name=NVIDIA_GB10,dtype=fp8_w8a8,block_shape=[128,128].json"
    assert modules.expert_layer(fp8).filename(modules.device_name("NVIDIA GB10")) == name
    assert modules.expert_layer(fp8, 2).filename("D").startswith("E=512,N=256,")
    assert modules.expert_layer(fp8, 2, whole=True).filename("D").startswith("E=256,N=512,")
    plain = modules.expert_layer(checkpoint.read(moe(tmp_path / "plain", "BF16", 8, 14336)))
    assert plain.filename(modules.device_name("NVIDIA H200 NVL")) == "E=8,N=14336,device_name=NVIDIA_H200.json"


@pytest.mark.parametrize("name", ["dense", "packed", "words for blocks", "a list of groups"])
def test_checkpoint_without_a_tuning_space_is_refused(name: str, tmp_path: Path) -> None:
    folder, odd = tmp_path / "m", {"quant_method": "fp8", "weight_block_size": ["x", 128]}
    if name == "dense":
        write(folder, {"num_hidden_layers": 1}, [("model.layers.0.mlp.down_proj.weight", "BF16", [64, 64])])
    elif name == "packed":
        moe(folder, "U8", quantization_config={"quant_method": "modelopt"})
    elif name == "words for blocks":
        moe(folder, "F8_E4M3", quantization_config=odd)
    else:
        moe(folder, "F8_E4M3", quantization_config={**FP8, "weight_block_size": None, "config_groups": [1]})
        assert modules.expert_layer(checkpoint.read(folder)).block == ()
        return
    with refusal("checkpoint-invalid" if name == "words for blocks" else "tuning-unavailable"):
        modules.expert_layer(checkpoint.read(folder))


# The tuner.

NAME = "E=8,N=1536,device_name=NVIDIA_GB10.json"


class Bench:
    """An environment with vLLM and its wheel, a driver's program that names a GPU, and a tuner."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.python = folder, standin.environment(folder / "environment")
        self.site = next((folder / "environment").glob("lib/python3.*/site-packages"))
        path = self.site / "vllm" / "model_executor" / "layers" / "fused_moe" / "fused_moe.py"
        path.parent.mkdir(parents=True)
        path.write_text(READER.format(name=NAME))
        self.wheel = folder / f"vllm-{standin.VERSION}-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            for file in sorted(self.site.rglob("*")):
                if file.is_file():
                    archive.write(file, file.relative_to(self.site))
        self.tuner, self.model = folder / "benchmark_moe.py", moe(folder / "model")
        self.tuner.write_text(TUNER)

    def tune(self, cli: Cli, mini: Mini, *words: str | Path, gpu: str = "NVIDIA GB10, 12.1, 580.1") -> Any:
        programs = self.folder / "programs"
        programs.mkdir(exist_ok=True)
        (programs / "nvidia-smi").write_text(f"#!/bin/sh\necho '{gpu}'\n")
        (programs / "nvidia-smi").chmod(0o755)
        given = ["--python", self.python, "--wheel", self.wheel, "--tuner", self.tuner, "--tokens", "1", "--tokens", "64"]
        environment = {"PATH": f"{programs}:{os.environ['PATH']}"}
        done = cli("model", "tune", *mini.words, "--json", *given, *words, self.model, env=environment)
        return json.loads(done.stdout)


@pytest.fixture(name="bench")
def _bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "bench")


def test_tuner_runs_without_ray_and_its_file_is_measured_against_the_default(bench: Bench, mini: Mini, cli: Cli) -> None:
    assert "error" not in bench.tune(cli, mini)
    folder = mini.root / "build" / "demo" / "moe"
    record = strict_yaml.load(folder / f"{NAME[:-5]}.yaml", TuningRecord)
    assert [(row.tokens, row.before, row.tuned) for row in record.latencies] == [
        (1, (500.0,) * 3, (10.0,) * 3), (64, (32000.0,) * 3, (640.0,) * 3),
    ]  # fmt: skip
    assert (record.vllm, record.device, record.capability, record.configurations) == (standin.VERSION, "NVIDIA_GB10", "12.1", 0)
    # A seeded draw of the configurations does not have the best.
    bench.tune(cli, mini, "--configurations", "5")
    few = strict_yaml.load(folder / f"{NAME[:-5]}.yaml", TuningRecord)
    assert few.configurations == 5
    assert few.latencies[0].tuned[0] > 10


def test_file_for_another_device_release_or_wheel_is_not_made(bench: Bench, mini: Mini, cli: Cli) -> None:
    assert bench.tune(cli, mini, gpu="NVIDIA H100 80GB HBM3, 9.0, 580.1")["error"]["reference"] == "tuning-foreign"
    (bench.site / "vllm" / "envs.py").write_text("changed = True\n")
    assert "does not hold the files" in bench.tune(cli, mini)["error"]["what"]
    mini.edit("forks/demo/lock.yaml", "ref: v0.33.0", "ref: v0.32.0")
    error = bench.tune(cli, mini)["error"]
    assert (error["reference"], "vLLM 0.32.0" in error["what"]) == ("tuning-foreign", True)
    assert not (mini.root / "build" / "demo" / "moe").exists()


def test_tuner_that_writes_another_file_has_failed(bench: Bench, mini: Mini, cli: Cli) -> None:
    bench.tuner.write_text(TUNER.replace("{args.save_dir}/{NAME}", "{args.save_dir}/E=8,N=768,device_name=NVIDIA_GB10.json"))
    assert bench.tune(cli, mini)["error"]["reference"] == "tuning-failed"
    bench.tuner.write_text("raise SystemExit(3)")
    assert bench.tune(cli, mini)["error"]["reference"] == "command-failed"


@pytest.mark.network
def test_tuner_of_the_default_stack_uses_no_more_of_ray_than_the_driver_has(user_store: Any) -> None:
    from sparkwright.forks.context import RunContext
    from sparkwright.forks.stack import Project

    root = Path(__file__).parents[2]
    project = Project(root, "2026.11")
    tree = ast.parse(tuning.locked_tuner(RunContext(project, user_store, ("vllm",), root / "dist", source="sdist")))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ray"}
    modules_used = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ray")}
    assert used <= {"remote", "init", "available_resources", "get_gpu_ids", "get"}
    assert modules_used == {"ray.experimental.tqdm_ray"}


# Packing.


def record(folder: Path, content: bytes = b'{"triton_version": "3.6.0", "1": {"BLOCK_SIZE_M": 16}}', name: str = NAME, **changes: Any) -> None:
    """Write a file and its record."""
    from sparkwright.core.files import sha256_bytes

    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    stated = {
        "sha256": sha256_bytes(content), "vllm": "0.33.0+spark.x", "wheel": "a" * 64, "tuner": "b" * 64, "device": "NVIDIA_GB10",
        "capability": "12.1", "host": {"gpu": "NVIDIA GB10"}, "date": "2026-11-25", "configurations": 0,
        "latencies": [{"tokens": 1, "before": [20.0], "tuned": [10.0]}],
    }  # fmt: skip
    (folder / f"{name[:-5]}.yaml").write_text(strict_yaml.dump({**stated, **changes}))


def test_file_is_in_the_source_tree_and_in_the_label(mini: Mini) -> None:
    """A graft packs every file of the package that its tree adds to the release (tests/integration/test_builds.py)."""
    plain, inputs = source_tree(mini.context(), "vllm"), mini.context().source_inputs("vllm")
    record(mini.root / "build" / "demo" / "moe")
    context = mini.context()
    tuned = source_tree(context, "vllm")
    member = f"mini_vllm/{MOE_CONFIGS}/{NAME}"
    assert context.objects.changes(plain.tree, tuned.tree) == {member: "A"}
    assert json.loads(context.objects.blob(tuned.tree, member) or b"")["1"] == {"BLOCK_SIZE_M": 16}
    assert context.source_inputs("vllm") != inputs
    record(mini.root / "build" / "demo" / "moe", b'{"1": {"BLOCK_SIZE_M": 32}}')
    assert source_tree(mini.context(), "vllm").tree not in (plain.tree, tuned.tree)
    with refusal("tuning-present"):
        moe_configs.members(mini.context(), "vllm", "mini_vllm", tuned.tree)


def test_file_is_in_the_wheel_at_the_path_where_serve_looks_for_it(mini: Mini, tmp_path: Path) -> None:
    """A real wheel, written by the functions of a graft; no library is compiled, so the base keeps its own."""
    name = "E=256,N=512,device_name=NVIDIA_GB10,dtype=fp8_w8a8,block_shape=[128,128].json"
    content = b'{"triton_version": "3.6.0", "1": {"BLOCK_SIZE_M": 16}}'
    mini.edit("build/demo/environment.yaml", "package: mini_vllm", "package: vllm")
    mini.edit("build/demo/environment.yaml", "[mini_vllm/_version.py]", "[vllm/_version.py]")
    record(mini.root / "build" / "demo" / "moe", content, name)
    context = mini.context()
    source, settings = source_tree(context, "vllm"), toolchain.settings(context, "vllm")
    official = archive.WheelName.of("vllm-0.33.0-py3-none-any.whl")
    members = {"vllm/_version.py": b"__version__ = '0.33.0'\n", "vllm/other.py": b""}
    base = archive.write(tmp_path, official, members, wheels.metadata("vllm", "0.33.0"), pure=True)
    changed, manifest = graft.changes(context, source, base, tmp_path, {}, settings)
    files = sbom.DistInfoFiles(b"{}", sbom.gather(context, source))
    (tmp_path / "dist").mkdir()
    wheel = graft.write(base, tmp_path / "dist", "spark.1", changed, manifest, settings, files)

    member = f"vllm/model_executor/layers/fused_moe/configs/{name}"
    with zipfile.ZipFile(wheel) as packed:
        assert packed.testzip() is None
        written = {each: packed.read(each) for each in packed.namelist()}
        (row,) = [each for each in csv.reader(written["vllm-0.33.0+spark.1.dist-info/RECORD"].decode().splitlines()) if each[0] == member]
        python = standin.environment(tmp_path / "environment")
        site = next((tmp_path / "environment").glob("lib/python3.*/site-packages"))
        model = moe(tmp_path / "model", "F8_E4M3", 256, 512, quantization_config=FP8)

        def experts(gpu: str) -> str:
            machine = preflight.Machine(119.7, gpus=1, unified=True, gpu=gpu)
            return launch.plan(launch.ServeRequest(model=str(model)), python, ROOT, machine=machine).experts

        assert experts("NVIDIA GB10").startswith(f"no {name}")
        packed.extractall(site, [each for each in packed.namelist() if each.startswith("vllm/model_executor/")])
    assert manifest.replaced == (member,)
    assert written[member] == content
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    assert row == [member, f"sha256={digest}", str(len(content))]
    assert b"0.33.0+spark.1" in written["vllm/_version.py"]
    assert experts("NVIDIA GB10") == f"tuned, {name}"
    assert experts("NVIDIA H100 80GB HBM3").startswith("no E=256,N=512,device_name=NVIDIA_H100_80GB_HBM3,")


def test_file_that_is_slower_and_record_without_a_file_are_refused(mini: Mini) -> None:
    """Also where one batch of several is slower."""
    folder, context = mini.root / "build" / "demo" / "moe", mini.context()
    rows = [{"tokens": 1, "before": [20.0], "tuned": [10.0]}, {"tokens": 8, "before": [40.8, 41.1, 40.7], "tuned": [44.9, 45.2, 44.7]}]
    record(folder, latencies=rows)
    with refusal("tuning-slower", match="batches of 8 tokens"):
        moe_configs.members(context, "vllm", "mini_vllm", "")
    (folder / NAME).unlink()
    with refusal("tuning-foreign", match="the record of no file"):
        moe_configs.members(context, "vllm", "mini_vllm", "")


@pytest.mark.parametrize(
    "changes",
    [
        {"vllm": "0.32.0"}, {"capability": "9.0"}, {"device": "NVIDIA_H100_80GB_HBM3"}, {"sha256": "c" * 64},
        {"name": "E=8,N=1536,device_name=..json"},
    ],
)  # fmt: skip
def test_file_of_another_device_release_or_record_is_not_packed(changes: dict[str, Any], mini: Mini) -> None:
    record(mini.root / "build" / "demo" / "moe", **changes)
    with refusal("tuning-foreign"):
        source_tree(mini.context(), "vllm")


def test_file_without_a_record_or_of_another_form_is_refused(mini: Mini) -> None:
    folder = mini.root / "build" / "demo" / "moe"
    record(folder, b'{"1": ["BLOCK_SIZE_M"]}')
    with refusal("file-invalid"):
        source_tree(mini.context(), "vllm")
    record(folder)
    (folder / f"{NAME[:-5]}.yaml").unlink()
    with refusal("file-invalid"):
        source_tree(mini.context(), "vllm")
