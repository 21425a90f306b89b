"""
E2M1, the four-bit float of NVFP4 and MXFP4, as arithmetic on arrays: what every converter of a tree is held against.

One sign bit, two exponent bits with bias 1, one mantissa bit; no infinity, no NaN (OCP Microscaling Formats 1.0, §5.3.3). Code 1 is the
only subnormal: 0.5. Conversion is what PTX calls ``cvt.rn.satfinite``: to the nearest value, a tie to the even code, beyond 6 to ±6, and
NaN to +6; a negative zero stays one. `ml_dtypes.float4_e2m1fn` agrees on every finite input, which the tests show; for NaN it is no oracle,
since it gives ±0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Reals = NDArray[np.floating[Any]]

#: The values of codes 0 to 7; codes 8 to 15 are these with the sign bit set.
MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)

#: The values of all sixteen codes; code 8 is −0.
VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])

#: Half way between two neighbours, where a conversion has to decide: 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.
TIES: NDArray[np.float32] = (MAGNITUDES[:-1] + MAGNITUDES[1:]) / np.float32(2)

LARGEST = 6.0
SIGN = 0x8

#: What NaN becomes, whatever its sign: +6.
NAN_CODE = 0x7


def nearest(magnitudes: Reals, ties: NDArray[np.float32]) -> NDArray[np.intp]:
    """
    Return the index of the grid value nearest to each of *magnitudes*; half way between two, the even index; above the grid, the last.

    Args:
        magnitudes: Not negative; NaN gives the last index.
        ties: The mid points of the grid's neighbours, in order. Each is exact in float32, so that no comparison rounds.
    """
    below = np.searchsorted(ties, magnitudes, side="left")
    at_tie = ties[np.minimum(below, len(ties) - 1)] == magnitudes
    return np.asarray(below + (at_tie & (below % 2 == 1)), np.intp)


def decode(codes: Bytes) -> NDArray[np.float32]:
    """Return the value of each code, which is in the low four bits; the high four are ignored. The result has the shape of *codes*."""
    return np.asarray(VALUES[codes & 0xF], np.float32)


def encode(values: Reals) -> Bytes:
    """
    Return the code of each of *values* (float16, float32 or float64) in the low four bits of a byte; the shape is kept.

    Ties go to the even code, what is larger than 6 becomes ±6, −0 and what rounds to it keep the sign, NaN of either sign is +6.
    """
    codes = nearest(np.abs(values), TIES).astype(np.uint8) | (np.signbit(values).astype(np.uint8) << 3)
    return np.where(np.isnan(values), np.uint8(NAN_CODE), codes)


def pack(codes: Bytes) -> Bytes:
    """Return two codes to the byte along the last axis, which is even; the first of each pair is in the low four bits."""
    return np.asarray((codes[..., 0::2] & 0xF) | (codes[..., 1::2] << 4), np.uint8)


def unpack(packed: Bytes) -> Bytes:
    """Return the codes of *packed*, twice as many along the last axis; the low four bits come first."""
    return np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])
