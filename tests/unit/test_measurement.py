"""Measurements of a server with known times: what counts, and the reason if one does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fake_openai_server import Behaviour, Fault, started
from tests.support.thread_load import ThreadLoad

from sparkwright.bench.load.vllm_bench import LoadResult, LoadSpec, Request
from sparkwright.bench.machine.monitor import MachineMonitor
from sparkwright.bench.machine.state_checks import Snapshot
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.records import Reason, Side
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
POLICY = msgspec.structs.replace(
    strict_yaml.load(ROOT / "ci" / "gates" / "throughput.yaml", ThroughputPolicy),
    timeout_s=20.0,
)
CELL = WorkloadCell(16, 24, 2, 4, primary=("rate",))
BLANK = Measurement(CELL.name, 0, 0, "candidate", 0)


class Still(MachineMonitor):
    """A machine in which nothing happens, or always the same *trouble*."""

    def __init__(self, *trouble: Reason) -> None:
        self._trouble = trouble

    def snapshot(self) -> Snapshot:
        return Snapshot(1.0, 1.0)

    def disturbances(self, before: Snapshot, after: Snapshot) -> tuple[Reason, ...]:
        return self._trouble


def leg(
    behaviour: Behaviour, cell: WorkloadCell = CELL, machine: Still | None = None, **changes: object
) -> Measurement:
    """Return a measurement of a server, repeated while a busy machine merges its stream."""
    with started(behaviour) as server:
        client = Client(server.url, behaviour.name)
        context = MeasurementContext(
            ThreadLoad(), machine or Still(), POLICY, lambda _: client.metrics(), behaviour.name
        )
        context = msgspec.structs.replace(context, **changes)
        for _ in range(5):
            found = measurement.measure(context, ExternalServer(server.url), cell, BLANK, 1)
            if "stream-merged" not in {one.reference for one in found.reasons}:
                break
        return found


QUICK = Behaviour(ttft=0.05, tpot=0.01)


def test_a_sound_leg_counts() -> None:
    """Everything that the server says of itself and the generator saw agrees."""
    found = leg(QUICK)
    assert found.counts, found.reasons
    assert found.run
    assert [one.output_tokens for one in found.run.requests] == [24] * 4
    assert found.run.tpot > 0
    assert found.speculation is None


def test_speculation_is_metered_apart() -> None:
    """Tokens per step come from the server's counters, and tok/s = steps/s × tokens per step."""
    found = leg(msgspec.structs.replace(QUICK, chunk=3, drafted=4), WorkloadCell(16, 31, 1, 3))
    assert found.counts, found.reasons
    assert found.run
    assert found.speculation
    assert found.speculation.length == pytest.approx(3, rel=0.05)
    assert found.speculation.acceptance == pytest.approx(0.5, rel=0.05)


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
    "endless": {
        "request-failed",
        "answer-other",
        "server-unreachable",
        "server-silent",
        "server-slow",
    },
    # Given up within the patience.
    "silent": {"generator-late", "server-silent", "server-slow"},
    "trickles": {"generator-late", "server-silent", "server-slow"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_is_wrong_gives_no_figure(fault: Fault) -> None:
    """From the third request on it is wrong in one way; only failed requests are repeated."""
    patience = 2.0 if fault in ("silent", "trickles") else POLICY.timeout_s
    policy = msgspec.structs.replace(POLICY, timeout_s=patience)
    found = leg(msgspec.structs.replace(QUICK, faults={fault: 3}), policy=policy)
    assert not found.counts
    references = {one.reference for one in found.reasons}
    assert references & FAULTS[fault], found.reasons
    assert not found.discarded or references <= measurement.REPEATED


class Throttled(Still):
    """A machine that throttles during every measurement, or *before* it already."""

    def __init__(self, *, before: bool) -> None:
        self._before, self._shots = before, 0

    def snapshot(self) -> Snapshot:
        self._shots += 1
        return Snapshot(float(self._shots), float(self._shots))

    def disturbances(self, before: Snapshot, after: Snapshot) -> tuple[Reason, ...]:
        throttled = self._before or after.time > before.time
        return (Reason("throttled", "thermal slowdown"),) if throttled else ()


def test_throttling_under_the_own_load_counts() -> None:
    """A wheel that heats the GPU until it throttles is that slow; an earlier state is not its own."""
    assert leg(QUICK, machine=Throttled(before=False)).counts
    assert leg(QUICK, machine=Throttled(before=True)).discarded


@pytest.mark.parametrize("side", ["candidate", "baseline"])
@pytest.mark.parametrize("running", [True, False])
def test_the_end_of_a_server_is_the_first_reason(side: Side, running: bool) -> None:
    """Another server than the candidate's is started again; one that had started has a state before."""

    class Dying(ExternalServer):
        alive, failure, reason = running, "status -11", "server-died"

        def guard(self) -> bool:
            alive, self.alive = self.alive, False
            return alive

    context = MeasurementContext(ThreadLoad(), Still(), POLICY, lambda _: {}, "model")
    blank = msgspec.structs.replace(BLANK, side=side)
    found = measurement.measure(context, Dying("http://127.0.0.1:9"), CELL, blank, 1)
    assert (found.reasons[0].reference, found.discarded) == ("server-died", side == "baseline")
    assert bool(found.before) == running
    assert not found.counts


def test_a_disturbed_machine_discards_a_leg_that_is_sound_otherwise() -> None:
    """Such a leg is measured again; one that is wrong by itself is not, whatever the machine did."""
    trouble = Reason("slow-state", "the fixed GEMV took 1.5 times the normal")
    assert leg(QUICK, machine=Still(trouble)).discarded
    wrong = leg(msgspec.structs.replace(QUICK, faults={"short": 1}), machine=Still(trouble))
    assert not wrong.discarded
    assert len(wrong.reasons) > 1


def run(*requests: Request) -> LoadResult:
    return LoadResult("g", "", 1.0, requests)


ORDER = LoadSpec("u", "m", 16, 24, 2, 2)
SOUND = Request(0.0, 0.1, 0.5, 16, 24, 24)
COUNTS = CounterChange(4, 4, 96)


def said(*requests: Request, found: CounterChange | None = COUNTS) -> list[str]:
    return [one.reference for one in invalid_reasons(ORDER, run(*requests), found, 0.01)]


@pytest.mark.parametrize(
    ("requests", "found", "expected"),
    [
        ((SOUND, SOUND), COUNTS, []),
        ((SOUND, msgspec.structs.replace(SOUND, error="429")), COUNTS, ["request-failed"]),
        (
            (SOUND, msgspec.structs.replace(SOUND, output_tokens=23)),
            msgspec.structs.replace(COUNTS, tokens=95),
            ["answer-other", "usage-mismatch"],
        ),
        ((SOUND, msgspec.structs.replace(SOUND, prompt_tokens=17)), COUNTS, ["prompt-other"]),
        ((SOUND, msgspec.structs.replace(SOUND, ttft=0.6)), COUNTS, ["times-impossible"]),
        ((SOUND, msgspec.structs.replace(SOUND, ttft=0.0)), COUNTS, ["times-impossible"]),
        ((SOUND, SOUND), None, ["counters-missing"]),
        ((SOUND, SOUND), msgspec.structs.replace(COUNTS, by_length=3), ["answer-other"]),
        ((SOUND, SOUND), msgspec.structs.replace(COUNTS, tokens=97), ["usage-mismatch"]),
        (
            (SOUND, SOUND),
            msgspec.structs.replace(COUNTS, finished=1, by_length=1, tokens=24),
            ["usage-mismatch"],
        ),
        ((SOUND, SOUND), msgspec.structs.replace(COUNTS, hits=0.01), ["prefix-cached"]),
        ((SOUND, SOUND), msgspec.structs.replace(COUNTS, hits=0.0099), []),
    ],
)
def test_every_reason_has_its_cause(
    requests: tuple[Request, ...], found: CounterChange | None, expected: list[str]
) -> None:
    """Each thing that is wrong is named by itself, and a sound leg by none."""
    assert said(*requests, found=found) == expected


def test_tokens_that_come_in_lumps_are_measured_again() -> None:
    """Where the server counts every token, but they came at once or in fewer pieces, no time is believed, and no wheel is blamed."""
    lump = msgspec.structs.replace(SOUND, ttft=0.49999)
    fewer = msgspec.structs.replace(SOUND, output_tokens=13)
    assert said(SOUND, lump) == ["stream-merged"]
    assert said(SOUND, msgspec.structs.replace(SOUND, ttft=0.5)) == ["stream-merged"]
    assert said(SOUND, fewer) == ["stream-merged"]
    short = msgspec.structs.replace(COUNTS, tokens=85)
    assert said(SOUND, fewer, found=short) == ["answer-other", "usage-mismatch"]
    assert said(SOUND, msgspec.structs.replace(lump, error="it broke")) == ["request-failed"]


def test_texts_may_have_any_length() -> None:
    """Real prompts are as long as they are."""
    order = msgspec.structs.replace(ORDER, prompt_file=Path("x.jsonl"))
    other = msgspec.structs.replace(SOUND, prompt_tokens=9)
    assert not invalid_reasons(order, run(other, other), COUNTS, 0.01)


def metrics() -> Iterator[tuple[str, int]]:
    yield "vllm:generation_tokens_total", 24
    yield 'vllm:request_success_total{finished_reason="length"}', 1
    yield "vllm:request_success_total", 1


@given(st.integers(0, 10**6), st.integers(0, 1000))
def test_counters_are_differences(before: int, made: int) -> None:
    """What was there before a leg is not counted."""
    first = {name: float(times * before) for name, times in metrics()}
    second = {name: float(times * (before + made)) for name, times in metrics()}
    assert counter_change(first, second) == CounterChange(made, made, 24 * made)


def test_counters_that_went_back_are_none() -> None:
    """A server that began anew in the middle of a leg has no counters for it."""
    assert (
        counter_change({name: 10.0 for name, _ in metrics()}, {name: 1.0 for name, _ in metrics()})
        is None
    )
    assert counter_change({}, {}) is None
