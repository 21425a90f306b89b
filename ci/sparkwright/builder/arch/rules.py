"""
Arch rules, as reviewed data: how the arch lists in a fork's CMake are changed, which units stay at
another arch.

A rule names one argument of one command in one branch, and the value that it expects there. It
appends to that list and does nothing else; if it does not match exactly one place, upstream has
moved, and the rewrite stops.

CMake's text is split into tokens as cmake-language(7) defines them, because an arch list in a
comment, in a string or in another branch looks the same to a regular expression. An edit replaces a
range of bytes; every other byte stays as it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, NoReturn

import msgspec

from sparkwright.builder import BuildError
from sparkwright.core import strict_yaml

_OPENERS = frozenset(("if", "elseif", "else", "foreach", "while", "function", "macro", "block"))
_CLOSERS = frozenset(
    ("elseif", "else", "endif", "endforeach", "endwhile", "endfunction", "endmacro", "endblock")
)
#: Bytes of a file, and commands that hold each other; the largest of the upstreams has 70 kB.
LARGEST_CMAKE, DEEPEST = 1024**2, 100
#: An unquoted argument may hold quoted parts (-DA="b c"), and references with parentheses.
_TOKEN = re.compile(
    r"""
      (?P<blank>\s+ | \#\[(?P<comment>=*)\[.*?\](?P=comment)\] | \#(?!\[=*\[)[^\n]*)
    | (?P<parenthesis>[()])
    | "(?P<quoted>(?:\\.|[^"\\])*)"
    | \[(?P<mark>=*)\[(?P<bracket>.*?)\](?P=mark)\]
    | (?P<unquoted>(?!\[=*\[)
      (?:\\.|\$\([^()]*\)|[^\s()\#"\\])(?:\\.|"(?:\\.|[^"\\\n])*"|[^\s()\#"\\])*)
    """,
    re.DOTALL | re.VERBOSE,
)


class ArchRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    One mechanical rewrite.

    Attributes:
        source: The vendored source that holds the file; empty for the fork's own tree.
        file: Path inside the source tree.
        command: Name of the command, in any case.
        where: The leading arguments that it must have, as they are written.
        argument: Index of the argument that holds the list, from 0.
        expect: The list as upstream wrote it.
        append: The elements that are added to it.
        under: Texts that must each occur in a condition around the command (of an if chain, in the
            branch that the command is in).
        drop_when: The change upstream after which the rule is no longer needed.
    """

    name: str
    fork: str
    file: str
    command: str
    where: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    argument: Annotated[int, msgspec.Meta(ge=0)]
    expect: str
    append: Annotated[tuple[strict_yaml.Prose, ...], msgspec.Meta(min_length=1)]
    reason: strict_yaml.Prose
    drop_when: strict_yaml.Prose
    source: str = ""
    under: tuple[str, ...] = ()


class DroppedUnits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    Units that are not compiled, because a rule empties their list.

    Attributes:
        unit: Path inside the source tree; ``*`` and ``?`` match as in a shell, ``*`` also across
            folders.
    """

    fork: str
    unit: str
    reason: strict_yaml.Prose

    def covers(self, source: str) -> bool:
        return fnmatchcase(source, self.unit)


class ArchException(DroppedUnits, frozen=True, forbid_unknown_fields=True):
    """
    Units that stay at another arch, as a reviewed decision.

    Attributes:
        gencode: The virtual arch of every gencode of the unit, such as ``compute_89``; ``default``
            for host code that CMake gives none.
    """

    gencode: Annotated[str, msgspec.Meta(pattern=r"^(compute_[0-9]+[af]?|default)$")]


class ArchRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of ``build/<stack>/archs.yaml``."""

    rules: tuple[ArchRule, ...] = ()
    kept: tuple[ArchException, ...] = ()
    dropped: tuple[DroppedUnits, ...] = ()


class Site(msgspec.Struct, frozen=True):
    """A place that a rule changed: the list *before* and *after*, and the line of its command."""

    rule: str
    file: str
    line: int
    before: str
    after: str


# CMake.


class Argument(msgspec.Struct, frozen=True):
    """
    An argument as it is written.

    Attributes:
        text: The text between the quotes or brackets, with references and escapes as written.
        start: Offset of the first byte of *text* in the file.
        end: Offset after its last byte.
    """

    text: str
    start: int
    end: int


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


def parse_cmake(data: bytes, origin: str) -> tuple[CMakeCommand, ...]:
    """
    Return the commands of *data* in document order, without those that close a scope. Whether every
    scope is closed is left to CMake.

    Raises:
        rule-mismatch: The text is not well-formed CMake, is larger than `LARGEST_CMAKE`, or nests
            deeper than `DEEPEST`; the message names *origin* and the line.
    """
    if len(data) > LARGEST_CMAKE:
        raise BuildError(
            "rule-mismatch",
            f"{origin} is larger than {LARGEST_CMAKE} bytes.",
            todo="Compare the file with upstream's.",
        )
    # One letter a byte, so that offsets count bytes, and bytes of any encoding survive.
    text = data.decode("latin-1")
    commands, arguments, scopes = list[CMakeCommand](), list[Argument](), list[str]()
    name, position, start, opening, depth, line, counted = "", 0, 0, 0, 0, 1, 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            _refuse_cmake(text, origin, position)
        kind, position = str(token.lastgroup), token.end()
        if token["blank"] is not None:
            continue
        if depth == 0 and kind == "unquoted" and not name:
            name, start = token[0].lower(), token.start()
        elif depth == 0 and token[0] == "(" and name:
            opening, depth = token.end(), 1
        elif depth == 0:
            _refuse_cmake(text, origin, token.start())
        elif kind != "parenthesis":
            arguments.append(Argument(token[kind], *token.span(kind)))
        elif token[0] == "(" or depth > 1:
            depth += 1 if token[0] == "(" else -1
        else:
            if name in _CLOSERS:
                del scopes[-1:]
            if name in _OPENERS or name not in _CLOSERS:
                line, counted = line + text.count("\n", counted, start), start
                commands.append(CMakeCommand(name, line, tuple(arguments), tuple(scopes)))
            if name in _OPENERS:
                scopes.append(f"{name}({' '.join(text[opening : token.start()].split())})")
                if len(scopes) > DEEPEST:
                    _refuse_cmake(text, origin, start)
            name, depth, arguments = "", 0, []
    if name:
        _refuse_cmake(text, origin, start)
    return tuple(commands)


def _refuse_cmake(text: str, origin: str, position: int) -> NoReturn:
    line = text.count("\n", 0, position) + 1
    raise BuildError(
        "rule-mismatch",
        f"{origin} is not well-formed CMake at line {line}.",
        details=[f"{origin}:{line}: {text.splitlines()[line - 1].strip()[:100]}"],
        todo="Compare the file with upstream's.",
    )


# The rewrite.


def rewrite(
    read: Callable[[str], bytes | None], rules: Sequence[ArchRule]
) -> tuple[dict[str, bytes], tuple[Site, ...]]:
    """
    Return the changed files, and the sites in the order of *rules*.

    Two rules cannot change the same list: after the first, the second does not match.

    Args:
        read: Returns the bytes of a file of the source tree, None if there is no such file.
        rules: The rules of one fork.

    Raises:
        rule-mismatch: A rule does not match exactly one place, has no effect, or
            its file is missing or malformed.
    """
    changed: dict[str, bytes] = {}
    sites: list[Site] = []
    for rule in rules:
        data = changed.get(rule.file) or read(rule.file)
        if data is None:
            raise BuildError(
                "rule-mismatch",
                f"Rule {rule.name} is for {rule.file}, which the source tree does not have.",
                details=[rule.file],
            )
        command = _match(rule, parse_cmake(data, rule.file))
        argument = command.arguments[rule.argument]
        after = ";".join([*filter(None, [argument.text]), *rule.append])
        changed[rule.file] = data[: argument.start] + after.encode() + data[argument.end :]
        sites.append(Site(rule.name, rule.file, command.line, argument.text, after))
    return changed, tuple(sites)


def _match(rule: ArchRule, commands: Sequence[CMakeCommand]) -> CMakeCommand:
    """Return the command whose list *rule* changes."""
    candidates = {
        command: _mismatch(rule, command)
        for command in commands
        if command.name == rule.command.lower()
        and command.texts[: len(rule.where)] == rule.where
        and rule.argument < len(command.arguments)
    }
    matches = [command for command, mismatch in candidates.items() if not mismatch]
    if len(matches) != 1:
        raise BuildError(
            "rule-mismatch",
            f"Rule {rule.name} matches {len(matches)} places in {rule.file} instead of 1.",
            details=[
                f"{rule.file}:{command.line}: {mismatch or 'matches'}"
                for command, mismatch in candidates.items()
            ]
            or [f"no {rule.command}({' '.join(rule.where)} …) in {rule.file}"],
            todo="See where upstream moved the list, or whether upstream has done what the rule "
            f"does. It may go when: {rule.drop_when}",
        )
    return matches[0]


def _mismatch(rule: ArchRule, command: CMakeCommand) -> str:
    """Return why *rule* does not change *command*; empty if it does."""
    value = command.arguments[rule.argument].text
    if not all(any(text in scope for scope in command.scopes) for text in rule.under):
        return f"lies in {command.scopes[-1] if command.scopes else 'no branch'}"
    if set(rule.append) <= set(value.split(";")):
        return f"holds {', '.join(rule.append)} already"
    return "" if value == rule.expect else f"holds {value!r}, the rule expects {rule.expect!r}"
