"""Which warm pack a server starts from: the one that was made for exactly this machine, or none."""

from __future__ import annotations

from pathlib import Path

from sparkwright.bench.model.checkpoint import model_digest
from sparkwright.bench.recipes.recipe import Recipe
from sparkwright.bench.server.launch import LaunchPlan
from sparkwright.client.environment import PACKS
from sparkwright.client.records import WarmPack
from sparkwright.core.errors import StoreError
from sparkwright.core.process import CACHES, cache_variables
from sparkwright.serving.environment import ServingEnvironment

#: Differences that a line names.
SHOWN = 3


def choose(
    environment: ServingEnvironment, recipe: Recipe | None, plan: LaunchPlan, *, make: bool
) -> tuple[WarmPack | None, Path | None, str]:
    """
    Return the pack that the server of *plan* starts from, the folder of its overlay, and a line for
    the user: why there is none, or how to get one. Nothing is downloaded.

    Args:
        make: Also make its overlay, without which it is none.
    """
    marker, root = environment.marker, environment.prefix.resolve()
    if marker is None or recipe is None or not plan.model.is_dir():
        return None, None, ""
    size, offer = marker.packs.get(recipe.name, 0), ""
    if size:
        get = f"`sparkwright install --warm {recipe.name}` fetches {size / 1e6:,.0f} MB"
        offer = f"the first start can be as fast as the second: {get}"
    if not (root / CACHES / PACKS).is_dir():
        return None, None, offer
    if own := sorted(cache_variables(root).keys() & plan.variables.keys()):
        return None, None, f"the warm pack is not used, as caches are elsewhere: {', '.join(own)}"
    # Few starts need it.
    from sparkwright.bench.server import warm_pack

    packs = warm_pack.installed(root, recipe.name)
    if not packs:
        return None, None, offer
    here = warm_pack.pack_key(plan, recipe.name, model_digest(plan.model), marker)
    pack = min(packs, key=lambda each: len(each.key.differences(here)))
    if differences := pack.key.differences(here):
        return None, None, f"the warm pack is not used: {'; '.join(differences[:SHOWN])}"
    try:
        if make:
            warm_pack.prepare(root, pack)
    except (warm_pack.PackInvalid, StoreError) as error:
        what = error.what if isinstance(error, StoreError) else str(error)
        return None, None, f"the warm pack is not used: {what}"
    return pack, warm_pack.overlay(root, pack), ""
