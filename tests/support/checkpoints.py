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
