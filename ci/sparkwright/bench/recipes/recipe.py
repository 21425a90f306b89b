"""
A recipe: a model, how each release of vLLM serves it, the memory that it takes, and its results.

vLLM renames flags and drops variables from release to release, and ignores what it does not know.
So a recipe states them for each range of releases, and is refused for any other. What models of an
architecture share is a class, a file of the same fields (``ci/recipes/classes``).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec.structs import replace
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from sparkwright.bench.model.modules import ModuleAudit
from sparkwright.bench.recipes.workloads import Name, WorkloadCell
from sparkwright.bench.records import Metric, Positive
from sparkwright.bench.server import flags, peers, wheel_identity
from sparkwright.bench.server.launch import LaunchPlan, shared_variables, vocabulary_file
from sparkwright.core import memory, process, strict_yaml
from sparkwright.core.errors import Advice, FileError, SparkwrightError, UsageError
from sparkwright.core.files import list_folder, read_bytes, sha256_bytes
from sparkwright.core.memory import GIB, CacheShape, MachineMemory, ServerMemory
from sparkwright.forks.stack import is_ours

#: One argument, its value behind ``=``; never split at blanks.
Flag = Annotated[str, msgspec.Meta(pattern=r"^--[a-z0-9][a-z0-9-]*(\.[A-Za-z0-9_.-]+)?(=\S+)?$")]
Variable = Annotated[str, msgspec.Meta(pattern="^[A-Z][A-Z0-9_]*$")]
#: What a model can do beside continuing a text; the gates test each ability that a recipe declares.
Ability = Literal["chat", "tools", "reasoning", "structured", "images"]
Pattern = Annotated[str, msgspec.Meta(max_length=400)]
#: A revision or an architecture that was not seen yet.
UNRESOLVED = "unresolved"
#: Kinds of layers, and the classes of kernels that serve them.
LayerKind = Annotated[str, msgspec.Meta(pattern="^(attention|linear|moe|gdn|mamba|sampling)$")]
KERNEL_CLASS = "(?:native-fp4|native-fp8|native-mxfp4|bf16|fp32|weight-only|emulated)"
Gibibytes = Annotated[float, msgspec.Meta(ge=0, le=4096)]


#: Flags that follow from other fields of the recipe, or that a measurement sets on both sides.
PLANNED = frozenset(
    {
        "--max-model-len",
        "--max-num-seqs",
        "--gpu-memory-utilization",
        "--kv-cache-memory-bytes",
        "--num-gpu-blocks-override",
        "--tensor-parallel-size",
        "--distributed-executor-backend",
        "--speculative-config",
        "--spec-method",
        "--spec-tokens",
        "--spec-model",
        "--enable-prefix-caching",
        "--served-model-name",
        "--host",
        "--port",
        "--api-key",
        "--model",
    }
)


class RecipeError(SparkwrightError):
    """A recipe cannot be used with this release, machine or model."""

    references: ClassVar[Mapping[str, Advice]] = {
        "recipe-unfit": Advice(
            "The recipe does not support this release of vLLM or its official wheel, its memory "
            "plan or checkpoint does not fit this machine, or its model has no accuracy floor.",
            "Choose a release that it names, or change the recipe after reading that release's "
            "flags (ci/recipes/README.md).",
        ),
    }


class RecipeModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The checkpoint of a recipe.

    Attributes:
        repository: On the hub of models; ``any`` for one that the user brings.
        revision: Its commit; ``unresolved`` before it was seen, and then the checkpoint may change
            under the recipe.
        architecture: ``model_type`` of its config.json; ``unresolved`` likewise.
        quantization: As people write it: ``NVFP4``, ``AWQ``, with the bits of weights and
            activations behind it where they matter, ``NVFP4 (W4A4)``.
        drafts: Whether it holds layers that draft (MTP); ``unknown`` before its files were seen.
    """

    repository: Annotated[str, msgspec.Meta(pattern=r"^(any|[\w.-]{1,96}/[\w.-]{1,96})$")]
    revision: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{40}|unresolved)$")]
    quantization: str
    architecture: Annotated[str, msgspec.Meta(pattern="^[a-z0-9_]+$")] = UNRESOLVED
    drafts: bool | Literal["unknown"] = "unknown"


class MemoryPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    What a server holds on each node. Sizes are GiB, as in vLLM's flags and log.

    Attributes:
        weights: Of the checkpoint on one node; 0 for one that the user brings.
        weights_from: Source of that figure.
        cache: For keys and values.
        pinned: Whether the cache is given as ``--kv-cache-memory-bytes``; not where a variable
            does that, as on a CPU.
        max_model_len: Tokens of the longest request.
        max_num_seqs: Requests at a time; gates look at batches, too.
        token: Bytes that one token takes in the cache of one node; 0 if unknown.
        reserve: For activations, CUDA graphs, the libraries and the server's own processes.
        floor: What stays free; below that the server is ended. None for a tenth of the memory.
    """

    weights: Gibibytes
    weights_from: str
    cache: Annotated[float, msgspec.Meta(gt=0, le=4096)]
    max_model_len: Annotated[int, msgspec.Meta(ge=16, le=1 << 24)]
    max_num_seqs: Annotated[int, msgspec.Meta(ge=2, le=1024)]
    reserve: Gibibytes
    pinned: bool = True
    token: Annotated[int, msgspec.Meta(ge=0)] = 0
    floor: Gibibytes | None = None


class KernelContract(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    What must serve a recipe, as a profile shows it.

    Attributes:
        serves: Kind of layer → class of the kernels that take nearly all of its time; that of
            sampling need not be stated. With a ``+``, the first class is promised and takes a part,
            and others serve what a checkpoint leaves; with ``|`` either serves.
        names: Kind of layer → regular expression found in the names of these kernels, to be
            stricter than the class.
        compiled, graphs: Whether torch.compile makes kernels of it, and CUDA graphs launch them.
        forbidden: Regular expressions that no kernel's name may hold.
        changes: ``decode moe`` and the like → why its class is another than with the stock wheel;
            ``decode helper``: why kernels that only move or quantise take longer.
    """

    serves: Annotated[
        dict[
            LayerKind,
            Annotated[str, msgspec.Meta(pattern=rf"^{KERNEL_CLASS}((\+|\|){KERNEL_CLASS})*$")],
        ],
        msgspec.Meta(min_length=1),
    ]
    names: dict[LayerKind, Pattern] = {}
    compiled: bool = True
    graphs: bool = True
    forbidden: tuple[Pattern, ...] = ()
    changes: dict[
        Annotated[
            str,
            msgspec.Meta(
                pattern="^(prefill|decode) (attention|linear|moe|gdn|mamba|sampling|helper)$"
            ),
        ],
        str,
    ] = {}

    def __post_init__(self) -> None:
        strict_yaml.compile_patterns(*self.names.values(), *self.forbidden)
        if unstated := self.names.keys() - self.serves.keys():
            raise ValueError(f"names: no class is stated for {', '.join(sorted(unstated))}")


class VersionVariant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    How a range of releases of vLLM serves the recipe.

    Attributes:
        vllm: The releases as a version specifier (``>=0.24,<0.34``); compared without local labels
            and pre-releases.
        flags: Arguments, each with its value behind ``=``.
        variables: Environment variables.
        lacks: What the official wheels of these releases lack, so that only ours serve it; empty
            if they do.
        drafting: Settings of speculative decoding beside the recipe's.
        draft_vocabulary: File in ``ci/recipes`` with the tokens that are proposed, for our wheels
            alone, as the official ones refuse it; empty for all tokens.
        contract: What must serve it, if that differs from the recipe's.
    """

    vllm: str
    flags: tuple[Flag, ...] = ()
    variables: dict[Variable, str] = {}
    lacks: str = ""
    drafting: dict[str, str] = {}
    draft_vocabulary: Annotated[str, msgspec.Meta(pattern=r"^([a-z0-9][a-z0-9._-]*\.json)?$")] = ""
    contract: KernelContract | None = None

    def __post_init__(self) -> None:
        SpecifierSet(self.vllm)
        names = [flags.setting(flag) for flag in self.flags]
        for name in names:
            if names.count(name) > 1 or name.partition(".")[0] in PLANNED:
                raise ValueError(f"{name} is there twice, or set by other fields or a measurement")


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A model and how it is served.

    Attributes:
        name: Of the file, without ``.yaml``.
        title: For people.
        inherits: The class whose fields count where the recipe has none; of fields that have parts,
            such as ``plan``, part by part. Empty for none.
        why: Its purpose, and what is known to be odd about it.
        model: The checkpoint.
        plan: The memory that it takes.
        contract: What must serve it.
        versions: How each range of releases serves it.
        workloads: Sets of ``ci/gates/workloads.yaml`` that `bench` measures; G8 has its policy's.
        speculation: How answers are drafted, the value of ``--speculative-config``; empty if they
            are not. Drafting layers often are not quantised as the others are, and need a
            ``moe_backend`` of their own, as they would follow the model's otherwise.
        nodes: Machines; more than one share the work by tensor parallelism.
        patience: Seconds until the server must answer.
        abilities: What the gates ask of the model beside continuing a text.
        tool_parser, reasoning_parser: vLLM's parsers of the model's answers; empty for none.
        published: Results that others state, each with its source, machine, versions and method.
        prefix_cache: The releases that have a prefix cache for this model, as a version specifier;
            empty for all. Hybrid models have one from 0.26 on.
        decides: Name of a cell → its metrics that decide G8, besides those of the policy's set.
        floors: Task of G6 → the least share of correct answers.
        soak_seconds: Of G7, instead of those of ``ci/gates/soak.yaml``; 0 for these.
    """

    name: Name
    title: str
    why: str
    model: RecipeModel
    plan: MemoryPlan
    contract: KernelContract
    versions: Annotated[tuple[VersionVariant, ...], msgspec.Meta(min_length=1)]
    workloads: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1)]
    inherits: str = ""
    speculation: Annotated[str, msgspec.Meta(pattern=r"^(\{\S+\})?$")] = ""
    nodes: Annotated[int, msgspec.Meta(ge=1, le=2)] = 1
    patience: Positive = 1800.0
    abilities: tuple[Ability, ...] = ()
    tool_parser: Annotated[str, msgspec.Meta(pattern="^[a-z0-9_]*$")] = ""
    reasoning_parser: Annotated[str, msgspec.Meta(pattern="^[a-z0-9_]*$")] = ""
    published: tuple[str, ...] = ()
    prefix_cache: str = ""
    floors: dict[str, Annotated[float, msgspec.Meta(gt=0, lt=1)]] = {}
    decides: dict[str, tuple[Metric, ...]] = {}
    soak_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    def __post_init__(self) -> None:
        SpecifierSet(self.prefix_cache)
        for cell in self.decides:
            WorkloadCell.parse(cell)
        if "tools" in self.abilities and not self.tool_parser:
            raise ValueError("the ability tools needs a tool_parser")
        try:
            msgspec.json.decode(self.speculation or "{}")
        except msgspec.DecodeError as error:
            raise ValueError(f"speculation: {error}") from None
        drafted = any(variant.drafting or variant.draft_vocabulary for variant in self.versions)
        if drafted and not self.speculation:
            raise ValueError("drafting and draft_vocabulary need a speculation")

    def find_variant(self, version: str) -> VersionVariant | None:
        """Return the variant for the release *version*; None if the recipe has none."""
        try:
            release = Version(version).base_version
        except ValueError:  # also raised for a number with too many digits
            return None
        variants = (variant for variant in self.versions if release in SpecifierSet(variant.vllm))
        return next(variants, None)

    def variant(self, version: str) -> VersionVariant:
        """
        Return how the release *version* serves it.

        Raises:
            recipe-unfit: The recipe does not know that release, or only our wheels of it.
        """
        variant = self.find_variant(version)
        if variant is None:
            raise RecipeError(
                "recipe-unfit",
                f"{self.name} does not know vLLM {version!r:.80}.",
                details=[f"known: {'; '.join(variant.vllm for variant in self.versions)}"],
            )
        if variant.lacks and not is_ours(version):
            raise RecipeError(
                "recipe-unfit",
                f"The official vLLM {version} does not serve {self.name}.",
                details=[variant.lacks],
            )
        return variant

    def contract_for(self, version: str) -> KernelContract:
        """Return the contract for the release *version*."""
        variant = self.find_variant(version)
        return (variant.contract if variant else None) or self.contract

    def announces_cache(self, version: str) -> bool:
        """Return whether the release *version* has a prefix cache by what the recipe states."""
        return Version(version).base_version in SpecifierSet(self.prefix_cache)

    def drafting(self, variant: VersionVariant, *, ours: bool = True) -> dict[str, Any]:
        """Return the settings of speculative decoding for *variant*, of *ours* or a stock wheel."""
        settings = {**msgspec.json.decode(self.speculation or "{}"), **variant.drafting}
        if variant.draft_vocabulary and ours:
            settings["draft_vocabulary"] = variant.draft_vocabulary
        return settings

    def memory(
        self, machine: MachineMemory, checkpoint: ModuleAudit | None = None, version: str = ""
    ) -> ServerMemory:
        """
        Return what a server takes of each node.

        Args:
            checkpoint: On disk, over all nodes; None for the weights of the plan.
            version: The release of vLLM that serves; empty for the one that takes the most.

        Raises:
            recipe-unfit: As `variant`.
        """
        plan, weights, settings = self.plan, self.plan.weights, list[str]()
        variants = (self.variant(version),) if version else self.versions
        if checkpoint:
            largest = max(checkpoint.loaded(self.drafting(variant)) for variant in variants)
            weights = largest / GIB / self.nodes
        for variant in variants:
            settings += [*variant.flags, *variant.variables.values()]
        # Of all kernels, only b12x was seen to be tuned once more after the cache was allocated
        # (eugr#388). Releases before 0.23 have a variable for it, and no flag.
        tuned = any("b12x" in setting for setting in settings)
        return ServerMemory(
            pinned=plan.pinned,
            weights=weights,
            cache=plan.cache,
            reserve=machine.reserve(plan.reserve),
            autotune=machine.autotune if tuned else 0.0,
            length=plan.max_model_len,
            shape=CacheShape(plan.token),
            floor=machine.floor(plan.floor),
        )

    def flags(self, version: str) -> tuple[str, ...]:
        """
        Return the arguments of ``vllm serve`` for the release *version*, beside those of `memory`.
        A draft vocabulary is NAME@SHA256 in them, as no record holds a path.

        Raises:
            recipe-unfit: As `variant`.
            file-invalid: There is no file of its draft vocabulary.
        """
        variant, plan = self.variant(version), self.plan
        words = [f"--max-model-len={plan.max_model_len}", f"--max-num-seqs={plan.max_num_seqs}"]
        if self.nodes > 1:
            words.append(f"--tensor-parallel-size={self.nodes}")
        if self.speculation:
            settings = self.drafting(variant, ours=is_ours(version))
            if name := settings.get("draft_vocabulary"):
                digest = sha256_bytes(read_bytes(vocabulary_file(name)))
                settings["draft_vocabulary"] = f"{name}@{digest}"
            words.append(f"--speculative-config={msgspec.json.encode(settings).decode()}")
        if self.tool_parser:
            words += ["--enable-auto-tool-choice", f"--tool-call-parser={self.tool_parser}"]
        if self.reasoning_parser:
            words.append(f"--reasoning-parser={self.reasoning_parser}")
        return (*words, *variant.flags)


def names(root: Path) -> tuple[str, ...]:
    """Return the names of the recipes of the repository at *root* that are for a Spark."""
    return tuple(_by_name(root / "ci" / "recipes"))


def files(root: Path) -> dict[str, Path]:
    """Return the file of each recipe of the repository at *root*, those of rehearsals included."""
    folder = root / "ci" / "recipes"
    return _by_name(folder / "rehearsal") | _by_name(folder)


def _by_name(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in list_folder(folder, "*.yaml")}


def load(root: Path, name: str) -> Recipe:
    """
    Return the recipe *name* of the repository at *root*.

    Raises:
        UsageError: There is no recipe of that name.
        file-invalid: Its file and that of its class do not follow `Recipe`, there is no such class,
            or it has another name.
    """
    path = files(root).get(name)
    if path is None:
        raise UsageError(
            "usage",
            f"There is no recipe {name!r:.80}.",
            todo=f"Choose from: {', '.join(names(root))}.",
        )
    fields = strict_yaml.load(path, dict[str, Any])
    if fields.get("inherits"):
        fields = _inherit(fields, root / "ci" / "recipes" / "classes", path)
    recipe = strict_yaml.convert(fields, Recipe, str(path))
    if recipe.name != name:
        raise FileError("file-invalid", f"{name}.yaml says that it is the recipe {recipe.name}.")
    return recipe


def _inherit(own: dict[str, Any], folder: Path, path: Path) -> dict[str, Any]:
    """Return the fields *own* of the recipe at *path* beside those of its class in *folder*."""
    classes, name = _by_name(folder), str(own["inherits"])
    if name not in classes:
        raise FileError(
            "file-invalid",
            f"{path} inherits from {name!r:.80}, which is no class of recipes.",
            details=[f"classes: {', '.join(classes)}"],
        )
    fields = strict_yaml.load(classes[name], dict[str, Any])
    for field, value in own.items():
        inherited = fields.get(field)
        if isinstance(inherited, dict) and isinstance(value, dict):
            fields[field] = {**inherited, **value}
        else:
            fields[field] = value
    return fields


def served_name(recipe: Recipe | None, model: Path) -> str:
    """
    Return the model's own name: the repository of *recipe*, or else the name of the folder *model*.

    A folder of the hub's cache (``models--OWNER--NAME/snapshots/COMMIT``) has the name of its
    repository.
    """
    if recipe and recipe.model.repository != "any":
        return recipe.model.repository
    folder = model.absolute()
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    return folder.name or "model"


def launch(
    recipe: Recipe | None,
    version: str,
    python: Path,
    model: Path,
    *,
    words: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
    name: str = "",
    user: str = "",
) -> LaunchPlan:
    """
    Return how the vLLM *version* in the environment of *python* serves the checkpoint in *model*.

    Args:
        recipe: None for *words* and *variables* alone, which are added to those of a recipe.
        words: Arguments of vLLM.
        name: Under which the model is served; empty for its own.
        user: The user that the server runs as; empty for that of this process.

    Raises:
        recipe-unfit: As `Recipe.variant`.
        environment-unusable: There is no such Python.
        UsageError, address-missing: Several machines serve, and the address of this one, its
            VLLM_HOST_IP, is missing or wrong.
    """
    variant = recipe.variant(version) if recipe else None
    floor, machine = recipe.plan.floor if recipe else None, MachineMemory.here()
    name, derived = name or served_name(recipe, model), dict[str, str]()
    if machine.unified:
        derived = shared_variables(
            machine, machine.floor(floor), wheel_identity.site_packages(python) / "vllm"
        )
    plan = LaunchPlan(python, model, tuple(words), {**derived, **variables}, name, user=user)
    if recipe is None or variant is None:
        return plan
    server, machines = recipe.memory(machine, version=version), None
    own = (*recipe.flags(version), *server.flags(machine))
    if recipe.nodes > 1 and not peers.taken_over(words):
        machines = peers.Machines(recipe.nodes, variables.get("VLLM_HOST_IP", ""))
        own = (*own, *machines.words())
        derived |= machines.variables()
    free = memory.FLOOR * process.memory_limit() if floor is None else floor * GIB
    return replace(
        plan,
        flags=(*own, *words),
        variables={**derived, **variant.variables, **variables},
        timeout=recipe.patience,
        kept_free=round(free / 1e6),
        machines=machines,
    )
