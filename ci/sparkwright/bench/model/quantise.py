"""
Convert BF16 weights to FP8 and NVFP4: each to the nearest code, a tie to the even one.

The scale of a row (FP8) or of a tensor (NVFP4) is a power of two. A quotient by it is exact, so a
table of all 65,536 values of BF16 holds their codes, and looking up is as fast as memory. By a
block scale of NVFP4, which has four significant bits, the eight bits of a BF16 are never divided to
a value so near a tie that FP32 takes it for one. Random normal rows lose 0.5 % more in FP8 than by
a scale that puts the largest at 448, and nothing in NVFP4.
"""

from functools import lru_cache

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint16]
Codes = NDArray[np.uint8]

#: The largest value of E4M3, and that of E2M1 by the largest block scale.
FP8_LARGEST, NVFP4_LARGEST = 448.0, 6.0 * 448.0
#: Values of a row that share a block scale in NVFP4.
BLOCK = 16
#: The sign of a BF16, and its first pattern that is no finite number.
_MAGNITUDE, INFINITY = np.uint16(0x7FFF), 0x7F80
#: The smallest exponent of a scale; a smaller power of two is no normal number.
_LEAST_EXPONENT = -126

#: The value of every BF16, by its bits.
VALUES = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
#: The value of every block scale, by its code; 127 is no number.
BLOCK_SCALES = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def largest(rows: Bits, axis: int | None = None) -> Bits:
    """Return the bits of the largest magnitude along *axis*; magnitudes have the order of bits."""
    return np.asarray((rows & _MAGNITUDE).max(axis=axis), np.uint16)


def exponents(magnitudes: Bits, most: float) -> NDArray[np.int32]:
    """Return the exponent of the least scale by which each of *magnitudes* is within *most*."""
    mantissas, powers = np.frexp(VALUES[magnitudes] / np.float32(most))
    return np.asarray(np.maximum(powers - (mantissas == 0.5), _LEAST_EXPONENT))


@lru_cache(maxsize=64)
def fp8_codes(exponent: int) -> Codes:
    """Return the E4M3 code of each BF16 by the scale 2^*exponent*."""
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.clip(np.ldexp(VALUES, -exponent), -FP8_LARGEST, FP8_LARGEST)
        return np.asarray(scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@lru_cache(maxsize=16)
def nvfp4_codes(exponent: int) -> tuple[Codes, Codes]:
    """
    Return by the scale 2^*exponent* of a tensor the code of the block scale for each largest
    magnitude, and the E2M1 code of each BF16 at ``block scale << 16 | bits``.
    """
    with np.errstate(all="ignore"):
        scaled = np.ldexp(VALUES, -exponent)
        scales = np.clip(scaled[:INFINITY] / np.float32(6), 0, FP8_LARGEST)
        quotients = scaled / BLOCK_SCALES[:, None]
        quotients[0] = 0
        codes = quotients.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(-1)
    return scales.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), codes


def fp8(rows: Bits) -> tuple[Codes, NDArray[np.float32]]:
    """Return the codes of *rows*, and the scale of each row."""
    powers = exponents(largest(rows, axis=1), FP8_LARGEST)
    codes = np.empty(rows.shape, np.uint8)
    for power in np.unique(powers):
        same = powers == power
        codes[same] = fp8_codes(int(power)).take(rows[same], mode="wrap")
    return codes, np.ldexp(np.float32(1), powers)


def nvfp4(rows: Bits, exponent: int) -> tuple[Codes, Codes]:
    """
    Return the codes of *rows* by the scale 2^*exponent* of their tensor, two in a byte, the first
    in the low bits; and the block scales, a byte for 16 values of a row.
    """
    scale_codes, value_codes = nvfp4_codes(exponent)
    blocks = rows.reshape(len(rows), -1, BLOCK)
    scales = scale_codes.take(largest(blocks, axis=2), mode="wrap")
    places = (scales.astype(np.int32) << 16)[..., None] | blocks
    pairs = value_codes.take(places, mode="wrap").reshape(len(rows), -1).view("<u2")
    return (pairs | pairs >> 4).astype(np.uint8), scales
