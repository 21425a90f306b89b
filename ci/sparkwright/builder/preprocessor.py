"""
The preprocessor's conditionals of a C, C++ or CUDA file: whether every ``#if`` has its ``#endif``, known without a compiler.

A patch or a merge that loses one line of a conditional makes nvcc complain at the end of the file, in every unit that includes it, half an
hour into a build. Only what decides where a directive is one is read (translation phases 2 to 4, [lex.phases]): continued lines, comments,
literals, raw strings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

#: Files with preprocessor directives, by their suffix.
SUFFIXES = frozenset((".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hh", ".hpp", ".inc", ".inl"))

#: A continued line; GCC and nvcc allow blanks behind the backslash.
_SPLICE = r"\\[ \t\v\f]*\n"
_TOKEN = re.compile(
    rf"""
      (?P<newline>\n)
    | (?P<blank>(?:[ \t\v\f]|{_SPLICE})+)
    | (?P<line>/(?:{_SPLICE})*/(?:{_SPLICE}|[^\n])*)
    | (?P<comment>/(?:{_SPLICE})*\*.*?(?:\*(?:{_SPLICE})*/|(?P<open>\Z)))
    | (?P<raw>(?:u8|[uUL])?R"(?P<mark>[^ ()\\\t\v\f\n]{{0,16}})\(.*?(?:\)(?P=mark)"|(?P<unended>\Z)))
    | (?:u8|[uUL])?"(?:\\[ \t]*\n|\\.|[^"\\\n])*"?
    | (?:u8|[uUL])?'(?:\\[ \t]*\n|\\.|[^'\\\n])*'?
    | \.?\d(?:[eEpP][+-]|'[\w]|[\w.]|{_SPLICE})*
    | (?P<name>[A-Za-z_$](?:[\w$]|{_SPLICE})*)
    | (?P<hash>\#|%:)
    | .
    """,
    re.DOTALL | re.VERBOSE,
)
#: What stands behind ``#include`` is no string: a backslash or an apostrophe in it means itself.
_HEADER = re.compile(r"[ \t]*(?:<[^>\n]*>|\"[^\"\n]*\")")

_OPENING = frozenset(("if", "ifdef", "ifndef"))
_BETWEEN = frozenset(("elif", "elifdef", "elifndef", "else"))
_ALL = _OPENING | _BETWEEN | {"endif"}


class Directive(msgspec.Struct, frozen=True):
    """A directive: its name without the ``#``, and its line, from 1."""

    name: str
    line: int


class Fault(msgspec.Struct, frozen=True):
    """What is wrong, and in which line, from 1."""

    line: int
    what: str


def directives(text: str) -> Iterator[Directive | Fault]:
    """Yield the conditionals of *text* in order, and a fault where a comment or a raw string does not end."""
    text = text.replace("\r\n", "\n")
    at, line, fresh = 0, 1, True
    hashed = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        assert match is not None  # its last branch takes any character
        kind, token = match.lastgroup, match[0]
        if match["open"] is not None or match["unended"] is not None:
            yield Fault(line, "a comment does not end" if match["open"] is not None else "a raw string does not end")
        if match["newline"]:
            fresh, hashed = True, 0
        elif match["hash"] and fresh:
            fresh, hashed = False, line
        elif hashed and match["name"]:
            name = re.sub(_SPLICE, "", token)
            if name in _ALL:
                yield Directive(name, hashed)
            elif name in ("include", "include_next", "import") and (header := _HEADER.match(text, match.end())):
                token += header[0]
            hashed = 0
        elif kind not in ("blank", "line", "comment"):
            fresh, hashed = False, 0
        line += token.count("\n")
        at += len(token)


def balance(text: str) -> tuple[Fault, ...]:
    """Return what is wrong with the conditionals of *text*, in the order of its lines; nothing where they are balanced."""
    faults: list[Fault] = []
    stack: list[tuple[Directive, bool]] = []
    for found in directives(text):
        if isinstance(found, Fault):
            faults.append(found)
        elif found.name in _OPENING:
            stack.append((found, False))
        elif not stack:
            faults.append(Fault(found.line, f"#{found.name} without #if"))
        elif found.name == "endif":
            stack.pop()
        else:
            opening, ended = stack[-1]
            if ended:
                faults.append(Fault(found.line, f"#{found.name} after #else"))
            stack[-1] = (opening, ended or found.name == "else")
    faults += [Fault(opening.line, f"#{opening.name} without #endif") for opening, _ in stack]
    return tuple(sorted(faults, key=lambda fault: fault.line))
