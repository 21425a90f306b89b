"""
NVFP4 as arithmetic on arrays: the reference that converters and operators are compared with.

E2M1 has one sign bit, two exponent bits with bias 1 and one mantissa bit; it has no infinity and no
NaN (OCP Microscaling Formats 1.0, section 5.3.3). A conversion is PTX's ``cvt.rn.satfinite``: to
the nearest value, ties to the even code, beyond 6 to ±6, NaN to +6; a negative zero keeps its sign.
For numbers this is ml_dtypes' ``float4_e2m1fn``.

A value of NVFP4 is ``code × block scale ÷ tensor scale``: 16 values of a row share a block scale in
UE4M3, and a matrix has one tensor scale in FP32. As in vLLM's kernels, the tensor scale multiplies
the values that are quantised, and is ``448 × 6 ÷ amax``; ModelOpt and torchao store its inverse.
The block scales of a matrix lie in tiles of 128 rows × 4 columns (cuBLAS documentation, "1D block
scaling factors layout").
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

#: The values of codes 0 to 7; codes 8 to 15 are these with the sign bit set.
MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)

#: The largest value, and how many values of a row share a block scale.
LARGEST, BLOCK = 6.0, 16

#: The values of the UE4M3 codes 0 to 126; code 127 is NaN.
SCALES = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)

#: Relative distance from a tie within which a kernel may round either way: its reciprocals are
#: approximate (``rcp.approx`` has an error of 1 ulp, PTX ISA), and it multiplies three of them.
NEAR_TIE = 2.0**-20


def decode(codes: NDArray[np.unsignedinteger[Any]]) -> NDArray[np.float32]:
    """Return the value of each E2M1 code; the high four bits are ignored."""
    return np.asarray(np.concatenate([MAGNITUDES, -MAGNITUDES])[codes & 0xF])


def encode(values: NDArray[Any]) -> Bytes:
    """Return the E2M1 code of each of *values*, in the low four bits of a byte."""
    with np.errstate(over="ignore", invalid="ignore"):
        codes = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        return np.where(np.isnan(values), np.uint8(7), codes)


def pack(codes: Bytes) -> Bytes:
    """Return two codes per byte along the last axis, the first of each pair in the low bits."""
    return np.asarray((codes[..., 0::2] & 0xF) | (codes[..., 1::2] << 4), np.uint8)


def unpack(packed: Bytes) -> Bytes:
    """Return the codes of *packed*, twice as many along the last axis."""
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    return np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(shape)


def scale_decode(codes: Bytes) -> NDArray[np.float32]:
    """Return the value of each UE4M3 code; its top bit, which is not used, is ignored."""
    return np.asarray((codes & np.uint8(0x7F)).view(ml_dtypes.float8_e4m3fn).astype(np.float32))


def scale_encode(values: NDArray[Any]) -> Bytes:
    """Return the UE4M3 code of each of *values*, clamped to 0…448, ties to the even code."""
    # Without the clamp, ml_dtypes' cast gives NaN above 464.
    codes = np.clip(values, 0, SCALES[-1]).astype(ml_dtypes.float8_e4m3fn)
    return np.asarray(codes.view(np.uint8) & np.uint8(0x7F))


def dequantise(codes: Bytes, scales: Bytes) -> NDArray[np.float64]:
    """
    Return ``code × block scale`` for unpacked *codes*, exact in float64.

    Args:
        codes: … × columns.
        scales: UE4M3 codes in plain rows, … × columns/16.
    """
    return decode(codes).astype(np.float64) * np.repeat(scale_decode(scales), BLOCK, axis=-1)


def quantisation_errors(
    matrix: NDArray[Any], tensor_scale: NDArray[Any], codes: Bytes, scales: Bytes
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """
    Return which codes and which block scales are not those of *matrix* in NVFP4.

    A block scale is UE4M3(tensor scale × amax ÷ 6), a code E2M1(x × tensor scale ÷ block scale);
    beside a tie (`NEAR_TIE`) both neighbours are right. Neither the sign of a zero nor the codes of
    a block with the scale 0 are compared, as they do not change the values.

    Args:
        matrix: rows × columns; the columns are a multiple of 16.
        tensor_scale: One for each row (rows × 1).
        codes: Unpacked, rows × columns.
        scales: In plain rows, rows × columns/16.
    """
    blocks = matrix.astype(np.float64).reshape(len(matrix), -1, BLOCK)
    largest = tensor_scale * np.abs(blocks).max(axis=2) / LARGEST
    wrong_scales = ~_near(scale_encode, largest, scales)
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = (tensor_scale / scale_decode(scales).astype(np.float64)).repeat(BLOCK, axis=1)
        right = _near(lambda values: decode(encode(values)), matrix * factors, decode(codes))
    return ~right & (scales != 0).repeat(BLOCK, axis=1), wrong_scales


def _near(
    rounding: Callable[[NDArray[Any]], NDArray[Any]], exact: NDArray[Any], actual: NDArray[Any]
) -> NDArray[np.bool_]:
    """Return whether *actual* is a rounding of *exact*, or of a value as near as `NEAR_TIE`."""
    matches = [rounding(exact * (1 + by)) == actual for by in (0.0, -NEAR_TIE, NEAR_TIE)]
    return np.asarray(np.any(matches, axis=0))


def padded(rows: int, columns: int) -> tuple[int, int]:
    """Return the shape of *rows* × *columns* block scales filled up to tiles of 128 × 4."""
    return -(-rows // 128) * 128, -(-columns // 4) * 4


def swizzled_offsets(rows: int, columns: int) -> NDArray[Any]:
    """
    Return the byte of each of *rows* × *columns* block scales.

    Tiles of 512 bytes follow one another row by row. In a tile 16 bytes belong to each of 32 rows:
    the scales of rows r, r + 32, r + 64 and r + 96.
    """
    row, column = np.ix_(range(rows), range(columns))
    tile = row // 128 * -(-columns // 4) + column // 4
    return np.asarray(tile * 512 + row % 32 * 16 + row // 32 % 4 * 4 + column % 4)


def swizzle(scales: Bytes) -> Bytes:
    """Return *scales* (rows × columns) in tiles, of the shape `padded`, filled up with zeros."""
    tiles = np.zeros(padded(*scales.shape), np.uint8)
    tiles.reshape(-1)[swizzled_offsets(*scales.shape)] = scales
    return tiles


def unswizzle(flat: Bytes, rows: int, columns: int) -> Bytes:
    """Return the *rows* × *columns* block scales of *flat*, whole tiles in any shape."""
    return np.asarray(flat.reshape(-1)[swizzled_offsets(rows, columns)])
