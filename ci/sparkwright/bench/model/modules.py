"""
The modules of a checkpoint: how each is stored, the bytes of it that a decode step reads, and
mixtures of formats.

The audit explains a decode speed: each step reads every weight that it uses once, however many
requests share it, so the bandwidth of the memory by these bytes is more than the steps per second.
(A step reads the context of each request as well, which is not counted.) One unquantised projection
in thirty layers may weigh more than all experts of a token. The names, types and shapes of the
tensors are facts; ``config.json`` is asked only for what they do not tell: how many layers and
experts a token takes, and whether tables are shared.

vLLM 0.33.0 would load some mixtures of formats wrongly. It joins some parts of a layer into one
matrix product, all experts of a layer into another, and chooses one format for each by
``quantization_config``. A part in BF16 is copied into an FP8 weight without a message, and a scale
that is not in the checkpoint keeps its initial value. So each joined layer must be stored in one
format, and ModelOpt's config must choose that one. What patterns of compressed-tensors choose is
not evaluated, because a hostile one would not end.
"""

import bisect
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from sparkwright.bench.model.checkpoint import Checkpoint, ModelError, Tensor, invalid

#: The names of tensors that are parameters of a module; any other tensor is a module of its own.
_PARAMETER = re.compile(
    r"(.+)\.(weight(?:_scale(?:_2|_inv)?|_global_scale|_packed|_shape|_zero_point|_g_idx)?|bias"
    r"|input_(?:global_)?scale|scale|qweight|qzeros|scales|g_idx|[qkv]_scale"
    r"|e_score_correction_bias)"
)
#: Experts in one tensor have their parameter behind an underscore, or none.
_STACKED = re.compile(
    r"(.+\.experts\.\w+?)_(blocks|scales|bias|weight_scale(?:_2|_inv)?|input_scale)"
)
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,6})\.")
_EXPERT = re.compile(r"\.experts\.(\d{1,6})\.")

#: The first pattern that matches a name decides its group; all others are ``layers``.
_GROUPS = (
    ("mtp", re.compile(r"^(model\.)?(mtp|nextn|eagle|draft)\w*\.")),
    ("vision", re.compile(r"(^|\.)(visual|(vision|audio|multi_modal|mm_|image_|sound|speech)\w*"
     r"|embed_(vision|audio))(\.|$)")),
    ("lm_head", re.compile(r"(^|\.)(lm_head|embed_out)$|^(output|head)$")),
    ("embeddings", re.compile(r"^embed$|(^|\.)(embed_tokens\w*|wte|word_embeddings|tok_embeddings"
     r"|embeddings)$")),
    ("experts", re.compile(r"\.experts(\.|$)")),
)  # fmt: skip
#: Layers of the deepest model that is believed.
LARGEST_DEPTH = 2048

#: Groups that writing a token does not read: layers that draft, and parts that see or hear.
APART = ("mtp", "vision")

#: How vLLM quantises the lm_head that drafts share (draft_lm_head_quantization) → its part of the
#: bytes in bfloat16: a byte, or half of one and an 8-bit scale for 16 weights.
DRAFT_HEADS = {"fp8": 0.5, "nvfp4": 0.28125}
#: The first word of the scheme of a quantised module.
_QUANTISED = ("NVFP4", "MXFP", "FP8", "INT", "packed")
_PLAIN = ("F64", "F32", "F16", "BF16", "I64", "BOOL")
_FP8 = ("F8_E4M3", "F8_E5M2")
_WEIGHTS = ("qweight", "weight_packed", "blocks", "weight")
_SCALES = ("scales", "weight_scale", "weight_scale_inv", "scale")
#: Format, types of its weight, and types of its scales.
_SCALED = (
    ("NVFP4", ("U8",), ("F8_E4M3",)),
    ("MXFP4", ("U8", "I8"), ("U8", "F8_E8M0")),
    ("MXFP8", _FP8, ("U8", "F8_E8M0")),
)


class Bandwidth(msgspec.Struct, frozen=True):
    """
    How fast memory is read.

    Attributes:
        gigabytes: 10^9 bytes per second, as measured.
        device: The device that was measured.
    """

    gigabytes: float
    device: str = ""


#: Kind and key of the record of the bandwidth that was measured on this machine.
BANDWIDTH = "bandwidth", "this-machine"


class Module(msgspec.Struct, frozen=True, gc=False):
    """
    A module of a checkpoint.

    Attributes:
        name: In the checkpoint.
        expert: Its number among its layer's experts; None for others.
        short: Its name within its layer, an expert's number as ``*``.
        group: ``layers``, or the first name of `_GROUPS`.
        parts: Its tensors by parameter.
        scheme: How its weight is stored, such as ``NVFP4 (modelopt)`` or ``BF16``; ``packed`` if
            its tensors do not show it.
    """

    name: str
    expert: int | None
    short: str
    group: str
    parts: dict[str, Tensor]
    scheme: str

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.parts.values())

    @property
    def quantised(self) -> bool:
        return self.scheme.startswith(_QUANTISED)

    @property
    def rows(self) -> int:
        """The largest first dimension of its tensors."""
        return max((tensor.shape[0] for tensor in self.parts.values() if tensor.shape), default=0)


class ModuleRow(msgspec.Struct, frozen=True):
    """
    Modules that are alike.

    Attributes:
        modules: Their name within a layer.
        count: How many they are.
        bytes: Their size in the checkpoint.
        read: The bytes that a step reads of them.
    """

    group: str
    modules: str
    scheme: str
    quantised: bool
    count: int
    bytes: int
    read: float


class ModuleAudit(msgspec.Struct, frozen=True):
    """
    A model, audited.

    Attributes:
        model: The family of its architecture, ``model_type`` of its config.
        scheme: The format of the largest quantised modules; empty if none are quantised.
        experts: How many a layer has, and how many of them a token takes.
        bytes: Size of the checkpoint.
        drafts: Whether vLLM can draft with it (MTP).
        weights: Bytes of the weights that a step reads.
        head_size: Of an attention head; 0 if the config does not state it.
    """

    model: str
    scheme: str
    layers: int
    experts: tuple[int, int]
    bytes: int
    drafts: bool
    weights: float
    rows: tuple[ModuleRow, ...]
    head_size: int = 0

    def loaded(self, drafting: Mapping[str, Any]) -> float:
        """
        Return the bytes that vLLM loads with the settings *drafting*: layers that draft only if
        they are used, and the copy of the lm_head for drafts that do not share the model's. A
        reduced vocabulary counts as a whole one, of which it has a part.
        """
        quantization = str(drafting.get("draft_lm_head_quantization", ""))
        copied = DRAFT_HEADS.get(quantization, 1.0 if drafting.get("draft_vocabulary") else 0.0)
        sizes = dict.fromkeys(("mtp", "lm_head", "embeddings"), 0)
        for row in self.rows:
            sizes[row.group] = sizes.get(row.group, 0) + row.bytes
        unused = 0 if "mtp" in str(drafting.get("method")) else sizes["mtp"]
        return self.bytes - unused + copied * (sizes["lm_head"] or sizes["embeddings"])


def audit(checkpoint: Checkpoint, listed: Sequence[Module] = ()) -> ModuleAudit:
    """
    Return the modules of *checkpoint*, *listed* by `listed_modules` if they were, and the bytes
    that a decode step of one request reads.

    Raises:
        checkpoint-invalid: The config lacks a needed field, or is impossible.
        mixture-joined, mixture-undeclared: vLLM would load a layer wrongly.
    """
    config = text_config(checkpoint.config)
    layers = _depth(config)
    listed = listed or listed_modules(checkpoint)
    check_mixture(config, listed)
    every, taken = _experts(listed, config)
    alike: dict[tuple[str, str, str], list[Module]] = defaultdict(list)
    longest: dict[str, int] = {}
    for module in listed:
        alike[module.group, module.short, module.scheme].append(module)
        longest[module.group] = max(module.rows, longest.get(module.group, 1))
    shared = config.get("tie_word_embeddings", "lm_head" not in longest) is True
    # The part that a step reads of a group, if that is not all of it.
    parts = {**dict.fromkeys(APART, 0.0), "experts": taken / max(1, every)}
    if shared and "embeddings" in longest:
        parts["lm_head"] = 0.0
    else:  # an embedding: a row for each token
        parts["embeddings"] = 1 / longest.get("embeddings", 1)
    rows = []
    for (group, short, scheme), members in sorted(alike.items()):
        stored = sum(module.bytes for module in members)
        read = stored * parts.get(group, 1.0)
        rows.append(
            ModuleRow(group, short, scheme, members[0].quantised, len(members), stored, read)
        )
    if not (weights := sum(row.read for row in rows)):
        raise invalid("There is no weight in the checkpoint that writing a token would read.")
    packed = [row for row in rows if row.quantised and row.group not in APART]
    # vLLM 0.20 to 0.33 drafts with this family only if the config says so
    # (vllm/config/speculative.py), and quantizers drop the field.
    family, stated = map(checkpoint.config.get, ("model_type", "num_nextn_predict_layers"))
    drafts = "mtp" in longest and (family != "nemotron_h" or stated)
    return ModuleAudit(
        model=str(checkpoint.config.get("model_type", "unknown"))[:60],
        scheme=max(packed, key=lambda row: row.bytes).scheme if packed else "",
        layers=layers,
        experts=(every, taken),
        bytes=sum(row.bytes for row in rows),
        drafts=bool(drafts),
        weights=weights,
        rows=tuple(rows),
        head_size=head_size(config),
    )


def _depth(config: Mapping[str, Any]) -> int:
    """
    Return how many layers the model has, without those that draft.

    Raises:
        checkpoint-invalid: The config does not state it.
    """
    layers = number(config, "num_hidden_layers", "n_layer", "num_layers", most=LARGEST_DEPTH)
    # Nemotron-H states its layers by kind alone, as a list or, before, as a letter each.
    kinds = config.get("layers_block_type") or config.get("hybrid_override_pattern")
    if not layers and isinstance(kinds, (list, str)) and len(kinds) <= LARGEST_DEPTH:
        layers = len(kinds)
    if not layers:
        raise invalid("config.json does not state num_hidden_layers.")
    return layers


def listed_modules(checkpoint: Checkpoint) -> list[Module]:
    """
    Return the modules of *checkpoint*; layers beyond the model's own are of those that draft.

    Raises:
        checkpoint-invalid: As `audit`.
    """
    config = text_config(checkpoint.config)
    layers = _depth(config)
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in checkpoint.tensors.items():
        match = _PARAMETER.fullmatch(name) or _STACKED.fullmatch(name)
        parts[match[1] if match else name][match[2] if match else "weight"] = tensor
    listed = []
    for name, tensors in parts.items():
        layer, expert = _LAYER.search(name), _EXPERT.search(name)
        short = _EXPERT.sub(".experts.*.", "." + (name[layer.end() :] if layer else name))[1:]
        group = next((group for group, rule in _GROUPS if rule.search(name)), "layers")
        if layer and int(layer[1]) >= layers and group not in APART:
            group = "mtp"
        index = int(expert[1]) if expert else None
        listed.append(Module(name, index, short, group, tensors, _scheme(tensors, method)))
    return listed


def _scheme(parts: Mapping[str, Tensor], method: object) -> str:
    """
    Return how the module with the tensors *parts*, by parameter, is stored.

    The formats are those of the recipes: NVFP4 and MXFP4 of ModelOpt, compressed-tensors and
    gpt-oss, FP8, and packed integers of a *method* (compressed-tensors, AWQ, GPTQ).
    """
    weight = next(filter(None, map(parts.get, _WEIGHTS)), None)
    scale = next(filter(None, map(parts.get, _SCALES)), None)
    if scale is None and (weight is None or weight.dtype in _PLAIN):
        return "/".join(sorted({part.dtype for part in parts.values()}))
    if scale is None or weight is None:
        return "packed"
    if "blocks" in parts:  # gpt-oss
        return "MXFP4"
    if "scale" in parts and weight.dtype in _FP8:  # DeepSeek-V4: a scale for 128 x 128 numbers
        return "FP8"
    if weight.dtype == "I32":
        return f"INT ({str(method or 'unknown').lower()[:30]})"
    maker = "compressed-tensors" if "weight_packed" in parts else "modelopt"
    for name, weights, scales in _SCALED:
        if weight.dtype in weights and scale.dtype in scales:
            if name == "NVFP4" and not parts.keys() & {"input_scale", "input_global_scale"}:
                maker += ", W4A16"
            return f"{name} ({maker})"
    return {"I8": "INT8", **dict.fromkeys(_FP8, "FP8")}.get(weight.dtype, "packed")


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return *config*; for a model that also sees images, the config of its language model."""
    parts = map(config.get, ("text_config", "llm_config", "language_config"))
    return {**config, **next((part for part in parts if isinstance(part, dict)), {})}


def head_size(config: Mapping[str, Any]) -> int:
    """Return the size of an attention head by *config*; 0 if that does not state it."""
    size, width, heads = map(config.get, ("head_dim", "hidden_size", "num_attention_heads"))
    if not isinstance(size, int) and isinstance(width, int) and isinstance(heads, int) and heads:
        return width // heads
    return size if isinstance(size, int) else 0


def number(config: Mapping[str, Any], *names: str, most: int = 1 << 32) -> int:
    """
    Return the first of the fields *names* that has a value; 0 for none.

    Raises:
        checkpoint-invalid: It is no whole number from 0 to *most*.
    """
    value = next((config[name] for name in names if config.get(name) is not None), 0)
    if type(value) is not int or not 0 <= value <= most:
        raise invalid(f"config.json states {value!r:.60} as {names[0]}, not 0 to {most:,}.")
    return value


def _experts(listed: Sequence[Module], config: Mapping[str, Any]) -> tuple[int, int]:
    """
    Return how many routed experts a layer has, and how many of them a token takes.

    Raises:
        checkpoint-invalid: The config does not state the latter.
    """
    experts = max(
        (
            module.rows if module.expert is None else module.expert + 1
            for module in listed
            if module.group == "experts"
        ),
        default=0,
    )
    taken = number(
        config, "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k",
        "moe_topk", "top_k_experts",
    )  # fmt: skip
    if experts and not 0 < taken <= experts:
        raise invalid(
            f"By config.json, a token takes {taken or 'an unknown number'} of {experts} experts."
        )
    return experts, taken


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
        formats: How they are stored, each with a sentence about the first.
        parts: Their names, without the beginning; none of experts.
        static: Whether any of them has a stored scale for its input.
    """

    formats: dict[str, str] = {}
    parts: list[str] = []
    static: bool = False


def joined_layer(name: str) -> str:
    """Return the name of the layer of which vLLM makes the part *name* of no expert a part."""
    parent, dot, own = name.rpartition(".")
    return parent + dot + _JOINED.get(own, own)


def check_mixture(config: Mapping[str, Any], listed: Sequence[Module]) -> None:
    """
    Check that vLLM loads the modules *listed* as they are stored.

    Raises:
        mixture-joined: The parts of a joined layer are stored in different formats.
        mixture-undeclared: The config declares another format than a layer is stored in.
        checkpoint-invalid: The config declares formats in an impossible form.
    """
    layers: dict[str, _JoinedLayer] = defaultdict(_JoinedLayer)
    for module in listed:
        # Vision towers are never quantised, tables have rules of each model, norms are no matrices.
        table = "embed" in module.name or module.group == "vision"
        if table or all(len(part.shape) < 2 for part in module.parts.values()):
            continue
        name = _ROOT.sub("", module.name)
        experts = _EXPERTS.match(name)
        layer = layers[experts[1] if experts else joined_layer(name)]
        form = _format(module)
        layer.formats.setdefault(form, f"{module.name:.100} is {form}")
        layer.static |= "input_scale" in module.parts
        layer.parts += [] if experts else [name]
    mixed = ["; ".join(each.formats.values()) for each in layers.values() if len(each.formats) > 1]
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
    #: Layer → its algorithm, and name above layers → the algorithm of the first one below it.
    algorithms: dict[str, str] = {}
    first_below: dict[str, str] = {}
    for key, entry in (declared.quantized_layers or {}).items():
        name = _ROOT.sub("", key)
        algorithms[name] = str(entry.get("quant_algo")).upper()
        for parent in itertools.accumulate(name.split(".", _DEPTH)[:-1], "{}.{}".format):
            first_below.setdefault(parent, algorithms[name])
    #: Sorted; a name that begins with another of the list is left out.
    excluded: list[str] = []
    patterns = (*(declared.ignore or ()), *(declared.exclude_modules or ()))
    for name in sorted(_ROOT.sub("", pattern.rstrip("*").rstrip(".")) for pattern in patterns):
        if not excluded or not name.startswith(excluded[-1]):
            excluded.append(name)
    for joined, layer in layers.items():
        form, sentence = next(iter(layer.formats.items()))
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
            yield f"{sentence}, declared as {' and '.join(sorted(choices)) or 'nothing'}"
        elif stored and choices == {"FP8"} and not layer.static:
            yield f"{sentence} and has no input_scale, which FP8 needs"


def _is_excluded(joined: str, layer: _JoinedLayer, excluded: Sequence[str]) -> bool:
    """Return whether vLLM leaves *layer* plain; a name excludes all that begin with it."""
    for name in (joined, *layer.parts):
        index = bisect.bisect(excluded, name)
        if index and name.startswith(excluded[index - 1]):
            return True
    # If one expert of a layer is excluded, vLLM excludes all of them.
    return not layer.parts and index < len(excluded) and excluded[index].startswith(name)
