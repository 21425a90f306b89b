"""Publishing is killed before its steps (see `kills`); nothing that a client sees is ever half."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.release.kills import kills


@pytest.mark.parametrize(
    ("stride", "completing"),
    [
        pytest.param(13, (True, False), id="some"),
        pytest.param(1, (True,), id="all-completed", marks=pytest.mark.long),
        pytest.param(1, (False,), id="all-removed", marks=pytest.mark.long),
    ],
)
def test_a_kill_before_any_step_leaves_the_index_whole(tmp_path: Path, stride: int, completing: tuple[bool, ...]) -> None:
    """Killed before each step and file operation, clients see the old release or both; the next run completes, or another removes."""
    found = list(kills(tmp_path, first=1 + stride // 2, stride=stride, completing=completing))

    assert len(found) >= 60 // stride
    assert {1} <= {one.seen for one in found} <= {1, 2}
    assert [one.seen for one in found] == sorted(one.seen for one in found)
    assert all(one.then == 2 + (one.seen == 2 and not one.completed) for one in found)
