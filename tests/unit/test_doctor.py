"""The facts about this machine, and what they mean on machines that are not here."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sparkwright.builder import host_info
from sparkwright.builder.host_info import GpuInfo
from sparkwright.cli import doctor
from sparkwright.cli.doctor import MachineCheck
from sparkwright.forks.stack import Project

SPARK: dict[str, Any] = {
    "machine": "aarch64",
    "glibc": "2.39",
    "part full": True,
    "cores": 20,
    "memory": 128 * 10**9,
    "disk": 900 * 10**9,
    "gpus": (GpuInfo("NVIDIA GB10", "12.1", "580.95.05"),),
    "git": "2.43.0",
    "g++": "13.3.0",
    "Python headers": "3.12.3",
    "ccache": "4.9.1",
    "docker": "28.2.2",
    "aarch64-linux-gnu-g++": "",
    "package index": True,
    "upstream host": True,
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
        ({"gpus": ()}, "GPU", "not-run", "only G0 and G1"),
        ({"gpus": (GpuInfo("NVIDIA H200", "9.0", "580.65.06"),)}, "GPU", "not-run", "SM 12.1"),
        ({"gpus": (GpuInfo("NVIDIA GB10", "12.1", "570.10"),)}, "GPU", "not-run", "driver 580"),
        ({"g++": ""}, "g++", "missing", "plan, build and demo"),
        ({"ccache": ""}, "ccache", "look", "reuse of units"),
        ({"Python headers": ""}, "Python headers", "missing", "plan and build"),
        ({"package_index": False}, "package index", "look", "cache directory"),
        ({"upstream_host": False}, "upstream host", "look", "--mirror"),
    ],
)
def test_a_lack_is_explained(changes: dict[str, object], subject: str, state: str, words: str) -> None:
    """A program comes with the command that installs it."""
    check, packages = states(**changes)[subject], {"Python headers": "python3-dev"}

    assert (check.state, words in check.meaning) == (state, True)
    if subject in doctor.PROGRAMS:
        assert check.remedy.endswith(f"apt-get install -y {packages.get(subject, subject)}")


def test_a_host_that_was_not_asked_is_told_from_one_that_does_not_answer(tmp_path: Path) -> None:
    facts = doctor.inventory(tmp_path, "", "")
    assert (facts["package index"], facts["upstream host"]) == (None, None)
    checks = states(package_index=None, upstream_host=False)
    assert [checks[name].observed for name in ("package index", "upstream host")] == ["not asked", "no answer"]


def test_a_host_that_never_answers_is_not_waited_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        began = time.monotonic()
        facts = doctor.inventory(tmp_path, address, f"{address}vllm.git")

        assert time.monotonic() - began < 2 * host_info.PATIENCE + 3
    assert facts.keys() == SPARK.keys()
    assert facts["git"][0].isdigit()
    assert not facts["package index"]
    assert not facts["upstream host"]


def test_a_name_that_is_never_resolved_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall drops the questions to the name server, whose answer no timeout of a connection bounds."""
    over = threading.Event()

    def resolve(*_: object, **__: object) -> list[object]:
        over.wait(30)
        return []

    monkeypatch.setattr(host_info, "PATIENCE", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    began = time.monotonic()

    assert not doctor.inventory(tmp_path, "http://index.invalid/simple/", "")["package index"]
    over.set()
    assert time.monotonic() - began < 10
