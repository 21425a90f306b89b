"""How tests expect an error of the program: by its stable reference, and by what it says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest

from sparkwright.core.errors import SparkwrightError


@contextlib.contextmanager
def refusal(
    *references: str, match: str | None = None, details: Sequence[str] | None = None, says: str | Sequence[str] = ()
) -> Iterator[pytest.ExceptionInfo[SparkwrightError]]:
    """
    Expect an error with one of *references* from the block.

    Args:
        match: A pattern of its message. *details*: all its details.
        says: Texts that each stand in its message, its details or its advice.
    """
    with pytest.raises(SparkwrightError, match=match, check=lambda error: error.reference in references) as caught:
        yield caught
    assert details is None or list(caught.value.details) == list(details)
    said = "\n".join([caught.value.what, *caught.value.details, caught.value.todo])
    for text in [says] if isinstance(says, str) else says:
        assert text in said


@contextlib.contextmanager
def allowed(*references: str) -> Iterator[None]:
    """Run a block that may end early in an error with one of *references*, and in no other."""
    try:
        yield
    except SparkwrightError as error:
        if error.reference not in references:
            raise
