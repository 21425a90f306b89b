"""How tests expect an error of the program: by its stable reference, and by what it says."""

import contextlib
from collections.abc import Iterator, Sequence

import pytest

from sparkwright.core.errors import SparkwrightError


@contextlib.contextmanager
def refusal(
    *references: str, match: str | None = None, details: Sequence[str] | None = None, says: str | Sequence[str] = (), hides: str | None = None
) -> Iterator[pytest.ExceptionInfo[SparkwrightError]]:
    """
    Expect an error with one of *references* from the block.

    Args:
        match: A pattern of its message. *details*: all its details.
        says: Texts that each stand in its message, its details or its advice.
        hides: A text that is nowhere in what is shown of it.
    """
    with pytest.raises(SparkwrightError, match=match, check=lambda error: error.reference in references) as caught:
        yield caught
    assert details is None or list(caught.value.details) == list(details)
    said = "\n".join([caught.value.what, *caught.value.details, caught.value.todo])
    for text in [says] if isinstance(says, str) else says:
        assert text in said
    assert hides is None or hides not in str(caught.value.document())


def outcome(reference: str, *, match: str | None = None, says: str = "") -> contextlib.AbstractContextManager[object]:
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
