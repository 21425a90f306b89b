"""What a person asks: which environments, which model, which workloads, and how they are served."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace
from packaging.version import InvalidVersion, Version

from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.recipes.recipe import Recipe
from sparkwright.bench.server import installed
from sparkwright.bench.server.serve import GATED, Launch
from sparkwright.core.errors import UsageError
from sparkwright.core.files import sha256_file
from sparkwright.gates.throughput.places import Resident
from sparkwright.gates.throughput.records import Kind, Side, Subject

#: What every measurement needs: a cache that has seen a prompt makes its time to first token vanish (vllm #54227).
MEASURED = ("--no-enable-prefix-caching",)


class Environment(msgspec.Struct, frozen=True):
    """An environment with vLLM: its *python*, and the *wheel* that it was installed from, where that is known."""

    python: Path
    wheel: Path | None = None

    def subject(self, stack: str) -> Subject:
        """
        Return what is measured there.

        Raises:
            environment-unusable: There is no vLLM.
        """
        version = installed.version(self.python)
        try:
            local = Version(version).local or ""
        except InvalidVersion:
            local = ""
        ours = local.startswith("spark.")
        label = f"{'' if ours else 'stock '}vLLM {version}"
        if self.wheel is None:
            return Subject(label, version=version, stack=stack if ours else "")
        return Subject(label, self.wheel.name, sha256_file(self.wheel), version, stack if ours else "")


class Question(msgspec.Struct, frozen=True):
    """
    What is to be measured, and against what.

    Attributes:
        candidate, baseline: Environments; no candidate where a server runs at *url*, and no baseline where nothing is compared.
        model: Folder of the model. *name*: under which it is served; empty for the model's own.
        recipe: How it is served; None for *flags* and *variables* alone, which are added to a recipe's.
        workloads: Names of `workloads.yaml`, or of cells; empty for the recipe's, or the policy's.
        texts: A file of real prompts.
        resident: See `places`.
        blocks: Of a bench (launches) or a calibration; 0 for what the policy says.
        fresh: Begin anew, whatever an interrupted journal holds.
        preheat: Seconds; None for what the policy says.
    """

    kind: Kind
    candidate: Environment | None = None
    baseline: Environment | None = None
    url: str = ""
    model: Path | None = None
    name: str = ""
    recipe: Recipe | None = None
    flags: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    workloads: tuple[str, ...] = ()
    texts: Path | None = None
    resident: Resident = "turns"
    blocks: int = 0
    fresh: bool = False
    preheat: float | None = None

    def __post_init__(self) -> None:
        if bool(self.candidate) == bool(self.url):
            raise UsageError("usage", "Name an environment to serve from, or a server.", todo="--python FILE --serve DIR, or --server URL.")
        if self.candidate and not self.model:
            raise UsageError("usage", "An environment serves a model.", todo="Name the folder of the model with --serve DIR.")
        if self.kind in ("gate", "calibration") and not (self.candidate and self.baseline):
            raise UsageError(
                "usage", "A comparison starts both servers by itself.", todo="Name the environments of candidate and baseline."
            )

    def launches(self, versions: Mapping[Side, str]) -> dict[Side, Launch]:
        """
        Return how each side is started; *versions* are those of vLLM.

        Raises:
            recipe-unfit: The recipe says nothing of that release.
        """
        sides: dict[Side, Environment | None] = {"baseline": self.baseline, "candidate": self.candidate}
        return {side: self._launch(one, versions[side]) for side, one in sides.items() if one}

    def _launch(self, environment: Environment, version: str) -> Launch:
        assert self.model is not None
        if self.recipe:
            plain = recipes.launch(self.recipe, version, environment.python, self.model)
        else:
            plain = Launch(environment.python, self.model)
        flags = (*plain.flags, *self.flags)
        added = tuple(flag for flag in MEASURED if flag not in flags)
        variables = {**(GATED if self.kind in ("gate", "calibration") else {}), **plain.variables, **self.variables}
        return replace(plain, flags=(*flags, *added), variables=variables, name=self.served_name)

    @property
    def served_name(self) -> str:
        """The name under which the model is served."""
        return self.name or (recipes.served_name(self.recipe, self.model) if self.model else "model")

    @property
    def quantization(self) -> str:
        """As the recipe says it."""
        return self.recipe.model.quantization if self.recipe else ""
