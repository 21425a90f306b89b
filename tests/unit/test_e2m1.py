"""E2M1 as arithmetic: against ml_dtypes where that is an oracle, and against the rules where it is none."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sparkwright.gates.numerics import e2m1, values
from sparkwright.gates.numerics.units import Format

BITS = hnp.arrays(np.uint32, st.integers(1, 64), elements=st.integers(0, 2**32 - 1))


def oracle(numbers: np.ndarray) -> np.ndarray:
    """Return the codes that ml_dtypes gives."""
    with np.errstate(over="ignore", invalid="ignore"):
        made: np.ndarray = numbers.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return made


def test_code_1_is_a_half() -> None:
    """The table is that of ml_dtypes, code by code; a seed report has 0.25 for code 1."""
    assert e2m1.decode(np.arange(16, dtype=np.uint8)).tolist() == np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(
        np.float32
    ).tolist()
    assert e2m1.VALUES[1] == 0.5
    assert np.signbit(e2m1.VALUES[8])


@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_every_pattern_of_16_bits_is_converted_as_ml_dtypes_does(form: Format) -> None:
    """All 65,536 patterns but NaN agree bit for bit, −0 and infinity among them."""
    inputs = values.every(form)
    inputs = inputs.only(~np.isnan(inputs.values))

    assert np.array_equal(e2m1.encode(inputs.values), oracle(inputs.values))


def test_every_tie_and_its_neighbours_are_converted_as_ml_dtypes_does() -> None:
    """Ties ± 1 ulp of both signs, subnormals, extremes and a grid through fp32 agree bit for bit."""
    inputs = values.fp32_ties()

    assert np.array_equal(e2m1.encode(inputs.values), oracle(inputs.values))


@given(BITS)
def test_any_fp32_is_converted_as_ml_dtypes_does(bits: np.ndarray) -> None:
    """Any fp32 that is no NaN gives the oracle's code."""
    numbers = bits.view(np.float32)
    numbers = numbers[~np.isnan(numbers)]

    assert np.array_equal(e2m1.encode(numbers), oracle(numbers))


@pytest.mark.parametrize(("tie", "code"), [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)])
def test_ties_go_to_the_even_code(tie: float, code: int) -> None:
    """Each tie, of both signs, goes to the even neighbour (gates.md §3.2)."""
    assert e2m1.encode(np.array([tie, -tie])).tolist() == [code, code | 8]


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_nan_becomes_plus_six_and_a_negative_zero_stays_one(kind: type[np.floating]) -> None:
    """NaN of either sign is +6; −0 and what rounds to it keep their sign; infinity saturates."""
    numbers = np.array([np.nan, -np.nan, -0.0, -0.1, np.inf, -np.inf], kind)

    assert e2m1.encode(numbers).tolist() == [7, 7, 8, 8, 7, 15]


@given(hnp.arrays(np.uint8, st.tuples(st.integers(1, 5), st.integers(0, 8).map(lambda n: 2 * n)), elements=st.integers(0, 15)))
def test_unpacking_undoes_packing(codes: np.ndarray) -> None:
    """Codes come back from their bytes in order, the first of each pair from the low four bits."""
    packed = e2m1.pack(codes)

    assert np.array_equal(e2m1.unpack(packed), codes)
    assert np.array_equal(packed & 0xF, codes[:, 0::2])


@given(st.integers(0, 15))
def test_a_value_of_the_grid_is_its_own_code(code: int) -> None:
    """Encoding undoes decoding, the sign of zero included."""
    assert e2m1.encode(e2m1.decode(np.array([code], np.uint8))).tolist() == [code]
