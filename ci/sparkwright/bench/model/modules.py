"""
The module audit: what of a model is quantised and what is not, what a token reads of it, and where that disagrees with the model's config.

It is the question that explains a decode speed: each step reads every weight that it uses, and one unquantised projection in thirty layers
may weigh more than all experts that a token takes. Everything is computed from the checkpoint's headers and its config; what a server made
of them is another question (`sparkwright.bench.model.loaded`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from sparkwright.bench.errors import ModelError
from sparkwright.bench.model import config as modelconfig
from sparkwright.bench.model import cost as modulecost
from sparkwright.bench.model import names as modulenames
from sparkwright.bench.model import roofline, schemes
from sparkwright.bench.model.checkpoint import Checkpoint
from sparkwright.bench.model.config import SIZES, Architecture
from sparkwright.bench.model.cost import Module
from sparkwright.bench.model.names import APART, GROUPS
from sparkwright.bench.model.schemes import Told

#: What the quantisation config says of a row: nothing to be said of norms and tables; that the method itself leaves it alone.
Word = Literal["", "quantise", "ignore", "left by the method"]

#: Reference of a finding → what it means and what to do.
REASONS: Mapping[str, str] = {
    "unquantised-not-ignored": "The config says that it is quantised and it is not: a server reads all its bytes, or refuses to load it.",
    "quantised-though-ignored": "The config tells the server to load plain numbers where packed ones are stored. Do not serve it.",
    "quantisation-not-declared": "Weights are packed and no config says how; a server would load them as something else.",
    "scale-missing": "A packed weight has no scales, so nobody can tell its values. Do not serve it.",
    "scale-shape": "The scales do not belong to the weight beside them: its values would be wrong. Do not serve it.",
    "layers-missing": "The checkpoint lacks layers that the config counts.",
    "experts-differ": "The checkpoint holds another number of experts than the config says.",
}


class Row(msgspec.Struct, frozen=True):
    """
    Modules that are alike.

    Attributes:
        modules: Their name within a layer.
        dtypes: Types of their tensors, in the format's words.
        count: How many they are.
        bytes: What they take in the checkpoint.
        read: What one step reads of them for one token. *read_batch*: for a token of each request of the batch.
        told: What the quantisation config says of them.
    """

    group: str
    modules: str
    scheme: str
    quantised: bool
    dtypes: tuple[str, ...]
    count: int
    bytes: int
    read: float
    read_batch: float
    told: Word = ""


class Finding(msgspec.Struct, frozen=True):
    """Where the checkpoint disagrees with itself; *reference* is one of `REASONS`."""

    reference: str
    says: str


class Reading(msgspec.Struct, frozen=True):
    """
    Bytes that one decode step reads.

    Attributes:
        batch: Requests that it writes a token for. *context*: tokens that each has before it.
        weights: Of the model; shared by the requests. *cache*: what attention keeps, read for each, and states written back.
    """

    batch: int
    context: int
    weights: float
    cache: float

    @property
    def step(self) -> float:
        """All of it."""
        return self.weights + self.cache


class Audit(msgspec.Struct, frozen=True):
    """
    A model, audited.

    Attributes:
        method: What its quantisation config calls itself; empty without one.
        experts: Of a layer, as many as a token takes, and those that a batch is expected to read; zeros without.
        bytes: Of the checkpoint.
        kept: Bytes that each token of context takes in the cache where all of it is kept. *state*: bytes that do not grow with it.
        one: What a step for one request reads. *many*: for the batch that was asked for.
        notes: What was left out or taken for granted.
    """

    model: str
    method: str
    layers: int
    experts: tuple[int, int, float]
    tensors: int
    shards: int
    bytes: int
    kept: float
    state: float
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    one: Reading
    many: Reading
    notes: tuple[str, ...]


def audit(checkpoint: Checkpoint, *, context: int = 0, batch: int = 1, number: str = "auto") -> Audit:
    """
    Return what *checkpoint* holds and what a decode step reads of it.

    Args:
        context: Tokens that each request has before it.
        batch: Requests that a step writes a token for.
        number: Type of the numbers in the cache, one of `modelconfig.SIZES`; ``auto`` is what the checkpoint asks for.

    Raises:
        checkpoint-invalid: The config does not say what is needed, or cannot be.
    """
    shape = modelconfig.of(checkpoint.config, checkpoint.quantization)
    found = list(modulecost.modules(checkpoint, shape.layers))
    counts, told, tie = modulecost.experts(found, shape), Told(checkpoint.quantization), modulecost.tied(found, shape)
    reads = [
        {one.name.module: modulecost.read(one, tokens, tie=tie, counts=counts, taken=shape.taken) for one in found}
        for tokens in (1, batch)
    ]  # fmt: skip
    if not sum(reads[0].values()):
        raise ModelError("checkpoint-invalid", "There is no weight in the checkpoint that writing a token would read.")
    rows = _rows(found, _words(found, told), reads)
    keeping = modulecost.kept(found, shape, SIZES.get(number, shape.number))
    caches, most = modulecost.cache(shape, keeping, context), max(counts.values(), default=0)
    return Audit(
        model=shape.model, method=told.method, layers=shape.layers, tensors=len(checkpoint.tensors), shards=len(checkpoint.shards),
        experts=(most, shape.taken, roofline.distinct(most, shape.taken, batch)) if most else (0, 0, 0.0),
        bytes=sum(tensor.bytes for tensor in checkpoint.tensors.values()), kept=sum(keeping.layers.values()), state=keeping.state,
        rows=tuple(sorted(rows, key=lambda row: (GROUPS.index(row.group), row.modules, row.scheme))),
        findings=tuple(_findings(found, rows, told, counts, shape)),
        one=Reading(1, context, sum(reads[0].values()), caches), many=Reading(batch, context, sum(reads[1].values()), caches * batch),
        notes=(*keeping.notes, *_notes(rows, tie)),
    )  # fmt: skip


def _rows(found: Sequence[Module], words: Mapping[str, Word], reads: Sequence[Mapping[str, float]]) -> list[Row]:
    alike: dict[tuple[str, str, str, Word], list[Module]] = defaultdict(list)
    for module in found:
        alike[module.name.group, module.name.short, module.scheme.name, words[module.name.module]].append(module)
    rows = []
    for (group, short, scheme, word), members in alike.items():
        kinds = Counter(tensor.dtype for module in members for tensor in module.parts.values())
        rows.append(
            Row(
                group=group, modules=short, scheme=scheme, quantised=members[0].scheme.quantised, told=word, count=len(members),
                dtypes=tuple(sorted(kinds)), bytes=sum(tensor.bytes for module in members for tensor in module.parts.values()),
                read=sum(reads[0][module.name.module] for module in members),
                read_batch=sum(reads[1][module.name.module] for module in members),
            )
        )  # fmt: skip
    return rows


def _words(found: Sequence[Module], told: Told) -> dict[str, Word]:
    """Return what the config says of each module. Experts of a layer that are alike are asked about once."""
    linear = [module for module in found if told.method and _is_linear(module)]
    asked = {_asked(module): module.name.module for module in reversed(linear)}
    ignored = told.ignored(sorted(set(asked.values())))
    words: dict[str, Word] = dict.fromkeys((module.name.module for module in found), "")
    for module in linear:
        outside = module.name.group in ("lm_head", "vision") and told.method.startswith(schemes.INSIDE_ALONE)
        left = module.name.group == "router" or outside
        named = asked[_asked(module)] in ignored
        words[module.name.module] = "ignore" if named else "left by the method" if left and not module.scheme.quantised else "quantise"
    return words


def _asked(module: Module) -> tuple[int | None, str, str, str]:
    place = "" if module.name.expert is not None else module.name.module
    return module.name.layer, module.name.short, module.scheme.name, place


def _is_linear(module: Module) -> bool:
    """Is it a matrix that tokens are multiplied by? A convolution, a norm and a table of embeddings are not."""
    if module.scheme.quantised:
        return True
    weight = module.parts.get("weight")
    if weight is None or module.name.group in ("norms", "embeddings") or "conv" in module.name.short:
        return False
    # Gates of one number for each token are left alone by every method.
    return len(weight.shape) == (3 if module.name.group == "experts" and module.name.expert is None else 2) and min(weight.shape) > 1


def _notes(rows: Iterable[Row], tie: bool) -> Iterator[str]:
    groups: Counter[str] = Counter()
    for row in rows:
        groups[row.group] += row.bytes
    if tie:
        yield "the output layer is the table of embeddings, which is read whole for each step"
    yield from (f"{group}: {groups[group] / 1e9:.2f} GB that writing a token does not read" for group in APART if groups[group])
    if groups["other"]:
        yield f"other: {groups['other'] / 1e9:.2f} GB of names that are not known; counted as read whole"


def _findings(
    found: Sequence[Module], rows: Iterable[Row], told: Told, counts: Mapping[int, int], shape: Architecture
) -> Iterator[Finding]:
    for row in rows:
        says = f"{row.count} × {row.modules}, {row.scheme}, {row.bytes / 1e9:.3g} GB"
        if told.method and row.told == "quantise" and not row.quantised:
            yield Finding("unquantised-not-ignored", says)
        if row.told == "ignore" and row.quantised:
            yield Finding("quantised-though-ignored", says)
        if not told.method and row.quantised:
            yield Finding("quantisation-not-declared", says)
    wrong: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module in found:
        if module.scheme.wrong:
            wrong[module.scheme.wrong, module.name.short].append(module.name.module)
    for (reference, short), names in wrong.items():
        yield Finding(reference, f"{len(names)} × {short}, the first is {names[0][:200]}")
    if gaps := set(range(shape.layers)) - {one.name.layer for one in found if one.name.group not in APART}:
        yield Finding("layers-missing", f"{len(gaps)} of {shape.layers} layers: {modulenames.few(gaps)}")
    if differing := {layer: count for layer, count in counts.items() if shape.experts and count != shape.experts}:
        layer, count = min(differing.items())
        yield Finding("experts-differ", f"{len(differing)} layers; layer {layer} has {count} of {shape.experts}")
