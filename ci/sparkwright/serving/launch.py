"""
From a request to the command of the server: recipe, environment, model, flags and variables.

Several machines become one server by Ray's own processes, started from the environment that serves.
vLLM joins the cluster that ``RAY_ADDRESS`` names, waits up to half an hour until its machines have
the GPUs that it needs, and puts a part of the model on each.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from sparkwright.bench.model import modules
from sparkwright.bench.recipes import preflight as recipe_preflight
from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.recipes.recipe import Recipe
from sparkwright.bench.server.launch import (
    ALWAYS,
    PASSED,
    LaunchPlan,
    check_variables,
    read_variables,
)
from sparkwright.core.errors import UsageError
from sparkwright.core.process import wrap_with_limits
from sparkwright.serving import environment as environments
from sparkwright.serving import flags, models, preflight
from sparkwright.serving.environment import ServingEnvironment
from sparkwright.serving.errors import ServeError
from sparkwright.serving.models import LocalModel
from sparkwright.serving.preflight import GIB, Machine

#: Share of the memory that vLLM may take for a plain model: seed report 001 leaves a quarter.
SHARE = 0.75
#: Share of the memory that stays free for a plain model: 12 GiB of a Spark.
FLOOR = 0.1
#: Variable of a patch: GiB that vLLM leaves free when it sizes the KV cache.
RESERVE = "VLLM_MEMORY_RESERVE_GIB"
#: Bytes for objects that machines exchange. Ray's default is 30 % of the memory, which on a Spark
#: is the model's. Proposed.
OBJECT_STORE = 1 << 30
#: Seconds until Ray's head must listen.
RAY_PATIENCE = 60.0


class ServeRequest(msgspec.Struct, frozen=True):
    """
    What to serve, and how; a value that was not given is empty or None.

    Attributes:
        recipe: Its name.
        model: A folder, or a name in the model cache; with a recipe, where its checkpoint is.
        revision: Commit or branch of a model that is named.
        host, port: The address to listen on.
        name: The name under which the model is served.
        flags: Further arguments of ``vllm serve``.
        variables: Of the server's environment.
        floor: GiB that stay free.
        download: Whether vLLM may download the model.
        nodes: Machines that serve together, through Ray.
        address: Of this machine on the network of the nodes.
    """

    recipe: str = ""
    model: str = ""
    revision: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    name: str = ""
    flags: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    floor: float | None = None
    download: bool = False
    nodes: int | None = None
    address: str = ""


class ServingPlan(msgspec.Struct, frozen=True):
    """
    A server that can be started.

    Attributes:
        launch: Its program, arguments and variables.
        needed: GiB that it takes on this machine, as far as known.
        floor: GiB that stay free.
        nodes: Machines that serve together.
        warnings: Sentences for the user.
    """

    request: ServeRequest
    environment: ServingEnvironment
    recipe: Recipe | None
    model: LocalModel
    launch: LaunchPlan
    needed: float
    floor: float
    nodes: int
    warnings: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """The command line of the server."""
        return self.launch.command(self.request.port, self.request.host)

    def document(self) -> dict[str, Any]:
        """Return the plan for people and programs, without the values of secrets."""
        environment, marker = self.environment, self.environment.marker
        secrets = ("KEY", "TOKEN", "SECRET", "PASSWORD")
        return {
            "recipe": self.recipe.name if self.recipe else "",
            "vllm": environment.vllm,
            "python": str(environment.python),
            "release": marker.name if marker else "",
            "wheel": environment.wheel,
            "model": str(self.model.path),
            "commit": self.model.commit,
            "name": self.launch.name,
            "nodes": self.nodes,
            "command": self.command,
            "variables": {
                name: "(set)" if any(part in name for part in secrets) else value
                for name, value in sorted(self.launch.variables.items())
            },
            "needed_gib": round(self.needed, 1),
            "floor_gib": round(self.floor, 1),
            "warnings": self.warnings,
        }


def plan(
    request: ServeRequest,
    python: Path,
    root: Path,
    *,
    machine: Machine | None = None,
    head: bool = False,
) -> ServingPlan:
    """
    Return how *request* is served from the environment of *python*.

    Args:
        root: Of the reviewed data.
        machine: None for this one.
        head: Whether Ray is started here, so that several machines can serve together.

    Raises:
        UsageError: There is no model or no such recipe, or one machine cannot serve it alone.
        environment-unusable, file-invalid, model-missing, checkpoint-invalid: As the parts raise.
        recipe-unfit: The recipe does not know this vLLM.
        flag-unknown, variable-refused: The installed vLLM does not know a flag or variable.
        loader-missing: The package that ``--load-format`` needs is not installed.
        library-left-out: The wheel does not hold the library of a backend that is asked for.
        serve-unfit: As `preflight.check`.
    """
    machine = machine or Machine.here()
    recipe = recipes.load(root, request.recipe) if request.recipe else None
    name = _model_name(request, recipe)
    environment = environments.examine(python)
    nodes = request.nodes or (recipe.nodes if recipe else 1)
    recipe = replace(recipe, nodes=nodes) if recipe else None
    variables = _variables(request, recipe, environment)
    revision = _revision(request, recipe)
    model = models.find(name, revision, {**os.environ, **variables}, download=request.download)
    checkpoint = modules.audit(model.checkpoint) if model.checkpoint else None
    words = _flags(request, recipe, environment, nodes)
    copied = recipe_preflight.draft_head(flags.speculation(words), checkpoint)
    weights = (model.weights + copied) / GIB / nodes
    if machine.unified and not recipe and not flags.value(words, preflight.CACHE):
        cache = preflight.pinned_cache(words, machine, weights)
        words = (*words, f"{preflight.CACHE}={cache}") if cache else words
    if revision and not model.path.exists():
        words = (*words, f"--revision={revision}")
    parallel = flags.number(words, "--tensor-parallel-size") or 1
    if not head and (nodes > 1 or (machine.gpus and parallel > machine.gpus)):
        what = f"{request.recipe or request.model} needs more than this machine."
        raise UsageError("usage", what, todo="Start it with --ray-head and --nodes.")
    floor = FLOOR * machine.total if request.floor is None else request.floor
    if recipe:
        recipe = _with_overrides(recipe, words, request.floor)
        floor = recipe.plan.floor
    if machine.unified and RESERVE in read_variables(environment.package):
        variables = {RESERVE: f"{floor:g}", **variables}
    advice = preflight.check(
        words,
        machine,
        recipe=recipe,
        checkpoint=checkpoint,
        weights=weights,
        floor=floor,
        vllm=environment.vllm,
    )
    needed = weights + (flags.number(words, preflight.CACHE) or 0.0) / GIB
    if recipe:
        needed = (weights or recipe.plan.weights) + recipe.plan.cache + recipe.plan.reserve
    if not machine.shared:
        needed = 0.0
    launch = LaunchPlan(
        python.absolute(),
        model.path,
        words,
        variables,
        request.name or (recipe.name if recipe else Path(name).name) or "model",
    )
    warnings = (*advice, *_provenance(recipe, environment, head=head))
    return ServingPlan(request, environment, recipe, model, launch, needed, floor, nodes, warnings)


def _model_name(request: ServeRequest, recipe: Recipe | None) -> str:
    own = recipe.model.repository if recipe and recipe.model.repository != "any" else ""
    if name := request.model or own:
        return name
    what = f"{recipe.name} needs a model." if recipe else "There is no model to serve."
    todo = "Name a recipe or a model (--model; in a container: RECIPE or MODEL)."
    raise UsageError("usage", what, todo=todo)


def _revision(request: ServeRequest, recipe: Recipe | None) -> str:
    """Return the commit or branch to serve; empty for the one that was downloaded last."""
    if request.revision or recipe is None or recipe.model.revision == "unresolved":
        return request.revision
    own = request.model in ("", recipe.model.repository)
    return recipe.model.revision if own else ""


def _variables(
    request: ServeRequest, recipe: Recipe | None, environment: ServingEnvironment
) -> dict[str, str]:
    own = recipe.variant(environment.vllm).variables if recipe else {}
    derived = {"VLLM_HOST_IP": request.address, "HF_HUB_OFFLINE": "0" if request.download else ""}
    variables = {**own, **request.variables, **{name: v for name, v in derived.items() if v}}
    check_variables(variables, environment.package)
    return variables


def _flags(
    request: ServeRequest, recipe: Recipe | None, environment: ServingEnvironment, nodes: int
) -> tuple[str, ...]:
    if recipe:
        below = recipe.flags(environment.vllm)
    else:
        share = [f"--gpu-memory-utilization={SHARE:g}"]
        pinned = flags.value(request.flags, preflight.CACHE)
        ray = [f"--tensor-parallel-size={nodes}", "--distributed-executor-backend=ray"]
        below = (*([] if pinned else share), *(ray if nodes > 1 else []))
    words = flags.merge(below, request.flags)
    flags.check(words, environment)
    return words


def _with_overrides(recipe: Recipe, words: tuple[str, ...], floor: float | None) -> Recipe:
    """Return *recipe* with the memory plan that the arguments *words* state."""
    cache = flags.number(words, preflight.CACHE)
    length = flags.number(words, "--max-model-len")
    values = {
        "gpu_memory_utilization": flags.number(words, "--gpu-memory-utilization"),
        "cache": cache and cache / GIB,
        "max_model_len": length and int(length),
        "floor": floor,
    }
    overrides = {name: value for name, value in values.items() if value is not None}
    return replace(recipe, plan=replace(recipe.plan, **overrides))


def _provenance(
    recipe: Recipe | None, environment: ServingEnvironment, *, head: bool
) -> Iterator[str]:
    """Yield what was not shown for this wheel or recipe."""
    marker = environment.marker
    if marker is None:
        yield (
            f"vLLM {environment.vllm} was not installed by sparkwright, so there is no "
            "evidence about it"
        )
    elif marker.channel != "verified":
        yield f"{marker.name} is a {marker.channel}: not every gate passed"
    # A head starts Ray itself, and says what the other machines start.
    if recipe and recipe.before and not head:
        yield f"do this before the start: {recipe.before}"


# Ray.


def ray_variables(overrides: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of Ray's processes, which the parts of vLLM on a machine inherit."""
    network = ("RAY_", "NCCL_", "GLOO_", "UCX_")
    passed = {
        name: value
        for name, value in os.environ.items()
        if name in PASSED or name.startswith(network)
    }
    everything = {**passed, **ALWAYS, "RAY_USAGE_STATS_ENABLED": "0", **overrides}
    return {name: value for name, value in everything.items() if value}


def ray_command(environment: ServingEnvironment, *options: str) -> list[str]:
    """
    Return the command line that starts Ray on this machine, and stays as long as it runs.

    Raises:
        ray-missing: The environment has no Ray.
    """
    if not environment.ray:
        what = f"There is no Ray in the environment of {environment.python}."
        raise ServeError("ray-missing", what)
    program = [str(environment.python), "-P", "-m", "ray.scripts.scripts", "start", "--block"]
    return [*program, "--disable-usage-stats", f"--object-store-memory={OBJECT_STORE}", *options]


def start_ray_head(words: list[str], host: str, port: int, settings: Mapping[str, str]) -> None:
    """
    Start the head with the command line *words*; it ends with the thread that called this, also
    when that has become another program (exec).

    Raises:
        ray-failed: It ended, or does not listen within `RAY_PATIENCE`.
    """
    head = subprocess.Popen(
        wrap_with_limits(words),
        env=ray_variables(settings),
        stdin=subprocess.DEVNULL,
        stdout=2,  # its words are messages, not results
        start_new_session=True,
    )
    end = time.monotonic() + RAY_PATIENCE
    while head.poll() is None and time.monotonic() < end:
        with (
            contextlib.suppress(OSError, UnicodeError),
            socket.create_connection((host, port), timeout=3),
        ):
            return
        time.sleep(0.2)
    head.terminate()
    raise ServeError("ray-failed", f"Ray's head does not listen at {host}:{port}.")
