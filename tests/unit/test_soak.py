"""G7: the requests, what is watched, and the checks of a soak."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import types
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.refusals import refusal

from sparkwright.bench.machine import kernel_log
from sparkwright.bench.machine.kernel_log import Finding, KernelLog
from sparkwright.bench.server.client import Client
from sparkwright.core import strict_yaml
from sparkwright.gates.core.verdict import Check, failed, not_run, passed
from sparkwright.gates.soak import checks, collect, gate
from sparkwright.gates.soak.checks import SoakEnd, SoakInterval, SoakPolicy, SoakRequest
from sparkwright.gates.soak.collect import Load, Monitor

ROOT = Path(__file__).parents[2]
POLICY_FILE = ROOT / "ci" / "gates" / "soak.yaml"
POLICY = strict_yaml.load(POLICY_FILE, SoakPolicy)
KINDS = ("memory", "gpu-memory")
#: Nothing listens on the discard port.
NOBODY = "http://127.0.0.1:9"

Soak = list[SoakInterval]


def sound(growth: float = 0.0, noise: float = 5.0, kind: str = "memory") -> Soak:
    """Return the intervals of a soak that went well; memory of *kind* grows by *growth* MB an hour, with *noise* in MB."""
    draw, intervals = random.Random(2), []
    answers = tuple(SoakRequest(str(number), "answered", 100) for number in range(POLICY.least))
    requests = (*answers, SoakRequest("a", "aborted"), SoakRequest("b", "refused"))
    for minute in range(120):
        memory = {each: 3e9 + 1e6 * draw.gauss(growth * minute / 60 if each == kind else 0, noise if each == kind else 0) for each in KINDS}
        concurrency = POLICY.load.concurrencies[minute % len(POLICY.load.concurrencies)]
        intervals.append(SoakInterval(60.0 * (minute + 1), concurrency, requests, memory, 50e9))
    return intervals


def changed(**fields: object) -> Soak:
    """Return a sound soak with other *fields* in its third interval."""
    intervals = sound()
    intervals[2] = replace(intervals[2], **fields)
    return intervals


def states(intervals: Soak, end: SoakEnd = SoakEnd(7200, running=0)) -> dict[str, tuple[str, str]]:  # noqa: B008
    """Return state and reason by check; every pass that is declared as measured has figures."""
    judged = checks.judge(POLICY, intervals, end)
    assert {check.reason for check in judged} - {""} <= set(gate.REASONS)
    assert all(math.isfinite(figure.value) for check in judged for figure in check.figures)
    measured = {entry.name for entry in gate.CHECKS if entry.measured}
    assert all(check.figures for check in judged if check.name in measured and check.state == "pass")
    return {check.name: (check.state, check.reason) for check in judged}


@pytest.mark.parametrize(
    ("fields", "name", "reason"),
    [
        ({}, "", ""),
        ({"requests": (SoakRequest("0", "failed", 0, "stream-truncated: half"),)}, "requests", "requests-failed"),
        ({"requests": (SoakRequest("0", "repeating", 64, "64 times"),)}, "words-under-load", "token-run"),
        ({"ended": ("process 7 ended: VLLM::EngineCore",)}, "restarts", "server-restarted"),
        ({"kernel": (Finding("kernel-xid", "NVRM: Xid (PCI:0000:01:00): 79"),)}, "kernel-log", "kernel-xid"),
    ],
)
def test_one_fault_in_hours_fails_its_check_alone(fields: dict[str, object], name: str, reason: str) -> None:
    """A sound soak passes, and a single bad interval is not averaged away."""
    judged = states(changed(**fields))

    assert judged.pop(name, ("fail", "")) == ("fail", reason)
    assert {state for state, _ in judged.values()} == {"pass"}


@pytest.mark.parametrize(("alone", "state"), [(2, "pass"), (1, "fail"), (0, "fail")])
def test_answers_that_repeat_a_token_without_load_pass(alone: int, state: str) -> None:
    """A small model repeats in long answers by itself; G4 judges that."""
    repeating = tuple(SoakRequest(str(number), "repeating", 64, "64 times") for number in range(2))

    assert states(changed(requests=repeating), SoakEnd(7200, running=0, alone=alone))["words-under-load"][0] == state


@pytest.mark.parametrize(
    ("end", "name", "expected"),
    [
        (SoakEnd(7200, running=3), "drained", ("fail", "requests-stuck")),
        (SoakEnd(7200, running=None), "drained", ("not-run", "gauges-absent")),
        (SoakEnd(700, gone=True), "duration", ("fail", "server-gone")),
        (SoakEnd(7200, unwatched={"kernel-log": ("kernel-log-hidden", "no")}), "kernel-log", ("not-run", "kernel-log-hidden")),
        (SoakEnd(7200, unwatched={"restarts": ("processes-unknown", "no")}), "restarts", ("not-run", "processes-unknown")),
    ],
)
def test_the_end_of_a_soak_decides(end: SoakEnd, name: str, expected: tuple[str, str]) -> None:
    """Requests that never end fail, and no check passes on a subject that was not watched."""
    assert states(sound(), end)[name] == expected


def test_gpu_memory_is_required_on_a_gpu_alone() -> None:
    for reason, required in (("no-gpu", False), ("gpu-memory-unknown", True)):
        end = SoakEnd(7200, unwatched={"gpu-memory-growth": (reason, "no")})
        check = next(each for each in checks.judge(POLICY, sound(), end) if each.name == "gpu-memory-growth")
        assert (check.state, check.required) == ("not-run", required)


def test_a_concurrency_without_answers_is_invalid() -> None:
    idle = [replace(interval, concurrency=1) for interval in sound()]

    assert states(idle)["requests"] == ("invalid", "load-too-small")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("growth", "noise", "state"),
    [
        (0, 5, "pass"), (POLICY.growth / 2, 5, "pass"), (POLICY.growth * 2, 5, "fail"), (POLICY.growth, 5, "inconclusive"),
        (0, 3000, "inconclusive"),
    ],
)  # fmt: skip
def test_a_leak_of_twice_the_bound_fails(kind: str, growth: float, noise: float, state: str) -> None:
    """Of the processes or of the GPU alone; noise larger than the bound decides nothing."""
    judged = states(sound(growth, noise, kind))

    assert judged[f"{kind}-growth"][0] == state
    assert {judged[f"{each}-growth"][0] for each in KINDS if each != kind} == {"pass"}


def test_memory_of_the_warm_up_does_not_count() -> None:
    """Caches that fill in the beginning are no leak; the slope of some points is a guess."""
    warm = POLICY.warm * POLICY.seconds
    filling = [replace(each, memory={kind: 3e9 - max(0.0, warm - each.at) * 1e6 for kind in KINDS}) for each in sound()]

    assert states(filling)["memory-growth"][0] == "pass"
    assert states(sound()[-checks.FEWEST_POINTS + 1 :])["memory-growth"] == ("inconclusive", "too-few-samples")


@pytest.mark.parametrize(("text", "reason"), [
    ("NVRM: Xid (PCI:000f:01:00): 31, pid=1234, name=python3, Ch 00000008, MMU Fault", "kernel-xid"),
    ("NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051)", "kernel-no-memory"),
    ("NVRM: GPU 000f:01:00.0: RmInitAdapter failed! (0x62:0xffff:2319)", "kernel-nvrm"),
    ("NVRM: GPU at PCI:000f:01:00 has fallen off the bus.", "kernel-nvrm"),
    ("Out of memory: Killed process 4711 (python3) total-vm:1kB", "kernel-oom-kill"),
    ("mce: [Hardware Error]: Machine check events logged", "kernel-hardware"),
    ("INFO: task python3:77 blocked for more than 120 seconds.", "kernel-hardware"),
    ("NVRM: loading NVIDIA UNIX Open Kernel Module for aarch64  580.95.05", ""),
    ("python3[99]: segfault at 0", ""),
])  # fmt: skip
def test_faults_in_the_kernel_log_are_sorted(text: str, reason: str) -> None:
    found = kernel_log.finding(text)

    assert (found.reference if found else "") == reason


def test_the_kernel_log_is_read_from_now_on(tmp_path: Path) -> None:
    """Earlier records, fields of a record and half a line do not count; a log without line ends takes no memory."""
    path = tmp_path / "kmsg"
    path.write_text("4,1,100,-;NVRM: Xid (PCI:0000:01:00): 13, before\n")
    log = KernelLog(path)
    try:
        assert list(log.findings()) == []
        with path.open("a") as stream:
            stream.write("6,2,200,-;all is well\n SUBSYSTEM=NVRM: Xid (x): 1\n")
            stream.write("3,3,300,-;NVRM: Xid (PCI:0000:01:00): 79, gone\n3,4,400,-;NVRM: Xi")
        assert [each.text for each in log.findings()] == ["NVRM: Xid (PCI:0000:01:00): 79, gone"]
        with path.open("a") as stream:
            stream.write("d (PCI:0000:01:00): 43, later\n" + "x" * kernel_log.MOST)
        assert [each.text for each in log.findings()] == ["NVRM: Xid (PCI:0000:01:00): 43, later"]
        assert len(log._rest) <= 8192
    finally:
        log.close()


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Return the load on a server of a small context that is not there."""
    monkeypatch.setattr(Client, "max_model_len", lambda client: 4096)
    return Load(POLICY, NOBODY, "model", range(9000))


def test_two_soaks_send_the_same_requests(load: Load) -> None:
    """All fit into the model; some share a prefix, some are aborted, and some are bad."""
    requests = [load.draw(f"0/{worker}/{number}") for worker in range(4) for number in range(200)]

    assert requests == [load.draw(f"0/{worker}/{number}") for worker in range(4) for number in range(200)]
    assert all(1 <= len(prompt) <= 4096 - tokens for prompt, tokens, _ in requests)
    assert {len(prompt) for prompt, _, _ in requests} == {32, 200, 1000, 4000}
    shares = [
        (0.1, sum(patience is not None for _, _, patience in requests)),
        (0.3, sum(prompt[1:30] == tuple(range(1, 30)) for prompt, _, _ in requests)),
        (0.02, sum(prompt[0] == collect.BAD_TOKEN for prompt, _, _ in requests)),
    ]
    assert all(share / 2 < count / len(requests) < share * 1.5 for share, count in shares)


@given(limit=st.integers(2, 200))
def test_requests_fit_the_smallest_model(limit: int) -> None:
    load = Load.__new__(Load)
    load._policy, load._text, load._limit = POLICY, range(9000), limit
    prompt, tokens, _ = load.draw("0/0/0")

    assert prompt
    assert 1 <= tokens <= limit - len(prompt)


def test_processes_of_a_server_are_watched(tmp_path: Path) -> None:
    """A child that ends is noticed once, and its memory is in the sum."""
    program = "import subprocess, sys; child = subprocess.Popen(['sleep', '600']); print(flush=True); sys.stdin.read(); child.kill()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin
        assert parent.stdout
        parent.stdout.readline()
        monitor = Monitor(parent.pid, tmp_path / "kmsg")
        monitor.sample()
        interval = monitor.interval(1, 1, ())
        assert (interval.memory["memory"] > 1e6, interval.ended) == (True, ())
        parent.stdin.close()
        parent.wait()
        assert [text for text in monitor.interval(2, 1, ()).ended if "sleep" in text]
        monitor.sample()
        assert monitor.interval(3, 1, ()).ended == ()
    assert monitor.unwatched["kernel-log"][0] == "kernel-log-hidden"
    assert Monitor(None, tmp_path / "kmsg").unwatched["memory-growth"][0] == "processes-unknown"


def test_gpu_memory_is_that_of_the_server_s_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the driver's count on all GPUs; the library stands in for a driver."""
    entries: dict[int, list[tuple[int, int | None]]] = {0: [(7, 100), (8, 10)], 1: [(7, 5), (9, None)]}
    nvml = types.SimpleNamespace(
        NVMLError=RuntimeError, nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetHandleByIndex=int,
        nvmlDeviceGetComputeRunningProcesses=lambda device: [
            types.SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in entries[device]
        ],
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)

    assert [collect.gpu_memory(pids) for pids in ({7, 9}, {8}, {1})] == [105, 10, 0]
    entries.clear()
    monkeypatch.setattr(nvml, "nvmlInit", lambda: (_ for _ in ()).throw(RuntimeError))
    assert collect.gpu_memory({7}) is None


def test_a_soak_without_a_server_is_invalid(tmp_path: Path) -> None:
    judged = gate.run(POLICY, NOBODY, tmp_path / "journal")

    assert [(check.state, check.reason) for check in judged] == [("invalid", "server-unreachable")]
    assert not (tmp_path / "journal").exists()


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ((passed("one", "well"), failed("informs", "odd", "batch-differs", required=False)), ("pass", "")),
        ((passed("one", "well"), failed("two", "badly", "rerun-differs"), not_run("three", "no", "no")), ("fail", "worse-after-soak")),
        ((passed("one", "well"), not_run("three", "nobody looked", "policy-skips")), ("not-run", "worse-after-soak")),
    ],
)
def test_gates_after_the_load_are_judged_by_required_checks(found: tuple[Check, ...], expected: tuple[str, str]) -> None:
    check = checks.judge_again("words", found)

    assert (check.name, check.state, check.reason) == ("words-after", *expected)


@pytest.mark.parametrize(
    ("before", "after"),
    [("seconds: 7200", "seconds: 0"), ("warm: 0.25", "warm: 1.5"), ("concurrencies: [1,", "concurrencies: [0,"),
     ("shared: 0.3", "shared: 3"), ("Entry {number}", "Entry"), ("growth: 128", "growth: -1"), ("gone: 3", "gone: 0"),
     ("least: 20", "lest: 20")],
)  # fmt: skip
def test_a_mistake_in_the_policy_is_refused(before: str, after: str) -> None:
    text = POLICY_FILE.read_text("utf-8")
    assert before in text

    with refusal("file-invalid"):
        strict_yaml.parse(text.replace(before, after, 1), SoakPolicy, "soak.yaml")


def test_the_journal_of_an_interval_is_a_line_of_json() -> None:
    data = msgspec.json.encode(sound()[0])

    assert msgspec.json.decode(data, type=SoakInterval) == sound()[0]
    assert b"\n" not in data
