"""The backend table: the kernel that serves each kind of layer in prefill and in decode."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Literal

import msgspec

from sparkwright.bench.recipes.recipe import UNRESOLVED, KernelContract
from sparkwright.core.errors import FileError
from sparkwright.core.files import read_json
from sparkwright.gates.contract import kernel_trace
from sparkwright.gates.contract.kernel_trace import KernelTrace
from sparkwright.gates.contract.policy import ContractPolicy
from sparkwright.gates.core.server_under_test import ServerIdentity
from sparkwright.gates.core.verdict import Check, Figure, Sample, failed, invalid, passed


class BackendTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The kernels of one server, stored as the baseline of a recipe.

    Attributes:
        identity: The wheel, the model and the machine.
        recipe: Name of the recipe.
        kernels: ``decode moe`` and the like → `kernel_trace.family` of the kernel that took most of
            the time.
    """

    identity: ServerIdentity
    recipe: str
    kernels: dict[str, str]
    format: Literal[1] = 1


def save(table: BackendTable, path: Path) -> None:
    """Write *table* to *path*, whole or not at all."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
    temporary.replace(path)


def shares(
    trace: KernelTrace, policy: ContractPolicy, contract: KernelContract
) -> dict[str, Counter[str]]:
    """Return ``decode moe`` and the like → the kernels of that kind with their microseconds."""
    found: dict[str, Counter[str]] = {}
    for phase, kernels in trace.items():
        patterns = [(kind, getattr(layer, phase)) for kind, layer in contract.layers.items()]
        patterns = [entry for entry in patterns if entry[1] != UNRESOLVED] + list(
            policy.layer_kinds.items()
        )
        for name, microseconds in kernels.items():
            kind = next((kind for kind, pattern in patterns if re.search(pattern, name)), None)
            if kind in contract.layers:
                found.setdefault(f"{phase} {kind}", Counter())[kernel_trace.family(name)] += (
                    microseconds
                )
    return found


def kernels(trace: KernelTrace, policy: ContractPolicy, contract: KernelContract) -> dict[str, str]:
    """Return ``decode moe`` and the like → the kernel that took most of the time."""
    table = shares(trace, policy, contract)
    return {layer: counted.most_common(1)[0][0] for layer, counted in sorted(table.items())}


def check(
    trace: KernelTrace,
    policy: ContractPolicy,
    contract: KernelContract,
    identity: ServerIdentity,
    recipe: str,
    baseline: Path | None,
) -> Check:
    """
    Return the check ``backends``: whether each layer has the kernel of the *baseline*.

    A change that `KernelContract.changes` explains passes, and is shown.
    """
    counted = shares(trace, policy, contract)
    table = kernels(trace, policy, contract)
    figures = [
        Figure(
            f"{layer}: {kernel}"[:200],
            100 * counted[layer][kernel] / max(counted[layer].total(), 1e-9),
            "%",
        )
        for layer, kernel in table.items()
    ]
    if baseline is None:
        message = (
            "name --against a folder that --record wrote, to compare the kernels of its server"
        )
        return Check(
            "backends", "not-run", message, "not-asked", required=False, figures=tuple(figures)
        )
    try:
        recorded = read_json(baseline, BackendTable)
    except FileError as error:
        return invalid("backends", error.what, "baseline-damaged")
    if not recorded.kernels:
        return invalid("backends", "the baseline names no kernels", "baseline-damaged")
    if not recorded.identity.wheel:
        return invalid("backends", "the baseline does not name its wheel", "baseline-unnamed")
    if identity.wheel == recorded.identity.wheel:
        return invalid("backends", "the baseline is the candidate itself", "baseline-is-candidate")
    if recorded.recipe != recipe or (identity.model and identity.model != recorded.identity.model):
        return invalid(
            "backends",
            f"the baseline is of {recorded.recipe}, or of other weights",
            "baseline-other-model",
        )
    changed = [
        layer
        for layer in sorted({*table, *recorded.kernels})
        if table.get(layer) != recorded.kernels.get(layer)
    ]
    samples = [
        Sample(layer, recorded.kernels.get(layer, "none"), table.get(layer, "none"))
        for layer in changed
    ]
    if unexplained := [layer for layer in changed if layer not in contract.changes]:
        message = f"another kernel than in the baseline: {', '.join(unexplained)}"
        return failed("backends", message, "backend-changed", figures=figures, samples=samples)
    explained = f"; {', '.join(changed)} changed as the recipe explains" if changed else ""
    return passed(
        "backends",
        f"the kernels of {len(table)} layers and phases are the baseline's{explained}",
        figures=figures,
        samples=samples,
    )
