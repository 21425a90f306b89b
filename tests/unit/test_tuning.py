"""Tuned configurations of experts: their names, the tuner's process, and their way into the source tree."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refusal
from tests.support import processes, standin
from tests.support.checkpoints import moe
from tests.unit.conftest import ROOT, Cli, Mini

from sparkwright.bench.model import checkpoint, modules, tuning
from sparkwright.builder.moe_configs import TuningRecord
from sparkwright.builder.workspace import source_tree
from sparkwright.core import strict_yaml
from sparkwright.core.files import sha256_bytes, sha256_file
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import MOE_CONFIGS, Project

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


def tuned_file(folder: Path, gpu: str, kind: str, experts: int, size: int, shards: int = 1, **options: Any) -> str:
    whole = options.pop("whole", False)
    return modules.tuned_file(checkpoint.read(moe(folder / "m", kind, experts, size, **options)), modules.device_name(gpu), shards, whole=whole)[0]


@pytest.mark.parametrize(
    ("model", "options", "gpu", "name"),
    [
        (("F8_E4M3", 512, 512), {}, "NVIDIA GB10", "E=512,N=512,device_name=NVIDIA_GB10,dtype=fp8_w8a8,block_shape=[128,128].json"),
        (("F8_E4M3", 512, 512, 2), {}, "D", "E=512,N=256,device_name=D,dtype=fp8_w8a8,block_shape=[128,128].json"),
        (("F8_E4M3", 512, 512, 2), {"whole": True}, "D", "E=256,N=512,device_name=D,dtype=fp8_w8a8,block_shape=[128,128].json"),
        (("BF16", 8, 14336), {"quantization_config": None}, "NVIDIA H200 NVL", "E=8,N=14336,device_name=NVIDIA_H200.json"),
        (("F8_E4M3", 8, 512), {"quantization_config": {**FP8, "weight_block_size": None, "config_groups": [1]}}, "D",
         "E=8,N=512,device_name=D,dtype=fp8_w8a8.json"),
    ],
)  # fmt: skip
def test_files_have_the_names_of_vllm(model: tuple[Any, ...], options: dict[str, Any], gpu: str, name: str, tmp_path: Path) -> None:
    """Upstream's own files of these shapes and devices, in 0.23.0 and 0.33.0, have these names."""
    assert tuned_file(tmp_path, gpu, *model, **{"quantization_config": FP8, **options}) == name


@pytest.mark.parametrize(
    ("kind", "experts", "config", "reference"),
    [
        ("BF16", 0, None, "tuning-unavailable"),
        ("U8", 8, {"quant_method": "modelopt"}, "tuning-unavailable"),
        ("F8_E4M3", 8, {"quant_method": "fp8", "weight_block_size": ["x", 128]}, "checkpoint-invalid"),
    ],
    ids=["dense", "packed", "words for blocks"],
)
def test_checkpoint_without_a_tuning_space_is_refused(
    kind: str, experts: int, config: dict[str, Any] | None, reference: str, tmp_path: Path
) -> None:
    with refusal(reference):
        tuned_file(tmp_path, "D", kind, experts, 1536, quantization_config=config)


# The tuner.

NAME = "E=8,N=1536,device_name=NVIDIA_GB10.json"


class Bench:
    """An environment with vLLM and its wheel, a driver's program that names a GPU, and a tuner."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.python = folder, standin.environment(folder / "environment")
        self.site = next((folder / "environment").glob("lib/python3.*/site-packages"))
        reader = self.site / "vllm" / "model_executor" / "layers" / "fused_moe" / "fused_moe.py"
        reader.parent.mkdir(parents=True)
        reader.write_text(READER.format(name=NAME))
        self.wheel = Path(shutil.make_archive(str(folder / f"vllm-{standin.VERSION}-py3-none-any"), "zip", self.site)).rename(
            folder / f"vllm-{standin.VERSION}-py3-none-any.whl"
        )
        self.tuner, self.model = folder / "benchmark_moe.py", moe(folder / "model")
        self.tuner.write_text(TUNER)

    def tune(self, cli: Cli, mini: Mini, *words: str | Path, gpu: str = "NVIDIA GB10, 12.1, 580.1") -> Any:
        processes.script(self.folder / "nvidia-smi", f"echo '{gpu}'")
        options = ["--python", self.python, "--wheel", self.wheel, "--tuner", self.tuner, "--tokens", "1", "--tokens", "64", *words]
        environment = {"PATH": f"{self.folder}:{os.environ['PATH']}"}
        return json.loads(cli("model", "tune", *mini.words, "--json", *options, self.model, env=environment).stdout)


@pytest.fixture(name="bench")
def _bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "bench")


def test_tuner_runs_without_ray_and_its_file_is_measured_against_the_default(bench: Bench, mini: Mini, cli: Cli) -> None:
    assert "error" not in bench.tune(cli, mini)
    path = mini.root / "build" / "demo" / "moe" / f"{NAME[:-5]}.yaml"
    record = strict_yaml.load(path, TuningRecord)
    assert [(row.tokens, row.before, row.tuned) for row in record.latencies] == [
        (1, (500.0,) * 3, (10.0,) * 3), (64, (32000.0,) * 3, (640.0,) * 3),
    ]  # fmt: skip
    assert (record.vllm, record.device, record.capability, record.configurations) == (standin.VERSION, "NVIDIA_GB10", "12.1", 0)
    # A seeded draw of the configurations does not have the best.
    bench.tune(cli, mini, "--configurations", "5")
    few = strict_yaml.load(path, TuningRecord)
    assert (few.configurations, few.latencies[0].tuned[0] > 10) == (5, True)


def test_slower_file_is_not_placed_where_a_build_would_refuse_it(bench: Bench, mini: Mini, cli: Cli) -> None:
    bench.tuner.write_text(TUNER.replace('{"BLOCK_SIZE_M": 500}', '{"BLOCK_SIZE_M": 1}'))
    path = Path(bench.tune(cli, mini)["path"])
    assert not (mini.root / "build" / "demo" / "moe").exists()
    assert strict_yaml.load(path.with_suffix(".yaml"), TuningRecord).sha256 == sha256_file(path)


def test_file_for_another_device_release_or_wheel_is_not_made(bench: Bench, mini: Mini, cli: Cli) -> None:
    assert bench.tune(cli, mini, gpu="NVIDIA H100 80GB HBM3, 9.0, 580.1")["error"]["reference"] == "tuning-foreign"
    (bench.site / "vllm" / "envs.py").write_text("changed = True\n")
    assert "vllm/envs.py" in bench.tune(cli, mini)["error"]["details"][0]
    mini.edit("forks/demo/lock.yaml", "ref: v0.33.0", "ref: v0.32.0")
    assert "the stack has 0.32.0" in bench.tune(cli, mini)["error"]["details"][0]
    assert not (mini.root / "build" / "demo" / "moe").exists()


def test_tuner_that_writes_another_file_has_failed(bench: Bench, mini: Mini, cli: Cli) -> None:
    bench.tuner.write_text(TUNER.replace("{args.save_dir}/{NAME}", "{args.save_dir}/E=8,N=768,device_name=NVIDIA_GB10.json"))
    assert bench.tune(cli, mini)["error"]["reference"] == "tuning-failed"
    bench.tuner.write_text("raise SystemExit(3)")
    assert bench.tune(cli, mini)["error"]["reference"] == "command-failed"


@pytest.mark.network
def test_tuner_of_the_default_stack_uses_no_more_of_ray_than_the_driver_has(user_store: Any) -> None:
    project = Project(ROOT, "2026.11")
    source = tuning.locked_tuner(RunContext(project, user_store, ("vllm",), ROOT / "dist", source="sdist")).decode()
    assert set(re.findall(r"\bray\.(\w+)(?=[.(\[])", source)) <= {"remote", "init", "available_resources", "get_gpu_ids", "get", "experimental"}
    assert set(re.findall(r"from (ray\S*) import", source)) == {"ray.experimental.tqdm_ray"}


# Packing.


def record(folder: Path, content: bytes = b'{"triton_version": "3.6.0", "1": {"BLOCK_SIZE_M": 16}}', name: str = NAME, **changes: Any) -> None:
    """Write a file and its record."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    stated = {
        "sha256": sha256_bytes(content), "vllm": "0.33.0+spark.x", "wheel": "a" * 64, "tuner": "b" * 64, "device": "NVIDIA_GB10",
        "capability": "12.1", "host": {"gpu": "NVIDIA GB10"}, "date": "2026-11-25", "configurations": 0,
        "latencies": [{"tokens": 1, "before": [20.0], "tuned": [10.0]}],
    }  # fmt: skip
    (folder / f"{name[:-5]}.yaml").write_text(strict_yaml.dump({**stated, **changes}))


def test_file_is_in_the_source_tree_and_in_the_label(mini: Mini) -> None:
    """A graft packs it (tests/integration/test_builds.py), and serve looks for it in the wheel (test_serving.py)."""
    plain, inputs = source_tree(mini.context(), "vllm"), mini.context().source_inputs("vllm")
    record(mini.root / "build" / "demo" / "moe")
    context = mini.context()
    tuned = source_tree(context, "vllm")
    member = f"mini_vllm/{MOE_CONFIGS}/{NAME}"
    assert context.objects.changes(plain.tree, tuned.tree) == {member: "A"}
    assert json.loads(context.objects.blob(tuned.tree, member) or b"")["1"] == {"BLOCK_SIZE_M": 16}
    assert context.source_inputs("vllm") != inputs


@pytest.mark.parametrize(
    ("changes", "removed", "reference"),
    [
        ({"vllm": "0.32.0"}, "", "tuning-foreign"), ({"capability": "9.0"}, "", "tuning-foreign"),
        ({"device": "NVIDIA_H100_80GB_HBM3"}, "", "tuning-foreign"), ({"sha256": "c" * 64}, "", "tuning-foreign"),
        ({"name": "E=8,N=1536,device_name=..json"}, "", "tuning-foreign"),
        # Rounds of a batch that is slower with the file, behind one that is faster.
        ({"latencies": [{"tokens": 1, "before": [20.0], "tuned": [10.0]}, {"tokens": 8, "before": [40.8, 41.1, 40.7], "tuned": [44.9, 45.2, 44.7]}]},
         "", "tuning-slower"), ({}, ".yaml", "file-invalid"), ({"content": b'{"1": ["BLOCK_SIZE_M"]}'}, "", "file-invalid"),
    ],
)  # fmt: skip
def test_file_of_another_device_release_record_or_form_is_not_packed(
    changes: dict[str, Any], removed: str, reference: str, mini: Mini
) -> None:
    folder = mini.root / "build" / "demo" / "moe"
    record(folder, **changes)
    if removed:
        (folder / NAME).with_suffix(removed).unlink()
    with refusal(reference):
        source_tree(mini.context(), "vllm")
