"""Models of any size: sparse files with true headers, of which no weight is there."""

import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sparkwright.bench.model.checkpoint import BITS

#: A tensor: name, type, shape.
Told = tuple[str, str, list[int]]


def write(folder: Path, config: dict[str, Any], tensors: Iterable[Told], shards: int = 1) -> Path:
    """Write a model; the data of its shards is a hole in the file. Several have an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    told = list(tensors)
    if shards == 1:
        _write_shard(folder / "model.safetensors", told)
        return folder
    weight_map: dict[str, str] = {}
    part = math.ceil(len(told) / shards)
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        own = told[number * part : (number + 1) * part]
        weight_map |= {tensor: name for tensor, _, _ in own}
        _write_shard(folder / name, own)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _write_shard(path: Path, tensors: Iterable[Told]) -> None:
    entries, end = {}, 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape, start=BITS[dtype]) // 8
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + end)
