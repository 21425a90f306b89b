"""
From a request to the command of the server: recipe, environment, model, flags and variables.

Several machines become one server by vLLM's own processes (``--nnodes``), or over a cluster of Ray
that the user started, if the flags say so.
"""

import contextlib
import difflib
import os
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from sparkwright.bench.model import modules
from sparkwright.bench.model.checkpoint import model_digest
from sparkwright.bench.model.modules import ModuleAudit
from sparkwright.bench.recipes import preflight, recipe as recipes
from sparkwright.bench.recipes.preflight import CACHE
from sparkwright.bench.recipes.recipe import Recipe
from sparkwright.bench.records import Reason
from sparkwright.bench.server import flags, peers
from sparkwright.bench.server.launch import LaunchPlan, check_variables, shared_variables
from sparkwright.bench.server.peers import EXECUTOR, HOSTS, PLACE, Machines
from sparkwright.client.environment import PACKS
from sparkwright.client.records import WarmPack
from sparkwright.core import memory
from sparkwright.core.arguments import SECRET, redact
from sparkwright.core.errors import StoreError, UsageError
from sparkwright.core.memory import GIB, CacheShape, MachineMemory, ServerMemory
from sparkwright.core.process import CACHES, cache_variables
from sparkwright.serving import ServeError, environment as environments, models
from sparkwright.serving.environment import ServingEnvironment
from sparkwright.serving.models import LocalModel

#: Flags that spread a model over GPUs, and the share of the memory that must be free.
TENSOR, PIPELINE = "--tensor-parallel-size", "--pipeline-parallel-size"
DATA = "--data-parallel-size"
#: Fields of a config with numbers that tensor parallelism divides, and with those of experts.
DIVIDED = (
    "num_attention_heads", "linear_num_key_heads", "linear_num_value_heads", "intermediate_size",
)  # fmt: skip
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
SHARE = "--gpu-memory-utilization"
#: Flags with the GiB that vLLM takes of the host's memory beside what is the GPU's.
OFFLOADED = ("--kv-offloading-size", "--cpu-offload-gb")
#: Variable of a server that holds its `RunningServer`, as JSON.
RECORD = "SPARKWRIGHT_SERVER"
#: Differences that a line names.
SHOWN = 3
#: Argument of vLLM → what decides it, if it is neither the user nor the recipe.
DECIDED = {
    **dict.fromkeys((CACHE, SHARE), "memory"),
    **dict.fromkeys((TENSOR, PIPELINE, EXECUTOR, HOSTS, *PLACE), "machines"),
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
    warm: Path | None
    warnings: tuple[str, ...]

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
            "command": redact(self.launch.command(self.request.port, self.request.host)),
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
    options: Collection[str] = (),
) -> ServingPlan:
    """
    Return how *request* is served from the environment of *python*.

    Args:
        root: Of the reviewed data.
        machine: None for this one.
        options: Those of `serve`, as of `ServingEnvironment.check`.

    Raises:
        UsageError: There is no model or no such recipe, or the machines cannot serve it.
        address-missing: This machine has not the address that is given for it.
        environment-unusable, file-invalid, model-missing, checkpoint-invalid: As the parts raise.
        recipe-unfit: The recipe does not know this vLLM.
        flag-unknown: As `ServingEnvironment.check`.
        variable-refused: The installed vLLM does not know a variable.
        serve-unfit: A rule of `preflight` is broken.
        memory-held: Nothing else is wrong, and running programs hold too much.
    """
    machine = machine or MachineMemory.here()
    recipe = find_recipe(root, request.recipe) if request.recipe else None
    name, revision = _model(request, recipe)
    environment = environments.examine(python)
    nodes = request.nodes or max(recipe.nodes if recipe else 1, 2 if request.join else 1)
    machines = None
    if nodes > 1 and not peers.taken_over(request.flags):
        rank = request.rank if request.join else 0
        machines = Machines(nodes, request.address, request.join, rank, request.node_port)
    variables = _variables(request, recipe, environment, machines)
    download = request.download or request.dry_run
    model = models.find(name, revision, {**os.environ, **variables}, download=download)
    config = modules.text_config(model.checkpoint.config) if model.checkpoint else {}
    words = _flags(request, recipe, environment, nodes, config)
    environment.check(flags.merge(words, request.flags), options)
    if machines:
        words = flags.merge(words, machines.words())
    words = flags.merge(words, request.flags)
    if revision and not model.path.exists():
        words = (*words, f"--revision={revision}")
    parts = _parts(words, machine, machines, nodes, request.recipe or name)
    audit = modules.audit(model.checkpoint) if model.checkpoint else None
    server = _memory(request, recipe, words, machine, model, audit, parts, environment.vllm)
    drafts = _drafts(request, words, variables) / GIB / (flags.number(words, TENSOR) or 1)
    server = msgspec.structs.replace(server, weights=server.weights + drafts)
    start = LaunchPlan(python, model.path, words, variables)
    pack, warm, note = _choose_pack(environment, recipe, start, make=not request.dry_run)
    if pack and warm:
        variables = {**cache_variables(warm), **variables}
        # Tuning that a pack makes needless takes no memory beside the cache.
        server = msgspec.structs.replace(server, autotune=0.0 if pack.tables else server.autotune)
    variables = {**shared_variables(machine, server.floor, environment.package), **variables}
    words = flags.merge(server.flags(machine), words)
    faults = preflight.rules(
        words, server, machine, recipe=recipe, checkpoint=audit, vllm=environment.vllm
    )
    if faults:
        raise _refusal(faults, recipe, server, machine)
    launch = LaunchPlan(
        python.absolute(),
        model.path,
        words,
        variables,
        request.name or (recipe.name if recipe else Path(name).name) or "model",
        machines=machines,
    )
    return ServingPlan(
        request,
        environment,
        recipe,
        model,
        launch,
        server.settled(machine),
        machine,
        nodes,
        warm,
        (*_warnings(request, recipe, environment, server, model, machine), *filter(None, [note])),
    )


def model_of(request: ServeRequest, root: Path) -> LocalModel:
    """
    Return the model of *request* on this machine.

    Raises:
        UsageError, model-missing, checkpoint-invalid: As `plan`.
    """
    recipe = find_recipe(root, request.recipe) if request.recipe else None
    return models.find(*_model(request, recipe), {**os.environ, **request.variables})


def _refusal(
    faults: Sequence[Reason], recipe: Recipe | None, server: ServerMemory, machine: MachineMemory
) -> ServeError:
    """Return the error for a *server* with *faults*, and remedies of its memory."""
    lines = preflight.lines(faults)
    lines += [remedy.text for remedy in memory.remedies(server, machine)]
    if {fault.reference for fault in faults} == {"memory-held"}:
        lines += [f"process {t.pid}, {t.name}: {t.gib:.1f} GiB" for t in machine.tenants]
        return ServeError(
            "memory-held", "There is not enough free memory for the server.", details=lines
        )
    return ServeError(
        "serve-unfit",
        f"{recipe.name if recipe else 'The model'} cannot be served here with these flags.",
        details=lines,
    )


def _warnings(
    request: ServeRequest,
    recipe: Recipe | None,
    environment: ServingEnvironment,
    server: ServerMemory,
    model: LocalModel,
    machine: MachineMemory,
) -> Iterator[str]:
    """Yield what the user should know before the start, and what was not shown for this wheel."""
    if recipe and request.recipe != recipe.name:
        yield f"{request.recipe}: the recipe {recipe.name}, of {recipe.model.repository}"
    if not server.weights:
        yield "its size is not known before the download, so its cache is small"
    if not (request.download or model.path.exists()):
        yield "the model is not on this machine: --download lets vLLM fetch it"
    if machine.failure:
        yield f"nvidia-smi fails: {machine.failure}"
    marker = environment.marker
    if marker is None:
        yield f"vLLM {environment.vllm} is no release of sparkwright: there is no evidence about it"
    elif marker.channel != "verified":
        yield f"{marker.name} is a {marker.channel}: not every gate passed"


def find_recipe(root: Path, text: str) -> Recipe:
    """
    Return the recipe of the repository at *root* with the name *text*, or else the only one whose
    model has that id, or whose name it is a part of.

    Raises:
        UsageError: There is none, or more than one.
    """
    with contextlib.suppress(UsageError):
        return recipes.load(root, text)
    offered = {name: recipes.load(root, name) for name in recipes.names(root)}
    part = text.casefold().rpartition("/")[2]
    fitting, same = list[str](), list[str]()
    for name, recipe in offered.items():
        repository = recipe.model.repository.casefold()
        if part in f"{name} {repository}":
            fitting.append(name)
        if repository == text.casefold():
            same.append(name)
    # Another owner's repository of that name is another checkpoint.
    if len(same) == 1 or (len(fitting) == 1 and "/" not in text):
        return offered[(same or fitting)[0]]
    names = same or fitting or difflib.get_close_matches(part, offered, 3, 0.5)
    todo = "Name one of the recipes." if names else f"Choose from: {', '.join(offered)}."
    if "/" in text and not same:
        todo += f" Without a recipe: sparkwright serve --model {text:.200}"
    raise UsageError(
        "usage",
        f"No recipe is for {text!r:.80} alone.",
        details=[f"{name}, of {offered[name].model.repository}" for name in names],
        todo=todo,
    )


def _model(request: ServeRequest, recipe: Recipe | None) -> tuple[str, str]:
    """
    Return the folder or name of the model, and the commit or branch of a name; empty for the one
    that was downloaded last.
    """
    name, revision = request.model, request.revision
    if recipe and name in ("", recipe.model.repository) and recipe.model.repository != "any":
        name = recipe.model.repository
        if not revision and recipe.model.revision != "unresolved":
            revision = recipe.model.revision
    if not name:
        raise UsageError(
            "usage",
            f"{recipe.name} needs a model." if recipe else "There is no model to serve.",
            todo="Name a recipe, or a model with --model.",
        )
    return name, revision


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


def _variables(
    request: ServeRequest,
    recipe: Recipe | None,
    environment: ServingEnvironment,
    machines: Machines | None,
) -> dict[str, str]:
    """Return the variables of the server beside those of its memory."""
    variables = machines.variables() if machines and machines.address else {}
    variables |= request.shell
    if recipe:
        variables |= recipe.variant(environment.vllm).variables
    variables |= request.variables
    if request.address:
        variables["VLLM_HOST_IP"] = request.address
    if request.download:
        variables["HF_HUB_OFFLINE"] = "0"
    check_variables(variables, environment.package)
    return variables


def _flags(
    request: ServeRequest,
    recipe: Recipe | None,
    environment: ServingEnvironment,
    nodes: int,
    config: Mapping[str, Any],
) -> tuple[str, ...]:
    """
    Return the arguments of vLLM for a model with *config* on *nodes*, without the user's own and
    those of its memory.
    """
    words = recipe.flags(environment.vllm) if recipe else ()
    both = flags.merge(words, request.flags)
    tensor = int(flags.number(request.flags, TENSOR) or 0)
    pipeline = int(flags.number(request.flags, PIPELINE) or 0)
    if nodes == 1 or (recipe and nodes == recipe.nodes and not tensor and not pipeline):
        return words
    tensor = tensor or (max(1, nodes // pipeline) if pipeline else _tensor(both, config, nodes))
    pipeline = pipeline or max(1, nodes // tensor)
    return flags.merge(words, [f"{TENSOR}={tensor}", f"{PIPELINE}={pipeline}"])


def _tensor(words: tuple[str, ...], config: Mapping[str, Any], nodes: int) -> int:
    """Return over how many of *nodes* the layers of a model with *config* can be divided."""
    whole = flags.value(words, "--enable-expert-parallel") or "--enable-expert-parallel" in words
    names = (*DIVIDED, *(EXPERTS if whole else ("moe_intermediate_size",)))
    counts = [config[name] for name in names if isinstance(config.get(name), int)]
    keys = modules.number(config, "num_key_value_heads") or 1
    for tensor in range(nodes, 1, -1):
        divided = not any(count % tensor for count in (nodes, *counts))
        # Fewer heads of keys than parts are copied.
        if divided and not (keys % tensor and tensor % keys):
            return tensor
    return 1


def _choose_pack(
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


def _parts(
    words: tuple[str, ...],
    machine: MachineMemory,
    machines: Machines | None,
    nodes: int,
    name: str,
) -> int:
    """
    Return over how many GPUs *words* divide the model *name*.

    Raises:
        UsageError: There are too few GPUs, or vLLM cannot spread the parts over the machines.
    """
    tensor, pipeline, data, hosts = (
        int(flags.number(words, flag) or 1) for flag in (TENSOR, PIPELINE, DATA, HOSTS)
    )
    parts, gpus = tensor * pipeline, max(1, machine.gpus) * max(nodes, hosts)
    if machine.gpus and parts * data > gpus:
        raise UsageError(
            "usage",
            f"{name} needs {parts * data} GPUs, and there are {gpus}.",
            todo="Take more machines (--nodes), or fewer parts.",
        )
    if machines and parts % nodes:
        raise UsageError(
            "usage",
            f"{tensor} x {pipeline} parts of {name} do not divide over {nodes} machines.",
            todo=f"Change {TENSOR}, {PIPELINE} or --nodes.",
        )
    return parts


def _memory(
    request: ServeRequest,
    recipe: Recipe | None,
    words: tuple[str, ...],
    machine: MachineMemory,
    model: LocalModel,
    audit: ModuleAudit | None,
    parts: int,
    vllm: str,
) -> ServerMemory:
    """
    Return what a server of the release *vllm* with the arguments *words* takes of each GPU, without
    a drafter.
    """
    speculation = flags.speculation(words)
    weights = (audit.loaded(speculation) if audit else model.weights) / GIB / parts
    config = modules.text_config(model.checkpoint.config) if model.checkpoint else {}
    drafts = int("mtp" in str(speculation.get("method")) or bool(speculation.get("model")))
    tensor = int(flags.number(words, TENSOR) or 1)
    shape = CacheShape.from_config(config, flags.value(words, "--kv-cache-dtype"), tensor, drafts)
    server = ServerMemory(
        weights,
        reserve=machine.reserve(),
        autotune=machine.autotune,
        length=modules.number(config, "max_position_embeddings"),
        floor=machine.floor(request.floor),
        pinned=machine.unified,
    )
    if recipe:
        server = recipe.memory(machine, version=vllm)
        floor = server.floor if request.floor is None else machine.floor(request.floor)
        weights = weights or server.weights * recipe.nodes / parts
        server = msgspec.structs.replace(server, weights=weights, floor=floor)
    offloaded = sum(flags.number(words, name) or 0.0 for name in OFFLOADED) if machine.shared else 0
    cache, length = flags.number(words, CACHE), flags.value(words, "--max-model-len")
    return msgspec.structs.replace(
        server,
        reserve=server.reserve + offloaded,
        cache=cache / GIB if cache else server.cache,
        share=flags.number(words, SHARE),
        # None and auto leave the length to vLLM.
        length=int(flags.number(words, "--max-model-len") or 0) if length else server.length,
        shape=server.shape if server.shape.token else shape,
    )


def check_port(host: str, port: int) -> None:
    """
    Check that a server can listen at *host* and *port* now, in the way that vLLM does.

    Raises:
        port-taken: Another program does, or this user may not.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1)
    except (OSError, UnicodeError) as error:  # UnicodeError: a host such as a..b
        reason = getattr(error, "strerror", "") or error
        raise ServeError(
            "port-taken", f"{host} port {port} cannot be listened on: {reason}."
        ) from None


def local_url(host: str, port: int) -> str:
    """Return the URL on this machine of a server that listens on *host*."""
    wildcards = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  compared
    host = wildcards.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class RunningServer(msgspec.Struct, frozen=True):
    """
    A server, by the variable `RECORD` of its environment.

    Attributes:
        release: Empty without one. *wheel*: the sha256 of vLLM's; empty if it is not known.
        prefix: The folder of its environment. *model*: of its model.
        flags: Arguments of vLLM that are the user's own, without secrets.
        needed_gib: What its plan takes.
    """

    pid: int
    release: str
    wheel: str
    prefix: str
    recipe: str
    model: str
    url: str
    flags: tuple[str, ...]
    needed_gib: float


def running() -> list[RunningServer]:
    """Return the servers of this user that `sparkwright serve` started, and that run."""
    servers = list[RunningServer]()
    for process in psutil.process_iter(["environ"]):
        with contextlib.suppress(ValueError):
            record = (process.info["environ"] or {}).get(RECORD, "")
            server = msgspec.json.decode(record, type=RunningServer)
            # Its children inherit the variable.
            if server.pid == process.pid:
                servers.append(server)
    return servers
