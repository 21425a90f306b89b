"""
NVFP4 as arithmetic on arrays: blocks of 16 values of E2M1, one scale in UE4M3 for each, one in FP32 for the tensor.

A value is ``code × block scale ÷ tensor scale``, with the tensor scale as vLLM's kernels take it: it multiplies on quantising, and is
``448 × 6 ÷ amax``. ModelOpt and torchao store the inverse (`differences` has the row). The scales of a matrix are laid out for the
tensor cores in tiles of 128 rows × 4 columns (cuBLAS documentation, "1D block scaling factors layout").

`device` holds kernels against this module, so it rounds as they do: in float32, in their order of operations.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from sparkwright.gates.numerics import e2m1
from sparkwright.gates.numerics.e2m1 import Bytes, Reals

#: Values that share a scale, along a row.
BLOCK = 16

#: The largest UE4M3 value, and the smallest that is not zero: the range to which a scale is clamped before it is cast.
SCALE_MAX = 448.0
SCALE_MIN = 2.0**-9

#: The largest tensor scale, by which the smallest block scale is divided to the smallest normal float32. With a larger one the reciprocal
#: of that quotient may be infinite, as it is in a kernel that flushes subnormals; times the zeros of a block it is NaN, which becomes 6.
TENSOR_SCALE_MAX = SCALE_MIN * 2.0**126

#: The code of the only NaN of UE4M3.
SCALE_NAN = 0x7F

#: A tile of scales: 128 rows × 4 columns in 512 bytes.
TILE_ROWS, TILE_COLUMNS = 128, 4


def _scale_values() -> NDArray[np.float32]:
    codes = np.arange(SCALE_NAN)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)).astype(np.float32)


#: The values of the UE4M3 codes 0 to 126; the exponent's bias is 7.
SCALES = _scale_values()
_SCALE_TIES: NDArray[np.float32] = (SCALES[:-1] + SCALES[1:]) / np.float32(2)


class Quantised(msgspec.Struct, frozen=True, eq=False):
    """
    A matrix in NVFP4.

    Attributes:
        codes: Two to the byte, the first in the low four bits; rows × columns/2.
        scales: UE4M3 codes, rows × columns/16, in plain rows; `swizzle` gives the layout of the tensor cores.
        tensor_scale: What the values were multiplied by; a value is ``code × scale ÷ tensor_scale``.
    """

    codes: Bytes
    scales: Bytes
    tensor_scale: np.float32


def scale_decode(codes: Bytes) -> NDArray[np.float32]:
    """Return the value of each UE4M3 code; 0x7F is NaN, and the top bit, which UE4M3 does not use, is ignored."""
    unsigned = codes & 0x7F
    return np.where(unsigned == SCALE_NAN, np.float32(np.nan), SCALES[np.minimum(unsigned, SCALE_NAN - 1)])


def scale_encode(values: Reals) -> Bytes:
    """
    Return the UE4M3 code of each of *values*, clamped to 0…448 first, to the nearest, ties to the even code; NaN gives 0x7F.

    The clamp stands before the cast because a cast alone may give NaN: `ml_dtypes.float8_e4m3fn` does so above 464.
    """
    codes = e2m1.nearest(np.clip(values, 0, SCALE_MAX), _SCALE_TIES).astype(np.uint8)
    return np.where(np.isnan(values), np.uint8(SCALE_NAN), codes)


def tensor_scale(matrix: Reals) -> np.float32:
    """
    Return ``448 × 6 ÷ amax``, with which the largest block scale is 448; 1 for a matrix of zeros.

    At most `TENSOR_SCALE_MAX`.
    """
    largest = float(np.max(np.abs(matrix), initial=0))
    return np.float32(min(SCALE_MAX * e2m1.LARGEST / largest, TENSOR_SCALE_MAX)) if largest > 0 else np.float32(1)


def quantise(matrix: Reals, scale: np.float32 | None = None) -> Quantised:
    """
    Return *matrix* in NVFP4.

    Args:
        matrix: Two axes; the number of columns is a multiple of 16.
        scale: The tensor scale; None takes that of `tensor_scale`.

    Raises:
        ValueError: The columns are no multiple of 16.

    The order is that of vLLM's kernel: scale = UE4M3(S × (amax × (1/6))), each code = E2M1(x × 1/(scale × (1/S))), and x is multiplied by
    zero where the scale is zero; every step rounds to float32. The kernel's reciprocals are approximate, these are rounded correctly.
    """
    rows, columns = matrix.shape
    if columns % BLOCK:
        raise ValueError(f"{columns} columns are no multiple of {BLOCK}")
    by = tensor_scale(matrix) if scale is None else np.float32(scale)
    blocks = matrix.astype(np.float32).reshape(rows, columns // BLOCK, BLOCK)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scales = scale_encode(by * (np.max(np.abs(blocks), axis=2) * (np.float32(1) / np.float32(e2m1.LARGEST))))
        inverse = np.float32(1) / (scale_decode(scales) * (np.float32(1) / by))
        codes = e2m1.encode(blocks * np.where(scales == 0, np.float32(0), inverse)[..., None])
    return Quantised(e2m1.pack(codes.reshape(rows, columns)), scales, by)


def dequantise(matrix: Quantised) -> NDArray[np.float64]:
    """Return the values of *matrix*, exact but for the division by the tensor scale, in float64."""
    scales = np.repeat(scale_decode(matrix.scales).astype(np.float64), BLOCK, axis=1)
    return e2m1.decode(e2m1.unpack(matrix.codes)) * scales / np.float64(matrix.tensor_scale)


def gemm(a: Quantised, b: Quantised) -> NDArray[np.float64]:
    """Return ``a × bᵀ`` of the dequantised values in float64: what an FP4 GEMM is to give before it rounds its output."""
    product: NDArray[np.float64] = dequantise(a) @ dequantise(b).T
    return product


def padded(rows: int, columns: int) -> tuple[int, int]:
    """Return the shape of *rows* × *columns* scales filled up to whole tiles of 128 × 4."""
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-columns // TILE_COLUMNS) * TILE_COLUMNS


def swizzled_offset(row: NDArray[np.int64], column: NDArray[np.int64], columns: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """
    Return the byte at which the scale of *row* and *column* lies, for a matrix with *columns* scales in a row.

    Tiles follow one another row by row; within one, 16 bytes belong to each of 32 rows: those of row r, r + 32, r + 64 and r + 96.
    """
    tile = (row // TILE_ROWS) * -(-columns // TILE_COLUMNS) + column // TILE_COLUMNS
    return tile * 512 + (row % 32) * 16 + (row // 32 % 4) * 4 + column % TILE_COLUMNS


def swizzle(scales: Bytes) -> Bytes:
    """Return the codes *scales* (rows × columns) in the layout of the tensor cores: one axis of whole tiles, filled up with zeros."""
    rows, columns = scales.shape
    row, column = np.indices((rows, columns))
    flat = np.zeros(np.prod(padded(rows, columns)), np.uint8)
    flat[swizzled_offset(row, column, columns)] = scales
    return flat


def unswizzle(flat: Bytes, rows: int, columns: int) -> Bytes:
    """
    Return the *rows* × *columns* codes that lie swizzled in *flat* (any shape).

    Raises:
        ValueError: *flat* does not hold as many whole tiles as that takes.
    """
    needed = int(np.prod(padded(rows, columns)))
    if flat.size != needed:
        raise ValueError(f"{rows} × {columns} scales take {needed} bytes, not {flat.size}")
    row, column = np.indices((rows, columns))
    return flat.reshape(-1)[swizzled_offset(row, column, columns)]
