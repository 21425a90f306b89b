"""Verdicts on units, and the causes of wrong ones, on records and on a real configure of a miniature with vLLM's shape."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
from tests.refusals import refusal

from sparkwright.builder import configure
from sparkwright.builder.arch import plan
from sparkwright.builder.arch import rules as archs
from sparkwright.builder.arch.plan import ArchPlan, PlanComparison
from sparkwright.builder.arch.rules import ArchException, ArchRule, ArchRules, DroppedUnits
from sparkwright.builder.configure import Call, Configured, TranslationUnit
from sparkwright.builder.sandbox import Sandbox
from sparkwright.core import process

NATIVE = ("compute_121f:sm_121f",)
PTX80 = ("compute_80:compute_80", "compute_80:sm_80")

#: Arch lists per toolkit, an intersection that folds, one list per kernel: the shape of vLLM's CMakeLists, in other words.
TEXT = """\
cmake_minimum_required(VERSION 3.26)
project(mini LANGUAGES CXX CUDA)
set(CMAKE_CUDA_ARCHITECTURES OFF)
include(${CMAKE_CURRENT_LIST_DIR}/lists.cmake)

if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 99)
  set(KNOWN_ARCHS "8.0;12.0;99.0")
elseif(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.9)
  set(KNOWN_ARCHS "8.0;12.0")
else()
  set(KNOWN_ARCHS "8.0")
endif()

set(ARCHS $ENV{MINI_ARCHS})
meet(ARCHS "${KNOWN_ARCHS}" "${ARCHS}")

set(CORE_SRCS "core.cu" "more.cu")
give_archs(SRCS "${CORE_SRCS}" CUDA_ARCHS "${ARCHS}")

meet(FP4_ARCHS "12.0f;12.1f" "${ARCHS}")
give_archs(SRCS "fp4.cu" CUDA_ARCHS "${FP4_ARCHS}")

meet(REPACK_ARCHS "8.0+PTX" "${ARCHS}")
file(GLOB REPACK_SRCS "${CMAKE_CURRENT_SOURCE_DIR}/repack/*.cu")
give_archs(SRCS "${REPACK_SRCS}" CUDA_ARCHS "${REPACK_ARCHS}")

add_library(mini OBJECT ${CORE_SRCS} fp4.cu ${REPACK_SRCS})
"""

LISTS = r"""
# Result: each requested arch where the list has it or its family (N.0f), else the highest entry below it; older ones only as PTX.
function(meet OUT LIST WANTED)
  set(RESULT)
  foreach(want ${WANTED})
    string(REGEX REPLACE "[af]$" "" bare "${want}")
    string(REGEX REPLACE "\\..*" "" major "${want}")
    set(best)
    foreach(have ${LIST})
      string(REGEX REPLACE "\\+PTX$" "" number "${have}")
      string(REGEX REPLACE "\\..*" "" family "${number}")
      if(have STREQUAL want OR have STREQUAL bare OR (have MATCHES "f$" AND family STREQUAL major))
        set(best "${want}")
      elseif(number VERSION_LESS_EQUAL bare AND (family STREQUAL major OR have MATCHES "PTX"))
        set(best "${have}")
      endif()
    endforeach()
    list(APPEND RESULT ${best})
  endforeach()
  set(${OUT} ${RESULT} PARENT_SCOPE)
endfunction()

function(give_archs)
  cmake_parse_arguments(arg "" "" "SRCS;CUDA_ARCHS" ${ARGN})
  foreach(arch ${arg_CUDA_ARCHS})
    string(REGEX REPLACE "[.]|\\+PTX" "" number "${arch}")
    set(flags -gencode arch=compute_${number},code=sm_${number})
    if(arch MATCHES "PTX")
      list(APPEND flags -gencode arch=compute_${number},code=compute_${number})
    endif()
    set_property(SOURCE ${arg_SRCS} APPEND PROPERTY COMPILE_OPTIONS "$<$<COMPILE_LANGUAGE:CUDA>:${flags}>")
  endforeach()
endfunction()
"""

RULES = ArchRules(
    rules=(
        ArchRule(
            name="known", fork="mini", file="CMakeLists.txt", command="set", where=("KNOWN_ARCHS",), argument=1, expect="8.0;12.0",
            append=("12.1",), under=("VERSION_GREATER_EQUAL 12.9",), reason="12.1 folds to 12.0", drop_when="listed",
        ),
        ArchRule(
            name="repack", fork="mini", file="CMakeLists.txt", command="meet", where=("REPACK_ARCHS",), argument=1, expect="8.0+PTX",
            append=("12.0f",), reason="nothing in it is special", drop_when="listed",
        ),
    ),
)  # fmt: skip
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


class Tree:
    """The miniature on disk, configured once for each set of rules and request."""

    def __init__(self, root: Path, cuda_bin: Path, cuda_env: Path) -> None:
        self.root, self.cuda_bin, self.cuda_env = root, cuda_bin, cuda_env
        self._numbers = itertools.count()

    def judge(self, applied: ArchRules, *, request: str = "12.1f", rules: ArchRules = RULES, text: str = TEXT) -> ArchPlan:
        folder = self.root / f"tree{next(self._numbers)}"
        (folder / "repack").mkdir(parents=True)
        for name in ("core.cu", "more.cu", "fp4.cu", "repack/one.cu"):
            (folder / name).write_text(f"__global__ void {Path(name).stem}() {{}}\n")
        (folder / "lists.cmake").write_text(LISTS)
        files, sites = archs.rewrite({"CMakeLists.txt": text.encode()}.get, applied.rules)
        (folder / "CMakeLists.txt").write_bytes(files.get("CMakeLists.txt", text.encode()))
        found = configure.configure(
            folder, folder.with_suffix(".build"), log=folder.with_suffix(".log"), cmake=self.cuda_env / "bin" / "cmake", targets=("mini",), sandbox=Sandbox.create({}),
            env=process.clean_environment(CUDACXX=str(self.cuda_bin / "nvcc"), MINI_ARCHS=request),
            defines={"CMAKE_BUILD_TYPE": "Release", "CMAKE_MAKE_PROGRAM": str(self.cuda_env / "bin" / "ninja")},
        )  # fmt: skip
        return plan.examine(found, arch="12.1f", rules=rules, fork="mini", read=lambda name: (folder / name).read_bytes(), sites=sites)


@pytest.mark.toolchain
def test_the_rules_make_every_unit_native_and_a_missing_one_is_named(tmp_path: Path, cuda_bin: Path, cuda_env: Path) -> None:
    tree = Tree(tmp_path, cuda_bin, cuda_env)
    after, before = tree.judge(RULES), tree.judge(ArchRules())
    plan.check(PlanComparison("", after, before))
    assert [(site.rule, site.line) for site in after.sites] == [("known", 9), ("repack", 23)]
    assert before.counts == {"folded": 3, "foreign": 1}
    assert str(tmp_path) not in msgspec.json.encode(before).decode()

    with refusal("arch-mismatch", match="4 of 4") as caught:
        plan.check(PlanComparison("", tree.judge(ArchRules(rules=RULES.rules[1:])), before))
    text = "\n".join(caught.value.details)
    assert "CMakeLists.txt:15: meet(ARCHS 8.0;12.0 12.1f)" in text
    assert "CMakeLists.txt:9: set(KNOWN_ARCHS 8.0;12.0)" in text
    assert {"core.cu", "more.cu", "fp4.cu", "repack/one.cu"} <= set(text.split())
