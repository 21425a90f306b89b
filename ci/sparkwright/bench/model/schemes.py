"""
How a module is quantised, by its tensors, and how the model's config says that it should be.

The tensors are facts: a packed weight without its scales cannot be read, whatever the config says. The config decides how a server reads
them. Where the two disagree, the server loads something else than what was stored, or refuses.
"""

from __future__ import annotations

import fnmatch
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.bench.errors import ModelError
from sparkwright.bench.model.checkpoint import Tensor
from sparkwright.core import process

#: Types of plain numbers.
PLAIN = ("F64", "F32", "F16", "BF16")
_FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")

#: Methods that name what they leave out by a part of its name; the others by its whole name.
_BY_PART = ("modelopt", "awq", "gptq")
#: Methods that never touch the output layer and what sees, unless they are told to.
INSIDE_ALONE = ("awq", "gptq", "fp8", "mxfp4", "bitsandbytes")
#: A config lists some hundred patterns; expressions of strangers may run for ever, and are given this much.
MOST_PATTERNS, MOST_LENGTH = 50_000, 500
_PATIENCE = process.Limits(seconds=20, memory=512, written=64)

#: Matches expressions in a program of its own: names and expressions in, for each name whether one of them matches.
_MATCH = """\
import json, re, sys
names, patterns = json.load(open(sys.argv[1]))
compiled = [re.compile(pattern) for pattern in patterns]
json.dump([any(one.match(name) for one in compiled) for name in names], open(sys.argv[2], "w"))
"""


class Scheme(msgspec.Struct, frozen=True):
    """
    How a module's weight is stored.

    Attributes:
        name: ``NVFP4 (modelopt)``, ``BF16``.
        quantised: Whether it has fewer bits than the model's own type.
        wrong: What about its tensors cannot be: ``scale-missing``, ``scale-shape``; empty where nothing.
    """

    name: str
    quantised: bool
    wrong: str = ""


def of(parts: Mapping[str, Tensor], quantization: Mapping[str, Any]) -> Scheme:
    """Return how the module with the tensors *parts*, by parameter, is stored."""
    if "qweight" in parts:
        return _integers(parts, quantization)
    if "weight_packed" in parts:
        return _packed(parts, quantization)
    if "blocks" in parts:
        return _blocks(parts["blocks"], parts.get("scales"))
    weight = parts.get("weight")
    if weight is None:
        return Scheme("/".join(sorted({part.dtype for part in parts.values()})), quantised=False)
    if weight.dtype in PLAIN:
        return Scheme(weight.dtype, quantised=False)
    if weight.dtype in _FP8:
        return _fp8(weight, parts)
    if "absmax" in parts:
        return Scheme("4 bits (bitsandbytes)", quantised=True)
    if "SCB" in parts:
        return Scheme("INT8 (bitsandbytes)", quantised=True)
    scale = parts.get("weight_scale")
    if scale is None:
        return Scheme(weight.dtype, quantised=True, wrong="scale-missing")
    if weight.dtype == "I8":
        return Scheme("INT8", quantised=True)
    if weight.dtype == "U8" and scale.dtype in ("F8_E4M3", "U8", "F8_E8M0"):
        return _four_bits(weight, scale, parts, "weight_scale_2", "modelopt")
    return Scheme(f"{weight.dtype} with {scale.dtype}", quantised=True)


def _four_bits(weight: Tensor, scale: Tensor, parts: Mapping[str, Tensor], whole: str, maker: str) -> Scheme:
    """Return the scheme of two numbers in a byte: NVFP4 (16 to a scale in FP8, and one in FP32 for all) or MXFP4 (32 to a power of two)."""
    nvidia = scale.dtype == "F8_E4M3"
    block = 16 if nvidia else 32
    fits = scale.shape[:-1] == weight.shape[:-1] and scale.shape[-1:] == (weight.shape[-1] * 2 // block,) if weight.shape else False
    acts = ", W4A16" if nvidia and not parts.keys() & {"input_scale", "input_global_scale"} else ""
    wrong = "scale-missing" if nvidia and whole not in parts else "" if fits else "scale-shape"
    return Scheme(f"{'NVFP4' if nvidia else 'MXFP4'} ({maker}{acts})", quantised=True, wrong=wrong)


def _packed(parts: Mapping[str, Tensor], quantization: Mapping[str, Any]) -> Scheme:
    weight, scale, maker = parts["weight_packed"], parts.get("weight_scale"), "compressed-tensors"
    if scale is None:
        return Scheme(f"{weight.dtype} ({maker})", quantised=True, wrong="scale-missing")
    if weight.dtype == "U8":
        return _four_bits(weight, scale, parts, "weight_global_scale", maker)
    weights = [found for group in _groups(quantization) if isinstance(found := group.get("weights"), dict)]
    bits = "/".join(sorted({str(found.get("num_bits", "?")) for found in weights}))
    return Scheme(f"INT{bits[:12]} ({maker})", quantised=True)


def _fp8(weight: Tensor, parts: Mapping[str, Tensor]) -> Scheme:
    scale = parts.get("weight_scale_inv") or parts.get("weight_scale")
    if scale is None:
        return Scheme("FP8", quantised=True, wrong="scale-missing")
    if scale.dtype in ("U8", "F8_E8M0"):
        fits = bool(weight.shape) and scale.shape == (*weight.shape[:-1], weight.shape[-1] // 32)
        return Scheme("MXFP8", quantised=True, wrong="" if fits else "scale-shape")
    blocks = len(scale.shape) >= 2 and min(scale.shape[-2:]) > 1
    return Scheme("FP8 in blocks" if blocks else "FP8", quantised=True)


def _blocks(blocks: Tensor, scales: Tensor | None) -> Scheme:
    """Return the scheme of gpt-oss: 16 bytes, which are 32 numbers, to a scale."""
    if scales is None:
        return Scheme("MXFP4", quantised=True, wrong="scale-missing")
    return Scheme("MXFP4", quantised=True, wrong="" if (*scales.shape, 16) == blocks.shape else "scale-shape")


def _integers(parts: Mapping[str, Tensor], quantization: Mapping[str, Any]) -> Scheme:
    """Return the scheme of AWQ or GPTQ, which pack along different sides: a column of GPTQ's weight is one of its scales."""
    weight, scales, method = parts["qweight"], parts.get("scales"), str(quantization.get("quant_method", "")).lower()
    if scales is None or len(scales.shape) != 2 or len(weight.shape) != 2 or not scales.shape[1]:
        return Scheme("integers in I32", quantised=True, wrong="scale-missing" if scales is None else "scale-shape")
    gptq = weight.shape[1] == scales.shape[1]
    packed = parts.get("qzeros") if gptq else weight
    # GPTQ without zero points does not show how many numbers share an integer.
    shared = 32 * packed.shape[-1] / scales.shape[1] if packed and packed.shape else quantization.get("bits")
    bits = f"{shared:g}" if isinstance(shared, int | float) else "?"
    wrong = "" if gptq or bits in ("2", "3", "4", "8") else "scale-shape"
    return Scheme(f"INT{bits} ({'GPTQ' if gptq else 'AWQ'})", quantised=True, wrong=wrong if method != "gptq" or gptq else "scale-shape")


def _groups(quantization: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = quantization.get("config_groups")
    return [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []


class Told:
    """
    What a quantisation config says of modules.

    Attributes:
        method: Its name of the method, in lower case; empty where the model has no such config.
    """

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        self.method = str(quantization.get("quant_method", "")).lower()[:60]
        fields = ("ignore", "exclude_modules", "ignored_layers", "modules_to_not_convert", "llm_int8_skip_modules")
        self._left = [text for name in fields for text in _texts(quantization.get(name))]
        dynamic = quantization.get("dynamic")
        self._left += [f"re:{text[2:]}" for text in (dynamic if isinstance(dynamic, dict) else {}) if str(text).startswith("-:")]
        self._targets = {text for group in _groups(quantization) for text in _texts(group.get("targets"))}
        layers = quantization.get("quantized_layers")
        self._layers = {_plain(str(name)) for name in layers} if isinstance(layers, dict) else None

    def ignored(self, modules: Sequence[str]) -> frozenset[str]:
        """
        Return those of *modules* that the config leaves as they were.

        Raises:
            checkpoint-invalid: Its patterns cannot be used.
        """
        found = self._matching(self._left, modules)
        if self._layers is not None:
            found |= {name for name in modules if not _within(_plain(name), self._layers)}
        if self._targets and "Linear" not in self._targets:
            found |= set(modules) - self._matching(sorted(self._targets), modules)
        return frozenset(found)

    def _matching(self, patterns: Sequence[str], modules: Sequence[str]) -> set[str]:
        if len(patterns) > MOST_PATTERNS or any(len(one) > MOST_LENGTH for one in patterns):
            raise ModelError(
                "checkpoint-invalid", f"The quantisation config has {len(patterns):,} patterns, or one of more than {MOST_LENGTH} letters."
            )
        plain = [_plain(one) for one in patterns if not one.startswith("re:")]
        whole, wild = set(plain), [one for one in plain if "*" in one or "?" in one]
        by_part = [one for one in plain if one not in wild] if any(one in self.method for one in _BY_PART) else []
        found = {name for name in modules if _within(_plain(name), whole) or any(one in _plain(name) for one in by_part)}
        found |= {name for name in modules if any(fnmatch.fnmatchcase(_plain(name), one) for one in wild)}
        return found | _by_expression([one[3:] for one in patterns if one.startswith("re:")], modules)


def _texts(value: object) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _plain(name: str) -> str:
    """Return a module's name without the parts that families put before it; servers and quantising programs disagree about them."""
    return name.replace("language_model.", "").removeprefix("model.").removeprefix("backbone.")


def _within(name: str, whole: set[str]) -> bool:
    """Is *name*, or a module that it is a part of, among *whole*?"""
    parts = name.split(".")
    return any(".".join(parts[:end]) in whole for end in range(1, len(parts) + 1))


def _by_expression(patterns: Sequence[str], modules: Sequence[str]) -> set[str]:
    """Return the modules that one of the regular expressions matches, as a server matches them, by a program that can be ended."""
    if not patterns or not modules:
        return set()
    with tempfile.TemporaryDirectory(prefix="sparkwright-") as name:
        folder = Path(name)
        (folder / "asked").write_bytes(msgspec.json.encode([modules, patterns]))
        command = [sys.executable, "-I", "-S", "-c", _MATCH, str(folder / "asked"), str(folder / "answer")]
        ended = process.run_limited(command, _PATIENCE, folder / "log")
        if ended.status:
            says = "take too long to match" if ended.late else "cannot be used"
            raise ModelError(
                "checkpoint-invalid", f"The regular expressions of the quantisation config {says}.", details=ended.tail.splitlines()[-2:]
            )
        matched = msgspec.json.decode((folder / "answer").read_bytes(), type=list[bool])
    return {module for module, one in zip(modules, matched, strict=True) if one}
