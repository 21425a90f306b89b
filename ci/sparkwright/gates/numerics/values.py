"""The values that converters are asked: all of a 16-bit format, and of fp32 those at which a conversion has to decide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from sparkwright.gates.numerics import e2m1
from sparkwright.gates.numerics.units import Format

_PATTERNS = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


class Inputs(msgspec.Struct, frozen=True, eq=False):
    """Values that a converter is asked: as *bits* of *format*, and as *values* in float32, which holds each of them exactly."""

    format: Format
    bits: NDArray[Any]
    values: NDArray[np.float32]

    def only(self, wanted: NDArray[np.bool_]) -> Inputs:
        """Return those at which *wanted* is true."""
        return Inputs(self.format, self.bits[wanted], self.values[wanted])

    def case(self, index: int) -> str:
        """Return one of them as people read it."""
        return f"{self.format} 0x{int(self.bits[index]):0{2 * self.bits.itemsize}x} = {self.values[index]:.9g}"


def every(form: Format) -> Inputs:
    """Return all 65,536 patterns of bf16 or fp16, NaN among them."""
    kind = ml_dtypes.bfloat16 if form == "bf16" else np.float16
    with np.errstate(invalid="ignore"):
        return Inputs(form, _PATTERNS, _PATTERNS.view(kind).astype(np.float32))


def fp32(values: Sequence[float] | NDArray[np.float32]) -> Inputs:
    """Return *values* as inputs of fp32."""
    array = np.asarray(values, np.float32)
    return Inputs("fp32", array.view(np.uint32), array)


def around(points: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return each of *points*, the next float32 below it and the next above it."""
    return np.concatenate([np.nextafter(points, np.float32(-np.inf)), points, np.nextafter(points, np.float32(np.inf))])


def fp32_ties() -> Inputs:
    """
    Return, of both signs: every tie and every value of E2M1 ± 1 ulp, zero, subnormals, the extremes, infinity, and each 65,537th pattern.

    The last reach every exponent with mantissas that neither bf16 nor fp16 has.
    """
    extremes = np.array([0, 2.0**-149, 2.0**-127, 2.0**-126, 3.4028234663852886e38, np.inf], np.float32)
    strided = np.arange(0, 1 << 32, 65537, dtype=np.uint64).astype(np.uint32).view(np.float32)
    half = np.concatenate([around(e2m1.TIES), around(e2m1.MAGNITUDES[1:]), extremes])
    return fp32(np.concatenate([half, -half, strided[~np.isnan(strided)]]))


def nans(form: Format) -> Inputs:
    """Return NaN patterns of both signs: all those of a 16-bit format, and some quiet and signalling ones of fp32."""
    if form == "fp32":
        bits = np.array([0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0xFF800001, 0xFFFFFFFF], np.uint32)
        return Inputs("fp32", bits, bits.view(np.float32))
    inputs = every(form)
    return inputs.only(np.isnan(inputs.values))


def narrowed(inputs: Inputs, form: Format) -> Inputs:
    """Return *inputs*, which *form* holds exactly, as its patterns."""
    kind = ml_dtypes.bfloat16 if form == "bf16" else np.float16
    return Inputs(form, inputs.values.astype(kind).view(np.uint16), inputs.values)
