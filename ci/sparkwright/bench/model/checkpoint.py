"""
A model's folder: every tensor of every shard, from the headers alone, and ``config.json``.

A safetensors file is eight bytes with the length of a JSON header, the header, and the data. Files
come from strangers, so nothing in them is trusted: at most `HEADER` bytes of each are read, and the
ranges of the tensors must tile the data without a gap, each as long as its shape and type require.
Of a key that occurs twice the last one counts, as for the library by which a server reads it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta

from sparkwright.core.errors import Advice, SparkwrightError
from sparkwright.core.files import list_folder, read_bytes

#: The format's own limit of a header, in bytes (``MAX_HEADER_SIZE`` of the safetensors library).
HEADER = 100_000_000
#: Bytes of config.json, and of the index; that of a model with 90,000 tensors has 9 MB.
CONFIG, INDEX = 4 << 20, 64 << 20
#: DeepSeek-V3 in NVFP4 has about 180,000 tensors.
MOST_TENSORS = 2_000_000

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

T = TypeVar("T")


class ModelError(SparkwrightError):
    """A model is missing, or its files cannot be used."""

    references: ClassVar[Mapping[str, Advice]] = {
        "checkpoint-invalid": Advice(
            "A file of the model is truncated, was written by a faulty program, or was "
            "crafted to mislead.",
            "Fetch the model again and compare its hashes with those that its publisher states; "
            "do not load it.",
        ),
        "mixture-joined": Advice(
            "vLLM joins these parts into one layer and reads them in one format, so that numbers "
            "of another format become noise or end the start.",
            "Store all parts of the layer in one format: convert the rest as well, or none.",
        ),
        "mixture-undeclared": Advice(
            "vLLM takes the format of a layer from quantization_config and does not compare it "
            "with what is stored; most differences become noise without a message.",
            "Declare the stored format: ModelOpt's MIXED_PRECISION with an entry in "
            "quantized_layers for each part and none in ignore, or a group of compressed-tensors.",
        ),
        "model-missing": Advice(
            "The folder holds no model, or the model in this machine's cache is incomplete.",
            "Name the folder with --model, fetch the model (`hf download`), or let vLLM fetch it "
            "with --download.",
        ),
    }


class Tensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor: its type in the format's words, its shape, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int


class Checkpoint(msgspec.Struct, frozen=True):
    """
    A model's folder.

    Attributes:
        config: ``config.json``.
        tensors: Those of all shards, by name.
        shards: The names of the files that hold them.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    shards: tuple[str, ...] = ()


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 40)], ...], Meta(max_length=8)]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, Annotated[str, Meta(pattern=r"^[\w.+-]{1,200}\.safetensors$")]]


def invalid(message: str, *, details: Sequence[object] = ()) -> ModelError:
    """Return the error ``checkpoint-invalid``."""
    lines = [str(detail)[:300] for detail in details]
    return ModelError("checkpoint-invalid", message, details=lines)


def read(folder: Path) -> Checkpoint:
    """
    Return the model in *folder*.

    Raises:
        model-missing: There is no such folder, or no model in it.
        checkpoint-invalid: A file is damaged or hostile.
    """
    config_path, index = folder / "config.json", folder / "model.safetensors.index.json"
    _require(config_path)
    config = _document(config_path, CONFIG, dict[str, Any])
    shard_of = _document(index, INDEX, _Index).weight_map if index.exists() else {}
    tensors: dict[str, Tensor] = {}
    shards = tuple(sorted(set(shard_of.values())) or _shards(folder))
    for shard in shards:
        _require(folder / shard)
        for name, tensor in header(folder / shard).items():
            if shard_of.get(name, shard) != shard or name in tensors:
                raise invalid(f"{shard} holds {name[:200]!r}, as does another shard.")
            tensors[name] = tensor
        if len(tensors) > MOST_TENSORS:
            raise invalid(f"{folder.name} has more than {MOST_TENSORS:,} tensors.")
    if lost := sorted(shard_of.keys() - tensors.keys()):
        raise invalid(
            f"The index names {len(lost):,} tensors that no shard holds.", details=lost[:5]
        )
    return Checkpoint(config, tensors, shards)


def header(path: Path) -> dict[str, Tensor]:
    """
    Return the tensors of the safetensors file at *path*, in the order of their data.

    Raises:
        checkpoint-invalid: Its header does not describe it.
    """
    # A pipe of that name would hang.
    if not (path.is_file() and os.access(path, os.R_OK)):
        raise invalid(f"{path.name} is no file, or cannot be read.")
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER):
            text = f"{path.name} states a header of {length:,} bytes in a file of {size:,}"
            raise invalid(f"{text}; the format allows {HEADER:,}.")
        document = _decode(path, stream.read(length), dict[str, msgspec.Raw])
    document.pop("__metadata__", None)
    entries = {name: _decode(path, entry, _Entry) for name, entry in document.items()}
    end, tensors = 0, {}
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].data_offsets, item[0])):
        count, rest = divmod(math.prod(entry.shape, start=BITS.get(entry.dtype, 0)), 8)
        if entry.dtype not in BITS or rest or entry.data_offsets != (end, end + count):
            text = f"{path.name}: {name[:200]!r} has an unknown type, or its data is not at"
            raise invalid(f"{text} {end:,} to {end + count:,}.", details=[entry])
        end += count
        tensors[name] = Tensor(entry.dtype, entry.shape, count)
    if end != size - 8 - length:
        raise invalid(
            f"{path.name} describes {end:,} bytes of data and holds {size - 8 - length:,}."
        )
    return tensors


def _require(path: Path) -> None:
    if not path.exists():
        raise ModelError(
            "model-missing",
            f"The model has no {path.name}.",
            details=[str(path)],
            todo="Name the folder of a whole model: config.json and *.safetensors.",
        )


def _document(path: Path, limit: int, kind: type[T]) -> T:
    """Return the JSON document at *path*, of at most *limit* bytes, as a *kind*."""
    return _decode(path, read_bytes(path, limit=limit, failure=invalid), kind)


def _decode(path: Path, data: bytes | msgspec.Raw, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{path.name} is no JSON of the expected form.", details=[error]) from error


def _shards(folder: Path) -> list[str]:
    """Return the files of a model without an index; ``consolidated`` ones are duplicates."""
    names = [path.name for path in list_folder(folder, "*.safetensors")]
    names = [name for name in names if not name.startswith("consolidated")] or names
    if not names:
        raise ModelError(
            "model-missing",
            f"There is no *.safetensors in {folder}.",
            todo="Only models in the safetensors format can be read.",
        )
    return names
