"""
Serve one model on two machines that are this one twice, and lose a process of the second:
nodes.py PROGRAM PYTHON RECIPE MODEL OUT [WORDS…].

Run it with a Python that has sparkwright's requirements; PYTHON has vLLM, and PROGRAM is a
checkout. Each machine has the GPU of its number and, where this user may make them, a network and a
/dev/shm of its own; else both share the loopback interface. NCCL takes them for two hosts. WORDS
are further arguments of ``serve``. Prints commands, what both compared, answers and times; logs
are left in OUT. Exits with 1 if they do not answer, or the first outlives the second.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

PORT, PATIENCE = 8133, 450
#: Seconds within which both must have ended after a process was lost.
LOST = 30
SPACES = ("sparkwright-0", "sparkwright-1")
ADDRESSES, LOOPBACK = ("10.77.23.1", "10.77.23.2"), ("127.0.0.1", "127.0.0.1")
#: What a machine states of its own, and PyTorch and NCCL must not do on a host that others share.
VARIABLES = ("NVSHMEM_DISABLE_NVLS=1", "VLLM_ALLREDUCE_USE_SYMM_MEM=0")
ASK = """\
import json, sys, urllib.request as web
url, name, tokens = sys.argv[1:]
web.urlopen(url + "/health", timeout=5).read()
body = {"model": name, "prompt": "12 + 30 =", "max_tokens": int(tokens), "ignore_eos": True}
sent = json.dumps(body | {"temperature": 0}).encode()
asked = web.Request(url + "/v1/completions", sent, {"content-type": "application/json"})
answer = json.load(web.urlopen(asked, timeout=120))
print(json.dumps([answer["usage"]["completion_tokens"], answer["choices"][0]["text"][:20]]))
"""


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)  # noqa: T201


@contextlib.contextmanager
def networks() -> Iterator[bool]:
    """Make two joined network namespaces, and remove them; yield False where that may not be."""
    commands = [["ip", "netns", "add", name] for name in SPACES]
    cable = ["link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", SPACES[1]]
    commands.append(["ip", "-n", SPACES[0], *cable])
    for name, address in zip(SPACES, ADDRESSES, strict=True):
        for words in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            commands.append(["ip", "-n", name, *words.split()])
        commands.append(["ip", "netns", "exec", name, "true"])
    try:
        for command in commands:
            subprocess.run(command, check=True, capture_output=True)
        yield True
    except (OSError, subprocess.CalledProcessError) as error:
        say(f"no namespaces: {getattr(error, 'stderr', b'') or error}")
        yield False
    finally:
        for name in SPACES:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def inside(number: int, apart: bool) -> list[str]:
    """Return the words in front of a command of the machine *number*."""
    if not apart:
        return []
    own = 'mount -t tmpfs tmpfs /dev/shm; exec "$@"'
    return ["ip", "netns", "exec", SPACES[number], "sh", "-c", own, "sh"]


def start(number: int, apart: bool, output: Path) -> subprocess.Popen[bytes]:
    """Start ``serve`` on the machine *number*."""
    program, python, recipe, model, _, *words = sys.argv[1:]
    addresses = ADDRESSES if apart else LOOPBACK
    command = [sys.executable, "-P", "-m", "sparkwright", "serve", recipe, "--root", program]
    command += ["--python", python, "--model", model, "--port", str(PORT), "--nodes", "2"]
    command += ["--node-address", addresses[number], "--tensor-parallel-size=2"]
    command += ["--join", addresses[0]] if number else []
    for variable in VARIABLES:
        command += ["--variable", variable]
    own = {"CUDA_VISIBLE_DEVICES": str(number), "NCCL_HOSTID": f"machine-{number}"}
    command += ["--disable-custom-all-reduce", *words]
    shown = [f"{name}={value}" for name, value in own.items()]
    say(shlex.join([*shown, *inside(number, apart), *command]))
    with (output / f"{number}.log").open("wb") as log:
        return subprocess.Popen(
            [*inside(number, apart), *command],
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def ask(apart: bool, tokens: int) -> str:
    """Return what the first machine answers; empty if it does not."""
    words = [f"http://127.0.0.1:{PORT}", sys.argv[3], str(tokens)]
    command = [*inside(0, apart), sys.executable, "-c", ASK, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def lines(output: Path, *texts: str) -> None:
    """Print the lines of both logs that have one of *texts*."""
    for number in (0, 1):
        text = " ".join((output / f"{number}.log").read_text("utf-8", "replace").split())
        for part in texts:
            place = text.find(part)
            if place >= 0:
                say(f"machine {number}: {text[max(0, place - 60) : place + 140]}")


def serve(servers: list[subprocess.Popen[bytes]], apart: bool, output: Path) -> bool:
    """Return whether both *servers* serve together, and end when the second loses a process."""
    began, answer = time.monotonic(), ""
    while not answer and time.monotonic() < began + PATIENCE:
        if any(server.poll() is not None for server in servers):
            return False
        time.sleep(1)
        answer = ask(apart, 4)
    say(f"first answer after {time.monotonic() - began:.0f} s: {answer}")
    lines(output, "machines are equal", "world_size=2 rank=", "via NET/")
    if not answer:
        return False
    before = time.monotonic()
    many = ask(apart, 256)
    seconds = time.monotonic() - before
    say(f"256 tokens in {seconds:.2f} s, the client's start included: {many}")
    children = psutil.Process(servers[1].pid).children(recursive=True)
    worker = next(each for each in children if "VLLM" in " ".join(each.cmdline()))
    began = time.monotonic()
    worker.kill()
    say(f"killed {' '.join(worker.name().split())}, a process of the second machine")
    for number, server in enumerate(servers):
        try:
            status = server.wait(max(0.1, began + LOST - time.monotonic()))
        except subprocess.TimeoutExpired:
            say(f"machine {number} still runs after {LOST} s")
            return False
        say(f"machine {number} ended by {status} within {time.monotonic() - began:.1f} s")
    lines(output, "another machine of this server")
    return True


def main() -> int:
    """Print what happens, and return 1 if it is not what is promised."""
    output = Path(sys.argv[5])
    output.mkdir(parents=True, exist_ok=True)
    with networks() as apart:
        servers = [start(number, apart, output) for number in (0, 1)]
        try:
            good = serve(servers, apart, output)
        finally:
            for server in servers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    for process in psutil.Process(server.pid).children(recursive=True):
                        process.kill()
                server.kill()
                server.wait()
    if not good:
        for number in (0, 1):
            text = (output / f"{number}.log").read_text("utf-8", "replace")
            say(f"--- machine {number}\n{text[-3000:]}")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
