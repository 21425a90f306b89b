"""An index that is served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.client.world import World

from sparkwright.core import http


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """An empty index."""
    monkeypatch.setattr(http, "PAUSE", 0.02)
    with World(tmp_path).served() as served:
        yield served
