"""The machine: the reasons against measuring on it, the probe, the monitor and the watchdog, and what `doctor` makes of its facts."""

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
from sparkwright.bench.model.modules import BANDWIDTH, Bandwidth
from sparkwright.bench.records import Reason
from sparkwright.builder.host_info import GpuInfo
from sparkwright.cli import doctor
from sparkwright.client.environment import Marker, Prefix
from sparkwright.core import memory, process, strict_yaml
from sparkwright.core.store import Store
from sparkwright.forks.stack import Project

POLICY = strict_yaml.load(Path(__file__).parents[2] / "ci" / "gates" / "machine.yaml", monitor.MachinePolicy)
#: The policy for a test's machine, which is neither quiet nor fast.
SMALL = replace(
    POLICY,
    probe=replace(POLICY.probe, matrix=8, stream=8, warmup=0.0, seconds=0.02, readings=3, timeout=60),
    discrete_floor=1,
    max_other_load=1.0,
    recent=30,
)
NORMAL = (monitor.Reading(0.00113, 0.0023), monitor.Reading(0.00115, 0.0023), monitor.Reading(0.00117, 0.0023))
QUIET = monitor.Snapshot(gemv=0.00115, temperature=55, other_load=0.01)

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
        assert references(monitor.disturbances(before, after, NORMAL, POLICY)) == [reference] * bool(reference)
    # Without a GPU there are no normal readings.
    assert references(monitor.disturbances(odd, odd, (), POLICY)) == [reference] * (bool(reference) and "gemv" not in changed)


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
    with pytest.raises(monitor.ProbeError, match=f"(?i){message}"):
        monitor.probe(tmp_path / "python", replace(SMALL.probe, timeout=timeout), 8)


def test_session_on_a_gpu_notices_the_slow_state(tmp_path: Path) -> None:
    store, milliseconds = Store(tmp_path / "cache"), tmp_path / "fake.ms"
    fake = processes.script(tmp_path / "fake", FAKE_PROBE, sys.executable)
    milliseconds.write_text("1.0")
    probed = monitor.MachineMonitor(SMALL, store, python=fake)
    assert probed.settle(0.01) == ()
    assert probed.normal == (monitor.Reading(0.001, 0.002),) * 3
    assert store.get(*BANDWIDTH, Bandwidth) == Bandwidth(1000.0, "fake")
    before = probed.snapshot()
    for reading, reference in (("1.5", "slow-state"), ("0", "probe-silent")):
        milliseconds.write_text(reading)
        assert references(probed.disturbances(before, probed.snapshot())) == [reference]
    for reading, expected in (("4", ["slow-state"]), ("1.02", []), ("0", ["probe-silent"])):
        milliseconds.write_text(reading)
        assert references(probed.settle(0)) == expected


def machine(folder: Path) -> monitor.MachineMonitor:
    """Return a monitor without a probe."""
    return monitor.MachineMonitor(POLICY, Store(folder / "cache"), python=None)


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
    watchdog.watch_memory(1, lambda *why: kills.append(why), threading.Event(), log)
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


# What doctor makes of the facts about a machine.

SPARK: dict[str, Any] = {
    "machine": "aarch64",
    "glibc": "2.39",
    "part full": True,
    "cores": 20,
    "memory": 128 * 10**9,
    "disk": 900 * 10**9,
    "git": "2.43.0",
    "g++": "13.3.0",
    "Python headers": "3.12.3",
    "ccache": "4.9.1",
    "aarch64-linux-gnu-g++": "",
}


def states(**changes: object) -> dict[str, doctor.MachineCheck]:
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
        ({"g++": ""}, "g++", "missing", "plan, build and demo"),
        ({"ccache": ""}, "ccache", "look", "reuse of units"),
        ({"Python headers": ""}, "Python headers", "missing", "plan and build"),
    ],
)
def test_a_lack_is_explained(changes: dict[str, object], subject: str, state: str, words: str) -> None:
    """A program comes with the command that installs it."""
    check, packages = states(**changes)[subject], {"Python headers": "python3-dev"}
    assert (check.state, words in check.meaning) == (state, True)
    if subject in doctor.PROGRAMS:
        assert check.remedy.endswith(f"apt-get install -y {packages.get(subject, subject)}")


# Serving.


SOUND = memory.MachineMemory(121.7, 110.4, gpus=1, unified=True)
FAULT = "the GPU stays at 702 MHz under load; disconnect its power for some minutes"
#: Of a Spark that lacks nothing to serve, as `doctor` gathers them.
FACTS: dict[str, Any] = {
    "release": "2026.11.1, verified",
    "models": ["openai/gpt-oss-120b"],
    "cache": "/data/hub",
    "disk": 900 * 10**9,
    "gpus": (GpuInfo("NVIDIA GB10", "12.1", "580.95.05"),),
    "load": ("2,398 of 3,003 MHz, 38 W, 61 °C, 231 GB/s", ""),
    "kernel": "6.17.0-1032-nvidia",
    "boot": "root=/dev/nvme0n1p2 quiet",
    "swapped": 0,
    "displays": [],
}


def lacks(machine: memory.MachineMemory = SOUND, /, **changes: object) -> dict[str, doctor.MachineCheck]:
    """Return the checks of a Spark with *changes* that are not ready, by subject."""
    checks = doctor.serving(machine, FACTS | changes)
    return {check.subject: check for check in checks if check.state != "ready"}


@pytest.mark.parametrize(
    ("changes", "subject", "state", "words"),
    [
        ({"release": ""}, "release", "missing", "→ sparkwright install"),
        ({"models": []}, "models", "look", "--download"),
        ({"gpus": (GpuInfo("NVIDIA GB10", "12.1", "570.10"),)}, "GPU", "missing", "driver 580"),
        ({"load": ("702 of 3,003 MHz, 22 W, 51 °C, 70 GB/s", FAULT)}, "GPU under load", "look", "stays at 702 MHz"),
        ({"load": ("", "torch sees no GPU")}, "GPU under load", "not-run", "torch sees no GPU"),
        ({"kernel": "7.0.0-1019-nvidia"}, "kernel", "look", "kho=off"),
        ({"kernel": "7.0.0-31-generic"}, "kernel", "look", "two Sparks"),
        ({"swapped": 3 << 30}, "swap", "look", "3.2 GB are in use"),
        ({"displays": ["card0-HDMI-A-1"]}, "display", "look", "connected: card0-HDMI-A-1"),
        ({"disk": 64 * 10**9}, "disk for models", "look", "HF_HUB_CACHE"),
    ],
)
def test_what_a_server_lacks_is_explained(changes: dict[str, object], subject: str, state: str, words: str) -> None:
    (check,) = lacks(SOUND, **changes).values()
    assert (check.subject, check.state) == (subject, state)
    assert words in f"{check.observed} {check.meaning} → {check.remedy}"


def test_who_holds_memory_and_what_a_failing_driver_says_is_shown() -> None:
    held = lacks(memory.MachineMemory(121.7, 40.0, 1, True, (memory.Tenant(42, "python3", 58.0),), "Driver/library version mismatch"))
    assert held["free memory"].observed.endswith("held: python3 (42): 58.0 GiB")
    assert (held["nvidia-smi"].state, held["nvidia-smi"].observed) == ("look", "Driver/library version mismatch")
    assert lacks(memory.MachineMemory(64.0, 63.0), gpus=())["GPU"].state == "not-run"


def test_facts_of_this_machine_are_those_that_are_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a release there is no load on the GPU."""
    (tmp_path / "models--openai--gpt-oss-20b").mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    facts = doctor.serving_facts(Prefix(tmp_path / "prefix"), SOUND)
    assert facts.keys() == FACTS.keys()
    assert (facts["release"], facts["models"], facts["load"][0]) == ("", ["openai/gpt-oss-20b"], "")
    assert facts["disk"] > 0


#: A probe that runs for a second: what its Python is asked, and what it prints.
PROBE = """\
echo "$@" >>"$0.asked"
sleep 0.4
echo '{"gpu": true, "name": "GB10", "uuid": "", "bytes": 268000000, "readings": [{"gemv": 0.00116, "copy": 0.0024}]}'
"""


@pytest.mark.parametrize(
    ("clocks", "state", "fault"),
    [
        ("702, 3003, 22.31, 51", "702 of 3,003 MHz, 22 W, 51 °C, 231 GB/s", FAULT),
        ("2398, 3003, 38.4, 61", "2,398 of 3,003 MHz, 38 W, 61 °C, 231 GB/s", ""),
        ("2000, 3003, [N/A], 61", "2,000 of 3,003 MHz, 0 W, 61 °C, 231 GB/s", ""),
    ],
)
def test_a_gpu_that_stays_slow_under_load_is_named(clocks: str, state: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes.script(tmp_path / "nvidia-smi", f"echo '{clocks}'")
    processes.script(tmp_path / "python", PROBE)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(monitor, "PERIOD", 0.1)
    assert monitor.under_load(tmp_path / "python") == (state, fault)
    # Two measurements of five seconds each.
    assert (tmp_path / "python.asked").read_text().split()[2:] == ["268", "0", "5", "1"]


@pytest.mark.parametrize(
    ("free", "computing", "reason"),
    [
        (60.0, [], ""), (60.0, [["77"]], "another program computes on the GPU"), (15.0, [], "too little memory is free for it"),
    ],
)  # fmt: skip
def test_a_spark_that_is_full_or_serves_is_not_loaded(free: float, computing: list[list[str]], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate's server, and one of another program, count as well."""
    installed = Prefix(tmp_path / "prefix")
    marker = Marker(name="spark.1", folder="", index="", python="", key="", packages={}, channel="verified", wheels={}, listing="")
    monkeypatch.setattr(Prefix, "marker", lambda *_: marker)
    monkeypatch.setattr(memory, "query", lambda what: (computing, "") if "compute-apps" in what else ([["NVIDIA GB10", "12.1", "580.95"]], ""))
    monkeypatch.setattr(monitor, "under_load", lambda _: ("2,398 of 3,003 MHz", ""))
    facts = doctor.serving_facts(installed, replace(SOUND, free=free))
    assert facts["load"] == (("", reason) if reason else ("2,398 of 3,003 MHz", ""))
