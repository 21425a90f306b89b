"""An index that is served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.client.world import User, World, wheel

from sparkwright.core import http


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """An empty index."""
    monkeypatch.setattr(http, "PAUSE", 0.02)
    with World(tmp_path).served() as served:
        yield served


@pytest.fixture(scope="module")
def settled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    """A user who has installed the only release, for tests in which a later one is refused."""
    with World(tmp_path_factory.mktemp("settled")).served() as served:
        served.publish("2026.11.1", [wheel("demo", "1.0")])
        user = served.user()
        assert user.install().code == 0
        yield user
