"""
Two machines as one server, with the real vLLM on the CPU: two network namespaces of this machine, joined by a virtual cable.
"""

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.support.processes import until
from tests.support.standin import Machine, alive

pytestmark = pytest.mark.server

ADDRESSES = ("10.77.22.1", "10.77.22.2")
#: Asks for four tokens, from the namespace that the program runs in.
ASK = """\
import json, sys, urllib.request
body = json.dumps({"model": "toy-cpu", "prompt": "a", "max_tokens": 4, "ignore_eos": True}).encode()
sent = urllib.request.Request(f"http://127.0.0.1:{sys.argv[1]}/v1/completions", body, {"content-type": "application/json"})
print(json.load(urllib.request.urlopen(sent, timeout=120))["usage"]["completion_tokens"])
"""


@pytest.fixture(name="spaces")
def _spaces() -> Iterator[tuple[str, str]]:
    """Return the names of two network namespaces with `ADDRESSES`."""
    if os.getuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    names = f"sw{os.getpid()}a", f"sw{os.getpid()}b"
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        cable = ["ip", "-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", names[1]]
        subprocess.run(cable, check=True)
        for name, address in zip(names, ADDRESSES, strict=True):
            for words in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
                subprocess.run(["ip", "-n", name, *words.split()], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


class Node(Machine):
    """A machine in the network namespace *space*."""

    def __init__(self, folder: Path, python: Path, model: Path, space: str) -> None:
        super().__init__(folder, python)
        self.model, self.space, self.log = model, space, folder / "log"

    def serve(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a `serve` whose output goes to a file."""
        command = ["ip", "netns", "exec", self.space, *self.words("toy-cpu", "--nodes=2", *words)]
        with self.log.open("wb") as sink:
            return subprocess.Popen(command, env=self.environment, cwd=self.folder, stdout=sink, stderr=sink)

    def inside(self, *command: str) -> str:
        """Return what *command* prints in this namespace."""
        done = subprocess.run(["ip", "netns", "exec", self.space, *command], capture_output=True, text=True, check=False)
        return done.stdout


@pytest.fixture(name="nodes")
def _nodes(spaces: tuple[str, str], tmp_path: Path, vllm_python: Path, toy: Path) -> list[Node]:
    return [Node(tmp_path / space, vllm_python, toy, space) for space in spaces]


@contextlib.contextmanager
def serving(nodes: list[Node]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a `serve` on both, and end what is left of them at the end."""
    first = nodes[0].serve(f"--node-address={ADDRESSES[0]}")
    both = [first, nodes[1].serve(f"--node-address={ADDRESSES[1]}", f"--join={ADDRESSES[0]}")]
    try:
        yield both
    finally:
        for one in both:
            left = psutil.Process(one.pid).children(recursive=True) if one.poll() is None else []
            everything: list[psutil.Process | subprocess.Popen[bytes]] = [*left, one]
            for process in everything:
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    process.kill()
            one.wait(30)


def test_two_machines_answer_together_and_end_together(nodes: list[Node]) -> None:
    """A tensor in two parts; and vLLM's own first machine says 200 for as long as one waits after the other's process was killed."""
    with serving(nodes) as (first, second):
        health = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", f"http://127.0.0.1:{nodes[0].port}/health"]

        def healthy() -> bool:
            assert (first.poll(), second.poll()) == (None, None), nodes[0].log.read_text() + nodes[1].log.read_text()
            return nodes[0].inside(*health) == "200"

        until(healthy, 600)
        assert nodes[0].inside(str(nodes[0].python), "-c", ASK, str(nodes[0].port)) == "4\n"
        for node in nodes:
            assert "2 machines are equal, and their link gives" in " ".join(node.log.read_text().split())
        assert "world_size=2 rank=1" in nodes[1].log.read_text()

        processes = [*psutil.Process(first.pid).children(recursive=True), *psutil.Process(second.pid).children(recursive=True)]
        worker = next(one for one in psutil.Process(second.pid).children() if "VLLM" in " ".join(one.cmdline()))
        begin = time.monotonic()
        worker.kill()
        for one in (first, second):
            one.wait(30)
        assert time.monotonic() - begin < 20
        until(lambda: not any(alive(one.pid) for one in processes), 30)
        assert "another machine of this server has ended or is lost" in nodes[0].log.read_text()


def test_slow_link_is_refused_on_both_before_anything_is_loaded(nodes: list[Node]) -> None:
    """The interfaces state 10 Gb/s, and 100 Mb/s pass."""
    slow = "qdisc add dev eth0 root tbf rate 100mbit burst 64kb latency 400ms"
    subprocess.run(["tc", "-n", nodes[0].space, *slow.split()], check=True)
    with serving(nodes) as both:
        for node, one in zip(nodes, both, strict=True):
            assert one.wait(180) == 1
            assert "link-slow" in node.log.read_text()
            assert "Loading" not in node.log.read_text()


def test_document_of_a_dry_run_names_the_other_machine(nodes: list[Node]) -> None:
    """Nothing is waited for."""
    words = nodes[1].words("--nodes=2", f"--node-address={ADDRESSES[1]}", f"--join={ADDRESSES[0]}", "--dry-run", "--json")
    command = json.loads(nodes[1].inside("env", *(f"{k}={v}" for k, v in nodes[1].environment.items()), *words))["command"]
    assert {f"--master-addr={ADDRESSES[0]}", "--node-rank=1", "--nnodes=2", "--headless"} <= set(command)
