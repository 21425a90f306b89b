"""
The release policy, ``ci/release.yaml``, or ``ci/release-X.Y.yaml`` for wheels for another GPU: what
`verified` asks for, the roles of the index, and how a set is locked.

The policies of the gates are read with it, by digest: a verdict by another policy does not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from packaging.requirements import InvalidRequirement, Requirement

from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.client.records import FileEdit, Name, Overlay
from sparkwright.core import strict_yaml
from sparkwright.core.errors import FileError
from sparkwright.core.files import canonical, sha256_bytes
from sparkwright.core.strict_yaml import Prose
from sparkwright.forks.stack import capability
from sparkwright.gates.core.ladder import GATES, SERVED
from sparkwright.gates.throughput.paired_differences import ThroughputPolicy

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=400)]
Texts = Annotated[tuple[Text, ...], msgspec.Meta(min_length=1)]
Python = Annotated[str, msgspec.Meta(pattern=r"\A3\.\d{1,2}\Z")]

#: The Python versions of a set whose stack has no rule.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base of every record of the file: frozen, and an unknown field is a typo."""


class RoleRule(_Record, frozen=True):
    """
    A role of the index.

    Attributes:
        days: Until its metadata expires. *threshold*: how many of its keys have to sign.
    """

    days: Annotated[int, msgspec.Meta(ge=1, le=3650)]
    threshold: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1


class Roles(_Record, frozen=True):
    """The roles of TUF."""

    root: RoleRule
    targets: RoleRule
    snapshot: RoleRule
    timestamp: RoleRule


class Identity(_Record, frozen=True):
    """A Sigstore identity that may hold the targets role: the certificate's subject and issuer."""

    identity: Text
    issuer: Text


class ForkRule(_Record, frozen=True):
    """
    What ``verified`` asks of the wheels of a fork.

    Attributes:
        gates: The gates that must pass for these bytes.
        served_by: The fork in whose gates these bytes were installed; empty for none.
        record: Whether a build record with a resolved source is required. *sbom*: whether an SBOM
            inside is. *isolated*: whether the compilation must have had no network.
    """

    gates: tuple[str, ...]
    served_by: str = ""
    record: bool = False
    sbom: bool = False
    isolated: bool = False


class GateRule(_Record, frozen=True):
    """
    What the pass of a gate rests on.

    Attributes:
        checks: Patterns of names. At least one check must match each, and all that match and are
            required must pass.
        optional: Checks that the gate can make and that no pass rests on.
        wanted: Checks that ``verified`` asks for besides; a pass without them is sound.
        gpu: Whether the gate counts only from a machine with the GPU of the policy.
    """

    checks: Texts
    optional: tuple[Text, ...] = ()
    wanted: tuple[Text, ...] = ()
    gpu: bool = False


class Override(_Record, frozen=True):
    """A requirement that replaces what packages state of its project, and why."""

    requirement: Text
    reason: Text


class SetRule(_Record, frozen=True):
    """
    How the set of a stack is locked.

    Attributes:
        pythons: The versions that it is for.
        requires: Requirements beside those of the wheels.
        overlays: What packages of the set replace in one another; nothing else may.
        inexact_records: Project whose RECORD may disagree with its members → why.
        edits: Changes of installed files, which the client makes.
    """

    pythons: Annotated[tuple[Python, ...], msgspec.Meta(min_length=1)] = PYTHONS
    requires: tuple[Text, ...] = ()
    overrides: tuple[Override, ...] = ()
    overlays: tuple[Overlay, ...] = ()
    inexact_records: dict[Name, Prose] = {}
    edits: tuple[FileEdit, ...] = ()

    def __post_init__(self) -> None:
        files = [edit.file for edit in self.edits]
        if twice := sorted({file for file in files if files.count(file) > 1}):
            raise ValueError(f"{twice[0]} is edited twice")
        for text in (*self.requires, *(override.requirement for override in self.overrides)):
            try:
                requirement = Requirement(text)
            except InvalidRequirement as error:
                raise ValueError(f"{text!r} is not a requirement: {error}") from error
            if requirement.url:
                raise ValueError(f"{text!r} is not a version of the package index")


class ThroughputRule(msgspec.Struct, frozen=True):
    """The policy of the throughput gate, and the workloads that decide."""

    policy: ThroughputPolicy
    cells: tuple[WorkloadCell, ...]


class UpstreamFault(_Record, frozen=True):
    """
    A fault of the official wheel.

    Attributes:
        checks: What fails.
        reason: What it is, and how that was seen.
    """

    checks: Texts
    reason: Text


class PolicyFile(_Record, frozen=True):
    """
    The file.

    Attributes:
        roles: Days of validity and thresholds of the index's metadata.
        gpu: The compute capability that gates count from (``12.1``).
        recipes: Group → recipes of which one must be shown by every gate of a served model.
        upstream_faults: Gate and recipe (``G7 NAME``) → what the official wheel fails there, too.
            A fail of those checks alone keeps no release out of ``verified``, if all gates of a
            served model were run with the recipe. Never of a recipe in *recipes*.
        url: The address of the index, with a final slash; empty if unknown.
        root: The fingerprint of root 1 of the index; empty if unknown.
        identity: The Sigstore identity that may hold the targets role.
        immutable: Whether a host that could replace a published file is refused.
        retain: How many candidates of each stack `prune` keeps.
        profile: The profile of G4 and G7, of ``ci/gates/generation.yaml``.
        workloads: What decides G8; empty for those of ``ci/gates/throughput.yaml``.
    """

    roles: Roles
    gpu: Text
    forks: dict[str, ForkRule]
    gates: dict[str, GateRule]
    recipes: dict[str, Texts] = {}
    upstream_faults: dict[str, UpstreamFault] = {}
    url: str = ""
    root: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{64})?\Z")] = ""
    identity: Identity | None = None
    immutable: bool = True
    retain: Annotated[int, msgspec.Meta(ge=1)] = 12
    profile: str = "default"
    workloads: str = ""
    sets: dict[str, SetRule] = {}

    @property
    def faulty(self) -> set[str]:
        """The recipes of *upstream_faults*."""
        return {label.partition(" ")[2] for label in self.upstream_faults}

    @property
    def groups(self) -> dict[str, Texts]:
        """The groups of *recipes*; empty if no fork needs a gate for which one counts."""
        needed = {gate for rule in self.forks.values() for gate in rule.gates}
        return self.recipes if needed & set(SERVED) - {"G8"} else {}

    def __post_init__(self) -> None:
        if self.url and not (
            self.url.endswith("/") and self.url.startswith(("https://", "http://127.0.0.1:"))
        ):
            raise ValueError(f"url: {self.url!r} is no https address with a final slash")
        required = {gate for rule in self.forks.values() for gate in rule.gates}
        unknown = {
            "there is no gate": (required | set(self.gates)) - set(GATES),
            "gates: no rule for": required - set(self.gates),
            "forks: there is no fork": {rule.served_by for rule in self.forks.values()}
            - {"", *self.forks},
        }
        for problem, names in unknown.items():
            if names:
                raise ValueError(f"{problem} {', '.join(sorted(names))}")
        shown = {recipe for group in self.recipes.values() for recipe in group}
        for label in self.upstream_faults:
            gate, _, recipe = label.partition(" ")
            if gate not in SERVED or not recipe or recipe in shown:
                raise ValueError(
                    f"upstream_faults: {label} is no gate of a recipe beside *recipes*"
                )
        if required & set(SERVED) and not self.recipes:
            raise ValueError("recipes: the gates of a served model need some")


class ReleasePolicy(msgspec.Struct, frozen=True):
    """
    The file and what it refers to.

    Attributes:
        digests: Gate and recipe (of G0, gate and stack) → the sha256 of its policy.
        throughput: Of G8; None if no fork requires it.
    """

    file: PolicyFile
    digests: dict[str, str] = {}
    throughput: ThroughputRule | None = None

    @property
    def digest(self) -> str:
        """The sha256 of the policy, those of the gates included."""
        return sha256_bytes(canonical(self))

    def expected_digest(self, gate: str, stack: str, recipe: str) -> str:
        """Return the sha256 of the policy of *gate*; empty if any policy will do."""
        return self.digests.get(f"{gate} {stack if gate == 'G0' else recipe}".strip(), "")

    def set_rule(self, stack: str) -> SetRule:
        """Return how the set of *stack* is locked."""
        return self.file.sets.get(stack, SetRule())


def load(root: Path, arch: str = "") -> ReleasePolicy:
    """
    Return the release policy of the checkout at *root*.

    Args:
        arch: The architecture of the wheels; empty for that of each stack.

    Raises:
        file-invalid: A file is missing or not valid, or names a recipe that does not exist.
        policy-unknown-check: It names a check that no gate emits.
    """
    from sparkwright.gates.core import policy as gate_policy

    path = root / "ci" / f"release-{capability(arch)}.yaml"
    own = path.is_file()
    path = path if own else root / "ci" / "release.yaml"
    file = strict_yaml.load(path, PolicyFile)
    checks = (
        (gate, name)
        for gate, rule in file.gates.items()
        for name in (*rule.checks, *rule.optional, *rule.wanted)
    )
    gate_policy.require_declared(path, checks)
    required = {gate for rule in file.forks.values() for gate in rule.gates}
    digests = {
        **_audit_digests(root, file, arch if own else ""),
        **_gate_digests(root, required, file),
    }
    throughput = _throughput(root, file.workloads) if "G8" in required else None
    return ReleasePolicy(file, digests, throughput)


def _gate_digests(root: Path, required: set[str], file: PolicyFile) -> dict[str, str]:
    from sparkwright.bench.recipes import recipe as recipes
    from sparkwright.gates.core import policy as gate_policy

    names = {name for group in file.recipes.values() for name in group} | file.faulty
    if unknown := names - set(recipes.names(root)):
        raise FileError(
            "file-invalid",
            "The release policy names recipes that do not exist.",
            details=sorted(unknown),
        )
    policies = gate_policy.load(root)
    if file.profile not in policies.generation.profiles:
        raise FileError(
            "file-invalid",
            f"The release policy names the profile {file.profile!r}, which does not exist.",
        )
    loaded = [recipes.load(root, name) for name in sorted(names)]
    served = [gate for gate in SERVED if gate in required and gate != "G8"]
    return {
        **{gate: policies.digest(gate) for gate in ("G1", "G2") if gate in required},
        **{
            f"{gate} {recipe.name}": policies.digest(gate, recipe, file.profile)
            for gate in served
            for recipe in loaded
        },
    }


def _audit_digests(root: Path, file: PolicyFile, arch: str) -> Mapping[str, str]:
    from sparkwright.audit import policy
    from sparkwright.forks.stack import Project

    digests = {}
    for path in sorted(root.glob("forks/*/stack.yaml")):
        if arch and path.parent.name not in file.sets:
            continue  # it may have no rules for this architecture
        project = Project(root, path.parent.name, arch)
        if project.audit_file.is_file():
            audit = policy.load(project.audit_file, project.spec.arch)
            digests[f"G0 {project.stack}"] = sha256_bytes(canonical(audit))
    return digests


def _throughput(root: Path, names: str) -> ThroughputRule:
    from sparkwright.bench.recipes import workloads

    policy = strict_yaml.load(root / "ci" / "gates" / "throughput.yaml", ThroughputPolicy)
    cells = (cell for cell in workloads.load(root).cells(names or policy.workloads) if cell.primary)
    return ThroughputRule(policy, tuple(cells))
