"""
Several machines as one server: Ray's own processes, started from the environment that serves.

vLLM joins the cluster that ``RAY_ADDRESS`` names, waits up to half an hour until its machines have
the GPUs that it needs, and puts a part of the model on each.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Mapping

from sparkwright.bench.server.launch import ALWAYS, PASSED
from sparkwright.core.errors import UsageError
from sparkwright.core.process import wrap_with_limits
from sparkwright.serving.environment import ServingEnvironment
from sparkwright.serving.errors import ServeError

#: Bytes for objects that machines exchange. Ray's default is 30 % of the memory, which on a Spark
#: is the model's. Proposed.
OBJECT_STORE = 1 << 30
#: Seconds until Ray's head must listen.
PATIENCE = 60.0


def parse_address(address: str) -> tuple[str, int]:
    """
    Return host and port of *address*.

    Raises:
        UsageError: It is not of the form HOST:PORT.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        what = f"{address!r:.100} is not an address of the form HOST:PORT."
        raise UsageError("usage", what, todo="Name the head, such as 10.0.0.1:6379.")
    return host.strip("[]"), int(port)


def own_address() -> str:
    """Return this machine's address on the network of its default route, else 127.0.0.1."""
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        sender.connect(("192.0.2.1", 9))  # sends nothing; reserved for documentation (RFC 5737)
        return str(sender.getsockname()[0])
    return "127.0.0.1"


def variables(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of Ray's processes, which the parts of vLLM on a machine inherit."""
    network = ("RAY_", "NCCL_", "GLOO_", "UCX_")
    passed = {
        name: value
        for name, value in os.environ.items()
        if name in PASSED or name.startswith(network)
    }
    everything = {**passed, **ALWAYS, "RAY_USAGE_STATS_ENABLED": "0", **given}
    return {name: value for name, value in everything.items() if value}


def command(environment: ServingEnvironment, *options: str) -> list[str]:
    """
    Return the command line that starts Ray on this machine, and stays as long as it runs.

    Raises:
        ray-missing: The environment has no Ray.
    """
    if not environment.ray:
        what = f"There is no Ray in the environment of {environment.python}."
        raise ServeError("ray-missing", what)
    program = [str(environment.python), "-P", "-m", "ray.scripts.scripts", "start", "--block"]
    return [*program, "--disable-usage-stats", f"--object-store-memory={OBJECT_STORE}", *options]


def start_head(words: list[str], host: str, port: int, settings: Mapping[str, str]) -> None:
    """
    Start the head with the command line *words*; it ends with the thread that called this, also
    when that has become another program (exec).

    Raises:
        ray-failed: It ended, or does not listen within `PATIENCE`.
    """
    head = subprocess.Popen(
        wrap_with_limits(words),
        env=variables(settings),
        stdin=subprocess.DEVNULL,
        stdout=2,  # its words are messages, not results
        start_new_session=True,
    )
    end = time.monotonic() + PATIENCE
    while head.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=3):
            return
        time.sleep(0.2)
    head.terminate()
    raise ServeError("ray-failed", f"Ray's head does not listen at {host}:{port}.")
