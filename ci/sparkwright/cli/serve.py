"""
``sparkwright serve``: a model served by an installed set, exactly as its recipe says, watched from
the first line of the log on.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sparkwright.cli import environments
from sparkwright.cli.measuring import pair
from sparkwright.core import project_data
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.forks.context import StandaloneContext
from sparkwright.gates.recipes import recipe as recipes
from sparkwright.operate.serving import (
    cluster,
    held,
    ports,
    resolve,
    room,
    shown,
    together,
    variables,
)
from sparkwright.operate.serving import place as places
from sparkwright.operate.serving import run as running
from sparkwright.operate.serving.asked import Asked
from sparkwright.operate.serving.wish import Where, Wish


def run(session: StandaloneContext, arguments: argparse.Namespace) -> int:
    """
    Serve until somebody asks to stop; with ``--dry-run`` say what would run, with ``--table`` what
    a container may be told.
    """
    if arguments.table:
        console.result(variables.table().rstrip("\n"))
        console.document({"variables": variables.TABLE})
        return 0
    with Asked() as asked:
        wish = wished(arguments)
        where = Where(python(arguments), project_data.root(arguments.root), arguments.log)
        if wish.role == "worker":
            return _follow(session, wish, where, asked, dry=arguments.dry_run)
        return _serve(session, wish, where, asked, dry=arguments.dry_run)


def wished(arguments: argparse.Namespace) -> Wish:
    """
    Return what the command line asks for, above what the environment does where that is to be
    asked.

    Raises:
        UsageError: The command line contradicts itself. variable-refused: See `variables.told`.
    """
    below = variables.told(os.environ) if arguments.environment else Wish()
    role = "worker" if arguments.ray_worker is not None else "head" if arguments.ray_head else ""
    said: dict[str, Any] = {
        "recipe": arguments.recipe,
        "model": arguments.model,
        "revision": arguments.revision,
        "host": arguments.host,
        "port": arguments.port,
        "name": arguments.name,
        "floor": arguments.floor,
        "download": arguments.download or None,
        "role": role,
        "head": arguments.ray_worker,
        "nodes": arguments.nodes,
        "address": arguments.node_address,
        "ray_port": arguments.ray_port,
        "patience": arguments.patience,
    }
    above = {name: value for name, value in said.items() if value is not None and value != ""}
    wish = replace(below, **above)
    wish = replace(
        wish, flags=(*below.flags, *arguments.flag), variables=dict(map(pair, arguments.variable))
    )
    if role == "worker" and not wish.head:
        raise UsageError(
            "usage",
            "A worker needs the address of the head.",
            todo="Give it behind --ray-worker, or as RAY_ADDRESS with --environment.",
        )
    if not arguments.environment:
        _unheard(wish)
    return wish


def _unheard(wish: Wish) -> None:
    """
    Say which variables of the caller look as if they were for the server, and do not reach it.
    """
    lost = sorted(
        name for name in os.environ if name.startswith("VLLM_") and name not in wish.variables
    )
    if lost:
        console.warn(
            f"{', '.join(lost)} of this shell does not reach the server; say --variable "
            f"NAME=VALUE, or --environment for all"
        )


def python(arguments: argparse.Namespace) -> Path:
    """Return the Python of the environment that is meant."""
    if arguments.python is not None and arguments.into is not None:
        raise UsageError(
            "usage", "--python and --into name two environments.", todo="Give one of them."
        )
    found: Path = arguments.python or environments.chosen(arguments.into) / "bin" / "python"
    return found


def _serve(session: StandaloneContext, wish: Wish, where: Where, asked: Asked, *, dry: bool) -> int:
    ready = resolve.resolved(wish, where)
    log = (where.log or running.log_path(session.store, ready.name)).absolute()
    shown.show(ready, str(log))
    console.document(shown.document(ready, str(log)))
    if dry:
        for text in places.changed(ready.place):
            console.warn(f"the installed set was changed: {text}")
        if wish.role == "head":
            cluster.required(ready.place)
        ports.check(wish.host, wish.port)
        room.check(ready.needs, ready.floor)
        return 0
    with held.held() as lock:
        start = together.lead if wish.role == "head" else running.serve
        return start(ready, lock, asked, session.store, log)


def _follow(
    session: StandaloneContext, wish: Wish, where: Where, asked: Asked, *, dry: bool
) -> int:
    place = places.ask(where.python)
    recipe = recipes.load(where.root, wish.recipe) if wish.recipe else None
    free = (
        wish.floor
        if wish.floor is not None
        else recipe.plan.floor
        if recipe
        else resolve.floor(wish)
    )
    floor = round(free * resolve.GIB)
    log = (where.log or running.log_path(session.store, "ray-worker")).absolute()
    console.document(
        {
            "head": wish.head,
            "vllm": place.vllm,
            "ray": place.ray,
            "python": str(place.python),
            "log": str(log),
        }
    )
    if dry:
        cluster.required(place)
        cluster.parts(wish.head)
        return 0
    with held.held() as lock:
        return together.follow(
            place, wish, floor, lock, asked, log, wish.patience or resolve.PATIENCE
        )
