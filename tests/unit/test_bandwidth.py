"""The machine as the throughput gate sees it: its bandwidth measured and kept, its normal state taken, snapshots around a leg."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from sparkwright.bench.machine import bandwidth
from sparkwright.bench.machine.policy import MachinePolicy
from sparkwright.bench.machine.sentinel import Sentinel, Silent
from sparkwright.bench.machine.state import Machine
from sparkwright.bench.model import roofline
from sparkwright.core import strict_yaml
from sparkwright.core.store import Store

SHIPPED = strict_yaml.load(Path(__file__).parents[2] / "ci" / "gates" / "machine.yaml", MachinePolicy)
#: Small and without bands, as a test's machine is neither quiet nor fast; the rest is what ships.
SMALL = msgspec.structs.replace(
    SHIPPED,
    sentinel=msgspec.structs.replace(
        SHIPPED.sentinel, matrix=8, stream=8, warm=0.0, seconds=0.02, least=2, readings=3, processor=1e6, ratio=0.0, patience=60
    ),
    memory=msgspec.structs.replace(SHIPPED.memory, floor=1, elsewhere=1),
    load=1.0,
)  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def test_the_bandwidth_is_measured_named_and_kept_for_what_needs_it(store: Store, tmp_path: Path) -> None:
    """What is returned is what `modules` finds in the store later: measured, above 0, and with its device."""
    with Sentinel(SMALL.sentinel, Path(sys.executable), tmp_path / "log") as sentinel:
        found = bandwidth.measure(sentinel, store)

    assert found.origin == "measured"
    assert found.gigabytes > 0
    assert " by " in found.device
    assert roofline.stored(store) == found


def test_a_sentinel_that_is_silent_leaves_what_was_kept(store: Store, tmp_path: Path) -> None:
    """No figure of another day is passed off as this session's, and none is lost."""
    kept = roofline.Bandwidth(200.0, "measured", "another day")
    roofline.keep(store, kept)

    with Sentinel(SMALL.sentinel, tmp_path / "none", tmp_path / "log") as sentinel, pytest.raises(Silent):
        bandwidth.measure(sentinel, store)
    assert roofline.stored(store) == kept


def test_a_session_settles_and_takes_snapshots_around_a_leg(store: Store) -> None:
    """On a machine that nothing is held against: a normal, two snapshots with readings, no reason between them, one bandwidth."""
    with Machine(SMALL, store, python=None) as machine:
        machine.preheat(0.05)
        assert machine.settle() == ()
        assert machine.normal is not None
        before, after = machine.snapshot(), machine.snapshot()

        assert machine.disturbed(before, after) == ()
        assert before.gemv
        assert before.copy
        assert before.free
        assert after.at > before.at
        assert after.steady > before.steady
        assert machine.bandwidth() is machine.bandwidth() is not None


def test_only_the_first_session_on_a_machine_has_nothing_to_compare_with(store: Store) -> None:
    """It says so; the second one knows the first, and one that begins much slower is not started."""
    notes = []
    for _ in range(2):
        with Machine(SMALL, store, python=None) as machine:
            assert machine.settle() == ()
            notes.append([note for note in machine.notes if "No earlier session" in note])
    assert [len(one) for one in notes] == [1, 0]

    (file,) = (store.root / "records" / "sentinel").iterdir()
    file.write_text('{"sessions": [{"gemv": 1e-12, "copy": 1e-12, "day": "2026-11-01"}]}')
    with Machine(SMALL, store, python=None) as machine:
        reasons = machine.settle()
        assert [one.reference for one in reasons] == ["slow-state"]
        assert "2026-11-01" in reasons[0].says
    assert len(msgspec.json.decode(file.read_bytes())["sessions"]) == 1


def test_a_python_without_the_libraries_is_replaced_by_ours_and_said(store: Store, tmp_path: Path) -> None:
    """The environment that was named does not start the sentinel: this one does, and the notes tell it."""
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)

    with Machine(SMALL, store, python=other) as machine:
        assert machine.settle() == ()
        assert "does not start in the Python that was named" in machine.notes[0]


def test_a_sentinel_that_dies_leaves_a_snapshot_that_says_so(store: Store) -> None:
    """No reading, the reason among what is unknown, a leg that does not count; the snapshot after that has one again."""
    with Machine(SMALL, store, python=None) as machine:
        machine.settle()
        before = machine.snapshot()
        works, machine._sentinel._policy = SMALL.sentinel, msgspec.structs.replace(SMALL.sentinel, matrix=900_000_000)
        after = machine.snapshot()
        machine._sentinel._policy = works

        assert (after.gemv, after.copy) == (None, None)
        assert any(text.startswith("sentinel: ") for text in after.unknown)
        assert [one.reference for one in machine.disturbed(before, after)] == ["sentinel-silent"]
        assert machine.snapshot().gemv


def test_the_fingerprint_is_told_without_a_session(store: Store) -> None:
    """Before the block and in it, it is the same."""
    machine = Machine(SMALL, store, python=None)
    first = machine.fingerprint()
    with machine:
        assert machine.fingerprint() == first
