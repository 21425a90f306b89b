"""Failures of gates, with their references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sparkwright.core.errors import Advice, SparkwrightError


class GateError(SparkwrightError):
    """A gate did not pass, or could not run."""

    references: ClassVar[Mapping[str, Advice]] = {
        "gate-failed": Advice(
            "A gate saw something wrong in the wheel, the source tree or the server; the checks that failed are above, with samples.",
            "Do not install or publish it. The reason of each failed check is in "
            "docs/gates.md; `sparkwright gate --json` holds all samples.",
        ),
        "gate-inconclusive": Advice(
            "What was measured decides neither way: too few samples, or a machine whose own noise is as large as the margin.",
            "Measure more (see the check's figures), on an idle machine. Until then this wheel may only be published as a candidate.",
            exit_code=4,
        ),
        "gate-not-run": Advice(
            "Nothing failed, but a gate or one of its rows could not run here, so this is not a pass.",
            "Run those gates where they can run, or ask for the others alone with --only; each row says what it needs.",
            exit_code=4,
        ),
        "measurement-invalid": Advice(
            "What was measured does not count: a half stream, another model, a reference that does not agree with itself.",
            "Mend what the checks name, and run the gate again. An invalid measurement says nothing about the wheel.",
        ),
    }
