"""
What the arguments of a CMake command are, as far as its own file says so beyond doubt.

Nothing is executed. A variable that is set in branches gives one answer for each way through them; whatever this module does not
understand (a macro, a loop, a generator expression, the environment) makes the argument unknown, never wrong.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from sparkwright.core.cmake_file import Argument, Command, Scope

#: An argument whose value is not known.
UNKNOWN = None
#: Ways through the branches of one file that are followed; with more, nothing is known.
MOST_WAYS = 64
#: Characters of a value; a variable that doubles itself line by line would otherwise fill the memory.
_LONGEST = 4096

_REFERENCE = re.compile(r"\$\{([A-Za-z0-9_./+-]+)\}")
#: What remains of a text after its references, and makes it more than text: others' references, escapes, expressions, templates.
_MORE = re.compile(r"\$|\\|@\w+@")
_NAME = re.compile(r"[A-Za-z0-9_./+-]+")
#: Commands that read the variables they are given. All others may write them.
_READERS = frozenset(("if", "elseif", "while", "message", "return", "function", "macro", "mark_as_advanced"))
_BRANCHES = frozenset(("if", "elseif", "else"))
_CALLED = frozenset(("function", "macro"))
_BODIES = _CALLED | {"foreach", "while", "block"}


class Expansion(msgspec.Struct, frozen=True):
    """What a command is given (`UNKNOWN` where that is not known), and under which condition, in CMake's words; empty when always."""

    values: tuple[str | None, ...]
    condition: str


class Reading:
    """
    The commands of one file.

    Args:
        foreign: Says whether another file of the tree sets the variable, too.
    """

    def __init__(self, commands: Sequence[Command], foreign: Callable[[str], bool]) -> None:
        self.commands, self._foreign = commands, foreign
        self._writes: dict[str, list[int]] = {}
        self._chains: dict[int, list[Scope]] = {}
        self._outer: dict[int, tuple[Scope, ...]] = {}
        # Names that are made of variables, by what they begin and end with.
        self._computed = [
            (parts[0], parts[-1])
            for command in commands
            if command.name == "set" and command.arguments and not _kinds(command) & _CALLED
            if len(parts := _REFERENCE.sub("$", command.texts[0]).split("$")) > 1
        ]
        for place, command in enumerate(commands):
            for name in _written(command):
                self._writes.setdefault(name, []).append(place)
            if command.opens and command.opens.kind in _BRANCHES:
                self._chains.setdefault(command.opens.chain, []).append(command.opens)
                self._outer.setdefault(command.opens.chain, command.scopes)

    def expand(self, place: int) -> tuple[Expansion, ...]:
        """Return what the command at *place* is given, once for each way that leads to it with other values."""
        command = self.commands[place]
        writes = sorted(self._relevant(command, place))
        fixed = {scope.chain: scope.start for scope in command.scopes if scope.kind in _BRANCHES}
        chains = sorted({scope.chain for at, _ in writes for scope in self.commands[at].scopes if scope.kind in _BRANCHES} - fixed.keys())
        arms = [self._arms(chain) for chain in chains]
        if math.prod(map(len, arms)) > MOST_WAYS:
            return (Expansion(self._follow(command, (), {}), ""),)
        found: dict[tuple[str | None, ...], dict[int, int]] = {}
        for choice in itertools.product(*arms):
            way = dict(zip(chains, choice, strict=True))
            found.setdefault(self._follow(command, writes, fixed | way), way)
        if len(found) == 1:
            return (Expansion(next(iter(found)), ""),)
        return tuple(Expansion(values, self._describe(way, fixed)) for values, way in found.items())

    def condition(self, place: int) -> str:
        """Return the branches and bodies around the command at *place*, in CMake's words."""
        scopes = self.commands[place].scopes
        return " AND ".join(
            self._arm(scope.chain, scope.start) if scope.kind in _BRANCHES else f"{scope.kind}({scope.text})" for scope in scopes
        )

    def _relevant(self, command: Command, place: int) -> Iterator[tuple[int, str]]:
        """Yield the writes that the command's arguments may depend on: their places and the variables."""
        seen: set[str] = set()
        waiting = list(_references(command.arguments))
        while waiting:
            name = waiting.pop()
            if name in seen or self._doubtful(name, command, place):
                continue
            seen.add(name)
            for at in self._writes.get(name, ()):
                if at < place:
                    yield at, name
                    waiting.extend(_references(self.commands[at].arguments))

    def _doubtful(self, name: str, command: Command, place: int) -> bool:
        """May the variable be written by something other than the commands before *command*, in their order?"""
        writes = self._writes.get(name, [])
        if self._foreign(name) or any(name.startswith(head) and name.endswith(tail) for head, tail in self._computed):
            return True
        bodies = [scope for scope in command.scopes if scope.kind in _BODIES]
        if not bodies:
            return any(_kinds(self.commands[at]) & _CALLED for at in writes)
        # A body runs later, or again: only a variable that is set once, before and not in another branch, has one value there.
        parameter = any(name in scope.text.split() for scope in bodies)
        once = len(writes) == 1 and writes[0] < place and set(self.commands[writes[0]].scopes) <= set(command.scopes)
        return parameter or not once

    def _arms(self, chain: int) -> list[int]:
        """Return the branches of a chain; -1 stands for none of them, where it has no ``else``."""
        scopes = self._chains[chain]
        return [*(scope.start for scope in scopes), *([] if scopes[-1].kind == "else" else [-1])]

    def _follow(self, command: Command, writes: Iterable[tuple[int, str]], way: Mapping[int, int]) -> tuple[str | None, ...]:
        known: dict[str, str | None] = {}
        for at, name in writes:
            write = self.commands[at]
            if all(way.get(scope.chain) == scope.start for scope in write.scopes if scope.kind in _BRANCHES):
                inner = [scope for scope in write.scopes if scope.kind in _BODIES and scope not in command.scopes]
                known[name] = UNKNOWN if inner else _assigned(write, name, known)
        return tuple(value for argument in command.arguments for value in _values(argument, known))

    def _describe(self, way: Mapping[int, int], fixed: Mapping[int, int]) -> str:
        """Return the condition of *way*, less the chains that it does not reach."""
        chosen = {**way, **fixed}
        reached = [
            chain
            for chain in way
            if all(chosen.get(scope.chain, scope.start) == scope.start for scope in self._outer[chain] if scope.kind in _BRANCHES)
        ]
        return " AND ".join(self._arm(chain, way[chain]) for chain in reached)

    def _arm(self, chain: int, start: int) -> str:
        before = list(itertools.takewhile(lambda scope: scope.start != start, self._chains[chain]))
        own = [f"({scope.text})" for scope in self._chains[chain] if scope.start == start and scope.kind != "else"]
        return " AND ".join([*(f"NOT ({scope.text})" for scope in before if scope.kind != "else"), *own])


def _kinds(command: Command) -> set[str]:
    return {scope.kind for scope in command.scopes}


def _written(command: Command) -> Iterator[str]:
    """Yield the variables that *command* may write."""
    texts = command.texts
    if command.name == "set":
        yield from texts[:1]
    elif command.name not in _READERS:
        yield from dict.fromkeys(text for text in texts if _NAME.fullmatch(text))


def _references(arguments: Iterable[Argument]) -> Iterator[str]:
    for argument in arguments:
        if argument.quoting != "bracket":
            yield from _REFERENCE.findall(argument.text)


def _assigned(command: Command, name: str, known: Mapping[str, str | None]) -> str | None:
    """Return the value of *name* after *command*."""
    if command.name != "set" or command.texts[-1] == "PARENT_SCOPE":
        return UNKNOWN
    cached = next(
        (at for at, argument in enumerate(command.arguments) if argument.text == "CACHE" and argument.quoting == "unquoted"), None
    )
    values = [value for argument in command.arguments[1:cached] for value in _values(argument, known)]
    text = ";".join(value for value in values if value is not None)
    if not values or UNKNOWN in values or len(text) > _LONGEST:
        return UNKNOWN
    # A cache entry does not replace a variable, by one policy, and does, by another.
    return UNKNOWN if cached is not None and known.get(name, text) != text else text


def _values(argument: Argument, known: Mapping[str, str | None]) -> list[str | None]:
    """Return what an argument becomes: one value where it is quoted, none or several where it is a list."""
    if argument.quoting == "bracket":
        return [argument.text]
    found = [known.get(name) for name in _REFERENCE.findall(argument.text)]
    if _MORE.search(_REFERENCE.sub("", argument.text)) or UNKNOWN in found or sum(map(len, filter(None, found))) > _LONGEST:
        return [UNKNOWN]
    text = _REFERENCE.sub(lambda match: known[match[1]] or "", argument.text)
    if argument.quoting == "quoted":
        return [text]
    # Inside square brackets a semicolon separates nothing.
    return [UNKNOWN] if ";" in text and "[" in text else [part for part in text.split(";") if part]
