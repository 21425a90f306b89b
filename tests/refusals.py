"""How tests expect an error of the program: by its stable reference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from sparkwright.core.errors import SparkwrightError


def refusal(*references: str, match: str | None = None) -> pytest.RaisesExc[SparkwrightError]:
    """Return a context that expects an error with one of *references*, its message matching *match*."""
    return pytest.raises(SparkwrightError, match=match, check=lambda error: error.reference in references)


@contextlib.contextmanager
def allowed(*references: str) -> Iterator[None]:
    """Run a block that may end early in an error with one of *references*, and in no other."""
    try:
        yield
    except SparkwrightError as error:
        if error.reference not in references:
            raise
