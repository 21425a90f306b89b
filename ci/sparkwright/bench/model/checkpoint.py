"""
A model's folder: every tensor of every shard, from the headers alone, and ``config.json``.

A safetensors file is eight bytes with the length of a JSON header, the header, and the data. Files
come from strangers, so nothing in them is trusted: the ranges of the tensors must tile the data
without a gap, each as long as its shape and type require, and no name may occur twice. The library
of the format maps whole files; this reader takes at most `HEADER` bytes of each.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from sparkwright.core.console import console
from sparkwright.core.errors import Advice, SparkwrightError
from sparkwright.forks.stack import SourceError

#: The format's own limit of a header, in bytes (``MAX_HEADER_SIZE`` of the safetensors library).
HEADER = 100_000_000
#: Bytes of config.json, and of the index; that of a model with 90,000 tensors has 9 MB.
CONFIG, INDEX = 4 << 20, 64 << 20
#: DeepSeek-V3 in NVFP4 has about 180,000 tensors in 163 shards.
MOST_TENSORS, MOST_SHARDS = 2_000_000, 4096
#: The largest dimension of a tensor, and the number of its dimensions.
MOST_SIZE, MOST_DIMENSIONS = 1 << 40, 8

#: Bits of an element by the format's name of its type.
BITS: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}


class ModelError(SparkwrightError):
    """A model is missing, or its files cannot be used."""

    references: ClassVar[Mapping[str, Advice]] = {
        "checkpoint-invalid": Advice(
            "A file of the model is cut off, was made by a program that is wrong, or was made to "
            "mislead.",
            "Fetch the model again and compare its hashes with those that its publisher states; "
            "do not load it.",
        ),
        "model-missing": Advice(
            "The folder holds no model, or the model is not whole in the cache of models on this "
            "machine.",
            "Name the folder with --model, fetch the model (`hf download`), or let vLLM fetch it "
            "with --download.",
        ),
        "modules-unexpected": Advice(
            "Weights of the model are not as its own quantisation config says: it is slower than "
            "its format, or it is read wrongly.",
            "Look at the modules named above. Ask the model's publisher for a checkpoint that "
            "agrees with its config.",
        ),
    }


class Tensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor: its type in the format's words, its shape, and its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


class Checkpoint(msgspec.Struct, frozen=True):
    """
    A model's folder.

    Attributes:
        config: ``config.json``.
        quantization: Its ``quantization_config``, else ``hf_quant_config.json``; may be empty.
        tensors: Those of all shards, by name.
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


def invalid(message: str, details: object = "") -> ModelError:
    """Return the error ``checkpoint-invalid``."""
    lines = [str(details)[:300]] if details else []
    return ModelError("checkpoint-invalid", message, details=lines)


def read(folder: Path) -> Checkpoint:
    """
    Return the model in *folder*.

    Raises:
        not-provided: There is no such folder, or no model in it.
        checkpoint-invalid: A file is damaged or hostile.
    """
    if not folder.is_dir():
        todo = "Name the folder of a model: config.json and *.safetensors."
        raise SourceError("not-provided", f"There is no folder {folder}.", todo=todo)
    config = _document(folder / "config.json", CONFIG)
    index = folder / "model.safetensors.index.json"
    shard_of = _weight_map(_document(index, INDEX)) if index.exists() else {}
    shards = sorted(set(shard_of.values())) or _shards(folder)
    if len(shards) > MOST_SHARDS:
        raise invalid(f"{folder.name} has more than {MOST_SHARDS:,} shards.")
    tensors: dict[str, Tensor] = {}
    with console.progress(f"headers of {folder.name}", len(shards)) as progress:
        for shard in shards:
            for tensor in header(folder / shard):
                if shard_of.get(tensor.name, shard) != shard or tensor.name in tensors:
                    raise invalid(f"{shard} holds {tensor.name[:200]!r}, as does another shard.")
                tensors[tensor.name] = tensor
            if len(tensors) > MOST_TENSORS:
                raise invalid(f"{folder.name} has more than {MOST_TENSORS:,} tensors.")
            progress.update(progress.done + 1)
    if lost := sorted(shard_of.keys() - tensors.keys()):
        raise invalid(f"The index names {len(lost):,} tensors that no shard holds.", lost[:5])
    return Checkpoint(config, _quantization(folder, config), tensors, tuple(shards))


def header(path: Path) -> list[Tensor]:
    """
    Return the tensors of the safetensors file at *path*, in the order of their data.

    Raises:
        checkpoint-invalid: Its header does not describe it.
    """
    with os.fdopen(_open(path), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER):
            text = f"{path.name} states a header of {length:,} bytes in a file of {size:,}"
            raise invalid(f"{text}; the format allows {HEADER:,}.")
        document = _parse(path.name, stream.read(length))
    document.pop("__metadata__", None)
    try:
        entries = msgspec.convert(document, dict[str, _Entry])
    except msgspec.ValidationError as error:
        raise invalid(f"{path.name} has a header of another form.", error) from error
    end, tensors = 0, []
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].data_offsets, item[0])):
        bound = all(0 <= extent <= MOST_SIZE for extent in entry.shape)
        if entry.dtype not in BITS or len(entry.shape) > MOST_DIMENSIONS or not bound:
            raise invalid(f"{path.name}: {name[:200]!r} has an impossible type or shape.", entry)
        count, rest = divmod(math.prod(entry.shape, start=BITS[entry.dtype]), 8)
        if rest or entry.data_offsets != (end, end + count):
            raise invalid(
                f"{path.name}: {name[:200]!r} is not at {end:,} to {end + count:,}.", entry
            )
        end += count
        tensors.append(Tensor(name, entry.dtype, tuple(entry.shape), count))
    if end != size - 8 - length:
        text = f"{path.name} describes {end:,} bytes of data and holds {size - 8 - length:,}."
        raise invalid(text)
    return tensors


def _open(path: Path) -> int:
    """Return a descriptor of the regular file at *path*, which may be a link into a cache."""
    try:
        # Without waiting: a pipe of that name would hang.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        message, todo = f"The model has no {path.name}.", "Fetch the whole model."
        raise SourceError("not-provided", message, details=[str(path)], todo=todo) from error
    except OSError as error:
        raise invalid(f"{path.name} cannot be read.", error) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise invalid(f"{path.name} is no file.")
    return handle


def _document(path: Path, most: int) -> dict[str, Any]:
    with os.fdopen(_open(path), "rb") as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise invalid(f"{path.name} has more than {most:,} bytes.")
    return _parse(path.name, data)


def _parse(name: str, data: bytes) -> dict[str, Any]:
    """Return the JSON object *data*; a key that occurs twice means two things to two readers."""
    try:
        document = json.loads(data.decode(), object_pairs_hook=_unique)
        if re.search(rb"\\u[dD][89a-fA-F]", data):
            # Half of a surrogate pair is no text that could be shown or written.
            json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise invalid(f"{name} cannot be read as JSON.", error) from error
    if not isinstance(document, dict):
        raise invalid(f"{name} holds no JSON object.")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice[:100]!r} occurs twice")
    return document


def _weight_map(index: dict[str, Any]) -> dict[str, str]:
    """Return the shard of each tensor."""
    try:
        shard_of = msgspec.convert(index.get("weight_map"), dict[str, str])
    except msgspec.ValidationError as error:
        raise invalid("model.safetensors.index.json has no weight_map.", error) from error
    for name in set(shard_of.values()):
        if not re.fullmatch(r"[\w.+-]{1,200}\.safetensors", name):
            raise invalid("The index names a shard that is no plain file name.", name)
    return shard_of


def _shards(folder: Path) -> list[str]:
    """Return the files of a model without an index; ``consolidated`` ones are duplicates."""
    listed = [path.name for path in itertools.islice(folder.iterdir(), 4 * MOST_SHARDS + 1)]
    if len(listed) > 4 * MOST_SHARDS:
        raise invalid(f"{folder.name} holds too many files.")
    names = sorted(name for name in listed if name.endswith(".safetensors"))
    names = [name for name in names if not name.startswith("consolidated")] or names
    if not names:
        todo = "Only models in the safetensors format can be read."
        raise SourceError("not-provided", f"There is no *.safetensors in {folder}.", todo=todo)
    return names


def _quantization(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the quantisation config; older ModelOpt checkpoints have it in a file of its own."""
    text = config.get("text_config")
    nested = text.get("quantization_config") if isinstance(text, dict) else None
    quantization = config.get("quantization_config") or nested
    if quantization is None and (folder / "hf_quant_config.json").exists():
        document = _document(folder / "hf_quant_config.json", CONFIG)
        inner = document.get("quantization")
        return {"quant_method": "modelopt", **(inner if isinstance(inner, dict) else document)}
    if not isinstance(quantization or {}, dict):
        raise invalid("The model's quantization_config is no JSON object.")
    return dict(quantization or {})
