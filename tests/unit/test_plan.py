"""Verdicts on units, and the causes of wrong ones, on records."""

from __future__ import annotations

import pytest
from tests.refusals import refusal

from sparkwright.builder.arch import plan
from sparkwright.builder.arch.plan import ArchPlan, PlanComparison
from sparkwright.builder.arch.rules import ArchException, ArchRules, DroppedUnits
from sparkwright.builder.configure import Call, Configured, TranslationUnit

NATIVE = ("compute_121f:sm_121f",)
PTX80 = ("compute_80:compute_80", "compute_80:sm_80")


def plans(*units: tuple[str, ...], rules: ArchRules | None = None, calls: tuple[Call, ...] = (), text: str = "") -> ArchPlan:
    """Examine units of the target ``t`` whose gencodes are *units*; their sources are a.cu, b.cu, …"""
    made = tuple(TranslationUnit("t", f"{letter}.cu", gencode) for letter, gencode in zip("abcdefgh", units, strict=False))
    configured = Configured(made, calls)
    read = {"CMakeLists.txt": text.encode()}.get
    return plan.examine(configured, arch="12.1f", rules=rules or ArchRules(), fork="mini", read=read)


@pytest.mark.parametrize(
    ("gencode", "verdict"),
    [
        (NATIVE, "native"),
        (("compute_120f:sm_120f",), "folded"),
        (("compute_121:sm_121",), "folded"),
        (("compute_121a:sm_121a",), "folded"),
        (("compute_121:compute_121", "compute_121f:compute_121f", "compute_121f:sm_121f"), "folded"),
        (PTX80, "foreign"),
        (("compute_80:compute_80",), "foreign"),
        (("compute_90a:sm_90a",), "foreign"),
        (("native:native",), "foreign"),
        ((), "none"),
    ],
)
def test_verdicts(gencode: tuple[str, ...], verdict: str) -> None:
    found = plans(gencode, NATIVE)
    assert found.units[0].verdict == verdict


def kept(unit: str, gencode: str = "compute_80") -> ArchRules:
    return ArchRules(kept=(ArchException("mini", unit, "why not", gencode),))


def dropped(unit: str) -> ArchRules:
    return ArchRules(dropped=(DroppedUnits("mini", unit, "a trap on this device"),))


def test_units_that_are_kept_or_dropped_pass_with_their_reason(capsys: pytest.CaptureFixture[str]) -> None:
    found = plans(PTX80, NATIVE, rules=kept("a.cu"))
    plan.check(PlanComparison("", found, found))
    assert (found.units[0].verdict, found.units[0].reason) == ("kept", "why not")
    assert plans((), NATIVE, rules=kept("a.cu", "default")).units[0].verdict == "kept"
    before, after = plans(NATIVE, PTX80, rules=dropped("b.cu")), plans(NATIVE, rules=dropped("b.cu"))
    plan.check(PlanComparison("", after, before))
    plan.show(PlanComparison("", after, before))
    assert "a trap on this device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("units", "rules", "detail"),
    [
        *(
            ([gencode], kept("a.cu"), "kept: a.cu is listed at compute_80")
            for gencode in (("compute_80:sm_80",), ("compute_90:compute_90",), (*PTX80, "compute_90:sm_90"), ())
        ),
        ([PTX80], ArchRules(), "a.cu"),
        ([PTX80], kept("a.cu", "default"), "kept: a.cu is listed at default"),
        ([NATIVE], kept("gone/*.cu"), "kept: gone/*.cu matches no CUDA unit"),
        ([NATIVE], kept("?.cu"), "but CMake gives it compute_121f:sm_121f"),
        ([NATIVE], dropped("a.cu"), "dropped: a.cu is compiled"),
        ([], ArchRules(), "a.cu (compute_121f:sm_121f)"),
    ],
)  # fmt: skip
def test_a_plan_that_breaks_the_rules_is_refused(units: list[tuple[str, ...]], rules: ArchRules, detail: str) -> None:
    with refusal("arch-mismatch", match=r"of mini would|not true for mini") as caught:
        plan.check(PlanComparison("", plans(*units, rules=rules), plans(NATIVE)))
    assert any(detail in line for line in caught.value.details)


SET = (1, "set", "MINE", "120f")


@pytest.mark.parametrize(
    ("text", "calls", "deciding"),
    [
        (
            'set(MINE "120f")\nset_target_properties(t PROPERTIES CUDA_ARCHITECTURES "${MINE}")\n',
            [SET, (2, "set_target_properties", "t", "PROPERTIES", "CUDA_ARCHITECTURES", "120f")],
            ["2: set_target_properties(t 120f)", "1: set(MINE 120f)"],
        ),
        (
            'set(CMAKE_CUDA_ARCHITECTURES "120f")\n',
            [(1, "set", "CMAKE_CUDA_ARCHITECTURES", "120f")],
            ["1: set(CMAKE_CUDA_ARCHITECTURES 120f)"],
        ),
        ("", [], []),
        (
            'set(MINE "120f")\nlist(APPEND MINE ${ALL})\nset(OTHER 120f)\ngive(a.cu ${MINE})\n',
            [SET, (2, "list", "APPEND", "MINE", "12.0"), (3, "set", "OTHER", "120f"), (4, "give", "a.cu", "-arch=sm_120f;12.0")],
            ["4: give(a.cu -arch=sm_120f;12.0)", "2: list(APPEND 12.0)", "1: set(MINE 120f)"],
        ),
    ],
)  # fmt: skip
def test_the_calls_that_decided_an_arch_are_named(text: str, calls: list[tuple[int | str, ...]], deciding: list[str]) -> None:
    made = tuple(Call("CMakeLists.txt", int(line), str(name), tuple(map(str, values))) for line, name, *values in calls)
    (unit,) = plans(("compute_120f:sm_120f",), calls=made, text=text).units
    assert unit.calls == tuple(f"CMakeLists.txt:{line}" for line in deciding)
