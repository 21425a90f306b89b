"""
CMake text, read as commands and edited in place.

The text is parsed by tree-sitter's CMake grammar, because an arch list in a comment, in a string or
in another branch looks the same to a regular expression. An edit replaces a range of bytes; every
byte outside of it stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import msgspec

from sparkwright.core.errors import FileError

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

Quoting = Literal["quoted", "unquoted", "bracket"]
#: What opens a scope, by the grammar's name of the command that carries its arguments.
_OPENERS = {
    "if_command": "if",
    "elseif_command": "elseif",
    "else_command": "else",
    "foreach_command": "foreach",
    "while_command": "while",
    "function_command": "function",
    "macro_command": "macro",
    "block_command": "block",
}
_PARTS = frozenset(
    ("elseif", "else", "endif", "endforeach", "endwhile", "endfunction", "endmacro", "endblock")
)


class Argument(msgspec.Struct, frozen=True):
    """
    One argument as it is written.

    Attributes:
        text: What stands between the quotes or brackets, with references and escapes as written.
        start: Offset of the first byte of *text* in the file.
        end: Offset behind its last byte.
    """

    text: str
    start: int
    end: int
    quoting: Quoting


class Scope(msgspec.Struct, frozen=True):
    """
    An enclosing branch or body.

    Attributes:
        text: The arguments of the command that opens it, with single spaces between them and their
            parentheses (``else``
            has none).
    """

    kind: str
    text: str


class Command(msgspec.Struct, frozen=True):
    """
    A command.

    Attributes:
        name: In lower case.
        line: Its first line, from 1.
        scopes: The scopes around it, outermost first.
    """

    name: str
    line: int
    arguments: tuple[Argument, ...]
    scopes: tuple[Scope, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(argument.text for argument in self.arguments)


class Edit(msgspec.Struct, frozen=True):
    """Replace the bytes from *start* up to *end* with *text*."""

    start: int
    end: int
    text: str


@lru_cache(maxsize=1)
def _parser() -> Parser:
    import tree_sitter
    import tree_sitter_cmake

    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_cmake.language()))


def parse(text: bytes, origin: str) -> tuple[Command, ...]:
    """
    Return the commands of *text* in document order; those that open a scope (``if``, ``foreach``,
    …) are among them.

    Raises:
        rule-mismatch: The text is not well-formed CMake; the message names *origin* and the line.
    """
    root = _parser().parse(text).root_node
    if root.has_error:
        raise _malformed(origin, _fault(root))
    commands: list[Command] = []
    # A stack of our own: the nesting of a foreign file must not end in Python's recursion limit.
    waiting: list[tuple[Node, tuple[Scope, ...]]] = [(root, ())]
    while waiting:
        node, scopes = waiting.pop()
        if node.type == "normal_command" or node.type in _OPENERS:
            command = _command(node, scopes)
            if node.type == "normal_command" and command.name in _PARTS:
                raise _malformed(origin, node)
            commands.append(command)
        elif node.type not in ("line_comment", "bracket_comment"):
            waiting.extend(reversed(_children(node, scopes)))
    return tuple(commands)


def _children(node: Node, scopes: tuple[Scope, ...]) -> list[tuple[Node, tuple[Scope, ...]]]:
    """
    Pair each child with its scopes; a command that opens a branch lies outside of the branch
    itself.
    """
    inner, result = scopes, []
    for child in node.children:
        if child.type in _OPENERS:
            result.append((child, scopes))
            words = _words(found for found in child.children if found.type == "argument_list")
            inner = (*scopes, Scope(_OPENERS[child.type], " ".join(words)))
        else:
            result.append((child, inner))
    return result


def _command(node: Node, scopes: tuple[Scope, ...]) -> Command:
    name = node.children[0]
    lists = [child for child in node.children if child.type == "argument_list"]
    nodes = (
        child.children[0]
        for found in lists
        for child in found.children
        if child.type == "argument" and child.children
    )
    arguments = tuple(_argument(child) for child in nodes)
    return Command(_text(name).lower(), node.start_point[0] + 1, arguments, scopes)


def _words(lists: Iterable[Node]) -> Iterator[str]:
    """Yield the arguments of a condition, each with the parentheses that it begins or ends."""
    word, done = "", False
    for node in (child for found in lists for child in found.children):
        if done and node.type != ")":
            yield word
            word, done = "", False
        if node.type == "argument" and node.children:
            word, done = word + _argument(node.children[0]).text, True
        elif node.type in ("(", ")"):
            word, done = word + node.type, done or node.type == ")"
    if word or done:
        yield word


def _argument(node: Node) -> Argument:
    raw = _text(node)
    if node.type == "quoted_argument":
        return Argument(raw[1:-1], node.start_byte + 1, node.end_byte - 1, "quoted")
    if node.type == "bracket_argument":
        fence = raw.index("[", 1) + 1
        return Argument(
            raw[fence:-fence], node.start_byte + fence, node.end_byte - fence, "bracket"
        )
    return Argument(raw, node.start_byte, node.end_byte, "unquoted")


def _text(node: Node) -> str:
    # surrogateescape: bytes that are not UTF-8 come out of an edit as they went in.
    return (node.text or b"").decode("utf-8", "surrogateescape")


def _fault(root: Node) -> Node:
    """
    Return the first node that the parser could not make sense of; for a missing bracket, the
    command that lacks it.
    """
    node = root
    while node.type != "ERROR":
        inner = next(
            (child for child in node.children if child.has_error or child.is_missing), None
        )
        if inner is None or inner.is_missing:
            break
        node = inner
    return node


def _malformed(origin: str, node: Node) -> FileError:
    line = node.start_point[0] + 1
    sample = (
        _text(node).strip().splitlines() or ["a closing bracket, quote or end command is missing"]
    )[0][:100]
    return FileError(
        "rule-mismatch",
        f"{origin} is not well-formed CMake at line {line}.",
        details=[f"{origin}:{line}: {sample}"],
        todo="Compare the file with upstream's. If CMake itself accepts it, the grammar "
        "(tree-sitter-cmake) does not know the construct.",
    )


def apply(text: bytes, edits: Iterable[Edit]) -> bytes:
    """
    Return *text* with *edits* applied, in whatever order they are given; they must not overlap.
    """
    ordered = sorted(edits, key=lambda edit: edit.start)
    pieces, position = [], 0
    for edit in ordered:
        assert position <= edit.start <= edit.end <= len(text), (
            "edits overlap or lie outside of the text"
        )
        pieces += [text[position : edit.start], edit.text.encode("utf-8", "surrogateescape")]
        position = edit.end
    return b"".join((*pieces, text[position:]))
