"""
The parts of a roofline of decoding: experts that a step reads, and the bandwidth of the memory.

A decode step reads every weight that it uses once, however many requests share it, and the context
of each request; bandwidth ÷ bytes is the most steps per second.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec


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


#: Kind and key of the record of the bandwidth that was measured on this machine.
BANDWIDTH = "bandwidth", "this-machine"
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
