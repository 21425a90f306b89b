"""
A recipe: a model, how each release of vLLM is told to serve it, what that takes of the memory, and what was published of its speed.

vLLM renames its flags and drops variables from release to release, and ignores what it does not know; so a recipe says them for each
range of releases, and is refused for any other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from packaging.version import InvalidVersion, Version

from sparkwright.bench.errors import RecipeError
from sparkwright.bench.recipes.expected import Expected, Report
from sparkwright.bench.recipes.memory import Plan
from sparkwright.bench.recipes.ways import Model, Speculation, Way
from sparkwright.bench.recipes.workloads import Name
from sparkwright.bench.server.serve import Launch
from sparkwright.core import strict_yaml
from sparkwright.core.errors import FileError, UsageError

__all__ = ["Model", "Recipe", "Speculation", "Way", "folder", "launch", "load", "names", "read", "served_name"]


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A recipe.

    Attributes:
        name: Of the file, without ``.yaml``. *title*: for people. *why*: for whom it is, and what is known to be odd about it.
        nodes: Machines; more than one share the work by tensor parallelism over Ray.
        before: What has to be done before the server is started; empty for nothing.
        contract: What G3 expects of the log; empty where nobody has written that down.
        workloads: What it is measured with, by name.
        published: What others published, by source.
        ours: What this project measured.
        patience: Seconds until the server must answer.
    """

    name: Name
    title: str
    why: str
    model: Model
    plan: Plan
    ways: tuple[Way, ...]
    workloads: tuple[Name, ...]
    ours: Literal["not measured"] | tuple[Expected, ...]
    published: tuple[Report, ...] = ()
    speculation: Speculation | None = None
    nodes: Annotated[int, Meta(ge=1, le=2)] = 1
    before: str = ""
    contract: str = ""
    patience: Annotated[float, Meta(gt=0)] = 1800.0

    def __post_init__(self) -> None:
        if not self.ways or not self.workloads:
            raise ValueError("a recipe serves at least one release, and is measured with at least one workload")
        if not isinstance(self.ours, str) and not (self.ours and all(one.verified for one in self.ours)):
            raise ValueError("`ours` is `not measured`, or figures of our gate with the wheel's sha256 and `verified: true`")

    @property
    def expected(self) -> tuple[Expected, ...]:
        """What others published; none of it is verified."""
        return tuple(one for report in self.published for one in report.expected())

    def way(self, version: str) -> Way:
        """
        Return how the release *version* is told.

        Raises:
            recipe-unfit: The recipe does not know that release, or only our wheels of it.
        """
        try:
            release = Version(version)
        except InvalidVersion:
            raise RecipeError("recipe-unfit", f"{version!r:.80} is no version of vLLM.") from None
        found = next((one for one in self.ways if one.holds(release)), None)
        if found is None:
            ranges = "; ".join(one.vllm for one in self.ways)
            raise RecipeError("recipe-unfit", f"{self.name} does not know vLLM {release.base_version}.", details=[f"known: {ranges}"])
        if found.lacks and not (release.local or "").startswith("spark."):
            raise RecipeError("recipe-unfit", f"The official vLLM {release.base_version} does not serve {self.name}.", details=[found.lacks])
        return found

    def flags(self, way: Way) -> tuple[str, ...]:
        """Return all arguments of ``vllm serve``: of the plan, of the nodes, of speculation, and of *way*."""
        nodes = (f"--tensor-parallel-size={self.nodes}", "--distributed-executor-backend=ray") if self.nodes > 1 else ()
        drafts = (self.speculation.flag(way),) if self.speculation else ()
        return (*self.plan.flags(), *nodes, *drafts, *way.flags)


def folder(root: Path) -> Path:
    """Return where the recipes of the repository at *root* lie."""
    return root / "ci" / "recipes"


def names(root: Path) -> tuple[str, ...]:
    """Return the names of all recipes."""
    return tuple(sorted(path.stem for path in folder(root).glob("*.yaml")))


def load(root: Path, name: str) -> Recipe:
    """
    Return the recipe *name*.

    Raises:
        UsageError: There is none of that name.
        file-invalid: Its file is not what it should be.
    """
    if name not in names(root):
        raise UsageError("usage", f"There is no recipe {name!r:.80}.", todo=f"Choose from: {', '.join(names(root))}.")
    return read(folder(root) / f"{name}.yaml")


def read(path: Path) -> Recipe:
    """
    Return the recipe in the file at *path*, which a user may have written.

    Raises:
        file-invalid: It is not what it should be, or is named otherwise than it says.
    """
    found = strict_yaml.load(path, Recipe)
    if found.name != path.stem:
        raise FileError(
            "file-invalid", f"{path.name} says that it is the recipe {found.name}.", details=["The file has the recipe's name."]
        )
    return found


def served_name(recipe: Recipe | None, model: Path) -> str:
    """
    Return the model's own name: the repository that *recipe* names, or else the name of the folder *model*.

    A folder of the hub's cache (``models--OWNER--NAME/snapshots/COMMIT``) has the name of its repository.
    """
    repository = recipe.model.repository if recipe else ""
    if "/" in repository:
        return repository
    folder = model.absolute()
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    return folder.name or "model"


def launch(recipe: Recipe, version: str, python: Path, model: Path) -> Launch:
    """
    Return how the vLLM *version* in the environment of *python* is started with the checkpoint in *model*.

    What every measurement needs on either side, such as ``--no-enable-prefix-caching``, is added by whoever measures.

    Raises:
        recipe-unfit: As `Recipe.way`.
    """
    way = recipe.way(version)
    floor = round(recipe.plan.floor * 2**30 / 1e6)
    return Launch(python, model, recipe.flags(way), dict(way.variables), patience=recipe.patience, reserve=floor)
