"""
The modules of a checkpoint, and its audit: which are quantised, and what a decode step reads.

The audit explains a decode speed: each step reads every weight that it uses, and one unquantised
projection in thirty layers may weigh more than all experts of a token. Everything is computed from
the headers of the weights and the config.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from sparkwright.bench.model import quantisation
from sparkwright.bench.model.architecture import SIZES, Architecture, architecture
from sparkwright.bench.model.checkpoint import Checkpoint, Tensor, invalid
from sparkwright.bench.model.decode_bytes import ContextBytes, distinct_experts
from sparkwright.bench.model.quantisation import Scheme

#: Groups in the order of a table, as a token meets them.
GROUPS = (
    "embeddings", "norms", "attention q", "attention k", "attention v", "attention o",
    "attention qkv", "attention", "linear attention", "mlp", "router", "experts", "shared experts",
    "other", "lm_head", "mtp", "vision",
)  # fmt: skip
#: Groups that writing a token does not read: parts that see or hear, and layers that draft.
APART = ("mtp", "vision")
#: Parameters that a server drops when it loads the model.
_UNREAD = ("weight_shape", "g_idx", "weight_g_idx")

#: Parameters of a module; a tensor of another name is a module of its own.
_PARAMETER = re.compile(
    r"(.+)\.(weight(?:_scale(?:_2|_inv)?|_global_scale|_packed|_shape|_zero_point|_g_idx)?|bias"
    r"|input_(?:global_)?scale|qweight|qzeros|scales|g_idx|[qkv]_scale|e_score_correction_bias)"
)
#: Experts in one tensor have their parameter behind an underscore, or none.
_STACKED = re.compile(
    r"(.+\.experts\.\w+?)_(blocks|scales|bias|weight_scale(?:_2|_inv)?|input_scale)"
)
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,6})\.")
_EXPERT = re.compile(r"\.experts\.(\d{1,6})\.")

#: The first that is found in a name decides its group.
_RULES = (
    ("mtp", r"^(model\.)?(mtp|nextn|eagle|draft)\w*\."),
    ("vision", r"(^|\.)(visual|(vision|audio|multi_modal|mm_|image_|sound|speech)\w*"
     r"|embed_(vision|audio))(\.|$)"),
    ("lm_head", r"(^|\.)(lm_head|embed_out)$|^output$"),
    ("embeddings", r"(^|\.)(embed_tokens\w*|wte|wpe|word_embeddings|tok_embeddings|embeddings)$"),
    ("norms", r"(norm\d*|layernorm\w*|_norm|\.ln_\w+|\.norm_\w+)$"),
    ("shared experts", r"\.shared_(experts?|mlp|expert_gate)(\.|$)"),
    ("experts", r"\.experts(\.|$)"),
    ("router", r"\.(gate|router|wg)(\.|$)"),
    ("linear attention", r"\.(linear_attn|mamba|ssm|gdn|kda|temporal_block)\."
     r"|\.mixer\.(in_proj|out_proj|conv1d|A_log|D|dt_bias|x_proj|dt_proj)$"),
    ("attention q", r"attn\.(q_proj|q_a_proj|q_b_proj|wq\w*)$|\.(attention|mixer)\.(q_proj|wq)$"),
    ("attention k", r"(attn|attention|mixer)\.(k_proj|wk)$"),
    ("attention v", r"(attn|attention|mixer)\.(v_proj|wv)$"),
    ("attention o", r"(attn|attention|mixer)\.(o_proj|wo|dense|c_proj|out_proj)$"),
    ("attention qkv", r"(attn|attention|mixer)"
     r"\.((fused_)?qkv\w*|query_key_value|c_attn|W?pack|kv_[ab]_proj\w*)$"),
    ("attention", r"(attn|attention)(\.|$)"),
    ("mlp", r"\.(mlp|feed_forward|ffn|block_sparse_moe|mixer)\."),
)  # fmt: skip

#: The config's intention for a row; empty for modules that no method quantises, such as norms.
Intention = Literal["", "quantise", "ignore", "left by the method"]

#: Reference of a finding → what it means and what to do.
REASONS: Mapping[str, str] = {
    "unquantised-not-ignored": "The config says that it is quantised and it is not: a server reads "
    "all its bytes, or refuses to load it.",
    "quantised-though-ignored": "The config tells the server to load plain numbers where packed "
    "ones are stored. Do not serve it.",
    "quantisation-not-declared": "Weights are packed and no config says how; a server would load "
    "them as something else.",
    "scale-missing": "A packed weight has no scales, so its values are unknown. Do not serve it.",
    "scale-shape": "The scales do not belong to their weight: its values would be wrong. Do not "
    "serve it.",
    "format-unknown": "The tensors are of no quantisation format that is understood here, so "
    "nobody checked that its scales belong to its weights.",
    "layers-missing": "The checkpoint lacks layers that the config counts.",
    "experts-differ": "The checkpoint holds another number of experts than the config states.",
}


class Module(msgspec.Struct, frozen=True, gc=False):
    """
    A module of a checkpoint.

    Attributes:
        layer: None outside of layers. *expert*: None if it is none, or all are in one tensor.
        short: Its name within its layer, an expert's number as ``*``.
        group: One of `GROUPS`.
        parts: Its tensors by parameter.
    """

    name: str
    layer: int | None
    expert: int | None
    short: str
    group: str
    parts: dict[str, Tensor]
    scheme: Scheme

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.parts.values())


def modules(checkpoint: Checkpoint, layers: int) -> list[Module]:
    """Return the modules of a model of so many decoder *layers*; those of later layers draft."""
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in checkpoint.tensors.items():
        match = _PARAMETER.fullmatch(name) or _STACKED.fullmatch(name)
        parts[match[1] if match else name][match[2] if match else "weight"] = tensor
    return [_module(name, tensors, checkpoint, layers) for name, tensors in parts.items()]


def _module(name: str, parts: dict[str, Tensor], checkpoint: Checkpoint, layers: int) -> Module:
    layer, expert = _LAYER.search(name), _EXPERT.search(name)
    short = _EXPERT.sub(".experts.*.", "." + (name[layer.end() :] if layer else name))[1:]
    number, group = int(layer[1]) if layer else None, _group(re.sub(r"\d+", "0", name))
    if number is not None and number >= layers and group not in APART:
        group = "mtp"
    scheme = quantisation.scheme(parts, checkpoint.quantization)
    return Module(name, number, int(expert[1]) if expert else None, short, group, parts, scheme)


@functools.lru_cache(maxsize=4096)
def _group(name: str) -> str:
    return next((group for group, rule in _RULES if re.search(rule, name)), "other")


def expert_counts(listed: Sequence[Module], shape: Architecture) -> dict[int, int]:
    """
    Return how many routed experts each layer has in the checkpoint.

    Raises:
        checkpoint-invalid: The config does not state how many of them a token takes.
    """
    counts: Counter[int] = Counter()
    names = set()
    for module in listed:
        if module.group == "experts" and module.layer is not None:
            sizes = [tensor.shape[0] for tensor in module.parts.values() if len(tensor.shape) > 1]
            if module.expert is None:
                counts[module.layer] = max(counts[module.layer], *sizes, 0)
            elif (module.layer, module.expert) not in names:
                names.add((module.layer, module.expert))
                counts[module.layer] += 1
    least = min(counts.values(), default=0)
    if counts and not 0 < shape.experts_per_token <= least:
        taken = shape.experts_per_token or "an unknown number"
        raise invalid(f"By config.json, a token takes {taken} of {least} experts.")
    return counts


def context_bytes(listed: Sequence[Module], shape: Architecture, number: int = 0) -> ContextBytes:
    """
    Return the size of a request's context, in numbers of *number* bytes or as the config wants.

    The rows of the key and value projections are facts; the config's heads count without them.
    """
    rows: dict[str, dict[int, int]] = {"attention k": {}, "attention v": {}}
    for module in listed:
        weight = module.parts.get("weight") or module.parts.get("weight_packed")
        if "qweight" in module.parts:  # AWQ stores the weight transposed
            weight = None
            if scales := module.parts.get("scales"):
                rows.get(module.group, {})[module.layer or 0] = (scales.shape or (0,))[-1]
        if weight is not None and len(weight.shape) == 2 and module.layer is not None:
            rows.get(module.group, {})[module.layer] = weight.shape[0]
    keys, values = rows.values()
    # Without a value projection, values are the keys.
    stored = {} if shape.latent else {layer: n + values.get(layer, n) for layer, n in keys.items()}
    layers = [layer for layer, kind in enumerate(shape.kinds) if kind in ("full", "window")]
    numbers = {layer: stored.get(layer, shape.kv_numbers) for layer in layers}
    states = sum(kind == "state" for kind in shape.kinds)
    notes = []
    if differing := [layer for layer in layers if numbers[layer] != shape.kv_numbers]:
        notes.append(f"keys and values of layers {_few(differing)} are as wide as their weights")
    if unknown := [layer for layer in layers if not numbers[layer]]:
        notes.append(f"the context of layers {_few(unknown)} is unknown, and not counted")
    if states and not shape.state_bytes:
        notes.append(f"the states of {states} layers are unknown, and not counted")
    if shape.unread:
        fields = ", ".join(shape.unread)
        notes.append(f"the context is unknown: {fields} of config.json is not understood")
    sizes = {layer: float((number or shape.kv_bytes) * count) for layer, count in numbers.items()}
    known = not (unknown or shape.unread)
    return ContextBytes(sizes, float(states * shape.state_bytes), tuple(notes), known)


def _few(numbers: Collection[int]) -> str:
    listed = sorted(numbers)
    return ", ".join(map(str, listed[:8])) + (", …" if len(listed) > 8 else "")


class Row(msgspec.Struct, frozen=True):
    """
    Modules that are alike.

    Attributes:
        modules: Their name within a layer.
        count: How many they are.
        bytes: Their size in the checkpoint.
        read: The bytes that a step of the batch reads of them.
        intention: The config's intention for them.
    """

    group: str
    modules: str
    scheme: str
    quantised: bool
    count: int
    bytes: int
    read: float
    intention: Intention = ""


class Finding(msgspec.Struct, frozen=True):
    """Where the checkpoint disagrees with its config; *reference* is one of `REASONS`."""

    reference: str
    message: str


class ModuleAudit(msgspec.Struct, frozen=True):
    """
    A model, audited.

    Attributes:
        method: The config's name of the quantisation method; empty without one.
        experts: Of a layer: all, those of a token, and those that a step is expected to read.
        bytes: Size of the checkpoint.
        token_bytes: Bytes of the cache for each token of context; *state_bytes* do not grow.
        weights: Bytes of the weights that a step reads, for all requests together.
        cache: Bytes of context that a step moves, for all requests together.
        notes: What was left out or assumed.
    """

    model: str
    method: str
    layers: int
    experts: tuple[int, int, float]
    tensors: int
    bytes: int
    batch: int
    context: int
    token_bytes: float
    state_bytes: float
    weights: float
    cache: float
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def step(self) -> float:
        """Return the bytes that a decode step reads."""
        return self.weights + self.cache


def audit(
    checkpoint: Checkpoint, *, context: int = 0, batch: int = 1, number: str = "auto"
) -> ModuleAudit:
    """
    Return the modules of *checkpoint*, and the bytes that a decode step reads of them.

    Args:
        context: Tokens before the new one, of each request.
        batch: Requests that a step writes a token for.
        number: Type of the KV cache, one of `SIZES`; ``auto`` is the checkpoint's own.

    Raises:
        checkpoint-invalid: The config lacks a needed field, or is impossible.
    """
    shape = architecture(checkpoint.config, checkpoint.quantization)
    listed = modules(checkpoint, shape.layers)
    counts, groups = expert_counts(listed, shape), {module.group for module in listed}
    tied = shape.tied if shape.tied is not None else "lm_head" not in groups
    tied = tied and "embeddings" in groups
    intentions = _intentions(listed, checkpoint)
    alike: dict[tuple[str, str, str, Intention], list[Module]] = defaultdict(list)
    for module in listed:
        key = module.group, module.short, module.scheme.name, intentions[module.name]
        alike[key].append(module)
    rows = [
        Row(
            group,
            short,
            scheme,
            members[0].scheme.quantised,
            len(members),
            sum(module.bytes for module in members),
            sum(_read(module, batch, counts, shape, tied=tied) for module in members),
            intention,
        )
        for (group, short, scheme, intention), members in alike.items()
    ]
    weights = sum(row.read for row in rows)
    if not weights:
        raise invalid("There is no weight in the checkpoint that writing a token would read.")
    kept, most = context_bytes(listed, shape, SIZES.get(number, 0)), max(counts.values(), default=0)
    taken = shape.experts_per_token
    return ModuleAudit(
        model=shape.model,
        method=quantisation.method(checkpoint.quantization),
        layers=shape.layers,
        experts=(most, taken, distinct_experts(most, taken, batch)) if most else (0, 0, 0.0),
        tensors=len(checkpoint.tensors),
        bytes=sum(row.bytes for row in rows),
        batch=batch,
        context=context,
        token_bytes=sum(kept.layers.values()),
        state_bytes=kept.state,
        weights=weights,
        cache=batch * kept.moved(shape, context),
        rows=tuple(sorted(rows, key=lambda row: (GROUPS.index(row.group), row.modules))),
        findings=tuple(_findings(listed, rows, checkpoint, counts, shape)),
        notes=(*kept.notes, *_notes(rows, tied)),
    )


def _read(
    module: Module, batch: int, counts: Mapping[int, int], shape: Architecture, *, tied: bool
) -> float:
    """Return the bytes that a step for *batch* tokens reads of *module*."""
    if module.group in APART or (module.group == "lm_head" and tied):
        return 0.0
    size = float(sum(part.bytes for name, part in module.parts.items() if name not in _UNREAD))
    if module.group == "embeddings" and (not tied or module.short.endswith("wpe")):
        # A row for each token; a table that is the output layer as well is read whole.
        rows = max(1, *(part.shape[0] for part in module.parts.values() if part.shape), 0)
        return batch * size / rows
    count = counts.get(module.layer or 0, 0) if module.group == "experts" else 0
    return size * distinct_experts(count, shape.experts_per_token, batch) / count if count else size


def _intentions(listed: Sequence[Module], checkpoint: Checkpoint) -> dict[str, Intention]:
    """Return the config's intention for each module; similar experts of a layer share one."""
    method = quantisation.method(checkpoint.quantization)
    linear = [module for module in listed if method and _is_linear(module)]
    asked = {_alike(module): module.name for module in reversed(linear)}
    names = sorted(set(asked.values()))
    ignored = quantisation.ignored(checkpoint.quantization, names) if names else set()
    intentions: dict[str, Intention] = dict.fromkeys((module.name for module in listed), "")
    for module in linear:
        outside = module.group in ("lm_head", "vision")
        left = module.group == "router" or (outside and method in quantisation.INSIDE_ONLY)
        rest: Intention = "left by the method" if left else "quantise"
        rest = "quantise" if module.scheme.quantised else rest
        intentions[module.name] = "ignore" if asked[_alike(module)] in ignored else rest
    return intentions


def _alike(module: Module) -> tuple[object, ...]:
    name = "" if module.expert is not None else module.name
    return module.layer, module.short, module.scheme.name, name


def _is_linear(module: Module) -> bool:
    """Return whether tokens are multiplied by it; norms, tables and convolutions do not count."""
    weight = module.parts.get("weight")
    if module.scheme.quantised:
        return True
    if weight is None or module.group in ("norms", "embeddings") or "conv" in module.short:
        return False
    # Gates of one number for each token are left alone by every method.
    stacked = module.group == "experts" and module.expert is None
    return len(weight.shape) == (3 if stacked else 2) and min(weight.shape) > 1


def _notes(rows: Sequence[Row], tied: bool) -> Iterator[str]:
    if tied:
        yield "the output layer is the embedding table, which each step reads whole"
    for group, verb in (*((group, "not read") for group in APART), ("other", "read whole")):
        if size := sum(row.bytes for row in rows if row.group == group):
            yield f"{group}: {size / 1e9:.2f} GB, counted as {verb}"


def _findings(
    listed: Sequence[Module],
    rows: Sequence[Row],
    checkpoint: Checkpoint,
    counts: Mapping[int, int],
    shape: Architecture,
) -> Iterator[Finding]:
    declared = bool(quantisation.method(checkpoint.quantization))
    for row in rows:
        wrong = {
            "unquantised-not-ignored": row.intention == "quantise" and not row.quantised,
            "quantised-though-ignored": row.intention == "ignore" and row.quantised,
            "quantisation-not-declared": row.quantised and not declared,
        }
        message = f"{row.count} × {row.modules}, {row.scheme}, {row.bytes / 1e9:.3g} GB"
        yield from (Finding(reference, message) for reference, holds in wrong.items() if holds)
    broken = Counter((one.scheme.wrong, one.short, one.scheme.name) for one in listed)
    for (reference, short, name), count in broken.items():
        if reference:
            yield Finding(reference, f"{count} × {short}, {name}")
    present = {module.layer for module in listed if module.group not in APART}
    if missing := set(range(shape.layers)) - present:
        message = f"{len(missing)} of {shape.layers} layers: {_few(missing)}"
        yield Finding("layers-missing", message)
    if differing := {count for count in counts.values() if shape.experts not in (0, count)}:
        yield Finding("experts-differ", f"layers have {_few(differing)} of {shape.experts}")
