"""A pair of Sparks: one holder at a time, nobody in a circle, and an end whatever dies."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refusal
from tests.support import runnerhub

from sparkwright.operate.runner import admit, holding, lease, once, policy, processes
from sparkwright.operate.runner.admit import Partner
from sparkwright.operate.runner.ground import Ground
from sparkwright.operate.runner.policy import Lease, ordered

PATIENCE = 60.0
HERE = [sys.executable, "-m", "tests.support.runnerhub", "lease"]
TIMES = Lease(beat=5, expires=60, margin=20, patience=100, reach=("true",))


def until(condition: object, seconds: float = PATIENCE) -> None:
    """Wait for a condition."""
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@given(
    beats=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100), st.booleans(), st.booleans()), min_size=1, max_size=30),
    drift=st.floats(1, 1.4),
)
def test_a_partner_is_never_free_before_its_leader_has_stopped(beats: list[tuple[float, float, bool, bool]], drift: float) -> None:
    """
    Whatever beats and answers are lost or late, the leader gives up before the partner is free.

    That holds for clocks that run apart by less than expires / (expires − margin), 1.5 here.
    """
    heard = answered = sent = 0.0
    for way, back, arrives, returns in beats:
        sent += TIMES.beat
        if arrives:
            heard = max(heard, sent + way)
            # An answer says when its beat was sent, and the leader goes by that.
            answered = max(answered, sent if returns and back >= 0 else 0.0)
    # The partner's clock runs faster: its `expires` passes in less of the leader's time.
    free = heard + TIMES.expires / drift
    stops = answered + (TIMES.expires - TIMES.margin)

    assert lease.given_up(answered, stops + 1e-6, TIMES)
    assert not lease.freed(heard, heard + TIMES.expires - 1e-6, TIMES)
    assert stops < free


@given(
    pairs=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda pair: pair[0] < pair[1]), min_size=1, max_size=8),
    order=st.lists(st.integers(0, 1000), min_size=60, max_size=60),
)
def test_pairs_that_share_machines_never_wait_in_a_circle(pairs: list[tuple[int, int]], order: list[int]) -> None:
    """However leaders and partners overlap, and in whatever order each comes to its turn, all gates are done, and no machine has two."""
    assert all(ordered(f"spark-{a}", f"spark-{b}") for a, b in pairs)
    holder: dict[int, int] = {}
    waiting = {number: list(pair) for number, pair in enumerate(pairs)}
    turns = iter(order * 20)
    while waiting:
        moved = False
        for number in sorted(waiting, key=lambda one: next(turns, 0) + one):
            need = waiting[number]
            if need and need[0] not in holder:
                holder[need.pop(0)] = number
                moved = True
            elif not need:
                holder = {machine: who for machine, who in holder.items() if who != number}
                del waiting[number]
                moved = True
        assert moved, "everybody waits"
    assert holder == {}


def test_a_leader_s_name_comes_first(tmp_path: Path) -> None:
    """Settings that would let two machines wait for each other are refused."""
    assert not ordered("b", "a")
    assert not ordered("a", "a")
    ground = runnerhub.ground(tmp_path, name="spark-a", partner="spark-b")
    text = (ground.config / policy.SETTINGS).read_text()
    (ground.config / policy.SETTINGS).write_text(text.replace("spark-b", "spark-0"))
    with refusal("file-invalid", match="contradicts"):
        policy.settings(ground.config / policy.SETTINGS)

    source, sink = os.pipe()
    with refusal("lease-refused"):
        lease.hold(ground, "spark-b", lambda: None, source, sink)
    os.close(source)
    os.close(sink)


def test_a_machine_has_one_holder(tmp_path: Path) -> None:
    """Of many that want a machine at once, one has it; who dies lets go, and who waits is known."""
    ground = runnerhub.ground(tmp_path)
    inside: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        with holding.machine(ground, PATIENCE):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.01)
            inside.remove(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8

    assert not holding.wanted(ground)
    with holding.wanting(ground), holding.wanting(ground), holding.machine(ground):
        assert holding.wanted(ground)
        with refusal("runner-busy"), holding.machine(ground, 0.05):
            pass
    assert not holding.wanted(ground)


@pytest.fixture
def partner(tmp_path: Path) -> Iterator[Ground]:
    """Return the other Spark, named after spark-a."""
    ground = runnerhub.ground(tmp_path / "b", name="spark-b")
    yield ground
    processes.end(ground.whose)


def leader_of(ground: Ground, **times: float) -> lease.Leader:
    """Return a leader that reaches *ground* by a program of this machine instead of ssh."""
    folder = str(ground.state.parent)
    times_ = msgspec.structs.replace(ground.policy.lease, reach=(*HERE, folder, "spark-a"), **times)
    return lease.Leader(times_, ground.settings.name)


@pytest.fixture(autouse=True)
def _from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runnerhub.ROOT)


def test_a_lease_is_had_held_and_let_go(partner: Ground) -> None:
    """While it is held the partner takes no job; afterwards it does, and its journal has both."""
    leader = leader_of(partner)
    try:
        until(lambda: leader.look() == "held")
        with refusal("runner-busy"), holding.machine(partner):
            pass
        for _ in range(20):
            assert leader.look() == "held"
            time.sleep(0.02)
    finally:
        leader.release()

    with holding.machine(partner):
        pass
    assert [(entry.event, entry.says) for entry in partner.journal().entries()] == [("leased", "spark-a"), ("released", "released")]


def test_a_leader_that_is_killed_frees_its_partner(partner: Ground) -> None:
    """kill -9 of the leader: the partner is free at once, since the kernel closes what they speak by."""
    script = (
        "import time; from pathlib import Path; from tests.support import runnerhub; from tests.unit.test_runner_lease import leader_of\n"
        f"leader = leader_of(runnerhub.found(Path({str(partner.state.parent)!r})))\n"
        "while True:\n    print(leader.look(), flush=True); time.sleep(0.02)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=runnerhub.ROOT) as child:
        assert child.stdout is not None
        try:
            assert any(line == "held\n" for line in child.stdout)
        finally:
            child.kill()
    with holding.machine(partner, PATIENCE):
        pass


def test_a_leader_that_is_silent_loses_its_partner(partner: Ground) -> None:
    """A leader that no longer sends frees its partner after a while, and knows it before: it gave up earlier."""
    leader = leader_of(partner)
    try:
        until(lambda: leader.look() == "held")
        # As a cut cable: nothing is sent, nothing is read, and nobody closes anything.
        with holding.machine(partner, PATIENCE):
            pass
        assert leader.look() == "lost"
    finally:
        leader.release()
    assert partner.journal().entries()[-1].says == "the leader is silent"


def test_a_partner_that_dies_is_noticed(partner: Ground) -> None:
    """Where the way to the partner breaks, a held lease is lost and one that is waited for is refused."""
    leader = leader_of(partner)
    try:
        until(lambda: leader.look() == "held")
        os.kill(leader._child.pid, 9)
        until(lambda: leader.look() == "lost")
    finally:
        leader.release()

    gone = lease.Leader(msgspec.structs.replace(partner.policy.lease, reach=("false",)), "spark-b")
    until(lambda: gone.look() == "refused")
    gone.release()
    with refusal("lease-refused", match="not installed"):
        lease.Leader(msgspec.structs.replace(partner.policy.lease, reach=("no-such-program",)), "spark-b")


def test_a_job_for_two_has_both_or_does_not_run(tmp_path: Path, partner: Ground) -> None:
    """The hook of a two-node job waits for the partner, whose own runner makes room; the partner is free afterwards."""
    with runnerhub.hub() as hub:
        reach = [*HERE, str(partner.state.parent), "spark-a"]
        first = runnerhub.ground(tmp_path / "a", hub.url, partner="spark-b", lease={"reach": reach})
        hub.job("true", name="one")
        hub.job(f"grep -c leased {partner.state}/journal.jsonl > {tmp_path}/seen", name="two", hook=True)
        assert once.next_role(first) == "single"
        assert once.once(first, runnerhub.github(hub.url)) is not None
        assert once.next_role(first) == "pair"

        entry = once.once(first, runnerhub.github(hub.url))

        assert entry is not None
        assert (entry.role, entry.result) == ("pair", "Succeeded")
        assert (tmp_path / "seen").read_text() == "1\n"
        assert "spark-pair" in hub.registered[1]["labels"]
        assert "spark-gate" not in hub.registered[1]["labels"]
        assert not first.partner_file.exists()
        with holding.machine(partner, PATIENCE):
            pass


def test_a_job_for_two_ends_with_its_partner(tmp_path: Path, partner: Ground) -> None:
    """Where the partner is lost in the middle, the job is ended and both are clean; where it is not to be had, the job does not run."""
    with runnerhub.hub() as hub:
        words = [*HERE, str(partner.state.parent), "spark-a"]
        reach = ["sh", "-c", f"echo $$ > {tmp_path}/holder; exec {shlex.join(words)}"]
        first = runnerhub.ground(tmp_path / "a", hub.url, partner="spark-b", lease={"reach": reach})
        hub.job("true", name="one")
        once.once(first, runnerhub.github(hub.url))
        # The job kills the program that holds the partner.
        hub.job(f"kill -9 $(cat {tmp_path}/holder); sleep 600", name="two", hook=True)
        with refusal("lease-lost"):
            once.once(first, runnerhub.github(hub.url))
        assert first.journal().entries()[-1].reference == "lease-lost"
        assert not list(first.work.iterdir())

        unreached = runnerhub.ground(tmp_path / "a", hub.url, partner="spark-b", lease={"reach": ["false"]})
        hub.job("true", name="three")
        once.once(unreached, runnerhub.github(hub.url))
        hub.job(f"touch {tmp_path}/ran", name="four", hook=True)
        entry = once.once(unreached, runnerhub.github(hub.url))
    assert entry is not None
    assert entry.result == "Failed"
    assert not (tmp_path / "ran").exists()


def test_the_hook_goes_by_what_the_supervisor_wrote(tmp_path: Path) -> None:
    """A job on one node waits for nothing; without its partner, or with a word that is none, a job for two is refused."""
    ground, file = runnerhub.ground(tmp_path), tmp_path / "partner.json"
    admit.admit(runnerhub.GOOD, ground.policy, ground.settings, file)

    file.write_bytes(msgspec.json.encode(Partner("held")))
    admit.admit(runnerhub.GOOD, ground.policy, ground.settings, file)
    for text in (msgspec.json.encode(Partner("refused", "x")), b"", b"{}", b"\xff"):
        file.write_bytes(text)
        with refusal("lease-refused"):
            admit.admit(runnerhub.GOOD, ground.policy, ground.settings, file)
