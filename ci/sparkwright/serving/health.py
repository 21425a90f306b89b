"""
Whether a server serves: a slow one is told from a dead one.

``/health`` of vLLM says 200 over an engine that hangs, and for minutes after a machine of the
cluster is lost. So tokens are requested, and the counters are read before and after. Whether
they are the right ones is a question for the canary of the release, which costs more.
"""

import math
import time
from pathlib import Path
from typing import Literal

import msgspec

from sparkwright.bench.model.checkpoint import model_digest
from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.client.environment import CANARY
from sparkwright.core.errors import UsageError
from sparkwright.serving import ServeError, launch

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
#: Seconds that an answer of the canary may take.
PATIENCE = 120.0
#: Faults of a reply that show wrong answers; others, such as a refusal, do not.
WRONG = ("not-a-number", "token-count-wrong")


class Health(msgspec.Struct, frozen=True):
    """
    The state of a server.

    Attributes:
        message: The reason, for people.
    """

    state: HealthState
    message: str


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
    before = counters(client)
    try:
        answer = client.complete("A", max_tokens=TOKENS, ignore_eos=True)
    except ServerInvalid as error:
        if error.status in DEAD or error.reason == "server-unreachable":
            return Health("dead", f"a request for {TOKENS} tokens: {error.message}")
        if 400 <= error.status < 500:
            raise UsageError(
                "usage",
                f"{url} refuses requests: {error.message}",
                todo="Set VLLM_API_KEY if it requires a key; else check the address.",
            ) from error
        after = counters(client)
        moved = [name for name in MOVING if after.get(name, 0) > before.get(name, math.inf)]
        if moved and not error.status:
            return Health("busy", f"no token in {patience:g} s, but {moved[0]} increases")
        return Health("stuck", f"{error.message}; no counter increases")
    # The argmax of logits that are not numbers is token 0, often an exclamation mark.
    if len(answer.tokens) >= TOKENS and set(answer.tokens) == {0}:
        return Health(
            "garbage",
            f"its answer is token 0 {len(answer.tokens)} times: its logits are not numbers",
        )
    return Health("serving", "an answer came")


def counters(client: Client) -> dict[str, float]:
    """Return the server's metrics; none if it does not have them."""
    try:
        return client.metrics()
    except ServerInvalid:
        return {}


def compare_with_canary(url: str, root: Path, key: str = "") -> str:
    """
    Return, for people, with what the answers of the server at *url* were compared, and agree.

    Args:
        root: Of the reviewed data.

    Raises:
        answers-differ: They do not agree. canary-not-run: They could not be compared.
        file-invalid: What the release recorded, or a policy, is damaged.
    """
    # These compute with scipy, for which no other check waits.
    from sparkwright.release import canary

    began = time.monotonic()
    server = next((each for each in launch.running() if each.url == url), None)
    if server is None:
        raise ServeError("canary-not-run", f"`serve` started no server here that is at {url}.")
    model, canaries = Path(server.model), canary.read(Path(server.prefix, CANARY))
    digest = model_digest(model) if model.is_dir() else ""
    own = canaries.get(canary.subject(server.wheel, server.recipe, digest))
    name = f"{server.recipe or 'no recipe'}, {server.release or server.prefix} and {model}"
    if own is None:
        raise ServeError("canary-not-run", f"No gate recorded answers for {name}.")
    client = Client(url, deadline=PATIENCE, key=key)
    try:
        differences = [*canary.differences(own, client, root, server.recipe)]
    except ServerInvalid as error:
        if error.reason not in WRONG:
            raise ServeError(
                "canary-not-run",
                f"The server at {url} did not answer the canary's questions.",
                details=[str(error)],
            ) from error
        differences = [str(error)]
    if differences:
        what = f"The server at {url} does not answer as recorded for {name}."
        flags = [f"The gate had no {' '.join(server.flags)}."] * bool(server.flags)
        raise ServeError("answers-differ", what, details=[*differences, *flags])
    return f"answers as recorded for {name}, asked in {time.monotonic() - began:.1f} s"
