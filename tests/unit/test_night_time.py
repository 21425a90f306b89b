"""The time of a night: a budget of four hours reaches throughput on a Spark, whatever the soak takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support import standin, wheels
from tests.unit.conftest import ROOT

from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.gates.core import night
from sparkwright.gates.core.ladder import GATES, SERVED
from sparkwright.gates.core.night import Night
from sparkwright.gates.core.page import NightStep
from sparkwright.gates.core.server_facts import Pace
from sparkwright.gates.core.server_under_test import GateOptions

#: A Spark with 23 GB of weights: 90 s until it answers, 2,000 tokens of prompts and 40 of answers in a second.
SPARK = Pace(90, 2000, 40, 2.0)


@pytest.mark.parametrize("slower", [1.0, 1.1])
def test_a_night_of_four_hours_reaches_throughput(slower: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gate takes its estimate, or a little more; the soak takes what it may, and G8 still begins."""
    clock = 0.0
    monkeypatch.setattr(night.time, "monotonic", lambda: clock)
    monkeypatch.setattr(Night, "_pace", SPARK)
    context = RunContext(Project(ROOT, "2026.11"), Store(tmp_path / "store"), (), tmp_path / "dist", offline=True)
    model = standin.model(tmp_path / "model")
    wheel = wheels.plain(tmp_path, "tiny", "1.0")
    recipe = "qwen3-30b-a3b-nvfp4"
    tonight = Night(context, GateOptions(wheel=wheel, serve=model, recipe=recipe, task="gsm8k"), "0" * 64, hours=4)
    soak = tonight._policies.soak

    for name in GATES:
        assert tonight._hindrance(name) is None, name
        expected = tonight.estimate(name)[0]
        seconds = expected * (slower if name in SERVED else 1.0)
        if name == "G7":
            load = min(soak.seconds, tonight.left_s(name))
            assert load >= soak.shortest
            seconds = load + expected - soak.shortest
        clock += seconds
        tonight._steps[name] = NightStep(name, "pass", "", seconds, expected)
    assert clock <= 4 * 3600 * slower
