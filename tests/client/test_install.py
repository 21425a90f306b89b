"""Installing, listing, going back, removing and running, by the command line, with real TUF metadata, wheels, uv and HTTP."""

from __future__ import annotations

from tests.client.world import World, wheel


def test_install_makes_an_environment_and_leaves_it_alone(world: World) -> None:
    """`current` leads to an environment with the set; a second run does nothing."""
    world.publish("2026.11.1", [wheel("demo")], [wheel("other", "2.0")])
    user = world.user()

    first = user.install()

    assert (first.code, user.current) == (0, "2026.11.1"), first.said
    assert first.document["release"]["added"] == ["demo 1.0", "other 2.0"]
    assert (user.site() / "demo" / "__init__.py").is_file()
    before = user.listing()
    assert user.run("install").document["release"]["state"] == "there already"
    assert user.listing() == before
