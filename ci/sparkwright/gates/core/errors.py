"""Failures of gates, with their references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sparkwright.core.errors import Advice, SparkwrightError


class GateError(SparkwrightError):
    """A gate did not pass, or could not run."""

    references: ClassVar[Mapping[str, Advice]] = {
        "gate-failed": Advice(
            "A check found a fault in the wheel, the source tree or the server; the failed checks "
            "are above, with samples.",
            "Do not install or publish it. docs/gates.md explains the reason of each failed check; "
            "`sparkwright gate --json` prints all samples.",
        ),
        "gate-inconclusive": Advice(
            "The measurements decide neither way: there are too few samples, or the machine's own "
            "noise is as large as the margin.",
            "Measure more (see the check's figures) on an idle machine. Until then this wheel can "
            "only be published as a candidate.",
            exit_code=4,
        ),
        "gate-not-run": Advice(
            "No check failed, but a gate or one of its checks could not run here, so this is not a "
            "pass.",
            "Run those gates where they can run, or run the others alone with --only; each row "
            "says what it needs.",
            exit_code=4,
        ),
        "measurement-invalid": Advice(
            "The measurement does not count: a cut stream, another model, or a reference that does "
            "not agree with itself.",
            "Fix what the checks name, and run the gate again. An invalid measurement says nothing "
            "about the wheel.",
        ),
        "policy-unknown-check": Advice(
            "A policy names a check that no gate can emit, so it could never be met.",
            "Correct the name in the policy. docs/gates.md lists the checks of every gate.",
        ),
    }
