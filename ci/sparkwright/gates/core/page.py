"""The page of a night: the answer first, then ours against stock, then everything behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from sparkwright import __version__
from sparkwright.bench import report as view
from sparkwright.bench.report import number
from sparkwright.bench.results import Result
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


class NightReport(msgspec.Struct, frozen=True):
    """
    What a night found, so far.

    Attributes:
        recipe, title: Of the model.
        wheel, sha256: Ours. *stock*: the sha256 of the stock wheel.
        steps: Those that are finished, in their order.
        requested_gates: Those that the night has.
        result: The measurements of G8; None without any.
        observed: The facts about the stock wheel's server; empty if they were not recorded.
        pace: As measured on the stock wheel; None if it was not.
        hours: The budget; None without one.
        seconds: That this run has taken.
    """

    recipe: str
    title: str
    stack: str
    wheel: str
    sha256: str
    stock: str
    steps: tuple[NightStep, ...]
    requested_gates: tuple[str, ...]
    result: Result | None
    observed: dict[str, Any]
    pace: Pace | None
    host: dict[str, str]
    hours: float | None
    seconds: float

    @property
    def state(self) -> State:
        """The worst state of all gates; one that the night leaves out is not-run."""
        states = {step.name: step.state for step in self.steps}
        return worst(states.get(name, "not-run") for name in GATES)

    @property
    def answer(self) -> str:
        """
        Whether every gate passed for the recipe, where and in which attempt, or what is missing.

        Whether that counts for a release is a matter of its policy, which gates do not know.
        """
        if self.state == "pass":
            last = max(step.verdict.attempt for step in self.steps if step.verdict)
            gpu = self.host.get("gpu", "none")
            return f"Verified on {gpu}, attempt {last}: every gate passed for {self.recipe}."
        return f"Not verified for {self.recipe}: {'; '.join(self._missing())}."

    def _missing(self) -> Iterator[str]:
        """Yield each cause that keeps the wheel from being verified, with its gates."""
        failed = next((s for s in self.steps if s.name not in GATES and s.state == "fail"), None)
        if failed:
            yield f"{failed.name} could not be made ({failed.message})"
        causes: dict[str, list[str]] = {}
        verdicts = [step.verdict for step in self.steps if step.verdict]
        for verdict in sorted(verdicts, key=lambda verdict: ORDER.index(verdict.state)):
            if verdict.state != "pass":
                cause = f"{verdict.state} ({'; '.join(unmet(verdict)[:NAMED])})"
                causes.setdefault(cause, []).append(verdict.gate)
        others = [name for name in GATES if name not in {step.name for step in self.steps}]
        causes["not run yet"] = [name for name in others if name in self.requested_gates]
        causes["not asked for"] = [name for name in others if name not in self.requested_gates]
        for cause, names in causes.items():
            if names:
                yield f"{', '.join(names)} {cause}"

    @property
    def facts(self) -> dict[str, str]:
        """Facts of the stock wheel's server and the machine, by name."""
        facts = dict(self.host)
        for name, value in self.observed.items():
            if isinstance(value, (str, int)):
                facts[f"stock: {name}"] = str(value)
        for name, value in self.observed.get("prefix_cache", {}).items():
            facts[f"stock: prefix cache, {name}"] = str(value)
        if self.pace:
            facts["stock: start"] = duration(self.pace.start_s)
            facts["stock: prefill"] = f"{number(self.pace.prefill_tokens_s)} tok/s, one request"
            facts["stock: decode"] = f"{number(self.pace.decode_tokens_s)} tok/s, one request"
        return facts


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


def render(report: NightReport) -> str:
    """Return the page of *report*: one file, without scripts."""
    template = pages.environment("sparkwright.gates.core").get_template("night.html")
    return template.render(
        report=report, gates=GATES, version=__version__, duration=duration, view=view
    )
