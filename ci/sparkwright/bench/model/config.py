"""
What a model's ``config.json`` says about the bytes that a token costs: experts that it takes, and what attention keeps of the context.

Fields are those of transformers' configurations; families name the same thing differently. Numbers come from strangers and are bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from sparkwright.bench.errors import ModelError

#: What a layer keeps: all of the context, the last tokens of it, a state of fixed size, or nothing.
Kind = Literal["full", "window", "state", "none"]

#: Words of ``layer_types`` and letters of ``hybrid_override_pattern``.
KINDS: Mapping[str, Kind] = {
    "full_attention": "full", "attention": "full", "hybrid": "full", "global": "full", "*": "full",
    "sliding_attention": "window", "chunked_attention": "window", "local": "window",
    "linear_attention": "state", "mamba": "state", "mamba2": "state", "M": "state",
    "moe": "none", "mlp": "none", "E": "none", "-": "none",
}  # fmt: skip
#: Bytes of a number by the name of its type; ``auto`` and unknown ones are taken for two.
SIZES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "float8_e4m3fn": 1}

MOST_LAYERS, MOST_EXPERTS, MOST = 2048, 65536, 1 << 32


class Architecture(msgspec.Struct, frozen=True):
    """
    What the config says.

    Attributes:
        layers: Decoder layers; those that a checkpoint has beyond are for drafting.
        experts, taken: Routed experts in a layer, and how many a token takes; 0 without.
        tied: Whether the output layer is the table of embeddings; None where that is not said.
        kinds: What each layer keeps.
        window: Tokens that a layer of the kind ``window`` keeps.
        kept: Numbers that a layer with attention keeps of each token; 0 where that is not said.
        latent: Whether keys and values are kept as one latent vector (MLA), whatever the projections' shapes.
        state: Bytes that a layer of the kind ``state`` keeps; 0 where that is not said.
        number: Bytes of a number that the cache keeps, as the checkpoint wants it.
    """

    model: str
    layers: int
    experts: int
    taken: int
    tied: bool | None
    kinds: tuple[Kind, ...]
    window: int
    kept: int
    latent: bool
    state: int
    number: int


def of(config: Mapping[str, Any], quantization: Mapping[str, Any]) -> Architecture:
    """
    Return what *config* says; of a model that also sees, what it says about the part that writes.

    Raises:
        checkpoint-invalid: A field is missing, or is not what it should be.
    """
    inner = next((found for name in ("text_config", "llm_config", "language_config") if isinstance(found := config.get(name), dict)), {})
    text: Mapping[str, Any] = {**config, **inner}
    layers = _number(text, "num_hidden_layers", "n_layer", "num_layers", most=MOST_LAYERS)
    if not layers:
        raise ModelError("checkpoint-invalid", "config.json does not say num_hidden_layers.")
    experts = _number(text, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", most=MOST_EXPERTS)
    names = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k", "moe_topk", "top_k_experts")
    taken = _number(text, *names, most=MOST_EXPERTS)
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    rank = _number(text, "kv_lora_rank")
    return Architecture(
        model=str(text.get("model_type", "unknown"))[:60], layers=layers, experts=experts, taken=taken,
        tied=tied if isinstance(tied, bool) else None, kinds=_kinds(text, layers),
        window=_number(text, "sliding_window", "attention_chunk_size"),
        kept=rank + _number(text, "qk_rope_head_dim") if rank else _heads(text), latent=rank > 0, state=_state(text),
        number=1 if _keeps_fp8(quantization) else _size(text),
    )  # fmt: skip


def _number(config: Mapping[str, Any], *names: str, most: int = MOST) -> int:
    """Return the first of the fields *names* that is there; 0 without."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise ModelError(
                "checkpoint-invalid", f"config.json says that {name} is {str(value)[:60]!r}; a number of 0 to {most:,} was expected."
            )
        return value
    return 0


def _heads(config: Mapping[str, Any]) -> int:
    heads, hidden = _number(config, "num_attention_heads", "n_head"), _number(config, "hidden_size", "n_embd")
    wide = _number(config, "head_dim", "attention_head_dim") or (hidden // heads if heads else 0)
    return 2 * (_number(config, "num_key_value_heads") or heads) * wide


def _kinds(config: Mapping[str, Any], layers: int) -> tuple[Kind, ...]:
    """Return what each layer keeps, by the most explicit field that is there."""
    listed = config.get("layer_types") or config.get("layers_block_type") or config.get("hybrid_override_pattern")
    if isinstance(listed, str | list):
        unknown = sorted({str(one)[:40] for one in listed if str(one) not in KINDS})
        if unknown or len(listed) != layers:
            says = f"lists {len(listed)} layers of {layers}, of unknown kinds: {', '.join(unknown[:5]) or 'none'}"
            raise ModelError("checkpoint-invalid", f"config.json {says}.")
        return tuple(KINDS[str(one)] for one in listed)
    if every := _number(config, "full_attention_interval"):
        return _every(every, "state", layers)
    if every := _number(config, "attn_layer_period"):
        return tuple("full" if layer % every == _number(config, "attn_layer_offset") else "state" for layer in range(layers))
    if not _number(config, "sliding_window") or config.get("use_sliding_window") is False:
        return _every(1, "full", layers)
    if every := _number(config, "sliding_window_pattern", "_sliding_window_pattern"):
        return _every(every, "window", layers)
    first = _number(config, "max_window_layers") if config.get("use_sliding_window") else 0
    return tuple("window" if layer >= first else "full" for layer in range(layers))


def _every(every: int, between: Kind, layers: int) -> tuple[Kind, ...]:
    """Return layers of which each *every*-th keeps all of the context, and those between keep *between*."""
    return tuple(between if (layer + 1) % every else "full" for layer in range(layers))


def _state(config: Mapping[str, Any]) -> int:
    """Return the bytes that a layer with linear attention (gated delta net) or a state space (Mamba-2) keeps, its convolution's too."""
    wide = _size(config, "mamba_ssm_dtype", "mamba_ssm_cache_dtype")
    if heads := _number(config, "linear_num_value_heads"):
        keys, values = _number(config, "linear_key_head_dim"), _number(config, "linear_value_head_dim")
        rows = 2 * _number(config, "linear_num_key_heads") * keys + heads * values
        return heads * keys * values * wide + rows * max(0, _number(config, "linear_conv_kernel_dim") - 1) * _size(config)
    if heads := _number(config, "mamba_num_heads", "mamba_n_heads"):
        numbers = heads * _number(config, "mamba_head_dim", "mamba_d_head")
        deep = _number(config, "ssm_state_size", "mamba_d_state")
        rows = numbers + 2 * _number(config, "n_groups", "mamba_n_groups") * deep
        return numbers * deep * wide + rows * max(0, _number(config, "conv_kernel", "mamba_d_conv") - 1) * _size(config)
    return 0


def _size(config: Mapping[str, Any], *names: str) -> int:
    """Return the bytes of a number of the type that the first of *names* gives, else of the model's own type."""
    told = next((config[name] for name in (*names, "dtype", "torch_dtype") if isinstance(config.get(name), str)), "")
    return SIZES.get(told.removeprefix("torch."), 2)


def _keeps_fp8(quantization: Mapping[str, Any]) -> bool:
    """Does the checkpoint want its cache in FP8? ModelOpt says so in a word, compressed-tensors by a scheme."""
    scheme = quantization.get("kv_cache_scheme")
    by_scheme = isinstance(scheme, dict) and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    return by_scheme or str(quantization.get("kv_cache_quant_algo")).upper() == "FP8"
