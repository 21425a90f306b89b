"""Mutants of servers whose log or stream is wrong in one way: each dies at G3."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.mutants.conftest import Kill
from tests.server.proxy import Proxy
from tests.server.test_contract import POLICY, SPOILED, running
from tests.support import serving
from tests.support.serving import _server, _toy, _vllm_python

from sparkwright.bench.server.client import Client
from sparkwright.bench.server.launch import Server
from sparkwright.gates.contract import gate as contract
from sparkwright.gates.contract import kernel_trace as profiled
from sparkwright.gates.contract.gate import Running
from sparkwright.gates.core.verdict import Check

__all__ = ["_server", "_toy", "_vllm_python"]

pytestmark = [pytest.mark.mutants, pytest.mark.server]

CPU = POLICY.recipes["cpu"]


@pytest.fixture(scope="module", name="sound")
def _sound(server: Server) -> tuple[Check, ...]:
    """Return the checks of the sound server, and of the profile that it wrote."""
    return contract.run(POLICY, CPU, running(server, profile_of(server)), server.client())


def profile_of(server: Server) -> Path:
    return profiled.take(server.client(), server.log.parent / "profiles")


def named(checks: tuple[Check, ...], state: str) -> set[str]:
    return {check.name for check in checks if check.state == state and check.required}


def started(server: Server, folder: Path, *flags: str, **variables: str) -> Server:
    """Return a server as the sound one, with further *flags* and *variables*."""
    profiles = profiled.flags(folder / "profiles")
    return Server(serving.launch(server.plan.python, server.plan.model, *profiles, *flags, **variables), folder / "server.log")


def test_another_backend_than_the_recipe_says(server: Server, sound: tuple[Check, ...], tmp_path: Path, kill: Kill) -> None:
    """A server that was told FLASHINFER and took another without an error: its log alone tells."""
    with started(server, tmp_path, "--attention-backend", "FLASHINFER") as mutant:
        checks = contract.run(POLICY, CPU, running(mutant, profile_of(mutant)), mutant.client())
    assert named(checks, "fail") == {"no-refusal"}
    kill(mutant="wrong backend chosen (attention, real server)", gate="G3", sound=sound, mutant_checks=checks)


def test_a_variable_of_an_older_release(server: Server, sound: tuple[Check, ...], tmp_path: Path, kill: Kill) -> None:
    """What chose the kernel in vLLM 0.20 is not read any more."""
    with started(server, tmp_path, VLLM_NVFP4_GEMM_BACKEND="marlin") as mutant:
        checks = contract.run(POLICY, CPU, running(mutant, profile_of(mutant)), mutant.client())
    assert named(checks, "fail") == {"variables", "no-unknown-variable"}
    kill(mutant="unknown variable (VLLM_NVFP4_GEMM_BACKEND)", gate="G3", sound=sound, mutant_checks=checks)


def test_a_negative_estimate_of_graph_memory(server: Server, sound: tuple[Check, ...], tmp_path: Path, kill: Kill) -> None:
    """A real server that prints a negative number in vLLM's own line is killed before it gets any traffic."""
    folder = str(serving.HERE / "saying")
    with started(server, tmp_path, PYTHONPATH=folder, SPARKWRIGHT_TEST_LINE="Estimated CUDA graph memory: -35.17 GiB total") as mutant:
        assert not mutant.ready
        assert not mutant.running
        checks = contract.run(POLICY, CPU, running(mutant))
    assert "POST" not in mutant.log.read_text("utf-8", "replace")
    assert named(checks, "fail") >= {"server", "graph-memory"}
    kill(mutant="negative graph-memory estimate", gate="G3", sound=sound, mutant_checks=checks)


def test_an_unquantised_server_for_a_quantised_recipe(server: Server, sound: tuple[Check, ...], kill: Kill) -> None:
    """The model serves in 16 bits where the recipe promises FP8 (a server of another checkpoint looks the same from outside)."""
    wants = replace(CPU, lines={**CPU.lines, "quantization": "fp8"})
    checks = contract.run(POLICY, wants, running(server, profile_of(server)), server.client())
    assert named(checks, "fail") == {"line-quantization"}
    kill(mutant="unquantised where the recipe says fp8", gate="G3", sound=sound, mutant_checks=checks)


def test_a_profile_without_the_kernel(server: Server, sound: tuple[Check, ...], kill: Kill) -> None:
    """A profile during which the server ran nothing shows nothing, whatever its log promises."""
    folder, client = server.log.parent / "profiles", server.client()
    there = set(folder.iterdir())
    with client.profile():
        pass
    (idle,) = [path for path in set(folder.iterdir()) - there if "async_llm" not in path.name]
    checks = contract.run(POLICY, CPU, running(server, idle), client)
    assert named(checks, "fail") == {"kernels"}
    kill(mutant="kernel of the recipe did not run", gate="G3", sound=sound, mutant_checks=checks)


@pytest.mark.parametrize(
    ("mutant", "line"),
    [
        ("emulation fallback", "NVFP4 linear falling back to the slow and unoptimized emulation backend as no optimized backend is"),
        ("emulated linear kernel", "Using EmulationNvFp4LinearKernel for NVFP4 GEMM"),
        ("emulated experts", "Using 'EMULATION' NvFp4 MoE backend out of potential backends: ['EMULATION']."),
        ("--linear-backend without effect", "--linear-backend=cutlass has no kernel for this linear layer type; using automatic selection"),
    ],
)
def test_a_line_that_no_sound_server_prints(
    mutant: str, line: str, server: Server, sound: tuple[Check, ...], tmp_path: Path, kill: Kill
) -> None:
    """The real log with one line of vLLM 0.33.0 more."""
    log = tmp_path / "server.log"
    log.write_bytes(server.log.read_bytes() + f"(Worker pid=1) WARNING 11-21 22:31:51 [__init__.py:1294] {line}\n".encode())
    known = running(server, profile_of(server))
    changed = Running(log, known.flags, known.variables, known.package, known.profile)
    checks = contract.run(POLICY, CPU, changed, server.client())
    assert set() < named(checks, "fail") <= {"no-emulation", "no-refusal", "no-fallback"}
    kill(mutant=mutant, gate="G3", sound=sound, mutant_checks=checks)


@pytest.mark.parametrize("fault", SPOILED)
def test_a_spoiled_stream(fault: str, server: Server, sound: tuple[Check, ...], kill: Kill) -> None:
    """The real server behind a proxy that breaks its streams."""
    with Proxy(server.url, fault) as proxy:
        checks = contract.run(POLICY, CPU, running(server, profile_of(server)), Client(proxy.url))
    assert named(checks, "invalid") == {"stream"}
    kill(mutant=f"stream: {fault}", gate="G3", sound=sound, mutant_checks=checks)
