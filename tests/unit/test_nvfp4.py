"""NVFP4 as arithmetic: codes, scales, the layout of scales, and which roundings are right."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkwright.gates.numerics import nvfp4

SHAPES = st.tuples(st.integers(1, 300), st.integers(1, 20))


def by_definition(values: np.ndarray) -> np.ndarray:
    """Return the E2M1 codes of numbers by comparison with every tie."""
    sizes = np.abs(values)[..., None]
    even = np.arange(7) % 2 == 0
    codes = np.where(even, sizes > nvfp4.TIES, sizes >= nvfp4.TIES).sum(axis=-1)
    return np.asarray(codes | np.signbit(values) << 3)


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16])
def test_every_16_bit_number_is_rounded_by_the_definition(kind: type) -> None:
    """All patterns but NaN, a negative zero and infinity among them, have the defined code."""
    with np.errstate(invalid="ignore"):
        values = np.arange(1 << 16, dtype=np.uint16).view(kind).astype(np.float32)
    values = values[~np.isnan(values)]
    assert (nvfp4.encode(values) == by_definition(values)).all()


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64))
def test_any_fp32_number_is_rounded_by_the_definition(numbers: list[float]) -> None:
    """Any number has the defined code, ties and their neighbours among them."""
    values = np.array(numbers, np.float32)
    ties = np.concatenate([np.nextafter(nvfp4.TIES, np.float32(by)) for by in (-9, 9)])
    values = np.concatenate([values, nvfp4.TIES, -nvfp4.TIES, ties])
    assert (nvfp4.encode(values) == by_definition(values)).all()


def test_nan_becomes_plus_six() -> None:
    """NaN of either sign is +6, as PTX has it."""
    assert nvfp4.encode(np.array([np.nan, -np.nan], np.float32)).tolist() == [7, 7]


def test_codes_have_the_defined_values() -> None:
    """Code 1 is a half; packing puts the first code into the low bits, and unpacking undoes it."""
    codes = np.arange(16, dtype=np.uint8)
    assert nvfp4.decode(codes)[1:8].tolist() == [0.5, 1, 1.5, 2, 3, 4, 6]
    assert (nvfp4.encode(nvfp4.decode(codes)) == codes).all()
    assert nvfp4.pack(codes)[0] == 0x10
    assert (nvfp4.unpack(nvfp4.pack(codes)) == codes).all()


def test_scales_saturate_before_the_cast() -> None:
    """Above 448 a scale is 448; a cast alone would give NaN above 464."""
    scales = nvfp4.scale_encode(np.array([0, 448, 464, 465, 1e30, np.inf], np.float32))
    assert scales.tolist() == [0, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E]
    assert nvfp4.scale_decode(np.array([1, 0x38, 0x7E], np.uint8)).tolist() == [2**-9, 1, 448]


@given(SHAPES, st.integers(0, 2**32 - 1))
def test_scales_come_back_from_their_tiles(shape: tuple[int, int], seed: int) -> None:
    """Every scale has a byte of its own in whole tiles, and the others are zero."""
    scales = np.random.default_rng(seed).integers(1, 255, shape).astype(np.uint8)
    tiles = nvfp4.swizzle(scales)
    assert (nvfp4.unswizzle(tiles, *shape) == scales).all()
    assert np.count_nonzero(tiles) == scales.size


def test_the_layout_is_that_of_the_documentation() -> None:
    """Rows 0, 32, 64 and 96 of a tile share 16 bytes; the next tile is to the right."""
    rows, columns = np.array([0, 0, 32, 96, 1, 0, 128]), np.array([0, 3, 0, 3, 0, 4, 0])
    offsets = nvfp4.swizzled_offset(rows, columns, 8)
    assert offsets.tolist() == [0, 3, 4, 15, 16, 512, 1024]


def test_wrong_codes_and_scales_are_told_from_roundings() -> None:
    """A code beside a tie may go either way; another code, and another scale, are wrong."""
    matrix = np.full((1, 16), 0.1, np.float32)
    matrix[0, :3] = 6, 2.5 * (1 + 2**-22), -0.0
    codes, scales = nvfp4.encode(matrix), np.array([[0x38]], np.uint8)
    codes[0, 2] = 0
    assert not any(one.any() for one in nvfp4.quantisation_errors(matrix, 1.0, codes, scales))
    codes[0, 1] = 5
    assert not nvfp4.quantisation_errors(matrix, 1.0, codes, scales)[0].any()
    codes[0, 1] = 6
    assert nvfp4.quantisation_errors(matrix, 1.0, codes, scales)[0].sum() == 1
    assert nvfp4.quantisation_errors(matrix, 2.0, codes, scales)[1].all()
