"""`serve` on several machines: the head waits for the others and then serves; a worker joins, and stays as long as the head does."""

from __future__ import annotations

import os
import time
from pathlib import Path

from msgspec.structs import replace

from sparkwright.bench.server.launch import SupervisedProcess
from sparkwright.core.console import console, duration
from sparkwright.core.store import Store
from sparkwright.serving import cluster, held, ports, room, run
from sparkwright.serving.asked import Asked
from sparkwright.serving.cluster import Node
from sparkwright.serving.environment import ServingEnvironment
from sparkwright.serving.errors import ServeError
from sparkwright.serving.held import Held, Running
from sparkwright.serving.resolve import Ready
from sparkwright.serving.wish import Wish

#: Seconds between two questions who is there; each starts a Python that imports Ray.
LOOK = 2.0
#: Questions in a row that the head leaves unanswered before a worker takes it for gone.
SILENT = 3
#: How variables begin that the server needs as Ray has them.
NETWORK = ("RAY_", "NCCL_", "GLOO_", "UCX_")


def lead(ready: Ready, lock: Held, asked: Asked, store: Store, log: Path) -> int:
    """
    Start Ray's head, wait for the other machines, and serve; return the exit code as `run.serve`.

    Raises:
        ray-missing, ray-failed: Ray cannot be started. workers-missing: Not all machines came in time. And what `run.serve` raises.
    """
    cluster.required(ready.environment)
    ports.check(ready.wish.host, ready.wish.port)
    room.check(ready.needs, ready.floor)
    host = ready.wish.address or cluster.own_address()
    address = f"{host}:{ready.wish.ray_port}"
    # Of the network and of Ray itself (RAY_AUTH_MODE, say): the server is a part of the cluster.
    network = {name: value for name, value in os.environ.items() if name.startswith(NETWORK)}
    variables = {**network, **ready.launch.variables, "VLLM_HOST_IP": host}
    ready = replace(
        ready, wish=replace(ready.wish, head=address), launch=replace(ready.launch, variables={**variables, "RAY_ADDRESS": address})
    )
    lock.write(run.record(ready, log, "waiting"))
    asked.gently = True
    with cluster.head(ready.environment, address, variables, log.with_suffix(".ray.log"), (lock.descriptor,)) as ray:
        if not _gather(ray, ready, address, asked):
            console.note("stopped while it waited for the other machines")
            return 130
        return run.serve(ready, lock, asked, store, log)


def _gather(ray: SupervisedProcess, ready: Ready, address: str, asked: Asked) -> bool:
    """Wait until all machines are there, and return whether they are: False where somebody asked to stop first."""
    began, came, up = time.monotonic(), tuple[Node, ...](), False
    with console.progress("machines of the cluster", ready.nodes) as line:
        while not asked.times:
            if not up and (up := cluster.started(ray)):
                console.note(f"the head is up; on each other machine: sparkwright serve --ray-worker {address}")
            came = _alive(ready, address) if up and cluster.started(ray) else came
            line.update(len(came), ", ".join(one.address for one in came))
            if len(came) >= ready.nodes:
                return True
            if (passed := time.monotonic() - began) > ready.launch.timeout:
                there = [f"{one.address} ({one.id[:12]})" for one in came] or ["not even the head"]
                what = f"{len(came)} of {ready.nodes} machines are there after {duration(passed)}."
                raise ServeError(
                    "workers-missing", what, details=[f"there: {one}" for one in there], data={"came": [one.address for one in came]}
                )
            _rest(asked, LOOK if up else 0.2)
    return False


def _alive(ready: Ready, address: str) -> tuple[Node, ...]:
    try:
        return tuple(one for one in cluster.nodes(ready.environment.python, address, ready.launch.variables) if one.alive)
    except ServeError as error:  # up, and not answering yet
        if error.reference != "ray-failed":
            raise
        return ()


def _rest(asked: Asked, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not asked.times and time.monotonic() < until:
        time.sleep(0.1)


def follow(environment: ServingEnvironment, wish: Wish, floor: int, lock: Held, asked: Asked, log: Path, patience: float) -> int:
    """
    Be a machine of the cluster at ``wish.head`` until somebody asks to stop or the head is gone, and return the exit code.

    Raises:
        ray-missing, ray-failed: Ray cannot be started, or ended although the head is there. memory-low: Too little memory is left.
    """
    cluster.required(environment)
    cluster.parts(wish.head)
    now = Running(
        os.getpid(), held.born(os.getpid()), time.time(), "waiting", wish.recipe, "", "", str(environment.python), environment.vllm,
        environment.wheel, environment.release, str(log), "", "worker",
        wish.nodes or 1, wish.head,
    )  # fmt: skip
    lock.write(now)
    console.note(f"log: {log}")
    if not _reached(wish.head, asked, patience):
        return 130
    asked.gently = True
    own = {"VLLM_HOST_IP": wish.address} if wish.address else {}
    with cluster.worker(environment, wish.head, wish.address, {**wish.passed, **wish.variables, **own}, log, (lock.descriptor,), floor) as ray:
        if not _joined(ray, asked):
            return 130
        lock.write(replace(now, phase="joined"))
        console.note(f"joined the cluster at {wish.head}; stop: Ctrl-C, or kill {now.pid}")
        return _stay(ray, wish.head, asked, log)


def _reached(head: str, asked: Asked, patience: float) -> bool:
    """Wait for the head, which may be started after us; raise `ray-failed` where it does not come."""
    began = time.monotonic()
    with console.progress(f"wait for the head at {head}", 0) as line:
        while not cluster.reachable(head):
            if (passed := time.monotonic() - began) > patience:
                raise ServeError("ray-failed", f"Nothing listens at {head} after {duration(passed)}.")
            line.update(round(passed), "s")
            _rest(asked, 1)
    return True


def _joined(ray: SupervisedProcess, asked: Asked) -> bool:
    while not asked.times:
        if cluster.started(ray):
            return True
        time.sleep(run.LOOK)
    return False


def _stay(ray: SupervisedProcess, head: str, asked: Asked, log: Path) -> int:
    silent, asked_at = 0, time.monotonic()
    while not asked.times and silent < SILENT:
        if not ray.guard():
            if ray.reason == "server-died" and not cluster.reachable(head):
                break
            run.guarded(ray, log)
        if time.monotonic() - asked_at > LOOK:
            silent, asked_at = (0 if cluster.reachable(head) else silent + 1), time.monotonic()
        time.sleep(run.LOOK)
    if not asked.times:
        console.note(f"the head at {head} is gone, and this machine leaves with it")
    return 0
