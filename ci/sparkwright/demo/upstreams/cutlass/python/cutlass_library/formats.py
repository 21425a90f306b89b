"""Small float formats, as tables."""

from __future__ import annotations

from collections.abc import Iterable

#: The magnitudes of E2M1 in the order of their codes.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def pack(codes: Iterable[int]) -> bytes:
    """Return four-bit codes as bytes, the first of each pair in the low half."""
    pairs = iter(codes)
    return bytes(low & 15 | (next(pairs, 0) & 15) << 4 for low in pairs)
