"""The page of a night: the answer first, then ours against stock, then everything behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from sparkwright import __version__
from sparkwright.bench import report as view
from sparkwright.bench.report import number
from sparkwright.core import pages
from sparkwright.core.console import duration
from sparkwright.core.states import State
from sparkwright.gates.core.ladder import GATES, STEP_FAILED, STOPPED, UNREACHABLE
from sparkwright.gates.core.server_under_test import Pace
from sparkwright.gates.core.verdict import ORDER, Verdict, worst

#: Checks that the answer names of a gate; the others are further down.
NAMED = 3


class NightStep(msgspec.Struct, frozen=True):
    """
    A step of a night.

    Attributes:
        message: One sentence: what was made, or why it is no pass.
        seconds: How long it took. *expected_s*: the estimate before.
        verdict: Of a gate; None for other steps.
    """

    name: str
    state: State
    message: str
    seconds: float = 0.0
    expected_s: float = 0.0
    verdict: Verdict | None = None


def state_of(steps: Sequence[NightStep]) -> State:
    """Return the worst state of all gates; one that *steps* leave out is not-run."""
    states = {step.name: step.state for step in steps}
    return worst(states.get(name, "not-run") for name in GATES)


def answer(
    recipe: str, steps: Sequence[NightStep], requested: Sequence[str], host: Mapping[str, str]
) -> str:
    """
    Return whether every gate passed for *recipe*, where and in which attempt, or what is missing.

    Whether that counts for a release is a matter of its policy, which gates do not know.

    Args:
        requested: The gates that the night has.
    """
    if state_of(steps) == "pass":
        last = max(step.verdict.attempt for step in steps if step.verdict)
        gpu = host.get("gpu", "none")
        return f"Verified on {gpu}, attempt {last}: every gate passed for {recipe}."
    return f"Not verified for {recipe}: {'; '.join(_missing(steps, requested))}."


def _missing(steps: Sequence[NightStep], requested: Sequence[str]) -> Iterator[str]:
    """Yield each cause that keeps the wheel from being verified, with its gates."""
    for step in steps:
        if step.name not in GATES and step.state == "fail":
            yield f"{step.name} could not be made ({step.message})"
    causes: dict[str, list[str]] = {}
    verdicts = [step.verdict for step in steps if step.verdict]
    for verdict in sorted(verdicts, key=lambda verdict: ORDER.index(verdict.state)):
        if verdict.state != "pass":
            cause = f"{verdict.state} ({'; '.join(unmet(verdict)[:NAMED])})"
            causes.setdefault(cause, []).append(verdict.gate)
    finished = {step.name for step in steps}
    for name in GATES:
        if name not in finished:
            cause = "not run yet" if name in requested else "not asked for"
            causes.setdefault(cause, []).append(name)
    for cause, names in causes.items():
        yield f"{', '.join(names)} {cause}"


def facts(
    host: Mapping[str, str], observed: Mapping[str, Any], pace: Pace | None
) -> dict[str, str]:
    """
    Return facts of the machine and of the stock wheel's server, by name.

    Args:
        observed: The facts about that server; empty if they were not recorded.
        pace: As measured on it; None if it was not.
    """
    named = dict(host)
    for name, value in observed.items():
        if isinstance(value, (str, int)) and name not in ("format", "recipe"):
            named[f"stock: {name}"] = str(value)
    for name, value in observed.get("prefix_cache", {}).items():
        named[f"stock: prefix cache, {name}"] = str(value)
    if pace:
        named["stock: start"] = duration(pace.start_s)
        named["stock: prefill"] = f"{number(pace.prefill_tokens_s)} tok/s, one request"
        named["stock: decode"] = f"{number(pace.decode_tokens_s)} tok/s, one request"
    return named


def unmet(verdict: Verdict) -> list[str]:
    """Return why *verdict* is no pass: the checks in its state, with their reasons."""
    if verdict.state == "pass":
        return []
    texts = []
    for check in verdict.checks:
        if check.required and check.state == verdict.state:
            # The row of the step that failed has the message.
            short = check.name != STOPPED[0].name or check.reason in (STEP_FAILED, UNREACHABLE)
            texts.append(f"{check.name if short else check.message}: {check.reason}")
    return texts


def render(**values: Any) -> str:
    """Return the page: one file, without scripts. The template names the *values*."""
    template = pages.environment("sparkwright.gates.core").get_template("night.html")
    return template.render(gates=GATES, version=__version__, duration=duration, view=view, **values)
