"""G2 without a GPU: its judgements of drivers, operators and programs that answer wrongly."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
from tests.support import fake_gpu, fatbins, processes, wheels
from tests.support.fake_gpu import POLICY

from sparkwright.builder import host_info
from sparkwright.builder.host_info import GpuInfo
from sparkwright.cli import gate as gate_verb
from sparkwright.gates import device, operators
from sparkwright.gates.core import ladder
from sparkwright.gates.device import CHECKS

GB10 = (12, 1)
WHEEL = Path("a.whl")


def test_without_a_gpu_every_check_states_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every declared check is there as not run, and required as on a GPU."""
    monkeypatch.setattr(host_info, "gpus", lambda: ())
    checks = device.run(POLICY, tmp_path, WHEEL, "sm_121f", Path(sys.executable))
    assert [check.name for check in checks] == [entry.name for entry in CHECKS]
    assert {(check.state, check.reason) for check in checks} == {("not-run", "no-gpu")}
    assert all(check.required for check in checks)


def test_a_failing_driver_is_no_machine_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi is there and fails: the gate, the facts of the host and a request name the driver."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    checks = device.run(POLICY, tmp_path, WHEEL, "sm_121f", Path(sys.executable))
    assert {(check.state, check.reason) for check in checks} == {("not-run", "driver-failing")}
    assert checks[0].message == "the driver is failing: NVIDIA-SMI has failed"
    assert ladder.host_facts()["driver"] == checks[0].message
    assert gate_verb._machine(argparse.Namespace(gpu=None))["gpus"] == [checks[0].message]
    program.unlink()
    assert host_info.driver_fault() == ""


@pytest.mark.parametrize(("target", "reason"), [("sm_90a", "gpu-foreign"), ("sm_121f", "")])
def test_the_architecture_comes_from_the_wheel(
    target: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that does not load the wheel's code is foreign."""
    body = 'for _ in cubins: print(json.dumps(dict(error="")))'
    monkeypatch.setattr(device, "DRIVER", fake_gpu.driver(tmp_path, body))
    monkeypatch.setattr(host_info, "gpus", lambda: (GpuInfo("a GB10", "12.1", "580.1"),))
    monkeypatch.setattr(device, "unpack", lambda *_: (cubins(tmp_path), []))
    checks = {one.name: one for one in device.run(POLICY, tmp_path, WHEEL, target)}
    assert [*checks] == [entry.name for entry in CHECKS]
    if reason:
        assert {check.reason for check in checks.values()} == {reason}
        return
    assert {checks[name].state for name in ("gpu", "cubins")} == {"pass"}
    assert {checks[name].reason for name in operators.OPERATORS} == {"no-environment"}


def cubins(folder: Path, count: int = 3) -> list[str]:
    """Write *count* cubins of a wheel, and return their names."""
    for n in range(count):
        (folder / f"{n:06}.cubin").touch()
    return [f"_C.so, unit {n}" for n in range(count)]


@pytest.mark.parametrize(
    ("body", "state", "reason"),
    [
        ('for _ in cubins: print(\'{"error": ""}\')', "pass", ""),
        (
            'for _ in cubins: print(\'{"error": "NO_BINARY"}\')',
            "fail",
            "kernel-unloadable",
        ),
        (
            'print(\'{"error": ""}\', flush=True); os.abort()',
            "invalid",
            "probe-crashed",
        ),
        (
            'print(\'{"error": ""}\', flush=True); time.sleep(60)',
            "invalid",
            "probe-slow",
        ),
        ("print('nonsense')", "invalid", "probe-crashed"),
    ],
)
def test_every_cubin_has_to_load(
    body: str, state: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that the driver refuses fails; one at which it crashes or hangs is invalid, and named."""
    monkeypatch.setattr(device, "DRIVER", fake_gpu.driver(tmp_path, body))
    check = device.load_check(cubins(tmp_path), 2 if reason == "probe-slow" else 60, tmp_path)
    assert (check.state, check.reason) == (state, reason)
    if "flush" in body:
        assert "unit 1" in check.message
    if state == "pass":
        assert [figure.value for figure in check.figures] == [3, 0]


def test_a_wheel_without_fitting_or_readable_code_does_not_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cubin for the GPU fails; a damaged library is invalid, whatever the others have."""
    files = {"mini/_C.so": fatbins.library(tmp_path, [fatbins.cubin(tmp_path, "sm_121f")])}
    wheel = wheels.plain(tmp_path / "dist", "mini", "1.0", files=files)
    whole, libraries = device.unpack(wheel, GB10, ["mini/_C.so"], tmp_path)
    assert (whole, libraries) == (["mini/_C.so, unit 0"], [tmp_path / "_C.so"])
    assert (tmp_path / "000000.cubin").stat().st_size
    assert device.load_check([], 1, tmp_path).reason == "code-foreign"
    wheel = wheels.plain(tmp_path / "dist", "mini", "1.0", files={**files, "mini/_D.so": b"\x7fELF, cut off"})
    monkeypatch.setattr(host_info, "gpus", lambda: (GpuInfo("a GB10", "12.1", "580.1"),))
    assert [one.reason for one in device.run(POLICY, tmp_path, wheel, "sm_121f")] == ["", "code-unreadable"]


@pytest.mark.parametrize(
    ("fault", "state", "reason"),
    [
        ("no moe_sum", "not-run", "op-absent"),
        ("the operator was not compiled", "not-run", "op-refused"),
        ("the operator raises", "fail", "op-broken"),
        ("the operator ends the process", "invalid", "op-crashed"),
    ],
)
def test_an_operator_without_a_result_is_named(
    fault: str, state: str, reason: str, tmp_path: Path
) -> None:
    """Absent, refused, broken and crashed are told apart, and none of them passes."""
    check = fake_gpu.check("moe-sum", tmp_path / "scratch", fault)
    assert (check.state, check.reason) == (state, reason)


@pytest.mark.parametrize(
    ("script", "reason"), [("exit 1", "op-crashed"), ('echo \'{"done": "x"}\'', "op-crashed")]
)
def test_an_environment_that_answers_wrongly_is_invalid(
    script: str, reason: str, tmp_path: Path
) -> None:
    """An interpreter that ends, or states results that it did not write, gives no pass."""
    python = processes.script(tmp_path / "python", script)
    check = device.operator_check("moe-sum", POLICY, python, (), tmp_path / "scratch")
    assert (check.state, check.reason) == ("invalid", reason)
