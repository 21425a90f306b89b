"""The facts about this machine, and what they mean on machines that are not here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.serving_facts import SERVING

from sparkwright.bench.machine import monitor
from sparkwright.builder.host_info import GpuInfo
from sparkwright.cli import doctor
from sparkwright.cli.doctor import MachineCheck
from sparkwright.client.environment import Marker, Prefix
from sparkwright.core import memory
from sparkwright.core.memory import MachineMemory, Tenant
from sparkwright.forks.stack import Project

SPARK: dict[str, Any] = {
    "machine": "aarch64",
    "glibc": "2.39",
    "part full": True,
    "cores": 20,
    "memory": 128 * 10**9,
    "disk": 900 * 10**9,
    "git": "2.43.0",
    "g++": "13.3.0",
    "Python headers": "3.12.3",
    "ccache": "4.9.1",
    "aarch64-linux-gnu-g++": "",
}


def states(**changes: object) -> dict[str, MachineCheck]:
    """Return the checks of a Spark with *changes* that are not ready, by subject."""
    facts = {**SPARK, **{name.replace("_", " "): fact for name, fact in changes.items()}}
    checks = doctor.checks(facts, Project(Path(__file__).parents[2], "2026.11"))
    return {check.subject: check for check in checks if check.state != "ready"}


def test_a_spark_with_its_network_is_ready_but_for_what_the_lock_leaves_open() -> None:
    """The command that resolves the sources is named."""
    (check,) = states().values()
    assert (check.subject, check.remedy) == ("lock", "sparkwright lock --stack 2026.11")
    assert check.observed.endswith(" sources are unresolved")


@pytest.mark.parametrize(
    ("changes", "subject", "state", "words"),
    [
        ({"memory": 8 * 1024**3}, "memory", "look", "less than"),
        ({"disk": 20 * 10**9}, "disk", "look", "--cache-dir"),
        ({"machine": "riscv64"}, "system", "missing", "official wheel"),
        ({"glibc": ""}, "system", "missing", "official wheel"),
        ({"g++": ""}, "g++", "missing", "plan, build and demo"),
        ({"ccache": ""}, "ccache", "look", "reuse of units"),
        ({"Python headers": ""}, "Python headers", "missing", "plan and build"),
    ],
)
def test_a_lack_is_explained(changes: dict[str, object], subject: str, state: str, words: str) -> None:
    """A program comes with the command that installs it."""
    check, packages = states(**changes)[subject], {"Python headers": "python3-dev"}

    assert (check.state, words in check.meaning) == (state, True)
    if subject in doctor.PROGRAMS:
        assert check.remedy.endswith(f"apt-get install -y {packages.get(subject, subject)}")


# Serving.


SOUND = MachineMemory(121.7, 110.4, gpus=1, unified=True)
FAULT = "the GPU stays at 702 MHz under load; disconnect its power for some minutes"


def lacks(machine: MachineMemory = SOUND, /, **changes: object) -> dict[str, MachineCheck]:
    """Return the checks of a Spark with *changes* that are not ready, by subject."""
    checks = doctor.serving(machine, SERVING | changes)
    return {check.subject: check for check in checks if check.state != "ready"}


def test_a_sound_spark_lacks_nothing_to_serve() -> None:
    assert lacks() == {}


@pytest.mark.parametrize(
    ("changes", "subject", "state", "words"),
    [
        ({"release": ""}, "release", "missing", "→ sparkwright install"),
        ({"models": []}, "models", "look", "--download"),
        ({"gpus": (GpuInfo("NVIDIA GB10", "12.1", "570.10"),)}, "GPU", "missing", "driver 580"),
        ({"load": ("702 of 3,003 MHz, 22 W, 51 °C, 70 GB/s", FAULT)}, "GPU under load", "look", "stays at 702 MHz"),
        ({"load": ("", "torch sees no GPU")}, "GPU under load", "not-run", "torch sees no GPU"),
        ({"kernel": "7.0.0-1019-nvidia"}, "kernel", "look", "kho=off"),
        ({"kernel": "7.0.0-31-generic"}, "kernel", "look", "two Sparks"),
        ({"swapped": 3 << 30}, "swap", "look", "3.2 GB are in use"),
        ({"displays": ["card0-HDMI-A-1"]}, "display", "look", "connected: card0-HDMI-A-1"),
        ({"disk": 64 * 10**9}, "disk for models", "look", "HF_HUB_CACHE"),
    ],
)
def test_what_a_server_lacks_is_explained(changes: dict[str, object], subject: str, state: str, words: str) -> None:
    (check,) = lacks(SOUND, **changes).values()
    assert (check.subject, check.state) == (subject, state)
    assert words in f"{check.observed} {check.meaning} → {check.remedy}"


def test_who_holds_memory_and_what_a_failing_driver_says_is_shown() -> None:
    held = lacks(MachineMemory(121.7, 40.0, 1, True, (Tenant(42, "python3", 58.0),), "Driver/library version mismatch"))
    assert held["free memory"].observed.endswith("held: python3 (42): 58.0 GiB")
    assert (held["nvidia-smi"].state, held["nvidia-smi"].observed) == ("look", "Driver/library version mismatch")
    assert lacks(MachineMemory(64.0, 63.0), gpus=())["GPU"].state == "not-run"


def test_facts_of_this_machine_are_those_that_are_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a release there is no load on the GPU."""
    (tmp_path / "models--openai--gpt-oss-20b").mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    facts = doctor.serving_facts(Prefix(tmp_path / "prefix"), SOUND)
    assert facts.keys() == SERVING.keys()
    assert (facts["release"], facts["models"], facts["load"][0]) == ("", ["openai/gpt-oss-20b"], "")
    assert facts["disk"] > 0


#: A probe that runs for a second: what its Python is asked, and what it prints.
PROBE = """#!/bin/sh
echo "$@" >>"$0.asked"
sleep 0.4
echo '{"gpu": true, "name": "GB10", "uuid": "", "bytes": 268000000, "readings": [{"gemv": 0.00116, "copy": 0.0024}]}'
"""


@pytest.mark.parametrize(
    ("clocks", "state", "fault"),
    [
        ("702, 3003, 22.31, 51", "702 of 3,003 MHz, 22 W, 51 °C, 231 GB/s", FAULT),
        ("2398, 3003, 38.4, 61", "2,398 of 3,003 MHz, 38 W, 61 °C, 231 GB/s", ""),
        ("2000, 3003, [N/A], 61", "2,000 of 3,003 MHz, 0 W, 61 °C, 231 GB/s", ""),
    ],
)
def test_a_gpu_that_stays_slow_under_load_is_named(clocks: str, state: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, script in (("nvidia-smi", f"#!/bin/sh\necho '{clocks}'\n"), ("python", PROBE)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(monitor, "PERIOD", 0.1)
    assert monitor.under_load(tmp_path / "python") == (state, fault)
    # Two measurements of five seconds each.
    assert (tmp_path / "python.asked").read_text().split()[2:] == ["268", "0", "5", "1"]


@pytest.mark.parametrize(
    ("free", "computing", "reason"),
    [
        (60.0, [], ""), (60.0, [["77"]], "another program computes on the GPU"), (15.0, [], "too little memory is free for it"),
    ],
)  # fmt: skip
def test_a_spark_that_is_full_or_serves_is_not_loaded(free: float, computing: list[list[str]], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate's server, and one of another program, count as well."""
    installed = Prefix(tmp_path / "prefix")
    marker = Marker(name="spark.1", folder="", index="", python="", key="", packages={}, channel="verified", wheels={}, listing="")
    monkeypatch.setattr(Prefix, "marker", lambda *_: marker)
    monkeypatch.setattr(memory, "query", lambda what: (computing, "") if "compute-apps" in what else ([["NVIDIA GB10", "12.1", "580.95"]], ""))
    monkeypatch.setattr(monitor, "under_load", lambda _: ("2,398 of 3,003 MHz", ""))
    facts = doctor.serving_facts(installed, replace(SOUND, free=free))
    assert facts["load"] == (("", reason) if reason else ("2,398 of 3,003 MHz", ""))
