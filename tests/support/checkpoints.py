"""Models of any size: sparse files with true headers, of which no weight is there."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sparkwright.bench.model.checkpoint import BITS

#: A tensor: name, type, shape.
Told = tuple[str, str, list[int]]


def write(folder: Path, config: dict[str, Any], tensors: Iterable[Told]) -> Path:
    """Write a model; the data of its shard is a hole in the file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    entries, end = {}, 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape, start=BITS[dtype]) // 8
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + end)
    return folder


def moe(folder: Path, kind: str = "BF16", experts: int = 8, size: int = 1536, **config: Any) -> Path:
    """Write a model of one layer with experts."""
    name, tensors = "model.layers.0.mlp.experts.{}.down_proj", list[Told]()
    for number in range(experts):
        tensors += [(f"{name.format(number)}.weight", kind, [256, size // 2 if kind == "U8" else size])]
        if kind == "U8":
            scales = [("weight_scale", "F8_E4M3", [256, size // 16]), ("weight_scale_2", "F32", []), ("input_scale", "F32", [])]
            tensors += [(f"{name.format(number)}.{part}", dtype, shape) for part, dtype, shape in scales]
        if kind == "F8_E4M3":
            tensors += [(f"{name.format(number)}.weight_scale_inv", "F32", [2, size // 128])]
    stated = {"model_type": "m", "num_hidden_layers": 1, "moe_intermediate_size": size, "num_experts_per_tok": 2, "num_experts": experts}
    return write(folder, {**stated, **config}, tensors)
