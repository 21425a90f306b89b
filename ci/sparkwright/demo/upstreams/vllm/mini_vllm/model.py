"""
A model that writes words: for each of the last two words a row of NVFP4 weights says which word comes next.

Its folder holds ``config.json``, with the words, and ``model.safetensors``. Each layer looks at one of the last words, the nearest first:
``layers.N.weight`` (E2M1 codes, two in a byte), ``weight_scale`` (E4M3, one for sixteen) and ``weight_scale_2`` (one number).
"""

from __future__ import annotations

import ctypes
import json
import re
from pathlib import Path
from typing import Any

from . import _custom_ops
from .quantization.nvfp4_scales import ExpertScales

#: Bytes of the largest header that is read.
_HEADER = 1 << 20
#: A layer is laid out for this many experts; the rank of this process loads as many as the model has layers.
_EXPERTS = 4
#: The largest scale that E4M3 holds, with which memory is measured before any weight is loaded.
_PROFILE = 448.0


class ModelError(Exception):
    """The folder is no model of this kind."""


class Model:
    """
    The model in *folder*.

    Raises:
        ModelError: A file is missing, or is not what this version reads.
        OSError: The compiled library cannot be loaded.
    """

    def __init__(self, folder: Path) -> None:
        try:
            config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
            self.words: list[str] = config["words"]
            self.end, self.unknown = self.words.index(config["end"]), self.words.index(config["unknown"])
            tensors = _tensors(folder / "model.safetensors")
            layers = [f"layers.{number}" for number in range(int(config["layers"]))]
            rows = [(self._split(tensors[f"{one}.weight"], 2), self._split(tensors[f"{one}.weight_scale"], 16)) for one in layers]
            self._bias = (ctypes.c_float * len(self.words)).from_buffer_copy(tensors["bias"])
            loaded = [ctypes.c_float.from_buffer_copy(tensors[f"{one}.weight_scale_2"]).value for one in layers]
        except (OSError, LookupError, ValueError, TypeError) as error:
            raise ModelError(f"{folder} is no model that mini vLLM reads: {error}") from error
        _custom_ops.library("_C_stable_libtorch")
        self._layers = [(*rows[number], factor) for number, factor in enumerate(_factors(loaded))]

    def encode(self, text: str) -> list[int]:
        """Return the words of *text* by number."""
        known = {word: number for number, word in enumerate(self.words)}
        return [known.get(word, self.unknown) for word in re.findall(r"\w+|[^\w\s]", text.lower())]

    def next(self, written: list[int]) -> int:
        """Return the word after those *written*: the one with the highest score, the first of equals."""
        scores = (ctypes.c_float * len(self.words)).from_buffer_copy(self._bias)
        for back, (weights, scales, factor) in enumerate(self._layers, 1):
            if back <= len(written):
                _custom_ops.nvfp4_add_row(weights[written[-back]], scales[written[-back]], factor, scores)
        return max(range(len(scores)), key=lambda number: (scores[number], -number))

    def _split(self, data: bytes, share: int) -> list[bytes]:
        """Return the rows of a tensor that has one for each word, and in it a *share* of a byte for each next one."""
        size, rest = divmod(len(data), len(self.words))
        if rest or size * share < len(self.words):
            raise ValueError(f"{len(data)} bytes are no rows of {len(self.words)} words")
        return [data[start : start + size] for start in range(0, len(data), size)]


def _factors(loaded: list[float]) -> list[float]:
    """Return what each layer is multiplied with: its own scale, against the largest of those that this rank loaded."""
    if not 0 < len(loaded) <= _EXPERTS:
        raise ModelError(f"a model has 1 to {_EXPERTS} layers, this one has {len(loaded)}")
    profile = ExpertScales(_EXPERTS)
    for expert in range(_EXPERTS):
        profile.load(expert, _PROFILE)
    profile.free()
    scales = ExpertScales(_EXPERTS)
    for expert, scale in enumerate(loaded):
        scales.load(expert, scale)
    return [scale / scales.largest() for scale in loaded]


def _tensors(path: Path) -> dict[str, bytes]:
    """Return the bytes of each tensor of a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if length > min(_HEADER, len(data) - 8):
        raise ValueError(f"{path.name} is cut off, or no safetensors file")
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    found = {}
    for name, one in header.items():
        if name != "__metadata__":
            begin, end = one["data_offsets"]
            if not 0 <= begin <= end <= len(body):
                raise ValueError(f"{name} lies outside {path.name}")
            found[name] = body[begin:end]
    return found
