"""
The policies of all gates, loaded together and validated against the checks that gates declare.

A policy can only name checks that some gate emits, so that neither can drift from the other.
"""

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from sparkwright.bench.machine.monitor import MachinePolicy
from sparkwright.bench.recipes.recipe import Recipe
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.core import strict_yaml
from sparkwright.core.files import canonical, sha256_bytes
from sparkwright.gates.accuracy import AccuracyPolicy
from sparkwright.gates.contract import ContractPolicy
from sparkwright.gates.core.ladder import GATES, SERVED, STOPPED, WHEEL_SERVED
from sparkwright.gates.core.verdict import Declared, GateError, declarations
from sparkwright.gates.device import DevicePolicy
from sparkwright.gates.logprobs import LogprobsPolicy
from sparkwright.gates.numerics import NumericsPolicy
from sparkwright.gates.soak import SoakPolicy
from sparkwright.gates.text_checks import GenerationPolicy
from sparkwright.gates.throughput_run import ThroughputPolicy


class GatePolicies(msgspec.Struct, frozen=True):
    """The policy of each gate from G1, in their order, and of the machine of G8."""

    numerics: NumericsPolicy
    device: DevicePolicy
    contract: ContractPolicy
    generation: GenerationPolicy
    logprobs: LogprobsPolicy
    accuracy: AccuracyPolicy
    soak: SoakPolicy
    throughput: ThroughputPolicy
    machine: MachinePolicy

    def digest(
        self,
        gate: str,
        recipe: Recipe | None = None,
        profile: str = "default",
        settings: tuple[object, ...] = (),
    ) -> str:
        """
        Return the sha256 of what *gate* judges by: its policy, and the recipe if there is one.

        Args:
            profile: Of G4, which G7 runs again. One that asks for something else than the default
                makes another policy; the text around prompts does not.
            settings: Those of the server beside the recipe's, which make it another policy.
        """
        parts = [getattr(self, PACKAGES[gate])]
        if gate == "G7":  # asks the questions of G4 and G5 again
            parts += [self.generation, self.logprobs]
        if gate in SERVED:
            parts += filter(None, (recipe, settings if any(settings) else ()))
        if gate in ("G4", "G7"):
            kind, default = self.generation.profiles[profile], self.generation.profiles["default"]
            if replace(kind, wrap=default.wrap) != default:
                parts.append(profile)
        return sha256_bytes(canonical(parts if len(parts) > 1 else parts[0]))

    def throughput_digest(self, cells: Sequence[WorkloadCell], recipe: Recipe) -> str:
        """Return the sha256 of what G8 judges by."""
        return sha256_bytes(
            canonical((self.throughput, self.machine, cells, self.contract, recipe))
        )


#: Gate → its package, which is also the name of its policy file.
PACKAGES = dict(zip(list(GATES)[1:], GatePolicies.__struct_fields__, strict=False))


def load(root: Path) -> GatePolicies:
    """
    Return the policies in ``ci/gates`` of the checkout at *root*.

    Raises:
        file-invalid: A file is missing or not valid.
    """
    folder = root / "ci" / "gates"
    return GatePolicies(
        **{
            field.name: strict_yaml.load(folder / f"{field.name}.yaml", field.type)
            for field in msgspec.structs.fields(GatePolicies)
        }
    )


def declared(gate: str) -> tuple[Declared, ...]:
    """Return every check that *gate* can emit."""
    module = "wheel_audit" if gate == "G0" else PACKAGES[gate]
    table: tuple[Declared, ...] = importlib.import_module(f"sparkwright.gates.{module}").CHECKS
    served = WHEEL_SERVED if gate in SERVED and gate != "G8" else ()
    return (*table, *served, *STOPPED)


def require_declared(policy: Path, names: Iterable[tuple[str, str]]) -> None:
    """
    Raise unless each of *names*, a gate and a check, is declared by that gate and can pass there.

    Raises:
        policy-unknown-check: One cannot.
    """
    unknown = list[str]()
    for gate, name in names:
        if all(entry.role != "decides" for entry in declarations(declared(gate), name)):
            unknown.append(f"{gate}: {name}")
    if unknown:
        raise GateError(
            "policy-unknown-check",
            f"{policy.name} names {len(unknown)} check(s) that no gate emits.",
            details=unknown,
        )
