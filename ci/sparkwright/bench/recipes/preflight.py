"""
Preflight of a server, before it is started: its arguments, its memory, its checkpoint, and known
traps, with which it would start and serve wrongly, or end late.

A recipe, a plain model and a container are judged by the same rules. Traps are reviewed records
(``ci/traps.yaml``) whose conditions are decided by facts: the arguments of ``vllm serve``, the
release, and what the files of the model state.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from sparkwright.bench.model import modules
from sparkwright.bench.model.checkpoint import read
from sparkwright.bench.recipes.recipe import UNRESOLVED, Recipe, RecipeError
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.records import Reason
from sparkwright.bench.server import flags
from sparkwright.core import config, memory, strict_yaml

#: The flag that sets the bytes of the KV cache.
CACHE = "--kv-cache-memory-bytes"
#: Share by which a checkpoint may differ from the plan before it is another one; some plans are
#: estimates.
OTHER_MODEL = 0.3
#: Formats of weights by the names that people give them, where the two differ.
FORMATS = {"AWQ": "INT", "none": ""}

REASONS: Mapping[str, str] = {
    "cache-unpinned": "The server would not start.",
    "memory-short": "It needs more than the machine has, and a Spark without memory stops "
    "answering.",
    "memory-held": "Running programs hold memory that it needs.",
    "memory-utilization": (
        "With --gpu-memory-utilization, vLLM uses memory that must stay "
        "free, or needs more at its start than is free."
    ),
    "cache-short": (
        "The cache does not hold one request of the longest length, so the server does not start."
    ),
    "checkpoint-other": (
        "The checkpoint on disk has another architecture, format or size "
        "than the recipe's model, so no result would count for the recipe. "
        "Name the recipe's checkpoint."
    ),
    "cell-too-long": "The cell's prompt and answer are longer than the server takes. Raise "
    "max_model_len, or measure with something else.",
    "cell-too-wide": "The cell asks for more requests at a time than the server takes. Raise "
    "max_num_seqs, or measure with something else.",
}


def check(
    recipe: Recipe,
    cells: Sequence[WorkloadCell],
    model: Path,
    machine: memory.MachineMemory | None = None,
    *,
    now: bool = False,
) -> None:
    """
    Check that *recipe* can be served here, and measured with *cells*.

    Args:
        machine: As of `findings`.
        model: Folder of the checkpoint; not read for a recipe that takes any.
        now: Whether it is started now, and not some time when no other program runs here.

    Raises:
        recipe-unfit: The recipe is wrong, or the machine or the checkpoint is not as it plans.
        model-missing, checkpoint-invalid: As `checkpoint.read`.
    """
    machine = machine or memory.MachineMemory.here(empty=not now)
    audit = None if recipe.model.repository == "any" else modules.audit(read(model))
    if errors := lines(findings(recipe, cells, machine, audit)):
        remedies = memory.remedies(recipe.memory(machine, audit), machine, flags=False)
        errors += [remedy.text for remedy in remedies]
        raise RecipeError(
            "recipe-unfit", f"{recipe.name} cannot be served here as it is.", details=errors
        )


def check_traps(words: Sequence[str], vllm: str, model: Path) -> None:
    """
    Check that the release *vllm* serves *model* well with the arguments *words*.

    Raises:
        recipe-unfit: A known trap holds.
        model-missing, checkpoint-invalid: As `checkpoint.read`.
    """
    # Without these, no trap holds, and the headers of the weights need not be read.
    if not (
        flags.speculation(words)
        or flags.value(words, "--moe-backend")
        or flags.value(words, "--kv-cache-dtype")
    ):
        return
    if errors := lines(find_traps(words, vllm, modules.audit(read(model)))):
        raise RecipeError("recipe-unfit", f"vLLM {vllm} serves it wrongly.", details=errors)


def both_fit(recipe: Recipe, model: Path, machine: memory.MachineMemory | None = None) -> bool:
    """
    Return whether a second server of *recipe* fits beside the first; arguments as of `check`.
    """
    audit, machine = modules.audit(read(model)), machine or memory.MachineMemory.here(empty=True)
    beside = replace(machine, free=machine.free - recipe.memory(machine, audit).needed)
    return not findings(recipe, (), machine, audit) and not findings(recipe, (), beside, audit)


def findings(
    recipe: Recipe,
    cells: Sequence[WorkloadCell],
    machine: memory.MachineMemory,
    checkpoint: modules.ModuleAudit | None = None,
) -> list[Reason]:
    """
    Return what is wrong with *recipe*, whatever release serves it.

    Args:
        cells: What is measured; none if the recipe only serves.
        machine: The memory of a node; `empty` if nothing is started now.
        checkpoint: The checkpoint on disk, over all nodes; None if it is not at hand.
    """
    words = [f"--speculative-config={recipe.speculation}"] if recipe.speculation else []
    server = recipe.memory(machine, checkpoint)
    return [
        *rules(words, server, machine, recipe=recipe, checkpoint=checkpoint),
        *_cells(recipe, cells),
    ]


def rules(
    words: Sequence[str],
    server: memory.ServerMemory,
    machine: memory.MachineMemory,
    *,
    recipe: Recipe | None,
    checkpoint: modules.ModuleAudit | None,
    vllm: str = "",
) -> list[Reason]:
    """
    Return why a server with the arguments *words* of vLLM cannot serve.

    Args:
        server: The memory that it takes.
        recipe: None for a plain model.
        checkpoint: None if its files were not read.
        vllm: The version that serves; empty if unknown.
    """
    results = [Reason(*refusal) for refusal in memory.refusals(server, machine)]
    cache = flags.value(words, CACHE)
    if cache and not flags.number(words, CACHE):
        results.append(
            Reason("cache-unpinned", f"{CACHE}={cache} is no number of bytes; write 20G or 1536M")
        )
    drafts = not recipe or recipe.model.drafts is not False
    results += find_traps(words, vllm, checkpoint or replace(UNREAD, drafts=drafts))
    if recipe:
        results += _other_model(recipe, checkpoint)
    return results


def lines(reasons: Iterable[Reason]) -> list[str]:
    """Return *reasons* for people, with what to do."""
    return [
        f"{reason.reference}: {reason.message}. {REASONS.get(reason.reference, '')}".strip()
        for reason in reasons
    ]


def _other_model(recipe: Recipe, checkpoint: modules.ModuleAudit | None) -> Iterator[Reason]:
    """Yield how *checkpoint* differs from the model of *recipe*; nothing if it was not read."""
    if checkpoint is None or recipe.model.repository == "any":
        return
    model, plan = recipe.model, recipe.plan
    if model.architecture not in (UNRESOLVED, checkpoint.model):
        yield Reason(
            "checkpoint-other", f"its architecture is {checkpoint.model}, not {model.architecture}"
        )
    name = model.quantization.partition(" ")[0]
    weights_alone = "W4A4" in model.quantization and "W4A16" in checkpoint.scheme
    if not checkpoint.scheme.startswith(FORMATS.get(name, name)) or weights_alone:
        yield Reason(
            "checkpoint-other",
            f"it is {checkpoint.scheme or 'not quantised'}, and the recipe's model is "
            f"{model.quantization}",
        )
    size = checkpoint.bytes / memory.GIB / recipe.nodes
    if plan.weights and abs(size - plan.weights) > OTHER_MODEL * plan.weights:
        yield Reason(
            "checkpoint-other",
            f"a node's part of it has {size:.1f} GiB, and the recipe's {plan.weights:g}",
        )


def _cells(recipe: Recipe, cells: Sequence[WorkloadCell]) -> Iterator[Reason]:
    """Yield why *cells* do not fit the recipe's server."""
    plan = recipe.plan
    for cell in cells:
        if cell.prompt + cell.answer > plan.max_model_len:
            yield Reason(
                "cell-too-long",
                f"{cell.name} is longer than max_model_len, {plan.max_model_len:,} tokens",
            )
        if cell.concurrency > plan.max_num_seqs:
            yield Reason(
                "cell-too-wide",
                f"{cell.name} has more requests than max_num_seqs, {plan.max_num_seqs}",
            )


#: Who saw a trap: a thread of a repository, a seed report, or a line of a release of vLLM.
_Source = Annotated[
    str, msgspec.Meta(pattern=r"^([\w.-]+/[\w.-]+#\d+|seed \d{3}|vllm [\d.]+ [\w/.]+:\d+)$")
]
#: A model whose files were not read: it meets no condition.
UNREAD = modules.ModuleAudit("", "", 0, (0, 0), 0, drafts=True, weights=0.0, rows=())


class Condition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    When a trap holds: all that is stated.

    Attributes:
        vllm: Releases.
        model: Regular expression of ``model_type``.
        scheme: Beginning of the format of the weights.
        experts: The fewest of a layer.
        head_size: Of an attention head.
        drafts: ``false`` for a model without layers that draft.
        settings: Name as of `settings` → regular expression of its value.
    """

    vllm: str = ""
    model: str = ""
    scheme: str = ""
    experts: int = 0
    head_size: int = 0
    drafts: Literal[False] | None = None
    settings: dict[str, str] = {}

    def __post_init__(self) -> None:
        SpecifierSet(self.vllm)
        strict_yaml.compile_patterns(self.model, *self.settings.values())

    def holds(self, flag_values: Mapping[str, str], vllm: str, audit: modules.ModuleAudit) -> bool:
        """Return whether the settings *flag_values* meet it for the model of *audit* on *vllm*."""
        if self.vllm and not (vllm and Version(vllm).base_version in SpecifierSet(self.vllm)):
            return False
        for name, pattern in self.settings.items():
            if not re.fullmatch(pattern, flag_values.get(name, "")):
                return False
        return (
            (not self.model or re.fullmatch(self.model, audit.model) is not None)
            and audit.scheme.startswith(self.scheme)
            and audit.experts[0] >= self.experts
            and self.head_size in (0, audit.head_size)
            and self.drafts in (None, audit.drafts)
        )


class Trap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A record of ``ci/traps.yaml``.

    Attributes:
        id: Its reference.
        happens: What happens.
        when: The condition under which it does.
        remedy: What to do instead.
        sources: Who saw it.
        seen: Day of the newest source that was read.
    """

    id: Annotated[str, msgspec.Meta(pattern="^[a-z0-9]+(-[a-z0-9]+)*$")]
    happens: strict_yaml.Prose
    when: Condition
    remedy: strict_yaml.Prose
    sources: Annotated[tuple[_Source, ...], msgspec.Meta(min_length=1)]
    seen: Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d\d-\d\d$")]


def load_traps() -> tuple[Trap, ...]:
    """
    Return the reviewed traps.

    Raises:
        file-invalid: Their file is damaged.
    """
    return strict_yaml.load(config.root() / "ci" / "traps.yaml", tuple[Trap, ...])


def find_traps(words: Sequence[str], vllm: str, audit: modules.ModuleAudit) -> Iterator[Reason]:
    """
    Yield the traps that hold, each with its source and its remedy.

    Args:
        words: Arguments of ``vllm serve``.
        vllm: The release; empty if unknown.
        audit: Of the model, or `UNREAD`.
    """
    flag_values = settings(words)
    for trap in load_traps():
        if trap.when.holds(flag_values, vllm, audit):
            sources = ", ".join(trap.sources)
            yield Reason(trap.id, f"{trap.happens} ({sources}). {trap.remedy}".removesuffix("."))


def settings(words: Sequence[str]) -> dict[str, str]:
    """
    Return what the arguments *words* of ``vllm serve`` set: flag → its last value, and
    ``speculation.NAME`` → a setting of speculative decoding. Of these, ``drafter`` is a model,
    ``own`` for the layers of the model itself, or empty, and ``moe_backend`` the one that serves
    the drafter.
    """
    flag_values = {argument.name: argument.value for argument in flags.parse(words)}
    drafting = flags.speculation(words)
    own = "own" if "mtp" in str(drafting.get("method")) else ""
    drafting["drafter"] = drafting.get("model") or own
    drafting.setdefault("moe_backend", flag_values.get("--moe-backend", ""))
    for name, value in drafting.items():
        flag_values[f"speculation.{name}"] = str(value)
    return flag_values
