"""
What the tensors of a checkpoint are called: the module, its parameter, the layer, the expert, and the group that people know it by.

Families name the same thing differently; a name that no rule knows is in the group ``other``, and is shown.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection

import msgspec

#: Groups in the order of a table, as a token meets them.
GROUPS = (
    "embeddings", "norms", "attention q", "attention k", "attention v", "attention o", "attention qkv", "attention", "linear attention",
    "mlp", "router", "experts", "shared experts", "other", "lm_head", "mtp", "vision",
)  # fmt: skip
#: What is not read to write a token: parts that see or hear, and layers that draft.
APART = ("mtp", "vision")

#: Parameters of a module; a tensor of another name is a module of its own.
_PARAMETERS = (
    "weight", "bias", "weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale", "weight_packed", "weight_shape",
    "weight_zero_point", "weight_g_idx", "input_scale", "input_global_scale", "qweight", "qzeros", "scales", "g_idx", "q_scale", "k_scale",
    "v_scale", "SCB", "e_score_correction_bias",
)  # fmt: skip
_PARAMETER = re.compile(rf"(.+)\.({'|'.join(_PARAMETERS)})")
#: Experts in one tensor carry their parameter behind an underscore, or none.
_STACKED = re.compile(r"(.+\.experts\.\w+?)_(blocks|scales|bias|weight_scale_2|weight_scale_inv|weight_scale|input_scale)")
_BITSANDBYTES = re.compile(r"(.+)\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+)")

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,6})\.")
_EXPERT = re.compile(r"\.experts\.(\d{1,6})\.")

#: The first that is found in a name, its numbers left out, decides.
_RULES: tuple[tuple[str, str], ...] = (
    ("mtp", r"^(model\.)?(mtp|nextn|eagle|draft)\w*\."),
    ("vision", r"(^|\.)(visual|vision\w*|audio\w*|multi_modal\w*|mm_\w+|embed_vision|embed_audio|image_\w+|sound\w*|speech\w*)(\.|$)"),
    ("lm_head", r"(^|\.)(lm_head|embed_out)$|^output$"),
    ("embeddings", r"(^|\.)(embed_tokens\w*|wte|wpe|word_embeddings|tok_embeddings|embeddings)$"),
    ("norms", r"(norm\d*|layernorm\w*|_norm|\.ln_\w+|\.norm_\w+)$"),
    ("shared experts", r"\.shared_(experts?|mlp|expert_gate)(\.|$)"),
    ("experts", r"\.experts(\.|$)"),
    ("router", r"\.(gate|router|wg)(\.|$)"),
    ("linear attention", r"\.(linear_attn|mamba|ssm|gdn|kda|temporal_block)\."),
    ("linear attention", r"\.mixer\.(in_proj|out_proj|conv1d|A_log|D|dt_bias|x_proj|dt_proj)$"),
    ("attention q", r"attn\.(q_proj|q_a_proj|q_b_proj|wq\w*)$|\.(attention|mixer)\.(q_proj|wq)$"),
    ("attention k", r"(attn|attention|mixer)\.(k_proj|wk)$"),
    ("attention v", r"(attn|attention|mixer)\.(v_proj|wv)$"),
    ("attention o", r"(attn|attention|mixer)\.(o_proj|wo|dense|c_proj|out_proj)$"),
    ("attention qkv", r"(attn|attention|mixer)\.(qkv\w*|query_key_value|c_attn|W?pack|kv_a_proj\w*|kv_b_proj|fused_qkv\w*)$"),
    ("attention", r"(attn|attention)(\.|$)"),
    ("mlp", r"\.(mlp|feed_forward|ffn|block_sparse_moe|mixer)\."),
)  # fmt: skip
_COMPILED = tuple((group, re.compile(rule)) for group, rule in _RULES)


class Name(msgspec.Struct, frozen=True, gc=False):
    """
    A tensor's name, taken apart.

    Attributes:
        module: The module's whole name.
        parameter: ``weight``, ``weight_scale``.
        layer: None outside of layers. *expert*: None where it is no expert's, or all are in one tensor.
        short: The module within its layer, with ``*`` for an expert's number: ``mlp.experts.*.down_proj``.
        group: One of `GROUPS`.
    """

    module: str
    parameter: str
    layer: int | None
    expert: int | None
    short: str
    group: str


def of(name: str, layers: int) -> Name:
    """Return the parts of a tensor's *name* in a model of so many decoder *layers*; those behind them draft."""
    found = _BITSANDBYTES.fullmatch(name) or _PARAMETER.fullmatch(name) or _STACKED.fullmatch(name)
    module, parameter = (found[1], found[2].partition(".")[0]) if found else (name, "weight")
    layer, expert = _LAYER.search(module), _EXPERT.search(module)
    short = module[layer.end() :] if layer else module
    short = _EXPERT.sub(".experts.*.", f".{short}")[1:]
    group = _group(re.sub(r"\d+", "0", module))
    number = int(layer[1]) if layer else None
    if number is not None and number >= layers and group not in APART:
        group = "mtp"
    return Name(module, parameter, number, int(expert[1]) if expert else None, short, group)


@functools.lru_cache(maxsize=4096)
def _group(module: str) -> str:
    return next((group for group, rule in _COMPILED if rule.search(module)), "other")


def few(numbers: Collection[int], most: int = 8) -> str:
    """Return the first few of *numbers*, for people."""
    told = sorted(numbers)
    return ", ".join(map(str, told[:most])) + (", …" if len(told) > most else "")
