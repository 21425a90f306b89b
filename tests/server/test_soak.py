"""G7 on a real server: a short load that passes, one that is interrupted, and a server whose process is not known."""

from __future__ import annotations

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
from sparkwright.gates.core.verdict import Check, passed
from sparkwright.gates.generation import gate as words
from sparkwright.gates.generation.checks import GenerationPolicy
from sparkwright.gates.soak import gate as soak

__all__ = ["_broken", "_learnt", "_vllm_python"]

pytestmark = pytest.mark.server

POLICY = strict_yaml.load(ROOT / "ci" / "gates" / "soak.yaml", soak.SoakPolicy)
WORDS_POLICY = strict_yaml.load(WORDS, GenerationPolicy)
#: Half a minute instead of two hours. The shape of the load is the same; the bound of the growth is what so short a time can tell.
SHORT = replace(
    POLICY, seconds=30, interval=3, sample=0.25, growth=20_000, least=3, drain=60,
    load=replace(
        POLICY.load, concurrencies=(1, 4, 8), prompts=(16, 100, 400), answers=(8, 32, 96), prefix=64, patience=1, aborted=0.3, bad=0.1
    ),
)  # fmt: skip

#: A soak in a process of its own, to be killed. A job that a script put into the background would ignore interruptions.
PROGRAM = (
    "import signal, sys, msgspec; from pathlib import Path; from sparkwright.bench.server.client import Client\n"
    "from sparkwright.gates.soak import gate as soak\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "url, journal, pid, policy = sys.argv[1:]\n"
    "soak.run(msgspec.json.decode(policy, type=soak.SoakPolicy), Client(url), Path(journal), pid=int(pid))\n"
)


def named(checks: tuple[Check, ...]) -> dict[str, Check]:
    """Return *checks* by name; every reason among them is explained."""
    assert {check.reason for check in checks} - {""} <= set(soak.REASONS)
    return {check.name: check for check in checks}


def test_a_sound_server_passes_a_soak(broken: Broken, tmp_path: Path) -> None:
    """Requests are answered, aborted or refused, the memory is watched, the server is idle afterwards, and says the same words."""
    (tmp_path / "kmsg").touch()
    checks = named(
        soak.run(
            SHORT, broken.client(), tmp_path / "j", pid=broken.pid, kernel=tmp_path / "kmsg",
            words=lambda: words.run(WORDS_POLICY, broken.client(), "learnt", quick=True),
            distributions=lambda: (passed("reference", "as before"),),
        )
    )  # fmt: skip

    assert {name: check.state for name, check in checks.items() if check.required} == dict.fromkeys(
        ["duration", "requests", "words-under-load", "memory-growth", "restarts", "kernel-log", "drained", "words-after", "distributions-after"], "pass"
    )
    figures = {figure.name: figure.value for figure in checks["requests"].figures}
    assert min(figures["aborted"], figures["refused"]) > 0
    assert all(figures[f"answers at concurrency {concurrency}"] >= SHORT.least for concurrency in SHORT.load.concurrencies)
    assert len((tmp_path / "j").read_bytes().splitlines()) >= 6


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
def test_a_soak_that_is_ended_leaves_its_journal(broken: Broken, tmp_path: Path, by: signal.Signals) -> None:
    """Killed or interrupted, it leaves whole lines, and the server answers all the same."""
    journal = tmp_path / "j"
    policy = msgspec.json.encode(replace(SHORT, seconds=600)).decode()
    command = [sys.executable, "-c", PROGRAM, broken.url, str(journal), str(broken.pid), policy]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as child:
        while not journal.exists() or journal.read_bytes().count(b"\n") < 4:
            assert child.poll() is None
            time.sleep(0.1)
        child.send_signal(by)
        child.wait(timeout=60)

    assert broken.client().complete("The sea", max_tokens=4, ignore_eos=True).tokens


def test_a_process_that_is_not_known_is_not_watched(broken: Broken, tmp_path: Path) -> None:
    """A server on another machine can be soaked; what cannot be seen from here is not run."""
    checks = named(soak.run(replace(SHORT, seconds=20, least=1, load=replace(SHORT.load, concurrencies=(1, 2))), broken.client(), tmp_path / "j", kernel=tmp_path / "none"))

    assert {name: checks[name].reason for name in ("memory-growth", "restarts", "kernel-log", "words-after")} == {
        "memory-growth": "processes-unknown", "restarts": "processes-unknown", "kernel-log": "kernel-log-hidden", "words-after": "not-asked"
    }  # fmt: skip
    assert checks["requests"].state == "pass"
