"""
The roofline of decoding: bytes that a token needs, memory bandwidth, and the speed they allow.

A decode step reads every weight that it uses once, however many requests share it, and the context
of each request. A measured rate above the ceiling is no success: the bytes are wrong, a cache
answered, or speculation was not counted.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from sparkwright.core.store import Store


class Bandwidth(msgspec.Struct, frozen=True):
    """
    How fast memory is read.

    Attributes:
        gigabytes: 10^9 bytes per second.
        origin: ``nominal`` is the maker's figure, which no program reaches.
        device: The device that was measured or is meant.
    """

    gigabytes: float
    origin: Literal["measured", "given", "nominal"]
    device: str = ""


#: NVIDIA's figure for the GB10 of a DGX Spark (LPDDR5X); reading was measured at 231 to 234 GB/s.
GB10 = Bandwidth(273.0, "nominal", "GB10")


def distinct_experts(experts: int, taken: int, tokens: int) -> float:
    """
    Return how many of *experts* are expected to be read: E·(1−(1−k/E)^N).

    Each of N *tokens* takes k of them, independently and equally likely; real tokens agree more, so
    this is an upper bound.
    """
    if not 0 < taken <= experts or tokens < 1:
        raise ValueError(f"{taken} of {experts} experts for {tokens} tokens")
    unread = tokens * math.log1p(-taken / experts) if taken < experts else -math.inf
    return -experts * math.expm1(unread)


def bandwidth_use(step: float, rate: float, bandwidth: float, *, accepted: float = 1.0) -> float:
    """
    Return the share of the memory bandwidth that a measured rate needs.

    It is bytes × steps per second ÷ bandwidth.

    Args:
        step: Bytes that a step reads for one request.
        rate: Tokens per second of that request.
        bandwidth: 10^9 bytes per second, measured in the same session.
        accepted: Tokens of a step with speculation: one, and the accepted drafts.

    Raises:
        ValueError: One of them is not finite and positive, or *accepted* is below one.
    """
    numbers = (step, rate, bandwidth, accepted)
    if not all(math.isfinite(number) and number > 0 for number in numbers) or accepted < 1:
        raise ValueError(f"step, rate, bandwidth and accepted tokens in a step are {numbers}")
    return step * (rate / accepted) / (bandwidth * 1e9)


def store_bandwidth(store: Store, bandwidth: Bandwidth) -> None:
    """Store the bandwidth that was measured on this machine."""
    store.put("bandwidth", "this-machine", bandwidth)


def stored_bandwidth(store: Store) -> Bandwidth | None:
    """Return the bandwidth that was measured on this machine, or None."""
    bandwidth = store.get("bandwidth", "this-machine", Bandwidth)
    sound = bandwidth and bandwidth.origin == "measured" and 0 < bandwidth.gigabytes < math.inf
    return bandwidth if sound else None
