"""What a GPU gets from device code: NVIDIA's rules of loading, over all combinations of targets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkwright.audit import gpu_compat
from sparkwright.audit.gpu_compat import FP4_KERNELS

SPARK = (12, 1)
SUFFIXES = ("", "a", "f")
TARGETS = [f"sm_{number}{suffix}" for number in (75, 80, 89, 90, 100, 103, 110, 120, 121, 122) for suffix in SUFFIXES]

#: The table of gates.md §4.1, and what follows from the same rules for the rest.
LOADS = {"sm_120", "sm_120f", "sm_121", "sm_121a", "sm_121f"}
COMPILES = {"sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121", "sm_120f", "sm_121f", "sm_121a"}


@pytest.mark.parametrize("target", TARGETS)
def test_a_spark_loads_and_compiles_what_nvidia_s_rules_say(target: str) -> None:
    """Machine code of its own generation and not newer, ``a`` for 12.1 alone; PTX that is not newer, ``f`` within the family."""
    assert gpu_compat.loads(target, SPARK) is (target in LOADS)
    assert gpu_compat.compiles(target, SPARK) is (target in COMPILES)


@pytest.mark.parametrize(
    ("cubins", "ptx", "expected"),
    [
        (["sm_121f"], [], ("native", "sm_121f")),
        (["sm_121a"], [], ("native", "sm_121a")),
        (["sm_120f"], [], ("family", "sm_120f")),
        (["sm_120"], [], ("plain", "sm_120")),
        (["sm_121"], [], ("plain", "sm_121")),
        (["sm_120", "sm_120f", "sm_121f"], ["sm_80"], ("native", "sm_121f")),
        (["sm_120f", "sm_121"], [], ("plain", "sm_121")),
        (["sm_120a"], [], ("nothing", "")),
        (["sm_120a"], ["sm_120"], ("jit", "sm_120")),
        (["sm_80", "sm_90a"], ["sm_80", "sm_90"], ("jit", "sm_90")),
        (["sm_80"], ["sm_90a", "sm_120a", "sm_100f"], ("nothing", "")),
        ([], ["sm_121a"], ("jit", "sm_121a")),
        ([], [], ("nothing", "")),
        (["garbage", "sm_"], ["sm_x"], ("nothing", "")),
    ],
)
def test_the_nearest_machine_code_comes_before_ptx(cubins: list[str], ptx: list[str], expected: tuple[str, str]) -> None:
    assert gpu_compat.chosen(cubins, ptx, SPARK) == expected


@given(st.lists(st.sampled_from(TARGETS)), st.lists(st.sampled_from(TARGETS)), st.tuples(st.integers(7, 13), st.integers(0, 3)))
def test_more_forms_never_give_less(cubins: list[str], ptx: list[str], device: tuple[int, int]) -> None:
    """A unit with PTX besides gives at least what its cubins give, on any GPU."""
    order = list(gpu_compat.GAINS)
    assert order.index(gpu_compat.chosen(cubins, ptx, device)[0]) <= order.index(gpu_compat.chosen(cubins, [], device)[0])
    assert gpu_compat.chosen(cubins, ptx, device) == gpu_compat.chosen(list(reversed(cubins)), list(reversed(ptx)), device)


def test_units_are_counted_and_told() -> None:
    found = gpu_compat.of_units([(["sm_120f", "sm_90"], []), (["sm_120"], ["sm_80"]), ([], ["sm_80"]), (["sm_90a"], [])], SPARK)

    assert found.units == {"family": 1, "plain": 1, "jit": 1, "nothing": 1}
    assert (found.device, found.targets, found.jit) == ("12.1", {"sm_120": 1, "sm_120f": 1}, {"sm_80": 1})
    assert found.says == "1 family, 1 plain, 1 jit (1 for other GPUs alone)"
    assert gpu_compat.of_units([(["sm_90a"], [])], SPARK).says == "nothing for this GPU"
    assert gpu_compat.of_units([], SPARK).says == "no device code"


@pytest.mark.parametrize(
    ("kernels", "instructions", "traps", "expected"),
    [(0, {}, 0, "no-kernels"), (2, {"OMMA": 4}, 0, "instructions"), (2, {"OMMA": 4}, 1, "traps"), (2, {"OMMA": 0}, 0, "no-instructions")],
)
def test_fp4_is_told_by_instructions_and_traps(kernels: int, instructions: dict[str, int], traps: int, expected: str) -> None:
    assert gpu_compat.fp4(kernels, instructions, traps) == expected
    assert expected in gpu_compat.FP4


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("_ZN4vllm15cvt_fp16_to_fp4I6__halfEEv", True),
        ("_ZN7cutlass13device_kernelINS_MainloopSm120TmaWarpSpecializedBlockScaledNS_12float_e2m1_tE", True),
        ("_ZN7cutlass13device_kernelINS_MainloopSm100ArrayTmaUmmaWarpSpecializedBlockScaledNS_12float_e2m1_tE", False),
        ("_ZN4vllm8rms_normE", False),
    ],
)
def test_fp4_kernels_are_known_by_name(name: str, named: bool) -> None:
    """A kernel of CUTLASS for SM 10.0 alone is not one, although it is compiled for SM 12.x too: it is full of traps there."""
    assert bool(FP4_KERNELS.search(name)) is named
