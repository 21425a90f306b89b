"""
What memory allows: bytes that have to be read for a token, a bandwidth, and so the tokens per second that nothing can exceed.

A decode step reads every weight that it uses once, however many requests share it, and the context of each request. A measured rate
above the ceiling is no success: the bytes are wrong, a cache answered, or speculation was not counted (gates.md §2.3b).
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from sparkwright.core.store import Store
from sparkwright.gates.core import verdict
from sparkwright.gates.core.verdict import Check, Figure

Origin = Literal["measured", "given", "nominal"]

#: Why a rate does not count → what that means and what to do.
REASONS = {
    "above-roofline": "More bytes per second than memory gives: look at the bytes per token, at cache hits, and at the acceptance length.",
    "roofline-unknown": "A number that the check needs is missing or is no number above zero; measure it in the same session.",
}


class Bandwidth(msgspec.Struct, frozen=True):
    """
    How fast memory is read.

    Attributes:
        gigabytes: 10^9 bytes per second.
        origin: ``nominal`` is what the maker states, which no program reaches.
        device: What was measured, or what the maker's figure is about.
    """

    gigabytes: float
    origin: Origin
    device: str = ""


#: What NVIDIA states for the GB10 of a DGX Spark (LPDDR5X); others measured 231 to 234 GB/s of reading there (gates.md §2.2).
GB10 = Bandwidth(273.0, "nominal", "GB10")


class Ceiling(msgspec.Struct, frozen=True):
    """Tokens per second that nothing exceeds at that *bandwidth*: of one request, and of all of a batch together."""

    bandwidth: Bandwidth
    one: float
    together: float


def distinct(experts: int, taken: int, tokens: int) -> float:
    """
    Return how many of a layer's *experts* are expected to be read when *tokens* tokens each take *taken* of them: E·(1−(1−k/E)^N).

    It takes tokens for independent and experts for equally likely; real tokens agree more, so this bounds the reading from above.
    """
    if not 0 < taken <= experts or tokens < 1:
        raise ValueError(f"{taken} of {experts} experts for {tokens} tokens")
    return -experts * math.expm1(tokens * math.log1p(-taken / experts)) if taken < experts else float(experts)


def ceiling(step: float, batch: int, bandwidth: Bandwidth) -> Ceiling:
    """Return the ceiling of a step that reads *step* bytes for a token of each of *batch* requests."""
    steps = bandwidth.gigabytes * 1e9 / step
    return Ceiling(bandwidth, steps, steps * batch)


def use(step: float, rate: float, bandwidth: float, *, accepted: float = 1.0) -> float:
    """
    Return the share of memory's bandwidth that a measured rate needs: u = bytes × steps per second ÷ bandwidth.

    Args:
        step: Bytes that one step reads for one request.
        rate: Tokens per second of that request.
        bandwidth: 10^9 bytes per second, measured in the same session.
        accepted: Tokens that a step gives with speculation: one, and the drafts that were accepted.

    Raises:
        ValueError: One of them is no finite number above zero, or *accepted* is below one.
    """
    if not all(math.isfinite(one) and one > 0 for one in (step, rate, bandwidth, accepted)) or accepted < 1:
        raise ValueError(f"{step} bytes, {rate} tokens/s, {bandwidth} GB/s, {accepted} tokens in a step")
    return step * (rate / accepted) / (bandwidth * 1e9)


def check(name: str, step: float, rate: float, bandwidth: float, *, accepted: float = 1.0, times: int = 1) -> Check:
    """Return the check *name* that a measured rate is possible; one that is not is invalid, never good. A low use is no failure."""
    try:
        share = use(step, rate, bandwidth, accepted=accepted)
    except ValueError as error:
        return verdict.invalid(name, f"the roofline cannot be told: {error}", "roofline-unknown")
    figures = (Figure("bandwidth used", 100 * share, "%", times, bound=100.0), Figure("bytes per step", step / 1e9, "GB"))
    says = f"{rate:.1f} tokens/s need {100 * share:.0f} % of {bandwidth:g} GB/s"
    says += f", at {accepted:.2f} tokens per step" if accepted > 1 else ""
    return verdict.invalid(name, says, "above-roofline", figures=figures) if share > 1 else verdict.passed(name, says, figures=figures)


def keep(store: Store, bandwidth: Bandwidth) -> None:
    """Keep what was measured on this machine, for `stored`."""
    store.put("bandwidth", "this-machine", bandwidth)


def stored(store: Store) -> Bandwidth | None:
    """Return what was measured on this machine, if it was."""
    found = store.get("bandwidth", "this-machine", Bandwidth)
    sound = found and found.origin == "measured" and math.isfinite(found.gigabytes) and found.gigabytes > 0
    return found if sound else None
