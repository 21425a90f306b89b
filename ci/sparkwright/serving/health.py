"""
Whether a server serves: a slow one is told from a dead one.

``/health`` of vLLM says 200 over an engine that hangs, and for minutes after a machine of the
cluster is lost. So tokens are requested, and the counters are read before and after.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.core.errors import UsageError

HealthState = Literal["serving", "busy", "garbage", "stuck", "dead"]

#: Counters that move while the engine works, also on a long prompt.
MOVING = (
    "vllm:iteration_tokens_total_count",
    "vllm:iteration_tokens_total_sum",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
)
#: Tokens that are requested.
TOKENS = 8
#: HTTP statuses of a server without an engine, or of one that loses it while it answers.
DEAD = (500, 502, 503)


class Health(msgspec.Struct, frozen=True):
    """
    The state of a server.

    Attributes:
        message: The reason, for people.
    """

    state: HealthState
    message: str


def local_url(host: str, port: int) -> str:
    """Return the URL on this machine of a server that listens on *host*."""
    wildcards = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  compared
    host = wildcards.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def check(url: str, patience: float, key: str = "") -> Health:
    """
    Return the state of the server at *url*.

    Args:
        patience: Seconds that each answer may take.
        key: The server's API key.

    Raises:
        UsageError: *url* is no address, or refuses requests (a missing key, another server).
    """
    client = Client(url, deadline=patience, key=key)
    before = _counters(client)
    try:
        answer = client.complete("A", max_tokens=TOKENS, ignore_eos=True)
    except ServerInvalid as error:
        if error.status in DEAD or error.reason == "server-unreachable":
            return Health("dead", f"a request for {TOKENS} tokens: {error.message}")
        if 400 <= error.status < 500:
            todo = "Set VLLM_API_KEY if it requires a key; else check the address."
            what = f"{url} refuses requests: {error.message}"
            raise UsageError("usage", what, todo=todo) from error
        after = _counters(client)
        moved = [name for name, count in after.items() if count > before.get(name, count)]
        if moved and not error.status:
            return Health("busy", f"no token in {patience:g} s, but {moved[0]} increases")
        return Health("stuck", f"{error.message}; no counter increases")
    # The argmax of logits that are not numbers is token 0, often an exclamation mark.
    if len(answer.tokens) >= TOKENS and set(answer.tokens) == {0}:
        message = f"its answer is token 0 {len(answer.tokens)} times: its logits are not numbers"
        return Health("garbage", message)
    return Health("serving", "an answer came")


def _counters(client: Client) -> dict[str, float]:
    """Return the counters of `MOVING` that the server states."""
    try:
        metrics = client.metrics()
    except ServerInvalid:
        return {}
    return {name: metrics[name] for name in MOVING if name in metrics}
