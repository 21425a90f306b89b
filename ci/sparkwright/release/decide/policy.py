"""
``ci/release.yaml``: what a release must show before it may be called verified, and how its set is locked.

The policies of the gates are read with it, by digest: a verdict that was judged by another one counts for nothing here.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import msgspec

from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.core import strict_yaml
from sparkwright.core.errors import FileError
from sparkwright.core.files import canonical, sha256_bytes
from sparkwright.gates.core.ladder import GATES, SERVED
from sparkwright.gates.throughput.policy import ThroughputPolicy

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=400)]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base of every record of the file: frozen, and an unknown field is a typo."""


class Identity(_Record, frozen=True):
    """An identity of Sigstore: what the certificate names, and who vouched for it."""

    identity: Text
    issuer: Text


class ForkRule(_Record, frozen=True):
    """
    What ``verified`` asks of the wheels of a fork.

    Attributes:
        gates: That must pass about these bytes.
        served_by: The fork in whose ladder these bytes were installed, so that its gates speak of them, too; empty for none.
        record: A build record, with a source that is resolved. *sbom*: an SBOM inside. *isolated*: no network while it was compiled.
    """

    gates: tuple[str, ...]
    served_by: str = ""
    record: bool = False
    sbom: bool = False
    isolated: bool = False

    def __post_init__(self) -> None:
        if unknown := [name for name in self.gates if name not in GATES]:
            raise ValueError(f"there is no gate {', '.join(unknown)}")


class GateRule(_Record, frozen=True):
    """
    What a gate's pass rests on.

    Attributes:
        checks: Patterns of names; at least one check must match each, and all that do must be required and pass.
        optional: Checks that the gate can make and that no pass rests on.
        wanted: Checks that must be there besides for ``verified``; a pass without them is a sound one of something else.
        gpu: Whether it counts only from a machine with the GPU of the policy.
    """

    checks: Annotated[tuple[Text, ...], msgspec.Meta(min_length=1)]
    optional: tuple[Text, ...] = ()
    wanted: tuple[Text, ...] = ()
    gpu: bool = False


class Override(_Record, frozen=True):
    """A requirement in place of what packages state of that project, and why."""

    requirement: Text
    reason: Text

    def __post_init__(self) -> None:
        _requirement(self.requirement)


class SetRule(_Record, frozen=True):
    """
    How the matched set of a stack is locked.

    Attributes:
        pythons: Versions that it is for (``3.12``).
        requires: Requirements beside those of the wheels.
    """

    pythons: Annotated[tuple[Annotated[str, msgspec.Meta(pattern=r"^3\.\d{1,2}$")], ...], msgspec.Meta(min_length=1)]
    requires: tuple[Text, ...] = ()
    overrides: tuple[Override, ...] = ()

    def __post_init__(self) -> None:
        for text in self.requires:
            _requirement(text)


class Speeds(_Record, frozen=True):
    """Of G8: its policy, and the cells that decide."""

    policy: ThroughputPolicy
    cells: tuple[WorkloadCell, ...]


class ReleasePolicy(_Record, frozen=True):
    """
    The whole policy.

    Attributes:
        url: Where the index is served, with a final slash; empty while it is unknown.
        days: Until a signed manifest expires. *retain*: candidates of each stack that are kept.
        recipes: Group → recipes of which one must be shown for ``verified``, by every gate of a served model.
        keys: Fingerprints of those who publish. *immutable*: whether a host that could replace a file is refused.
        gpu: The compute capability that gates count from (``12.1``).
        digests: Gate that is asked for → sha256 of its policy as it is now; of G0 by stack (``G0 2026.11``). Read from ``ci/``.
        speeds: The same of G8; None where that is not asked for.
    """

    gpu: Text
    forks: dict[str, ForkRule]
    gates: dict[str, GateRule]
    recipes: dict[str, Annotated[tuple[Text, ...], msgspec.Meta(min_length=1)]] = {}
    url: str = ""
    days: Annotated[int, msgspec.Meta(ge=1, le=365)] = 30
    root: str = ""  # of the new code
    roles: dict[str, dict[str, int]] = {}
    identity: dict[str, str] | None = None
    keys: tuple[Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")], ...] = ()
    identities: tuple[Identity, ...] = ()
    immutable: bool = True
    retain: Annotated[int, msgspec.Meta(ge=1)] = 12
    sets: dict[str, SetRule] = {}
    digests: dict[str, str] = {}
    speeds: Speeds | None = None

    def __post_init__(self) -> None:
        if self.url and not (self.url.endswith("/") and self.url.startswith(("https://", "http://127.0.0.1:"))):
            raise ValueError(f"url: {self.url!r} is no https address with a final slash")
        if lost := {gate for rule in self.forks.values() for gate in rule.gates} - set(self.gates):
            raise ValueError(f"gates: nothing says what a pass of {', '.join(sorted(lost))} rests on")
        if lost := set(self.gates) - set(GATES):
            raise ValueError(f"gates: there is no gate {', '.join(sorted(lost))}")
        asked = {gate for rule in self.forks.values() for gate in rule.gates}
        if asked & set(SERVED) and not self.recipes:
            raise ValueError("recipes: nothing says what must be served")
        if lost := {rule.served_by for rule in self.forks.values()} - {"", *self.forks}:
            raise ValueError(f"forks: {', '.join(sorted(lost))} is none")

    @property
    def digest(self) -> str:
        """The sha256 of the policy, those of the gates included."""
        return sha256_bytes(canonical(self))

    def judged_by(self, gate: str, stack: str, recipe: str = "") -> str:
        """Return the sha256 of the policy that *gate* has to be judged by; empty where any will do."""
        return self.digests.get(f"{gate} {stack if gate == 'G0' else recipe}".strip(), "")


def load(root: Path) -> ReleasePolicy:
    """
    Return the release policy of the checkout at *root*, and with it the digests of the gates' policies.

    Raises:
        file-invalid: A file is missing or not valid.
        policy-unknown-check: One names a check that no gate emits.
    """
    path = root / "ci" / "release.yaml"
    read = strict_yaml.load(path, ReleasePolicy)
    if read.digests or read.speeds:
        raise FileError("file-invalid", f"{path} states what follows from other files.", details=["digests and speeds are not written there"])
    from sparkwright.gates.core import policy as gate_policy

    names = ((gate, name) for gate, rule in read.gates.items() for name in (*rule.checks, *rule.optional, *rule.wanted))
    gate_policy.require_declared(path, names)
    asked = {gate for rule in read.forks.values() for gate in rule.gates}
    digests = {**_audits(root), **_gates(root, asked, {name for group in read.recipes.values() for name in group})}
    return msgspec.structs.replace(read, digests=digests, speeds=_speeds(root) if "G8" in asked else None)


def _gates(root: Path, asked: Collection[str], named: Collection[str]) -> dict[str, str]:
    from sparkwright.bench.recipes import recipe as recipes
    from sparkwright.gates.core import policy as gate_policy

    if unknown := set(named) - set(recipes.names(root)):
        raise FileError("file-invalid", "ci/release.yaml names recipes that do not exist.", details=sorted(unknown))
    policies = gate_policy.load(root)
    own = {gate: policies.digest(gate) for gate in ("G1", "G2") if gate in asked}
    loaded = [recipes.load(root, name) for name in sorted(named)]
    served = [gate for gate in SERVED if gate in asked and gate != "G8"]
    return {**own, **{f"{gate} {recipe.name}": policies.digest(gate, recipe) for gate in served for recipe in loaded}}


def _audits(root: Path) -> dict[str, str]:
    from sparkwright.audit import policy
    from sparkwright.forks.stack import Project

    projects = (Project(root, path.parent.name) for path in sorted(root.glob("forks/*/stack.yaml")))
    loaded = {own.stack: policy.load(own.audit_file, own.spec.arch) for own in projects if own.audit_file.is_file()}
    return {f"G0 {stack}": sha256_bytes(canonical(one)) for stack, one in loaded.items()}


def _speeds(root: Path) -> Speeds:
    from sparkwright.bench.recipes import workloads
    read = strict_yaml.load(root / "ci" / "gates" / "throughput.yaml", ThroughputPolicy)
    cells = tuple(cell for cell in workloads.load(root).cells(read.workloads) if cell.primary)
    return Speeds(read, cells)


def _requirement(text: str) -> None:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        found = Requirement(text)
    except InvalidRequirement as error:
        raise ValueError(f"{text!r} is not a requirement: {' '.join(str(error).split())}") from error
    if found.url:
        raise ValueError(f"{text!r} is not a version of the package index")
