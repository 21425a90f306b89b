"""The soak gate on a real server: a short load that passes, one that is interrupted, and what a journal says afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.server.broken import ROOT, WORDS, Broken, _broken, _learnt
from tests.support.serving import _vllm_python

from sparkwright.core import strict_yaml
from sparkwright.gates.core.verdict import Check
from sparkwright.gates.generation import gate as words
from sparkwright.gates.generation.policy import GenerationPolicy
from sparkwright.gates.soak import gate as soak
from sparkwright.gates.soak import journal as soakjournal

__all__ = ["_broken", "_learnt", "_vllm_python"]

pytestmark = pytest.mark.server

POLICY = strict_yaml.load(ROOT / "ci" / "gates" / "soak.yaml", soak.SoakPolicy)
WORDS_POLICY = replace(strict_yaml.load(WORDS, GenerationPolicy), batch=0)
#: Half a minute instead of two hours. The shape of the load is the same; the bound of the growth is what so short a time can tell.
SHORT = replace(
    POLICY, seconds=30, stretch=5, sample=0.25, growth=20_000, least=3, drain=60,
    load=replace(
        POLICY.load, concurrencies=(1, 4, 8), phase=5, prompts=(16, 100, 400), answers=(8, 32, 96), prefix=64, patience=1, cancelled=0.3
    ),
)  # fmt: skip

#: A soak in a process of its own, to be killed. A job that a script put into the background would ignore interruptions.
PROGRAM = (
    "import signal, sys, msgspec; from pathlib import Path; from sparkwright.gates.soak import gate as soak\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "url, journal, pid, policy = sys.argv[1:]\n"
    "soak.run(msgspec.json.decode(policy, type=soak.SoakPolicy), url, Path(journal), pid=int(pid))\n"
)


def named(checks: tuple[Check, ...]) -> dict[str, Check]:
    """Return *checks* by name; every reference among them is explained."""
    assert {check.reason for check in checks} - {""} <= set(soak.REASONS)
    return {check.name: check for check in checks}


def test_a_sound_server_passes_a_soak(broken: Broken, tmp_path: Path) -> None:
    """All requests are answered or cancelled, the memory is watched, the server is idle afterwards, and says the same words."""
    (tmp_path / "kmsg").touch()
    again = {"words": lambda: words.run(WORDS_POLICY, broken.client(), "learnt")}
    checks = named(soak.run(SHORT, broken.url, tmp_path / "j", pid=broken.pid, again=again, kernel=tmp_path / "kmsg"))

    assert {name: check.state for name, check in checks.items()} == dict.fromkeys(
        ["duration", "requests", "words-under-load", "memory-growth", "restarts", "kernel-log", "drained", "words-after"], "pass"
    )
    figures = {figure.name: figure.value for figure in checks["requests"].figures}
    assert figures["cancelled"] > 0
    assert all(figures[f"whole answers at concurrency {one}"] >= SHORT.least for one in SHORT.load.concurrencies)
    record = soakjournal.read(tmp_path / "j")
    assert record.ended
    assert len(record.observed) >= 5
    # What the journal says is what was judged, but for the gate that only a server can be asked.
    read = named(soak.interrupted(SHORT, tmp_path / "j"))
    assert [read[name] for name in read if name != "again"] == [checks[name] for name in checks if name != "words-after"]


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
def test_a_soak_that_is_ended_loses_one_stretch(broken: Broken, tmp_path: Path, by: signal.Signals) -> None:
    """Killed or interrupted, it leaves a journal of whole stretches that passes nothing, and the server answers all the same."""
    journal = tmp_path / "j"
    policy = msgspec.json.encode(replace(SHORT, seconds=600, stretch=1)).decode()
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, broken.url, str(journal), str(broken.pid), policy], stderr=subprocess.PIPE, env=dict(os.environ)
    )
    try:
        while not journal.exists() or journal.read_bytes().count(b'"observed"') < 4:
            assert child.poll() is None, child.stderr and child.stderr.read().decode()
            time.sleep(0.1)
        child.send_signal(by)
        child.wait(timeout=60)
    finally:
        child.kill()
        child.communicate()
    checks = soak.interrupted(SHORT, journal)

    assert len(soakjournal.read(journal).observed) >= 4
    assert {check.state for check in checks} <= {"inconclusive", "not-run"}
    assert named(checks)["duration"].reason == "soak-interrupted"
    assert broken.client().complete("The sea", max_tokens=4, ignore_eos=True).tokens


def test_a_process_that_is_not_known_is_not_watched(broken: Broken, tmp_path: Path) -> None:
    """A server on another machine can be soaked; what cannot be seen from here is not run."""
    policy = replace(SHORT, seconds=9, least=1, load=replace(SHORT.load, phase=3))
    checks = named(soak.run(policy, broken.url, tmp_path / "j", kernel=tmp_path / "none"))

    assert (checks["memory-growth"].state, checks["memory-growth"].reason) == ("not-run", "processes-unknown")
    assert (checks["kernel-log"].state, checks["kernel-log"].reason) == ("not-run", "kernel-log-unreadable")
    assert checks["restarts"].state == checks["requests"].state == "pass"
    assert checks["again"].state == "not-run"
