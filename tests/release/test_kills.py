"""Publishing is killed before its steps (see `kills`); nothing that a client sees is ever half."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.release.kills import kills


@pytest.mark.parametrize(
    ("stride", "completing", "releases"),
    [
        pytest.param(13, (True, False), 1, id="some"),
        pytest.param(17, (True,), 0, id="some-of-the-first"),
        pytest.param(1, (True,), 1, id="all-completed", marks=pytest.mark.long),
        pytest.param(1, (False,), 1, id="all-removed", marks=pytest.mark.long),
        pytest.param(1, (True,), 0, id="all-of-the-first", marks=pytest.mark.long),
    ],
)
def test_a_kill_before_any_step_leaves_the_index_whole(tmp_path: Path, stride: int, completing: tuple[bool, ...], releases: int) -> None:
    """Killed before each step and file operation, clients see the old index or the new one; the next run completes, or another removes."""
    found = list(kills(tmp_path, first=1 + stride // 2, stride=stride, completing=completing, releases=releases))
    seen, new = [one.seen for one in found], releases + 1

    assert len(found) >= 60 // stride
    assert {releases} <= set(seen) <= {releases, new}
    assert seen == sorted(seen)
    assert all(one.then == new + (one.seen == new and not one.completed) for one in found)
