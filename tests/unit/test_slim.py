"""Slimmer copies of models: every number the nearest, nothing else touched, and nothing half-written taken for whole."""

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.refusals import refusal
from tests.support import checkpoints, processes

from sparkwright.bench.model import checkpoint, modules, quantise, slim
from sparkwright.cli import main
from sparkwright.core import errors, files

Floats = NDArray[np.float64]
FORMATS: tuple[slim.Format, ...] = ("fp8", "nvfp4-w4a16")
TYPES = {
    "BF16": ml_dtypes.bfloat16, "F32": np.float32, "U8": np.uint8, "F8_E4M3": ml_dtypes.float8_e4m3fn, "I64": np.int64,
}  # fmt: skip

#: The slow reference: what the formats' papers say a code is, by arithmetic on floats alone.
E4M3 = np.array([(1 + m / 8) * 2.0 ** (e - 7) if e else m / 8 * 2.0**-6 for e in range(16) for m in range(8)][:-1])
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
BF16: Floats = np.array([struct.unpack("<f", struct.pack("<I", bits << 16))[0] for bits in range(1 << 16)])
FINITE = np.isfinite(BF16)


def nearest(values: Floats, grid: Floats) -> NDArray[np.int64]:
    """Return for each of *values* the index of the nearest of *grid*, the even one of two: the distance to every one is computed."""
    # Beyond the grid the differences would drown.
    values = np.minimum(values, 2 * grid[-1])
    best, distance = np.zeros(values.shape, np.int64), np.full(values.shape, np.inf)
    for index, point in enumerate(grid):
        other = np.abs(values - point)
        closer = (other < distance) | ((other == distance) & (index % 2 == 0))
        best[closer], distance[closer] = index, other[closer]
    return best


# Every BF16.


@pytest.mark.parametrize("exponent", [-126, -17, -9, 0, 3, 120])
def test_each_of_all_bf16_values_becomes_the_nearest_fp8_by_its_scale(exponent: int) -> None:
    codes = quantise.fp8_codes(exponent)[FINITE]
    expected = nearest(np.abs(BF16[FINITE]) / 2.0**exponent, E4M3)
    assert np.array_equal(codes & 0x7F, expected)
    assert np.array_equal(codes >> 7, np.signbit(BF16[FINITE]))


@pytest.mark.parametrize("exponent", [-20, -11, 2])
def test_each_of_all_bf16_values_becomes_the_nearest_nvfp4_by_each_scale_of_its_block(exponent: int) -> None:
    scale_codes, codes = quantise.nvfp4_codes(exponent)
    largest = BF16[: quantise.INFINITY]
    # Distances to six times a scale, as a sixth of a number is none in binary.
    assert np.array_equal(scale_codes, nearest(largest / 2.0**exponent, 6 * E4M3))
    by_scale = codes.reshape(len(E4M3), -1)[:, FINITE]
    assert not by_scale[0].any()
    for scale, row in zip(E4M3[1:], by_scale[1:], strict=True):
        assert np.array_equal(row & 7, nearest(np.abs(BF16[FINITE]) / 2.0**exponent, scale * E2M1)), scale
        assert np.array_equal(row >> 3, np.signbit(BF16[FINITE]))


# Whole models.

#: A hybrid with experts: what stays, what changes, and parts of one layer in different shards.
SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "model.embed_tokens.weight": ("BF16", (64, 32)), "lm_head.weight": ("BF16", (64, 32)), "model.norm.weight": ("BF16", (32,)),
    "model.position_ids": ("I64", (3,)), "model.layers.0.layer_scalar": ("BF16", (1,)),
    "model.layers.0.self_attn.q_proj.weight": ("BF16", (48, 32)), "model.layers.0.self_attn.q_proj.bias": ("BF16", (48,)),
    "model.layers.0.self_attn.k_proj.weight": ("BF16", (16, 32)), "model.layers.0.self_attn.v_proj.weight": ("BF16", (16, 32)),
    "model.layers.0.self_attn.o_proj.weight": ("BF16", (32, 48)), "model.layers.0.mlp.gate.weight": ("BF16", (16, 32)),
    "model.layers.0.mlp.shared_expert_gate.weight": ("BF16", (1, 32)),
    "model.layers.1.linear_attn.in_proj_qkvz.weight": ("BF16", (64, 32)), "model.layers.1.linear_attn.in_proj_ba.weight": ("BF16", (16, 32)),
    "model.layers.1.linear_attn.A_log": ("F32", (5,)), "model.layers.1.linear_attn.dt_bias": ("BF16", (5,)),
    "model.layers.1.linear_attn.conv1d.weight": ("BF16", (64, 1, 4)), "model.layers.1.linear_attn.out_proj.weight": ("BF16", (32, 48)),
    "mtp.layers.0.self_attn.o_proj.weight": ("BF16", (32, 48)), "model.visual.blocks.0.attn.proj.weight": ("BF16", (32, 32)),
}  # fmt: skip
for _layer, _expert in ((0, 0), (0, 1), (1, 0), (1, 1)):
    _name = f"model.layers.{_layer}.mlp.experts.{_expert}.down_proj"
    SHAPES |= {f"{_name}.weight": ("U8", (32, 8)), f"{_name}.weight_scale": ("F8_E4M3", (32, 1))}
    SHAPES |= {f"{_name}.weight_scale_2": ("F32", ()), f"{_name}.input_scale": ("F32", ())}
CHANGED = [
    "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj", "model.layers.0.self_attn.o_proj",
    "model.layers.1.linear_attn.in_proj_qkvz", "model.layers.1.linear_attn.out_proj", "lm_head",
]  # fmt: skip
CONFIG: dict[str, Any] = {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 2, "num_experts_per_tok": 1, "tie_word_embeddings": False}
MODELOPT = {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "kv_cache_scheme": {"type": "float", "num_bits": 8},
    "ignore": ["lm_head", "model.layers.0.self_attn*", "model.layers.1.linear_attn*", "mtp*", "model.visual*"],
}  # fmt: skip
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["re:.*self_attn.*", "lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}}},
}  # fmt: skip


def write(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write *arrays* in the order of their names, whatever multiples their places are of."""
    entries, end, data = {}, 0, []
    names = {np.dtype(kind): name for name, kind in TYPES.items()}
    for name, array in sorted(arrays.items()):
        entries[name] = {"dtype": names[array.dtype], "shape": array.shape, "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
        data.append(array.tobytes())
    header = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"".join(data))


def tensors(folder: Path) -> dict[str, NDArray[Any]]:
    """Return all tensors of a model; in shards that were written anew, each lies at a multiple of its width."""
    arrays = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        entries = json.loads(data[8:begin])
        anew = entries.pop("__metadata__", None)
        for name, entry in entries.items():
            (first, last), kind = entry["data_offsets"], np.dtype(TYPES[entry["dtype"]])
            assert not anew or (begin + first) % kind.itemsize == 0
            arrays[name] = np.frombuffer(data[begin + first : begin + last], kind).reshape(entry["shape"])
    return arrays


def model(folder: Path, quantization: Mapping[str, Any] | None = None, seed: int = 1, replaced: Mapping[str, NDArray[Any]] = {}, **config: Any) -> Path:
    """Write the hybrid in two shards; without *quantization*, its experts are plain, too."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    arrays: dict[str, NDArray[Any]] = {}
    for name, (kind, shape) in SHAPES.items():
        drawn = draw.standard_t(3, shape) * 0.02
        if ".experts." in name and not quantization:
            arrays |= {name: drawn.astype(ml_dtypes.bfloat16)} if name.endswith(".weight") else {}
        else:
            arrays[name] = np.asarray(drawn.astype(TYPES[kind]) if kind in ("BF16", "F32") else draw.integers(1, 100, shape).astype(TYPES[kind]))
    arrays |= replaced
    names = sorted(arrays)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for shard, own in shards.items():
        write(folder / shard, {name: arrays[name] for name in own})
    index = {"weight_map": {name: shard for shard, own in shards.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    declared = {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **declared, **config}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"other weights")
    return folder


def slimmed(folder: Path, out: Path, form: slim.Format = "fp8", *layers: str) -> dict[str, NDArray[Any]]:
    slim.Slimming(folder, form, layers).write(out)
    return tensors(out)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def dequantised(arrays: Mapping[str, NDArray[Any]], name: str) -> Floats:
    """Return the matrix *name* as vLLM reads it: of compressed-tensors' NVFP4 the scale of the tensor divides."""
    scales = arrays[f"{name}.weight_scale"].astype(np.float64)
    if f"{name}.weight" in arrays and arrays[f"{name}.weight"].dtype == ml_dtypes.float8_e4m3fn:
        assert scales.shape in ((len(scales),), (len(scales), 1))
        return np.asarray(arrays[f"{name}.weight"].astype(np.float64) * scales.reshape(-1, 1))
    packed = arrays[f"{name}.weight_packed"] if f"{name}.weight_packed" in arrays else arrays[f"{name}.weight"]
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    if f"{name}.weight_scale_2" in arrays:
        own = float(arrays[f"{name}.weight_scale_2"])
    else:
        own = 1 / float(arrays[f"{name}.weight_global_scale"][0])
    return np.asarray(np.where(codes & 8, -1, 1) * E2M1[codes & 7] * scales.repeat(16, axis=1) * own)


@pytest.mark.parametrize("quantization", [None, MODELOPT, COMPRESSED], ids=["plain", "modelopt", "compressed-tensors"])
@pytest.mark.parametrize("form", FORMATS)
def test_chosen_matrices_change_and_every_other_byte_stays(
    tmp_path: Path, form: slim.Format, quantization: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read in parts of two to four rows."""
    monkeypatch.setattr(slim, "CHUNK", 200)
    source = model(tmp_path / "source", quantization)
    before, after = tensors(source), slimmed(source, tmp_path / "out", form)
    for name, array in before.items():
        if name.removesuffix(".weight") not in CHANGED:
            assert after[name].tobytes() == array.tobytes(), name
            assert (after[name].dtype, after[name].shape) == (array.dtype, array.shape)
    for name in CHANGED:
        exact, rounded = before[f"{name}.weight"].astype(np.float64), dequantised(after, name)
        # A step of FP8 is a sixteenth of a number at most, one of NVFP4 a third of the largest of a block.
        blocks = np.abs(exact).reshape(len(exact), -1, 16).max(-1).repeat(16, -1) if form != "fp8" else np.abs(exact)
        assert (np.abs(exact - rounded) <= blocks * (1 / 16 if form == "fp8" else 1 / 4) + 1e-6).all(), name
    record = json.loads((tmp_path / "out" / slim.RECORD).read_text())
    audit = modules.audit(checkpoint.read(tmp_path / "out"))
    assert record["read_after"] == audit.weights < record["read_before"] == modules.audit(checkpoint.read(source)).weights
    assert sorted(record["layers"]) == sorted(CHANGED)
    for shard, hashes in record["shards"].items():
        assert (hashes["source"], hashes["sha256"]) == (files.sha256_file(source / shard), files.sha256_file(tmp_path / "out" / shard))
    assert contents(tmp_path / "out").keys() == {"model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json", slim.RECORD}


def test_a_shard_without_a_chosen_matrix_is_the_same_file(tmp_path: Path) -> None:
    source, out, shard = model(tmp_path / "source"), tmp_path / "out", "model-2.safetensors"
    record = slim.Slimming(source, "fp8", ["lm_head"]).write(out)
    digest = files.sha256_file(source / shard)
    assert (files.sha256_file(out / shard), record.shards[shard]) == (digest, slim.ShardRecord(digest, digest))


def test_the_algorithm_of_a_file_of_its_own_is_declared_in_the_config(tmp_path: Path) -> None:
    source = model(tmp_path / "source", MODELOPT)
    config = json.loads((source / "config.json").read_text())
    document = {"quantization": {**config.pop("quantization_config"), "exclude_modules": ["lm_head"]}}
    (source / "config.json").write_text(json.dumps(config))
    (source / "hf_quant_config.json").write_text(json.dumps(document))
    slimmed(source, tmp_path / "out")
    declared = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (declared["quant_method"], declared["quantization"]["quant_algo"]) == ("modelopt", "MIXED_PRECISION")
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()


# What is refused.


def output(array: NDArray[Any]) -> dict[str, Any]:
    """Return the changes of a model whose output projection is *array*."""
    return {"replaced": {"model.layers.0.self_attn.o_proj.weight": array.astype(ml_dtypes.bfloat16)}}


@pytest.mark.parametrize(
    ("changes", "layers", "reference", "says"),
    [
        ({}, ["self_attn.x_proj"], "slim-layers", "there is none"),
        ({}, ["self_attn.*", "embed_tokens"], "slim-layers", "rows of an embedding"),
        ({}, ["mlp.gate"], "slim-layers", "decides what a token is given to"),
        ({}, ["in_proj_ba"], "slim-layers", "states decay"),
        ({}, ["experts"], "slim-layers", "as their makers"),
        ({}, ["visual.*"], "slim-layers", "see or hear"),
        ({}, ["model.norm"], "slim-layers", "no matrix"),
        ({"tie_word_embeddings": True}, ["lm_head"], "slim-layers", "tie_word_embeddings"),
        ({"model_type": "qwen3_next"}, ["lm_head"], "slim-layers", "no head of this class"),
        (output(np.ones((48, 40))), ["o_proj"], "slim-layers", "48, 40"),
        ({}, ["q_proj"], "mixture-joined", "qkv|q_proj"),
        ({"quantization": {"quant_method": "awq"}}, [], "slim-unsupported", "awq"),
        ({"quantization": ["modelopt"]}, [], "slim-unsupported", ""),
        ({"quantization": {**MODELOPT, "quant_algo": "MIXED_PRECISION"}}, [], "mixture-undeclared", ""),
        (output(np.full((32, 48), np.nan)), [], "checkpoint-invalid", "o_proj"),
        (output(np.full((32, 48), np.inf)), [], "checkpoint-invalid", "o_proj"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_made_slimmer_as_asked_is_refused(
    tmp_path: Path, changes: dict[str, Any], layers: list[str], reference: str, says: str
) -> None:
    source = model(tmp_path / "source", **changes)
    with pytest.raises(errors.SparkwrightError) as error:
        slimmed(source, tmp_path / "out", "fp8", *layers)
    text = " ".join((error.value.what, *error.value.details))
    assert (error.value.reference, says in text or says == "qkv|q_proj") == (reference, True), text
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_model_without_a_matrix_that_may_change_is_refused(tmp_path: Path) -> None:
    """One that was made slimmer before, and one whose only matrix has rows beyond a part."""
    slimmed(model(tmp_path / "source"), tmp_path / "slim")
    checkpoints.write(tmp_path / "wide", {"model_type": "x", "num_hidden_layers": 1}, [("model.layers.0.a_proj.weight", "BF16", [16, slim.CHUNK])])
    for name in ("slim", "wide"):
        with refusal("slim-nothing"):
            slimmed(tmp_path / name, tmp_path / "out")


def test_a_tied_head_stays_where_no_layer_is_named(tmp_path: Path) -> None:
    after = slimmed(model(tmp_path / "source", tie_word_embeddings=True), tmp_path / "out")
    assert (after["lm_head.weight"].dtype, "lm_head.weight_scale" in after) == (ml_dtypes.bfloat16, False)


# Kills, other sources, and full disks.


@pytest.mark.parametrize("form", FORMATS)
def test_a_copy_that_was_killed_anywhere_is_no_model_and_is_finished_by_the_next_run(tmp_path: Path, form: slim.Format) -> None:
    source = model(tmp_path / "source", MODELOPT)
    expected = slimmed(source, tmp_path / "whole", form)
    whole = contents(tmp_path / "whole")
    step, out = 1, tmp_path / "out"
    while processes.kill_at(step, lambda: slim.Slimming(source, form).write(out), str(out)):
        assert not (out / "config.json").exists() or contents(out) == whole
        slimmed(source, out, form)
        assert contents(out) == whole
        shutil.rmtree(out)
        step += 1
    assert step > 12
    assert tensors(out).keys() == expected.keys()


#: What lies in the folder before.
OTHERS: dict[str, Callable[[Path, Path], object]] = {
    "weights": lambda source, out: slimmed(model(source.with_name("other"), seed=2), out),
    "layers": lambda source, out: slimmed(source, out, "fp8", "o_proj"),
    "format": lambda source, out: slimmed(source, out, "nvfp4-w4a16"),
    "files": lambda _, out: checkpoints.write(out, {}, []),
    "the model itself": shutil.copytree,
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_folder_with_something_else_is_refused_and_left_alone(tmp_path: Path, other: str) -> None:
    source, out = model(tmp_path / "source"), tmp_path / "out"
    OTHERS[other](source, out)
    before = contents(out)
    with refusal("slim-other-source"):
        slimmed(source if other != "the model itself" else out, out)
    assert contents(out) == before


#: Writes a copy where there is less room than it needs, or where another program takes the room in the meantime.
SMALL = """\
import shutil, sys
from pathlib import Path
from sparkwright.bench.model.slim import Slimming
from sparkwright.core.errors import SparkwrightError
if sys.argv[3] == "taken":
    shutil.disk_usage = lambda path: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40)
try:
    Slimming(Path(sys.argv[1]), "fp8").write(Path(sys.argv[2]))
except SparkwrightError as error:
    print(error.reference, error.what)
print(sorted(path.name for path in Path(sys.argv[2]).iterdir()))
"""


@pytest.mark.parametrize(("how", "says", "left"), [("asked", "needs 3.2 MB under", "[]"), ("taken", "no room left", f"['{slim.RECORD}']")])
def test_a_full_disk_is_said_before_and_in_the_middle_and_no_shard_is_left(tmp_path: Path, how: str, says: str, left: str) -> None:
    shapes: Iterable[checkpoints.Told] = [(f"model.layers.0.{part}_proj.weight", "BF16", [1024, 1024]) for part in "abc"]
    source = checkpoints.write(tmp_path / "source", {"model_type": "x", "num_hidden_layers": 1}, shapes)
    disk = tmp_path / "disk"
    disk.mkdir()
    script = 'mount -t tmpfs -o size=2m none "$0"\n"$@"\numount "$0"'
    words = [str(disk), sys.executable, "-c", SMALL, str(source), str(disk), how]
    done = subprocess.run([*processes.mounting_shell(), script, *words], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("disk-full "), done.stdout + done.stderr
    assert says in done.stdout
    assert done.stdout.rstrip().endswith(left)


#: Prints by how many bytes the copying of a model raises the memory of a process.
MEASURED = """\
import resource, sys
from pathlib import Path
from sparkwright.bench.model.slim import Slimming
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
slimming = Slimming(Path(sys.argv[1]), sys.argv[3])
before = peak()
slimming.write(Path(sys.argv[2]))
print(peak() - before)
"""


@pytest.mark.parametrize("form", FORMATS)
def test_memory_does_not_grow_with_a_tensor(tmp_path: Path, form: slim.Format) -> None:
    """A tensor of 256 MiB takes a part of them; NVFP4 has tables of 8 MB, made from their values in FP32."""
    shape: checkpoints.Told = ("model.layers.0.a_proj.weight", "BF16", [1 << 15, 1 << 12])
    source = checkpoints.write(tmp_path / "source", {"model_type": "x", "num_hidden_layers": 1}, [shape])
    done = subprocess.run([sys.executable, "-c", MEASURED, str(source), str(tmp_path / "out"), form], capture_output=True, text=True, check=True)
    assert int(done.stdout) < (64 << 20 if form == "fp8" else 160 << 20)


def test_the_command_says_what_is_gained_and_records_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = model(tmp_path / "source", MODELOPT)
    words = ["model", "slim", str(source), "--to", str(tmp_path / "out"), "--layers", "linear_attn.*", "lm_head", "--json"]
    assert main.main([*words, "--cache-dir", str(tmp_path / "cache"), "--root", str(Path(__file__).parents[2])]) == 0
    printed = capsys.readouterr()
    assert "3 layers in fp8" in printed.err
    assert json.loads(printed.out)["record"]["layers"] == ["model.layers.1.linear_attn.in_proj_qkvz", "model.layers.1.linear_attn.out_proj", "lm_head"]
