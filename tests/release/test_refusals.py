"""Whatever is wrong with wheels, verdicts, hosts or the index itself, the publisher says which, and clients see what they saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.release import refusals
from tests.release.refusals import Case, Scene


@pytest.fixture(scope="module", name="fresh")
def _fresh() -> Iterator[Callable[[], Scene]]:
    with refusals.scenes() as fresh:
        yield fresh


@pytest.mark.parametrize("one", refusals.CASES, ids=[one.name for one in refusals.CASES])
def test_it_is_refused_by_its_own_name(one: Case, fresh: Callable[[], Scene]) -> None:
    """Each case is refused with the reference that says what is wrong, and no file that a client can ask for is another."""
    found = refusals.run(one, fresh)

    assert (found.reference, found.untouched) == (one.expected, True)
    assert found.code in (1, 2, 5)
