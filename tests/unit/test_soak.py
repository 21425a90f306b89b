"""The soak gate: what is asked, what is watched, and what is made of a record, finished or not."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
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
from sparkwright.gates.core.journal import JournalWriter
from sparkwright.gates.core.verdict import Check, failed, not_run, passed
from sparkwright.gates.soak import checks as soaked
from sparkwright.gates.soak import collect as load
from sparkwright.gates.soak import gate as soak
from sparkwright.gates.soak import journal as soakjournal
from sparkwright.gates.soak import theil_sen
from sparkwright.gates.soak.collect import Fault, Stretch
from sparkwright.gates.soak.journal import Begun, Ended, Observed, Record
from sparkwright.gates.soak.processes import Processes

ROOT = Path(__file__).parents[2]
POLICY_FILE = ROOT / "ci" / "gates" / "soak.yaml"
POLICY = strict_yaml.load(POLICY_FILE, soak.SoakPolicy)
MB = 1e6
#: Nothing listens on the discard port.
NOBODY = "http://127.0.0.1:9"


def sound(seconds: float = POLICY.seconds, slope: float = 0.0, noise: float = 5 * MB) -> Record:
    """Return the record of a soak that went well; memory grows by *slope* MB an hour."""
    draw = random.Random(2)
    whole = {str(one): POLICY.least for one in POLICY.load.concurrencies}
    asked = Stretch(asked=200, whole=190, cancelled=10, tokens=9000, by_concurrency=whole)
    observed = []
    for minute in range(int(seconds / 60)):
        memory = tuple(
            (at, 3e9 + slope * MB * at / 3600 + draw.gauss(0, noise)) for at in (minute * 60.0 + 5 * part for part in range(12))
        )
        observed.append(Observed(60.0 * (minute + 1), asked, memory, 50e9))
    return Record(Begun(POLICY.seconds, "model", "", ""), tuple(observed), Ended(seconds, "time", 0.0))


def states(record: Record) -> dict[str, tuple[str, str]]:
    """Return state and reference by the name of the check."""
    return {check.name: (check.state, check.reason) for check in soaked.checks(POLICY, record)}


def changed(record: Record, **fields: object) -> Record:
    """Return *record* with other *fields* in its third stretch."""
    stretches = list(record.observed)
    stretches[2] = replace(stretches[2], **fields)
    return replace(record, observed=tuple(stretches))


def test_a_sound_soak_passes() -> None:
    """Every check passes, and each reference that could have been given is explained."""
    assert {state for state, _ in states(sound()).values()} == {"pass"}
    assert {"soak-interrupted", "memory-grows", "kernel-xid", "server-refused"} <= set(soak.REASONS)


@pytest.mark.parametrize(("fields", "name", "reference"), [
    ({"load": Stretch(asked=2, failed=1, faults=(Fault("stream-truncated", "half"),))}, "requests", "requests-failed"),
    ({"load": Stretch(asked=2, whole=2, odd=1, oddities=(Fault("token-run", "64 times"),))}, "words-under-load", "token-run"),
    ({"restarts": ("process 7 ended: VLLM::EngineCore",)}, "restarts", "server-restarted"),
    ({"kernel": (Finding("kernel-xid", "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus."),)}, "kernel-log", "kernel-xid"),
])  # fmt: skip
def test_one_fault_in_hours_fails_its_check_alone(fields: dict[str, object], name: str, reference: str) -> None:
    """A single bad stretch is not averaged away."""
    found = states(changed(sound(), **fields))

    assert found.pop(name) == ("fail", reference)
    assert {state for state, _ in found.values()} == {"pass"}


@pytest.mark.parametrize(("alone", "state"), [((True, True), "pass"), ((True, False), "fail"), ((), "fail")])
def test_what_a_model_repeats_alone_is_its_own_way(alone: tuple[bool, ...], state: str) -> None:
    """Only answers that load made repeat fail; a small model repeats in long answers by itself, which the words gate judges."""
    odd = Stretch(asked=2, whole=2, odd=2, oddities=(Fault("token-run", "64 times"), Fault("token-run", "32 times", 1, 7)))
    record = replace(changed(sound(), load=odd), ended=Ended(7200, "time", 0.0, alone))

    assert states(record)["words-under-load"][0] == state


def test_requests_that_the_server_still_works_on_fail() -> None:
    """A client that goes away must leave nothing behind."""
    record = sound()

    assert states(replace(record, ended=Ended(7200, "time", 3.0)))["drained"] == ("fail", "requests-stuck")
    assert states(replace(record, ended=Ended(7200, "time", None)))["drained"] == ("not-run", "gauges-absent")


def test_an_interrupted_soak_passes_nothing_and_hides_nothing() -> None:
    """Without its end, a journal proves no check; a failure in it stays one."""
    record = replace(sound(), ended=None)

    assert {state for state, _ in states(record).values()} <= {"inconclusive", "not-run"}
    assert states(changed(record, restarts=("process 7 ended: python",)))["restarts"] == ("fail", "server-restarted")


def test_a_server_that_is_gone_fails_the_time_and_passes_nothing() -> None:
    """What was seen before the server went is no proof either."""
    record = replace(sound(), ended=Ended(700, "gone", None))

    assert states(record)["duration"] == ("fail", "server-gone")
    assert "pass" not in {state for state, _ in states(record).values()}


def test_what_could_not_be_watched_is_not_run() -> None:
    """A kernel log that may not be read and a process that is not known are no passes."""
    record = replace(sound(), begun=Begun(7200, "model", "the server's process is not known", "/dev/kmsg: Operation not permitted"))

    assert states(record)["kernel-log"] == ("not-run", "kernel-log-unreadable")
    assert states(record)["memory-growth"] == ("not-run", "processes-unknown")
    assert states(changed(sound(), lost="records were overwritten 2 times"))["kernel-log"] == ("inconclusive", "kernel-log-lost")


def test_a_load_that_was_none_is_invalid() -> None:
    """Hours without answers at one of the concurrencies are not the load that was asked for."""
    record = sound()
    idle = replace(record, observed=tuple(replace(one, load=Stretch(asked=1, whole=1, by_concurrency={"1": 1})) for one in record.observed))

    assert states(idle)["requests"] == ("invalid", "load-too-small")


@pytest.mark.parametrize(("slope", "noise", "state"), [
    (0, 5, "pass"), (POLICY.growth / 2, 5, "pass"), (POLICY.growth * 2, 5, "fail"), (POLICY.growth, 5, "inconclusive"),
    (0, 3000, "inconclusive"),
])  # fmt: skip
def test_growth_is_decided_by_the_interval(slope: float, noise: float, state: str) -> None:
    """A leak of twice the bound shows in two hours; where noise is larger than the bound, nothing is decided."""
    assert states(sound(slope=slope, noise=noise * MB))["memory-growth"][0] == state


def test_the_warm_up_does_not_count() -> None:
    """Caches that fill in the beginning are no leak."""
    record = sound()
    warm = POLICY.warm * POLICY.seconds
    filling = tuple(
        replace(one, memory=tuple((at, size - max(0.0, warm - at) * 1e6) for at, size in one.memory)) for one in record.observed
    )

    assert states(replace(record, observed=filling))["memory-growth"][0] == "pass"


def test_few_samples_decide_nothing() -> None:
    """A slope of some points is a guess."""
    record = sound()

    few = replace(record.observed[-1], memory=record.observed[-1].memory[: theil_sen.FEWEST_POINTS - 1])
    assert states(replace(record, observed=(few,)))["memory-growth"] == ("inconclusive", "too-few-samples")


@given(st.floats(-1e3, 1e3), st.floats(-1e6, 1e6), st.integers(theil_sen.FEWEST_POINTS, 400))
def test_the_slope_of_a_line_is_the_line_s(slope: float, start: float, count: int) -> None:
    """Without noise the interval has no width."""
    found = theil_sen.slope([(at * 1.5, start + slope * at * 1.5) for at in range(count)])

    assert found
    for value in (found.low, found.middle, found.high):
        assert value == pytest.approx(slope, abs=1e-6 * (1 + abs(start) + abs(slope) * count))


@given(st.lists(st.floats(-1e9, 1e9), min_size=theil_sen.FEWEST_POINTS, max_size=60), st.floats(-1e6, 1e6))
def test_a_trend_adds_to_the_slope_and_order_holds(values: list[float], trend: float) -> None:
    """The interval holds its middle, and a trend that is added moves all three by itself."""
    flat = theil_sen.slope([(float(at), value) for at, value in enumerate(values)])
    tilted = theil_sen.slope([(float(at), value + trend * at) for at, value in enumerate(values)])

    assert flat
    assert tilted
    assert flat.low <= flat.middle <= flat.high
    assert tilted.middle - flat.middle == pytest.approx(trend, abs=1e-3)


def test_spikes_do_not_make_a_slope() -> None:
    """A fifth of the points far above the rest, all near the end, moves the median of the slopes little."""
    series = [(float(at), 1e9 if at > 80 and at % 2 else 0.0) for at in range(100)]
    found = theil_sen.slope(series)

    assert found
    assert found.middle == 0


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Of 300 noisy lines, nearly 95 % have the true slope inside the interval (binomial: fewer than 270 in one of 10^4 trials)."""
    draw = random.Random(5)
    lines = [[(float(at), 0.3 * at + draw.gauss(0, 10)) for at in range(60)] for _ in range(300)]

    inside = sum(bool((found := theil_sen.slope(line)) and found.low <= 0.3 <= found.high) for line in lines)

    assert inside >= 270


@pytest.mark.parametrize(("text", "reference"), [
    ("NVRM: Xid (PCI:000f:01:00): 31, pid=1234, name=python3, Ch 00000008, MMU Fault", "kernel-xid"),
    ("NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051)", "kernel-no-memory"),
    ("NVRM: GPU 000f:01:00.0: RmInitAdapter failed! (0x62:0xffff:2319)", "kernel-nvrm"),
    ("NVRM: GPU at PCI:000f:01:00 has fallen off the bus.", "kernel-nvrm"),
    ("Out of memory: Killed process 4711 (python3) total-vm:1kB", "kernel-oom-kill"),
    ("mce: [Hardware Error]: Machine check events logged", "kernel-hardware"),
    ("INFO: task python3:77 blocked for more than 120 seconds.", "kernel-hardware"),
    ("NVRM: loading NVIDIA UNIX Open Kernel Module for aarch64  580.95.05", ""),
    ("usb 1-1: new high-speed USB device number 2", ""),
    ("python3[99]: segfault at 0", ""),
])  # fmt: skip
def test_what_the_kernel_says_is_sorted(text: str, reference: str) -> None:
    """Faults of the GPU, its driver, the memory and the machine are findings; other news is not."""
    found = kernel_log.finding(text)

    assert (found.reference if found else "") == reference


def test_the_kernel_s_log_is_read_from_now_on(tmp_path: Path) -> None:
    """What was there before does not count; records come with their prefix, fields of a record and half a line do not count."""
    path = tmp_path / "kmsg"
    path.write_text("4,1,100,-;NVRM: Xid (PCI:0000:01:00): 13, before\n")
    log = KernelLog(path)
    try:
        assert list(log.findings()) == []
        with path.open("a") as stream:
            stream.write("6,2,200,-;all is well\n SUBSYSTEM=NVRM: Xid (x): 1\n")
            stream.write("3,3,300,-;NVRM: Xid (PCI:0000:01:00): 79, gone\n3,4,400,-;NVRM: Xi")
        assert [one.text for one in log.findings()] == ["NVRM: Xid (PCI:0000:01:00): 79, gone"]
        with path.open("a") as stream:
            stream.write("d (PCI:0000:01:00): 43, later\n")
        assert [one.text for one in log.findings()] == ["NVRM: Xid (PCI:0000:01:00): 43, later"]
    finally:
        log.close()


def test_a_log_without_line_ends_takes_no_memory(tmp_path: Path) -> None:
    """Sixteen megabytes without a line end are read in pieces, and at most some kilobytes of them are kept."""
    path = tmp_path / "kmsg"
    path.touch()
    log = KernelLog(path)
    try:
        path.write_bytes(b"x" * kernel_log.MOST)
        assert list(log.findings()) == []
        assert len(log._rest) <= 8192
    finally:
        log.close()


def test_a_log_that_is_not_there_is_said(tmp_path: Path) -> None:
    """The caller hears why, and says that nothing is known."""
    with pytest.raises(OSError, match="No such file"):
        KernelLog(tmp_path / "kmsg")


@pytest.mark.skipif(not os.access(kernel_log.KMSG, os.R_OK), reason="this user may not read /dev/kmsg")
def test_this_machine_s_kernel_log_can_be_read() -> None:
    """On the real device, reading begins at the end and does not wait."""
    try:
        log = KernelLog()
    except OSError as error:
        pytest.skip(f"/dev/kmsg opens but cannot be read: {error}")
    list(log.findings())
    log.close()


def test_the_same_is_asked_again() -> None:
    """Requests follow from seed, worker and number, and all of them fit."""
    text = list(range(9000))
    made = [load.request(POLICY.load, text, 4096, worker, number) for worker in range(4) for number in range(200)]
    again = [load.request(POLICY.load, text, 4096, worker, number) for worker in range(4) for number in range(200)]

    assert made == again
    assert all(1 <= len(one.prompt) <= 4096 - one.tokens for one in made)
    assert {len(one.prompt) for one in made} == {32, 200, 1000, 4000}
    assert 0.05 < sum(one.patience is not None for one in made) / len(made) < 0.15
    shared = [one for one in made if one.prompt[:30] == tuple(text[:30])]
    assert 0.2 < len(shared) / len(made) < 0.4


@given(st.integers(2, 200))
def test_requests_fit_the_smallest_model(limit: int) -> None:
    """Where no length of the policy fits, a shorter one is asked, of at least a token."""
    made = load.request(POLICY.load, list(range(9000)), limit, 0, 0)

    assert made.prompt
    assert made.tokens >= 1
    assert len(made.prompt) + made.tokens <= limit


counts = st.integers(0, 5)
stretches = st.builds(
    Stretch, counts, counts, counts, counts, counts, st.lists(st.builds(Fault, st.sampled_from("ab"), st.just("")), max_size=7).map(tuple),
    counts, st.just(()), st.dictionaries(st.sampled_from(["1", "4", "16"]), counts, max_size=3),
)  # fmt: skip


@given(stretches, stretches, stretches)
def test_stretches_add_up(one: Stretch, two: Stretch, three: Stretch) -> None:
    """It does not matter in which pieces the counts are taken, and the samples stay few."""
    whole = one.with_(two).with_(three)

    assert msgspec.to_builtins(whole) == msgspec.to_builtins(one.with_(two.with_(three)))
    assert whole.asked == one.asked + two.asked + three.asked
    assert len(whole.faults) <= load.MOST_KEPT
    assert sum(whole.by_concurrency.values()) == sum(sum(part.by_concurrency.values()) for part in (one, two, three))


def test_a_journal_is_read_back(tmp_path: Path) -> None:
    """What was written is what is judged, and an earlier journal is not lost."""
    path = tmp_path / "soak.jsonl"
    path.write_text("an earlier one")
    record = sound(seconds=600)
    journal = JournalWriter(path)
    for line in (record.begun, *record.observed, record.ended):
        assert line
        journal.add(line)
    journal.close()

    assert soakjournal.read(path) == record
    assert (tmp_path / "soak.jsonl.before").read_text() == "an earlier one"


@given(st.integers(0, 4000))
def test_a_journal_cut_anywhere_is_interrupted_or_none(tmp_path_factory: pytest.TempPathFactory, at: int) -> None:
    """After a loss of power, what is left of a line is dropped, and nothing that is left is a pass."""
    path = tmp_path_factory.mktemp("journal") / "soak.jsonl"
    record = sound(seconds=300)
    lines = [msgspec.json.encode(line) + b"\n" for line in (record.begun, *record.observed, record.ended)]
    data = b"".join(lines)
    path.write_bytes(data[: at % len(data)])

    if at % len(data) < len(lines[0]):
        with refusal("file-invalid"):
            soakjournal.read(path)
    else:
        read = soakjournal.read(path)
        assert read.ended is None
        assert read.observed == record.observed[: len(read.observed)]
        assert "pass" not in {check.state for check in soak.interrupted(POLICY, path)}


@pytest.mark.parametrize("data", [b"", b"\n", b"[]\n", b'{"type":"ended","at":1,"why":"time"}\n', b"\xff\n", b"[" * 100_000 + b"\n"])
def test_what_is_no_journal_is_refused(tmp_path: Path, data: bytes) -> None:
    """A file of something else has its message."""
    (tmp_path / "j").write_bytes(data)
    with refusal("file-invalid", match="journal"):
        soakjournal.read(tmp_path / "j")


def test_a_journal_survives_a_kill(tmp_path: Path) -> None:
    """A process that is killed while it writes leaves whole lines: every one that it had said was written."""
    path = tmp_path / "soak.jsonl"
    program = (
        "import sys; from pathlib import Path; from sparkwright.gates.soak.journal import *\n"
        "from sparkwright.gates.core.journal import JournalWriter\n"
        "from sparkwright.gates.soak.collect import Stretch\n"
        "journal = JournalWriter(Path(sys.argv[1])); journal.add(Begun(60, 'm', '', '')); at = 0\n"
        "while True:\n  at += 1; journal.add(Observed(at, Stretch(asked=at))); print(at, flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout
    said = 0
    for line in child.stdout:
        said = int(line)
        if said == 20:
            child.kill()
            break
    rest = [int(line) for line in child.stdout if line.endswith("\n")]
    child.wait()

    read = soakjournal.read(path)

    assert len(read.observed) >= max([said, *rest])
    assert read.ended is None


def test_the_processes_of_a_server_are_watched() -> None:
    """A child that ends is noticed, its memory is in the sum, and a server that does not answer says nothing of its beginning."""
    program = (
        "import subprocess, sys; child = subprocess.Popen(['sleep', '600'])\n"
        "print('up', flush=True); sys.stdin.read(); child.kill()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdin
    assert parent.stdout
    try:
        assert parent.stdout.readline() == "up\n"
        watched = Processes(Client(NOBODY, deadline=1.0), parent.pid)
        assert watched.unknown == ""
        assert (watched.resident() or 0) > MB
        assert watched.restarts() == ()
        parent.stdin.close()
        parent.wait()
        ended = watched.restarts()
        assert [one for one in ended if "sleep" in one]
        assert watched.resident() is None
        assert watched.restarts() == ()
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def test_a_process_that_is_not_known_is_said() -> None:
    """Without a process the memory is unknown, not zero."""
    watched = Processes(Client(NOBODY, deadline=1.0), None)

    assert watched.unknown
    assert watched.resident() is None
    assert watched.available() > 0


def test_a_soak_of_a_server_that_is_not_there_is_invalid(tmp_path: Path) -> None:
    """Nothing is waited for, and no journal is begun."""
    checks = soak.run(POLICY, NOBODY, tmp_path / "j")

    assert [(check.state, check.reason) for check in checks] == [("invalid", "server-unreachable")]
    assert not (tmp_path / "j").exists()


@pytest.mark.parametrize("seconds", [6.0, 60.0, POLICY.seconds])
def test_every_concurrency_has_its_turn(seconds: float) -> None:
    """A short soak goes through all of them, a long one comes back to each."""
    policy = replace(POLICY, seconds=seconds)
    turns = [policy.concurrency(seconds * at / 1000) for at in range(1000)]

    assert set(turns) == set(POLICY.load.concurrencies)
    assert turns[0] == POLICY.load.concurrencies[0]


def sound_gate() -> tuple[Check, ...]:
    return (passed("one", "well"), failed("informs", "not so well", "batch-differs", required=False))


def broken_gate() -> tuple[Check, ...]:
    return (passed("one", "well"), failed("two", "badly", "rerun-differs"), not_run("three", "nobody looked", "policy-skips"))


def absent_gate() -> tuple[Check, ...]:
    return (passed("one", "well"), not_run("three", "nobody looked", "policy-skips"))


def test_what_runs_again_is_judged_by_its_required_checks() -> None:
    """A gate that fails after the load names its checks; one that cannot run is no pass; one on a server that is gone does not run."""
    record = sound()
    made = soaked.again(record, {"words": sound_gate, "distributions": broken_gate, "tasks": absent_gate})

    assert [(check.name, check.state, check.reason) for check in made] == [
        ("words-after", "pass", ""),
        ("distributions-after", "fail", "worse-after-soak"),
        ("tasks-after", "not-run", "policy-skips"),
    ]
    gone = soaked.again(replace(record, ended=Ended(9, "gone")), {"words": broken_gate})
    assert [(check.state, check.reason) for check in gone] == [("not-run", "server-gone")]
    assert soaked.again(record, {})[0].state == "not-run"


@pytest.mark.parametrize(
    ("before", "after"),
    [("seconds: 7200", "seconds: 0"), ("warm: 0.25", "warm: 1.5"), ("concurrencies: [1,", "concurrencies: [0,"),
     ("shared: 0.3", "shared: 3"), ("Entry {number}", "Entry"), ("growth: 128", "growth: -1"), ("gone: 3", "gone: 0"),
     ("least: 20", "lest: 20")],
)  # fmt: skip
def test_a_mistake_in_the_policy_is_refused(before: str, after: str) -> None:
    """Every number of the file is held against its range when it is read."""
    text = POLICY_FILE.read_text("utf-8")
    assert before in text

    with refusal("file-invalid"):
        strict_yaml.parse(text.replace(before, after, 1), soak.SoakPolicy, "soak.yaml")


def test_figures_of_checks_are_numbers_that_json_has() -> None:
    """Infinity and NaN have no place in a verdict's JSON."""
    for check in soaked.checks(POLICY, sound(slope=500)):
        assert all(math.isfinite(figure.value) for figure in check.figures)
