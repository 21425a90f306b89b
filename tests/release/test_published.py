"""What `publish` makes, `install` takes: the two halves of a release together, with nothing made by hand between them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.refusals import refusal
from tests.release import world
from tests.support import indexserver, publishing, wheels
from tests.support.publishing import Place

from sparkwright.release import environment
from sparkwright.release.client import back, health, install, state
from sparkwright.release.client.install import Wish
from sparkwright.release.publish import changes
from sparkwright.release.signing import keys


@pytest.fixture(name="place")
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Return a publisher whose index is served where its manifest says."""
    (tmp_path / "served").mkdir()
    with publishing.bare_index(tmp_path / "bare") as packages, indexserver.serve(tmp_path / "served") as served:
        monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", packages)
        yield Place(tmp_path / "served", f"{served.url}index/")


def test_a_release_goes_from_wheels_to_an_environment_and_back(place: Place, tmp_path: Path) -> None:
    """Two publications are installed one after the other; a yank by the publisher is followed, the user goes back, and leaves."""
    first = wheels.release(tmp_path / "1")
    place.publish(first)
    place.publish(wheels.release(tmp_path / "2", label=f"{wheels.LABEL}.1"))
    user = world.User(tmp_path / "user")
    wish = Wish(index=place.url, keys=(keys.public_path(place.key),))
    with user.active():
        assert install.install(user.context(), user.venv, Wish(place.url, wish.keys, release="2026.11.1")).name == "2026.11.1"
        done = install.install(user.context(), user.venv, wish)
        assert (done.name, done.missing) == ("2026.11.2", ())
        known = state.required(environment.probe(user.venv))
        assert health.look(environment.probe(user.venv), known, deep=True) == ()
        assert "sparkwright" not in known.placed, "the installer is no part of the set"

        changes.yank(place.publisher(), "2026.11.2", reason="it is slow")
        assert install.install(user.context(), user.venv, wish).name == "2026.11.1"
        assert back.rollback(user.context(offline=True), user.venv).name == "2026.11.2"
        changes.yank(place.publisher(), "2026.11.1", reason="that one, too")
        with refusal("release-yanked"):
            install.install(user.context(), user.venv, wish)
        assert set(back.uninstall(user.context(), user.venv).removed) == set(known.placed)


def test_a_candidate_is_installed_knowingly_and_then_promoted(place: Place, tmp_path: Path) -> None:
    """What lacks its gates is for those who ask for it by name of the channel; once it is promoted, nothing is laid down again."""
    made = wheels.release(tmp_path / "1", judged=False)
    place.publish(made, channel="candidate")
    user = world.User(tmp_path / "user")
    wish = Wish(index=place.url, keys=(keys.public_path(place.key),))
    with user.active():
        with refusal("release-unproved"):
            install.install(user.context(), user.venv, wish)
        assert install.install(user.context(), user.venv, Wish(place.url, wish.keys, channel="candidate")).missing

        for path in made:
            wheels.judge(path, companions=made[:-1] if path == made[-1] else ())
        changes.promote(place.publisher(), "2026.11.1", tmp_path / "1")
        done = install.install(user.context(), user.venv, wish)
    assert (done.state, done.channel, done.came, done.went, done.missing) == ("installed", "verified", (), (), ())
