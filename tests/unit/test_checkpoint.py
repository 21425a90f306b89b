"""Headers of safetensors files, sound and hostile: files of the declared sizes, of which nothing but the header is written."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refusal

from sparkwright.bench.model import checkpoint

CONFIG = {"model_type": "llama", "num_hidden_layers": 1}


def write(path: Path, text: bytes, data: int, *, length: int | None = None) -> Path:
    """Write a file with the header *text* and room for *data* bytes; the length that it states may be a lie."""
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text) if length is None else length) + text)
        stream.truncate(8 + len(text) + data)
    return path


def entry(dtype: str, shape: list[int], first: int, last: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


def model(folder: Path, shards: dict[str, dict[str, Any]], index: dict[str, str] | None = None) -> Path:
    """Write a model whose *shards* hold those tensors, each behind the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, tensors in shards.items():
        size = max((one["data_offsets"][1] for one in tensors.values()), default=0)
        write(folder / name, json.dumps(tensors).encode(), size)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def test_a_header_gives_every_tensor_in_its_place(tmp_path: Path) -> None:
    """Types, shapes and sizes come from the header, sub-byte types among them; the order is that of the data."""
    tensors = {
        "b": entry("BF16", [3, 2], 4, 16), "a": entry("F32", [], 0, 4), "c": entry("F4", [2, 3], 16, 19), "d": entry("U8", [0, 5], 19, 19),
        "__metadata__": {"format": "pt"},
    }  # fmt: skip
    path = write(tmp_path / "model.safetensors", json.dumps(tensors).encode() + b"   ", 19)

    found = checkpoint.header(path)
    assert [(name, one.dtype, one.shape, one.bytes) for name, one in found.items()] == [
        ("a", "F32", (), 4), ("b", "BF16", (3, 2), 12), ("c", "F4", (2, 3), 3), ("d", "U8", (0, 5), 0),
    ]  # fmt: skip


GOOD = {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 4, 8)}

HOSTILE = {
    "a length beyond the file": (GOOD, 8, 1 << 40),
    "the largest length": (GOOD, 8, (1 << 64) - 1),
    "more data than is described": (GOOD, 9, None),
    "less data than is described": (GOOD, 7, None),
    "overlapping ranges": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, 6, None),
    "the same range twice": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 0, 4)}, 4, None),
    "a gap": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 6, 10)}, 10, None),
    "a range backwards": ({"a": entry("U8", [4], 4, 0)}, 4, None),
    "a negative range": ({"a": entry("U8", [4], -4, 0)}, 4, None),
    "another size than the shape's": ({"a": entry("BF16", [4], 0, 4)}, 4, None),
    "a shape whose product wraps around": ({"a": entry("U8", [1 << 32, 1 << 32, 4], 0, 4)}, 4, None),
    "a dimension beyond all machines": ({"a": entry("U8", [0, 1 << 62], 0, 0)}, 0, None),
    "a negative dimension": ({"a": entry("U8", [-2, -2], 0, 4)}, 4, None),
    "too many dimensions": ({"a": entry("U8", [1] * 5000, 0, 1)}, 1, None),
    "an unknown type": ({"a": entry("F3", [4], 0, 4)}, 4, None),
    "half a byte": ({"a": entry("F4", [3], 0, 2)}, 2, None),
    "a field too many": ({"a": {**entry("U8", [4], 0, 4), "url": "http://upstream.example"}}, 4, None),
    "a field too few": ({"a": {"dtype": "U8", "shape": [4]}}, 4, None),
    "a number that is no integer": ({"a": entry("U8", [4.5], 0, 4)}, 4, None),  # type: ignore[list-item]  # what a stranger may write
    "a tensor that is no object": ({"a": [1, 2, 3]}, 0, None),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_header_that_lies_is_refused(tmp_path: Path, name: str) -> None:
    """Each lie is a stated failure that names the file; none is read as something."""
    tensors, data, length = HOSTILE[name]
    path = write(tmp_path / "model.safetensors", json.dumps(tensors).encode(), data, length=length)

    with refusal("checkpoint-invalid", match=r"model\.safetensors"):
        checkpoint.header(path)


TEXTS = {
    "no JSON": b'{"a": ',
    "no object": b"[1, 2]",
    "no text": b"\xff\xfe{}",
    "depth": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a number of a million digits": b'{"a":{"dtype":"U8","shape":[' + b"9" * 1_000_000 + b'],"data_offsets":[0,4]}}',
    "half of a pair as a name": b'{"\\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
    "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_a_header_that_cannot_be_read_in_one_way_is_refused(tmp_path: Path, name: str) -> None:
    """Depth and long numbers cost neither memory nor a crash."""
    with refusal("checkpoint-invalid"):
        checkpoint.header(write(tmp_path / "model.safetensors", TEXTS[name], 4))


def test_a_header_beyond_the_formats_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "HEADER", 100)
    with refusal("checkpoint-invalid", match="the format allows"):
        checkpoint.header(write(tmp_path / "model.safetensors", json.dumps(GOOD).encode(), 8))


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    """A pipe does not make it wait, a folder is no shard, and a link leads to the file, as the cache of models has it."""
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "short.safetensors").write_bytes(b"\0" * 7)
    for name in ("pipe", "folder", "short"):
        with refusal("checkpoint-invalid"):
            checkpoint.header(tmp_path / f"{name}.safetensors")
    write(tmp_path / "blob", json.dumps(GOOD).encode(), 8)
    (tmp_path / "link.safetensors").symlink_to("blob")
    assert len(checkpoint.header(tmp_path / "link.safetensors")) == 2


ONE, TWO = ({name: entry("U8", [4], 0, 4)} for name in "ab")


@pytest.mark.parametrize(
    ("index", "other"), [({"a": "x-1.safetensors", "b": "x-2.safetensors"}, "old"), (None, "consolidated")], ids=["index", "no index"]
)
def test_shards_are_those_of_the_index_or_all(tmp_path: Path, index: dict[str, str] | None, other: str) -> None:
    """A shard that the index does not name is none of the model's; without an index, files in the vendor's own form are left out."""
    shards = {"x-1.safetensors": ONE, "x-2.safetensors": TWO, f"{other}.safetensors": {"c": entry("U8", [1], 0, 1)}}
    assert set(checkpoint.read(model(tmp_path / "m", shards, index)).tensors) == {"a", "b"}


@pytest.mark.parametrize(
    "index",
    [
        {"a": "x-1.safetensors", "b": "x-1.safetensors"},
        {"a": "x-1.safetensors", "b": "x-2.safetensors", "c": "x-2.safetensors"},
        {"a": "../m/x-1.safetensors", "b": "x-2.safetensors"},
        {"a": "/etc/passwd", "b": "x-2.safetensors"},
        {"a": 3, "b": "x-2.safetensors"},
        {"a": "x-2.safetensors", "b": "x-1.safetensors"},
        None,
    ],
)
def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path: Path, index: dict[str, str] | None) -> None:
    """A tensor elsewhere, one too many, and names that leave the folder."""
    shards = {"x-1.safetensors": ONE, "x-2.safetensors": TWO if index else ONE}
    with refusal("checkpoint-invalid"):
        checkpoint.read(model(tmp_path / "m", shards, index))


def test_what_is_missing_is_said_to_be_missing(tmp_path: Path) -> None:
    """No folder, no config, no shards, and a shard of the index that is not there."""
    for folder in (tmp_path / "none", tmp_path):
        with refusal("not-provided"):
            checkpoint.read(folder)
    with refusal("not-provided", match=r"no \*\.safetensors"):
        checkpoint.read(model(tmp_path / "empty", {}))
    with refusal("not-provided", match=r"x-1\.safetensors"):
        checkpoint.read(model(tmp_path / "lost", {}, {"a": "x-1.safetensors"}))


def test_a_config_that_is_huge_or_no_json_is_refused(tmp_path: Path) -> None:
    """It is read up to a bound; a quantisation config that is no object is refused, too."""
    folder = model(tmp_path / "m", {"model.safetensors": GOOD})
    for text in (b" " * (checkpoint.CONFIG + 1), b"{", b"[]", b'{"quantization_config": 3}'):
        (folder / "config.json").write_bytes(text)
        with refusal("checkpoint-invalid"):
            checkpoint.read(folder)


def test_modelopts_own_file_says_how_a_model_is_quantised(tmp_path: Path) -> None:
    """Where config.json is silent, hf_quant_config.json speaks, one level deeper."""
    folder = model(tmp_path / "m", {"model.safetensors": GOOD})
    (folder / "hf_quant_config.json").write_text('{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}')

    assert checkpoint.read(folder).quantization == {"quant_method": "modelopt", "quant_algo": "NVFP4"}
