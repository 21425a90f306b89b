"""NVFP4 as arithmetic: codes, scales, the layout of scales, and which roundings are right."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkwright.gates.numerics import nvfp4


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16])
def test_every_16_bit_number_and_tie_is_rounded_by_the_definition(kind: type) -> None:
    """NaN of either sign is +6; ties and their neighbours, -0 and infinity are among the numbers."""
    with np.errstate(invalid="ignore"):
        values = np.arange(1 << 16, dtype=np.uint16).view(kind).astype(np.float32)
    ties = [np.nextafter(nvfp4.TIES, np.float32(by)) for by in (-9, 9)]
    values = np.concatenate([values, nvfp4.TIES, -nvfp4.TIES, *ties])
    sizes, even = np.abs(values)[:, None], np.arange(7) % 2 == 0
    codes = np.where(even, sizes > nvfp4.TIES, sizes >= nvfp4.TIES).sum(axis=1)
    codes = np.where(np.isnan(values), 7, codes | np.signbit(values) << 3)
    assert (nvfp4.encode(values) == codes).all()


def test_codes_and_scales_have_the_defined_values() -> None:
    """Packing puts the first code into the low bits; above 448 a scale is 448, not NaN."""
    codes = np.arange(16, dtype=np.uint8)
    assert nvfp4.decode(codes)[1:10].tolist() == [0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5]
    assert nvfp4.pack(codes)[0] == 0x10
    assert (nvfp4.unpack(nvfp4.pack(codes)) == codes).all()
    scales = nvfp4.scale_encode(np.array([0, 448, 464, 465, 1e30, np.inf], np.float32))
    assert scales.tolist() == [0, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E]
    assert nvfp4.scale_decode(np.array([1, 0x38, 0x7E], np.uint8)).tolist() == [2**-9, 1, 448]


@given(st.tuples(st.integers(1, 300), st.integers(1, 20)), st.integers(0, 2**32 - 1))
def test_scales_come_back_from_their_tiles(shape: tuple[int, int], seed: int) -> None:
    """Every scale has a byte of its own in whole tiles, and the others are zero."""
    scales = np.random.default_rng(seed).integers(1, 255, shape).astype(np.uint8)
    tiles = nvfp4.swizzle(scales)
    assert (nvfp4.unswizzle(tiles, *shape) == scales).all()
    assert np.count_nonzero(tiles) == scales.size


def test_the_layout_is_that_of_the_documentation() -> None:
    """Rows 0, 32, 64 and 96 of a tile share 16 bytes; the next tile is to the right."""
    offsets = nvfp4.swizzled_offset(
        np.array([0, 0, 32, 96, 1, 0, 128]), np.array([0, 3, 0, 3, 0, 4, 0]), 8
    )
    assert offsets.tolist() == [0, 3, 4, 15, 16, 512, 1024]


def test_wrong_codes_and_scales_are_told_from_roundings() -> None:
    """A code beside a tie may go either way; another code, and another scale, are wrong."""
    matrix = np.full((1, 16), 0.1, np.float32)
    matrix[0, :3] = 6, 2.5 * (1 + 2**-22), -0.0
    codes, scales = nvfp4.encode(matrix), np.array([[0x38]], np.uint8)
    codes[0, 2] = 0
    for code, wrong in ((codes[0, 1], 0), (5, 0), (6, 1)):
        codes[0, 1] = code
        assert [part.sum() for part in nvfp4.quantisation_errors(matrix, 1.0, codes, scales)] == [
            wrong,
            0,
        ]
    assert nvfp4.quantisation_errors(matrix, 2.0, codes, scales)[1].all()
