"""``sparkwright serve``: a model served from an installed release, by its recipe."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.bench.recipes import recipe as recipes
from sparkwright.cli import options
from sparkwright.client.environment import default_prefix
from sparkwright.core import config
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.core.store import Store
from sparkwright.serving import (
    cluster,
    health,
    held,
    ports,
    resolve,
    room,
    shown,
    together,
    variables,
)
from sparkwright.serving import environment as environments
from sparkwright.serving import run as running
from sparkwright.serving.asked import Asked
from sparkwright.serving.errors import ServeError
from sparkwright.serving.wish import Where, Wish


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``serve``."""
    parser = parsers["serve"]
    parser.set_defaults(run=serve)
    options.add_server_arguments(parser)
    add = parser.add_argument
    add(
        "recipe",
        nargs="?",
        default="",
        metavar="RECIPE",
        help="recipe of ci/recipes; optional with --model",
    )
    add(
        "--model",
        default="",
        metavar="DIR|NAME",
        help="folder of the model, or its name in the model cache (default: the recipe's)",
    )
    add(
        "--revision",
        default="",
        metavar="COMMIT",
        help="commit or branch of a model named with --model",
    )
    add(
        "--python",
        type=Path,
        metavar="FILE",
        help="Python of the environment (default: the current release's, else the active one's)",
    )
    add(
        "--host",
        metavar="ADDRESS",
        help="address to listen on (default: 127.0.0.1, this machine alone)",
    )
    add("--port", type=options.number(int, 1, 65535), metavar="N", help="the port (default: 8000)")
    add(
        "--name",
        default="",
        metavar="NAME",
        help="name of the model for clients (default: the recipe's, or the folder's)",
    )
    add(
        "--environment",
        action="store_true",
        help="read options that are not given from environment variables",
    )
    add(
        "--floor",
        type=options.number(float, 0, 4096, "GiB"),
        metavar="GIB",
        help="memory to leave free (default: the recipe's, or a tenth)",
    )
    add("--download", action="store_true", help="let vLLM download a model that is missing")
    add(
        "--dry-run",
        action="store_true",
        help="check everything, show what would run, and start nothing",
    )
    add(
        "--log",
        type=Path,
        metavar="FILE",
        help="log file of vLLM (default: a file in the cache directory)",
    )
    add(
        "--patience",
        type=options.number(int, 1, 86400),
        metavar="SECONDS",
        help="time limit to become ready (default: the recipe's, or 1800), or for --health (10)",
    )
    add(
        "--health",
        nargs="?",
        const="",
        metavar="URL",
        help="only check whether this server, or the one of this machine, answers",
    )
    role = parser.add_mutually_exclusive_group()
    role.add_argument(
        "--ray-head",
        action="store_true",
        help="serve with other machines: start the Ray head here, and wait for them",
    )
    role.add_argument(
        "--ray-worker",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="serve with other machines: join the head at HOST:PORT",
    )
    add(
        "--nodes",
        type=options.number(int, 1, 64),
        metavar="N",
        help="machines that serve together (default: the recipe's)",
    )
    add(
        "--node-address",
        default="",
        metavar="ADDRESS",
        help="address of this machine on the shared network",
    )
    add(
        "--ray-port",
        type=options.number(int, 1, 65535),
        metavar="N",
        help="port of Ray on the head (default: 6379)",
    )


def serve(arguments: argparse.Namespace) -> int:
    """
    Serve until the user stops it, unless ``--health`` or ``--dry-run`` is given; return the exit
    code.
    """
    if arguments.health is not None:
        _health(arguments.health, arguments.patience or 10)
        return 0
    with Asked() as supervision:
        store, wish = options.store(arguments), _wish(arguments)
        current = default_prefix() / "current" / "bin" / "python"
        if not current.exists() and "VIRTUAL_ENV" in os.environ:
            current = Path(os.environ["VIRTUAL_ENV"], "bin", "python")
        python = arguments.python or current
        where = Where(python, config.root(arguments.root), arguments.log)
        run = _follow if wish.role == "worker" else _serve
        return run(store, wish, where, supervision, dry=arguments.dry_run)


def _health(url: str, patience: int) -> None:
    """
    Show whether the server answers.

    Raises:
        server-dead, server-stuck, node-lost: The server does not serve.
    """
    key = os.environ.get("VLLM_API_KEY", "")
    state = (
        health.of_server(url, patience, key)
        if url
        else health.of_machine(held.read(), patience, key)
    )
    where = f" at {state.url}" if state.url else ""
    console.document({"health": state})
    if failure := health.FAILURES.get(state.state):
        raise ServeError(
            failure,
            f"The server{where} does not serve: {state.state}.",
            details=[state.says],
            data=msgspec.to_builtins(state),
        )
    console.result(f"{state.state}: {state.says}{where}")


def _wish(arguments: argparse.Namespace) -> Wish:
    """
    Return the options; with ``--environment``, those not given come from the environment.

    Raises:
        UsageError: A worker has no address of a head.
        variable-refused: See `variables.told`.
    """
    below = variables.told(os.environ) if arguments.environment else Wish()
    role = "worker" if arguments.ray_worker is not None else "head" if arguments.ray_head else ""
    options: dict[str, Any] = {
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
    wish = msgspec.structs.replace(
        below,
        **{name: value for name, value in options.items() if value not in (None, "")},
        flags=(*below.flags, *arguments.flag),
        variables=dict(arguments.variable),
    )
    if role == "worker" and not wish.head:
        raise UsageError(
            "usage",
            "A worker needs the address of the head.",
            todo="Use --ray-worker ADDRESS, or RAY_ADDRESS with --environment.",
        )
    lost = [name for name in os.environ if name.startswith("VLLM_") and name not in wish.variables]
    if lost and not arguments.environment:
        console.warn(
            f"{', '.join(sorted(lost))} of this shell does not reach the server; use --variable "
            f"NAME=VALUE, or --environment for all"
        )
    return wish


def _serve(store: Store, wish: Wish, where: Where, supervision: Asked, *, dry: bool) -> int:
    ready = resolve.resolved(wish, where)
    log = (where.log or running.log_path(store, ready.name)).absolute()
    shown.show(ready, str(log))
    console.document(shown.document(ready, str(log)))
    if dry:
        for text in environments.changes(ready.environment):
            console.warn(f"the installed set was changed: {text}")
        if wish.role == "head":
            cluster.required(ready.environment)
        ports.check(wish.host, wish.port)
        room.check(ready.needs, ready.floor)
        return 0
    with held.held() as lock:
        start = together.lead if wish.role == "head" else running.serve
        return start(ready, lock, supervision, store, log)


def _follow(store: Store, wish: Wish, where: Where, supervision: Asked, *, dry: bool) -> int:
    environment = environments.examine(where.python)
    planned = recipes.load(where.root, wish.recipe).plan.floor if wish.recipe else None
    floors = (wish.floor, planned, resolve.floor(wish))
    floor = next(floor for floor in floors if floor is not None)
    log = (where.log or running.log_path(store, "ray-worker")).absolute()
    console.document(
        {
            "head": wish.head,
            "vllm": environment.vllm,
            "ray": environment.ray,
            "python": str(environment.python),
            "log": str(log),
        }
    )
    if dry:
        cluster.required(environment)
        cluster.parts(wish.head)
        return 0
    memory, patience = round(floor * resolve.GIB), wish.patience or resolve.PATIENCE
    with held.held() as lock:
        return together.follow(environment, wish, memory, lock, supervision, log, patience)
