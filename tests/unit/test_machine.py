"""The machine that measures: its policy, the reasons against measuring, the probe, the monitor and the watchdog."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pynvml
import pytest
from msgspec.structs import replace
from tests.refusals import refusal

from sparkwright.bench.machine import monitor
from sparkwright.bench.machine.monitor import GemvProbe, MachineMonitor, ProbeError, Telemetry
from sparkwright.bench.machine.state_checks import (
    REASONS,
    THROTTLE_REASONS,
    MachinePolicy,
    MemoryPolicy,
    Normal,
    Snapshot,
    disturbances,
    normal_reasons,
    start_reasons,
)
from sparkwright.bench.machine.watchdog import watch_memory
from sparkwright.bench.model import decode_bytes
from sparkwright.bench.records import Reason
from sparkwright.bench.server.launch import LaunchPlan, Server
from sparkwright.core import process, strict_yaml
from sparkwright.core.store import Store

POLICY = strict_yaml.load(Path(__file__).parents[2] / "ci" / "gates" / "machine.yaml", MachinePolicy)
#: The policy for a test's machine, which is neither quiet nor fast.
SMALL = replace(
    POLICY,
    probe=replace(POLICY.probe, matrix=8, stream=8, warmup=0.0, seconds=0.02, readings=3, timeout=60),
    memory=replace(POLICY.memory, discrete_floor=1),
    max_other_load=1.0,
)
NORMAL = Normal(0.00113, 0.00115, 0.00117, 0.0023, "a GPU")
QUIET = Snapshot(1e9, 1000.0, gemv=0.00115, copy=0.0023, temperature=55, available=100_000, other_load=0.01)

#: What differs from a quiet machine → the reason.
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "slow": ({"gemv": 0.0038}, "slow-state"),
    "too fast": ({"gemv": 0.0005}, "slow-state"),
    "silent": ({"gemv": None, "copy": None, "probe_error": "it has ended"}, "probe-silent"),
    "braked": ({"throttle_reasons": ("software power cap", "hardware power brake")}, "throttled"),
    "hot": ({"temperature": 93.0}, "too-hot"),
    "busy": ({"other_load": 0.4}, "machine-busy"),
    "shared": ({"gpu_processes": ("python3 (17)",)}, "gpu-shared"),
    "battery": ({"on_battery": True}, "on-battery"),
    "short of memory": ({"available": 12_000}, "memory-low"),
}


def references(reasons: tuple[Reason, ...]) -> list[str]:
    assert {one.reference for one in reasons} <= REASONS.keys()
    assert all(one.says for one in reasons)
    return [one.reference for one in reasons]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"period": 0.6}, "memory"), ({"floor": 0}, "memory"), ({"band": 0}, "probe"), ({"readings": 2}, "probe"), ({"min_ratio": 1.0}, "probe"),
        ({"start_temperature": 99}, ""), ({"max_other_load": 1.5}, ""), ({"discards": -1}, ""), ({"clock_jump": 0.0}, ""),
        ({"throttle_reasons": ["low spirits"]}, ""), ({"unknown": 1}, ""),
    ],
)  # fmt: skip
def test_policy_without_sense_is_refused(changes: dict[str, Any], part: str) -> None:
    data: dict[str, Any] = msgspec.to_builtins(POLICY)
    (data[part] if part else data).update(changes)
    with refusal("file-invalid"):
        strict_yaml.parse(strict_yaml.dump(data), MachinePolicy, "machine.yaml")


@pytest.mark.parametrize("name", ODD)
def test_odd_state_is_a_reason_before_after_and_at_the_start(name: str) -> None:
    changed, reference = ODD[name]
    odd = replace(QUIET, **changed)
    for before, after in ((odd, QUIET), (QUIET, odd), (odd, odd)):
        assert references(disturbances(before, after, NORMAL, POLICY)) == [reference]
    of_probe = reference in ("slow-state", "probe-silent")
    assert references(start_reasons(odd, POLICY)) == ([] if of_probe else [reference])
    assert references(disturbances(odd, odd, None, POLICY)) == ([] if of_probe else [reference])


def test_quiet_machine_power_cap_and_unknown_state_are_no_reason() -> None:
    capped = replace(QUIET, throttle_reasons=("software power cap", "sync boost"))
    unknown = Snapshot(1e9, 1000.0, gemv=0.00115, copy=0.0023)
    for shot in (QUIET, capped, unknown):
        assert start_reasons(shot, POLICY) == disturbances(shot, shot, NORMAL, POLICY) == ()


@pytest.mark.parametrize(
    ("time_passed", "monotonic_passed", "jumped"),
    [(600, 600, False), (600.4, 600, False), (600.6, 600, True), (599.4, 600, True), (-900, -900, True)],
)
def test_clock_that_was_set_or_began_again_is_a_jump(time_passed: float, monotonic_passed: float, jumped: bool) -> None:
    after = replace(QUIET, time=QUIET.time + time_passed, monotonic=QUIET.monotonic + monotonic_passed)
    assert references(disturbances(QUIET, after, NORMAL, POLICY)) == ["clock-jumped"] * jumped


def test_first_readings_in_the_slow_state_are_refused() -> None:
    assert references(normal_reasons(replace(NORMAL, median=0.0038), POLICY.probe)) == ["slow-state"]
    assert normal_reasons(NORMAL, POLICY.probe) == ()


#: A program in the place of Python that answers as the probe does, with the milliseconds in the file beside it.
FAKE_PROBE = """#!{python}
import json, pathlib, sys
print(json.dumps({{"kind": "cuda", "name": "fake", "uuid": ""}}), flush=True)
for line in sys.stdin:
    ms = float(pathlib.Path(__file__).with_suffix(".ms").read_text())
    if ms <= 0:
        sys.exit("CUDA error: out of memory")
    print(json.dumps({{"gemv": ms / 1e3, "copy": 0.002, "reduce": 0.0005, "bytes": 10**9}}), flush=True)
"""


@pytest.fixture(name="fake")
def _fake(tmp_path: Path) -> Path:
    path = tmp_path / "fake"
    path.write_text(FAKE_PROBE.format(python=sys.executable))
    path.chmod(0o755)
    path.with_suffix(".ms").write_text("1.0")
    return path


def test_probe_measures_this_processor(tmp_path: Path) -> None:
    probe = GemvProbe(SMALL.probe, Path(sys.executable), tmp_path / "log")
    device, reading = probe.device(), probe.reading()
    assert (device.kind, device.uuid) == ("cpu", "")
    assert "NumPy" in device.name
    assert 0 < reading.gemv < 10
    assert 1e7 < probe.bandwidth() < 1e13
    probe.stop()
    probe.stop()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "does not run"),
        ("exit 1", "it has ended"),
        ("echo no CUDA >&2; echo '[]'; sleep 60", r"gives no reading.*no CUDA"),
        ("exec sleep 60", "did not answer within 0 s"),
    ],
)
def test_probe_that_fails_says_why(tmp_path: Path, script: str | None, message: str) -> None:
    python = tmp_path / "python"
    if script:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    timeout = 0.2 if "exec" in (script or "") else 60
    with pytest.raises(ProbeError, match=message):
        GemvProbe(replace(SMALL.probe, start_timeout=timeout), python, tmp_path / "log").reading()


def test_probe_is_started_again_after_a_failure(tmp_path: Path, fake: Path) -> None:
    probe = GemvProbe(SMALL.probe, fake, tmp_path / "log")
    assert probe.reading().gemv == 0.001
    fake.with_suffix(".ms").write_text("0")
    with pytest.raises(ProbeError, match="out of memory"):
        probe.reading()
    fake.with_suffix(".ms").write_text("2.0")
    assert probe.reading().gemv == 0.002
    probe.stop()


def test_session_on_a_gpu_notices_the_slow_state_within_and_between_sessions(tmp_path: Path, fake: Path) -> None:
    store, milliseconds = Store(tmp_path / "cache"), fake.with_suffix(".ms")
    with MachineMonitor(SMALL, store, python=fake) as machine:
        machine.preheat(0.01)
        assert machine.settle() == ()
        assert machine.normal == Normal(0.001, 0.001, 0.001, 0.002, "fake")
        assert machine.bandwidth == decode_bytes.stored_bandwidth(store) == decode_bytes.Bandwidth(2000.0, "measured", "fake")
        before = machine.snapshot()
        milliseconds.write_text("1.5")
        assert references(machine.disturbances(before, machine.snapshot())) == ["slow-state"]
        milliseconds.write_text("0")
        assert references(machine.disturbances(before, machine.snapshot())) == ["probe-silent"]
        milliseconds.write_text("1.04")
        assert references(machine.settle()) == ["slow-state"]
        milliseconds.write_text("1.02")
        assert machine.settle() == ()
        milliseconds.write_text("0")
        assert references(machine.settle()) == ["probe-silent"]


def test_session_without_a_gpu_measures_the_bandwidth_alone(tmp_path: Path) -> None:
    with MachineMonitor(SMALL, Store(tmp_path), python=None) as machine:
        machine.preheat(5)
        assert machine.settle() == ()
        shot = machine.snapshot()
        assert machine.disturbances(shot, machine.snapshot()) == ()
    assert (machine.normal, shot.gemv, machine.policy.memory.floor) == (None, None, 1)
    assert machine.bandwidth
    assert shot.available


def test_session_whose_probe_does_not_start_is_refused(tmp_path: Path) -> None:
    with MachineMonitor(SMALL, Store(tmp_path / "cache"), python=tmp_path / "none") as machine:
        assert references(machine.settle()) == ["probe-silent"]
    assert "slow state would not be noticed" in machine.notes[0]


@pytest.fixture(name="gpu")
def _gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU with unified memory, as NVML reports it; what is not in it, NVML does not support."""
    answers: dict[str, Any] = {
        "nvmlInit": None, "nvmlDeviceGetHandleByIndex": "gpu", "nvmlDeviceGetName": "NVIDIA GB10", "nvmlSystemGetDriverVersion": "580.1",
        "nvmlDeviceGetClockInfo": 2400, "nvmlDeviceGetTemperature": 61, "nvmlDeviceGetPowerUsage": 41500,
        "nvmlDeviceGetCurrentClocksEventReasons": 0x1 | 0x40 | 0x80, "nvmlDeviceGetComputeRunningProcesses": [],
    }  # fmt: skip

    def answer(name: str) -> Any:
        if name not in answers:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return answers[name]

    for name in vars(pynvml):
        if name.startswith(("nvmlInit", "nvmlDeviceGet", "nvmlSystemGet")):
            monkeypatch.setattr(pynvml, name, lambda *_, name=name: answer(name))
    return answers


def test_gpu_is_reported(gpu: dict[str, Any]) -> None:
    parent = psutil.Process().ppid()
    gpu["nvmlDeviceGetComputeRunningProcesses"] = [SimpleNamespace(pid=pid) for pid in (parent, psutil.Process().pid, 2**22)]
    telemetry = Telemetry()
    shot = telemetry.snapshot()
    assert (shot.sm_clock, shot.temperature, shot.power) == (2400, 61, 41.5)
    assert shot.throttle_reasons == ("hardware thermal slowdown", "hardware power brake")
    assert shot.gpu_processes == (f"{psutil.Process(parent).name()} ({parent})",)
    assert telemetry.fingerprint()["gpu"] == "NVIDIA GB10"
    assert telemetry.adapt(POLICY) == POLICY
    gpu["nvmlDeviceGetMemoryInfo"] = SimpleNamespace(total=1)
    assert telemetry.adapt(POLICY).memory.floor == POLICY.memory.discrete_floor
    gpu.clear()
    assert (Telemetry().snapshot().temperature, Telemetry("uuid").snapshot().throttle_reasons) == (None, ())


def test_kernel_without_power_supplies_is_no_battery(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("psutil._pslinux.POWER_SUPPLY_PATH", str(tmp_path / "absent"))
    assert not Telemetry().snapshot().on_battery


def test_throttle_reasons_are_those_of_nvml() -> None:
    for bit, name in THROTTLE_REASONS.items():
        words = name.replace("software", "sw").replace("hardware", "hw").removesuffix(" setting").split()
        constants = [constant.lower() for constant, value in vars(pynvml).items() if "Reason" in constant and value == bit]
        assert any(all(word in constant for word in words) for constant in constants), name


def test_fingerprint_names_versions_and_no_person() -> None:
    facts = Telemetry().fingerprint()
    # The processor has no name where the kernel's /sys is not mounted.
    assert {"kernel", "cores", "memory", "architecture"} <= facts.keys()
    assert facts == Telemetry().fingerprint()
    assert not {Path.home().name, str(Path.cwd())} & set(facts.values())


def test_load_of_others_leaves_out_our_processes_and_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 s, 2 s are idle, 3 s wait for a disk, 4 s are ours and 1 s is of others."""
    moments = iter([(0.0, 0.0), (1.0, 4.0)])
    own = SimpleNamespace(seconds=0.0)

    def cpu_times() -> SimpleNamespace:
        share, own.seconds = next(moments)

        class Times(tuple[float, ...]):
            idle, iowait, guest, guest_nice = 2 * share, 3 * share, 5 * share, 0.0

        return Times((10 * share, 5 * share))  # type: ignore[return-value]  # as psutil's named tuple

    ours = SimpleNamespace(cpu_times=lambda: (own.seconds / 2, own.seconds / 2, 0.0, 0.0, 99.0))
    monkeypatch.setattr(psutil, "cpu_times", cpu_times)
    monkeypatch.setattr(monitor, "LOAD_SECONDS", 0.0)
    assert monitor._other_load([ours]) == pytest.approx(0.1)  # type: ignore[list-item]  # as a process


#: Never reached: no floor, and no fall.
HARMLESS = MemoryPolicy(floor=1, discrete_floor=1, max_fall=10**8, period=0.02)


class Killing:
    """Remembers why the watchdog kills."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.called = threading.Event()

    def __call__(self, reason: str, message: str) -> None:
        self.calls.append((reason, message))
        self.called.set()


@pytest.mark.parametrize(
    ("available", "changes", "message"),
    [
        ([9000, 5000, 4999, 4000, 3000], {"floor": 5000}, "4999 MB are available"),
        ([9000, 8000, 7000, 6000, 5990], {"max_fall": 2999}, "fell by 3000 MB in a second"),
        ([9000] + [9000 - 40 * step for step in range(100)], {"max_fall": 2999}, ""),
        ([9000], {}, ""),
    ],
)
def test_watchdog_kills_once_when_memory_is_short_or_falls_fast(
    monkeypatch: pytest.MonkeyPatch, available: list[int], changes: dict[str, int], message: str
) -> None:
    samples, killing = iter(available), Killing()
    last = available[-1]
    monkeypatch.setattr(process, "available_megabytes", lambda: next(samples, last))
    with watch_memory(replace(HARMLESS, **changes), killing, kernel_log=Path("/nonexistent")):
        assert killing.called.wait(20 if message else 0.5) == bool(message)
        time.sleep(0.1)
    assert [reason for reason, _ in killing.calls] == (["memory-low"] if message else [])
    assert message in str(killing.calls)


def test_watchdog_reads_the_kernels_log_from_now_on(tmp_path: Path) -> None:
    log, record, killing = tmp_path / "kmsg", "6,1,5140900,-;{}\n", Killing()
    log.write_text(record.format("NVRM: old: NV_ERR_NO_MEMORY"))
    with watch_memory(HARMLESS, killing, kernel_log=log), log.open("a") as stream:
        stream.write(record.format("usb 1-1: new device"))
        stream.flush()
        assert not killing.called.wait(0.3)
        stream.write(record.format("NVRM: nvAssertOkFailedNoLog: Out of memory [NV_ERR_NO_MEMORY] (0x00000051)"))
        stream.flush()
        assert killing.called.wait(20)
    ((reason, message),) = killing.calls
    assert reason == "kernel-no-memory"
    assert reason in REASONS
    assert "0x00000051" in message


#: Answers as vLLM does, ignores TERM, and has a child in a session of its own that does the same.
SERVES = """
import http.server, json, os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
stray = "import os, signal, time; os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", stray])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": "toy", "max_model_len": 64}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_watchdog_ends_a_server_that_ignores_signals_with_all_its_processes(tmp_path: Path) -> None:
    folder = tmp_path / "modules" / "vllm" / "entrypoints" / "cli"
    folder.mkdir(parents=True)
    (folder / "main.py").write_text(SERVES)
    launch = LaunchPlan(Path(sys.executable), tmp_path, (), {"PYTHONPATH": str(tmp_path / "modules")}, "toy", timeout=100, grace=90)
    with Server(launch, tmp_path / "log") as server:
        assert server.ready, server.failure
        processes = server.processes()
        assert len(processes) == 2
        with watch_memory(replace(HARMLESS, floor=900_000_000), server.kill):
            until = time.monotonic() + 60
            while server.running and time.monotonic() < until:
                server.guard()
                time.sleep(0.02)
        assert (server.running, server.reason) == (False, "memory-low")
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.wait(timeout=60)
