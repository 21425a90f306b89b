"""
From a request to the command of the server: recipe, environment, model, flags and variables.

Several machines become one server by vLLM's own processes (``--nnodes``), or over a cluster of Ray
that the user started, if the flags say so.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from sparkwright.bench.model import modules
from sparkwright.bench.model.modules import ModuleAudit
from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.recipes.recipe import Recipe
from sparkwright.bench.server import warm_pack
from sparkwright.bench.server.launch import LaunchPlan, check_variables, shared_variables
from sparkwright.core.arguments import SECRET, redact
from sparkwright.core.errors import UsageError
from sparkwright.core.memory import AUTOTUNE, GIB, CacheShape, MachineMemory, ServerMemory
from sparkwright.core.process import cache_variables
from sparkwright.serving import environment as environments
from sparkwright.serving import flags, models, peers, preflight, warm_start
from sparkwright.serving.environment import ServingEnvironment
from sparkwright.serving.models import LocalModel

#: Flags that spread a model over GPUs, and the share of the memory that must be free.
TENSOR, PIPELINE = "--tensor-parallel-size", "--pipeline-parallel-size"
EXECUTOR, HOSTS = "--distributed-executor-backend", "--nnodes"
#: Fields of a config with numbers that tensor parallelism divides, and with those of experts.
DIVIDED = (
    "num_attention_heads", "linear_num_key_heads", "linear_num_value_heads", "intermediate_size",
)  # fmt: skip
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
SHARE = "--gpu-memory-utilization"
#: Flags with the GiB that vLLM takes of the host's memory beside what is the GPU's.
OFFLOADED = ("--kv-offloading-size", "--cpu-offload-gb")
#: Argument of vLLM → what decides it, if it is neither the user nor the recipe.
DECIDED = {
    **dict.fromkeys((preflight.CACHE, SHARE), "memory"),
    **dict.fromkeys((TENSOR, PIPELINE, EXECUTOR, HOSTS, *peers.PLACE), "machines"),
    "--revision": "model",
}


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
        nodes: Machines that serve together.
        address: Of this machine on the network of the nodes.
        join: Address of the first machine there; empty if this is the first.
        rank: Of this machine among those that join. *node_port*: where the first one waits.
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
    join: str = ""
    rank: int = 1
    node_port: int = 29501


class ServingPlan(msgspec.Struct, frozen=True):
    """
    A server that can be started.

    Attributes:
        launch: Its program, arguments and variables.
        memory: What it takes of *machine*, as far as known.
        nodes: Machines that serve together.
        together: Whether they do so by vLLM's own processes, started by this program.
        warm: The folder with the copy of a warm pack that it starts from; None without one.
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
    together: bool
    warm: Path | None
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
            "warm": str(self.warm or ""),
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
) -> ServingPlan:
    """
    Return how *request* is served from the environment of *python*.

    Args:
        root: Of the reviewed data.
        machine: None for this one.

    Raises:
        UsageError: There is no model or no such recipe, or the machines cannot serve it.
        address-missing: This machine has not the address that is given for it.
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
    nodes = request.nodes or max(recipe.nodes if recipe else 1, 2 if request.join else 1)
    recipe = replace(recipe, nodes=nodes) if recipe else None
    # Users may know better: they start Ray, or set all of vLLM's own flags.
    own = flags.value(request.flags, EXECUTOR) == "ray" or flags.value(request.flags, HOSTS)
    together = nodes > 1 and not own
    variables = _variables(request, recipe, environment)
    revision = _revision(request, recipe)
    download = request.download or request.dry_run
    model = models.find(name, revision, {**os.environ, **variables}, download=download)
    config = modules.text_config(model.checkpoint.config) if model.checkpoint else {}
    words = _flags(request, recipe, environment, nodes, config)
    if revision and not model.path.exists():
        words = (*words, f"--revision={revision}")
    if together:
        words = flags.merge(_places(request, nodes), words)
    tensor = _check_parts(request, words, machine, nodes, together=together)
    audit = modules.audit(model.checkpoint) if model.checkpoint else None
    memory = _memory(request, recipe, words, machine, model, audit)
    drafts = _drafts(request, words, variables) / GIB / tensor
    memory = replace(memory, weights=memory.weights + drafts)
    start = LaunchPlan(python, model.path, words, variables)
    pack, note = warm_start.choose(environment, recipe, start, make=not request.dry_run)
    warm = warm_pack.overlay(environment.prefix.resolve(), pack) if pack else None
    if pack and warm:
        variables = {**cache_variables(warm), **variables}
        # What is tuned before the cache is there, or not at all, needs no room beside it.
        memory = replace(memory, autotune=0.0 if pack.tables else memory.autotune)
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
    warnings = (*advice, *_provenance(recipe, environment), *([note] if note else []))
    return ServingPlan(
        request,
        environment,
        recipe,
        model,
        launch,
        memory.settled(machine),
        machine,
        nodes,
        together,
        warm,
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
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if request.address else ()
    links = dict.fromkeys(names, peers.interface(request.address) if names else "")
    variables = {**links, **request.shell, **own, **request.variables, **given}
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
        pipeline = flags.number(request.flags, PIPELINE)
        tensor = flags.number(request.flags, TENSOR) or (
            max(1, nodes // pipeline) if pipeline else _tensor(words, config, nodes)
        )
        pipeline = pipeline or max(1, nodes // tensor)
        parts = [f"{TENSOR}={tensor:.0f}", f"{EXECUTOR}=mp"]
        parts += [f"{PIPELINE}={pipeline:.0f}"] if pipeline > 1 else []
        words = flags.merge(words, parts)
    words = flags.merge(words, request.flags)
    flags.check(words, environment)
    return words


def _tensor(words: tuple[str, ...], config: Mapping[str, Any], nodes: int) -> int:
    """Return over how many of *nodes* the layers of a model with *config* can be divided."""
    alone = flags.value(words, "--enable-expert-parallel") or "--enable-expert-parallel" in words
    names = (*DIVIDED, *(EXPERTS if alone else ("moe_intermediate_size",)))
    counts = [config[name] for name in names if isinstance(config.get(name), int)]
    keys = config.get("num_key_value_heads") or 1
    for tensor in range(nodes, 1, -1):
        divided = not any(count % tensor for count in (nodes, *counts))
        # Fewer heads of keys than parts are copied.
        if divided and not (keys % tensor and tensor % keys):
            return tensor
    return 1


def _places(request: ServeRequest, nodes: int) -> list[str]:
    """
    Return vLLM's own arguments for the place of this machine among *nodes*.

    Raises:
        UsageError: Its address is not given.
    """
    if not request.address:
        what = f"{request.recipe or request.model} is served by {nodes} machines."
        todo = (
            "Start it on each, with --node-address and that machine's address on their network, "
            "and on all but the first with --join and the first one's address."
        )
        raise UsageError("usage", what, todo=todo)
    rank, first = (request.rank, request.join) if request.join else (0, request.address)
    # vLLM's processes meet at the port behind the one where the machines do.
    places = [f"--node-rank={rank}", f"--master-addr={first}"]
    places += [f"{HOSTS}={nodes}", f"--master-port={request.node_port + 1}"]
    return places + ["--headless"] * (rank > 0)


def _check_parts(
    request: ServeRequest,
    words: tuple[str, ...],
    machine: MachineMemory,
    nodes: int,
    *,
    together: bool,
) -> int:
    """
    Return over how many GPUs *words* divide each layer.

    Raises:
        UsageError: There are too few GPUs, or vLLM cannot spread the parts over the machines.
    """
    names = (TENSOR, PIPELINE, HOSTS)
    tensor, pipeline, hosts = (int(flags.number(words, name) or 1) for name in names)
    parts, gpus = tensor * pipeline, max(1, machine.gpus) * max(nodes, hosts)
    name = request.recipe or request.model
    if machine.gpus and parts > gpus:
        what = f"{name} needs {parts} GPUs, and there are {gpus}."
        raise UsageError("usage", what, todo="Take more machines (--nodes), or fewer parts.")
    if together and parts % nodes:
        what = f"{tensor} x {pipeline} parts of {name} do not divide over {nodes} machines."
        raise UsageError("usage", what, todo=f"Change {TENSOR}, {PIPELINE} or --nodes.")
    return tensor


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
    offloaded = sum(flags.number(words, name) or 0.0 for name in OFFLOADED) if machine.shared else 0
    cache, length = flags.number(words, preflight.CACHE), flags.value(words, "--max-model-len")
    return replace(
        server,
        reserve=server.reserve + offloaded,
        cache=cache / GIB if cache else server.cache,
        share=flags.number(words, SHARE),
        # None and auto leave the length to vLLM.
        length=int(flags.number(words, "--max-model-len") or 0) if length else server.length,
        shape=server.shape if server.shape.token else shape,
    )


def _provenance(recipe: Recipe | None, environment: ServingEnvironment) -> Iterator[str]:
    """Yield what was not shown for this wheel or recipe."""
    marker = environment.marker
    if marker is None:
        yield (
            f"vLLM {environment.vllm} was not installed by sparkwright, so there is no "
            "evidence about it"
        )
    elif marker.channel != "verified":
        yield f"{marker.name} is a {marker.channel}: not every gate passed"
    # Of several machines it is for measuring, which needs Ray.
    if recipe and recipe.before and recipe.nodes == 1:
        yield f"do this before the start: {recipe.before}"
