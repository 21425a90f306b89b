"""What a decode step reads of a model: of each module, and of what attention and linear attention keep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from sparkwright.bench.errors import ModelError
from sparkwright.bench.model import names as modulenames
from sparkwright.bench.model import roofline, schemes
from sparkwright.bench.model.checkpoint import Checkpoint, Tensor
from sparkwright.bench.model.config import Architecture
from sparkwright.bench.model.names import APART, Name
from sparkwright.bench.model.schemes import Scheme

#: Parameters that a server drops when it loads the model.
_UNREAD = ("weight_shape", "g_idx", "weight_g_idx")
#: Tables that may be the output layer as well.
_TABLES = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embeddings")


class Module(msgspec.Struct, frozen=True, gc=False):
    """A module of a checkpoint: its tensors by parameter, and how its weight is stored."""

    name: Name
    parts: dict[str, Tensor]
    scheme: Scheme


class Kept(msgspec.Struct, frozen=True):
    """
    What a server keeps of a request's context.

    Attributes:
        layers: Bytes of a token, by layer with attention.
        state: Bytes of all layers with a state of fixed size.
        notes: What is not known.
    """

    layers: dict[int, float]
    state: float
    notes: tuple[str, ...]


def modules(checkpoint: Checkpoint, layers: int) -> Iterator[Module]:
    """Return the modules of a model of so many decoder *layers*."""
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    names: dict[str, Name] = {}
    for tensor in checkpoint.tensors.values():
        name = modulenames.of(tensor.name, layers)
        parts[name.module][name.parameter] = tensor
        names.setdefault(name.module, name)
    for module, found in parts.items():
        yield Module(names[module], found, schemes.of(found, checkpoint.quantization))


def experts(found: Iterable[Module], shape: Architecture) -> dict[int, int]:
    """
    Return how many routed experts each layer has in the checkpoint.

    Raises:
        checkpoint-invalid: The config does not say how many of them a token takes.
    """
    numbered: dict[int, set[int]] = defaultdict(set)
    stacked: dict[int, int] = {}
    for module in found:
        if module.name.group != "experts" or module.name.layer is None:
            continue
        if module.name.expert is not None:
            numbered[module.name.layer].add(module.name.expert)
        elif sizes := [tensor.shape[0] for tensor in module.parts.values() if len(tensor.shape) > 1]:
            stacked[module.name.layer] = max(sizes)
    counts = {layer: len(numbered.get(layer, ())) or stacked.get(layer, 0) for layer in {*numbered, *stacked}}
    if counts and not 0 < shape.taken <= min(counts.values()):
        says = f"a token takes {shape.taken or 'an unknown number'} of {min(counts.values())} experts"
        raise ModelError(
            "checkpoint-invalid", f"By config.json, {says}.", todo="config.json must say num_experts_per_tok, or what its family calls it."
        )
    return counts


def tied(found: Iterable[Module], shape: Architecture) -> bool:
    """Is the output layer the table of embeddings? Where the config says nothing, a checkpoint without an output layer says so."""
    groups = {module.name.group for module in found}
    return "embeddings" in groups and (shape.tied if shape.tied is not None else "lm_head" not in groups)


def read(module: Module, batch: int, *, tie: bool, counts: Mapping[int, int], taken: int) -> float:
    """
    Return the bytes that a step for *batch* tokens reads of *module*.

    Args:
        tie: The table of embeddings is the output layer.
        counts: Experts of each layer. *taken*: how many of them a token takes.
    """
    name = module.name
    if name.group in APART or (name.group == "lm_head" and tie):
        return 0.0
    size = float(sum(tensor.bytes for parameter, tensor in module.parts.items() if parameter not in _UNREAD))
    if name.group == "embeddings" and not (tie and name.short.rpartition(".")[2] in _TABLES):
        # A row for each token; the table as an output layer is read whole.
        return batch * size / max(1, *(tensor.shape[0] for tensor in module.parts.values() if tensor.shape))
    if name.group == "experts" and name.layer is not None and counts.get(name.layer):
        return size * roofline.distinct(counts[name.layer], taken, batch) / counts[name.layer]
    return size


def kept(found: Iterable[Module], shape: Architecture, number: int) -> Kept:
    """
    Return what is kept of the context, in numbers of *number* bytes.

    The rows of the key and value projections are facts; the config's heads are taken where there are none.
    """
    keys, values = _outputs(found, "attention k"), _outputs(found, "attention v")
    # Without a value projection, values are the keys.
    rows = {} if shape.latent else {layer: wide + values.get(layer, wide) for layer, wide in keys.items()}
    layers = [layer for layer, kind in enumerate(shape.kinds) if kind in ("full", "window")]
    sizes = {layer: float(number * rows.get(layer, shape.kept)) for layer in layers}
    states, notes = sum(kind == "state" for kind in shape.kinds), []
    if differing := [layer for layer in layers if rows.get(layer, shape.kept) != shape.kept]:
        notes.append(f"keys and values of layers {modulenames.few(differing)} are as wide as their weights, not as config.json says")
    if lost := [layer for layer in layers if not sizes[layer]]:
        notes.append(f"what attention keeps in layers {modulenames.few(lost)} is not known, and not counted")
    if states and not shape.state:
        notes.append(f"the states of {states} layers without attention are not known, and not counted")
    return Kept(sizes, float(states * shape.state), tuple(notes))


def _outputs(found: Iterable[Module], group: str) -> dict[int, int]:
    """Return how many numbers the projections of *group* give, by layer."""
    outputs: dict[int, int] = {}
    for module in found:
        if module.name.group == group and module.name.layer is not None:
            # A column of scales is a row of the weight, which AWQ and GPTQ store the other way round.
            turned = module.parts.get("scales") if "qweight" in module.parts else None
            weight = module.parts.get("weight") or module.parts.get("weight_packed")
            if turned is not None and turned.shape:
                outputs[module.name.layer] = turned.shape[-1]
            elif weight is not None and len(weight.shape) == 2:
                outputs[module.name.layer] = weight.shape[0]
    return outputs


def cache(shape: Architecture, keeping: Kept, context: int) -> float:
    """Return the bytes that a step moves for a request with *context* tokens beside the weights; a state is read and written back."""
    tokens = {"full": context, "window": min(context, shape.window) if shape.window else context}
    return sum(tokens[shape.kinds[layer]] * size for layer, size in keeping.layers.items()) + 2 * keeping.state
