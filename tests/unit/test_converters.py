"""Converters compiled for the host, and trees and programs that are wrong, hostile or gone."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.support import converters
from tests.support.converters import HEADER, PYTHON

from sparkwright.core.process import Limits
from sparkwright.gates.core.verdict import Check
from sparkwright.gates.numerics import gate as numerics
from sparkwright.gates.numerics.converters import Converter, ConverterInvalid, Unit, inline_ptx

LIMITS = Limits(seconds=240, memory=1024, written=4)


def judged(
    tmp_path: Path, header: str, call: str = "return convert(x);", seconds: float = 240
) -> Check:
    """Return the check of a converter of two values in *header*."""
    (tmp_path / "tree").mkdir(exist_ok=True)
    (tmp_path / "tree" / "a.hpp").write_text(header, "utf-8")
    unit = Unit("mini", ("a.hpp",), (Converter("bad", "encode", call, lanes=2),))
    limits = Limits(seconds=seconds, memory=1024, written=16)
    policy = numerics.NumericsPolicy(limits, (unit,))
    (check,) = numerics.run({"mini": tmp_path / "tree"}, policy, (), tmp_path / "scratch")
    return check


def test_inline_ptx_keeps_operands_and_their_order() -> None:
    """Instructions become calls, and the expressions of the operands stay as they are."""
    text = (
        '# 1 "/tree/a.h"\nasm volatile("{\\n" ".reg .b8 a, b;\\n"\n'
        '  "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;\\n" "mov.b32 %0, {a, b, b, b};\\n" "}"\n'
        '  : "=r"(out[i].x) : "f"(f(x, 1)), "f"(y));\n# 9 "/usr/b.h"\nasm("nop");\n'
    )
    result = inline_ptx(text, lambda name: name.startswith("/tree"))
    assert "std::uint8_t a, b;" in result
    assert "::sparkwright::cvt_rn_satfinite_e2m1x2_f32(a, (y), (f(x, 1)));" in result
    assert "::sparkwright::mov_b32((out[i].x), a, b, b, b);" in result
    assert result.endswith('asm("nop");\n')


def test_an_asm_statement_without_a_text_is_not_understood() -> None:
    """A statement whose text comes from elsewhere is refused."""
    with pytest.raises(ConverterInvalid, match="not understood"):
        inline_ptx('# 1 "/tree/a.h"\nasm volatile(text : "=r"(x));\n', lambda _: True)


@pytest.mark.parametrize(
    ("ptx", "reason"),
    [
        ("cvt.rz.satfinite.e2m1x2.f32 %0, %2, %1;", "converter-unreadable"),
        ("@p mov.b32 %0, 1;", "converter-unreadable"),
        (".reg .f64 d; mov.b32 %0, d;", "converter-unreadable"),
        ("mov.b32 %0, c;", "converter-uncompilable"),
        (".reg .b8 b; mov.b32 %0, {b, b};", "converter-uncompilable"),
    ],
)
def test_ptx_that_is_not_defined_is_invalid(tmp_path: Path, ptx: str, reason: str) -> None:
    """An instruction, register or size that is not defined on the host is not guessed at."""
    header = (
        "#include <cstdint>\ninline std::uint32_t convert(float (&x)[2]) {\nstd::uint32_t y = 0;\n"
        f'asm volatile("{ptx}" : "=r"(y) : "f"(x[0]), "f"(x[1]));\nreturn y;\n}}\n'
    )
    check = judged(tmp_path, header)
    assert (check.state, check.reason) == ("invalid", reason)


def test_a_header_that_does_not_compile_is_quoted_without_paths(tmp_path: Path) -> None:
    """The check holds the compiler's error, and no path of this machine."""
    check = judged(tmp_path, "inline unsigned convert(float (&x)[2]) { return missing_name; }")
    assert (check.state, check.reason) == ("invalid", "converter-uncompilable")
    assert "missing_name" in check.message
    assert str(tmp_path) not in check.message


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("for (volatile bool on = true; on;) {}", "converter-slow"),
        ("std::abort();", "converter-crashed"),
        ("std::exit(0);", "converter-output"),
        ('for (;;) std::fputs("more and more", stderr);', "converter-crashed"),
        (
            "for (std::size_t n = 1 << 20;; n *= 2) std::memset(new char[n], 1, n);",
            "converter-crashed",
        ),
    ],
)
def test_a_converter_without_results_is_invalid(tmp_path: Path, body: str, reason: str) -> None:
    """One that loops, crashes, writes too little or without end, or takes all memory is ended."""
    includes = "#include <cstdio>\n#include <cstdlib>\n#include <cstring>\n"
    header = f"{includes}inline unsigned convert(float (&)[2]) {{ {body} return 0; }}"
    check = judged(tmp_path, header, seconds=20 if reason == "converter-slow" else 240)
    assert (check.state, check.reason) == ("invalid", reason)


def test_a_file_that_is_gone_fails(tmp_path: Path) -> None:
    """A header that the policy names and the tree does not have is a failure."""
    tree = converters.tree(tmp_path / "tree")
    (tree / HEADER).unlink()
    checks = numerics.run({"mini": tree}, converters.only("mini"), (), tmp_path / "scratch")
    assert [(check.state, check.reason) for check in checks] == [("fail", "converter-missing")]


@pytest.mark.parametrize("name", [HEADER, "csrc/values.cuh", PYTHON])
def test_a_link_that_leaves_the_tree_is_not_followed(tmp_path: Path, name: str) -> None:
    """A file that is a link to elsewhere, named or included, is invalid."""
    tree = converters.tree(tmp_path / "tree")
    outside = tmp_path / "outside.hpp"
    (tree / name).rename(outside)
    (tree / name).symlink_to(outside)
    checks = numerics.run({"mini": tree}, converters.POLICY, (), tmp_path / "scratch")
    wrong = {check.name for check in checks if check.reason == "converter-outside"}
    python = {"mini-python-table", "mini-dsl-sweep"}
    assert wrong == (python if name == PYTHON else {check.name for check in checks} - python)


def test_nothing_that_a_converter_starts_goes_on(tmp_path: Path) -> None:
    """A process that a converter starts in the background ends with the call."""
    header = (
        "#include <cstdlib>\n#include <unistd.h>\ninline unsigned convert(float (&)[2]) {\n"
        'if (!fork()) { execl("/bin/sleep", "sleep", "318", nullptr); }\nstd::exit(7);\n}\n'
    )
    assert judged(tmp_path, header).reason == "converter-crashed"
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _sleeping():
        time.sleep(0.05)
    assert not _sleeping()


def _sleeping() -> bool:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline() == ["sleep", "318"] and process.uids().real == os.getuid():
                return process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 1", "converter-missing"),
        ("VALUES = make()\ndef convert(): pass\n", "converter-unreadable"),
        ("VALUES = [1, 2, 3, x]\ndef convert(): pass\n", "converter-unreadable"),
        ("VALUES = [" + "(" * 100_000 + "]\ndef convert(", "converter-unreadable"),
    ],
)
def test_python_without_the_values_is_told_apart(tmp_path: Path, text: str, reason: str) -> None:
    """A table or template that is gone fails; one that is not understood is invalid."""
    tree = converters.tree(tmp_path / "tree", {PYTHON: text})
    policy = numerics.NumericsPolicy(LIMITS, (converters.TABLE, converters.TEMPLATE))
    checks = numerics.run({"mini": tree}, policy, (), tmp_path / "scratch")
    state = "fail" if reason == "converter-missing" else "invalid"
    assert {(check.state, check.reason) for check in checks} == {(state, reason)}


def test_a_converter_that_is_gone_leaves_the_others(tmp_path: Path) -> None:
    """The converters beside one whose name is gone are judged."""
    text = converters.CPP.replace("unsigned encode(", "unsigned other_encode(", 1)
    text = text.replace("{encode(x[i] * by)}", "{other_encode(x[i] * by)}")
    tree = converters.tree(tmp_path / "tree", {HEADER: text})
    policy = converters.only("mini", "mini-value")
    checks = numerics.run({"mini": tree}, policy, (), tmp_path / "scratch")
    assert [check.state for check in checks] == ["fail", "pass"]
    assert checks[0].reason == "converter-missing"
    assert np.isclose(checks[1].figures[1].value, 16)
