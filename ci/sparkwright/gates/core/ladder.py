"""
The ladder: gates in order, stopped at the first failure, and the record that binds their verdicts to a wheel.

A gate that comes after a failure is listed as not run: what it would say of a wheel that is known to be wrong would only be read as
comfort. A gate that cannot run here stops nothing; a ladder with one is not a pass.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import msgspec
import psutil
from msgspec.structs import replace

from sparkwright.audit.report import AuditedWheel
from sparkwright.builder import host_info
from sparkwright.core.console import console, duration
from sparkwright.gates.core import policy
from sparkwright.gates.core.verdict import Check, State, Verdict, not_run, worst

#: The gates by name, and what each looks at.
GATES: Mapping[str, str] = {
    "G0": "the bytes in the wheel",
    "G1": "numerics without a GPU",
    "G2": "numerics on the GPU",
    "G3": "what the server says it runs",
    "G4": "the words it says",
    "G5": "the distributions behind them",
    "G6": "tasks, paired with the baseline",
    "G7": "hours of mixed load",
    "G8": "throughput, against a baseline",
}

TITLE = "the ladder itself"

#: References that the ladder itself gives to a check that did not run.
REASONS: Mapping[str, str] = {
    "earlier-failed": "An earlier gate failed or was invalid, and the ladder stops there. Mend that first, or go on with --keep-going.",
    "not-asked": "The command line did not name what the gate needs. It says so itself: a wheel, a server, a baseline.",
}

FORMAT = 1


def machine_facts() -> dict[str, str]:
    """Return processor, cores, memory, kernel and GPUs with their driver, by name; a machine without a GPU says so."""
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


class Gate(msgspec.Struct, frozen=True):
    """
    One gate, ready to run.

    Attributes:
        policy: The sha256 of the policy that it judges by; empty where it has none of its own.
        run: Makes its checks; a failure of set-up (a tool that cannot be installed) may come out as an exception.
    """

    name: str
    policy: str
    run: Callable[[], tuple[Check, ...]]


class Ladder(msgspec.Struct, frozen=True):
    """
    All verdicts about one wheel.

    Attributes:
        format: Of this record.
        stack: The stack whose policies judged.
        wheel: The wheel; None where only the source tree or a server was judged, and such a ladder publishes nothing.
        device_code: The wheel's device-code digest.
        host: Facts of the machine, by name (`Verdict.host`).
        verdicts: One for each gate that was asked for, in the order of `GATES`.
    """

    stack: str
    wheel: AuditedWheel | None
    verdicts: tuple[Verdict, ...]
    device_code: str = ""
    host: dict[str, str] = {}
    format: int = FORMAT

    @property
    def state(self) -> State:
        """The worst state of the verdicts."""
        return worst(verdict.state for verdict in self.verdicts)

    @property
    def complete(self) -> bool:
        """Do all gates of `GATES` pass, about a wheel?"""
        states = {verdict.gate: verdict.state for verdict in self.verdicts}
        return self.wheel is not None and all(states.get(name) == "pass" for name in GATES)


def climb(
    gates: Sequence[Gate],
    *,
    stack: str,
    wheel: AuditedWheel | None = None,
    device_code: Callable[[], str] = str,
    host: Mapping[str, str] | None = None,
    keep_going: bool = False,
    keep: Callable[[Ladder], object] | None = None,
) -> Ladder:
    """
    Run *gates* in order and return their verdicts.

    Args:
        device_code: Asked after the gates, as the first of them computes it.
        keep: Called with what there is after each gate, so that hours of measuring outlive a fault of the next gate.
        keep_going: Also run what comes after a failure; its verdicts do not make the ladder better.

    Raises:
        SparkwrightError: A gate could not be set up.
        ValueError: A gate emitted a check that it does not declare.
    """
    verdicts: list[Verdict] = []
    for gate in gates:
        stopped = next((one for one in verdicts if one.state in ("fail", "invalid")), None)
        if stopped and not keep_going:
            skipped = not_run("ladder", f"{stopped.gate} is {stopped.state}, and the ladder stops there", "earlier-failed")
            verdicts.append(verdict(gate, (skipped,), wheel, host))
            continue
        began, clock = time.time(), time.monotonic()
        with console.step(f"{gate.name}: {GATES[gate.name]}"):
            checks = gate.run()
        made = verdict(gate, checks, wheel, host, began=began, seconds=time.monotonic() - clock)
        console.note(f"{gate.name}: {made.state} after {duration(made.seconds)}")
        verdicts.append(made)
        if keep:
            keep(_bound(stack, wheel, verdicts, device_code(), host))
    return _bound(stack, wheel, verdicts, device_code(), host)


def _bound(stack: str, wheel: AuditedWheel | None, verdicts: Sequence[Verdict], code: str, host: Mapping[str, str] | None) -> Ladder:
    return Ladder(stack, wheel, tuple(replace(verdict, device_code=code) for verdict in verdicts), code, dict(host or {}))


def verdict(
    gate: Gate, checks: Sequence[Check], wheel: AuditedWheel | None, host: Mapping[str, str] | None = None, *,
    began: float = 0.0, seconds: float = 0.0,
) -> Verdict:  # fmt: skip
    """
    Return the verdict of *gate* about *wheel*.

    Raises:
        ValueError: A check is not as the gate's ``CHECKS`` declare it.
    """
    policy.check(gate.name, checks)
    about, facts = wheel.sha256 if wheel else "", dict(host or {})
    return Verdict(gate.name, GATES[gate.name], about, gate.policy, tuple(checks), host=facts, began=began, seconds=seconds)


def merged(before: Ladder, now: Ladder) -> Ladder:
    """
    Return the verdicts of *now* and, for the gates that it did not measure, those of *before*, which is about the same wheel and stack.

    A gate of which *now* ran no check does not replace an earlier measurement. Of the facts of the machine, the newest measured ones win.
    What was installed beside the wheel is kept only if all gates that used the environment agree.

    Raises:
        ValueError: The two are about different bytes, or were judged as different stacks.
    """
    if (before.wheel and before.wheel.sha256, before.stack) != (now.wheel and now.wheel.sha256, now.stack):
        raise ValueError("the verdicts are about different wheels or stacks")
    made = {verdict.gate: verdict for verdict in before.verdicts}
    made.update((verdict.gate, verdict) for verdict in now.verdicts if _measured(verdict) or verdict.gate not in made)
    code = now.device_code or before.device_code
    verdicts = tuple(replace(made[name], device_code=code) for name in GATES if name in made)
    facts: dict[str, str] = {}
    for verdict in sorted(verdicts, key=lambda one: (_measured(one), one.began)):
        facts.update(verdict.host)
    used = [one for one in verdicts if one.gate not in ("G0", "G1") and _measured(one)]
    unsure = {name for name in facts if name.startswith("content ") and any(one.host.get(name) != facts[name] for one in used)}
    return Ladder(now.stack, now.wheel, verdicts, code, {name: value for name, value in facts.items() if name not in unsure})


def _measured(verdict: Verdict) -> bool:
    """Return whether a check of the gate was run, and not only listed."""
    return any(check.state != "not-run" for check in verdict.checks)


def document(ladder: Ladder) -> dict[str, Any]:
    """Return *ladder* as its JSON document: the record, and the states that follow from it, so that nobody computes them anew."""
    made: dict[str, Any] = msgspec.to_builtins(ladder)
    for verdict, record in zip(ladder.verdicts, made["verdicts"], strict=True):
        record["state"] = verdict.state
    return {**made, "state": ladder.state, "complete": ladder.complete}


def read(data: bytes) -> Ladder:
    """
    Return the ladder of a JSON document.

    Raises:
        ValueError: It is not one, it is of another format, or the states in it are not those that follow from its checks.
    """
    ladder = msgspec.json.decode(data, type=Ladder)
    if ladder.format != FORMAT:
        raise ValueError(f"the verdicts are of format {ladder.format}; this program reads {FORMAT}")
    said = msgspec.json.decode(data, type=_Said)
    if said.state != ladder.state or said.complete != ladder.complete:
        raise ValueError(f"the document says {said.state}, its checks say {ladder.state}")
    if wrong := [one.gate for one, told in zip(ladder.verdicts, said.verdicts, strict=True) if one.state != told.state]:
        raise ValueError(f"the document says another state of {', '.join(wrong)} than its checks")
    return ladder


class _Told(msgspec.Struct, frozen=True):
    """The state that a document says of one verdict."""

    state: State


class _Said(msgspec.Struct, frozen=True):
    """The states that a document says."""

    state: State
    complete: bool
    verdicts: tuple[_Told, ...]


def schema() -> dict[str, Any]:
    """Return the JSON schema of `document`."""
    made = msgspec.json.schema(Ladder)
    states = {"enum": list(get_args(State))}
    named = made["$defs"]
    for name, further in (("Verdict", {"state": states}), ("Ladder", {"state": states, "complete": {"type": "boolean"}})):
        named[name]["properties"].update(further)
        named[name]["required"] = [*named[name]["required"], *further]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "sparkwright verdicts", **made}
