"""The demo's project, built by the real tools."""

from __future__ import annotations

import re

import pytest

from sparkwright.builder import pipeline
from sparkwright.forks.context import RunContext


@pytest.mark.toolchain
def test_demo_builds_a_wheel_of_every_fork(demo_session: RunContext) -> None:
    """Each fork of the demo becomes a wheel whose label names the stack, the patch set and CUDA; two have nothing to patch."""
    built = [pipeline.build(demo_session, fork) for fork in demo_session.forks]

    labels = [one.filename.split("-")[1].split("+")[1] for one in built]
    assert labels[:2] == ["spark.demo.p0.cu130"] * 2
    assert re.fullmatch(r"spark\.demo\.p[0-9a-f]{8}\.cu130", labels[2])
