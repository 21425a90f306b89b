"""Measurements of a server with known times: what counts, and the reason if one does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.support.fake_openai_server import Behaviour, Fault, started
from tests.support.thread_load import ThreadLoad

from sparkwright.bench.load.vllm_bench import LoadResult, LoadSpec, Request
from sparkwright.bench.machine.monitor import MachineMonitor
from sparkwright.bench.machine.state_checks import Snapshot
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.records import Reason
from sparkwright.bench.results import Measurement
from sparkwright.bench.server.client import Client
from sparkwright.core import strict_yaml
from sparkwright.gates.throughput import measurement
from sparkwright.gates.throughput.measurement import (
    CounterChange,
    ExternalServer,
    MeasurementContext,
    counter_change,
    invalid_reasons,
)
from sparkwright.gates.throughput.policy import ThroughputPolicy

ROOT = Path(__file__).parents[2]
POLICY = replace(
    strict_yaml.load(ROOT / "ci" / "gates" / "throughput.yaml", ThroughputPolicy),
    timeout_s=20.0,
)
CELL = WorkloadCell(16, 24, 2, 4, primary=("rate",))
BLANK = Measurement(CELL.name, 0, 0, "candidate", 0)


class Machine(MachineMonitor):
    """A machine in which nothing happens, or the same *trouble* in every measurement, and in *always* before it already."""

    def __init__(self, *trouble: Reason, always: bool = True) -> None:
        self._trouble, self._always, self._shots = trouble, always, 0.0

    def snapshot(self) -> Snapshot:
        self._shots += 1
        return Snapshot(self._shots, self._shots)

    def disturbances(self, before: Snapshot, after: Snapshot) -> tuple[Reason, ...]:
        return self._trouble if self._always or after.time > before.time else ()


def leg(behaviour: Behaviour, cell: WorkloadCell = CELL, machine: Machine | None = None, policy: ThroughputPolicy = POLICY) -> Measurement:
    """Return a measurement of a server, repeated while a busy machine merges its stream."""
    with started(behaviour) as server:
        client = Client(server.url, behaviour.name)
        context = MeasurementContext(ThreadLoad(), machine or Machine(), policy, lambda _: client.metrics(), behaviour.name)
        for _ in range(5):
            found = measurement.measure(context, ExternalServer(server.url), cell, BLANK, 1)
            if "stream-merged" not in {reason.reference for reason in found.reasons}:
                break
        return found


QUICK = Behaviour(ttft=0.05, tpot=0.01)


def test_a_sound_leg_counts() -> None:
    """Everything that the server says of itself and the generator saw agrees."""
    found = leg(QUICK)
    assert (found.counts, found.speculation) == (True, None), found.reasons
    assert found.run
    assert [(request.output_tokens, request.tpot > 0) for request in found.run.requests] == [(24, True)] * 4


def test_speculation_is_metered_apart() -> None:
    """Tokens per step come from the server's counters, and tok/s = steps/s × tokens per step."""
    found = leg(replace(QUICK, chunk=3, drafted=4), WorkloadCell(16, 31, 1, 3))
    assert found.counts, found.reasons
    assert found.speculation
    assert (found.speculation.length, found.speculation.acceptance) == pytest.approx((3, 0.5), rel=0.05)


FAULTS: dict[Fault, set[str]] = {
    "dies": {"server-unreachable", "request-failed", "stream-truncated", "generator-failed"},
    "refuses": {"request-failed"},
    "closes": {"request-failed"},
    "error-event": {"request-failed"},
    "short": {"answer-other", "request-failed"},
    "usage-more": {"answer-other", "usage-mismatch", "request-failed"},
    "usage-none": {"request-failed", "answer-other"},
    "finish-reason": {"answer-other", "request-failed"},
    "prefix-hits": {"prefix-cached"},
    # It may have no ear for anybody else any more.
    "endless": {"request-failed", "answer-other", "server-unreachable", "server-silent", "server-slow"},
    # Given up within the patience.
    "silent": {"generator-late", "server-silent", "server-slow"},
    "trickles": {"generator-late", "server-silent", "server-slow"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_is_wrong_gives_no_figure(fault: Fault) -> None:
    """From the third request on it is wrong in one way; only failed requests are repeated."""
    patience = 2.0 if fault in ("silent", "trickles") else POLICY.timeout_s
    found = leg(replace(QUICK, faults={fault: 3}), policy=replace(POLICY, timeout_s=patience))
    references = {reason.reference for reason in found.reasons}
    assert not found.counts
    assert references & FAULTS[fault], found.reasons
    assert not found.discarded or references <= measurement.REPEATED


THROTTLED, SLOW = Reason("throttled", "thermal slowdown"), Reason("slow-state", "the fixed GEMV took 1.5 times the normal")


@pytest.mark.parametrize(
    ("machine", "faults", "counts", "discarded"),
    [
        (Machine(THROTTLED, always=False), {}, True, False),
        (Machine(THROTTLED), {}, False, True),
        (Machine(SLOW), {}, False, True),
        (Machine(SLOW), {"short": 1}, False, False),
    ],
)
def test_a_disturbed_machine_discards_a_leg_that_is_sound_otherwise(
    machine: Machine, faults: dict[Fault, int], counts: bool, discarded: bool
) -> None:
    """
    Such a leg is measured again; one that is wrong by itself is not, whatever the machine did. A wheel that heats the GPU until it
    throttles is that slow; an earlier state is not its own.
    """
    found = leg(replace(QUICK, faults=faults), machine=machine)
    assert (found.counts, found.discarded) == (counts, discarded)


ORDER = LoadSpec("u", "m", 16, 24, 2, 2)
SOUND = Request(0.0, 0.1, 0.5, 16, 24, 24)
LUMP, FEWER = replace(SOUND, ttft=0.49999), replace(SOUND, output_tokens=13)
COUNTS = CounterChange(4, 4, 96)


@pytest.mark.parametrize(
    ("requests", "found", "expected"),
    [
        ((SOUND, SOUND), COUNTS, []),
        ((SOUND, replace(SOUND, error="429")), COUNTS, ["request-failed"]),
        (
            (SOUND, replace(SOUND, output_tokens=23)),
            replace(COUNTS, tokens=95),
            ["answer-other", "usage-mismatch"],
        ),
        ((SOUND, replace(SOUND, prompt_tokens=17)), COUNTS, ["prompt-other"]),
        ((SOUND, replace(SOUND, ttft=0.6)), COUNTS, ["times-impossible"]),
        ((SOUND, replace(SOUND, ttft=0.0)), COUNTS, ["times-impossible"]),
        ((SOUND, SOUND), None, ["counters-missing"]),
        ((SOUND, SOUND), replace(COUNTS, by_length=3), ["answer-other"]),
        ((SOUND, SOUND), replace(COUNTS, tokens=97), ["usage-mismatch"]),
        (
            (SOUND, SOUND),
            replace(COUNTS, finished=1, by_length=1, tokens=24),
            ["usage-mismatch"],
        ),
        ((SOUND, SOUND), replace(COUNTS, hits=0.01), ["prefix-cached"]),
        ((SOUND, SOUND), replace(COUNTS, hits=0.0099), []),
        # The server counts every token, but they came at once or in fewer pieces: no time is believed, and no wheel is blamed.
        ((SOUND, LUMP), COUNTS, ["stream-merged"]),
        ((SOUND, replace(SOUND, ttft=0.5)), COUNTS, ["stream-merged"]),
        ((SOUND, FEWER), COUNTS, ["stream-merged"]),
        ((SOUND, FEWER), replace(COUNTS, tokens=85), ["answer-other", "usage-mismatch"]),
        ((SOUND, replace(LUMP, error="it broke")), COUNTS, ["request-failed"]),
    ],
)
def test_every_reason_has_its_cause(
    requests: tuple[Request, ...], found: CounterChange | None, expected: list[str]
) -> None:
    """Each thing that is wrong is named by itself, and a sound leg by none."""
    reasons = invalid_reasons(ORDER, LoadResult("g", "", 1.0, requests), found, 0.01)
    assert [reason.reference for reason in reasons] == expected


def test_texts_may_have_any_length() -> None:
    """Real prompts are as long as they are."""
    run = LoadResult("g", "", 1.0, (replace(SOUND, prompt_tokens=9),) * 2)
    assert not invalid_reasons(replace(ORDER, prompt_file=Path("x.jsonl")), run, COUNTS, 0.01)


def test_counters_are_differences() -> None:
    """A server that began anew in the middle of a leg has no counters for it."""
    first = {"vllm:generation_tokens_total": 24.0, 'vllm:request_success_total{finished_reason="length"}': 1.0, "vllm:request_success_total": 1.0}
    second = {name: 3 * value for name, value in first.items()}
    assert counter_change(first, second) == CounterChange(2, 2, 48)
    assert counter_change(second, first) is counter_change({}, {}) is None
