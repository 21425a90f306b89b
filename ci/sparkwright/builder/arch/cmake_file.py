"""
CMake text, read as commands and edited in place.

The text is parsed by tree-sitter's CMake grammar, because an arch list in a comment, in a string or
in another branch looks the same to a regular expression. An edit replaces a range of bytes; every
other byte stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING

import msgspec

from sparkwright.core.errors import FileError

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

_OPENERS = frozenset(("if", "elseif", "else", "foreach", "while", "function", "macro", "block"))
_CLOSERS = frozenset(
    ("elseif", "else", "endif", "endforeach", "endwhile", "endfunction", "endmacro", "endblock")
)


class Argument(msgspec.Struct, frozen=True):
    """
    An argument as it is written.

    Attributes:
        text: The text between the quotes or brackets, with references and escapes as written.
        start: Offset of the first byte of *text* in the file.
        end: Offset after its last byte.
        quoted: Is it quoted or bracketed, so that CMake never splits it?
    """

    text: str
    start: int
    end: int
    quoted: bool


class CMakeCommand(msgspec.Struct, frozen=True):
    """
    A command.

    Attributes:
        name: In lower case.
        line: Its first line, from 1.
        scopes: The branches and bodies around it, outermost first, each as the command that opens
            it: ``elseif(A VERSION_LESS 2)``.
    """

    name: str
    line: int
    arguments: tuple[Argument, ...]
    scopes: tuple[str, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(argument.text for argument in self.arguments)


@cache
def _parser() -> Parser:
    import tree_sitter
    import tree_sitter_cmake

    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_cmake.language()))


def parse(text: bytes, origin: str) -> tuple[CMakeCommand, ...]:
    """
    Return the commands of *text* in document order, without those that close a scope.

    Raises:
        rule-mismatch: The text is not well-formed CMake; the message names *origin* and the line.
    """
    root = _parser().parse(text).root_node
    if root.has_error:
        raise _malformed(origin, _fault(root))
    commands: list[CMakeCommand] = []
    scopes: list[str] = []
    for node in _command_nodes(root):
        name = _text(node.children[0]).lower()
        if name in _CLOSERS:
            if node.type == "normal_command":
                raise _malformed(origin, node)
            scopes.pop()
        if name in _OPENERS or name not in _CLOSERS:
            arguments = tuple(_arguments(node))
            line = node.start_point[0] + 1
            commands.append(CMakeCommand(name, line, arguments, tuple(scopes)))
        if name in _OPENERS:
            condition = _text(node).partition("(")[2].rpartition(")")[0]
            scopes.append(f"{name}({' '.join(condition.split())})")
    return tuple(commands)


def _command_nodes(root: Node) -> Iterator[Node]:
    # Without recursion: the nesting of a foreign file must not reach Python's limit.
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node.type.endswith("_command"):
            yield node
        else:
            waiting.extend(reversed(node.children))


def _arguments(node: Node) -> Iterator[Argument]:
    for group in node.children:
        for child in group.children if group.type == "argument_list" else ():
            if child.type == "argument" and child.children:
                yield _argument(child.children[0])


def _argument(node: Node) -> Argument:
    text, start = _text(node), node.start_byte
    border = {"quoted_argument": 1, "unquoted_argument": 0}.get(node.type)
    if border is None:
        border = text.index("[", 1) + 1
    inner = text[border : len(text) - border]
    return Argument(inner, start + border, node.end_byte - border, border > 0)


def _text(node: Node) -> str:
    # surrogateescape: bytes that are not UTF-8 survive an edit.
    return (node.text or b"").decode("utf-8", "surrogateescape")


def _fault(node: Node) -> Node:
    """Return the first node that the parser did not understand, or the one that lacks a bracket."""
    while node.type != "ERROR":
        inner = next((child for child in node.children if child.has_error), None)
        if inner is None or inner.is_missing:
            break
        node = inner
    return node


def _malformed(origin: str, node: Node) -> FileError:
    line = node.start_point[0] + 1
    lines = _text(node).strip().splitlines() or ["a bracket, quote or end command is missing"]
    return FileError(
        "rule-mismatch",
        f"{origin} is not well-formed CMake at line {line}.",
        details=[f"{origin}:{line}: {lines[0][:100]}"],
        todo="Compare the file with upstream's. If CMake itself accepts it, the grammar "
        "(tree-sitter-cmake) does not know the construct.",
    )


def replace(text: bytes, values: Mapping[Argument, str]) -> bytes:
    """Return *text* with each of these arguments replaced by its new value."""
    for argument in sorted(values, key=lambda argument: argument.start, reverse=True):
        value = values[argument].encode("utf-8", "surrogateescape")
        text = text[: argument.start] + value + text[argument.end :]
    return text
