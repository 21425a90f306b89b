"""From a wish to a server that could be started: recipe, environment, flags, variables and model, each held against what is here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from sparkwright.bench.recipes import preflight
from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.recipes.recipe import Recipe, RecipeError
from sparkwright.bench.server.launch import LaunchPlan
from sparkwright.core.errors import UsageError
from sparkwright.serving import environment as environments
from sparkwright.serving import known, models, variables
from sparkwright.serving.environment import ServingEnvironment
from sparkwright.serving.models import Found
from sparkwright.serving.wish import SHARE, Where, Wish

#: GiB in megabytes, as psutil tells them.
GIB = 2**30 / 1e6
#: The share of a machine's memory that stays free where no recipe says how much: 12 GiB of a Spark.
FLOOR = 0.1
PATIENCE = 1800.0


class Ready(msgspec.Struct, frozen=True):
    """
    A server that could be started.

    Attributes:
        recipe: With what was said otherwise about its plan; None for a plain model.
        floor: Megabytes that stay free. *needs*: megabytes that it takes beside them, as far as anybody knows.
        nodes: Machines that serve it together.
        warnings: What a person should know.
    """

    wish: Wish
    environment: ServingEnvironment
    recipe: Recipe | None
    model: Found
    launch: LaunchPlan
    floor: int
    needs: int
    nodes: int
    warnings: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.launch.name


def resolved(wish: Wish, where: Where) -> Ready:
    """
    Return what *wish* comes to with the environment and the models of this machine.

    Raises:
        UsageError: It names no model, or no such recipe. recipe-unfit: It does not fit vLLM's release, the machine or the checkpoint.
        environment-unusable, environment-broken, file-invalid, model-missing, checkpoint-invalid, variable-refused, flag-unknown: See
        there.
    """
    if not wish.recipe and not wish.model:
        raise UsageError(
            "usage",
            "Nothing says what to serve.",
            todo="Name a recipe, or a model with --model (in a container: RECIPE or MODEL).",
        )
    recipe = _planned(recipes.load(where.root, wish.recipe), wish) if wish.recipe else None
    environment = environments.examine(where.python)
    nodes = recipe.nodes if recipe else (wish.nodes or 1)
    _alone(wish, nodes)
    settings, unread = _variables(wish, recipe, environment)
    flags = _flags(wish, recipe, environment)
    model = _model(wish, recipe, settings)
    if wish.download and not model.path.exists() and (revision := _revision(wish, recipe)):
        flags = (*flags, f"--revision={revision}")
    said, needs = _fitting(wish, recipe, model)
    free = round((recipe.plan.floor if recipe else floor(wish)) * GIB)
    patience = wish.patience or (recipe.patience if recipe else PATIENCE)
    launch = LaunchPlan(
        where.python.absolute(),
        model.path,
        flags,
        settings,
        _name(wish, recipe, model),
        patience,
        free,
    )
    warnings = (*unread, *said, *_figures(recipe, environment), *_provenance(wish, recipe, environment, model))
    return Ready(wish, environment, recipe, model, launch, free, needs, nodes, warnings)


def _alone(wish: Wish, nodes: int) -> None:
    """Refuse what one machine cannot serve alone, and a name that vLLM would take for a flag."""
    what, here = wish.recipe or wish.model, len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    if wish.role != "head" and nodes > 1:
        raise UsageError(
            "usage",
            f"{what} is served by {nodes} machines together.",
            todo="Start it with --ray-head.",
        )
    if wish.role != "head" and here and (wish.parallel or 1) > here:
        raise UsageError(
            "usage",
            f"{wish.parallel} GPUs are to share the work; here are {here}.",
            todo="Start it with --ray-head and --nodes.",
        )
    if wish.name.startswith("-"):
        raise UsageError(
            "usage", f"{wish.name!r:.80} cannot be the name of a model: it looks like a flag."
        )


def _planned(recipe: Recipe, wish: Wish) -> Recipe:
    """Return *recipe* with what the wish says otherwise; the result is held against the machine like any other."""
    said = {
        "gpu_memory_utilization": wish.share, "max_model_len": wish.length, "max_num_seqs": wish.requests, "floor": wish.floor,
    }  # fmt: skip
    plan = replace(
        recipe.plan, **{name: value for name, value in said.items() if value is not None}
    )
    return replace(recipe, plan=plan, nodes=wish.nodes or recipe.nodes)


def _variables(
    wish: Wish, recipe: Recipe | None, environment: ServingEnvironment
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return what the server's environment gets beside what every server has, and what could not be checked of it."""
    own = dict(recipe.variant(environment.vllm).variables) if recipe else {}
    settings = own | wish.passed | wish.variables
    if wish.address:
        settings["VLLM_HOST_IP"] = wish.address
    if wish.download:
        settings["HF_HUB_OFFLINE"] = "0"
    return settings, variables.check(settings, environment.package, environment.vllm)


def _flags(wish: Wish, recipe: Recipe | None, environment: ServingEnvironment) -> tuple[str, ...]:
    below = recipe.flags(recipe.variant(environment.vllm)) if recipe else tuple(_plain(wish))
    parallel = wish.parallel or ((wish.nodes or 1) if not recipe else 0)
    if parallel > 1:
        below = known.merged(below, (f"--tensor-parallel-size={parallel}",))
    if wish.role == "head" and not recipe:
        below = known.merged(below, ("--distributed-executor-backend=ray",))
    flags = known.merged(below, wish.flags)
    known.check(flags, known.flags(environment.package), environment.vllm)
    return flags


def _plain(wish: Wish) -> Iterator[str]:
    """Yield the flags of a model without a recipe."""
    pinned = known.value(wish.flags, "--kv-cache-memory-bytes")
    if wish.share is not None or not (
        pinned or known.value(wish.flags, "--gpu-memory-utilization")
    ):
        yield f"--gpu-memory-utilization={wish.share or SHARE:g}"
    if wish.length is not None:
        yield f"--max-model-len={wish.length}"
    if wish.requests is not None:
        yield f"--max-num-seqs={wish.requests}"


def _model(wish: Wish, recipe: Recipe | None, settings: dict[str, str]) -> Found:
    named = wish.model or (
        recipe.model.repository if recipe and recipe.model.repository != "any" else ""
    )
    if not named:
        raise UsageError(
            "usage",
            f"{wish.recipe} serves whatever model is brought.",
            todo="Name it with --model (in a container: MODEL).",
        )
    return models.find(
        named, _revision(wish, recipe), {**os.environ, **settings}, download=wish.download
    )


def _revision(wish: Wish, recipe: Recipe | None) -> str:
    """Return the commit or branch that is asked for: said, or of the recipe where its own model is meant; empty for the newest here."""
    own = recipe.model if recipe and wish.model in ("", recipe.model.repository) else None
    return wish.revision or (own.revision if own and own.revision != "unresolved" else "")


def _name(wish: Wish, recipe: Recipe | None, model: Found) -> str:
    return (
        wish.name
        or (recipe.name if recipe else "")
        or wish.model.rstrip("/").rpartition("/")[2]
        or model.path.name
        or "model"
    )


def floor(wish: Wish) -> float:
    """Return the GiB that stay free where no recipe says how many."""
    return wish.floor if wish.floor is not None else FLOOR * preflight.machine_memory() / GIB


def _fitting(wish: Wish, recipe: Recipe | None, model: Found) -> tuple[list[str], int]:
    """Return what could be better about serving it here, and the megabytes that it needs beside the floor."""
    total = preflight.machine_memory()
    if recipe is None:
        return _fitting_plain(wish, model, total)
    folder = (
        model.local
        if model.weights and model.local and (model.local / "config.json").is_file()
        else None
    )
    with models.missing_guard():
        found = preflight.check(recipe, None, folder, total=total)
    weights = model.weights / recipe.nodes / 1e6 if model.weights else recipe.plan.weights * GIB
    return [f"{one.reference}: {one.message}" for one in found], round(
        weights + (recipe.plan.cache + recipe.plan.reserve) * GIB
    )


def _fitting_plain(wish: Wish, model: Found, total: int) -> tuple[list[str], int]:
    weights, free = model.weights / (wish.nodes or 1) / 1e6, floor(wish) * GIB
    if weights + free > total:
        says = f"{weights:,.0f} MB of weights and {free:,.0f} MB that stay free; the machine has {total:,} MB"
        raise RecipeError(
            "recipe-unfit",
            f"{_name(wish, None, model)} does not fit into this machine's memory.",
            details=[f"memory-short: {says}"],
        )
    said = known.value(wish.flags, "--gpu-memory-utilization")
    share = float(said) if re.fullmatch(r"[0-9]*\.?[0-9]+", said) else wish.share or SHARE
    found = []
    if share * total + free > total * 1.001:
        found.append(
            f"memory-utilization: vLLM may take {share:g} of the memory, which leaves less than the {free:,.0f} MB of the floor"
        )
    return found, round(weights)


def _figures(recipe: Recipe | None, environment: ServingEnvironment) -> Iterator[str]:
    """Yield what is to be said of the recipe's figures: were they measured with what is installed?"""
    if recipe is None:
        return
    if not recipe.ours:
        own = (
            ", and what is published of it was measured by others on other builds"
            if recipe.published
            else ""
        )
        yield f"the speed of {recipe.name} was not measured by this project{own}"
        return
    measured = sorted({one.wheel for one in recipe.ours})
    installed = environment.wheel
    if installed not in measured:
        have = (
            f"{installed[:12]} is installed"
            if installed
            else "nobody recorded which wheel is installed"
        )
        yield f"the figures of {recipe.name} were measured with wheel {', '.join(one[:12] for one in measured)}; {have}: not measured here"


def _provenance(wish: Wish, recipe: Recipe | None, environment: ServingEnvironment, model: Found) -> Iterator[str]:
    marker = environment.marker
    if marker is None:
        yield f"vLLM {environment.vllm} was not installed by sparkwright: nothing about it is proved"
    elif marker.packages.get("vllm") != environment.vllm:
        yield f"vLLM {environment.vllm} is there, and {marker.name} installed {marker.packages.get('vllm')}: something replaced it"
    elif marker.channel != "verified":
        yield f"{marker.name} is a {marker.channel}: not every gate passed"
    if (
        recipe
        and recipe.model.revision == "unresolved"
        and recipe.model.repository != "any"
        and not wish.revision
    ):
        at = f"; served is {model.commit[:12]}" if model.commit else ""
        yield f"the recipe's checkpoint is unresolved: nobody pinned its commit{at}"
    if recipe and recipe.before and wish.role != "head":
        yield f"before it is started: {recipe.before}"
