"""Failures of audit, with their references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sparkwright.core.errors import Advice, SparkwrightError


class AuditError(SparkwrightError):
    """A wheel does not meet the audit policy."""

    references: ClassVar[Mapping[str, Advice]] = {
        "audit-failed": Advice(
            "The machine code inside the wheel is not what the policy in ci/audit.yaml asks for.",
            "Do not publish the wheel. Compare the findings with the plan of the same build.",
        ),
    }
