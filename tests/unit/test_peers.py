"""Machines that serve together: how they find each other, what they compare, and what ends with one of them."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.refusals import refusal
from tests.support import standin
from tests.support.processes import until
from tests.support.standin import Machine, _standin, free_port
from tests.support.standin import model as make_model

from sparkwright.bench.model.checkpoint import model_digest
from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.server import peers
from sparkwright.bench.server.peers import Machines, Statement
from sparkwright.bench.server.server_process import Server

__all__ = ["_standin"]

FIRST = Statement("10.0.0.1", 0, "2026.11.1, aa", "bb", ("--max-model-len=64",), 9000, rdma=True, speed=200.0)
SECOND = replace(FIRST, address="10.0.0.2", rank=1)
HERE = "127.0.0.1"
ROOT = Path(__file__).parents[2]


def test_machine_that_does_not_come_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PATIENCE", 0.3)
    port = free_port()
    with refusal("peer-missing", match="1 of 2 machines are there"):
        peers.meet(replace(FIRST, address=HERE), 2, HERE, port)
    with refusal("peer-missing", match="1 of 2 machines are there"):
        peers.meet(SECOND, 2, HERE, port)
    with socket.create_server((HERE, port)), refusal("peer-missing", match="1 of 2 machines are there"):
        peers.meet(replace(FIRST, address=HERE), 2, HERE, port)


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"release": "2026.11.2, ab"}, "release at 10.0.0.2: 2026.11.2, ab"),
        ({"model": "cc"}, "model at 10.0.0.2: cc"),
        ({"mtu": 1500}, "mtu at 10.0.0.2: 1500"),
        ({"rdma": False}, "rdma at 10.0.0.2: False"),
        ({"rank": 2}, "--node-rank of 10.0.0.2: 2"),
        ({"rank": 0}, "--node-rank of 10.0.0.2: 0"),
    ],
)
def test_machines_that_differ_do_not_serve_together(change: dict[str, object], detail: str) -> None:
    peers.compare([FIRST, SECOND], 2)
    with refusal("peers-differ") as refused:
        peers.compare([FIRST, replace(SECOND, **change)], 2)
    assert detail in refused.value.details


def test_link_far_below_what_its_interfaces_state_is_refused() -> None:
    """200 Gb/s are 25 GB/s. An interface that states no speed is not judged."""
    peers.judge(1.3, [FIRST, SECOND])
    with refusal("link-slow", match=r"1\.100 GB/s, and its interfaces state 25\.0"):
        peers.judge(1.1, [FIRST, SECOND])
    peers.judge(0.001, [FIRST, replace(SECOND, speed=0.0)])


def test_torch_that_is_not_there_measures_nothing(tmp_path: Path) -> None:
    with refusal("link-failed", match="over 2 machines") as refused:
        peers.measure(standin.environment(tmp_path / "venv"), FIRST, 2, HERE, free_port(), {})
    assert "No module named 'torch'" in refused.value.details[-1]


def test_model_that_differs_is_said_on_both_machines(tmp_path: Path, standin: Path) -> None:
    """Before torch or the model is loaded."""
    machines = [Machine(tmp_path / name, standin) for name in ("first", "second")]
    config = machines[1].model / "config.json"
    config.write_text(config.read_text() + " ")
    words = ("--nodes=2", f"--node-address={HERE}", f"--node-port={free_port()}", "--flag=--gpu-memory-utilization=0.5")
    try:
        first = machines[0].start(*words)
        machines[1].start(*words, f"--join={HERE}")
        for machine in machines:
            _, said = machine.started[0].communicate(timeout=120)
            assert machine.started[0].returncode == 1
            assert "peers-differ" in said
            assert f"model at {HERE}: {model_digest(machines[1].model)}" in "".join(said.split("\n")).replace("    ", "")
        assert first.returncode == 1
    finally:
        for machine in machines:
            machine.close()


@pytest.mark.parametrize("lost", [True, False])
def test_server_of_a_gate_meets_the_other_machine_and_ends_with_it(lost: bool, tmp_path: Path, standin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of `serve` does; and the other machine's part ends with it. Only the link is not measured, as no torch is here."""
    monkeypatch.setattr(peers, "measure", lambda *_: 1.0)
    model, port = make_model(tmp_path / "toy"), free_port()
    machines = Machines(2, HERE, port=port)
    recipe = replace(recipes.load(ROOT, "toy-cpu"), nodes=2)
    plan = recipes.launch(recipe, "0.33.0", standin, model, variables={"VLLM_HOST_IP": HERE})
    assert recipes.launch(recipe, "0.33.0", standin, model, words=("--distributed-executor-backend=ray",)).machines is None
    with refusal("usage", match="the address of this one is missing"):
        recipes.launch(recipe, "0.33.0", standin, model)
    second = replace(machines, join=HERE, rank=1)
    joined: list[tuple[list[socket.socket], tuple[str, ...]]] = []
    words = ("--node-rank=1", "--headless", "--gpu-memory-utilization=0.3", "--max-model-len=64")

    def join() -> None:
        # A stranger who speaks HTTP to the port is told nothing.
        until(lambda: socket.socket().connect_ex((HERE, port)) == 0)
        with socket.create_connection((HERE, port), timeout=5) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            joined.append(peers.gather(second, standin, model, words, {}))
            assert stranger.recv(100) == b""

    other = threading.Thread(target=join)
    other.start()
    with Server(replace(plan, machines=machines, variables={}, name="toy"), tmp_path / "log") as server:
        other.join(20)
        ((link,), adopted) = joined[0]
        assert server.guard()
        # The arguments are the first one's, but for the memory and the place.
        assert set(words[:3]) <= set(adopted)
        assert "--max-model-len=1024" in adopted
        if lost:
            link.close()
            until(lambda: not server.guard())
            assert (server.reason, "another machine" in server.failure) == ("server-died", True)
    if not lost:
        assert link.recv(1) == b""
        link.close()
