"""CMake text: what is read of it, and that an edit changes nothing else."""

from __future__ import annotations

import pytest
from tests.refusals import refusal

from sparkwright.builder.arch.rules import parse_cmake, replace_arguments

BRANCHES = b"""\
# set(LIST "0") in a comment is no command
IF(A VERSION_GREATER_EQUAL
   2.0)
  Set(LIST "1;2")
elseif(B)
  foreach(x IN LISTS LIST)
    set(LIST 3;4 [=[a]b]=] "q\\"uote" $<$<CONFIG:Debug>:5>)
  endforeach()
else()
  set(LIST ${OTHER})
endif()
function(f OUT)
  set(${OUT} "set(LIST \\"no\\")" PARENT_SCOPE)
endfunction()
"""


def test_commands_have_their_scopes() -> None:
    commands = [command for command in parse_cmake(BRANCHES, "CMakeLists.txt") if command.name == "set"]
    assert [(command.line, command.scopes) for command in commands] == [
        (4, ("if(A VERSION_GREATER_EQUAL 2.0)",)),
        (7, ("elseif(B)", "foreach(x IN LISTS LIST)")),
        (10, ("else()",)),
        (13, ("function(f OUT)",)),
    ]


def test_arguments_have_their_bytes() -> None:
    command = next(command for command in parse_cmake(BRANCHES, "x") if command.line == 7)
    assert command.texts == ("LIST", "3;4", "a]b", 'q\\"uote', "$<$<CONFIG:Debug>:5>")
    assert [argument.quoted for argument in command.arguments] == [False, False, True, True, False]
    assert all(BRANCHES[argument.start : argument.end].decode() == argument.text for argument in command.arguments)


def test_offsets_count_bytes_not_letters() -> None:
    text = 'message("für")\r\nset(LIST "1")\r\n'.encode()
    argument = parse_cmake(text, "x")[1].arguments[1]
    assert replace_arguments(text, {argument: "2"}) == text.replace(b'"1"', b'"2"')


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b'project(x)\nset(A "b"\nset(C d)\n', 2),
        (b"set(A b)\nif(X)\n  set(A c)\n", 2),
        (b"set(A b)\nset(A b))\n", 2),
        (b"set(A b)\n\nendif()\n", 3),
        (b'set(A "b)\n', 1),
    ],
)
def test_malformed_text_names_the_line(text: bytes, line: int) -> None:
    with refusal("rule-mismatch", match=f"sub/CMakeLists.txt is not well-formed CMake at line {line}"):
        parse_cmake(text, "sub/CMakeLists.txt")


def test_deep_nesting_is_no_recursion() -> None:
    depth = 3000
    commands = parse_cmake(b"if(A)\n" * depth + b"set(X y)\n" + b"endif()\n" * depth, "x")
    assert len(commands[-1].scopes) == depth
