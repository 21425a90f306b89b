"""Converters compiled for the host: what the evaluator of inline PTX makes of a tree, and what becomes of trees that are bad."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.refusals import refusal
from tests.support import converters
from tests.support.converters import HEADER

from sparkwright.core import process
from sparkwright.core.process import Limits
from sparkwright.gates.core.verdict import Check
from sparkwright.gates.numerics import e2m1, inlineasm
from sparkwright.gates.numerics import gate as numerics
from sparkwright.gates.numerics.converter import Program
from sparkwright.gates.numerics.units import Converter, Unit, dtypes

PATIENT = Limits(seconds=240, memory=4096, written=64)


@pytest.fixture(scope="module", name="program")
def _program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Return the sound tree's converters, compiled."""
    folder = tmp_path_factory.mktemp("sound")
    (folder / "scratch").mkdir()
    return Program(converters.UNIT, converters.tree(folder / "tree"), (), folder / "scratch", PATIENT)


def named(name: str) -> Converter:
    """Return a converter of the sound tree."""
    return next(one for one in converters.UNIT.converters if one.name == name)


@settings(max_examples=25)
@given(hnp.arrays(np.uint32, st.tuples(st.integers(1, 64), st.just(8)), elements=st.integers(0, 2**32 - 1)))
def test_inline_ptx_is_evaluated_as_it_is_written(program: Program, bits: np.ndarray) -> None:
    """For any eight floats, the asm statement of a header gives the codes of the reference, NaN and −0 among them, each in its place."""
    one = named("mini-vec8")
    asked = np.empty(len(bits), dtypes(one)[0])
    asked["bits"] = bits

    packed = program.call(one, asked)

    assert np.array_equal(packed.astype("<u4").view(np.uint8), e2m1.pack(e2m1.encode(bits.view(np.float32))).reshape(-1))


def of(name: str, checks: Sequence[Check]) -> list[Check]:
    """Return the checks of the converter *name*, or of all that begin so."""
    return [check for check in checks if check.name.startswith(name)]


STATEMENT = """
inline std::uint32_t convert_{index}(float (&x)[2]) {{
  std::uint32_t made = 0;
  asm volatile({text} : {operands});
  return made;
}}
"""
OPERANDS = '"=r"(made) : "f"(x[0]), "f"(x[1])'

#: PTX that the evaluator does not know, or that is wrong → what it says.
UNKNOWN = {
    "cvt.rz.satfinite.e2m1x2.f32 %0, %2, %1;": "instruction cvt.rz.satfinite.e2m1x2.f32",
    ".reg .b8 b; mov.b32 %0, {b, 0, 0, 0};": "b is read before it is written",
    "cvt.rn.satfinite.e2m1x2.f32 %0, %2, %1;": "%0 has another size",
    ".reg .b8 b; cvt.rn.satfinite.e2m1x2.f32 b, %3, %1;": "no operand %3",
    "mov.b32 %1, 0;": "%1 is only read",
    "mov.b32 %0, c;": "no register c",
    "mov.b32 %0, 0x1": "a statement without an end",
    "mov.b32 %0, 0x1g;": "constant 0x1g",
    "@p mov.b32 %0, 1;": "instruction @p",
    ".reg .b7 b;": "type .b7",
    "mov.b32 {%0, %0}, {0, 0};": "mov.b32 between vectors",
}


def judged(tmp_path: Path, header: str, call: str = "return convert(x);", limits: Limits = PATIENT) -> Check:
    """Return the first check of a converter of two values in *header*."""
    (tmp_path / "tree").mkdir(exist_ok=True)
    (tmp_path / "tree" / "a.hpp").write_text(header, "utf-8")
    one = Converter("bad", "encode", call, lanes=2)
    policy = numerics.NumericsPolicy(limits, (Unit("mini", ("a.hpp",), (one,)),))
    mine = of("bad", numerics.run({"mini": tmp_path / "tree"}, policy, (), tmp_path / "scratch"))
    assert [check.name for check in mine] == [
        "bad-packing", "bad-bf16-sweep", "bad-fp16-sweep", "bad-fp32-ties", "bad-nan", "bad-negative-zero",
    ]  # fmt: skip
    assert {check.state for check in mine} <= {"invalid", "fail"}
    return mine[0]


@pytest.fixture(scope="module", name="unknown")
def _unknown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Check, ...]:
    """Return the checks of a header with one converter for each text of `UNKNOWN`."""
    folder = tmp_path_factory.mktemp("unknown")
    (folder / "tree").mkdir()
    functions = [STATEMENT.format(index=i, text=f'"{text}"', operands=OPERANDS) for i, text in enumerate(UNKNOWN)]
    (folder / "tree" / "a.hpp").write_text("#include <cstdint>\n" + "".join(functions), "utf-8")
    wrong = tuple(Converter(f"bad-{i}", "encode", f"return convert_{i}(x);", lanes=2) for i in range(len(UNKNOWN)))
    policy = numerics.NumericsPolicy(PATIENT, (Unit("mini", ("a.hpp",), wrong),))
    return numerics.run({"mini": folder / "tree"}, policy, (), folder / "scratch")


@pytest.mark.parametrize("text", UNKNOWN)
def test_ptx_that_is_not_known_is_invalid(unknown: tuple[Check, ...], text: str) -> None:
    """An instruction, register, constant or operand that the evaluator does not know is converter-unreadable, by its name."""
    check = of(f"bad-{list(UNKNOWN).index(text)}-", unknown)[0]

    assert (check.state, check.reason) == ("invalid", "converter-unreadable")
    assert UNKNOWN[text] in check.message


@pytest.mark.parametrize(("text", "operands"), [("text_from_elsewhere", OPERANDS), ('"mov.b32 %0, 1;"', '"=r" made')])
def test_a_statement_that_is_not_understood_is_invalid(tmp_path: Path, text: str, operands: str) -> None:
    """An asm statement without a text, or with an operand of another form, is not guessed at."""
    header = "#include <cstdint>\n" + STATEMENT.format(index=0, text=text, operands=operands)
    check = judged(tmp_path, header, call="return convert_0(x);")

    assert (check.state, check.reason) == ("invalid", "converter-unreadable")
    assert "an asm statement is not understood" in check.message


def test_a_header_that_does_not_compile_is_invalid_with_the_compilers_words(tmp_path: Path) -> None:
    """The check holds the error, and no path of this machine."""
    check = judged(tmp_path, "inline unsigned convert(float (&x)[2]) { return missing_name; }")

    assert (check.state, check.reason) == ("invalid", "converter-uncompilable")
    assert "a.hpp" in check.message
    assert "missing_name" in check.message
    assert str(tmp_path) not in check.message


@pytest.mark.parametrize(
    ("body", "reference", "says"),
    [
        ("for (volatile bool on = true; on;) {}", "converter-slow", "did not end within 5 s"),
        ("std::abort();", "converter-crashed", "signal 6"),
        ("std::exit(7);", "converter-crashed", "status 7"),
        ("std::exit(0);", "converter-output", "wrote 0 bytes"),
        ("for (;;) std::fputs(\"more and more\", stderr);", "converter-crashed", "signal 25"),
        ("for (std::size_t size = 1 << 20;; size *= 2) std::memset(new char[size], 1, size);", "converter-crashed", "bad_alloc"),
    ],
)  # fmt: skip
def test_a_converter_that_does_not_answer_is_invalid(tmp_path: Path, body: str, reference: str, says: str) -> None:
    """A converter that loops, crashes, writes too little or without end, or takes all memory is ended within its limits and named."""
    includes = "#include <cstdio>\n#include <cstdlib>\n#include <cstring>\n"
    header = f"{includes}inline unsigned convert(float (&)[2]) {{ {body} return 0; }}"
    check = judged(tmp_path, header, limits=Limits(seconds=5 if "slow" in reference else 240, memory=1024, written=4))

    assert (check.state, check.reason) == ("invalid", reference)
    assert says in check.message


def test_a_program_that_writes_more_than_it_was_asked_is_invalid(tmp_path: Path) -> None:
    """Answers that are not as many as the inputs are not judged."""
    header = """
#include <cstdio>
#include <fstream>
#include <string>
inline std::string made;
struct Late { ~Late() { std::ofstream(made, std::ios::app) << "more"; } };
inline Late late;
inline unsigned convert(float (&)[2]) { return 0; }
"""
    check = judged(tmp_path, header, call='made = "bad.out"; return convert(x);')

    assert (check.state, check.reason) == ("invalid", "converter-output")


def test_a_file_that_is_gone_fails(tmp_path: Path) -> None:
    """A header that the policy names and the tree does not have is a failure, not a row that did not run."""
    tree = converters.tree(tmp_path / "tree")
    (tree / HEADER).unlink()

    checks = of("mini", numerics.run({"mini": tree}, converters.only("mini"), (), tmp_path / "scratch"))

    assert {(check.state, check.reason) for check in checks} == {("fail", "converter-missing")}


@pytest.mark.parametrize("name", [HEADER, "csrc/values.cuh"])
def test_a_link_that_leaves_the_tree_is_not_followed(tmp_path: Path, name: str) -> None:
    """A header of the tree that is a link to elsewhere, named or included, is invalid, and what it leads to is as it was."""
    tree = converters.tree(tmp_path / "tree")
    outside = tmp_path / "outside.hpp"
    outside.write_text((tree / name).read_text())
    before = outside.stat()
    (tree / name).unlink()
    (tree / name).symlink_to(outside)

    checks = of("mini", numerics.run({"mini": tree}, converters.only("mini"), (), tmp_path / "scratch"))

    assert {(check.state, check.reason) for check in checks} == {("invalid", "converter-outside")}
    assert (outside.stat().st_mtime_ns, outside.stat().st_size) == (before.st_mtime_ns, before.st_size)


def test_nothing_is_written_into_the_tree(tmp_path: Path) -> None:
    """A tree that nobody may write to is judged as any other, and holds the same files afterwards."""
    tree = converters.tree(tmp_path / "tree")
    before = {path: path.stat().st_mtime_ns for path in tree.rglob("*")}

    numerics.run({"mini": tree}, converters.only("mini"), (), tmp_path / "scratch")

    assert {path: path.stat().st_mtime_ns for path in tree.rglob("*")} == before


def test_headers_that_are_not_here_are_said(tmp_path: Path) -> None:
    """Without CUDA's headers the checks of what needs them are not run, each by its name."""
    unit = Unit("", ("cuda_fp4.h",), (Converter("cuda", "encode", "return 0;"),), headers=("cuda_runtime.h",))

    checks = numerics.run({}, numerics.NumericsPolicy(PATIENT, (unit,)), (), tmp_path)

    mine = of("cuda", checks)
    assert [check.name for check in mine] == ["cuda-bf16-sweep", "cuda-fp16-sweep", "cuda-fp32-ties", "cuda-nan", "cuda-negative-zero"]
    assert {(check.state, check.reason) for check in mine} == {("not-run", "headers-missing")}
    assert "cuda_runtime.h, cuda_fp4.h" in mine[0].message


def test_a_child_takes_nothing_with_it_that_lives_on(tmp_path: Path) -> None:
    """What a child starts in the background is ended with it."""
    log = tmp_path / "log"
    ended = process.run_limited(["sh", "-c", "sleep 600 & echo $!"], PATIENT, log)

    assert (ended.status, ended.late) == (0, False)
    deadline = time.monotonic() + 60
    # The signal arrives when the orphan is next scheduled; it may then be a zombie until whoever inherits it looks.
    while psutil.pid_exists(int(ended.tail)) and psutil.Process(int(ended.tail)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_program_that_does_not_exist_is_said(tmp_path: Path) -> None:
    """Without a C++ compiler, G1 cannot be set up, and that is no verdict."""
    with refusal("tool-missing"):
        process.run_limited([str(tmp_path / "none")], PATIENT, tmp_path / "log")


@given(st.text(alphabet="asmASM_ \n\t(){}:;,\"'\\xyz#/%=+r1").filter(lambda text: "asm" not in text))
def test_text_without_asm_stays_as_it_is(text: str) -> None:
    """Nothing but asm statements is rewritten."""
    assert inlineasm.rewrite(f'# 1 "/t/a.h"\n{text}', lambda _: True) == f'# 1 "/t/a.h"\n{text}'


@given(st.text(alphabet="asm \n(){}:;,\"'\\r1%=", max_size=60))
def test_any_text_is_rewritten_or_refused(text: str) -> None:
    """Whatever stands after the word, the rewriting ends, with text or with Unparsed."""
    with contextlib.suppress(inlineasm.Unparsed):
        assert inlineasm.rewrite(f'# 1 "/t/a.h"\nasm {text}', lambda _: True).startswith("# 1")


def test_only_statements_of_the_tree_are_rewritten() -> None:
    """An asm statement of a system header, a string or a character that holds the word, and the empty sections of a statement."""
    text = (
        '# 1 "/t/a.h"\nauto s = "asm(x)", t = R"-(asm(y) ")-"; char c = \'"\';\n'
        'asm volatile("a %0;" "b" : "=r"(x ? f::y : z) : "r"(g(1, 2)), "n"(N) : "memory");\nasm("st;" ::"l"(p));\n'
        '# 1 "/usr/include/b.h"\nextern int f() __asm__("g");\n'
    )

    made = inlineasm.rewrite(text, lambda name: name.startswith("/t/"))

    access = "::sparkwright::ptx::"
    assert made == (
        '# 1 "/t/a.h"\nauto s = "asm(x)", t = R"-(asm(y) ")-"; char c = \'"\';\n'
        f'{access}execute("a %0;" "b", {{{access}write(x ? f::y : z), {access}read(g(1, 2)), {access}read(N)}});\n'
        f'{access}execute("st;", {{{access}read(p)}});\n'
        '# 1 "/usr/include/b.h"\nextern int f() __asm__("g");\n'
    )


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_in_place_of_a_header_does_not_hang(tmp_path: Path) -> None:
    """A header that never ends ends the compiler after its time."""
    tree = converters.tree(tmp_path / "tree")
    (tree / "csrc/values.cuh").unlink()
    os.mkfifo(tree / "csrc/values.cuh")

    checks = numerics.run({"mini": tree}, converters.only("mini", seconds=1), (), tmp_path / "scratch")

    assert {check.reason for check in of("mini", checks)} <= {"converter-slow", "converter-uncompilable"}


def test_a_name_that_is_gone_fails_and_the_others_are_judged(tmp_path: Path) -> None:
    """A function that the policy calls and the header has no more is a failure of that converter, and of no other in the header."""
    text = converters.CPP.replace("float value(unsigned code)", "float renamed(unsigned code)")
    tree = converters.tree(tmp_path / "tree", {HEADER: text})

    checks = numerics.run({"mini": tree}, converters.only("mini-value", "mini-layout"), (), tmp_path / "scratch")

    states = {check.name: (check.state, check.reason) for check in of("mini", checks)}
    assert states == {"mini-value-table": ("fail", "converter-missing"), "mini-layout-swizzle": ("pass", "")}
