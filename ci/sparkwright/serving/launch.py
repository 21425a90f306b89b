"""
From a request to the command of the server: recipe, environment, model, flags and variables.

Several machines become one server by Ray's own processes, started from the environment that serves.
vLLM joins the cluster that ``RAY_ADDRESS`` names, waits up to half an hour until its machines have
the GPUs that it needs, and puts a part of the model on each.
"""

from __future__ import annotations

import contextlib
import difflib
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
from sparkwright.bench.model.modules import ModuleAudit
from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.recipes.recipe import Recipe
from sparkwright.bench.server.launch import (
    ALWAYS,
    PASSED,
    LaunchPlan,
    check_variables,
    shared_variables,
)
from sparkwright.core.arguments import SECRET, redact
from sparkwright.core.errors import UsageError
from sparkwright.core.memory import AUTOTUNE, GIB, CacheShape, MachineMemory, ServerMemory
from sparkwright.core.process import wrap_with_limits
from sparkwright.serving import environment as environments
from sparkwright.serving import flags, models, preflight
from sparkwright.serving.environment import ServingEnvironment
from sparkwright.serving.errors import ServeError
from sparkwright.serving.models import LocalModel

#: Flags that spread a model over GPUs, and the share of the memory that must be free.
TENSOR, PIPELINE = "--tensor-parallel-size", "--pipeline-parallel-size"
SHARE = "--gpu-memory-utilization"
#: Argument of vLLM → what decides it, if it is neither the user nor the recipe.
DECIDED = {
    **dict.fromkeys((preflight.CACHE, SHARE), "memory"),
    **dict.fromkeys((TENSOR, PIPELINE, "--distributed-executor-backend"), "machines"),
    "--revision": "model",
}
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
        shell: Variables of the user's shell, for which a recipe may have others.
        download: Whether vLLM may download the model. *dry_run*: nothing is started.
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
    shell: dict[str, str] = {}
    download: bool = False
    dry_run: bool = False
    nodes: int | None = None
    address: str = ""


class ServingPlan(msgspec.Struct, frozen=True):
    """
    A server that can be started.

    Attributes:
        launch: Its program, arguments and variables.
        memory: What it takes of *machine*, as far as known.
        nodes: Machines that serve together.
        warnings: Sentences for the user.
    """

    request: ServeRequest
    environment: ServingEnvironment
    recipe: Recipe | None
    model: LocalModel
    launch: LaunchPlan
    memory: ServerMemory
    machine: MachineMemory
    nodes: int
    warnings: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """The command line of the server."""
        return self.launch.command(self.request.port, self.request.host)

    def document(self) -> dict[str, Any]:
        """Return the plan for people and programs, without the values of secrets."""
        environment, marker = self.environment, self.environment.marker
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
            "command": redact(self.command),
            "variables": {
                name: "(set)" if SECRET.search(name) else redact([value])[0]
                for name, value in sorted(self.launch.variables.items())
            },
            "memory": self.memory.text(self.machine),
            "needed_gib": round(self.memory.needed, 1),
            "floor_gib": round(self.memory.floor, 1),
            "warnings": self.warnings,
        }

    def decisions(self) -> Iterator[tuple[str, str]]:
        """Yield what decided each argument of vLLM, and the argument."""
        words = self.recipe.flags(self.environment.vllm) if self.recipe else ()
        stated = {argument.name: argument.value for argument in flags.parse(words)}
        own = {argument.name for argument in flags.parse(self.request.flags)}
        for argument in flags.parse(self.launch.flags):
            origin, text = DECIDED.get(argument.name, "recipe"), " ".join(redact(argument.words))
            if argument.name in own:
                other = stated.get(argument.name, argument.value)
                origin, text = "you", text + f" (recipe: {other})" * (other != argument.value)
            yield origin, text


def plan(
    request: ServeRequest,
    python: Path,
    root: Path,
    *,
    machine: MachineMemory | None = None,
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
        serve-unfit, memory-held: As `preflight.check`.
    """
    machine = machine or MachineMemory.here()
    recipe = find_recipe(root, request.recipe) if request.recipe else None
    name = _model_name(request, recipe)
    environment = environments.examine(python)
    nodes = request.nodes or (recipe.nodes if recipe else 1)
    recipe = replace(recipe, nodes=nodes) if recipe else None
    variables = _variables(request, recipe, environment)
    revision = _revision(request, recipe)
    download = request.download or request.dry_run
    model = models.find(name, revision, {**os.environ, **variables}, download=download)
    config = modules.text_config(model.checkpoint.config) if model.checkpoint else {}
    words = _flags(request, recipe, environment, nodes, config)
    if revision and not model.path.exists():
        words = (*words, f"--revision={revision}")
    names = (TENSOR, PIPELINE, "--nnodes")
    tensor, pipeline, hosts = (int(flags.number(words, name) or 1) for name in names)
    gpus = max(1, machine.gpus) * (nodes if head else hosts)
    if (nodes > 1 and not head) or (machine.gpus and tensor * pipeline > gpus):
        name, parts = request.recipe or request.model, max(nodes, tensor * pipeline)
        what = f"{name} needs {parts} GPUs, and there are {gpus}."
        raise UsageError("usage", what, todo="Start it with --ray-head and --nodes.")
    audit = modules.audit(model.checkpoint) if model.checkpoint else None
    memory = _memory(request, recipe, words, machine, model, audit)
    drafts = _drafts(request, words, variables) / GIB / tensor
    memory = replace(memory, weights=memory.weights + drafts)
    variables = {**shared_variables(machine, memory.floor, environment.package), **variables}
    words = flags.merge(memory.flags(machine), words)
    advice = preflight.check(
        words, machine, memory, recipe=recipe, checkpoint=audit, vllm=environment.vllm
    )
    if not memory.weights:
        advice.append("its size is not known before the download, so its cache is small")
    launch = LaunchPlan(
        python.absolute(),
        model.path,
        words,
        variables,
        request.name or (recipe.name if recipe else Path(name).name) or "model",
    )
    if not (request.download or model.path.exists()):
        advice.append("the model is not on this machine: --download lets vLLM fetch it")
    if machine.failure:
        advice.append(f"nvidia-smi fails: {machine.failure}")
    warnings = (*advice, *_provenance(recipe, environment, head=head))
    return ServingPlan(
        request,
        environment,
        recipe,
        model,
        launch,
        memory.settled(machine),
        machine,
        nodes,
        warnings,
    )


def find_recipe(root: Path, text: str) -> Recipe:
    """
    Return the recipe of the repository at *root* with the name *text*, or else the only one of
    which that is a part: of its name, or of its model's.

    Raises:
        UsageError: There is none, or more than one.
    """
    with contextlib.suppress(UsageError):
        return recipes.load(root, text)
    offered = {name: recipes.load(root, name) for name in recipes.names(root)}
    part = text.casefold().rpartition("/")[2]
    fitting = [n for n in offered if part in f"{n} {offered[n].model.repository.casefold()}"]
    if len(fitting) == 1:
        return offered[fitting[0]]
    names = fitting or difflib.get_close_matches(part, offered, 3, 0.5)
    todo = "Name one of these." if names else f"Choose from: {', '.join(offered)}."
    if "/" in text and not fitting:
        todo += f" Without a recipe: sparkwright serve --model {text:.200}"
    details = [f"{name}: {offered[name].title}" for name in names]
    what = f"{len(fitting) or 'No'} recipes are for {text!r:.80}."
    raise UsageError("usage", what, details=details, todo=todo)


def _model_name(request: ServeRequest, recipe: Recipe | None) -> str:
    own = recipe.model.repository if recipe and recipe.model.repository != "any" else ""
    if name := request.model or own:
        return name
    what = f"{recipe.name} needs a model." if recipe else "There is no model to serve."
    todo = "Name a recipe or a model (--model; in a container: RECIPE or MODEL)."
    raise UsageError("usage", what, todo=todo)


def _drafts(request: ServeRequest, words: tuple[str, ...], variables: Mapping[str, str]) -> int:
    """
    Return the bytes of the model that drafts, if it is another than the one that is served.

    Raises:
        model-missing, checkpoint-invalid: As `models.find`.
    """
    name = str(flags.speculation(words).get("model") or "")
    if not name or name == request.model:
        return 0
    places, download = {**os.environ, **variables}, request.download or request.dry_run
    return models.find(name, "", places, download=download).weights


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
    given = {name: value for name, value in derived.items() if value}
    variables = {**request.shell, **own, **request.variables, **given}
    check_variables(variables, environment.package)
    return variables


def _flags(
    request: ServeRequest,
    recipe: Recipe | None,
    environment: ServingEnvironment,
    nodes: int,
    config: Mapping[str, Any],
) -> tuple[str, ...]:
    """Return the arguments of vLLM, without those of its memory, of a model with *config*."""
    words = recipe.flags(environment.vllm) if recipe else ()
    if nodes > 1:
        heads = config.get("num_attention_heads") or nodes
        pipeline = flags.number(request.flags, PIPELINE) or (nodes if heads % nodes else 1)
        tensor = flags.number(request.flags, TENSOR) or max(1, nodes // pipeline)
        parts = [f"{TENSOR}={tensor:.0f}", "--distributed-executor-backend=ray"]
        parts += [f"{PIPELINE}={pipeline:.0f}"] if pipeline > 1 else []
        words = flags.merge(words, parts)
    words = flags.merge(words, request.flags)
    flags.check(words, environment)
    return words


def _memory(
    request: ServeRequest,
    recipe: Recipe | None,
    words: tuple[str, ...],
    machine: MachineMemory,
    model: LocalModel,
    audit: ModuleAudit | None,
) -> ServerMemory:
    """Return what a server with the arguments *words* takes of each GPU, without a drafter."""
    tensor = int(flags.number(words, TENSOR) or 1)
    parts = tensor * (flags.number(words, PIPELINE) or 1)
    speculation = flags.speculation(words)
    drafting = "mtp" in str(speculation.get("method"))
    weights = (audit.loaded(speculation) if audit else model.weights) / GIB / parts
    config = modules.text_config(model.checkpoint.config) if model.checkpoint else {}
    drafts = int(drafting or bool(speculation.get("model")))
    shape = CacheShape.of(config, flags.value(words, "--kv-cache-dtype"), tensor, drafts)
    server = ServerMemory(
        weights,
        autotune=AUTOTUNE if machine.gpus else 0.0,
        length=int(config.get("max_position_embeddings") or 0),
        floor=machine.floor(request.floor),
        pinned=machine.unified,
    )
    if recipe:
        server = recipe.memory(machine)
        floor = server.floor if request.floor is None else machine.floor(request.floor)
        server = replace(server, weights=weights or server.weights, floor=floor)
    cache, length = flags.number(words, preflight.CACHE), flags.value(words, "--max-model-len")
    return replace(
        server,
        cache=cache / GIB if cache else server.cache,
        share=flags.number(words, SHARE),
        # None and auto leave the length to vLLM.
        length=int(flags.number(words, "--max-model-len") or 0) if length else server.length,
        shape=server.shape if server.shape.token else shape,
    )


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
