"""How tests expect an error of the program: by its stable reference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from sparkwright.core.errors import SparkwrightError


def refusal(*references: str, match: str | None = None, says: str = "", hides: str | None = None) -> pytest.RaisesExc[SparkwrightError]:
    """
    Return a context that expects an error with one of *references*.

    Args:
        match: A pattern of its message.
        says: A text of its message, its details or its advice.
        hides: A text that is nowhere in what is shown of it.
    """

    def fits(error: SparkwrightError) -> bool:
        shown = "\n".join([error.what, *error.details, error.todo])
        hidden = hides is None or hides not in str(error.document())
        return error.reference in references and says in shown and hidden

    return pytest.raises(SparkwrightError, match=match, check=fits)


def outcome(reference: str, *, match: str | None = None, says: str = "") -> AbstractContextManager[object]:
    """Return a context that expects an error with *reference*, as `refusal` does, or none if that is empty."""
    return refusal(reference, match=match, says=says) if reference else contextlib.nullcontext()


@contextlib.contextmanager
def allowed(*references: str) -> Iterator[None]:
    """Run a block that may end early in an error with one of *references*, and in no other."""
    try:
        yield
    except SparkwrightError as error:
        if error.reference not in references:
            raise
