"""
The part of ``config.json`` that decides the bytes of a decode step: layers, experts, attention.

Fields are those of transformers' configurations; families name the same thing differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from sparkwright.bench.model.checkpoint import invalid

#: What a layer keeps: the whole context, its last tokens, a state of fixed size, or nothing.
Kind = Literal["full", "window", "state", "none"]

#: Words of ``layer_types`` and letters of ``hybrid_override_pattern``.
KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(("full_attention", "attention", "hybrid", "global", "*"), "full"),
    **dict.fromkeys(("sliding_attention", "chunked_attention", "local"), "window"),
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "M"), "state"),
    **dict.fromkeys(("moe", "mlp", "E", "-"), "none"),
}
#: Bytes of a number by the name of its type; unknown types count as two.
SIZES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "float8_e4m3fn": 1}

#: Fields of families that state in their own way what a layer keeps; their context is unknown.
UNREAD = (
    "attention_types", "attn_layer_indices", "attn_type_list", "block_types", "compress_ratios",
    "dense_attention_every_n_layers", "global_attn_every_n_layers", "hybrid_layer_ids",
    "layer_group_size", "linear_attn_config", "num_kv_shared_layers",
)  # fmt: skip

MOST_LAYERS, MOST_EXPERTS, MOST = 2048, 65536, 1 << 32


class Architecture(msgspec.Struct, frozen=True):
    """
    The facts of a config.

    Attributes:
        layers: Decoder layers; those of a checkpoint beyond them draft.
        experts, experts_per_token: Routed experts of a layer; 0 for none.
        tied: The output layer is the embedding table; None if the config does not say.
        kinds: What each layer keeps.
        window: Tokens that a layer of the kind ``window`` keeps.
        kv_numbers: Numbers that an attention layer keeps for each token; 0 if unknown.
        latent: Keys and values are one latent vector (MLA), whatever the shape of projections.
        state_bytes: Bytes that a layer of the kind ``state`` keeps; 0 if unknown.
        kv_bytes: Bytes of a number of the KV cache, as the checkpoint wants it.
        unread: Fields about the context that are not understood, so that its size is unknown.
    """

    model: str
    layers: int
    experts: int
    experts_per_token: int
    tied: bool | None
    kinds: tuple[Kind, ...]
    window: int
    kv_numbers: int
    latent: bool
    state_bytes: int
    kv_bytes: int
    unread: tuple[str, ...] = ()


def architecture(config: Mapping[str, Any], quantization: Mapping[str, Any]) -> Architecture:
    """
    Return the facts of *config*; of a model that also sees, those of the part that writes.

    Raises:
        checkpoint-invalid: A field is missing or impossible.
    """
    parts = (config.get(name) for name in ("text_config", "llm_config", "language_config"))
    inner = next((part for part in parts if isinstance(part, dict)), {})
    text: Mapping[str, Any] = {**config, **inner}
    layers = _number(text, "num_hidden_layers", "n_layer", "num_layers", most=MOST_LAYERS)
    if not layers:
        raise invalid("config.json does not state num_hidden_layers.")
    names = "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"
    taken = (
        "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k",
        "moe_topk", "top_k_experts",
    )  # fmt: skip
    tied, rank = text.get("tie_word_embeddings"), _number(text, "kv_lora_rank")
    heads = _number(text, "num_attention_heads", "n_head")
    hidden = _number(text, "hidden_size", "n_embd")
    width = _number(text, "head_dim", "attention_head_dim") or (hidden // heads if heads else 0)
    plain = 2 * (_number(text, "num_key_value_heads") or heads) * width
    # ModelOpt states an FP8 cache in a word, compressed-tensors by a scheme.
    scheme = quantization.get("kv_cache_scheme")
    fp8 = isinstance(scheme, dict) and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    fp8 = fp8 or str(quantization.get("kv_cache_quant_algo")).upper() == "FP8"
    return Architecture(
        model=str(text.get("model_type", "unknown"))[:60],
        layers=layers,
        experts=_number(text, *names, most=MOST_EXPERTS),
        experts_per_token=_number(text, *taken, most=MOST_EXPERTS),
        tied=tied if isinstance(tied, bool) else None,
        kinds=_kinds(text, layers),
        window=_number(text, "sliding_window", "attention_chunk_size"),
        kv_numbers=rank + _number(text, "qk_rope_head_dim") if rank else plain,
        latent=rank > 0,
        state_bytes=_state(text),
        kv_bytes=1 if fp8 else _size(text),
        unread=tuple(name for name in UNREAD if text.get(name)),
    )


def _number(config: Mapping[str, Any], *names: str, most: int = MOST) -> int:
    """Return the first of the fields *names* that has a value; 0 for none."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if type(value) is not int or not 0 <= value <= most:
                message = f"config.json states {name} as {str(value)[:60]!r}, not 0 to {most:,}."
                raise invalid(message)
            return value
    return 0


def _kinds(config: Mapping[str, Any], layers: int) -> tuple[Kind, ...]:
    """Return what each layer keeps, by the most explicit field."""
    names = "layer_types", "layers_block_type", "hybrid_override_pattern"
    listed = next((config[name] for name in names if config.get(name)), None)
    if isinstance(listed, str | list):
        words = [str(word) for word in listed]
        if len(words) != layers or set(words) - KINDS.keys():
            raise invalid(f"config.json lists kinds of {layers} layers that are not known.", words)
        return tuple(KINDS[word] for word in words)
    if interval := _number(config, "full_attention_interval"):
        return _every(interval, interval - 1, "state", layers)
    if period := _number(config, "attn_layer_period"):
        return _every(period, _number(config, "attn_layer_offset"), "state", layers)
    full = layers
    if _number(config, "sliding_window") and config.get("use_sliding_window") is not False:
        full = _number(config, "max_window_layers") if config.get("use_sliding_window") else 0
    period = _number(config, "sliding_window_pattern", "_sliding_window_pattern")
    if period and not full:
        return _every(period, period - 1, "window", layers)
    return tuple("full" if layer < full else "window" for layer in range(layers))


def _every(period: int, offset: int, other: Kind, layers: int) -> tuple[Kind, ...]:
    """Return layers of which one of each *period* keeps the whole context."""
    return tuple("full" if layer % period == offset else other for layer in range(layers))


def _state(config: Mapping[str, Any]) -> int:
    """Return the bytes that a layer of linear attention (gated delta net) or Mamba-2 keeps."""
    size = _size(config, "mamba_ssm_dtype", "mamba_ssm_cache_dtype")
    if heads := _number(config, "linear_num_value_heads"):
        depth, width = (_number(config, f"linear_{one}_head_dim") for one in ("key", "value"))
        numbers = heads * width
        rows = 2 * _number(config, "linear_num_key_heads") * depth + numbers
    else:
        numbers = _number(config, "mamba_num_heads", "mamba_n_heads")
        numbers *= _number(config, "mamba_head_dim", "mamba_d_head")
        depth = _number(config, "ssm_state_size", "mamba_d_state")
        rows = numbers + 2 * _number(config, "n_groups", "mamba_n_groups") * depth
    kernel = _number(config, "linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv")
    return numbers * depth * size + rows * max(0, kernel - 1) * _size(config) if numbers else 0


def _size(config: Mapping[str, Any], *names: str) -> int:
    """Return the bytes of a number of the type in the first of *names*, else of the model's."""
    types = (config.get(name) for name in (*names, "dtype", "torch_dtype"))
    name = next((text for text in types if isinstance(text, str)), "")
    return SIZES.get(name.removeprefix("torch."), 2)
