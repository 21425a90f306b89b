"""Whether a recipe fits what is here: this machine's memory, and this checkpoint. Asked before a server is started."""

from __future__ import annotations

from pathlib import Path

from sparkwright.bench.errors import RecipeError
from sparkwright.bench.recipes import lint, memory, workloads
from sparkwright.bench.recipes.memory import Finding
from sparkwright.bench.recipes.recipe import Recipe
from sparkwright.core import strict_yaml
from sparkwright.gates.contract.policy import ContractPolicy

#: What `lint.of_checkpoint` finds as well, with the bytes on disk in place of the plan's.
SIZES = ("memory-short", "memory-utilization", "memory-unpinned", "cache-short")


#: What matters only to whoever measures the recipe.
MEASURING = ("cell-too-long", "cell-too-wide", "cache-crowded", "workload-unknown", "contract-unknown", "contract-unwritten")


def machine() -> int:
    """Return the megabytes of memory of this machine, which on a Spark are those of its GPU."""
    import psutil

    return int(psutil.virtual_memory().total // 1_000_000)


def check(
    root: Path, recipe: Recipe, model: Path | None, *, total: int | None = None, servers: int = 1, measured: bool = True
) -> tuple[Finding, ...]:
    """
    Return what could be better about serving *recipe* here.

    Args:
        root: Of the repository. *model*: folder of the checkpoint; None where it is not at hand.
        total: Megabytes of the memory of a node; None for this machine's.
        servers: How many run there at a time. *measured*: whether it will be measured, or only serves.

    Raises:
        recipe-unfit: The recipe is wrong, or the machine or the checkpoint is not what it plans with.
        not-provided, checkpoint-invalid: As `sparkwright.bench.recipes.memory.held`.
    """
    total = machine() if total is None else total
    contract = strict_yaml.load(root / "ci" / "gates" / "contract.yaml", ContractPolicy)
    plain = lint.findings(recipe, workloads.load(root), contract, total=total)
    # The checkpoint's own size decides where it is known.
    found = [one for one in plain if model is None or one.reference not in SIZES]
    found += lint.of_checkpoint(recipe, memory.held(model), total=total, servers=servers) if model else ()
    found = [one for one in found if measured or one.reference not in MEASURING]
    errors = [f"{one.reference}: {one.says}. {lint.REASONS[one.reference]}" for one in found if one.weight == "error"]
    if errors:
        raise RecipeError("recipe-unfit", f"{recipe.name} cannot be served here as it is.", details=errors)
    return tuple(dict.fromkeys(found))
