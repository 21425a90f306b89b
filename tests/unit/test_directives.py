"""The preprocessor's conditionals, against a real preprocessor where it has an opinion."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkwright.builder import preprocessor


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("#if A\nint a;\n#endif\n", []),
        ("#if A\nint a;\n", [(1, "#if without #endif")]),
        ("int a;\n#endif\n", [(2, "#endif without #if")]),
        ("#ifdef A\n#else\n#elif B\n#endif\n", [(3, "#elif after #else")]),
        ("#if A\n#else\n#else\n#endif\n", [(3, "#else after #else")]),
        ("  #  if A // why\n\t#\tendif\n", []),
        ("#\\\nif A\n#en\\\ndif\n", []),
        ("// #if A\n/* \n#if B\n*/ int a;\n", []),
        ("// continued \\\n#if A\nint a;\n", []),
        ("/* a\n b */ #if A\n#endif\n", []),
        ("int x; /* \n */ #endif\n", []),
        ('const char* s = "\\\n#if A";\n', []),
        ('const char* s = R"cuda(\n#if A\n)cuda";\n', []),
        ('const char* s = R"(\n#if A)";\n#endif\n', [(3, "#endif without #if")]),
        ('const char* s = nameR"(\n#if A\n";\n#endif\n', []),
        ("int million = 1'000'000;\n#if A\n#endif\n", []),
        ("#if 0\nDon't read this\n#endif\n", []),
        ("#include <a'b\"c.h>\n#if A\n#endif\n", []),
        ("%:if A\n%:endif\n", []),
        ("#if A\r\n#endif\r\n", []),
        ("int a;\n/* never ended\n#if A\n", [(2, "a comment does not end")]),
        ('int a;\nauto s = R"(never ended\n#if A\n', [(2, "a raw string does not end")]),
        ("#define STRINGIFY(x) #x\n#pragma once\n#error if endif\n", []),
        ("a = b # if\n", []),
    ],
)
def test_a_directive_is_one_only_where_the_language_has_it_so(text: str, faults: list[tuple[int, str]]) -> None:
    """Comments, literals, raw strings, continued lines and digit separators hide a directive or do not, as [lex.phases] says."""
    assert [(fault.line, fault.what) for fault in preprocessor.balance(text)] == faults


PIECES = st.sampled_from(
    ["#if 1\n", "#if 0\n", "#ifdef X\n", "#ifndef X\n", "#elif 1\n", "#else\n", "#endif\n", "int a = 1'0;\n", "// #endif \\\n",
     "/* x\n", "*/\n", 'const char* s = "#if";\n', 'auto r = R"q(\n', ')q";\n',
     " # endif\n", "#\\\nif 1\n", "\\\n", "/**/ #else\n", "x /*\n*/ #endif\n"]
)  # fmt: skip


@settings(max_examples=40)
@given(st.lists(PIECES, max_size=12).map("".join))
def test_it_finds_fault_with_what_the_real_preprocessor_refuses(text: str) -> None:
    """Of the same text, the scanner complains exactly where the preprocessor does about conditionals, comments or raw strings."""
    done = subprocess.run(["g++", "-std=c++17", "-E", "-x", "c++", "-"], input=text, capture_output=True, text=True, check=False)
    # Stray quotes are a matter of the compiler proper.
    complaints = ("#if", "#else", "#elif", "#endif", "unterminated comment", "unterminated raw", "unterminated #")
    refused = any("error:" in line and any(word in line for word in complaints) for line in done.stderr.splitlines())

    assert bool(preprocessor.balance(text)) == refused, done.stderr
