"""The module audit against a real vLLM: what the checkpoint says, and what the server made of it."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest

from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.gates.model import checkpoint, loaded, modules

if TYPE_CHECKING:
    from sparkwright.gates.server.serve import Server

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]
#: What stays in BF16, as publishers leave out what is delicate.
IGNORED = ["lm_head", "re:.*mlp.down_proj"]
SCHEME = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTISATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": IGNORED,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**SCHEME, "strategy": "channel", "dynamic": False},
            "input_activations": {**SCHEME, "strategy": "token", "dynamic": True},
        }
    },
}


def quantised(toy: Path, folder: Path) -> Path:
    """Write *toy* to *folder* with all projections in eight bits but those that are `IGNORED`."""
    shutil.copytree(toy, folder)
    made: dict[str, tuple[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]] = {}
    with (toy / "model.safetensors").open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        stream.seek(8 + length)
        for tensor in checkpoint.header(toy / "model.safetensors"):
            values = np.frombuffer(stream.read(tensor.bytes), ml_dtypes.bfloat16).reshape(tensor.shape)
            if tensor.name.endswith("_proj.weight") and "down_proj" not in tensor.name:
                plain = values.astype(np.float32)
                scale = np.maximum(np.abs(plain).max(axis=1, keepdims=True) / 127, 1e-8)
                made[tensor.name] = ("I8", np.rint(plain / scale).astype(np.int8))
                made[f"{tensor.name}_scale"] = ("BF16", scale.astype(ml_dtypes.bfloat16))
            else:
                made[tensor.name] = (tensor.dtype, values)
    header, place = {}, 0
    for name, (dtype, array) in made.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [place, place + array.nbytes]}
        place += array.nbytes
    text = json.dumps(header).encode()
    parts = [struct.pack("<Q", len(text)), text, *(array.tobytes() for _, array in made.values())]
    (folder / "model.safetensors").write_bytes(b"".join(parts))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTISATION}))
    return folder


def test_what_the_config_ignores_is_unquantised_in_the_server(vllm_python: Path, toy: Path, tmp_path: Path) -> None:
    """
    The diagnosis of a slow model: the audit names the projections that stayed plain, and vLLM loads those, and no others, as such.

    All other weights are as large in the server as in the checkpoint.
    """
    folder = quantised(toy, tmp_path / "quantised")
    context = RunContext(Project(ROOT, "2026.11"), Store(tmp_path / "store"), (), tmp_path / "dist")

    audit = modules.audit(checkpoint.read(folder))
    found = loaded.listed(context, vllm_python, folder)

    assert audit.findings == ()
    assert {row.modules for row in audit.rows if row.told == "ignore"} == {"lm_head", "mlp.down_proj"}
    inside = [row for row in loaded.rows(found, audit.layers) if row.group not in ("embeddings", "lm_head")]
    methods = {row.modules: row.method for row in inside if row.method}
    assert methods.pop("mlp.down_proj") == "UnquantizedLinearMethod"
    assert "self_attn.qkv_proj" in methods
    assert not [method for name, method in methods.items() if "Unquantized" in method and name != "self_attn.attn"]
    assert loaded.grown(found, audit) == []


def test_a_server_serves_the_folder_as_far_as_it_tells(server: Server, toy: Path) -> None:
    """Version, limit and type of cache come from its API; nothing of that contradicts the folder."""
    said = loaded.served(server.url, toy, modules.audit(checkpoint.read(toy)))

    assert (said.model, said.limit, said.wrong) == ("toy", 1024, ())
    assert said.version
    assert said.cache
