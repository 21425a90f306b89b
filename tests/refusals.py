"""How tests expect an error of the program: by its stable reference."""

from __future__ import annotations

import pytest

from sparkwright.core.errors import SparkwrightError


def refusal(*references: str, match: str | None = None) -> pytest.RaisesExc[SparkwrightError]:
    """Return a context that expects an error with one of *references*, its message matching *match*."""
    return pytest.raises(SparkwrightError, match=match, check=lambda error: error.reference in references)
