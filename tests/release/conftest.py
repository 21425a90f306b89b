"""A host with good indexes, made once, and a fresh copy with a fresh user for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.release import attacks
from tests.release.attacks import Scene


@pytest.fixture(scope="session", name="scenes")
def _scenes() -> Iterator[Callable[[], Scene]]:
    """Return what makes a fresh scene."""
    with attacks.scenes() as fresh:
        yield fresh


@pytest.fixture
def scene(scenes: Callable[[], Scene]) -> Iterator[Scene]:
    """Return a good index with two releases, and a user with an empty environment whose variables this process has."""
    made = scenes()
    with made.user.active():
        yield made
    made.host.served.fault = None
