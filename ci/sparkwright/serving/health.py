"""
How a server fares: dead is told from slow.

``/health`` of vLLM says only that no part of it has noticed its own death; it says 200 over an engine that hangs, and for minutes after
a machine of the cluster is lost. So a token is asked for, the counters are looked at twice, and Ray is asked who is there. Silence counts
only as far as this process had a processor to hear with: vLLM's workers spin, and on a small machine they leave others none for minutes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.serving import cluster
from sparkwright.serving.errors import ServeError
from sparkwright.serving.held import Running

State = Literal["serving", "busy", "loading", "stuck", "dead", "node-lost"]

FAILURES: Mapping[State, str] = {"stuck": "server-stuck", "dead": "server-dead", "node-lost": "node-lost"}

#: Counters that move while the engine works, a long prompt that is still being read included.
MOVING = (
    "vllm:iteration_tokens_total_count", "vllm:iteration_tokens_total_sum", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
    "vllm:request_success_total",
)  # fmt: skip
#: What a server answers that has no engine any more, or loses it while it answers.
DEAD = (500, 502, 503)
#: Part of the patience that this process may stand in line for a processor, and still believe that nothing came.
DEAF = 0.5
#: What was not heard, as `wire` names it; any other answer was, however long it took.
SILENT = ("server-silent", "server-slow")


class Health(msgspec.Struct, frozen=True):
    """
    How a server fares.

    Attributes:
        says: Why, for people. *url*: where it was asked.
        seconds: Until the token came; 0 where none did.
    """

    state: State
    says: str
    url: str = ""
    seconds: float = 0.0


def of_machine(running: Running | None, patience: float, key: str = "") -> Health:
    """
    Return how the server fares that `serve` runs on this machine.

    Args:
        running: What is recorded of it. *patience*: seconds that an answer may take. *key*: what it asks of whoever asks it.
    """
    if running is None:
        return Health("dead", "no server is recorded on this machine")
    if not running.alive:
        return Health("dead", f"`serve`, process {running.pid}, is gone", running.url)
    if running.phase in ("waiting", "loading"):
        what = "loads" if running.phase == "loading" else "waits for the other machines"
        return Health("loading", f"process {running.pid} {what} since {time.time() - running.since:.0f} s", running.url)
    if running.phase == "stopping":
        return Health("dead", f"process {running.pid} stops the server", running.url)
    if lost := _lost(running):
        return lost
    if running.role == "worker":
        return Health("serving", f"process {running.pid} is a machine of the cluster at {running.head}")
    return of_server(running.url, patience, key)


def _lost(running: Running) -> Health | None:
    """Return that a machine of the cluster is lost, where that is so."""
    if not running.role or (running.role == "head" and running.nodes < 2):
        return None
    try:
        there = cluster.nodes(Path(running.python), running.head, {})
    except ServeError as error:
        if error.reference != "ray-failed":
            raise
        return Health("node-lost", f"Ray does not answer at {running.head}: {' '.join(error.details)[:200]}", running.url)
    alive = [one.address for one in there if one.alive]
    if len(alive) < running.nodes:
        gone = sorted({one.address for one in there if not one.alive})
        lost = f"; gone: {', '.join(gone)}" if gone else ""
        return Health("node-lost", f"{len(alive)} of {running.nodes} machines are alive ({', '.join(alive)}){lost}", running.url)
    return None


def of_server(url: str, patience: float, key: str = "") -> Health:
    """
    Return how the server at *url* fares.

    Raises:
        UsageError: *url* is no address.
    """
    client = Client(url, deadline=patience, key=key)
    began = time.monotonic()
    try:
        client.health()
    except ServerInvalid as error:
        if error.status in DEAD:
            return Health("dead", f"/health says {error.status}: the engine is dead", url)
        if error.reason == "server-unreachable":
            return Health("dead", f"nothing serves there: {error.message}", url)
    stood = _waited()  # the first question loads the HTTP library
    before = _counters(client)
    try:
        client.complete("A", max_tokens=1)
        return Health("serving", "a token came", url, round(time.monotonic() - began, 3))
    except ServerInvalid as error:
        if error.status:
            return _refused(error.status, url)
        if error.reason == "server-unreachable":
            return Health("dead", f"it went away while it was asked: {error.message}", url)
        found = _moving(client, before, url, patience, error.message)
        waited = _waited() - stood
        if found.state == "stuck" and error.reason in SILENT and waited > patience * DEAF:
            says = f"not known: this process waited {waited:.1f} s for a processor while it asked ({found.says})"
            return Health("busy", says, url)
        return found


def _waited() -> float:
    """Return how many seconds this thread has stood in line for a processor (``/proc/self/schedstat``); 0 where the kernel does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text("utf-8").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _refused(status: int, url: str) -> Health:
    if status in (401, 403):
        return Health("stuck", f"it refuses the question ({status}): give its key as VLLM_API_KEY", url)
    state: State = "dead" if status in DEAD else "stuck"
    return Health(state, f"the engine answers a question for one token with {status}", url)


def _moving(client: Client, before: dict[str, float], url: str, patience: float, why: str) -> Health:
    """Return whether the engine that gave no token works on something else."""
    after = _counters(client)
    moved = [name for name in after if name in before and after[name] > before[name]]
    if moved:
        steps = ", ".join(f"{name.partition(':')[2]} +{after[name] - before[name]:g}" for name in moved[:3])
        return Health("busy", f"no token within {patience:g} s, and its counters move: {steps}", url)
    seen = "none of its counters moves" if after else "it does not say its counters"
    return Health("stuck", f"{why}; {seen}", url)


def _counters(client: Client) -> dict[str, float]:
    """Return the counters that move while the engine works; nothing where the server does not say them."""
    try:
        found = client.metrics()
    except ServerInvalid:
        return {}
    return {name: found[name] for name in MOVING if name in found}
