"""
How a module is quantised, by its tensors, and how the model's config says that it should be.

The tensors are facts: a packed weight without its scales cannot be read, whatever the config says.
The config decides how a server reads them; where the two disagree, the server loads other values
than were stored, or refuses. The formats are those of the recipes: NVFP4 and MXFP4 of ModelOpt,
compressed-tensors and gpt-oss, FP8, and packed integers (compressed-tensors, AWQ).
"""

from __future__ import annotations

import fnmatch
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.bench.model.checkpoint import Tensor, invalid
from sparkwright.core import process
from sparkwright.core.errors import CommandError

#: Types of plain numbers.
PLAIN = ("F64", "F32", "F16", "BF16")
#: Methods that name an ignored module by a part of its name; the others name the whole.
_BY_PART = ("modelopt", "awq", "gptq")
#: Methods that leave the output layer and the parts that see as they are, unless told otherwise.
INSIDE_ONLY = ("awq", "gptq", "fp8", "mxfp4")
#: A config lists some hundred patterns; regular expressions of strangers may run for ever.
MOST_PATTERNS, MOST_LENGTH = 50_000, 500
REGEX_SECONDS, REGEX_MEMORY = 20.0, 512 << 20

_MATCH = """\
import json, re, sys
names, patterns = json.load(open(sys.argv[1]))
compiled = [re.compile(pattern) for pattern in patterns]
print(json.dumps([name for name in names if any(pattern.match(name) for pattern in compiled)]))
"""


class Scheme(msgspec.Struct, frozen=True):
    """
    How a module's weight is stored.

    Attributes:
        name: Such as ``NVFP4 (modelopt)`` or ``BF16``.
        quantised: It has fewer bits than the model's own type.
        wrong: ``scale-missing`` or ``scale-shape`` if its tensors contradict each other,
            ``format-unknown`` if they are of no known format.
    """

    name: str
    quantised: bool = True
    wrong: str = ""


def scheme(parts: Mapping[str, Tensor], quantization: Mapping[str, Any]) -> Scheme:
    """Return how the module with the tensors *parts*, by parameter, is stored."""
    weight = next((parts[name] for name in _WEIGHTS if name in parts), None)
    scale = next((parts[name] for name in _SCALES if name in parts), None)
    if scale is None and (weight is None or weight.dtype in PLAIN):
        return Scheme("/".join(sorted({part.dtype for part in parts.values()})), quantised=False)
    if weight is None:
        return _unknown(parts)
    maker = "compressed-tensors" if "weight_packed" in parts else "modelopt"
    if "qweight" in parts or weight.dtype == "I32":
        return _integers(parts, quantization)
    if scale is None:
        return Scheme(weight.dtype, wrong="scale-missing")
    if "blocks" in parts:  # gpt-oss: 16 bytes, which are 32 numbers, have one scale
        fits = (*scale.shape, 16) == weight.shape
        return Scheme("MXFP4", wrong="" if fits else "scale-shape")
    if weight.dtype == "U8" and scale.dtype in ("F8_E4M3", *_POWERS):
        nvidia = scale.dtype == "F8_E4M3"
        numbers = weight.shape[-1] * 2 // (16 if nvidia else 32) if weight.shape else -1
        activations = parts.keys() & {"input_scale", "input_global_scale"}
        kind = f"{maker}, W4A16" if nvidia and not activations else maker
        missing = nvidia and not parts.keys() & {"weight_scale_2", "weight_global_scale"}
        shape = "" if scale.shape == (*weight.shape[:-1], numbers) else "scale-shape"
        name = f"{'NVFP4' if nvidia else 'MXFP4'} ({kind})"
        return Scheme(name, wrong="scale-missing" if missing else shape)
    if weight.dtype.startswith("F8") and scale.dtype in _POWERS:
        fits = scale.shape == (*weight.shape[:-1], *(size // 32 for size in weight.shape[-1:]))
        return Scheme("MXFP8", wrong="" if fits else "scale-shape")
    if weight.dtype.startswith("F8"):
        blocks = len(scale.shape) >= 2 and min(scale.shape[-2:]) > 1
        return Scheme("FP8 in blocks" if blocks else "FP8")
    return Scheme("INT8") if weight.dtype == "I8" else _unknown(parts)


def _unknown(parts: Mapping[str, Tensor]) -> Scheme:
    stored = ", ".join(sorted(f"{name} {part.dtype}" for name, part in parts.items()))
    return Scheme(f"unknown format ({stored})", wrong="format-unknown")


#: Types of scales that are powers of two.
_POWERS = ("U8", "F8_E8M0")
_WEIGHTS = ("qweight", "weight_packed", "blocks", "weight")
_SCALES = ("scales", "weight_scale", "weight_scale_inv")


def _integers(parts: Mapping[str, Tensor], quantization: Mapping[str, Any]) -> Scheme:
    """
    Return the scheme of integers packed into 32 bits.

    GPTQ packs rows and AWQ columns, and the scales of both have a column for each of the weight's;
    compressed-tensors has a row of scales for each row.
    """
    weight = parts.get("qweight") or parts.get("weight_packed") or parts["weight"]
    scale = parts.get("scales") or parts.get("weight_scale")
    weights = [group.get("weights") for group in _groups(quantization)]
    bits = [group.get("num_bits") for group in weights if isinstance(group, dict)]
    width = (*bits, quantization.get("bits"))[0]
    maker = method(quantization)[:30] or "?"
    if scale is None:
        wrong = "scale-missing"
    elif not len(weight.shape) == len(scale.shape) >= 2:
        wrong = "scale-shape"
    elif "qweight" not in parts:
        wrong = "" if weight.shape[:-1] == scale.shape[:-1] else "scale-shape"
    elif "gptq" in maker:
        wrong = "" if weight.shape[1] == scale.shape[1] else "scale-shape"
    elif "awq" in maker and width in (4, None):  # vLLM's AWQ knows four bits alone
        wrong = "" if weight.shape[1] * 8 == scale.shape[1] else "scale-shape"
    else:
        return _unknown(parts)
    return Scheme(f"INT{str(width)[:12]} ({maker})", wrong=wrong)


def _groups(quantization: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = quantization.get("config_groups")
    values = groups.values() if isinstance(groups, dict) else ()
    return [group for group in values if isinstance(group, dict)]


def method(quantization: Mapping[str, Any]) -> str:
    """Return the config's name of its method, in lower case; empty without a config."""
    return str(quantization.get("quant_method", "")).lower()[:60]


def ignored(quantization: Mapping[str, Any], modules: Sequence[str]) -> set[str]:
    """
    Return those of *modules* that the config leaves as they were.

    Raises:
        checkpoint-invalid: Its patterns cannot be used.
    """
    fields = "ignore", "exclude_modules", "ignored_layers", "modules_to_not_convert"
    patterns = [text for name in fields for text in _texts(quantization.get(name))]
    targets = {text for group in _groups(quantization) for text in _texts(group.get("targets"))}
    by_part = any(name in method(quantization) for name in _BY_PART)
    names = _matching(patterns, modules, by_part=by_part)
    layers = quantization.get("quantized_layers")
    if isinstance(layers, dict):
        quantised = {_plain(str(name)) for name in layers}
        names |= {name for name in modules if not _parents(name) & quantised}
    if targets and "Linear" not in targets:
        names |= set(modules) - _matching(sorted(targets), modules, by_part=by_part)
    return names


def _matching(patterns: Sequence[str], modules: Sequence[str], *, by_part: bool) -> set[str]:
    if len(patterns) > MOST_PATTERNS or any(len(text) > MOST_LENGTH for text in patterns):
        raise invalid(f"The quantisation config has more than {MOST_PATTERNS:,} or long patterns.")
    names = {_plain(text) for text in patterns if not text.startswith("re:")}
    wild = {text for text in names if "*" in text or "?" in text}
    parts = names - wild if by_part else set()
    found = _by_regex([text[3:] for text in patterns if text.startswith("re:")], modules)
    for module in modules:
        plain = _plain(module)
        by_pattern = any(fnmatch.fnmatchcase(plain, text) for text in wild)
        if by_pattern or _parents(module) & names or any(part in plain for part in parts):
            found.add(module)
    return found


def _texts(value: object) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _plain(name: str) -> str:
    """Return a module's name without the prefixes about which servers and quantisers disagree."""
    return name.replace("language_model.", "").removeprefix("model.").removeprefix("backbone.")


def _parents(name: str) -> set[str]:
    """Return the plain names of a module and of the modules that it is a part of."""
    parts = _plain(name).split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts) + 1)}


def _by_regex(patterns: Sequence[str], modules: Sequence[str]) -> set[str]:
    """Return the modules that a regular expression matches, in a process of bounded time."""
    if not patterns or not modules:
        return set()
    with tempfile.TemporaryDirectory(prefix="sparkwright-") as folder:
        request = Path(folder) / "request"
        request.write_bytes(msgspec.json.encode([modules, patterns]))
        command = [sys.executable, "-I", "-S", "-c", _MATCH, str(request)]
        try:
            limited = process.wrap_with_limits(command, memory=REGEX_MEMORY)
            return set(msgspec.json.decode(process.output(limited, timeout=REGEX_SECONDS)))
        except CommandError as error:
            message = "The regular expressions of the quantisation config cannot be used."
            raise invalid(message, error.what) from error
