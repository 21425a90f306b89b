"""From a request to the command of the server: recipe, environment, model, flags and variables."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from sparkwright.bench.model import checkpoint, modules
from sparkwright.bench.model.checkpoint import ModelError
from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.recipes.recipe import Recipe
from sparkwright.bench.server.launch import LaunchPlan, check_variables
from sparkwright.core.errors import UsageError
from sparkwright.forks.stack import MOE_CONFIGS
from sparkwright.serving import environment as environments
from sparkwright.serving import flags, models, preflight
from sparkwright.serving.environment import ServingEnvironment
from sparkwright.serving.models import LocalModel
from sparkwright.serving.preflight import GIB, Machine

#: Share of the memory that vLLM may take for a plain model: seed report 001 leaves a quarter.
SHARE = 0.75
#: Share of the memory that stays free for a plain model: 12 GiB of a Spark.
FLOOR = 0.1


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
        experts: Whether vLLM has a configuration of the model's experts for this GPU; empty if none
            is read.
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
    experts: str
    warnings: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """The command line of the server."""
        return self.launch.command(self.request.port, self.request.host)

    def shown_variables(self) -> dict[str, str]:
        """Return the server's own variables, without the values of secrets."""
        secrets = ("KEY", "TOKEN", "SECRET", "PASSWORD")
        return {
            name: "(set)" if any(part in name for part in secrets) else value
            for name, value in sorted(self.launch.variables.items())
        }

    def document(self) -> dict[str, Any]:
        """Return the plan for programs, without secrets."""
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
            "experts": self.experts,
            "command": self.command,
            "variables": self.shown_variables(),
            "needed_gib": round(self.needed, 1),
            "floor_gib": round(self.floor, 1),
            "warnings": self.warnings,
        }

    def shell(self) -> str:
        """Return variables and command as a line for a shell, without secrets."""
        variables = [f"{name}={shlex.quote(v)}" for name, v in self.shown_variables().items()]
        return " ".join([*variables, shlex.join(self.command)])


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
    weights = model.weights / GIB / nodes
    words = _flags(request, recipe, environment, nodes)
    if machine.unified and not recipe and not flags.value(words, "--kv-cache-memory-bytes"):
        cache = preflight.pinned_cache(words, machine, weights)
        words = (*words, *[f"--kv-cache-memory-bytes={cache}"] * bool(cache))
    if revision and not model.path.exists():
        words = (*words, f"--revision={revision}")
    parallel = flags.number(words, "--tensor-parallel-size") or 1
    if not head and (nodes > 1 or (machine.gpus and parallel > machine.gpus)):
        what = f"{request.recipe or request.model} needs more than this machine."
        raise UsageError("usage", what, todo="Start it with --ray-head and --nodes.")
    recipe = _with_overrides(recipe, words, request.floor) if recipe else None
    floor = FLOOR * machine.total if request.floor is None else request.floor
    floor = recipe.plan.floor if recipe else floor
    with models.missing_guard():
        path = model.checkpoint
        audit = modules.audit(checkpoint.read(path)) if path else None
    advice = preflight.check(
        words,
        machine,
        recipe=recipe,
        checkpoint=audit,
        weights=weights,
        floor=floor,
    )
    needed = weights + (flags.number(words, "--kv-cache-memory-bytes") or 0.0) / GIB
    if recipe:
        needed = (weights or recipe.plan.weights) + recipe.plan.cache + recipe.plan.reserve
    launch = LaunchPlan(
        python.absolute(),
        model.path,
        words,
        variables,
        request.name or (recipe.name if recipe else Path(name).name) or "model",
    )
    warnings = (*advice, *_provenance(request, recipe, environment, model, head=head))
    needed = needed if machine.shared else 0.0
    experts = _experts(environment.package, launch, model, machine.gpu)
    return ServingPlan(
        request, environment, recipe, model, launch, needed, floor, nodes, experts, warnings
    )


def _experts(package: Path, launch: LaunchPlan, model: LocalModel, gpu: str) -> str:
    """Return whether *package* has a configuration of the *model*'s experts for the *gpu*."""
    if not (model.checkpoint and gpu):
        return ""
    shards = int(flags.number(launch.flags, "--tensor-parallel-size") or 1)
    whole = any(word.name == "--enable-expert-parallel" for word in flags.parse(launch.flags))
    try:
        name, _ = modules.tuned_file(
            checkpoint.read(model.checkpoint), gpu.replace(" ", "_"), shards, whole=whole
        )
    except ModelError:
        return ""
    folders = [str(package / MOE_CONFIGS), launch.variables.get("VLLM_TUNED_CONFIG_FOLDER", "")]
    if any(Path(folder, name).is_file() for folder in filter(None, folders)):
        return f"tuned, {name}"
    return f"no {name}: if Triton serves them, it takes defaults (`sparkwright model tune`)"


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
    given = {"VLLM_HOST_IP": request.address, "HF_HUB_OFFLINE": "0" if request.download else ""}
    variables = {**own, **request.variables, **{name: v for name, v in given.items() if v}}
    check_variables(variables, environment.package)
    return variables


def _flags(
    request: ServeRequest, recipe: Recipe | None, environment: ServingEnvironment, nodes: int
) -> tuple[str, ...]:
    if recipe:
        below = recipe.flags(recipe.variant(environment.vllm))
    else:
        share = [f"--gpu-memory-utilization={SHARE:g}"]
        pinned = flags.value(request.flags, "--kv-cache-memory-bytes")
        ray = [f"--tensor-parallel-size={nodes}", "--distributed-executor-backend=ray"]
        below = (*share * (not pinned), *ray * (nodes > 1))
    words = flags.merge(below, request.flags)
    flags.check(words, environment)
    return words


def _with_overrides(recipe: Recipe, words: tuple[str, ...], floor: float | None) -> Recipe:
    """Return *recipe* with the memory plan that the arguments *words* state."""
    cache = flags.number(words, "--kv-cache-memory-bytes")
    length = flags.number(words, "--max-model-len")
    values = {
        "gpu_memory_utilization": flags.number(words, "--gpu-memory-utilization"),
        "cache": cache and cache / GIB,
        "max_model_len": length and int(length),
        "floor": floor,
    }
    given = {name: value for name, value in values.items() if value is not None}
    return replace(recipe, plan=replace(recipe.plan, **given))


def _provenance(
    request: ServeRequest,
    recipe: Recipe | None,
    environment: ServingEnvironment,
    model: LocalModel,
    *,
    head: bool,
) -> Iterator[str]:
    """Yield what was not shown for this wheel, checkpoint or recipe."""
    marker, installed = environment.marker, environment.wheel
    if marker is None:
        yield (
            f"vLLM {environment.vllm} was not installed by sparkwright, so there is no "
            "evidence about it"
        )
    elif marker.packages.get("vllm") != environment.vllm:
        yield f"vLLM {environment.vllm} replaced the {marker.packages.get('vllm')} of {marker.name}"
    elif marker.channel != "verified":
        yield f"{marker.name} is a {marker.channel}: not every gate passed"
    if recipe is None:
        return
    measured = sorted({report.wheel[:12] for report in recipe.ours})
    if not measured:
        yield f"this project has not measured the speed of {recipe.name}"
    elif installed[:12] not in measured:
        wheels = ", ".join(measured)
        yield f"{recipe.name} was measured with wheel {wheels}, not with {installed[:12] or 'this'}"
    if recipe.model.revision == "unresolved" and model.commit and not request.revision:
        yield f"the recipe pins no commit of its checkpoint; served is {model.commit[:12]}"
    # A head starts Ray itself, and says what the other machines start.
    if recipe.before and not head:
        yield f"do this before the start: {recipe.before}"
