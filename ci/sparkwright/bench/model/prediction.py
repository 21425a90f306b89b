"""
The speed of a model before it is served: the bytes of a decode step by the bandwidth of memory.

A step verifies the drafts of each request and its next token. It reads the cache of each request
and every weight once; but of a layer with experts only the experts that at least one token has. Say
that a router gives each token *k* of *E* experts, all alike likely and without regard to the other
tokens. One token then does not have an expert with probability 1 - k/E, so *tokens* of them read
``E (1 - (1 - k/E)^tokens)`` experts on average. The tokens of one text share more experts than
that, so it is the most; at least, the drafts of a request have the experts of its next token. Each
draft is one more pass through a layer that drafts and the output layer. With a share *a* of drafts
accepted, a step with *k* of them yields ``1 + a + … + a^k`` tokens (Leviathan et al. 2023,
arXiv:2211.17192, equation 1).
"""

import math
import operator
from collections.abc import Container, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace
from packaging.version import Version

from sparkwright.bench.model import modules
from sparkwright.bench.model.checkpoint import Checkpoint
from sparkwright.bench.recipes import preflight
from sparkwright.core.memory import CacheShape

#: 10^9 bytes a second that a GB10 reads of its nominal 273 (ds4#773, LIL#323, hasso5703, veloGB10).
GB10 = (231.0, 238.0)
#: The least share of the bandwidth that decoding reaches: figures that others published have 72 to
#: 80 % of 238 GB/s (ci/bench/published.yaml), and 85 to 90 % were reported (ds4#773).
SHARE = 0.7
#: The lowest and the highest share of drafts that were accepted (seed report 000).
ACCEPTANCE = (0.63, 0.89)
#: Numbers of requests at a time for which bytes and speed are shown.
REQUESTS = (1, 4, 16)
#: The most drafts for a step that are tried, and the tokens of a reduced draft vocabulary
#: (FR-Spec's largest gain).
MOST_DRAFTS, VOCABULARY = 7, 32768
#: The release of vLLM that has draft_lm_head_quantization, and a cache in NVFP4 on a GB10.
FLAGS_SINCE = "0.33"
#: The patch of ours with which drafts are chosen among a part of the vocabulary.
VOCABULARY_PATCH = "let-a-drafter-propose-from-a-reduced-vocabulary.patch"


class Serving(msgspec.Struct, frozen=True):
    """
    How a model is served.

    Attributes:
        requests: How many are served at a time.
        drafts: Tokens that its own layers draft for each step.
        context: Tokens of each request.
        cache: As in ``--kv-cache-dtype``.
        head: As in ``draft_lm_head_quantization``; empty for the model's own head.
        vocabulary: Tokens that drafts are chosen among; 0 for all.
        alike: Whether the drafts of a request take the same experts as its token.
    """

    requests: int = 1
    drafts: int = 0
    context: int = 4096
    cache: str = "auto"
    head: str = ""
    vocabulary: int = 0
    alike: bool = False


class Step(msgspec.Struct, frozen=True):
    """Bytes that a decode step reads: of weights, of the cache, and for its drafts."""

    weights: float
    cache: float
    drafts: float

    @property
    def total(self) -> float:
        return self.weights + self.cache + self.drafts


class Rate(msgspec.Struct, frozen=True):
    """Tokens per second of each request, at *requests* at a time: an interval, and its *step*."""

    requests: int
    low: float
    high: float
    step: Step


class Lever(msgspec.Struct, frozen=True):
    """
    A change by which a token costs fewer bytes.

    Attributes:
        saved: Bytes a step of one request reads less; negative if it reads more for more tokens.
        gain: Part by which tokens per second grow.
        loads: Whether, and how, the stack's vLLM loads it.
    """

    change: str
    saved: float
    gain: float
    loads: str


class StoredModel(msgspec.Struct, frozen=True):
    """
    A model.

    Attributes:
        config: ``config.json`` of its language model.
        savings: Bytes that FP8 saves, by the names of the rows of the audit that it may have.
    """

    audit: modules.ModuleAudit
    config: dict[str, Any]
    savings: dict[str, int] = {}

    @property
    def draft_layers(self) -> int:
        """Layers that draft, which take turns."""
        if not self.audit.drafts:
            return 0
        names = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
        stated = next(filter(None, map(self.config.get, names)), 1)
        return min(max(1, stated), modules.LARGEST_DEPTH) if type(stated) is int else 1

    def shape(self, serving: Serving) -> CacheShape:
        return CacheShape.from_config(self.config, serving.cache, drafts=int(serving.drafts > 0))

    def row_read(self, row: modules.ModuleRow, serving: Serving) -> float:
        """Return the bytes of the modules *row* that a step reads."""
        if row.group == "vision":
            return 0.0
        drafting = row.group == "mtp"
        tokens = serving.requests * (1 if drafting else serving.drafts + 1)
        count = row.read
        if row.group == "experts" or ".experts." in row.modules:
            every, taken = self.audit.experts
            apart = serving.requests if serving.alike else tokens
            count = row.bytes * (1 - (1 - taken / max(1, every)) ** apart)
        elif drafting:
            count = 0.0 if "embed" in row.modules else float(row.bytes)
        elif row.group == "embeddings":
            count = min(row.bytes, row.read * tokens)
        return count * serving.drafts / max(1, self.draft_layers) if drafting else count

    def step(self, serving: Serving) -> Step:
        """Return what a step reads."""
        weights = drafting = 0.0
        own_head = False
        for row in self.audit.rows:
            if row.group == "mtp":
                drafting += self.row_read(row, serving)
                own_head |= row.modules.endswith("head")
            else:
                weights += self.row_read(row, serving)
        shape = self.shape(serving)
        draft = serving.requests * shape.read(serving.context, drafts=True)
        draft += 0.0 if own_head else self.draft_head(serving)
        cache = serving.requests * shape.read(serving.context)
        return Step(weights, cache, drafting + serving.drafts * draft)

    def draft_head(self, serving: Serving) -> float:
        """Return the bytes of the output layer that a draft reads."""
        groups = {row.group: row for row in self.audit.rows}
        row = groups.get("lm_head") or groups.get("embeddings")
        if row is None:
            return 0.0
        part = 1.0 if row.quantised else modules.DRAFT_HEADS.get(serving.head, 1.0)
        vocabulary = self.config.get("vocab_size")
        if serving.vocabulary and type(vocabulary) is int:
            part *= min(1.0, serving.vocabulary / max(1, vocabulary))
        return row.bytes * part

    def rate(
        self, serving: Serving, bandwidth: tuple[float, float], acceptance: tuple[float, float]
    ) -> Rate:
        """
        Return the speed: from `SHARE` of the lower *bandwidth*, in 10^9 bytes a second, the lower
        *acceptance* and the most experts, to the whole of the higher ones and the fewest.
        """
        step = self.step(serving)
        least = self.step(replace(serving, alike=True)).total
        tokens = [tokens_of_step(share, serving.drafts) for share in acceptance]
        low = SHARE * bandwidth[0] * 1e9 / step.total * tokens[0]
        return Rate(serving.requests, low, bandwidth[1] * 1e9 / least * tokens[1], step)


def tokens_of_step(acceptance: float, drafts: int) -> float:
    """Return the tokens that a step with *drafts* yields."""
    return sum(acceptance**index for index in range(drafts + 1))


def read(checkpoint: Checkpoint) -> StoredModel:
    """
    Return the model of *checkpoint*.

    Raises:
        checkpoint-invalid, mixture-joined, mixture-undeclared: As `modules.audit`.
    """
    # This loads NumPy.
    from sparkwright.bench.model.slim import unfit

    listed, config = modules.listed_modules(checkpoint), modules.text_config(checkpoint.config)
    savings: dict[str, int] = {}
    for module in listed:
        if module.group in ("layers", "lm_head") and not unfit(module, config):
            # FP8 saves half of the bytes of BF16, less a scale of four bytes for each row.
            half = module.parts["weight"].bytes // 2 - 4 * module.rows
            savings[module.short] = savings.get(module.short, 0) + half
    return StoredModel(modules.audit(checkpoint, listed), config, savings)


def levers(
    model: StoredModel,
    serving: Serving,
    acceptance: tuple[float, float],
    vllm: str,
    patches: Container[str],
) -> list[Lever]:
    """
    Return what makes one request faster, the largest gain first, at the mean of *acceptance*.

    Args:
        vllm: Version of the stack's vLLM.
        patches: Those that it carries.
    """
    serving = replace(serving, requests=1)
    shares = math.fsum(acceptance) / 2
    before = model.step(serving).total
    results = list[Lever]()

    def add(change: str, changed: StoredModel, served: Serving, loads: str) -> None:
        after = changed.step(served).total
        more = tokens_of_step(shares, served.drafts) / tokens_of_step(shares, serving.drafts)
        if (gain := more * before / after - 1) > 0.0005:
            results.append(Lever(change, before - after, gain, loads))

    for group, change in (("layers", "side layers in FP8"), ("lm_head", "output layer in FP8")):
        loads = _mixed(model.config) or f"yes: `model slim --layers {group}`"
        add(change, _in_fp8(model, group), serving, loads)
    older = Version(vllm) < Version(FLAGS_SINCE)
    if serving.drafts:
        loads = f"no: since vLLM {FLAGS_SINCE}" if older else "yes: draft_lm_head_quantization"
        for head in modules.DRAFT_HEADS:
            add(f"draft head in {head.upper()}", model, replace(serving, head=head), loads)
        loads = "yes: draft_vocabulary" if VOCABULARY_PATCH in patches else "no: without our patch"
        reduced = replace(serving, vocabulary=VOCABULARY)
        add(f"draft vocabulary of {VOCABULARY:,}", model, reduced, loads)
    add("cache in FP8", model, replace(serving, cache="fp8"), "yes: --kv-cache-dtype=fp8")
    trap = next(preflight.find_traps(["--kv-cache-dtype=nvfp4"], vllm, model.audit), None)
    nvfp4 = f"no: {trap.reference}" if trap else "yes: --kv-cache-dtype=nvfp4"
    if older or model.config.get("kv_lora_rank"):
        nvfp4 = f"no: since vLLM {FLAGS_SINCE}" if older else "unknown: with latent attention"
    add("cache in NVFP4", model, replace(serving, cache="nvfp4"), nvfp4)
    if model.draft_layers:
        choices = [replace(serving, drafts=count) for count in range(MOST_DRAFTS + 1)]
        best = max(
            choices, key=lambda each: tokens_of_step(shares, each.drafts) / model.step(each).total
        )
        change = f"{best.drafts} drafts instead of {serving.drafts}"
        add(change, model, best, "yes: num_speculative_tokens")
    return sorted(results, key=operator.attrgetter("gain"), reverse=True)


def _mixed(config: Mapping[str, Any]) -> str:
    """Return why vLLM cannot load layers in FP8 beside those of *config*; empty if it can."""
    document = config.get("quantization_config")
    method = document.get("quant_method") if isinstance(document, dict) else "compressed-tensors"
    if method == "compressed-tensors" or str(method).startswith("modelopt"):
        return ""
    return f"no: {method!s:.30} has one format for all"


def _in_fp8(model: StoredModel, group: str) -> StoredModel:
    """Return *model* with those matrices of *group* in FP8 that `model slim` converts."""
    rows = []
    for row in model.audit.rows:
        less = 0
        if (row.group, row.scheme) == (group, "BF16"):
            less = model.savings.get(row.modules, 0)
        read = row.read * (1 - less / max(1, row.bytes))
        rows.append(replace(row, bytes=row.bytes - less, read=read))
    return replace(model, audit=replace(model.audit, rows=tuple(rows)))
