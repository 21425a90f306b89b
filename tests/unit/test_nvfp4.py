"""NVFP4 as arithmetic: scales, blocks, the layout of scales, and matrices that it holds exactly."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sparkwright.gates.numerics import e2m1, nvfp4, values
from sparkwright.gates.numerics.units import Format

SHAPES = st.tuples(st.integers(1, 300), st.integers(1, 20))


def test_every_scale_has_the_value_that_ml_dtypes_gives_it() -> None:
    """All 128 codes of UE4M3 decode as float8_e4m3fn does, the last to NaN."""
    codes = np.arange(128, dtype=np.uint8)

    np.testing.assert_array_equal(nvfp4.scale_decode(codes), codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_scales_are_cast_as_ml_dtypes_does_after_a_clamp(form: Format) -> None:
    """Every number that is not negative gives the code of float8_e4m3fn, once it is clamped to 448."""
    numbers = values.every(form).values
    numbers = numbers[numbers >= 0]
    expected = np.minimum(np.abs(numbers), 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)

    assert np.array_equal(nvfp4.scale_encode(np.abs(numbers)), expected)


def test_the_clamp_stands_before_the_cast() -> None:
    """Above 464 a cast alone gives NaN, which ml_dtypes shows; ours gives 448, and NaN only for NaN."""
    assert np.isnan(np.float32(465).astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert nvfp4.scale_encode(np.array([464, 465, 1e30, np.inf, np.nan], np.float32)).tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0x7F]


@given(SHAPES)
def test_the_layout_of_scales_gives_each_its_own_byte(shape: tuple[int, int]) -> None:
    """Every scale of any shape has a byte, no two the same, within the whole tiles that the shape takes."""
    rows, columns = shape
    row, column = np.indices(shape)
    offsets = nvfp4.swizzled_offset(row, column, columns)

    assert len(np.unique(offsets)) == rows * columns
    assert int(offsets.max()) < int(np.prod(nvfp4.padded(rows, columns)))


@given(SHAPES, st.integers(0, 2**32 - 1))
def test_scales_come_back_from_their_layout(shape: tuple[int, int], seed: int) -> None:
    """Taking scales out of the layout undoes putting them in, and what fills the tiles up is zero."""
    scales = np.random.default_rng(seed).integers(1, 255, shape).astype(np.uint8)
    flat = nvfp4.swizzle(scales)

    assert np.array_equal(nvfp4.unswizzle(flat, *shape), scales)
    assert int(np.count_nonzero(flat)) == scales.size


def test_the_layout_is_that_of_the_documentation() -> None:
    """In a tile of 512 bytes, rows 0, 32, 64 and 96 share the first sixteen; the next tile is to the right."""
    rows, columns = np.array([0, 0, 32, 96, 1, 0, 128]), np.array([0, 3, 0, 3, 0, 4, 0])

    assert nvfp4.swizzled_offset(rows, columns, 8).tolist() == [0, 3, 4, 15, 16, 512, 1024]


def test_a_layout_of_another_size_is_refused() -> None:
    """Bytes that are not the whole tiles of the shape are no scales of it."""
    with pytest.raises(ValueError, match="take 512 bytes, not 511"):
        nvfp4.unswizzle(np.zeros(511, np.uint8), 3, 3)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_a_matrix_on_the_grid_is_held_exactly(rows: int, blocks: int, seed: int) -> None:
    """Values that are codes times a power of two per block come back as they were, with a tensor scale of one."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 16, (rows, blocks, 16)).astype(np.uint8)
    codes[:, :, random.integers(16)] = 7
    matrix = (e2m1.decode(codes) * 2.0 ** random.integers(-6, 8, (rows, blocks, 1))).reshape(rows, -1).astype(np.float32)

    made = nvfp4.quantise(matrix, np.float32(1))

    np.testing.assert_array_equal(nvfp4.dequantise(made), matrix)


@given(hnp.arrays(np.float32, (3, 32), elements=st.floats(-1e4, 1e4, width=32)))
@example(np.pad(np.full((1, 1), 2.0**-126, np.float32), ((0, 2), (0, 31))))
@example(np.pad(np.full((1, 1), 2.0**-149, np.float32), ((0, 2), (0, 31))))
def test_no_value_is_further_off_than_the_grid_is_coarse(matrix: np.ndarray) -> None:
    """A value is off by at most a sixth of its block's largest (half the step from 4 to 6), and what rounding the scale adds."""
    made = nvfp4.quantise(matrix)
    blocks = matrix.reshape(3, 2, 16)
    off = np.abs(nvfp4.dequantise(made).reshape(blocks.shape) - blocks)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    # The coarsest scale below the normal ones is a step of 2⁻⁹ of 448 × 6 for the whole tensor.
    floor = 6 * 2.0**-9 / float(made.tensor_scale)

    assert bool(np.all(off <= largest * (1 / 6 + 1 / 16) + floor))


def test_the_tensor_scale_multiplies() -> None:
    """It is 448 × 6 ÷ amax as in vLLM, so that the largest block has the largest scale; ModelOpt's is the inverse."""
    matrix = np.linspace(-3, 3, 64, dtype=np.float32).reshape(2, 32)

    assert nvfp4.tensor_scale(matrix) == np.float32(896)
    assert int(nvfp4.quantise(matrix).scales.max()) == 0x7E


def test_zeros_and_odd_widths() -> None:
    """A matrix of zeros has scales and codes of zero; columns that fill no block are refused."""
    made = nvfp4.quantise(np.zeros((2, 16), np.float32))

    assert not made.scales.any()
    assert not made.codes.any()
    with pytest.raises(ValueError, match="17 columns"):
        nvfp4.quantise(np.zeros((2, 17), np.float32))


def test_the_product_is_that_of_the_dequantised_values() -> None:
    """A GEMM on values that NVFP4 holds exactly is the exact product."""
    a = e2m1.decode(np.tile(np.arange(16, dtype=np.uint8), (2, 2))).astype(np.float32)
    quantised = nvfp4.quantise(a, np.float32(1))

    np.testing.assert_array_equal(nvfp4.gemm(quantised, quantised), a.astype(np.float64) @ a.astype(np.float64).T)
