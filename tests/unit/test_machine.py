"""The machine that measures: its policy, the reasons against measuring, the probe, the monitor and the watchdog."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace
from tests.support import processes

from sparkwright.bench.machine import monitor, watchdog
from sparkwright.bench.machine.monitor import MachineMonitor, ProbeError
from sparkwright.bench.machine.state_checks import (
    MachinePolicy,
    Reading,
    Snapshot,
    disturbances,
)
from sparkwright.bench.machine.watchdog import watch_memory
from sparkwright.bench.model.modules import BANDWIDTH, Bandwidth
from sparkwright.bench.records import Reason
from sparkwright.core import process, strict_yaml
from sparkwright.core.store import Store

POLICY = strict_yaml.load(Path(__file__).parents[2] / "ci" / "gates" / "machine.yaml", MachinePolicy)
#: The policy for a test's machine, which is neither quiet nor fast.
SMALL = replace(
    POLICY,
    probe=replace(POLICY.probe, matrix=8, stream=8, warmup=0.0, seconds=0.02, readings=3, timeout=60),
    discrete_floor=1,
    max_other_load=1.0,
)
NORMAL = (Reading(0.00113, 0.0023), Reading(0.00115, 0.0023), Reading(0.00117, 0.0023))
QUIET = Snapshot(gemv=0.00115, temperature=55, other_load=0.01)

#: What differs from a quiet machine → the reason.
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "slow": ({"gemv": 0.0038}, "slow-state"),
    "too fast": ({"gemv": 0.0005}, "slow-state"),
    "silent": ({"gemv": None, "probe_error": "it has ended"}, "probe-silent"),
    "braked": ({"throttle_reasons": ("hardware power brake",)}, "throttled"),
    "hot": ({"temperature": 93.0}, "too-hot"),
    "busy": ({"other_load": 0.4}, "machine-busy"),
    "shared": ({"gpu_processes": ("python3 (17)",)}, "gpu-shared"),
    "unknown": ({"temperature": None, "other_load": None}, ""),
}


def references(reasons: tuple[Reason, ...]) -> list[str]:
    return [reason.reference for reason in reasons]


@pytest.mark.parametrize(("changed", "reference"), ODD.values(), ids=ODD)
def test_odd_state_is_a_reason_before_after_and_at_the_start(changed: dict[str, Any], reference: str) -> None:
    """What is not known is none."""
    odd = replace(QUIET, **changed)
    for before, after in ((odd, QUIET), (QUIET, odd), (odd, odd)):
        assert references(disturbances(before, after, NORMAL, POLICY)) == [reference] * bool(reference)
    # Without a GPU there are no normal readings.
    assert references(disturbances(odd, odd, (), POLICY)) == [reference] * (bool(reference) and "gemv" not in changed)


#: A program in the place of Python that answers as the probe does, with the milliseconds in the file beside it.
FAKE_PROBE = """
import json, pathlib, sys
ms = float(pathlib.Path(__file__).with_suffix(".ms").read_text())
if ms <= 0:
    sys.exit("CUDA error: out of memory")
reading = {"gemv": ms / 1e3, "copy": 0.002}
print(json.dumps({"gpu": True, "name": "fake", "uuid": "", "bytes": 10**9, "readings": [reading] * int(sys.argv[-1])}))
"""


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "is not installed"),
        ("echo no CUDA >&2; exit 1", "status 1.*no CUDA"),
        ("echo '[]'", "gives no reading"),
        ("exec sleep 60", "did not end within"),
    ],
)
def test_probe_that_fails_says_why(tmp_path: Path, script: str | None, message: str) -> None:
    if script:
        processes.script(tmp_path / "python", script)
    timeout = 0.2 if "exec" in (script or "") else 60
    with pytest.raises(ProbeError, match=f"(?i){message}"):
        monitor.probe(tmp_path / "python", replace(SMALL.probe, timeout=timeout), 8)


def test_session_on_a_gpu_notices_the_slow_state(tmp_path: Path) -> None:
    store, milliseconds = Store(tmp_path / "cache"), tmp_path / "fake.ms"
    fake = processes.script(tmp_path / "fake", FAKE_PROBE, sys.executable)
    milliseconds.write_text("1.0")
    probed = MachineMonitor(SMALL, store, python=fake)
    assert probed.settle(0.01) == ()
    assert probed.normal == (Reading(0.001, 0.002),) * 3
    assert store.get(*BANDWIDTH, Bandwidth) == Bandwidth(1000.0, "fake")
    before = probed.snapshot()
    for reading, reference in (("1.5", "slow-state"), ("0", "probe-silent")):
        milliseconds.write_text(reading)
        assert references(probed.disturbances(before, probed.snapshot())) == [reference]
    for reading, expected in (("4", ["slow-state"]), ("1.02", []), ("0", ["probe-silent"])):
        milliseconds.write_text(reading)
        assert references(probed.settle(0)) == expected


def machine(folder: Path) -> MachineMonitor:
    """Return a monitor without a probe."""
    return MachineMonitor(POLICY, Store(folder / "cache"), python=None)


def test_gpu_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With unified memory, as nvidia-smi reports it; what it does not know is unknown, and programs on another GPU do not count."""
    parent, own = psutil.Process().ppid(), psutil.Process().pid
    answers = {
        "name": "NVIDIA GB10, [N/A], [N/A]", "uuid": "GPU-1, 9A.0, 61, 0x00000000000000c5",
        "gpu_uuid": f"GPU-1, {parent}\nGPU-1, {own}\nGPU-1, {2**22}\nGPU-2, 1",
    }  # fmt: skip
    cases = "".join(f"*={name},*) printf '%s\\n' '{answer}';;\n" for name, answer in answers.items())
    processes.script(tmp_path / "nvidia-smi", f"case $1 in\n{cases}esac\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    unified = machine(tmp_path)
    shot = unified.snapshot()
    assert (shot.temperature, unified.firmware()["vbios"]) == (61, "9A.0")
    assert shot.throttle_reasons == ("hardware thermal slowdown", "hardware power brake")
    assert shot.gpu_processes == (f"process {parent}",)
    assert "gpu-shared" in references(unified.disturbances(shot, shot))
    assert unified.policy == POLICY
    processes.script(tmp_path / "nvidia-smi", "case $1 in *=uuid,*) echo 'GPU-1, [N/A], [N/A], [N/A]';; *) echo 'NVIDIA H200, 143771, 120000';; esac")
    other = machine(tmp_path)
    assert other.policy.floor == POLICY.discrete_floor
    assert (other.snapshot().temperature, other.snapshot().throttle_reasons) == (None, ())


def test_watchdog_reads_the_kernels_log_from_now_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, record = tmp_path / "kmsg", "6,1,5140900,-;{}\n"
    log.write_text(record.format("NVRM: old: NV_ERR_NO_MEMORY"))
    # Further fields of a record are no messages of the kernel.
    other = record.format("usb 1-1: new device") + " SUBSYSTEM=;NVRM: x: NV_ERR_NO_MEMORY\n"
    records = iter(["", other, record.format("NVRM: nvAssertOkFailedNoLog: Out of memory [NV_ERR_NO_MEMORY] (0x00000051)")])

    def available() -> int:
        with log.open("a") as stream:
            stream.write(next(records))
        return 9000

    kills: list[tuple[str, str]] = []
    monkeypatch.setattr(watchdog, "PERIOD", 0.001)
    monkeypatch.setattr(process, "available_megabytes", available)
    watch_memory(1, lambda *why: kills.append(why), threading.Event(), log)
    assert [(reason, "0x00000051" in message) for reason, message in kills] == [("kernel-no-memory", True)]


@pytest.mark.parametrize(("text", "reason"), [
    ("NVRM: Xid (PCI:000f:01:00): 31, pid=1234, name=python3, Ch 00000008, MMU Fault", "kernel-xid"),
    ("NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051)", "kernel-no-memory"),
    ("NVRM: GPU 000f:01:00.0: RmInitAdapter failed! (0x62:0xffff:2319)", "kernel-nvrm"),
    ("NVRM: GPU at PCI:000f:01:00 has fallen off the bus.", "kernel-nvrm"),
    ("NVRM: refcntRequestReference_IMPL: Failed to enter state 1 (current state: 0, status: 0x0000001a)", "kernel-nvrm"),
    ("NVRM: refcntRequestReference_IMPL: Failed to enter state 1 (current state: 0, status: 0x00000056)", ""),
    ("Out of memory: Killed process 4711 (python3) total-vm:1kB", "kernel-oom-kill"),
    ("mce: [Hardware Error]: Machine check events logged", "kernel-hardware"),
    ("INFO: task python3:77 blocked for more than 120 seconds.", "kernel-hardware"),
    ("NVRM: loading NVIDIA UNIX Open Kernel Module for aarch64  580.95.05", ""),
    ("python3[99]: segfault at 0", ""),
])  # fmt: skip
def test_faults_in_the_kernel_log_are_sorted(text: str, reason: str) -> None:
    fault = watchdog.finding(text)
    assert (fault.reference if fault else "") == reason
