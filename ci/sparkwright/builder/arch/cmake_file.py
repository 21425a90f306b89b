"""
CMake text, read as commands and edited in place.

The text is split into tokens as cmake-language(7) defines them, because an arch list in a comment,
in a string or in another branch looks the same to a regular expression. An edit replaces a range of
bytes; every other byte stays as it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NoReturn

import msgspec

from sparkwright.core.errors import FileError

_OPENERS = frozenset(("if", "elseif", "else", "foreach", "while", "function", "macro", "block"))
_CLOSERS = frozenset(
    ("elseif", "else", "endif", "endforeach", "endwhile", "endfunction", "endmacro", "endblock")
)
#: An unquoted argument may hold quoted parts (-DA="b c"), and references with parentheses.
_TOKEN = re.compile(
    r"""
      (?P<blank>\s+ | \#\[(?P<comment>=*)\[.*?\](?P=comment)\] | \#(?!\[=*\[)[^\n]*)
    | (?P<parenthesis>[()])
    | "(?P<quoted>(?:\\.|[^"\\])*)"
    | \[(?P<mark>=*)\[(?P<bracket>.*?)\](?P=mark)\]
    | (?P<unquoted>(?:\\.|\$\([^()]*\)|[^\s()\#"\\])(?:\\.|"(?:\\.|[^"\\\n])*"|[^\s()\#"\\])*)
    """,
    re.DOTALL | re.VERBOSE,
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


def parse(data: bytes, origin: str) -> tuple[CMakeCommand, ...]:
    """
    Return the commands of *data* in document order, without those that close a scope.

    Raises:
        rule-mismatch: The text is not well-formed CMake; the message names *origin* and the line.
    """
    # One letter a byte, so that offsets count bytes, and bytes of any encoding survive.
    text = data.decode("latin-1")
    commands, scopes = list[CMakeCommand](), list[str]()
    unclosed, arguments = list[int](), list[Argument]()
    name, start, opening, depth = "", 0, 0, 0
    for token in _tokens(text, origin):
        kind = str(token.lastgroup)
        if depth == 0 and kind == "unquoted" and not name:
            name, start = token[0].lower(), token.start()
        elif depth == 0 and token[0] == "(" and name:
            opening, depth = token.end(), 1
        elif depth == 0:
            _refuse(text, origin, token.start())
        elif kind != "parenthesis":
            arguments.append(Argument(token[kind], *token.span(kind), kind != "unquoted"))
        elif token[0] == "(" or depth > 1:
            depth += 1 if token[0] == "(" else -1
        else:
            if name in _CLOSERS and not scopes:
                _refuse(text, origin, start)
            if name in _CLOSERS:
                scopes.pop()
                unclosed.pop()
            if name in _OPENERS or name not in _CLOSERS:
                line = text.count("\n", 0, start) + 1
                commands.append(CMakeCommand(name, line, tuple(arguments), tuple(scopes)))
            if name in _OPENERS:
                scopes.append(f"{name}({' '.join(text[opening : token.start()].split())})")
                unclosed.append(start)
            name, depth, arguments = "", 0, []
    if name or unclosed:
        _refuse(text, origin, start if name else unclosed[-1])
    return tuple(commands)


def _tokens(text: str, origin: str) -> Iterator[re.Match[str]]:
    """Yield the tokens of *text* without blanks and comments."""
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            _refuse(text, origin, position)
        if token["blank"] is None:
            yield token
        position = token.end()


def _refuse(text: str, origin: str, position: int) -> NoReturn:
    line = text.count("\n", 0, position) + 1
    raise FileError(
        "rule-mismatch",
        f"{origin} is not well-formed CMake at line {line}.",
        details=[f"{origin}:{line}: {text.splitlines()[line - 1].strip()[:100]}"],
        todo="Compare the file with upstream's.",
    )


def replace(data: bytes, values: Mapping[Argument, str]) -> bytes:
    """Return *data* with each of these arguments replaced by its new value."""
    for argument in sorted(values, key=lambda argument: argument.start, reverse=True):
        data = data[: argument.start] + values[argument].encode() + data[argument.end :]
    return data
