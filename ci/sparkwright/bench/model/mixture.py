"""
Mixtures of formats in a checkpoint that vLLM 0.33.0 would load wrongly.

vLLM joins some parts of a layer into one matrix product, all experts of a layer into another, and
chooses one format for each by ``quantization_config``. A part in BF16 is copied into an FP8 weight
without a message, and a scale that is not in the checkpoint keeps its initial value. So each joined
layer must be stored in one format, and ModelOpt's config must choose that one. What patterns of
compressed-tensors choose is not evaluated, because a hostile one would not end.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sparkwright.bench.model.checkpoint import ModelError, invalid

if TYPE_CHECKING:
    from sparkwright.bench.model.modules import Module

#: Part → the layer of which it becomes a part (``packed_modules_mapping`` of vLLM's models).
_JOINED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("in_proj_qkv", "in_proj_z"), "in_proj_qkvz"),
    **dict.fromkeys(("in_proj_b", "in_proj_a"), "in_proj_ba"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj"),
}
_EXPERTS = re.compile(r"(.*\.experts)(\.|$)")
#: Prefixes of names, which a checkpoint and vLLM write in different orders.
_ROOT = re.compile(r"^((model|language_model|backbone)\.)+")
#: Components of a name that are looked at; those of experts have eight.
_DEPTH = 12
#: Algorithm of ModelOpt → format that vLLM loads by it; of another it leaves the layer plain.
_LINEAR = {
    **dict.fromkeys(("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"), "FP8"),
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4"), "NVFP4"),
    "MXFP8": "MXFP8",
}
#: The same for the experts of a layer.
_OF_EXPERTS = {**_LINEAR, "FP8_PER_CHANNEL_PER_TOKEN": "", "FP8_BLOCK_SCALES": "FP8"}
#: The most layers that an error names.
SHOWN = 5


class _Quantization(msgspec.Struct):
    """The fields of ModelOpt's ``quantization_config`` that are read here."""

    quant_algo: str | None = None
    quantized_layers: dict[str, dict[str, Any]] | None = None
    ignore: list[str] | None = None
    exclude_modules: list[str] | None = None


class _JoinedLayer(msgspec.Struct):
    """
    Parts of which vLLM makes one layer.

    Attributes:
        formats: How they are stored, each with the name of the first.
        parts: Their names, without the beginning; none of experts.
        static: Whether one has a scale for what it is multiplied with.
    """

    formats: dict[str, str] = {}
    parts: list[str] = []
    static: bool = False


def joined_layer(name: str) -> str:
    """Return the name of the layer of which vLLM makes the part *name* of no expert a part."""
    parent, dot, own = name.rpartition(".")
    return parent + dot + _JOINED.get(own, own)


def check(config: Mapping[str, Any], modules: Sequence[Module]) -> None:
    """
    Check that vLLM loads *modules* as they are stored.

    Raises:
        mixture-joined: The parts of a joined layer are stored in different formats.
        mixture-undeclared: The config declares another format than a layer is stored in.
        checkpoint-invalid: The config declares formats in an impossible form.
    """
    layers: dict[str, _JoinedLayer] = defaultdict(_JoinedLayer)
    for module in modules:
        # Vision towers are never quantised, tables have rules of each model, norms are no matrices.
        table = "embed" in module.name or module.group == "vision"
        if table or all(len(part.shape) < 2 for part in module.parts.values()):
            continue
        name = _ROOT.sub("", module.name)
        experts = _EXPERTS.match(name)
        layer = layers[experts[1] if experts else joined_layer(name)]
        layer.formats.setdefault(_format(module), module.name)
        layer.static |= "input_scale" in module.parts
        layer.parts += [] if experts else [name]
    mixed = [
        "; ".join(f"{name:.100} is {form}" for form, name in layer.formats.items())
        for layer in layers.values()
        if len(layer.formats) > 1
    ]
    if mixed:
        raise ModelError(
            "mixture-joined",
            f"vLLM joins parts that are stored in different formats, in {len(mixed):,} layers.",
            details=mixed[:SHOWN],
        )
    if differing := list(itertools.islice(_differing(config, layers), SHOWN)):
        raise ModelError(
            "mixture-undeclared",
            "vLLM would load layers in another format than they are stored in.",
            details=differing,
        )


def _format(module: Module) -> str:
    """Return the format of *module*; for FP8 also what a scale covers."""
    # Experts to which calibration sent no token lack the scale that distinguishes W4A16.
    scheme = module.scheme.replace(", W4A16", "")
    if not module.quantised:
        return "not quantised"
    if scheme != "FP8":
        return scheme
    scales = (part.shape for name, part in module.parts.items() if name.startswith("weight_scale"))
    if (shape := next(scales, ())) in ((), (1,)):
        return "FP8 with a scale for the tensor"
    return f"FP8 with a scale for a {'row' if shape[0] == module.rows else 'block'}"


def _differing(config: Mapping[str, Any], layers: Mapping[str, _JoinedLayer]) -> Iterator[str]:
    """Yield which of *layers* ModelOpt's config declares otherwise, by the rules of vLLM."""
    document = config.get("quantization_config")
    if not isinstance(document, dict) or "modelopt" not in str(document.get("quant_method")):
        return
    try:
        declared = msgspec.convert(document.get("quantization", document), _Quantization)
    except msgspec.ValidationError as error:
        raise invalid("quantization_config has an impossible form.", details=[error]) from error
    algorithm = (declared.quant_algo or "").upper()
    mixed = algorithm == "MIXED_PRECISION"
    if not algorithm or (mixed and not declared.quantized_layers):
        return  # hf_quant_config.json, which is not read, has the rest
    algorithms: dict[str, str] = {}
    first_below: dict[str, str] = {}
    for key, entry in (declared.quantized_layers or {}).items():
        name = _ROOT.sub("", key)
        algorithms[name] = str(entry.get("quant_algo")).upper()
        for parent in itertools.accumulate(name.split(".", _DEPTH)[:-1], "{}.{}".format):
            first_below.setdefault(parent, algorithms[name])
    excluded: list[str] = []  # without names that begin with another of the list
    patterns = (*(declared.ignore or ()), *(declared.exclude_modules or ()))
    for name in sorted(_ROOT.sub("", pattern.rstrip("*").rstrip(".")) for pattern in patterns):
        if not excluded or not name.startswith(excluded[-1]):
            excluded.append(name)
    for joined, layer in layers.items():
        form, name = next(iter(layer.formats.items()))
        stored = form.partition(" ")[0] if form.startswith(("NVFP4", "MXFP8", "FP8")) else ""
        if not mixed:
            # What is not quantised is excluded by rules of the models, too.
            choices = {algorithm if stored else ""}
        elif _is_excluded(joined, layer, excluded):
            choices = {""}
        elif layer.parts:
            names = (joined, *layer.parts)
            choices = {algorithms[part] for part in names if part in algorithms} or {""}
        else:
            own = algorithms.get(joined) or first_below.get(joined)
            choices = {own or first_below.get(joined.rpartition(".")[0], "")}
        table = _LINEAR if layer.parts else _OF_EXPERTS
        if {table.get(choice, "") for choice in choices} != {stored}:
            yield f"{name:.100} is {form}, declared as {' and '.join(sorted(choices)) or 'nothing'}"
        elif stored and choices == {"FP8"} and not layer.static:
            yield f"{name:.100} has no input_scale, which FP8 needs"


def _is_excluded(joined: str, layer: _JoinedLayer, excluded: Sequence[str]) -> bool:
    """Return whether vLLM leaves *layer* plain; a name excludes all that begin with it."""
    for name in (joined, *layer.parts):
        index = bisect.bisect(excluded, name)
        if index and name.startswith(excluded[index - 1]):
            return True
    # If one expert of a layer is excluded, vLLM excludes all of them.
    return not layer.parts and any(entry.startswith(name) for entry in excluded[index : index + 1])
