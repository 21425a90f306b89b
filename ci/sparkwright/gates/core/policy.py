"""
The names of all checks that the gates can emit, from the table ``CHECKS`` of each gate's module.

A verdict is only built of declared checks (`check`), and a policy may only ask for declared ones (`faults`), so that neither can drift
from the other.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from sparkwright.gates.core.verdict import Check, Declared, declare, overlap

#: Gate → the module whose ``CHECKS`` declares its checks.
MODULES: Mapping[str, str] = {
    "G0": "wheel_audit", "G1": "numerics.gate", "G2": "device.gate", "G3": "contract.gate", "G4": "generation.gate",
    "G5": "logprobs.gate", "G6": "accuracy.gate", "G7": "soak.gate", "G8": "throughput.gate",
}  # fmt: skip

#: The check by which a ladder reports, for any gate, that an earlier one ended it.
LADDER = declare("ladder", role="reports")


@functools.cache
def declared(gate: str) -> tuple[Declared, ...]:
    """Return every check that *gate* can emit."""
    table: tuple[Declared, ...] = importlib.import_module(f"sparkwright.gates.{MODULES[gate]}").CHECKS
    return (*table, *LADDER)


def check(gate: str, checks: Iterable[Check]) -> None:
    """
    Raise an error unless all *checks* are as *gate* declares them.

    Raises:
        ValueError: One has an undeclared name, or another role; a fault of the gate's code.
    """
    for emitted in checks:
        # An exact declaration takes precedence over a pattern that also matches.
        matching = [entry for entry in declared(gate) if entry.name == emitted.name] or [
            entry for entry in declared(gate) if fnmatchcase(emitted.name, entry.name)
        ]
        if not matching:
            raise ValueError(f"{gate} emits the check {emitted.name}, which it does not declare")
        if all(reasons := [entry.fault(emitted) for entry in matching]):
            raise ValueError(f"{gate}: {emitted.name}: {reasons[0]}")


def faults(gate: str, checks: Iterable[str], measured: Iterable[str] = (), wanted: Iterable[str] = ()) -> Iterator[str]:
    """
    Yield what a policy asks of *gate* that no check of it can give.

    Args:
        checks, wanted: Names and patterns of checks that have to be required and pass.
        measured: Names and patterns of checks that have to show a figure or a sample.
    """
    for pattern in (*checks, *wanted):
        if not any(entry.role == "decides" and overlap(pattern, entry.name) for entry in declared(gate)):
            yield f"{gate}: no check {pattern} can pass there"
    for pattern in measured:
        matching = [entry for entry in declared(gate) if entry.role != "reports" and overlap(pattern, entry.name)]
        bare = [entry.name for entry in matching if not entry.measured]
        if not matching or bare:
            yield f"{gate}: {', '.join(bare) or pattern} shows neither figure nor sample"
