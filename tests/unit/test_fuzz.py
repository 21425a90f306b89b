"""The fuzzed products: cases whose result is known, and the judge of what a kernel left in its output."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkwright.gates.device import fuzz
from sparkwright.gates.device.fuzz import GUARD, POISON, Case, Words
from sparkwright.gates.numerics import nvfp4

KINDS = ("gemm", "moe", "rounded", "op")


def output(one: Case) -> Words:
    """Return what a kernel without fault leaves: the product in FP32, between untouched guard zones."""
    words = np.full(one.shape[0] * one.shape[1] + 2 * GUARD, POISON, np.uint32)
    words[GUARD:-GUARD] = fuzz.expected(one).astype(np.float32).reshape(-1).view(np.uint32)
    return words


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_makes_the_same_case_again(kind: str) -> None:
    """Kind and seed are all that a report needs for somebody else to have the same bytes."""
    assert fuzz.data(fuzz.case(kind, 7)) == fuzz.data(fuzz.case(kind, 7))
    assert fuzz.data(fuzz.case(kind, 7)) != fuzz.data(fuzz.case(kind, 8))


def test_shapes_cover_what_kernels_trip_over() -> None:
    """Among the cases of the policy's size are odd rows, one row, K that is no multiple of 32, edges of N, and experts without a row."""
    cases = [fuzz.case(kind, seed) for kind in ("gemm", "moe") for seed in range(24)]
    rows, columns, depths, _ = zip(*(one.shape for one in cases), strict=True)
    assert 1 in rows
    assert any(row % 2 and row > 1 for row in rows)
    assert any(column % 8 for column in columns)
    assert any(depth % 32 for depth in depths)
    assert any((np.diff(one.offsets) == 0).any() for one in cases)
    assert all(0.6 < (fuzz.case("gemm", seed).a == 0).mean() < 0.9 for seed in range(5) if fuzz.case("gemm", seed).a.size > 500)


@given(seed=st.integers(0, 10_000), order=st.randoms(use_true_random=False))
def test_exact_cases_are_exact_in_every_order(seed: int, order: object) -> None:
    """Summed in FP32 in any order, an exact case gives the very same bits."""
    one = fuzz.case("gemm", seed)
    a, b = fuzz.activations(one)[0], fuzz._values(one.b, one.b_scales)[0, 0]
    terms = list((a * b).astype(np.float32))
    order.shuffle(terms)  # type: ignore[attr-defined]  # hypothesis' own kind of Random
    total = np.float32(0)
    for term in terms:
        total = np.float32(total + term)
    assert fuzz.exact(one)
    assert np.float32(one.alpha[0] * total) == np.float32(fuzz.expected(one)[0, 0])


def test_activations_of_op_cases_fit_bfloat16_and_quantise_without_loss() -> None:
    """A of an op's case is the same in bfloat16, and quantising it again gives its codes and scales."""
    import ml_dtypes

    for seed in range(6):
        one = fuzz.case("op", seed)
        values = fuzz.activations(one)
        assert (values.astype(ml_dtypes.bfloat16).astype(np.float64) == values).all()
        again = nvfp4.quantise(values.astype(np.float32), np.float32(1))
        assert (again.scales == one.a_scales).all()
        assert (nvfp4.dequantise(again) == values).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_output_has_no_findings(kind: str) -> None:
    """The reference's own result, rounded to FP32, passes in every kind of case."""
    for seed in range(8):
        one = fuzz.case(kind, seed)
        assert fuzz.judge(one, [output(one)] * 3, 1e-5) == ()


def damaged(one: Case, how: str) -> list[Words]:
    """Return two runs, the second of which or both have one damage."""
    first, second = output(one), output(one)
    middle = GUARD + (len(first) - 2 * GUARD) // 2
    for words in (first, second) if how != "varies" else (second,):
        if how == "guard before":
            words[GUARD - 1] = 0
        elif how == "guard after":
            words[-GUARD] = 0
        elif how == "unwritten":
            words[middle] = POISON
        elif how == "nan":
            words[middle] = 0x7FC00000
        elif how == "infinite":
            words[middle] = 0x7F800000
        else:
            words[middle] ^= 1 if how in ("varies", "last bit") else 1 << 30
    return [first, second]


@pytest.mark.parametrize(
    ("how", "wrong"),
    [
        ("guard before", "guard-written"), ("guard after", "guard-written"), ("unwritten", "output-unwritten"), ("nan", "output-nan"),
        ("infinite", "output-wrong"), ("exponent", "output-wrong"), ("last bit", "output-wrong"), ("varies", "output-varies"),
    ],
)  # fmt: skip
def test_each_damage_has_its_name(how: str, wrong: str) -> None:
    """One damaged word is found, by its own name and no other, and the sample says where."""
    one = fuzz.case("gemm", 1)
    found = fuzz.judge(one, damaged(one, how), 1e-5)
    assert [each.wrong for each in found] == [wrong]
    assert "gemm seed 1" in found[0].sample.case
    assert found[0].count == (2 if wrong == "guard-written" else 1)


def test_rounded_cases_have_a_tolerance() -> None:
    """Where sums round, the last bit may differ and a thousandth of the largest value may not."""
    one = fuzz.case("rounded", 0)
    assert not fuzz.judge(one, damaged(one, "last bit"), 1e-5)
    off = output(one)
    values = off[GUARD:-GUARD].view(np.float32)
    values[0] += np.abs(values).max() / 1000
    assert [each.wrong for each in fuzz.judge(one, [off], 1e-5)] == ["output-wrong"]


def test_an_output_of_another_size_is_no_output() -> None:
    """Bytes too few or too many are refused before anything is judged."""
    one = fuzz.case("gemm", 0)
    whole = output(one).tobytes()
    assert [len(runs) for _, runs in fuzz.outputs([one], 1, whole)] == [1]
    for written in (whole[:-4], whole + b"\0\0\0\0", whole[:-1], b""):
        with pytest.raises(ValueError, match="bytes of output"):
            list(fuzz.outputs([one], 1, written))
