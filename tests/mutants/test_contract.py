"""Mutants of real servers that serve otherwise than the recipe says: each dies at G3. Logs and traces with a fault are in tests/unit/test_contract.py."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.mutants.conftest import Kill
from tests.refusals import refusal
from tests.support import serving

from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.server.server_process import Server
from sparkwright.core import strict_yaml
from sparkwright.gates import contract
from sparkwright.gates.contract import ContractPolicy
from sparkwright.gates.core.server_under_test import ServerIdentity
from sparkwright.gates.core.verdict import Check

pytestmark = [pytest.mark.mutants, pytest.mark.server]

ROOT = Path(__file__).parents[2]
POLICY = strict_yaml.load(ROOT / "ci" / "gates" / "contract.yaml", ContractPolicy)
CPU = recipes.load(ROOT, "toy-cpu")


def judged(server: Server, baseline: Path | None = None) -> tuple[Check, ...]:
    """Return the checks of a server with a profile of one request."""
    return contract.run(POLICY, CPU, server, contract.profile(POLICY, CPU, server, server.log.parent / "profiles"), ServerIdentity(), baseline)


@pytest.fixture(scope="module", name="sound")
def _sound(server: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[Check, ...]:
    """Return the checks of the sound server against its own kernels as the baseline; each is there."""
    path = tmp_path_factory.mktemp("baseline") / "observed.json"
    own = contract.profile(POLICY, CPU, server, server.log.parent / "profiles")
    path.write_bytes(msgspec.json.encode(contract.observe(POLICY, server, own, ServerIdentity(wheel="a" * 64), CPU.name)))
    checks = judged(server, baseline=path)
    assert {"observed", "kernels-unknown", "kernels-attention", "kernels-linear", "backends", "log"} <= named(checks, "pass")
    return checks


def named(checks: tuple[Check, ...], state: str) -> set[str]:
    return {check.name for check in checks if check.state == state and check.required}


def test_server_that_takes_another_backend_than_it_was_told(server: Server, sound: tuple[Check, ...], tmp_path: Path, kill: Kill) -> None:
    """It was told FLASHINFER and took another without an error: its log alone tells."""
    flags = ("--attention-backend", "FLASHINFER")
    plan = serving.launch(server.plan.python, server.plan.model, *contract.profiler_flags(tmp_path / "profiles"), *flags)
    with Server(plan, tmp_path / "server.log") as told:
        checks = judged(told)
    assert "log" in named(checks, "fail")
    kill(mutant="wrong backend chosen (attention)", gate="G3", sound=sound, mutant_checks=checks)


def test_server_with_a_variable_that_vllm_no_longer_reads_is_not_started(server: Server, tmp_path: Path) -> None:
    """The table of the installed vLLM tells, before hours are measured."""
    with refusal("variable-refused") as caught:
        Server(serving.launch(server.plan.python, server.plan.model, VLLM_NVFP4_GEMM_BACKEND="marlin"), tmp_path / "server.log")
    assert "now --linear-backend" in caught.value.details[0]
