"""G7 on a real server: a short load that passes, one that is interrupted, and a server whose process is not known."""

from __future__ import annotations

from pathlib import Path

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

def named(checks: tuple[Check, ...]) -> dict[str, Check]:
    """Return *checks* by name; every reason among them is explained."""
    assert {check.reason for check in checks} - {""} <= set(soak.REASONS)
    return {check.name: check for check in checks}


def test_a_sound_server_passes_a_soak(broken: Broken, tmp_path: Path) -> None:
    """Requests are answered, aborted or refused, the memory is watched, the server is idle afterwards, and says the same words."""
    (tmp_path / "kmsg").touch()
    checks = named(
        soak.run(
            SHORT, broken.client(), pid=broken.pid, kernel=tmp_path / "kmsg",
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


def test_a_process_that_is_not_known_is_not_watched(broken: Broken, tmp_path: Path) -> None:
    """A server on another machine can be soaked; what cannot be seen from here is not run."""
    checks = named(soak.run(replace(SHORT, seconds=20, least=1, load=replace(SHORT.load, concurrencies=(1, 2))), broken.client(), kernel=tmp_path / "none"))

    assert {name: checks[name].reason for name in ("memory-growth", "restarts", "kernel-log", "words-after")} == {
        "memory-growth": "processes-unknown", "restarts": "processes-unknown", "kernel-log": "kernel-log-hidden", "words-after": "not-asked"
    }  # fmt: skip
    assert checks["requests"].state == "pass"
