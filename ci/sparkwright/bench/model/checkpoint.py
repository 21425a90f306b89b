"""
What a model's folder says that it holds: every tensor of every shard, from the headers alone, and its ``config.json``.

A safetensors file is eight bytes with the length of a JSON header, the header, and the data that it describes. The files come from
strangers, so nothing in them is believed: the ranges of the tensors must tile the data without a gap, each as long as its shape and type
say, and no name may be there twice. Only headers are read, at most `HEADER` bytes of each file.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.bench.errors import ModelError
from sparkwright.core.console import console
from sparkwright.forks.stack import SourceError

#: The format's own limit of a header, in bytes (``MAX_HEADER_SIZE`` of the safetensors library).
HEADER = 100_000_000
#: Of config.json, and of the index of shards; the index of a model with 90,000 tensors has 9 MB.
CONFIG, INDEX = 4 << 20, 64 << 20
#: DeepSeek-V3 in NVFP4 has about 180,000 tensors in 163 shards.
MOST_TENSORS, MOST_SHARDS = 2_000_000, 4096
#: No tensor has more elements in a dimension, nor more dimensions.
MOST_SIZE, MOST_DIMENSIONS = 1 << 40, 8

#: Bits of an element by the format's name of its type.
BITS: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64), **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16), **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8), "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Tensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor: its type in the format's words, its shape, and how many bytes it takes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


class Checkpoint(msgspec.Struct, frozen=True):
    """
    A model's folder.

    Attributes:
        config: ``config.json``.
        quantization: What says how it is quantised: ``quantization_config`` in it, else ``hf_quant_config.json``; empty where nothing does.
        tensors: Of all shards, by name.
        shards: Names of the files.
    """

    config: dict[str, Any]
    quantization: dict[str, Any]
    tensors: dict[str, Tensor]
    shards: tuple[str, ...]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read(folder: Path) -> Checkpoint:
    """
    Return what the model in *folder* holds.

    Raises:
        not-provided: There is no such folder, or no model in it.
        checkpoint-invalid: A file is not what it should be.
    """
    if not folder.is_dir():
        raise SourceError(
            "not-provided", f"There is no folder {folder}.", todo="Name the folder of a model: config.json and *.safetensors."
        )
    config = read_config(folder)
    index = folder / "model.safetensors.index.json"
    placed = _placed(_document(index, INDEX)) if index.exists() else {}
    names = sorted(set(placed.values())) if placed else _found(folder)
    if len(names) > MOST_SHARDS:
        raise ModelError("checkpoint-invalid", f"{folder.name} has {len(names):,} shards; {MOST_SHARDS:,} are looked at.")
    tensors: dict[str, Tensor] = {}
    with console.progress(f"headers of {folder.name}", len(names)) as progress:
        for number, name in enumerate(names):
            for tensor in header(folder / name):
                if placed.get(tensor.name, name) != name or tensor.name in tensors:
                    raise ModelError(
                        "checkpoint-invalid", f"{name} holds {tensor.name[:200]!r}, which is in another shard, too, or belongs there."
                    )
                tensors[tensor.name] = tensor
            if len(tensors) > MOST_TENSORS:
                raise ModelError("checkpoint-invalid", f"{folder.name} has more than {MOST_TENSORS:,} tensors.")
            progress.update(number + 1)
    if lost := placed.keys() - tensors.keys():
        few = [one[:200] for one in sorted(lost)[:5]]
        raise ModelError("checkpoint-invalid", f"The index names {len(lost):,} tensors that no shard holds.", details=few)
    return Checkpoint(config, _quantization(folder, config), tensors, tuple(names))


def read_config(folder: Path) -> dict[str, Any]:
    """Return ``config.json`` of the model in *folder*."""
    return _document(folder / "config.json", CONFIG)


def header(path: Path) -> list[Tensor]:
    """
    Return the tensors of the safetensors file at *path*, by their place in it.

    Raises:
        checkpoint-invalid: Its header does not describe it.
    """
    with os.fdopen(_opened(path), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ModelError("checkpoint-invalid", f"{path.name} says that its header has {length:,} bytes; the file has {size:,}.")
        if length > HEADER:
            raise ModelError("checkpoint-invalid", f"{path.name} has a header of {length:,} bytes; the format allows {HEADER:,}.")
        document = _parsed(path.name, stream.read(length))
    document.pop("__metadata__", None)
    try:
        entries = msgspec.convert(document, dict[str, _Entry])
    except msgspec.ValidationError as error:
        raise ModelError("checkpoint-invalid", f"{path.name} has a header of another form.", details=[str(error)[:300]]) from error
    end, found = 0, []
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].data_offsets, item[0])):
        wanted, (first, last) = _bytes(path.name, name, entry), entry.data_offsets
        if first != end or last - first != wanted:
            says = f"is said to lie at {first:,} to {last:,}; it has {wanted:,} bytes and the one before ends at {end:,}"
            raise ModelError("checkpoint-invalid", f"{path.name}: {name[:200]!r} {says}.")
        end = last
        found.append(Tensor(name, entry.dtype, tuple(entry.shape), wanted))
    if end != size - 8 - length:
        raise ModelError("checkpoint-invalid", f"{path.name} describes {end:,} bytes of data and holds {size - 8 - length:,}.")
    return found


def _bytes(file: str, name: str, entry: _Entry) -> int:
    """Return how many bytes a tensor of that type and shape takes."""
    if entry.dtype not in BITS:
        raise ModelError("checkpoint-invalid", f"{file}: {name[:200]!r} is of the unknown type {entry.dtype[:40]!r}.")
    if len(entry.shape) > MOST_DIMENSIONS or any(not 0 <= one <= MOST_SIZE for one in entry.shape):
        raise ModelError("checkpoint-invalid", f"{file}: {name[:200]!r} has an impossible shape.", details=[str(entry.shape[:20])[:300]])
    bits = BITS[entry.dtype]
    for one in entry.shape:
        bits *= one
    if bits % 8:
        raise ModelError("checkpoint-invalid", f"{file}: {name[:200]!r} ends in the middle of a byte.")
    return bits // 8


def _opened(path: Path) -> int:
    """Return a descriptor of the regular file at *path*, which may be a link, as the cache of models has them."""
    try:
        # Without waiting: a pipe of that name would hang.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise SourceError("not-provided", f"The model has no {path.name}.", details=[str(path)], todo="Fetch the whole model.") from error
    except OSError as error:
        raise ModelError("checkpoint-invalid", f"{path.name} cannot be read.", details=[str(error)]) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ModelError("checkpoint-invalid", f"{path.name} is no file.")
    return handle


def _document(path: Path, most: int) -> dict[str, Any]:
    with os.fdopen(_opened(path), "rb") as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise ModelError("checkpoint-invalid", f"{path.name} has more than {most:,} bytes.")
    return _parsed(path.name, data)


def _parsed(name: str, data: bytes) -> dict[str, Any]:
    """Return the JSON object *data*; a key that is there twice means two things to two readers."""
    try:
        found = json.loads(data.decode(), object_pairs_hook=_once)
        if _SURROGATE.search(data):
            # Half of a pair is no text that could be shown or written; a whole pair is.
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError, UnicodeDecodeError) as error:
        raise ModelError(
            "checkpoint-invalid", f"{name} cannot be read as JSON.", details=[f"{type(error).__name__}: {error}"[:300]]
        ) from error
    if not isinstance(found, dict):
        raise ModelError("checkpoint-invalid", f"{name} holds no JSON object.")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice[:100]!r} is there twice")
    return found


def _placed(index: dict[str, Any]) -> dict[str, str]:
    """Return the shard of each tensor by the index."""
    try:
        placed = msgspec.convert(index.get("weight_map"), dict[str, str])
    except msgspec.ValidationError as error:
        raise ModelError("checkpoint-invalid", "model.safetensors.index.json has no weight_map.", details=[str(error)[:300]]) from error
    if bad := [name for name in set(placed.values()) if not re.fullmatch(r"[\w.+-]{1,200}\.safetensors", name)]:
        raise ModelError(
            "checkpoint-invalid", "The index names shards that are no plain file names.", details=[one[:200] for one in bad[:5]]
        )
    return placed


def _found(folder: Path) -> list[str]:
    """Return the safetensors files of a model without an index; ``consolidated`` files hold the same weights in the vendor's own form."""
    names = sorted(path.name for path in _few(folder) if path.name.endswith(".safetensors"))
    names = [name for name in names if not name.startswith("consolidated")] or names
    if not names:
        raise SourceError(
            "not-provided", f"There is no *.safetensors in {folder}.", todo="Only models in the safetensors format can be looked at."
        )
    return names


def _few(folder: Path) -> Iterator[Path]:
    for number, path in enumerate(folder.iterdir()):
        if number > 4 * MOST_SHARDS:
            raise ModelError("checkpoint-invalid", f"{folder.name} holds too many files.")
        yield path


def _quantization(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return what says how the model is quantised; older ModelOpt checkpoints say it in a file of their own, one level deeper."""
    text = config.get("text_config")
    told = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    if told is None and (folder / "hf_quant_config.json").exists():
        document = _document(folder / "hf_quant_config.json", CONFIG)
        told = {"quant_method": "modelopt", **(inner if isinstance(inner := document.get("quantization"), dict) else document)}
    if not isinstance(told or {}, dict):
        raise ModelError("checkpoint-invalid", "The model's quantization_config is no JSON object.")
    return dict(told or {})
