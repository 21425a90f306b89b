"""
The ladder: gates run in order up to the first failure, and all verdicts about one wheel.

A gate after a failure is listed as not run. A gate that cannot run here stops nothing, but a
ladder with one is not a pass.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import psutil

from sparkwright.audit.report import AuditedWheel
from sparkwright.builder import host_info
from sparkwright.core.console import console, duration
from sparkwright.gates.core.verdict import (
    ORDER,
    Check,
    Declared,
    State,
    Verdict,
    declarations,
    declare,
    not_run,
    worst,
)

#: The gates by name, and what each examines.
GATES: Mapping[str, str] = {
    "G0": "the bytes of the wheel",
    "G1": "numerics of the patched sources, without a GPU",
    "G2": "numerics of the wheel on the GPU",
    "G3": "the kernels that serve the recipe",
    "G4": "the text that the server generates",
    "G5": "the distributions behind the text",
    "G6": "accuracy, paired with a baseline",
    "G7": "hours of mixed load",
    "G8": "throughput against a baseline",
}

#: Gates that judge a served model, and so belong to a recipe.
SERVED = ("G3", "G4", "G5", "G6", "G7", "G8")

REASONS: Mapping[str, str] = {
    "earlier-failed": "An earlier gate failed or was invalid, and the ladder stops there. Fix that "
    "first, or continue with --keep-going.",
    "not-asked": "The command line does not name what the gate needs: a wheel, a server, its log, "
    "a reference, a baseline. The row says which option names it.",
}

#: The check by which the ladder reports, for any gate, that an earlier one stopped it.
STOPPED = declare("ladder", role="reports")

#: The check that binds what a server answers to the wheel that the verdict is about.
WHEEL_SERVED = declare("wheel-served")

FORMAT = 2


class Gate(msgspec.Struct, frozen=True):
    """
    One gate, ready to run.

    Attributes:
        policy: The sha256 of the policy that it judges by; empty if it has none.
        declared: The checks that it can emit.
        run: Return its checks; a failure of the set-up may raise.
        recipe: The recipe that is served; empty without one.
    """

    name: str
    policy: str
    declared: tuple[Declared, ...]
    run: Callable[[], tuple[Check, ...]]
    recipe: str = ""


class Ladder(msgspec.Struct, frozen=True):
    """
    All verdicts about one wheel, one for each gate and recipe.

    Attributes:
        stack: The stack whose policies judged.
        wheel: The wheel; None if only the source tree or a server was judged.
        verdicts: In the order of `GATES`, then by recipe.
        device_code: The wheel's device-code digest; empty if the audit did not run.
        format: Of this record.
    """

    stack: str
    wheel: AuditedWheel | None
    verdicts: tuple[Verdict, ...]
    device_code: str = ""
    format: int = FORMAT

    @property
    def state(self) -> State:
        """The worst state of the verdicts."""
        return worst(verdict.state for verdict in self.verdicts)

    @property
    def states(self) -> dict[str, State]:
        """The state of each gate: the failure of any recipe, else the best of all recipes."""
        found: dict[str, list[State]] = {}
        for verdict in self.verdicts:
            found.setdefault(verdict.gate, []).append(verdict.state)
        lowest = {gate: worst(states) for gate, states in found.items()}
        return {
            gate: state if state in ("fail", "invalid") else max(found[gate], key=ORDER.index)
            for gate, state in lowest.items()
        }

    def passes(self, recipe: str) -> bool:
        """Return whether all gates before G8 that ran for *recipe* passed."""
        own = [verdict for verdict in self.verdicts if verdict.recipe == recipe != ""]
        return worst(verdict.state for verdict in own if verdict.gate != "G8") == "pass"

    @property
    def host(self) -> dict[str, str]:
        """The facts on which all verdicts agree that were measured with the wheel installed."""
        measured = [verdict for verdict in self.verdicts if verdict.measured]
        serving = [verdict.host for verdict in measured if verdict.gate not in ("G0", "G1")]
        first, *others = serving or [verdict.host for verdict in measured] or [{}]
        return {
            name: value
            for name, value in first.items()
            if all(host.get(name) == value for host in others)
        }


def machine_facts() -> dict[str, str]:
    """Return processor, cores, memory, kernel, GPUs and driver; ``none`` without a GPU."""
    gpus = host_info.gpus()
    return {
        "processor": host_info.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 1e9:.1f} GB",
        "kernel": platform.release(),
        "gpu": ", ".join(f"{gpu.name} (SM {gpu.capability})" for gpu in gpus) or "none",
        "driver": gpus[0].driver if gpus else "none",
    }


def climb(
    gates: Sequence[Gate],
    *,
    stack: str,
    wheel: AuditedWheel | None = None,
    device_code: Callable[[], str] = str,
    host: Mapping[str, str] | None = None,
    attempt: int = 1,
    keep_going: bool = False,
    store: Callable[[Ladder], object] | None = None,
) -> Ladder:
    """
    Run *gates* in order and return their verdicts.

    Args:
        device_code: Called after each gate, as the first of them computes it.
        host: Facts of the machine (`Verdict.host`).
        attempt: The number of this run (`Verdict.attempt`).
        keep_going: Also run the gates after a failure.
        store: Called with the verdicts so far after each gate, so that hours of measuring survive
            a crash of the next gate.

    Raises:
        SparkwrightError: A gate could not be set up.
        ValueError: A gate emitted a check that it does not declare.
    """
    ladder = Ladder(stack, wheel, ())
    for gate in gates:
        stopped = next((v for v in ladder.verdicts if v.state in ("fail", "invalid")), None)
        began, clock = time.time(), time.monotonic()
        if stopped and not keep_going:
            message = f"{stopped.gate} is {stopped.state}, and the ladder stops there"
            checks: tuple[Check, ...] = (not_run("ladder", message, "earlier-failed"),)
        else:
            with console.step(f"{gate.name}: {GATES[gate.name]}"):
                checks = gate.run()
        seconds = time.monotonic() - clock
        made = verdict(gate, checks, wheel, host, attempt=attempt, began=began, seconds=seconds)
        console.note(f"{gate.name}: {made.state} after {duration(seconds)}")
        ladder = Ladder(stack, wheel, (*ladder.verdicts, made), device_code())
        if store:
            store(ladder)
    return ladder


def verdict(
    gate: Gate,
    checks: Sequence[Check],
    wheel: AuditedWheel | None,
    host: Mapping[str, str] | None = None,
    *,
    attempt: int = 1,
    began: float = 0.0,
    seconds: float = 0.0,
) -> Verdict:
    """
    Return the verdict of *gate* about *wheel*.

    Raises:
        ValueError: A check is not as the gate declares it.
    """
    for check in checks:
        matching = declarations((*gate.declared, *STOPPED), check.name)
        if not matching:
            raise ValueError(f"{gate.name} does not declare the check {check.name}")
        if all(faults := [entry.fault(check) for entry in matching]):
            raise ValueError(f"{gate.name}: {check.name}: {faults[0]}")
    return Verdict(
        gate.name,
        GATES[gate.name],
        wheel.sha256 if wheel else "",
        gate.policy,
        tuple(checks),
        gate.recipe,
        attempt,
        dict(host or {}),
        began,
        seconds,
    )


def merge(before: Ladder, now: Ladder) -> Ladder:
    """
    Return the verdicts of *before*, replaced by those of *now* for the same gate and recipe.

    Both are about one wheel and stack. A gate that could not run now does not replace an earlier
    measurement.
    """
    verdicts = {(old.gate, old.recipe): old for old in before.verdicts}
    for new in now.verdicts:
        key = (new.gate, new.recipe)
        verdicts[key] = new if new.measured else verdicts.get(key, new)
    ordered = tuple(verdicts[key] for key in sorted(verdicts))
    return Ladder(now.stack, now.wheel, ordered, now.device_code or before.device_code)
