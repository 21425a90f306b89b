"""
Mixtures of formats in one checkpoint, as files and as what vLLM makes of them.

A mixture states how each part of one hybrid layer is stored, and what its config declares. The names of parts are those of Qwen3.5's
checkpoints; a name stands below the model's root.
"""

import itertools
from typing import Any, NamedTuple

from tests.support.checkpoints import Told

#: Rows of each part of a layer with linear and with full attention and experts; all have 256 columns.
PARTS = {
    "self_attn.q_proj": 512, "self_attn.k_proj": 128, "self_attn.v_proj": 128, "self_attn.o_proj": 256,
    "linear_attn.in_proj_qkv": 512, "linear_attn.in_proj_z": 256, "linear_attn.in_proj_b": 128, "linear_attn.in_proj_a": 128,
    "linear_attn.out_proj": 256, "mlp.shared_expert.gate_proj": 128, "mlp.shared_expert.up_proj": 128, "mlp.shared_expert.down_proj": 256,
}  # fmt: skip
EXPERTS = tuple(f"mlp.experts.{number}.{part}" for number, part in itertools.product((0, 1), ("gate_proj", "up_proj", "down_proj")))
#: The layer in which they stand; others begin with its number.
LAYER, TENTH = "layers.1.", "layers.10."
FP8 = {"dynamic FP8": "FP8_PER_CHANNEL_PER_TOKEN", "static FP8": "FP8", "FP8 in blocks": "FP8_PB_WO"}
ALGORITHMS = {**FP8, "FP8 without scale of inputs": "FP8", "NVFP4": "NVFP4"}


class Mixture(NamedTuple):
    """
    A checkpoint with two formats or more.

    Attributes:
        stored: Name → format; BF16 for the parts that are not in it.
        declared: Name → algorithm of ModelOpt.
        ignored: Patterns of its field ``ignore``.
        refused: The reference of the error; empty if vLLM loads it as it is stored.
        algorithm: Of the whole.
    """

    stored: dict[str, str]
    declared: dict[str, str]
    ignored: tuple[str, ...] = ()
    refused: str = ""
    algorithm: str = "MIXED_PRECISION"

    def names(self) -> list[str]:
        """Return the names of all parts."""
        layers = {TENTH if name.startswith(TENTH) else LAYER for name in self.stored}
        return [layer + part for layer in sorted(layers | {LAYER}) for part in (*PARTS, *EXPERTS)] + ["lm_head", "mtp.layers.0.self_attn.o_proj"]

    def tensors(self, root: str) -> list[Told]:
        """Return its tensors below *root*."""
        return [tensor for name in self.names() for tensor in _tensors(_rooted(name, root), self._rows(name), self.stored.get(name, "BF16"))]

    def quantization(self, root: str) -> dict[str, Any]:
        """Return ``quantization_config``."""
        layers = {_rooted(name, root): {"quant_algo": algorithm} for name, algorithm in self.declared.items()}
        ignored = [_rooted(name, root) for name in self.ignored]
        return {"quant_method": "modelopt", "quant_algo": self.algorithm, "quantized_layers": layers, "ignore": ignored}

    def config(self, root: str) -> dict[str, Any]:
        """Return ``config.json``."""
        return {"model_type": "qwen3_5_moe", "num_hidden_layers": 11, "num_experts_per_tok": 1, "quantization_config": self.quantization(root)}

    def _rows(self, name: str) -> int:
        return PARTS.get(name.removeprefix(TENTH).removeprefix(LAYER), 256)


def _rooted(name: str, root: str) -> str:
    return name if name.startswith(("lm_head", "mtp")) else root + name


def _tensors(name: str, rows: int, form: str) -> list[Told]:
    scale: list[Told] = [(f"{name}.input_scale", "F32", [])]
    if form == "NVFP4":
        weights = [(f"{name}.weight", "U8", [rows, 128]), (f"{name}.weight_scale", "F8_E4M3", [rows, 16]), (f"{name}.weight_scale_2", "F32", [])]
        return [*weights, *scale]
    if form == "BF16":
        return [(f"{name}.weight", "BF16", [rows, 256])]
    shapes = {"dynamic FP8": [rows], "FP8 in blocks": [-(-rows // 128), 1, 2, 1]}
    weights = [(f"{name}.weight", "F8_E4M3", [rows, 256]), (f"{name}.weight_scale", "F32", shapes.get(form, []))]
    return [*weights, *(scale if form == "static FP8" else [])]


def _layer(parts: str, form: str, layer: str = LAYER) -> dict[str, str]:
    """Return the parts of *layer* whose names hold one of the words in *parts*, all stored as *form*."""
    return {layer + part: form for part in (*PARTS, *EXPERTS) if any(word in part for word in parts.split())}


def _as_declared(*layers: dict[str, str], ignored: tuple[str, ...] = (), refused: str = "", without: str = "-") -> Mixture:
    """Return the mixture of *layers* with all parts declared but those that hold *without*."""
    stored = {name: form for layer in layers for name, form in layer.items()}
    declared = {name: ALGORITHMS[form] for name, form in stored.items() if without not in name}
    return Mixture(stored, declared, ignored, refused)


_EXPERTS = _layer(".experts.", "NVFP4")
_SIDES = "self_attn in_proj_qkv in_proj_z out_proj shared_expert"
_HEAD = {"lm_head": "dynamic FP8"}
_JOINED, _UNDECLARED = "mixture-joined", "mixture-undeclared"

MIXTURES = {
    # What model slim writes.
    **{f"NVFP4 experts and {form} beside them": _as_declared(_EXPERTS, _layer(_SIDES, form)) for form in FP8},
    "all side layers and the head in FP8": _as_declared(_EXPERTS, _layer(_SIDES + " in_proj_b in_proj_a", "dynamic FP8"), _HEAD),
    "experts declared as one": Mixture(_EXPERTS, {LAYER + "mlp.experts": "NVFP4"}),
    "joined layers declared by their names": Mixture(
        {**_EXPERTS, **_layer("q_proj k_proj v_proj", "dynamic FP8")},
        {**dict.fromkeys(_EXPERTS, "NVFP4"), LAYER + "self_attn.qkv_proj": "FP8_PER_CHANNEL_PER_TOKEN"},
    ),
    "some formats by layer": _as_declared(_EXPERTS, _layer("self_attn", "static FP8"), _layer("linear_attn", "FP8 in blocks")),
    "a layer ignored, another not": _as_declared(_EXPERTS, _layer("self_attn", "dynamic FP8"), ignored=(LAYER + "linear_attn*", "mtp*", "lm_head")),
    "drafting layer in FP8": _as_declared(_EXPERTS, {"mtp.layers.0.self_attn.o_proj": "dynamic FP8"}),
    "one algorithm": Mixture(_EXPERTS, {}, (LAYER + "self_attn*", LAYER + "linear_attn*", LAYER + "mlp.shared_expert*", "mtp*", "lm_head"), "", "NVFP4"),
    # Parts of one layer that differ.
    "a part of attention left in BF16": _as_declared(_EXPERTS, _layer("q_proj k_proj", "dynamic FP8"), refused=_JOINED),
    "a part of attention in NVFP4": _as_declared(_EXPERTS, _layer("q_proj k_proj", "static FP8"), _layer("v_proj", "NVFP4"), refused=_JOINED),
    "linear attention without its gate": _as_declared(_EXPERTS, _layer("in_proj_qkv", "dynamic FP8"), refused=_JOINED),
    "half of in_proj_ba": _as_declared(_EXPERTS, _layer("in_proj_b", "dynamic FP8"), refused=_JOINED),
    "half of a shared expert": _as_declared(_EXPERTS, _layer("shared_expert.up", "dynamic FP8"), refused=_JOINED),
    "experts of which one is FP8": _as_declared({**_EXPERTS, **_layer("experts.1.", "static FP8")}, refused=_JOINED),
    "experts with other down projections": _as_declared({**_EXPERTS, **_layer(".experts.0.down .experts.1.down", "static FP8")}, refused=_JOINED),
    "two kinds of FP8 in a layer": _as_declared(_EXPERTS, _layer("q_proj k_proj", "dynamic FP8"), _layer("v_proj", "static FP8"), refused=_JOINED),
    # Layers that are declared otherwise.
    "side layers in a checkpoint of NVFP4": Mixture({**_EXPERTS, **_layer(_SIDES, "dynamic FP8")}, {}, (), _UNDECLARED, "NVFP4"),
    "side layers that are not declared": _as_declared(_EXPERTS, _layer("out_proj", "dynamic FP8"), refused=_UNDECLARED, without="out_proj"),
    "side layers still ignored": _as_declared(_EXPERTS, _layer("linear_attn", "dynamic FP8"), ignored=(LAYER + "linear_attn*",), refused=_UNDECLARED),
    "tenth layer ignored with the first": _as_declared(
        _layer("self_attn", "dynamic FP8", TENTH), ignored=("layers.1*",), refused=_UNDECLARED
    ),
    "one expert ignored": _as_declared(_EXPERTS, ignored=(LAYER + "mlp.experts.1.down_proj",), refused=_UNDECLARED),
    "experts in BF16 beside a shared one in FP8": _as_declared(_layer("shared_expert", "dynamic FP8"), _HEAD, refused=""),
    "experts in BF16 beside a shared one that vLLM gives them": _as_declared(_layer("shared_expert", "FP8 in blocks"), refused=_UNDECLARED),
    "head declared and ignored": _as_declared(_EXPERTS, _HEAD, ignored=("lm_head",), refused=_UNDECLARED),
    "head not declared": _as_declared(_EXPERTS, _HEAD, refused=_UNDECLARED, without="lm_head"),
    "BF16 declared as FP8": Mixture(_EXPERTS, {**dict.fromkeys(_EXPERTS, "NVFP4"), LAYER + "self_attn.o_proj": "FP8"}, (), _UNDECLARED),
    "linear layers by the name that only experts have": Mixture(
        {**_EXPERTS, **_layer("out_proj", "FP8 in blocks")},
        {**dict.fromkeys(_EXPERTS, "NVFP4"), LAYER + "linear_attn.out_proj": "FP8_BLOCK_SCALES"}, (), _UNDECLARED,
    ),
    "experts by a name that only linear layers have": _as_declared(_layer(".experts.", "dynamic FP8"), refused=_UNDECLARED),
    "static FP8 without the scale of its inputs": _as_declared(_EXPERTS, _layer("o_proj", "FP8 without scale of inputs"), refused=_UNDECLARED),
    "drafting layer not declared": _as_declared(
        _EXPERTS, {"mtp.layers.0.self_attn.o_proj": "dynamic FP8"}, refused=_UNDECLARED, without="mtp"
    ),
}  # fmt: skip
