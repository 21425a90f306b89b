"""
A model's folder: every tensor of every shard, from the headers alone, and ``config.json``.

A safetensors file is eight bytes with the length of a JSON header, the header, and the data. Files
come from strangers, so nothing in them is trusted: at most `HEADER` bytes of each are read, and the
ranges of the tensors must tile the data without a gap, each as long as its shape and type require.
Of a key that occurs twice the last one counts, as for the library by which a server reads it. A
file of headers holds those of a model without its weights.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from sparkwright.core.errors import Advice, SparkwrightError
from sparkwright.core.files import canonical, list_folder, read_bytes, sha256_bytes

#: The format's own limit of a header, in bytes (``MAX_HEADER_SIZE`` of the safetensors library).
HEADER = 100_000_000
#: Bytes of config.json, and of the index; that of a model with 90,000 tensors has 9 MB.
CONFIG, INDEX = 4 << 20, 64 << 20
#: Name of a model on the hub.
NAME = re.compile(r"(?!\.)[\w.-]{1,96}/(?!\.)[\w.-]{1,96}", re.ASCII)
#: Ends of the names of files that vLLM reads, and the bytes of each that its digest covers.
READ = (".safetensors", ".json", ".jinja", ".model", ".tiktoken", ".py", ".bin")
BEGINNING = 16 << 20
#: DeepSeek-V3 in NVFP4 has about 180,000 tensors.
MOST_TENSORS = 2_000_000
#: Bytes of a file of headers.
HEADERS = 512 << 20

#: Fields of Mistral's params.json → those of config.json.
PARAMETERS: Mapping[str, str] = {
    "n_layers": "num_hidden_layers",
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "tied_embeddings": "tie_word_embeddings",
}

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
    shape: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 40)], ...], msgspec.Meta(max_length=8)
    ]
    data_offsets: tuple[int, int]


class WeightIndex(msgspec.Struct, frozen=True):
    """``model.safetensors.index.json``: tensor → the file that holds it."""

    weight_map: dict[
        str, Annotated[str, msgspec.Meta(pattern=r"^[\w.+-]{1,200}\.safetensors$")]
    ] = {}


class ShardHeader(msgspec.Struct, frozen=True):
    """The *header* of a shard of *size* bytes, without the length before it."""

    size: Annotated[int, msgspec.Meta(ge=0)]
    header: bytes


class HeaderFile(msgspec.Struct, frozen=True):
    """A model without its weights, as one file."""

    config: dict[str, Any]
    index: WeightIndex
    shards: dict[str, ShardHeader]


def invalid(message: str, *, details: Sequence[object] = ()) -> ModelError:
    """Return the error ``checkpoint-invalid``."""
    return ModelError(
        "checkpoint-invalid", message, details=[str(detail)[:300] for detail in details]
    )


def read(path: Path) -> Checkpoint:
    """
    Return the model in the folder, or the file of headers, at *path*.

    Raises:
        model-missing: There is no such folder, or no model in it.
        checkpoint-invalid: A file is damaged or hostile.
    """
    if path.is_file():
        headers = _document(path, HEADERS, HeaderFile)
        return join(path.name, headers.config, headers.index, headers.shards.items())
    config_path, index_path = path / "config.json", path / "model.safetensors.index.json"
    if not config_path.exists() and (path / "params.json").exists():
        config = translated(_document(path / "params.json", CONFIG, dict[str, Any]))
    else:
        require(config_path)
        config = _document(config_path, CONFIG, dict[str, Any])
    index = _document(index_path, INDEX, WeightIndex) if index_path.exists() else WeightIndex()
    names = [file.name for file in list_folder(path, "*.safetensors")]
    stored = []
    for name in shards(path.name, index, names):
        require(path / name)
        stored.append((name, _header(path / name)))
    return join(path.name, config, index, stored)


def translated(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json that says the same as Mistral's params.json."""
    mixture = parameters.get("moe")
    fields = {**parameters, **(mixture if isinstance(mixture, dict) else {})}
    return {PARAMETERS.get(name, name): value for name, value in fields.items()}


def shards(model: str, index: WeightIndex, names: Sequence[str]) -> list[str]:
    """
    Return the shards of a model that has files of those *names*; without an index, all but the
    duplicates that are called ``consolidated``.

    Raises:
        model-missing: There is none.
    """
    stored = sorted(set(index.weight_map.values()))
    stored = stored or [name for name in names if not name.startswith("consolidated")]
    if not (stored or names):
        raise ModelError(
            "model-missing",
            f"There is no *.safetensors in {model}.",
            todo="Only models in the safetensors format can be read.",
        )
    return stored or [*names]


def join(
    model: str,
    config: dict[str, Any],
    index: WeightIndex,
    headers: Iterable[tuple[str, ShardHeader]],
) -> Checkpoint:
    """
    Return the model whose shards have these *headers*, by name. A tensor may be in more shards than
    the one that the index names for it, in the same form.

    Raises:
        checkpoint-invalid: As `read`.
    """
    tensors: dict[str, Tensor] = {}
    lost, names = set(index.weight_map), []
    for shard, stored in headers:
        names.append(shard)
        for name, tensor in parse(shard, stored).items():
            if tensors.setdefault(name, tensor) != tensor:
                raise invalid(f"{shard} holds {name[:200]!r} in another form than other shards.")
            if index.weight_map.get(name) == shard:
                lost.discard(name)
        if len(tensors) > MOST_TENSORS:
            raise invalid(f"{model} has more than {MOST_TENSORS:,} tensors.")
    if lost:
        raise invalid(
            f"The index names {len(lost):,} tensors that their shards do not hold.",
            details=sorted(lost)[:5],
        )
    return Checkpoint(config, tensors, tuple(names))


def header(path: Path) -> dict[str, Tensor]:
    """
    Return the tensors of the safetensors file at *path*, in the order of their data.

    Raises:
        checkpoint-invalid: Its header does not describe it.
    """
    return parse(path.name, _header(path))


def header_length(shard: str, size: int, beginning: bytes) -> int:
    """
    Return the bytes of the header of a *shard* of *size* bytes.

    Raises:
        checkpoint-invalid: Its *beginning* states more than there is, or than the format allows.
    """
    length = int.from_bytes(beginning[:8], "little")
    if size < 8 or len(beginning) < 8 or length > min(size - 8, HEADER):
        raise invalid(
            f"{shard} states a header of {length:,} bytes in a file of {size:,}; the format "
            f"allows {HEADER:,}."
        )
    return length


def parse(shard: str, stored: ShardHeader) -> dict[str, Tensor]:
    """
    Return the tensors of a *shard*, in the order of their data.

    Raises:
        checkpoint-invalid: Its header does not describe it.
    """
    document = decode(shard, stored.header, dict[str, msgspec.Raw])
    document.pop("__metadata__", None)
    entries = {name: decode(shard, entry, _Entry) for name, entry in document.items()}
    end, tensors = 0, {}
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].data_offsets, item[0])):
        count, rest = divmod(math.prod(entry.shape, start=BITS.get(entry.dtype, 0)), 8)
        if entry.dtype not in BITS or rest or entry.data_offsets != (end, end + count):
            raise invalid(
                f"{shard}: {name[:200]!r} has an unknown type, or its data is not at {end:,} to "
                f"{end + count:,}.",
                details=[entry],
            )
        end += count
        tensors[name] = Tensor(entry.dtype, entry.shape, count)
    data = stored.size - 8 - len(stored.header)
    if end != data:
        raise invalid(f"{shard} describes {end:,} bytes of data and holds {data:,}.")
    return tensors


def _header(path: Path) -> ShardHeader:
    # Reading a named pipe would hang.
    if not (path.is_file() and os.access(path, os.R_OK)):
        raise invalid(f"{path.name} is no file, or cannot be read.")
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        return ShardHeader(size, stream.read(header_length(path.name, size, stream.read(8))))


def require(path: Path) -> None:
    """
    Check that there is a file at *path*.

    Raises:
        model-missing: There is none.
    """
    if not path.exists():
        raise ModelError(
            "model-missing",
            f"The model has no {path.name}.",
            details=[str(path)],
            todo="Name the folder of a whole model: config.json and *.safetensors.",
        )


def _document(path: Path, limit: int, kind: type[T]) -> T:
    """Return the JSON document at *path*, of at most *limit* bytes, as a *kind*."""
    return decode(path.name, read_bytes(path, limit=limit, failure=invalid), kind)


def decode(name: str, data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """
    Return the JSON document *data* of the file *name* as a *kind*.

    Raises:
        checkpoint-invalid: It is no such document.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{name} is no JSON of the expected form.", details=[error]) from error


def model_digest(model: Path) -> str:
    """
    Return a digest of the files in the folder *model* that vLLM reads: names, sizes, and the first
    16 MiB, which hold configuration, tokenizer and the tensors' names and places.

    Hundreds of gigabytes are not read for each run: other numbers behind are not noticed.
    """
    parts = list[tuple[str, int, str]]()
    for path in sorted(model.iterdir()):
        if path.name.endswith(READ) and path.is_file():
            with path.open("rb") as stream:
                digest = sha256_bytes(stream.read(BEGINNING))
            parts.append((path.name, path.stat().st_size, digest))
    return sha256_bytes(canonical(parts))
