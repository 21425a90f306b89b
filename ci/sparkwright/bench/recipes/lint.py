"""What is wrong with a recipe before it is started: flags that cancel each other, variables that nobody reads, memory that is not there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from msgspec.structs import replace
from packaging.version import Version

from sparkwright.bench.recipes import flags, memory
from sparkwright.bench.recipes.cells import Cell
from sparkwright.bench.recipes.memory import SPARK_MB, Finding, Held
from sparkwright.bench.recipes.recipe import Recipe
from sparkwright.bench.recipes.ways import Way
from sparkwright.bench.recipes.workloads import Workloads
from sparkwright.core.errors import UsageError
from sparkwright.gates.contract.policy import ContractPolicy

#: The flags by which a plan, its nodes and its speculation are said.
PLANNED = frozenset(
    {
        "--max-model-len", "--max-num-seqs", "--gpu-memory-utilization", "--kv-cache-memory-bytes", "--num-gpu-blocks-override",
        "--tensor-parallel-size", "--distributed-executor-backend", "--speculative-config", "--spec-method", "--spec-tokens",
        "--spec-model",
    }
)  # fmt: skip

REASONS: Mapping[str, str] = {
    **memory.REASONS,
    "flag-twice": "Of two equal flags vLLM takes the last one in silence. Remove one.",
    "flag-planned": "The flag says what the plan, the nodes or the speculation say, and one of them would not be true. Remove the flag.",
    "flag-measuring": "Whoever measures sets this, on both sides alike. Remove it from the recipe.",
    "flag-unknown": "A release of the range ends over this flag at its start, or nobody has looked. Divide the range, or look and add it.",
    "variable-ignored": "A release of the range does not read the variable and says so only in a warning. Divide the range.",
    "ranges-overlap": "Two ways are for the same release, and only the first would ever be taken.",
    "range-unread": "None of the releases whose sources were read is in the range.",
    "speculation-headless": "The checkpoint has no layers that draft, as quantizers often drop them; vLLM refuses it (seed report 003).",
    "speculation-unknown": "Nobody has looked whether the checkpoint holds the layers that draft. Look, and write `drafts`.",
    "revision-unresolved": "The checkpoint is not pinned, so that it may be another one tomorrow. Write the commit of its repository.",
    "workload-unknown": "ci/gates/workloads.yaml has no such set of cells.",
    "cell-too-long": "The cell's prompt and answer are longer than the server takes. Raise max_model_len, or measure with something else.",
    "cell-too-wide": "The cell asks for more requests at a time than the server takes. Raise max_num_seqs, or measure with something else.",
    "contract-unknown": "ci/gates/contract.yaml has no recipe of that name, so G3 cannot hold the log against it.",
    "contract-unwritten": "Nobody has written down what the log must say; G3 then has nothing to hold it against.",
}


def findings(recipe: Recipe, workloads: Workloads, contract: ContractPolicy, *, total: int = SPARK_MB) -> tuple[Finding, ...]:
    """
    Return what is wrong with *recipe*, errors first.

    Args:
        workloads, contract: The files of ``ci/gates``.
        total: Megabytes of the memory of one node.
    """
    cells, lost = _measured(recipe, workloads)
    found = [*lost, *_model(recipe), *_overlaps(recipe), *_lengths(recipe, cells)]
    for way in recipe.ways:
        found += [*_flags(way), *_variables(way, contract), *_contract(recipe, way, contract)]
    found += memory.check(recipe.plan, total, nodes=recipe.nodes, cells=cells)
    return tuple(sorted(dict.fromkeys(found), key=lambda one: one.weight != "error"))


def of_checkpoint(recipe: Recipe, held: Held, *, total: int = SPARK_MB, servers: int = 1) -> tuple[Finding, ...]:
    """
    Return in what the checkpoint at hand is not what *recipe* plans with, errors first.

    Args:
        held: What `sparkwright.bench.recipes.memory.held` found in its folder.
        total: Megabytes of the memory of one node. *servers*: how many run there at a time.
    """
    found = list(memory.check(recipe.plan, total, held.weights, nodes=recipe.nodes, servers=servers))
    if recipe.speculation and "mtp" in recipe.speculation.method and not held.drafts:
        found.append(Finding("speculation-headless", "the checkpoint on disk has no layers that draft, or its config does not name them"))
    token = held.token / recipe.nodes
    if recipe.plan.token and token and not any(abs(recipe.plan.token - one) <= memory.TOLERANCE * one for one in (token, token / 2)):
        says = f"a token takes {token:,.0f} bytes of the cache, or half of them in fp8; the plan says {recipe.plan.token:,}"
        found.append(Finding("token-differs", says, "advice"))
    return tuple(sorted(found, key=lambda one: one.weight != "error"))


def _measured(recipe: Recipe, workloads: Workloads) -> tuple[list[Cell], list[Finding]]:
    cells: list[Cell] = []
    found: list[Finding] = []
    for name in recipe.workloads:
        try:
            cells += workloads.cells(name)
        except UsageError as error:
            found.append(Finding("workload-unknown", error.what))
    return cells, found


def _model(recipe: Recipe) -> Iterator[Finding]:
    drafts, speculates = recipe.model.drafts, recipe.speculation is not None and "mtp" in recipe.speculation.method
    if speculates and drafts is False:
        yield Finding("speculation-headless", f"{recipe.model.repository} has no layers that draft")
    if speculates and drafts == "unknown":
        yield Finding("speculation-unknown", f"whether {recipe.model.repository} has layers that draft is not known", "advice")
    if recipe.model.revision == "unresolved" and recipe.model.repository != "any":
        yield Finding("revision-unresolved", f"{recipe.model.repository} is named without its commit", "advice")


def _overlaps(recipe: Recipe) -> Iterator[Finding]:
    for release in flags.READ:
        if len(ways := [way.vllm for way in recipe.ways if way.holds(Version(release))]) > 1:
            yield Finding("ranges-overlap", f"{' and '.join(ways)} both hold {release}")


def _lengths(recipe: Recipe, cells: list[Cell]) -> Iterator[Finding]:
    for cell in cells:
        if cell.length > recipe.plan.max_model_len:
            yield Finding("cell-too-long", f"{cell.name} has {cell.length:,} tokens, max_model_len is {recipe.plan.max_model_len:,}")
        if cell.concurrency > recipe.plan.max_num_seqs:
            yield Finding("cell-too-wide", f"{cell.name} is of {cell.concurrency} at a time, max_num_seqs is {recipe.plan.max_num_seqs}")


def _flags(way: Way) -> Iterator[Finding]:
    # `--a.b=1` and `--a.c=2` set two things of one, so their whole name counts.
    whole = [name if "." in (name := flag.partition("=")[0]) else flags.plain(flag)[0] for flag in way.flags]
    for name, count in Counter(whole).items():
        if count > 1:
            yield Finding("flag-twice", f"{name} is there {count} times for vLLM {way.vllm}")
    for name in (flags.plain(flag)[0] for flag in way.flags):
        if name in PLANNED:
            yield Finding("flag-planned", f"{name} is also said by the recipe's own fields")
        if name in flags.MEASURING:
            yield Finding("flag-measuring", f"{name} is the measuring side's")
    own = tuple(flag for flag in way.flags if flags.plain(flag)[0] not in PLANNED | flags.MEASURING)
    for says in flags.unknown(replace(way, flags=own)):
        yield Finding("flag-unknown", says)
    if not flags.releases(way):
        yield Finding("range-unread", f"no release of {way.vllm} was read", "advice")


def _variables(way: Way, contract: ContractPolicy) -> Iterator[Finding]:
    for name in way.variables:
        gone = contract.replaced.get(name)
        if gone and (late := [one for one in flags.releases(way) if Version(one) >= Version(gone.since)]):
            says = f"vLLM {', '.join(late)} does not read {name}" + (f"; now {gone.use}" if gone.use else "")
            yield Finding("variable-ignored", says)


def _contract(recipe: Recipe, way: Way, contract: ContractPolicy) -> Iterator[Finding]:
    name = way.contract or recipe.contract
    if not name:
        yield Finding("contract-unwritten", f"nothing says what the log of {recipe.name} must hold", "advice")
    elif name not in contract.recipes:
        yield Finding("contract-unknown", f"contract.yaml has no recipe {name}")
