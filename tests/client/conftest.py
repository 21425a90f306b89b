"""An index that is served, and users of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.client.world import ONE, TWO, User, World, wheel


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Return an empty index."""
    with World(tmp_path).served() as served:
        yield served


@pytest.fixture
def user(world: World) -> User:
    """Return a user of an index with one release, of a wheel of ours and one of others."""
    world.publish(ONE, [wheel("demo", "1.0")], [wheel("other", "2.0")])
    return world.user()


@pytest.fixture
def installed(user: User) -> User:
    """Return a user who has installed that release."""
    assert user.install().code == 0
    return user


@pytest.fixture
def both(installed: User) -> User:
    """Return a user who has installed a second release besides, which shares a package."""
    installed.world.publish(TWO, [wheel("demo", "1.1")], [wheel("other", "2.0")])
    assert installed.install().code == 0
    return installed


@pytest.fixture(scope="module")
def settled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    """Return a user who has the only release, for tests in which each later one is refused."""
    with World(tmp_path_factory.mktemp("settled")).served() as served:
        served.publish(ONE, [wheel("demo", "1.0")])
        user = served.user()
        assert user.install().code == 0
        yield user
