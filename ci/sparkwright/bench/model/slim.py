"""
A slimmer copy of a model: chosen matrices in FP8 or NVFP4, everything else as it is.

What a checkpoint stores in BF16 beside its quantised experts is read whole for each token. Each
shard of the copy holds what the shard of that name holds, is renamed when it is whole, and recorded
with its sha256 and that of its source; config.json, without which a folder is no model, comes last.
So a run that was killed is continued, and what it left is not taken for a model. A shard in
which nothing changes is copied as it is, and hashed once.

FP8 has a scale for each row: vLLM 0.33.0 loads it for every layer and for the head in both formats
that are written (compressed-tensors; ModelOpt's, where the model is of ModelOpt), and without a
calibration, as it scales the activations of each token itself. Scales of 128 x 128 numbers do not
fit every shape, and its unpatched loader refuses them for the head. NVFP4 is weight-only (W4A16).
"""

import fnmatch
import os
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from sparkwright.bench.model import checkpoint, modules, quantise
from sparkwright.bench.model.checkpoint import BITS, Checkpoint, Tensor, invalid
from sparkwright.core import store
from sparkwright.core.console import console, size
from sparkwright.core.errors import Advice, SparkwrightError, StoreError
from sparkwright.core.files import Sha256, content_key, list_folder, read_json, sha256_file

Format = Literal["fp8", "nvfp4-w4a16"]

#: The record of a copy, beside its shards.
RECORD = "sparkwright-slim.json"
INDEX = "model.safetensors.index.json"
#: Files that are not copied: they are written anew, or hold weights.
_NOT_COPIED = (
    "config.json", "hf_quant_config.json", INDEX, RECORD, "*.safetensors", "*.bin", "*.pt", "*.pth",
    "*.gguf",
)  # fmt: skip
#: Bytes that are converted at a time, and shards that are written at the same time.
CHUNK, WORKERS = 1 << 20, 8

#: The groups that are converted if no layers are named.
_DEFAULT = ("layers", "lm_head")
#: Modules that are not converted, by name or group, and why.
_REASONS = {
    "embeddings": "vLLM looks rows of an embedding up as they are stored",
    "experts": "experts stay as their makers stored them",
    "vision": "vLLM does not quantise parts that see or hear",
    **dict.fromkeys(("*router*", "*gate"), "it is small, and decides what a token is given to"),
    **dict.fromkeys(
        ("*in_proj_a", "*in_proj_b", "*in_proj_ba"), "it is small, and states decay by it"
    ),
    "*kv_b_proj": "vLLM multiplies it into others when it loads",
}
#: Types of models whose class in vLLM 0.33.0 takes a head in BF16 alone: a copy would not load.
_PLAIN_HEADS = (
    "bloom", "deepseek_v4", "deepseek_v41", "falcon_h1", "gpt_oss", "jamba", "mamba", "mamba2",
    "opt", "qwen3_next", "qwen4_exp", "qwen4_exp_text", "zamba2",
)  # fmt: skip

#: Groups of compressed-tensors, and entries of ModelOpt's mixed precision.
_FLOAT = {"type": "float", "symmetric": True}
_GROUPS: Mapping[Format, dict[str, Any]] = {
    "fp8": {
        "format": "float-quantized",
        "weights": {**_FLOAT, "num_bits": 8, "strategy": "channel", "dynamic": False},
        "input_activations": {**_FLOAT, "num_bits": 8, "strategy": "token", "dynamic": True},
    },
    "nvfp4-w4a16": {
        "format": "nvfp4-pack-quantized",
        "weights": {
            **_FLOAT, "num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": False
        },
        "input_activations": None,
    },
}  # fmt: skip
_ALGORITHMS: Mapping[Format, dict[str, Any]] = {
    "fp8": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    "nvfp4-w4a16": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
}


class SlimError(SparkwrightError):
    """A model cannot be made slimmer as asked."""

    references: ClassVar[Mapping[str, Advice]] = {
        "slim-layers": Advice(
            "A name of --layers is that of no layer that can be converted.",
            "See `sparkwright model inspect` for the names, and take those of matrices in BF16.",
            exit_code=2,
        ),
        "slim-nothing": Advice(
            "Every matrix that may be converted is quantised already, as in a model that was made "
            "slimmer before.",
            "Serve the model as it is.",
        ),
        "slim-other-source": Advice(
            "The folder holds something else than an unfinished copy of this model by the same "
            "options.",
            "Name an empty folder with --to, or repeat the command that began the copy.",
        ),
        "slim-unsupported": Advice(
            "vLLM reads all layers of a checkpoint of this format in one way.",
            "Take a checkpoint in BF16, of ModelOpt or of compressed-tensors.",
        ),
    }


class ShardRecord(msgspec.Struct, frozen=True):
    """The sha256 of a shard, and that of the shard that it was made from."""

    source: Sha256
    sha256: Sha256


class SlimRecord(msgspec.Struct, frozen=True):
    """
    What a slimmer copy was made from, and how.

    Attributes:
        source: The name of the model's folder. *revision*: its commit on the hub; empty if unknown.
        identity: A digest of its config and headers, and of what follows.
        format: That of the *layers*.
        read_before, read_after: Bytes of weights that a token reads.
        shards: The finished ones, by name.
    """

    source: str
    revision: str
    identity: Sha256
    format: Format
    layers: tuple[str, ...]
    read_before: float
    read_after: float
    shards: dict[str, ShardRecord] = {}


def read_record(copy: Path, original: Path) -> SlimRecord:
    """
    Return the record of the *copy*, after a look at each shard of its *original*.

    Raises:
        slim-other-source: It is no finished copy of that model.
        file-invalid: The record is damaged.
    """
    what = f"{copy} is no finished slimmer copy of {original}."
    if not ((copy / RECORD).exists() and (copy / "config.json").exists()):
        raise SlimError("slim-other-source", what)
    record = read_json(copy / RECORD, SlimRecord)
    for shard, hashes in record.shards.items():
        if not (original / shard).exists() or sha256_file(original / shard) != hashes.source:
            raise SlimError("slim-other-source", what, details=[shard])
    return record


class Slimming:
    """
    A slimmer copy of the model in *folder*, of which nothing is written yet.

    Args:
        patterns: Names of layers, of their kinds or groups, as `model inspect` shows them; ``*``
            matches anything. Empty for all matrices of the layers, and the head.
        revision: The model's commit, for the record.

    Raises:
        model-missing, checkpoint-invalid, mixture-joined, mixture-undeclared: As `modules.audit`,
            of the model or of the copy.
        slim-layers, slim-nothing, slim-unsupported: It cannot be made.
    """

    def __init__(
        self, folder: Path, form: Format, patterns: Sequence[str] = (), revision: str = ""
    ) -> None:
        checkpoint.require(folder / "config.json")  # the copy needs one, too
        source = checkpoint.read(folder)
        before, listed = modules.audit(source).weights, modules.listed_modules(source)
        names = _choose(listed, source.config, patterns)
        document = _quantization(folder, source.config)
        self._folder, self._form, self._shards = folder, form, source.shards
        self._modelopt = str(document.get("quant_method")).startswith("modelopt")
        declare = _modelopt if self._modelopt else _compressed_tensors
        self._config = {
            **source.config,
            "quantization_config": declare(document, form, names, listed),
        }
        #: Name of a tensor that is converted → the layer of which vLLM makes it a part.
        self._joined = {f"{name}.weight": modules.joined_layer(name) for name in names}
        self._tensors = self._results(source.tensors)
        after = modules.audit(Checkpoint(self._config, self._tensors))
        self._size = after.bytes
        self.record = SlimRecord(
            folder.name,
            revision,
            content_key("slim", (source.config, source.tensors, form, names)),
            form,
            (*names,),
            before,
            after.weights,
        )

    def _results(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the copy for the *tensors* of the model."""
        results: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            results |= self._converted(name, tensor) if name in self._joined else {name: tensor}
        return results

    def _converted(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensors of the copy for the matrix *name*: codes, scales, its own scale."""
        (rows, columns), count, modelopt = tensor.shape, tensor.bytes // 2, self._modelopt
        if self._form == "fp8":
            scale = Tensor("F32", (rows,) if modelopt else (rows, 1), 4 * rows)
            return {name: Tensor("F8_E4M3", tensor.shape, count), f"{name}_scale": scale}
        codes, own = ("", "_scale_2") if modelopt else ("_packed", "_global_scale")
        return {
            name + codes: Tensor("U8", (rows, columns // 2), count // 2),
            f"{name}_scale": Tensor(
                "F8_E4M3", (rows, columns // quantise.BLOCK), count // quantise.BLOCK
            ),
            name + own: Tensor("F32", () if modelopt else (1,), 4),
        }

    def write(self, out: Path) -> SlimRecord:
        """
        Write the copy to *out*, or what an earlier run left of it, and return its record.

        Raises:
            slim-other-source: *out* holds something else.
            disk-full: There is no room for it, which is asked before, or none any more.
            checkpoint-invalid: A matrix holds infinity or NaN, or a file was cut short.
        """
        with store.translate_disk_full(out):
            out.mkdir(parents=True, exist_ok=True)
            with store.locked_in_place(out, str(out)):
                self._begin(out)
                self._write_shards(out)
                self._write_documents(out)
        return self.record

    def _begin(self, out: Path) -> None:
        """Continue what the same command began in *out*, and check that the rest fits there."""
        unfinished = list_folder(out, f"{store.UNFINISHED}*")
        if (out / RECORD).exists():
            earlier = read_json(out / RECORD, SlimRecord)
            if earlier.identity != self.record.identity:
                raise SlimError(
                    "slim-other-source",
                    f"{out} holds a copy of {earlier.source:.80}, or one with other layers.",
                )
            self.record = earlier
        elif list_folder(out) != unfinished:
            raise SlimError("slim-other-source", f"{out} is not empty.")
        for path in unfinished:
            path.unlink()
        needed = self._size
        for path in list_folder(out, "*.safetensors"):
            needed -= path.stat().st_size
        if needed > (free := shutil.disk_usage(out).free):
            raise StoreError(
                "disk-full",
                f"The copy needs {size(needed)} under {out}, where {size(free)} are free.",
            )
        store.write_file(out / RECORD, _json(self.record))

    def _write_shards(self, out: Path) -> None:
        """Write the shards, some at a time, and the record behind each."""
        exponents = self._exponents() if self._form == "nvfp4-w4a16" else {}
        total = sum((self._folder / shard).stat().st_size for shard in self._shards)
        with (
            ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1)) as pool,
            console.progress("slim", total, "bytes") as progress,
        ):
            try:
                results = pool.map(partial(self._write_shard, out, exponents), self._shards)
                for shard, record in zip(self._shards, results, strict=True):
                    self.record = replace(self.record, shards={**self.record.shards, shard: record})
                    store.write_file(out / RECORD, _json(self.record))
                    progress.update(progress.done + (self._folder / shard).stat().st_size)
            finally:
                pool.shutdown(cancel_futures=True)

    def _exponents(self) -> dict[str, int]:
        """Return of each layer in NVFP4 the exponent of its scale, which joined parts share."""
        magnitudes = dict.fromkeys(self._joined.values(), 0)
        for shard in self._shards:
            for name, part in self._parts(shard, self._joined):
                layer = self._joined[name]
                magnitudes[layer] = max(magnitudes[layer], int(quantise.largest(part)))
        powers = quantise.exponents(
            np.array([*magnitudes.values()], np.uint16), quantise.NVFP4_LARGEST
        )
        return dict(zip(magnitudes, powers.tolist(), strict=True))

    def _parts(self, shard: str, wanted: Container[str]) -> Iterator[tuple[str, NDArray[Any]]]:
        """
        Yield the data of the tensors *wanted* of *shard* in order, in parts with their names:
        whole rows of a matrix that is converted, and bytes of others.
        """
        path = self._folder / shard
        tensors = checkpoint.header(path)
        with path.open("rb") as source:
            source.seek(-sum(tensor.bytes for tensor in tensors.values()), os.SEEK_END)
            for name, tensor in tensors.items():
                width = 2 * tensor.shape[-1] if name in self._joined else 1
                left = tensor.bytes
                if name not in wanted:
                    source.seek(left, os.SEEK_CUR)
                    continue
                while left:
                    data = source.read(min(left, CHUNK // width * width))
                    if not data or len(data) % width:
                        raise invalid(f"{shard} was cut short while it was read.")
                    left -= len(data)
                    part: NDArray[Any] = np.frombuffer(data, np.uint8)
                    if width > 1:
                        part = part.view(np.uint16).reshape(-1, width // 2)
                    if width > 1 and quantise.largest(part) >= quantise.INFINITY:
                        raise invalid(f"{name:.200} holds infinity or NaN.")
                    yield name, part

    def _write_shard(self, out: Path, exponents: Mapping[str, int], shard: str) -> ShardRecord:
        """Write *shard*, unless an earlier run wrote it and it is the same; return its record."""
        path = self._folder / shard
        if record := self.record.shards.get(shard):
            if sha256_file(path) != record.source:
                raise SlimError("slim-other-source", f"{out} was begun from another {shard}.")
            if (out / shard).exists() and sha256_file(out / shard) == record.sha256:
                return record
        tensors = checkpoint.header(path)
        head, places = _head(self._results(tensors))
        # Hashing takes half of the processor's time, and goes on while others write or flush.
        with ThreadPoolExecutor(1) as beside, store.replacing(out / shard) as temporary:
            if self._joined.keys().isdisjoint(tensors):
                shutil.copyfile(path, temporary)
                written = beside.submit(sha256_file, temporary)
                store.flush(temporary)
                return ShardRecord(written.result(), written.result())
            read = beside.submit(sha256_file, path)
            with temporary.open("wb") as target:
                target.write(head)
                for name, part in self._parts(shard, tensors):
                    for result, data in self._encoded(name, tensors[name], part, exponents).items():
                        target.seek(places[result])
                        places[result] += target.write(data.data)
                for name, layer in self._joined.items():
                    if name in tensors and layer in exponents:
                        *_, own = self._converted(name, tensors[name])
                        # compressed-tensors stores the divisor, ModelOpt the factor.
                        power = exponents[layer] if self._modelopt else -exponents[layer]
                        target.seek(places[own])
                        target.write(np.ldexp(np.float32(1), power).tobytes())
            written = beside.submit(sha256_file, temporary)
            store.flush(temporary)
            return ShardRecord(read.result(), written.result())

    def _encoded(
        self, name: str, tensor: Tensor, part: NDArray[Any], exponents: Mapping[str, int]
    ) -> dict[str, NDArray[Any]]:
        """Return the data of the tensors that take the place of the *part* of *tensor*."""
        if name not in self._joined:
            return {name: part}
        data = (
            quantise.fp8(part)
            if self._form == "fp8"
            else quantise.nvfp4(part, exponents[self._joined[name]])
        )
        return dict(zip(self._converted(name, tensor), data, strict=False))

    def _write_documents(self, out: Path) -> None:
        """Write everything but the shards, config.json last."""
        if (self._folder / INDEX).exists():
            shard_of: dict[str, str] = {}
            for shard in self._shards:
                shard_of |= dict.fromkeys(checkpoint.header(out / shard), shard)
            store.write_file(out / INDEX, _json({"metadata": {}, "weight_map": shard_of}))
        for path in list_folder(self._folder):
            excluded = any(fnmatch.fnmatchcase(path.name, pattern) for pattern in _NOT_COPIED)
            if path.is_file() and not excluded:
                with store.replacing(out / path.name) as temporary:
                    shutil.copyfile(path, temporary)
        store.write_file(out / "config.json", _json(self._config))


def _json(document: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document))


def _head(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """Return the first bytes of a shard of *tensors*, and where the data of each begins in it."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end, begins = 0, dict[str, int]()
    # The widest type first, so that each tensor begins at a multiple of it.
    for name, tensor in sorted(tensors.items(), key=lambda item: -BITS[item[1].dtype]):
        begins[name], end = end, end + tensor.bytes
        entries[name] = {
            "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (begins[name], end)
        }  # fmt: skip
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + offset for name, offset in begins.items()}


def _choose(
    listed: Sequence[modules.Module], config: Mapping[str, Any], patterns: Sequence[str]
) -> list[str]:
    """Return the names of the modules that *patterns* match; without any, of all that fit."""
    text = modules.text_config(config)
    reasons = {module.name: unfit(module, text) for module in listed}
    chosen: dict[str, None] = {}
    lacking = list[str]()
    for pattern in patterns or _DEFAULT:
        matching = [module.name for module in listed if _matches(module, pattern)]
        fitting = [name for name in matching if not reasons[name]]
        chosen |= dict.fromkeys(fitting)
        if patterns and not fitting:
            why = f"{matching[0]}: {reasons[matching[0]]}" if matching else "there is none"
            lacking.append(f"{pattern}: {why}")
    if lacking:
        raise SlimError(
            "slim-layers",
            f"{len(lacking)} names of --layers match no layer that can be converted.",
            details=lacking,
        )
    if not chosen:
        raise SlimError("slim-nothing", "The model has no matrix in BF16 that may change.")
    return [*chosen]


def _matches(module: modules.Module, pattern: str) -> bool:
    """Return whether *pattern* names *module*; one that drafts needs its whole name or group."""
    own = pattern == module.group or fnmatch.fnmatchcase(module.name, pattern)
    return own or (module.group != "mtp" and fnmatch.fnmatchcase(module.name, f"*.{pattern}"))


def unfit(module: modules.Module, config: Mapping[str, Any]) -> str:
    """Return why *module* of a language model is not converted; empty if it can be."""
    for name, reason in _REASONS.items():
        if module.group == name or fnmatch.fnmatchcase(module.name, name):
            return reason
    weight = module.parts.get("weight")
    if module.group == "lm_head" and config.get("tie_word_embeddings") is True:
        return "it is the table of embeddings (tie_word_embeddings)"
    if module.group == "lm_head" and config.get("model_type") in _PLAIN_HEADS:
        return "vLLM quantises no head of this class"
    if weight is None or weight.dtype != "BF16" or not module.parts.keys() <= {"weight", "bias"}:
        return f"it is stored as {module.scheme}"
    rows, columns = weight.shape if len(weight.shape) == 2 else (1, 1)
    if rows % quantise.BLOCK or columns % quantise.BLOCK or 2 * columns > CHUNK:
        return f"its shape {weight.shape} is that of no matrix whose sides {quantise.BLOCK} divides"
    return ""


def _quantization(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the model's quantization_config; empty if it is not quantised.

    Raises:
        slim-unsupported: Its layers cannot have different formats.
    """
    document = modules.text_config(config).get("quantization_config")
    if document is None and (folder / "hf_quant_config.json").exists():
        document = read_json(folder / "hf_quant_config.json", dict[str, Any])
        document = {"quant_method": "modelopt", **document}
    if document is None:
        return {"quant_method": "compressed-tensors"}
    method = document.get("quant_method") if isinstance(document, dict) else ""
    if method != "compressed-tensors" and not str(method).startswith("modelopt"):
        raise SlimError("slim-unsupported", f"The model is quantised by {method!r:.60}.")
    return dict(document)


def _compressed_tensors(
    document: Mapping[str, Any],
    form: Format,
    names: Sequence[str],
    listed: Sequence[modules.Module],
) -> dict[str, Any]:
    """
    Return quantization_config with a group for the layers *names*.

    It comes first, as vLLM takes the first that matches, and names joined layers, too. Patterns of
    ignored layers may match them, so every layer that stays as it is gets ignored by its name.
    """
    earlier = document.get("config_groups") or {}
    # vLLM gives the head of a model that also sees another name.
    targets = dict.fromkeys(
        "re:(.*[.])?lm_head$" if name.endswith("lm_head") else name
        for name in (*names, *map(modules.joined_layer, names))
    )
    plain = [
        module.name
        for module in listed
        if not (module.quantised or module.name in names or module.group == "embeddings")
    ]
    return {
        "format": _GROUPS[form]["format"],
        "quantization_status": "compressed",
        **document,
        "config_groups": {
            f"slim_{len(earlier)}": {**_GROUPS[form], "targets": [*targets]},
            **earlier,
        },
        "ignore": plain if earlier else [],
    }


def _modelopt(
    document: Mapping[str, Any],
    form: Format,
    names: Sequence[str],
    listed: Sequence[modules.Module],
) -> dict[str, Any]:
    """
    Return quantization_config of ModelOpt's mixed precision, in which each quantised layer has its
    algorithm, the experts of a layer one, and what has none stays plain.
    """
    inner = dict(document.get("quantization", document))
    layers = dict(inner.get("quantized_layers") or {})
    if not layers:
        entry = {
            "quant_algo": inner.get("quant_algo"),
            "group_size": inner.get("group_size", quantise.BLOCK),
        }
        for module in listed:
            if module.quantised:
                begin, experts, _ = module.name.partition(".experts.")
                layers[begin + experts.rstrip(".")] = entry
    layers |= dict.fromkeys(names, _ALGORITHMS[form])
    for name in ("ignore", "exclude_modules", "config_groups"):
        inner.pop(name, None)
    inner |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    return {**document, "quantization": inner} if "quantization" in document else inner
