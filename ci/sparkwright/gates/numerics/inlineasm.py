"""
Inline assembler in preprocessed C++, rewritten to calls that a host compiler understands (`native/ptx.hpp`).

Only the statements of the tree's own files are touched; line markers tell which those are. Nothing else in the text changes, so that what
is compiled is still the tree's code: the expressions around the statement, the order of its operands, and the template as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable

#: Line markers, what may hold the word without meaning it, and the word.
_INTEREST = re.compile(
    r'^\#\ \d+\ "(?P<file>(?:[^"\\]|\\.)*)"[^\n]*$'
    r'|R"(?P<fence>[^\s()\\]{0,16})\(.*?\)(?P=fence)"'
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'(?:[^'\\\n]|\\.)'"
    r"|\b(?P<word>asm|__asm__|__asm)\b",
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
_OPENING = re.compile(r"\s*(?:(?:volatile|__volatile__|__volatile|inline)\s*)*\(")
_MARKER = re.compile(r'^# \d+ "[^\n]*$', re.MULTILINE)
_PIECE = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)\'|[()\[\]{}:,]')
_STRINGS = re.compile(r'\s*(?:"(?:[^"\\\n]|\\.)*"\s*)*')
_OPERAND = re.compile(r'\s*(?:\[\w+\]\s*)?"(?P<constraint>[^"]*)"\s*\((?P<value>.*)\)\s*', re.DOTALL)

EXECUTE = "::sparkwright::ptx::execute"
_ACCESS = {"=": "::sparkwright::ptx::write", "+": "::sparkwright::ptx::update"}


class Unparsed(ValueError):
    """An asm statement is not of the form that GCC and nvcc read."""


def rewrite(text: str, mine: Callable[[str], bool]) -> str:
    """
    Return the preprocessed *text* with every asm statement of a file that is *mine* as a call of ``execute``.

    *mine* is asked for every file that the text names, in order.

    Raises:
        Unparsed: A statement cannot be taken apart; the message holds its beginning.
    """
    made: list[str] = []
    inside, done = False, 0
    for match in _INTEREST.finditer(text):
        if match["file"] is not None:
            inside = mine(match["file"])
        if match["word"] is None or not inside or match.start() < done:
            continue
        opening = _OPENING.match(text, match.end())
        if not opening:
            raise Unparsed(_shown(text[match.start() :]))
        body, end = _body(text, opening.end())
        made += [text[done : match.start()], _call(body)]
        done = end
    return "".join([*made, text[done:]])


def _shown(text: str) -> str:
    return " ".join(text[:160].split())


def _body(text: str, start: int) -> tuple[str, int]:
    """Return what is between the parenthesis that ends before *start* and the one that closes it, and where that one ends."""
    depth = 1
    for piece in _PIECE.finditer(text, start):
        depth += {"(": 1, ")": -1}.get(piece[0], 0)
        if depth == 0:
            return _MARKER.sub("", text[start : piece.start()]), piece.end()
    raise Unparsed(_shown(text[start:]))


def _split(text: str, by: str) -> list[str]:
    """Return the parts of *text* between the *by* that stand in no string and no bracket."""
    parts, depth, start = [], 0, 0
    for piece in _PIECE.finditer(text):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(piece[0], 0)
        if piece[0] == by and depth == 0:
            parts.append(text[start : piece.start()])
            start = piece.end()
    return [*parts, text[start:]]


def _call(body: str) -> str:
    # Two colons in a row are an empty section between them.
    template, *sections = _split(body, ":")
    if not _STRINGS.fullmatch(template) or not template.strip() or len(sections) > 3:
        raise Unparsed(_shown(body))
    operands = [one for section in sections[:2] for one in _split(section, ",") if one.strip()]
    return f"{EXECUTE}({template.strip()}, {{{', '.join(map(_access, operands))}}})"


def _access(operand: str) -> str:
    found = _OPERAND.fullmatch(operand)
    if not found:
        raise Unparsed(_shown(operand))
    return f"{_ACCESS.get(found['constraint'][:1], '::sparkwright::ptx::read')}({found['value']})"
