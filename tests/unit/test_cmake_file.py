"""CMake text: what is read of it, and that an edit changes nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refusal

from sparkwright.builder.arch import cmake_file
from sparkwright.builder.arch.cmake_file import Edit

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
    commands = [command for command in cmake_file.parse(BRANCHES, "CMakeLists.txt") if command.name == "set"]
    seen = [(command.name, command.line, [(scope.kind, scope.text) for scope in command.scopes]) for command in commands]
    assert seen == [
        ("set", 4, [("if", "A VERSION_GREATER_EQUAL 2.0")]),
        ("set", 7, [("elseif", "B"), ("foreach", "x IN LISTS LIST")]),
        ("set", 10, [("else", "")]),
        ("set", 13, [("function", "f OUT")]),
    ]


def test_arguments_have_their_bytes() -> None:
    command = next(command for command in cmake_file.parse(BRANCHES, "x") if command.line == 7)
    assert command.texts == ("LIST", "3;4", "a]b", 'q\\"uote', "$<$<CONFIG:Debug>:5>")
    assert [argument.quoting for argument in command.arguments] == ["unquoted", "unquoted", "bracket", "quoted", "unquoted"]
    assert all(BRANCHES[argument.start : argument.end].decode() == argument.text for argument in command.arguments)


def test_offsets_count_bytes_not_letters() -> None:
    text = 'message("für")\r\nset(LIST "1")\r\n'.encode()
    argument = cmake_file.parse(text, "x")[1].arguments[1]
    assert cmake_file.apply(text, [Edit(argument.start, argument.end, "2")]) == text.replace(b'"1"', b'"2"')


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
        cmake_file.parse(text, "sub/CMakeLists.txt")


def test_deep_nesting_is_no_recursion() -> None:
    depth = 3000
    commands = cmake_file.parse(b"if(A)\n" * depth + b"set(X y)\n" + b"endif()\n" * depth, "x")
    assert len(commands[-1].scopes) == depth


@given(st.binary(max_size=60), st.data())
def test_an_edit_changes_its_own_bytes_alone(text: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=2, max_size=8).filter(lambda found: len(found) % 2 == 0)))
    ranges = list(zip(cuts[::2], cuts[1::2], strict=True))
    edits = [Edit(start, end, f"<{number}>") for number, (start, end) in enumerate(ranges)]
    changed = cmake_file.apply(text, data.draw(st.permutations(edits)) if len({edit.start for edit in edits}) == len(edits) else edits)
    position, pieces = 0, []
    for number, (start, end) in enumerate(ranges):
        pieces += [text[position:start], f"<{number}>".encode()]
        position = end
    assert changed == b"".join([*pieces, text[position:]])
