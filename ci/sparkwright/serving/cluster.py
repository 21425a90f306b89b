"""
Several machines as one server: Ray, as vLLM uses it, started from the environment's own package and gone when we are.

vLLM joins the cluster that ``RAY_ADDRESS`` names and puts one part of the model on each machine. Ray counts a machine as alive until its
heartbeat has failed for a while, and vLLM's own ``/health`` says 200 for minutes longer; so what counts here is what Ray says.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from sparkwright.bench.server.launch import ALWAYS, PASSED, SupervisedProcess
from sparkwright.core import process
from sparkwright.core.errors import CommandError, UsageError
from sparkwright.serving.environment import ServingEnvironment
from sparkwright.serving.errors import ServeError
from sparkwright.serving.variables import goes_on

#: Bytes for objects that machines hand each other; Ray takes 30 % of the memory by itself, which on a Spark is the model's. Proposed.
OBJECT_STORE = 1 << 30
#: Seconds that Ray has to leave its cluster in order.
GRACE = 15.0
#: What Ray prints when a machine has joined or a head is up.
STARTED = b"Ray runtime started"

#: The table of machines as Ray keeps it, without becoming a job of the cluster; the public way where that has changed.
_ASK = """\
import json, sys
try:
    from ray._private.state import GlobalState
    from ray._raylet import GcsClientOptions
    state = GlobalState()
    state._initialize_global_state(GcsClientOptions.create(sys.argv[1], None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False))
    nodes = state.node_table()
except (ImportError, AttributeError, TypeError):
    import ray
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
    nodes = ray.nodes()
print(json.dumps([{"id": one["NodeID"], "address": one["NodeManagerAddress"], "alive": bool(one["Alive"])} for one in nodes]))
"""


class Node(msgspec.Struct, frozen=True):
    """A machine of the cluster, as Ray knows it."""

    id: str
    address: str
    alive: bool


def required(environment: ServingEnvironment) -> None:
    """Raise `ray-missing` where the environment has no Ray."""
    if not environment.ray:
        raise ServeError("ray-missing", f"There is no Ray in the environment of {environment.python}.")


def parts(address: str) -> tuple[str, int]:
    """
    Return host and port of *address*.

    Raises:
        UsageError: It is not of the form HOST:PORT.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(
            "usage", f"{address!r:.100} is not an address of the form HOST:PORT.", todo="Give what the head printed, such as 10.0.0.1:6379."
        )
    return host.strip("[]"), int(port)


def own_address() -> str:
    """Return this machine's address on the network that its default route leads to; that of the machine itself without one."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect(("192.0.2.1", 9))  # sends nothing; an address that documentation has to itself (RFC 5737)
        return str(one.getsockname()[0])
    return "127.0.0.1"


def process_variables(variables: dict[str, str]) -> dict[str, str]:
    """Return the variables of Ray's own processes, which the parts of vLLM on this machine inherit."""
    passed = {name: value for name, value in os.environ.items() if name in PASSED or (goes_on(name) and not name.startswith("VLLM_"))}
    return {name: value for name, value in {**passed, **ALWAYS, "RAY_USAGE_STATS_ENABLED": "0", **variables}.items() if value}


def nodes(python: Path, address: str, variables: dict[str, str]) -> tuple[Node, ...]:
    """
    Return the machines of the cluster at *address*, those that are lost included.

    Raises:
        ray-failed: It does not answer.
    """
    try:
        said = process.output([python, "-P", "-c", _ASK, address], env=process_variables(variables), timeout=30).splitlines()
        return msgspec.json.decode(said[-1], type=tuple[Node, ...])
    except (CommandError, OSError, IndexError, msgspec.DecodeError) as error:
        details = error.details[-5:] if isinstance(error, CommandError) else [str(error)]
        raise ServeError("ray-failed", f"Ray does not answer at {address}.", details=list(details)) from error


@contextlib.contextmanager
def head(environment: ServingEnvironment, address: str, variables: dict[str, str], log: Path, held: Sequence[int]) -> Iterator[SupervisedProcess]:
    """Run the head of a cluster at *address* (HOST:PORT) while the block runs; its own folder goes with it."""
    host, port = parts(address)
    # Ray's sockets lie in it, and their paths may not be longer than 107 bytes.
    folder = tempfile.mkdtemp(prefix="sw-ray-")
    options = [
        "--head", f"--port={port}", f"--node-ip-address={host}", "--include-dashboard=false", f"--temp-dir={folder}",
        "--disable-usage-stats",
    ]  # fmt: skip
    try:
        with _kept(environment, options, variables, log, held, 0) as kept:
            yield kept
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def worker(environment: ServingEnvironment, address: str, own: str, variables: dict[str, str], log: Path, held: Sequence[int], reserve: int) -> Iterator[SupervisedProcess]:
    """Be a machine of the cluster at *address* while the block runs; *own* is this machine's address there, if somebody said."""
    options = [f"--address={address}", *([f"--node-ip-address={own}"] if own else []), "--disable-usage-stats"]
    with _kept(environment, options, variables, log, held, reserve) as kept:
        yield kept


@contextlib.contextmanager
def _kept(environment: ServingEnvironment, options: list[str], variables: dict[str, str], log: Path, held: Sequence[int], reserve: int) -> Iterator[SupervisedProcess]:
    words = [str(environment.python), "-P", "-m", "ray.scripts.scripts", "start", "--block", f"--object-store-memory={OBJECT_STORE}", *options]
    kept = SupervisedProcess(words, process_variables(variables), log, grace=GRACE, reserve=reserve, pass_fds=held)
    try:
        yield kept
    finally:
        kept.stop()


def started(kept: SupervisedProcess) -> bool:
    """Whether Ray says that it is up; raise `ray-failed` where it ended instead."""
    data = kept.log.read_bytes()[-200_000:]
    if not kept.guard():
        lines = [line for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
        details = [*lines[-8:], f"full log: {kept.log}"]
        raise ServeError("ray-failed", "Ray did not start." if STARTED not in data else f"Ray ended: {kept.failure}.", details=details)
    return STARTED in data


def reachable(address: str) -> bool:
    """Whether the head takes connections."""
    host, port = parts(address)
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=3):
        return True
    return False
