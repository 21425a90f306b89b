"""What the state of a machine means for a measurement, and what earlier sessions say of this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refusal

from sparkwright.bench.machine import conditions
from sparkwright.bench.machine.conditions import (
    REASONS,
    Normal,
    Span,
    disturbed,
    sound,
    startable,
)
from sparkwright.bench.machine.history import MOST, Kept
from sparkwright.bench.machine.policy import MachinePolicy
from sparkwright.bench.machine.sentinel import Device, Reading
from sparkwright.bench.machine.snapshot import Snapshot
from sparkwright.core import strict_yaml
from sparkwright.core.store import Store

FILE = Path(__file__).parents[2] / "ci" / "gates" / "machine.yaml"
POLICY = strict_yaml.load(FILE, MachinePolicy)

GPU = Device("cuda", "a GPU", "torch", unified=True, uuid="")
NORMAL = Normal(Span(0.00113, 0.00115, 0.00117), Span(0.0022, 0.0023, 0.0024), POLICY.sentinel.band, "a GPU")

#: A quiet GB10 with everything told but the clock of its memory, which its driver does not tell.
QUIET = Snapshot(
    at=1e9, steady=1000, gemv=0.00115, copy=0.0023, clock=2400, temperature=55, power=40, free=100_000, load=0.01, unknown=("memory clock",)
)  # fmt: skip

#: What differs from a quiet machine → the reason.
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "slow": ({"gemv": 0.0038}, "slow-state"),
    "slow with its copy": ({"gemv": 0.0038, "copy": 0.0076}, "slow-state"),
    "faster than normal": ({"gemv": 0.0005}, "slow-state"),
    "silent": ({"gemv": None, "copy": None, "unknown": ("sentinel: it died",)}, "sentinel-silent"),
    "braked": ({"throttled": ("software power cap", "hardware power brake")}, "throttled"),
    "hot": ({"temperature": 93.0}, "too-hot"),
    "busy": ({"load": 0.4}, "machine-busy"),
    "shared": ({"others": ("python3 (17)",)}, "gpu-shared"),
    "battery": ({"battery": True}, "on-battery"),
    "short of memory": ({"free": 12_000}, "memory-low"),
}


def later(**changed: Any) -> Snapshot:
    """Return a quiet machine ten minutes later, but for what is *changed*."""
    return msgspec.structs.replace(QUIET, at=QUIET.at + 600, steady=QUIET.steady + 600, **changed)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("memory", "period"), 0.6),
        (("memory", "floor"), 0),
        (("sentinel", "band"), 0),
        (("sentinel", "readings"), 2),
        (("sentinel", "ratio"), 1.0),
        (("temperature", "start"), 99),
        (("load",), 1.5),
        (("discards",), -1),
        (("cooldown",), -1.0),
        (("jump",), 0.0),
        (("throttles",), ["low spirits"]),
        (("unknown",), 1),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(place: tuple[str, ...], value: object) -> None:
    """A watch that looks too seldom, bands of nothing, parts above one, unknown throttles, and names that nobody reads."""
    data: dict[str, Any] = msgspec.to_builtins(POLICY)
    within = data
    for name in place[:-1]:
        within = within[name]
    within[place[-1]] = value

    with refusal("file-invalid"):
        strict_yaml.parse(strict_yaml.dump(data), MachinePolicy, "machine.yaml")


def test_the_floor_of_memory_is_that_of_the_kind_of_machine() -> None:
    """Where the GPU has memory of its own, less of the processor's has to stay; nothing else changes."""
    elsewhere = POLICY.resolved(unified=False)

    assert POLICY.resolved(unified=True) == POLICY
    assert elsewhere.memory.floor == POLICY.memory.elsewhere < POLICY.memory.floor
    assert msgspec.structs.replace(elsewhere, memory=POLICY.memory) == POLICY


def test_a_quiet_machine_gives_no_reason() -> None:
    """Neither before the start nor around a leg."""
    assert startable(QUIET, POLICY) == ()
    assert disturbed(QUIET, later(), NORMAL, POLICY) == ()


@pytest.mark.parametrize("name", ODD)
def test_each_odd_state_discards_the_leg_for_its_reason_wherever_it_is_seen(name: str) -> None:
    """One thing that is odd before the leg, after it or both gives that reason, once, and no other."""
    changed, reference = ODD[name]
    odd = msgspec.structs.replace(QUIET, **changed)

    for before, after in ((odd, later()), (QUIET, later(**changed)), (odd, later(**changed))):
        reasons = disturbed(before, after, NORMAL, POLICY)
        assert [one.reference for one in reasons] == [reference]
        assert reasons[0].says


@pytest.mark.parametrize("name", ODD)
def test_nothing_starts_in_a_state_that_would_discard_its_legs(name: str) -> None:
    """What the snapshot alone shows keeps a session from starting; what the sentinel reads is judged against what is normal."""
    changed, reference = ODD[name]

    found = [one.reference for one in startable(msgspec.structs.replace(QUIET, **changed), POLICY)]
    assert found == ([] if reference in ("slow-state", "sentinel-silent") else [reference])


def test_a_power_cap_or_an_unknown_state_is_no_reason() -> None:
    """What the policy does not name is shown only, and what no driver tells is not held against a machine."""
    silent = Snapshot(at=QUIET.at + 600, steady=QUIET.steady + 600, gemv=0.00115, copy=0.0023, unknown=("GPU: no driver",))

    assert disturbed(QUIET, later(throttled=("software power cap", "sync boost")), NORMAL, POLICY) == ()
    assert disturbed(QUIET, silent, NORMAL, POLICY) == ()


def test_without_a_normal_no_reading_is_asked_for() -> None:
    """A session that has no sentinel at all is judged by everything else."""
    bare = later(gemv=None, copy=None)

    assert disturbed(bare, msgspec.structs.replace(bare, at=bare.at + 1, steady=bare.steady + 1), None, POLICY) == ()


@given(st.floats(-1e6, 1e6), st.floats(0, 1e5))
def test_a_clock_that_was_set_is_told_from_one_that_ran(jump: float, ran: float) -> None:
    """However long the leg: it is a jump where wall clock and steady clock differ by more than the policy allows."""
    after = msgspec.structs.replace(QUIET, at=QUIET.at + ran + jump, steady=QUIET.steady + ran)
    difference = abs((after.at - QUIET.at) - (after.steady - QUIET.steady))

    found = [one.reference for one in disturbed(QUIET, after, NORMAL, POLICY)]
    assert found == (["clock-jumped"] if difference > POLICY.jump else [])


def test_a_machine_that_was_started_anew_between_two_snapshots_is_a_jump() -> None:
    """The steady clock begins at zero again, whatever the wall clock says."""
    after = msgspec.structs.replace(QUIET, at=QUIET.at - 900, steady=QUIET.steady - 900)

    assert [one.reference for one in disturbed(QUIET, after, NORMAL, POLICY)] == ["clock-jumped"]


def test_the_slow_state_says_whether_the_copy_is_slow_too() -> None:
    """The hidden state of a GB10 leaves the copy as it is; a machine that is slow in all has another trouble."""
    hidden, whole = (disturbed(QUIET, later(**ODD[name][0]), NORMAL, POLICY)[0].says for name in ("slow", "slow with its copy"))

    assert "3.30 times" in hidden
    assert hidden.endswith("the copy is unchanged")
    assert whole.endswith("3.30 times its normal time, too")


def test_even_a_first_reading_in_the_slow_state_is_not_believed() -> None:
    """A GEMV that reads with 0.3 of the copy's bandwidth is the slow state, without any earlier session; processors differ."""
    slow, right = Reading(0.0038, 0.0023, 268_000_000, 20), Reading(0.00115, 0.0023, 268_000_000, 20)

    assert [one.reference for one in sound(slow, GPU, POLICY)] == ["slow-state"]
    assert list(sound(right, GPU, POLICY)) == []
    assert list(sound(slow, msgspec.structs.replace(GPU, kind="processor"), POLICY)) == []


spans = st.lists(st.floats(1e-6, 10), min_size=1, max_size=9).map(Span.of)


@given(spans, st.floats(0.001, 1), st.floats(1e-6, 10))
def test_a_reading_is_off_exactly_where_it_leaves_the_range_by_more_than_the_band(span: Span, band: float, seconds: float) -> None:
    """Inside it is 0; outside it is the ratio to the median, above one for slower and below for faster."""
    times = span.off(seconds, band)

    if span.low <= seconds <= span.high:
        assert times == 0
    elif seconds > span.high * (1 + band):
        assert times > 1
    elif seconds < span.low / (1 + band):
        assert 0 < times < 1
    assert span.off(seconds, band * 2) in (0, times)


def test_what_is_normal_depends_on_what_was_measured() -> None:
    """The range of the readings, with a narrow band on a GPU and a wide one on a processor that others use, too."""
    readings = [Reading(gemv, 0.0023, 268_000_000, 20) for gemv in (0.00115, 0.00113, 0.0012)]
    processor = msgspec.structs.replace(GPU, kind="processor")

    assert Normal.of(readings, GPU, POLICY).gemv == Span(0.00113, 0.00115, 0.0012)
    assert (Normal.of(readings, GPU, POLICY).band, Normal.of(readings, processor, POLICY).band) == (0.03, POLICY.sentinel.processor)


def test_a_session_that_begins_slower_than_an_earlier_one_is_noticed(tmp_path: Path) -> None:
    """By more than the band; one on a machine with another driver has nothing to be compared with."""
    facts = {"gpu": "a GPU", "driver": "1"}
    first = Kept(Store(tmp_path), facts, POLICY.sentinel, "a GPU")
    assert (first.sessions, first.slower(NORMAL)) == ((), ())
    first.keep(NORMAL)

    def beginning(times: float) -> Normal:
        return msgspec.structs.replace(NORMAL, gemv=Span(0.001, NORMAL.gemv.middle * times, 0.01))

    again = Kept(Store(tmp_path), facts, POLICY.sentinel, "a GPU")
    assert [one.reference for one in again.slower(beginning(1.04))] == ["slow-state"]
    assert again.slower(beginning(1.02)) == again.slower(beginning(0.5)) == ()
    assert Kept(Store(tmp_path), {**facts, "driver": "2"}, POLICY.sentinel, "a GPU").sessions == ()
    assert Kept(Store(tmp_path), facts, POLICY.sentinel, "another").sessions == ()


def test_the_history_keeps_the_newest_and_survives_a_damaged_file(tmp_path: Path) -> None:
    """As many as are asked for; a file that is no history is none."""
    kept = Kept(Store(tmp_path), {}, POLICY.sentinel, "a GPU")
    for _ in range(MOST + 3):
        kept.keep(NORMAL)
    assert len(Kept(Store(tmp_path), {}, POLICY.sentinel, "a GPU").sessions) == MOST

    (file,) = (tmp_path / "records" / "sentinel").iterdir()
    file.write_text('{"sessions": [{"gemv": -1, "copy": 1, "day": ""}]}')
    assert Kept(Store(tmp_path), {}, POLICY.sentinel, "a GPU").sessions == ()


def test_every_reason_has_a_meaning_and_can_be_met() -> None:
    """The references that these states give, the jump, and what the watch finds in the kernel's log: no more and no less."""
    assert {reference for _, reference in ODD.values()} | {"clock-jumped", "kernel-no-memory"} == set(REASONS)
    assert all(text.endswith(".") for text in conditions.REASONS.values())
