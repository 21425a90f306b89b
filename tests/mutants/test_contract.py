"""Mutants of servers whose kernels, log or stream are wrong in one way: each dies at G3."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.mutants.conftest import Kill
from tests.server.proxy import Proxy
from tests.server.test_contract import CPU, POLICY, SPOILED, observed
from tests.support import serving
from tests.support.serving import _server, _toy, _vllm_python

from sparkwright.bench.server.client import Client
from sparkwright.bench.server.launch import Server
from sparkwright.gates.contract import gate, kernel_trace
from sparkwright.gates.contract.gate import ObservedServer
from sparkwright.gates.contract.kernel_trace import BackendTable
from sparkwright.gates.core.server_under_test import ServerIdentity
from sparkwright.gates.core.verdict import Check

__all__ = ["_server", "_toy", "_vllm_python"]

pytestmark = [pytest.mark.mutants, pytest.mark.server]

MARLIN = "void marlin_moe_wna16::Marlin<1125899906909960l, 256>(int4 const*)"


@pytest.fixture(scope="module", name="own")
def _own(server: Server) -> ObservedServer:
    """Return the sound server with a profile of one request."""
    return observed(server)


@pytest.fixture(scope="module", name="sound")
def _sound(own: ObservedServer) -> tuple[Check, ...]:
    """Return the checks of the sound server."""
    return gate.run(POLICY, CPU, own)


def named(checks: tuple[Check, ...], state: str) -> set[str]:
    return {check.name for check in checks if check.state == state and check.required}


def started(server: Server, folder: Path, *flags: str, **variables: str) -> Server:
    """Return a server as the sound one, with further *flags* and *variables*."""
    profiles = kernel_trace.flags(folder / "profiles")
    return Server(serving.launch(server.plan.python, server.plan.model, *profiles, *flags, **variables), folder / "server.log")


def served_by(own: ObservedServer, folder: Path, old: str, new: str, phases: str = "context|generation") -> ObservedServer:
    """Return the sound server with a real trace in which *new* served in place of *old*; its log and ``/health`` stay as they are."""
    assert own.trace
    data = json.loads(gzip.decompress(own.trace.read_bytes()))
    changed = 0
    steps = [event for event in data["traceEvents"] if kernel_trace._STEP.match(str(event.get("name")))]
    decode = [(step["ts"], step["ts"] + step["dur"]) for step in steps if "context_0" in step["name"]]
    for event in data["traceEvents"]:
        if event.get("cat") == "cpu_op" and event["name"] == old:
            in_decode = any(begin <= event["ts"] < end for begin, end in decode)
            if ("generation" if in_decode else "context") in phases:
                event["name"], changed = new, changed + 1
    assert changed, f"{old} is not in the trace"
    (folder / "trace.json").write_text(json.dumps(data))
    return replace(own, trace=folder / "trace.json")


def linear(own: ObservedServer) -> str:
    """Return the operator that serves the dense layers on this machine."""
    assert own.trace
    return kernel_trace.kernels(kernel_trace.read(own.trace), POLICY, CPU.contract)["decode linear"]


@pytest.mark.parametrize("phases", ["context|generation", "generation"])
def test_silent_marlin(phases: str, own: ObservedServer, sound: tuple[Check, ...], tmp_path: Path, kill: Kill) -> None:
    """``/health`` is green and the log is clean, and Marlin serves where the contract promises other kernels; or in decode alone."""
    mutant = served_by(own, tmp_path, linear(own), MARLIN, phases)
    checks = gate.run(POLICY, CPU, mutant)
    assert named(checks, "fail") == {"no-fallback-kernel", "kernels-linear"}
    kill(mutant=f"silent Marlin ({phases})", gate="G3", sound=sound, mutant_checks=checks)


def test_log_that_lies(own: ObservedServer, sound: tuple[Check, ...], tmp_path: Path, kill: Kill) -> None:
    """The log has the promised backend, and no kernel of it ran."""
    promised = replace(CPU.contract.linear, backend="CutlassNvFp4LinearKernel", decode="float_e2m1_t", prefill="float_e2m1_t")
    recipe = replace(CPU, contract=replace(CPU.contract, linear=promised))
    log = tmp_path / "server.log"
    log.write_bytes(own.log.read_bytes() + b"INFO 11-21 Using CutlassNvFp4LinearKernel for NVFP4 GEMM\n")
    checks = gate.run(POLICY, recipe, replace(own, log=log))
    assert named(checks, "fail") == {"kernels-linear"}
    kill(mutant="log-only backend", gate="G3", sound=sound, mutant_checks=checks)


def test_changed_backend(own: ObservedServer, sound: tuple[Check, ...], tmp_path: Path, kill: Kill) -> None:
    """Another kernel than in the last release, which the contract's pattern alone would let pass."""
    assert own.trace
    table = kernel_trace.kernels(kernel_trace.read(own.trace), POLICY, CPU.contract)
    kernel_trace.save(BackendTable(ServerIdentity(wheel="a" * 64), CPU.name, table), tmp_path / "backends.json")
    loose = replace(CPU, contract=replace(CPU.contract, attention=replace(CPU.contract.attention, prefill="attention", decode="attention")))
    mutant = served_by(own, tmp_path, "_C::cpu_attention_with_kv_cache", "_C::slow_attention")
    checks = gate.run(POLICY, loose, mutant, baseline=tmp_path / "backends.json")
    assert named(checks, "fail") == {"backends"}
    kill(mutant="backend changed since the last release", gate="G3", sound=sound, mutant_checks=checks)


def test_idle_profile(server: Server, own: ObservedServer, sound: tuple[Check, ...], kill: Kill) -> None:
    """A profile during which the server ran nothing shows nothing, whatever its log promises."""
    folder = server.log.parent / "profiles"
    there = set(folder.rglob("*.json*"))
    with server.client().profile():
        pass
    (idle,) = [path for path in set(folder.rglob("*.json*")) - there if "async_llm" not in path.name]
    checks = gate.run(POLICY, CPU, replace(own, trace=idle))
    assert named(checks, "fail") >= {"kernels-attention", "kernels-linear"} or named(checks, "invalid") == {"no-fallback-kernel"}
    kill(mutant="kernel of the recipe did not run", gate="G3", sound=sound, mutant_checks=checks)


def test_another_backend_than_the_recipe_says(server: Server, sound: tuple[Check, ...], tmp_path: Path, kill: Kill) -> None:
    """A server that was told FLASHINFER and took another without an error: its log alone tells."""
    with started(server, tmp_path, "--attention-backend", "FLASHINFER") as mutant:
        checks = gate.run(POLICY, CPU, observed(mutant))
    assert "no-refusal" in named(checks, "fail")
    kill(mutant="wrong backend chosen (attention, real server)", gate="G3", sound=sound, mutant_checks=checks)


def test_variable_of_an_older_release(server: Server, sound: tuple[Check, ...], tmp_path: Path, kill: Kill) -> None:
    """What chose the kernel in vLLM 0.20 is not read any more."""
    with started(server, tmp_path, VLLM_NVFP4_GEMM_BACKEND="marlin") as mutant:
        checks = gate.run(POLICY, CPU, observed(mutant))
    assert named(checks, "fail") == {"no-unknown-variable"}
    kill(mutant="unknown variable (VLLM_NVFP4_GEMM_BACKEND)", gate="G3", sound=sound, mutant_checks=checks)


def test_negative_estimate_of_graph_memory(server: Server, sound: tuple[Check, ...], tmp_path: Path, kill: Kill) -> None:
    """A real server that prints a negative number in vLLM's own line is ended before it gets any traffic."""
    folder = str(serving.HERE / "saying")
    with started(server, tmp_path, PYTHONPATH=folder, SPARKWRIGHT_TEST_LINE="Estimated CUDA graph memory: -35.17 GiB total") as mutant:
        assert not mutant.ready
        checks = gate.run(POLICY, CPU, observed(mutant))
    assert "POST" not in mutant.log.read_text("utf-8", "replace")
    assert named(checks, "fail") >= {"server", "graph-memory"}
    kill(mutant="negative graph-memory estimate", gate="G3", sound=sound, mutant_checks=checks)


def test_unquantised_server_for_a_quantised_recipe(own: ObservedServer, sound: tuple[Check, ...], kill: Kill) -> None:
    """The model serves in 16 bits where the recipe promises FP8; a server of another checkpoint looks the same from outside."""
    recipe = replace(CPU, contract=replace(CPU.contract, lines={**CPU.contract.lines, "quantization": "fp8"}))
    checks = gate.run(POLICY, recipe, own)
    assert named(checks, "fail") == {"line-quantization"}
    kill(mutant="unquantised where the recipe says fp8", gate="G3", sound=sound, mutant_checks=checks)


@pytest.mark.parametrize(
    ("mutant", "line"),
    [
        ("emulation fallback", "NVFP4 linear falling back to the slow and unoptimized emulation backend as no optimized backend is"),
        ("emulated linear kernel", "Using EmulationNvFp4LinearKernel for NVFP4 GEMM"),
        ("emulated experts", "Using 'EMULATION' NvFp4 MoE backend out of potential backends: ['EMULATION']."),
        ("--linear-backend without effect", "--linear-backend=cutlass has no kernel for this linear layer type; using automatic selection"),
    ],
)
def test_line_that_no_sound_server_prints(
    mutant: str, line: str, own: ObservedServer, sound: tuple[Check, ...], tmp_path: Path, kill: Kill
) -> None:
    """The real log with one line of vLLM 0.33.0 more."""
    log = tmp_path / "server.log"
    log.write_bytes(own.log.read_bytes() + f"(Worker pid=1) WARNING 11-21 22:31:51 [__init__.py:1294] {line}\n".encode())
    checks = gate.run(POLICY, CPU, replace(own, log=log))
    assert named(checks, "fail") & {"no-emulation", "no-refusal", "no-fallback"}
    kill(mutant=mutant, gate="G3", sound=sound, mutant_checks=checks)


@pytest.mark.parametrize("fault", SPOILED)
def test_spoiled_reply(fault: str, server: Server, own: ObservedServer, sound: tuple[Check, ...], kill: Kill) -> None:
    """The real server behind a proxy that breaks its replies."""
    with Proxy(server.url, fault) as proxy:
        checks = gate.run(POLICY, CPU, replace(own, client=Client(proxy.url)))
    assert named(checks, "invalid") == {"server"}
    kill(mutant=f"reply: {fault}", gate="G3", sound=sound, mutant_checks=checks)
