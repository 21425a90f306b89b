"""The demo's project, built by the real tools."""

from __future__ import annotations

import pytest

from sparkwright.build import wheel
from sparkwright.forks.session import Session


@pytest.mark.toolchain
def test_demo_builds_a_wheel_of_every_fork(demo_session: Session) -> None:
    """Each fork of the demo becomes a wheel with the stack's label."""
    built = [wheel.build(demo_session, fork) for fork in demo_session.forks]

    assert [one.filename.split("-")[1].split("+")[1] for one in built] == ["spark.demo"] * 3
