"""G7: the requests, what is watched, and the checks of a soak."""

import math
import os
import random
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import psutil
import pytest
from msgspec.structs import replace
from tests.support import processes

from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.core import strict_yaml
from sparkwright.gates import soak as gate
from sparkwright.gates.core.server_under_test import Pace, ServerIdentity
from sparkwright.gates.core.verdict import Check, failed, not_run, passed

POLICY = strict_yaml.load(Path(__file__).parents[2] / "ci" / "gates" / "soak.yaml", gate.SoakPolicy)
#: Nothing listens on the discard port.
NOBODY = "http://127.0.0.1:9"
FAST = Pace(10, 1e5, 1e3, 1e2)


class Soak(NamedTuple):
    requests: list[gate.SoakRequest]
    watched: gate.Watched


def sound(growth: float = 0.0, noise: float = 5.0) -> Soak:
    """Return a soak that went well; memory grows by *growth* MB an hour, with *noise* in MB."""
    draw = random.Random(2)
    memory = [(float(at), 3e9 + 1e6 * draw.gauss(growth * at / 3600, noise)) for at in range(0, 7200, 5)]
    requests = [gate.SoakRequest(count, "answered", 100) for count in POLICY.load.concurrencies for _ in range(POLICY.least)]
    return Soak([*requests, gate.SoakRequest(1, "aborted"), gate.SoakRequest(1, "refused")], gate.Watched(memory, seconds=7200))


def states(soak: Soak) -> dict[str, tuple[str, str]]:
    """Return state and reason by check; every pass that is declared as measured has figures."""
    judged = gate.judge(POLICY, *soak)
    assert {check.reason for check in judged} - {""} <= set(gate.REASONS)
    assert all(math.isfinite(figure.value) for check in judged for figure in check.figures)
    measured = {entry.name for entry in gate.CHECKS if entry.measured}
    assert all(check.figures for check in judged if check.name in measured and check.state == "pass")
    assert all(check.required for check in judged)
    return {check.name: (check.state, check.reason) for check in judged}


FAULTS: dict[str, tuple[Callable[[Soak], object], str, str]] = {
    "none": (lambda _: None, "", ""),
    "a request": (lambda soak: soak.requests.append(gate.SoakRequest(1, "failed", 0, "stream-truncated: half")), "requests", "requests-failed"),
    "tokens": (lambda soak: soak.requests.extend([gate.SoakRequest(8, "repeating", 64, "64 times")] * 20), "words-under-load", "token-run"),
    "a process": (lambda soak: soak.watched.ended.append((9.0, "server-restarted", "VLLM::EngineCore ended")), "restarts", "server-restarted"),
    "an Xid": (lambda soak: soak.watched.faults.append((9.0, "kernel-xid", "NVRM: Xid (PCI:0000:01:00): 79")), "kernel-log", "kernel-xid"),
}


@pytest.mark.parametrize(("spoil", "name", "reason"), FAULTS.values(), ids=FAULTS)
def test_one_fault_in_hours_fails_its_check_alone(spoil: Callable[[Soak], object], name: str, reason: str) -> None:
    """A sound soak passes, and a bad event is not averaged away."""
    spoil(soak := sound())
    judged = states(soak)

    assert judged.pop(name, ("fail", "")) == ("fail", reason)
    assert {state for state, _ in judged.values()} == {"pass"}


@pytest.mark.parametrize(
    ("changes", "name", "expected"),
    [
        ({"gone": True}, "duration", ("fail", "server-gone")),
        ({"faults": [(9.0, gate.OTHER_PROCESS, "")]}, "kernel-log", ("invalid", gate.OTHER_PROCESS)),
        ({"faults": [(9.0, gate.OTHER_PROCESS, ""), (9.0, "kernel-xid", "")]}, "kernel-log", ("fail", "kernel-xid")),
        ({"unwatched": {"kernel-log": ("kernel-log-hidden", "no")}}, "kernel-log", ("not-run", "kernel-log-hidden")),
        ({"unwatched": {"memory-growth": ("gpu-memory-unknown", "no")}}, "memory-growth", ("not-run", "gpu-memory-unknown")),
        ({"unwatched": {"restarts": ("processes-unknown", "no")}}, "restarts", ("not-run", "processes-unknown")),
    ],
)
def test_the_end_of_a_soak_decides(changes: dict[str, Any], name: str, expected: tuple[str, str]) -> None:
    """No check passes on a subject that was not watched."""
    requests, watched = sound()
    assert states(Soak(requests, replace(watched, **changes)))[name] == expected


@pytest.mark.parametrize(
    ("gauges", "expected"), [((0, 0), ("pass", "")), ((0, 3), ("fail", "requests-stuck")), ((), ("not-run", "gauges-absent"))]
)  # fmt: skip
def test_requests_that_never_end_fail(gauges: tuple[int, ...], expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "metrics", lambda _: dict(zip((gate.RUNNING, gate.WAITING), gauges, strict=False)))
    check = gate.drained(Client(NOBODY), 0.1)
    assert (check.state, check.reason) == expected


def test_a_concurrency_without_answers_is_no_load() -> None:
    requests, watched = sound()
    few = Soak([request for request in requests if request.concurrency == 1], watched)
    assert states(few)["requests"] == ("invalid", "load-too-small")


@pytest.mark.parametrize(
    ("counts", "state"),
    [
        ({1: (4, 604), 2: (7, 1087), 4: (11, 2354), 8: (13, 2563), 16: (45, 7164), 32: (25, 4434)}, "pass"),
        ({1: (1, 602), 2: (1, 1078), 4: (2, 2338), 8: (5, 2577), 16: (12, 7342), 32: (5, 4468)}, "pass"),
        ({1: (0, 245), 2: (0, 450), 4: (2, 998), 8: (3, 1158), 16: (0, 3936), 32: (3, 2231)}, "pass"),
        # NaN in the logits of 43 requests, which are too few for this check: `words-after` counts them.
        ({1: (0, 461), 2: (3, 779), 4: (25, 1780), 8: (3, 2007), 16: (2, 6231), 32: (10, 3640)}, "pass"),
        ({1: (600, 600), 2: (600, 600), 4: (600, 600), 8: (600, 600), 16: (600, 600), 32: (600, 600)}, "fail"),
        ({}, "invalid"),
        ({1: (1, 464), 2: (3, 795), 4: (196, 1790), 8: (319, 1979), 16: (147, 6228), 32: (94, 3556)}, "fail"),
    ],
    ids=["bf16", "fp8", "ngram", "few-nan", "all", "none", "nan"],
)
def test_few_answers_may_repeat_a_token(counts: dict[int, tuple[int, int]], state: str) -> None:
    """Repeating answers and all answers by concurrency, as servers gave them on an H100; and of a server that always repeats, or gave none."""
    assert states(repeating(counts))["words-under-load"][0] == state


def repeating(counts: dict[int, tuple[int, int]]) -> Soak:
    """Return a soak with repeating answers and all answers by concurrency."""
    soak = sound()
    soak.requests[:] = [
        gate.SoakRequest(concurrency, "repeating" if number < count else "answered", 64, "64 times")
        for concurrency, (count, answers) in counts.items()
        for number in range(answers)
    ]
    return soak


#: The answers of a small dense model on an H200 behind prompts longer than any that it had learnt (2026-11-30).
UNLEARNT = {1: (6, 56), 2: (20, 111), 4: (22, 221), 8: (50, 421), 16: (70, 551), 32: (8, 103)}


@pytest.mark.parametrize(
    ("counts", "stock", "expected"),
    [
        (UNLEARNT, None, ("fail", "token-run")),
        (UNLEARNT, (44, 366), ("pass", "")),
        (UNLEARNT, (2, 366), ("fail", "token-run")),
        # A server that hardly answered is no measure.
        (UNLEARNT, (0, 0), ("invalid", "load-too-small")), (UNLEARNT, (3, POLICY.least - 1), ("invalid", "load-too-small")),
        # The cache breaks at one concurrency alone.
        (UNLEARNT | {4: (120, 221)}, (44, 366), ("fail", "token-run")),
        ({1: (0, 60), 4: (12, 200)}, (0, 300), ("fail", "token-run")),
        (UNLEARNT, failed("words-under-load", "damaged", "reference-damaged"), ("fail", "reference-damaged")),
        # Few repeat: nobody has to be asked.
        ({1: (0, 60), 4: (1, 200)}, failed("words-under-load", "damaged", "reference-damaged"), ("pass", "")),
    ],
    ids=["no-reference", "as-stock", "more-than-stock", "stock-silent", "stock-nearly-silent", "one-concurrency", "sound-stock", "damaged", "few"],
)
def test_a_model_that_repeats_is_compared_with_the_stock_wheel(
    counts: dict[int, tuple[int, int]], stock: tuple[int, int] | Check | None, expected: tuple[str, str]
) -> None:
    theirs = gate.StockLoad(ServerIdentity(wheel="a" * 64), gate.shape(POLICY), stock[1], stock[0]) if isinstance(stock, tuple) else stock
    judged = {check.name: check for check in gate.judge(POLICY, *repeating(counts), theirs)}
    check = judged["words-under-load"]
    assert (check.state, check.reason) == expected


@pytest.mark.parametrize(
    ("growth", "noise", "state"),
    [
        (0, 5, "pass"), (POLICY.growth / 2, 5, "pass"), (POLICY.growth * 2, 5, "fail"), (POLICY.growth, 5, "inconclusive"),
        (0, 3000, "inconclusive"),
    ],
)  # fmt: skip
def test_a_leak_of_twice_the_bound_fails(growth: float, noise: float, state: str) -> None:
    """Noise larger than the bound decides nothing."""
    assert states(sound(growth, noise))["memory-growth"][0] == state


@pytest.mark.parametrize(("seconds", "state"), [(POLICY.shortest, "pass"), (POLICY.shortest - 1, "not-run")])
def test_a_soak_that_is_too_short_says_nothing_of_growth(seconds: float, state: str) -> None:
    """[measured] In 90 s a sound server on an H200 grew by 1,360 MB an hour, and in 180 s two by 186 and 235."""
    judged = {check.name: check for check in gate.judge(replace(POLICY, seconds=seconds), *sound())}
    check = judged["memory-growth"]
    assert (check.state, check.required) == (state, state == "pass")


@pytest.mark.parametrize(("first", "expected"), [(0, ("pass", "")), (-gate.FEWEST_POINTS + 1, ("inconclusive", "too-few-samples"))])
def test_memory_of_the_warm_up_does_not_count(first: int, expected: tuple[str, str]) -> None:
    """Caches that fill in the beginning are no leak; the slope of some points is a guess."""
    warm, soak = POLICY.warm * POLICY.seconds, sound()
    soak.watched.memory = [(at, 3e9 - max(0.0, warm - at) * 1e6) for at, _ in soak.watched.memory[first:]]
    assert states(soak)["memory-growth"] == expected


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the server, which is not there, a small context."""
    monkeypatch.setattr(Client, "max_model_len", lambda client: 4096)


@pytest.fixture
def load() -> gate.Load:
    """Return the load on that server."""
    return gate.Load(POLICY, NOBODY, "model", range(9000), FAST)


def soaked(folder: Path, **changes: float) -> Soak:
    """Soak that server by the policy with *changes*."""
    policy = replace(POLICY, **changes)
    load, monitor = gate.Load(policy, NOBODY, "model", range(9000), FAST), gate.Monitor(tuple, folder / "kmsg")
    gate.soak(policy, load, monitor)
    return Soak(load.requests, monitor.watched)


def test_two_soaks_send_the_same_requests(load: gate.Load) -> None:
    """All fit into the model; some share a prefix, some are aborted, and some are bad."""
    keys = [f"0/{worker}/{number}" for worker in range(4) for number in range(200)]
    requests = [load.draw(key, 1) for key in keys]

    assert requests == [load.draw(key, 1) for key in keys]
    assert all(1 <= len(prompt) <= 4096 - tokens for prompt, tokens, _ in requests)
    for share, count in (
        (0.1, sum(patience is not None for _, _, patience in requests)),
        (0.3, sum(prompt[1:30] == tuple(range(1, 30)) for prompt, _, _ in requests)),
        (0.02, sum(prompt[0] == gate.BAD_TOKEN for prompt, _, _ in requests)),
    ):
        assert share / 2 < count / len(requests) < share * 1.5


@pytest.mark.parametrize(
    ("bad", "patience", "reply", "outcome"),
    [
        (False, None, [1, 2, 3], "answered"),
        (False, None, [7] * POLICY.run, "repeating"),
        (False, None, ServerInvalid("server-slow", "late"), "failed"),
        (False, 1.0, ServerInvalid("server-slow", "late"), "aborted"),
        (False, 1.0, ServerInvalid("stream-truncated", "half"), "failed"),
        (True, None, ServerInvalid("server-refused", "bad token", 400), "refused"),
        (True, None, ServerInvalid("server-refused", "bad token, in a stream"), "refused"),
        (True, None, ServerInvalid("server-refused", "crashed", 500), "failed"),
        (True, None, ServerInvalid("stream-error", "crashed"), "failed"),
        (True, None, [1, 2, 3], "failed"),
    ],
)
def test_every_request_has_an_outcome(
    load: gate.Load, monkeypatch: pytest.MonkeyPatch, bad: bool, patience: float | None, reply: list[int] | ServerInvalid, outcome: str
) -> None:
    """A client that goes away and a refused bad request are as they should be; the same from a sound request is a failure."""

    def complete(*_: object, **__: object) -> types.SimpleNamespace:
        if isinstance(reply, ServerInvalid):
            raise reply
        return types.SimpleNamespace(tokens=reply)

    monkeypatch.setattr(Client, "complete", complete)
    monkeypatch.setattr(load, "draw", lambda *_: ((gate.BAD_TOKEN if bad else 5, 6), 3, patience))

    assert load.send("0/0/0").outcome == outcome


@pytest.mark.parametrize(("left", "patience", "outcome"), [(500.0, None, "failed"), (500.0, 10.0, "aborted"), (2.0, None, "aborted"), (2.0, 10.0, "aborted")])
def test_a_hang_at_the_end_of_a_soak_is_no_abort(load: gate.Load, monkeypatch: pytest.MonkeyPatch, left: float, patience: float | None, outcome: str) -> None:
    """A server of this pace answers its longest request within seconds; shortly before the end, none has to be answered."""
    deadlines = list[float]()

    def complete(client: Client, *_: object, **__: object) -> None:
        deadlines.append(client.deadline)
        raise ServerInvalid("server-slow", "late")

    monkeypatch.setattr(Client, "complete", complete)
    monkeypatch.setattr(load, "draw", lambda *_: ((5, 6), 3, patience))
    load.end = time.monotonic() + left

    assert load.send("0/0/0", 4).outcome == outcome
    assert deadlines == [pytest.approx(min(left, patience or POLICY.drain), abs=0.5)]


def test_processes_of_a_server_are_watched(tmp_path: Path) -> None:
    """A child that ends is noticed once, its memory is in the sum, and an error of another process is none of its."""
    (log := tmp_path / "log").touch()
    program = "import subprocess, sys; child = subprocess.Popen(['sleep', '600']); print(flush=True); sys.stdin.read(); child.kill()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        parent.stdout.readline()
        monitor = gate.Monitor(lambda: psutil.Process().children(recursive=True), log)
        monitor.sample(1)
        assert monitor.watched.memory[0][1] > 1e6
        assert not monitor.watched.ended
        own = psutil.Process(parent.pid).children()[0].pid
        parent.communicate("")
        monitor.sample(2)
        log.write_text("".join(f"3,1,1,-;NVRM: Xid (PCI:0000:01:00): 43, pid={pid}, name=python\n" for pid in (own, os.getpid())))
        monitor.sample(3)
    # The GPU's driver names the process, which may have ended before the log is read.
    assert [reason for _, reason, _ in monitor.watched.faults] == ["kernel-xid", gate.OTHER_PROCESS]
    assert [at for at, _, _ in monitor.watched.ended] == [2, 2]
    nothing = gate.Monitor(tuple, tmp_path / "kmsg").watched.unwatched
    assert {name: reason for name, (reason, _) in nothing.items()} == {"memory-growth": "processes-unknown", "restarts": "processes-unknown", "kernel-log": "kernel-log-hidden"}


def test_memory_is_that_of_the_server_s_processes_on_host_and_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the driver's count on all GPUs; a driver that refuses, at first or later, leaves it unknown, which is not a machine without a GPU."""
    mine = os.getpid()
    tool = processes.script(tmp_path / "nvidia-smi", f"case $1 in *index*) printf '0\\n1\\n';; *) printf '{mine}, 100\\n8, 10\\n{mine}, 5\\n9, [N/A]\\n';; esac")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    process = Mock(spec=psutil.Process, pid=mine)
    process.memory_info.return_value.rss = 1000
    monitor = gate.Monitor(lambda: [process], tmp_path / "kmsg")
    monitor.sample(1)
    assert (monitor.watched.memory, "memory-growth" in monitor.watched.unwatched) == ([(1, 1000 + (105 << 20))], False)
    processes.script(tool, "echo driver mismatch; exit 18")
    monitor.sample(2)
    assert monitor.watched.unwatched["memory-growth"][0] == "gpu-memory-unknown"


def test_a_soak_ends_when_requests_fail_and_none_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate.Load, "send", lambda *_: gate.SoakRequest(1, "failed", 0, "refused"))
    soak = soaked(tmp_path, seconds=600, interval=0.1, sample=0.05)
    assert (soak.watched.gone, soak.watched.seconds < 60) == (True, True)
    assert states(soak)["duration"] == ("fail", "server-gone")


@pytest.mark.parametrize(("concurrency", "most"), [(1, 15), (32, 120)])
@pytest.mark.parametrize("tokens_s", [0.2, 2.0, 10.0])
def test_a_slow_model_is_asked_for_answers_of_which_enough_come(tokens_s: float, concurrency: int, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In half an hour each of six concurrencies has five minutes, for twenty answers; no answer takes longer than a turn."""
    monkeypatch.setattr(Client, "max_model_len", lambda client: 16384)
    pace = Pace(900, 100 * tokens_s, tokens_s, 1.0)
    load = gate.Load(replace(POLICY, seconds=1800), NOBODY, "model", range(9000), pace)
    drawn = {(len(prompt), tokens) for prompt, tokens, _ in (load.draw(f"0/0/{number}", concurrency) for number in range(200))}
    shortest = (min(POLICY.load.prompts), 1)
    assert all(pace.round(*lengths, concurrency) <= most for lengths in drawn - {shortest})
    assert max(tokens for _, tokens in drawn) == {(0.2, 1): 1, (0.2, 32): 1, (2.0, 1): 16, (2.0, 32): 16, (10.0, 1): 128, (10.0, 32): 128}[tokens_s, concurrency]


def test_a_soak_ends_in_time_although_answers_take_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients close their connections then, which is no fault of the server."""

    def complete(client: Client, *_: object, **__: object) -> types.SimpleNamespace:
        time.sleep(min(8.0, client.deadline))
        raise ServerInvalid("server-slow", "late")

    monkeypatch.setattr(Client, "complete", complete)
    soak = soaked(tmp_path, seconds=1.0, sample=0.05)
    assert soak.watched.seconds < 4
    assert {request.outcome for request in soak.requests} == {"aborted"}


def test_each_concurrency_of_a_short_soak_has_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests end behind their turn; the last concurrency had six of its 30 seconds, and too few answers (seen on a GPU, 2026-11-30)."""
    now, turns = 0.0, dict[int, float]()

    def run(_: gate.Load, name: str, concurrency: int, seconds: float) -> Iterator[None]:
        nonlocal now
        turns[concurrency] = seconds
        now += seconds + 5
        yield

    monkeypatch.setattr(gate.Load, "run", run)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    soaked(tmp_path, seconds=180.0)
    assert [*turns] == list(POLICY.load.concurrencies)
    assert min(turns.values()) > 15


def test_a_soak_without_a_server_is_invalid(tmp_path: Path) -> None:
    judged = gate.run(POLICY, Client(NOBODY))

    assert [(check.state, check.reason) for check in judged] == [("invalid", "server-unreachable")]


@pytest.mark.parametrize(
    ("checks", "expected"),
    [
        ((passed("one", "well"), failed("informs", "odd", "batch-differs", required=False)), ("pass", "")),
        ((passed("one", "well"), failed("two", "badly", "rerun-differs"), not_run("three", "no", "no")), ("fail", "worse-after-soak")),
        ((passed("one", "well"), not_run("three", "nobody looked", "policy-skips")), ("not-run", "worse-after-soak")),
        (None, ("not-run", "not-asked")),
    ],
)
def test_gates_after_the_load_are_judged_by_required_checks(checks: tuple[Check, ...] | None, expected: tuple[str, str]) -> None:
    """Without a reference the distributions are not run, so the gate is no pass, and the check says what to name."""
    check = gate.judge_again("distributions-after", None if checks is None else lambda: checks)

    assert (check.name, check.state, check.reason) == ("distributions-after", *expected)
    assert check.required
    assert ("--against" in check.message) == (checks is None)
