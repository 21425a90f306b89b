"""
Decide in seconds whether a request to gate can end in a channel, before anything is built.

``gate --dry-run``, the pipeline and the gate of a recipe decide by `require` alone, so that none of
them promises what another one refuses.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from sparkwright.bench.machine import watchdog
from sparkwright.bench.model.checkpoint import ModelError, model_digest
from sparkwright.bench.recipes import preflight, recipe as recipes
from sparkwright.bench.recipes.recipe import Recipe, RecipeError
from sparkwright.client.records import Channel, Missing, line
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.forks.context import RunContext
from sparkwright.gates.core.ladder import SERVED, is_transient
from sparkwright.gates.core.verdict import Verdict
from sparkwright.release import ReleaseError, policy as release_policy

#: The reference of a kernel's log that this user may not read.
HIDDEN = "kernel-log-hidden"
#: Reasons that refuse a request for a candidate as well, since its gates could ask nothing.
STOPPING = ("recipe-unfit", "model-missing", "checkpoint-invalid")


class ReleaseRequest(msgspec.Struct, frozen=True):
    """
    What is asked of the gates.

    Attributes:
        recipes: The recipes to gate.
        versions: The releases of vLLM that they serve.
        missing: What keeps the result out of ``verified``, as far as that is known in advance.
    """

    recipes: tuple[str, ...]
    stack: str
    versions: tuple[str, ...]
    missing: tuple[Missing, ...] = ()


def require(
    context: RunContext,
    names: Sequence[str],
    channel: Channel,
    *,
    gpus: Collection[str] | None = None,
    kernel_log: bool = True,
    models: Path | None = None,
) -> ReleaseRequest:
    """
    Return the request for *channel*, if it can be reached.

    Args:
        names: The recipes; empty for the first of each group of the release policy that can be
            gated.
        gpus: Compute capabilities of the GPUs of the machine that will gate; None if unknown.
        kernel_log: Whether this user may read the kernel's log there.
        models: The folder on this machine that has a folder of each recipe's model, or that is the
            model's; None if the models are elsewhere.

    Raises:
        UsageError: There is no such recipe, or none serves the stack.
        request-unfit: The channel cannot be reached.
    """
    project, root = context.project, context.project.root
    policy = release_policy.load(root, project.spec.arch)
    forks = context.lock.forks
    versions = {base.version for fork in context.forks for base in forks[fork].bases.values()}
    unfit: dict[str, str] = {}
    for name in {*names}.union(*policy.file.groups.values()):
        unfit[name] = _unfit(recipes.load(root, name), sorted(versions), project.spec.label)
    if not names:
        firsts = dict[str, None]()
        for members in policy.file.groups.values():
            firsts |= dict.fromkeys([name for name in members if not unfit[name]][:1])
        names = list(firsts)
    if not names:
        raise UsageError(
            "usage", f"No recipe of the release policy serves {project.stack}; name one."
        )
    missing = list[Missing]()
    for group, members in policy.file.groups.items():
        if not any(name in names and not unfit[name] for name in members):
            choice = "; ".join(f"{name} {unfit[name] and f'({unfit[name]})'}" for name in members)
            missing.append(_missing("recipes", "group-missing", f"{group} needs one of: {choice}"))
    for name in names:
        if unfit[name]:
            missing.append(_missing("G3", "recipe-unfit", unfit[name]))
        missing += _recipe(policy, recipes.load(root, name), models)
    gpu, rules = policy.file.gpu, policy.file.gates
    on_gpu = any(rules[gate].gpu for gate in policy.file.required)
    if gpus is not None and gpu not in gpus and on_gpu:
        text = f"gates count from a GPU of SM {gpu}; the machine has {', '.join(gpus) or 'none'}"
        missing.append(_missing("G2", "machine-other", text))
    if not kernel_log and "G7" in policy.file.required:
        missing.append(_missing("G7", HIDDEN, watchdog.MEANINGS[HIDDEN]))
    stopping, details = list[Missing](), list[str]()
    for entry in missing:
        if channel == "verified" or entry.reference in STOPPING:
            stopping.append(entry)
            details.append(f"{entry.gate}: {entry.says} ({entry.reference})")
    if stopping:
        raise ReleaseError(
            "request-unfit",
            f"{project.stack} with {' '.join(names)} cannot reach the channel {channel}.",
            details=details,
            data={"missing": stopping},
        )
    for entry in missing:
        console.note(f"not for verified: {entry.gate}: {entry.says} ({entry.reference})")
    return ReleaseRequest(tuple(names), project.stack, tuple(sorted(versions)), tuple(missing))


def model_folder(models: Path, recipe: str) -> Path:
    """Return the folder of the model of *recipe*: the one of its name in *models*, or *models*."""
    return models / recipe if (models / recipe).is_dir() else models


def settled(
    verdicts: Sequence[Verdict],
    request: ReleaseRequest,
    policy: release_policy.ReleasePolicy,
    host: Mapping[str, str],
    models: Path,
) -> bool:
    """
    Return whether every gate of *request* has one of *verdicts*, whatever its state, and since then
    neither policy, recipe, machine nor model changed. A gate that only lacked time or a host, met
    a busy machine, or was ended, is tried again.

    Args:
        host: Facts of this machine.
        models: As of `require`.
    """
    digests = {name: model_digest(model_folder(models, name)) for name in request.recipes}
    for gate in policy.file.required:
        # Gates without a GPU may run on another machine.
        facts = host if policy.file.gates[gate].gpu else {}
        served = request.recipes if gate in SERVED else ("",)
        current = set[str]()
        for verdict in itertools.filterfalse(is_transient, verdicts):
            name = verdict.recipe
            if (
                (verdict.gate, verdict.model) == (gate, digests.get(name, ""))
                and policy.expected_digest(gate, request.stack, name) in ("", verdict.policy)
                and facts.items() <= verdict.host.items()
            ):
                current.add(name)
        # One recipe is enough for G8.
        if not (current.intersection(served) if gate == "G8" else current.issuperset(served)):
            return False
    return True


def _unfit(recipe: Recipe, versions: Sequence[str], label: str) -> str:
    """Return why *recipe* cannot be gated: our wheel and the official one have to serve it."""
    try:
        for version in versions:
            recipe.variant(f"{version}+{label}")
            recipe.variant(version)
    except RecipeError as error:
        return " ".join((error.what, *error.details))
    return ""


def _recipe(
    policy: release_policy.ReleasePolicy, recipe: Recipe, models: Path | None
) -> Iterator[Missing]:
    """Yield what *recipe*, or its model in *models*, lacks."""
    for name in policy.file.gates["G6"].wanted if "G6" in policy.file.required else ():
        task, _, kind = name.rpartition("-")
        if kind == "floor" and task not in recipe.floors:
            yield _missing("G6", "floor-missing", f"{recipe.name} has no floor of {task}")
    if models is None:
        return
    folder = model_folder(models, recipe.name)
    if not folder.is_dir():
        yield _missing("G3", "model-missing", f"{recipe.name}: there is no folder {folder.name}")
        return
    try:
        preflight.check(recipe, (), folder)
    except (RecipeError, ModelError) as error:
        text = " ".join((error.what.replace(str(folder), folder.name), *error.details))
        yield _missing("G3", error.reference, text)


def _missing(gate: str, reference: str, text: str) -> Missing:
    return Missing(gate, "not-run", reference, line(text))
