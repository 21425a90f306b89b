"""
The release policy, ``ci/release.yaml``, or ``ci/release-X.Y.yaml`` for wheels for another GPU: what
`verified` asks for, the roles of the index, and how a set is locked.

The policies of the gates are read with it, by digest: a verdict by another policy does not count.
"""

from pathlib import Path
from typing import Annotated

import msgspec
from packaging.requirements import Requirement

from sparkwright.audit import policy as audit_policy
from sparkwright.bench.recipes import recipe as recipes, workloads
from sparkwright.client.records import FileEdit, Name, Overlay
from sparkwright.core import strict_yaml
from sparkwright.core.errors import FileError
from sparkwright.core.files import canonical, sha256_bytes
from sparkwright.forks.stack import Project, capability, stack_names
from sparkwright.gates.core import policy as gate_policy
from sparkwright.gates.core.ladder import GATES, SERVED

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=400)]
Texts = Annotated[tuple[Text, ...], msgspec.Meta(min_length=1)]
Python = Annotated[str, msgspec.Meta(pattern=r"\A3\.\d{1,2}\Z")]
#: An https address with a final slash, or one of this machine; empty if unknown.
IndexUrl = Annotated[str, msgspec.Meta(pattern=r"\A((https://|http://127\.0\.0\.1:)\S+/)?\Z")]


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
        isolated: Whether the compilation must have had no network.
    """

    gates: tuple[str, ...]
    served_by: str = ""
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
        attempts: A pass does not count after so many attempts of the same recipe that failed, did
            not decide or were killed; None for any number.
    """

    checks: Texts
    optional: tuple[Text, ...] = ()
    wanted: tuple[Text, ...] = ()
    gpu: bool = False
    attempts: Annotated[int, msgspec.Meta(ge=1)] | None = None


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

    pythons: Annotated[tuple[Python, ...], msgspec.Meta(min_length=1)] = (
        "3.11",
        "3.12",
        "3.13",
        "3.14",
    )
    requires: tuple[Text, ...] = ()
    overrides: tuple[Override, ...] = ()
    overlays: tuple[Overlay, ...] = ()
    inexact_records: dict[Name, strict_yaml.Prose] = {}
    edits: tuple[FileEdit, ...] = ()

    def __post_init__(self) -> None:
        # A line that is no requirement would be an option of uv.
        for text in (*self.requires, *(override.requirement for override in self.overrides)):
            if Requirement(text).url:
                raise ValueError(f"{text!r} names no version of the package index")


class PolicyFile(_Record, frozen=True):
    """
    The content of ``ci/release.yaml``.

    Attributes:
        roles: Days of validity and thresholds of the index's metadata.
        gpu: The compute capability that gates count from (``12.1``).
        recipes: Group → recipes of which one must be shown by every gate of a served model.
        url: The address of the index, with a final slash; empty if unknown.
        root: The fingerprint of root 1 of the index; empty if unknown.
        identity: The Sigstore identity that may hold the targets role.
        retain: How many candidates of each stack `prune` keeps.
        profile: The profile of G4 and G7, of ``ci/gates/generation.yaml``.
        workloads: What decides G8; empty for those of ``ci/gates/throughput.yaml``.
        other_baseline: Why G8 may compare with another build than the official wheel.
    """

    roles: Roles
    gpu: Text
    forks: dict[str, ForkRule]
    gates: dict[str, GateRule]
    recipes: dict[str, Texts] = {}
    url: IndexUrl = ""
    root: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{64})?\Z")] = ""
    identity: Identity | None = None
    retain: Annotated[int, msgspec.Meta(ge=1)] = 12
    profile: str = "default"
    workloads: str = ""
    other_baseline: str = ""
    sets: dict[str, SetRule] = {}

    @property
    def required(self) -> set[str]:
        """The gates that a fork needs."""
        return {gate for rule in self.forks.values() for gate in rule.gates}

    @property
    def groups(self) -> dict[str, Texts]:
        """The groups of *recipes*; empty if no fork needs a gate for which one counts."""
        return self.recipes if self.required & set(SERVED) - {"G8"} else {}

    def __post_init__(self) -> None:
        required = self.required
        forks = {rule.served_by for rule in self.forks.values()} - {"", *self.forks}
        for problem, names in (
            ("there is no gate", (required | set(self.gates)) - set(GATES)),
            ("gates: no rule for", required - set(self.gates)),
            ("forks: there is no fork", forks),
        ):
            if names:
                raise ValueError(f"{problem} {', '.join(sorted(names))}")
        if required & set(SERVED) and not self.recipes:
            raise ValueError("recipes: the gates of a served model need some")


class ReleasePolicy(msgspec.Struct, frozen=True):
    """
    The release policy, with the digests of the policies that it refers to.

    Attributes:
        digests: Gate and recipe (of G0, gate and stack) → the sha256 of its policy.
    """

    file: PolicyFile
    digests: dict[str, str] = {}

    @property
    def digest(self) -> str:
        """The sha256 of the policy, those of the gates included."""
        return sha256_bytes(canonical(self))

    def expected_digest(self, gate: str, stack: str, recipe: str) -> str:
        """Return the sha256 of the policy of *gate*; empty if any policy will do."""
        return self.digests.get(f"{gate} {stack if gate == 'G0' else recipe}".strip(), "")


def load(root: Path, arch: str = "") -> ReleasePolicy:
    """
    Return the release policy of the checkout at *root*.

    Args:
        arch: The architecture of the wheels; empty for that of each stack.

    Raises:
        file-invalid: A file is missing or not valid, or names a profile that does not exist.
        UsageError: It names a recipe that does not exist.
        policy-unknown-check: It names a check that no gate emits.
    """
    path = root / "ci" / f"release-{capability(arch)}.yaml"
    if not path.is_file():
        path, arch = root / "ci" / "release.yaml", ""
    file = strict_yaml.load(path, PolicyFile)
    checks = list[tuple[str, str]]()
    for gate, rule in file.gates.items():
        for name in (*rule.checks, *rule.optional, *rule.wanted):
            checks.append((gate, name))
    gate_policy.require_declared(path, checks)
    return ReleasePolicy(file, {**_audit_digests(root, file, arch), **_gate_digests(root, file)})


def _gate_digests(root: Path, file: PolicyFile) -> dict[str, str]:
    names = sorted(set[str]().union(*file.recipes.values()))
    loaded = [recipes.load(root, name) for name in names]
    policies, digests = gate_policy.load(root), dict[str, str]()
    if file.profile not in policies.generation.profiles:
        raise FileError(
            "file-invalid",
            f"The release policy names the profile {file.profile!r}, which does not exist.",
        )
    for gate in {"G1", "G2"} & file.required:
        digests[gate] = policies.digest(gate)
    suite = workloads.load(root).cells(file.workloads or policies.throughput.workloads)
    for name, recipe in zip(names, loaded, strict=True):
        for gate in file.required.intersection(SERVED) - {"G8"}:
            digests[f"{gate} {name}"] = policies.digest(gate, recipe, file.profile)
        if "G8" in file.required:
            cells = workloads.deciding(suite, recipe.decides, recipe.plan.max_num_seqs)
            digests[f"G8 {name}"] = policies.throughput_digest(cells, recipe)
    return digests


def _audit_digests(root: Path, file: PolicyFile, arch: str) -> dict[str, str]:
    digests = {}
    # Other stacks may have no rules for *arch*.
    for stack in set(stack_names(root)).intersection(file.sets) if arch else stack_names(root):
        project = Project(root, stack, arch)
        if project.audit_file.is_file():
            audit = audit_policy.load(project.audit_file, project.spec.arch)
            digests[f"G0 {stack}"] = sha256_bytes(canonical(audit))
    return digests
