"""
Arch rules, as reviewed data: how the arch lists in a fork's CMake are changed, which units stay at
another arch, and which texts no compiled tree may hold.

A rule names one argument of one command in one branch, and the value that it expects there. It
appends to that list and does nothing else; if it matches another number of places, upstream has
moved, and the rewrite stops.

A guard names code that compiles for the requested arch and fails when it runs there, because it
tests for one arch by number and traps on every other. No configure shows that, so a guard searches
the final tree. A guard that matches nothing would pass silently, so each must match the unpatched
source and use every exemption.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from os.path import commonpath
from pathlib import Path
from typing import Annotated

import msgspec

from sparkwright.builder.arch import cmake_file
from sparkwright.builder.arch.cmake_file import Argument, CMakeCommand
from sparkwright.builder.errors import BuildError
from sparkwright.core import strict_yaml
from sparkwright.core.errors import FileError
from sparkwright.core.git_store import Objects

#: Text that a person wrote, not blank; a `Line` has no line break.
Prose = Annotated[str, msgspec.Meta(pattern=r"\S")]
Line = Annotated[str, msgspec.Meta(pattern=r"^[^\n]*\S[^\n]*$")]
Lines = Annotated[tuple[Line, ...], msgspec.Meta(min_length=1)]


class ArchRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    One mechanical rewrite.

    Attributes:
        file: Path inside the source tree.
        command: Name of the command, in any case.
        where: The leading arguments that it must have, as they are written.
        argument: Index of the argument that holds the list, from 0.
        expect: The list as upstream wrote it.
        append: The elements that are added to it.
        under: Texts that must each occur in a condition around the command (of an if chain, in the
            branch that the command is in).
        sites: The number of places that the rule must match.
        drop_when: The change upstream after which the rule is no longer needed.
    """

    name: str
    fork: str
    file: str
    command: str
    where: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    argument: Annotated[int, msgspec.Meta(ge=0)]
    expect: str
    append: Annotated[tuple[Prose, ...], msgspec.Meta(min_length=1)]
    reason: Prose
    drop_when: Prose
    under: tuple[str, ...] = ()
    sites: Annotated[int, msgspec.Meta(ge=1)] = 1


class DroppedUnits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    Units that are not compiled, because a rule empties their list.

    Attributes:
        unit: Path inside the source tree; ``*`` and ``?`` match as in a shell, ``*`` also across
            folders.
    """

    fork: str
    unit: str
    reason: Prose

    def covers(self, source: str) -> bool:
        return fnmatchcase(source, self.unit)


class ArchException(DroppedUnits, frozen=True, forbid_unknown_fields=True):
    """
    Units that stay at another arch, as a reviewed decision.

    Attributes:
        gencode: The virtual arch of every gencode of the unit, such as ``compute_89``.
    """

    gencode: Annotated[str, msgspec.Meta(pattern=r"^compute_[0-9]+[af]?$")]


class Guard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A text that must not occur in the tree that is compiled.

    Attributes:
        files: Paths inside the source tree; ``*`` and ``?`` match as in a shell, ``*`` also across
            folders.
        patterns: Plain texts, none of which a line of these files may hold.
        reason: The failure at run time of a line that does.
        todo: The advice of the error.
        drop_when: The change upstream after which the guard is no longer needed.
        exempt: Files that may hold one, each with the reason.
    """

    name: str
    fork: str
    files: Lines
    patterns: Lines
    reason: Line
    todo: Line
    drop_when: Line
    exempt: dict[str, Line] = {}

    def covers(self, path: str) -> bool:
        return any(fnmatchcase(path, glob) for glob in self.files)

    def matching_lines(self, text: bytes) -> list[int]:
        """Return the numbers, from 1, of the lines of *text* that hold a pattern."""
        patterns = [pattern.encode() for pattern in self.patterns]
        if not any(pattern in text for pattern in patterns):
            return []
        return [
            number
            for number, line in enumerate(text.split(b"\n"), start=1)
            if any(pattern in line for pattern in patterns)
        ]


class ArchRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of ``build/<stack>/archs.yaml``."""

    rules: tuple[ArchRule, ...] = ()
    kept: tuple[ArchException, ...] = ()
    dropped: tuple[DroppedUnits, ...] = ()
    guards: tuple[Guard, ...] = ()

    def of(self, fork: str) -> ArchRules:
        """Return the entries for *fork*."""
        return ArchRules(
            rules=tuple(rule for rule in self.rules if rule.fork == fork),
            kept=tuple(entry for entry in self.kept if entry.fork == fork),
            dropped=tuple(entry for entry in self.dropped if entry.fork == fork),
            guards=tuple(entry for entry in self.guards if entry.fork == fork),
        )

    def without(self, *names: str) -> ArchRules:
        """Return a copy without the rules of these names, to see their effect."""
        return msgspec.structs.replace(
            self, rules=tuple(rule for rule in self.rules if rule.name not in names)
        )


class Site(msgspec.Struct, frozen=True):
    """A place that a rule changed: the list *before* and *after*, and the line of its command."""

    rule: str
    file: str
    line: int
    before: str
    after: str


def load(path: Path) -> ArchRules:
    """
    Return the rules of the file at *path*.

    Raises:
        file-invalid: It is malformed, or two rules or guards have the same name.
    """
    rules = strict_yaml.load(path, ArchRules)
    names = [*(rule.name for rule in rules.rules), *(guard.name for guard in rules.guards)]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        what = f"{path} has two rules of one name; guards count, too."
        raise FileError("file-invalid", what, details=duplicates)
    return rules


# Rewriting arch lists.


def rewrite(
    read: Callable[[str], bytes | None], rules: Sequence[ArchRule]
) -> tuple[dict[str, bytes], tuple[Site, ...]]:
    """
    Return the changed files, and the sites in the order of *rules*.

    Every rule reads the text as upstream wrote it, so their order does not matter.

    Args:
        read: Returns the bytes of a file of the source tree, None if there is no such file.
        rules: The rules of one fork.

    Raises:
        rule-mismatch: A rule matches another number of places than it expects, has no effect, or
            its file is missing or malformed.
    """
    texts: dict[str, bytes] = {}
    values: dict[str, dict[Argument, str]] = {}
    sites: list[Site] = []
    for rule in rules:
        text = texts[rule.file] = texts.get(rule.file) or _read(read, rule)
        for command in _matches(rule, cmake_file.parse(text, rule.file)):
            argument = command.arguments[rule.argument]
            if argument in values.setdefault(rule.file, {}):
                what = f"Rule {rule.name} changes a list that another rule changes."
                raise FileError("rule-mismatch", what, details=[f"{rule.file}:{command.line}"])
            after = ";".join([*filter(None, [argument.text]), *rule.append])
            values[rule.file][argument] = after
            sites.append(Site(rule.name, rule.file, command.line, argument.text, after))
    changed = {file: cmake_file.replace(texts[file], new) for file, new in values.items()}
    return changed, tuple(sites)


def _read(read: Callable[[str], bytes | None], rule: ArchRule) -> bytes:
    text = read(rule.file)
    if text is None:
        what = f"Rule {rule.name} is for {rule.file}, which the source tree does not have."
        raise FileError("rule-mismatch", what, details=[rule.file])
    return text


def _matches(rule: ArchRule, commands: Sequence[CMakeCommand]) -> list[CMakeCommand]:
    """Return the commands whose list *rule* changes, as many as it expects."""

    def value(command: CMakeCommand) -> str:
        return command.arguments[rule.argument].text

    candidates = [
        command
        for command in commands
        if command.name == rule.command.lower()
        and command.texts[: len(rule.where)] == rule.where
        and rule.argument < len(command.arguments)
    ]
    in_branch = [command for command in candidates if _in_branch(rule, command)]
    matches = [command for command in in_branch if value(command) == rule.expect]
    extended = [
        command
        for command in matches or in_branch
        if set(rule.append) <= set(value(command).split(";"))
    ]
    if extended:
        raise FileError(
            "rule-mismatch",
            f"Rule {rule.name} has no effect: the list at {rule.file}:{extended[0].line} holds "
            f"{', '.join(rule.append)} already.",
            details=[f"{rule.file}:{command.line}: {value(command)}" for command in extended],
            todo=f"Upstream may have done what the rule does. It may go when: {rule.drop_when}",
        )
    if len(matches) != rule.sites:
        raise FileError(
            "rule-mismatch",
            f"Rule {rule.name} matches {len(matches)} places in {rule.file} instead of "
            f"{rule.sites}.",
            details=[_explain(rule, command) for command in candidates]
            or [f"no {rule.command}({' '.join(rule.where)} …) in {rule.file}"],
        )
    return matches


def _in_branch(rule: ArchRule, command: CMakeCommand) -> bool:
    return all(any(text in scope for scope in command.scopes) for text in rule.under)


def _explain(rule: ArchRule, command: CMakeCommand) -> str:
    value = command.arguments[rule.argument].text
    reasons = [] if value == rule.expect else [f"holds {value!r}, the rule expects {rule.expect!r}"]
    if not _in_branch(rule, command):
        branch = f"the branch {command.scopes[-1]}" if command.scopes else "no branch"
        reasons.append(f"lies in {branch}")
    return f"{rule.file}:{command.line}: {'; '.join(reasons) or 'matches'}"


# Guards.


def check_guards(objects: Objects, source: str, tree: str, guards: Sequence[Guard]) -> None:
    """
    Raise unless *tree* is free of every text that *guards* forbid.

    Args:
        source: The tree before picks, patches and rules, which each guard must match.

    Raises:
        arch-trap: A file of *tree* holds such a text; every place is listed, with the reason.
        rule-mismatch: A glob of a guard matches no file, a pattern matches nothing in *source*, or
            an exempt file needs no exemption.
    """
    if not guards:
        return
    folder = _common_folder(guards)
    before, after = dict(objects.files(source, folder)), dict(objects.files(tree, folder))
    if useless := [line for guard in guards for line in _useless(guard, before, after)]:
        raise FileError(
            "rule-mismatch",
            "A guard of archs.yaml guards nothing.",
            details=useless,
            todo="See where upstream moved the code, and correct the guard; it may go when what "
            "its drop_when says has happened.",
        )
    places = {guard.name: list(_places(guard, after)) for guard in guards}
    if count := sum(map(len, places.values())):
        matching = [guard for guard in guards if places[guard.name]]
        details: list[str] = []
        for guard in matching:
            details += [f"{guard.name}: {guard.reason}", *places[guard.name]]
        raise BuildError(
            "arch-trap",
            f"{count} {'line' if count == 1 else 'lines'} of {guards[0].fork} would fail at run "
            f"time on the arch that the stack is for.",
            details=details,
            todo=" ".join(guard.todo for guard in matching),
        )


def _common_folder(guards: Sequence[Guard]) -> str:
    """Return the deepest folder of all files that the globs can match, to read no others."""
    globs = [glob for guard in guards for glob in guard.files]
    folders = [re.split(r"[*?[]", glob, maxsplit=1)[0].rpartition("/")[0] for glob in globs]
    return commonpath(folders) if all(folders) else ""


def _useless(
    guard: Guard, before: Mapping[str, bytes], after: Mapping[str, bytes]
) -> Iterator[str]:
    covered = {path: text for path, text in before.items() if guard.covers(path)}
    searched = [text for path, text in covered.items() if path not in guard.exempt]
    for glob in guard.files:
        if not all(any(fnmatchcase(path, glob) for path in texts) for texts in (before, after)):
            yield f"{guard.name}: no file matches {glob}"
    for pattern in guard.patterns:
        if not any(pattern.encode() in text for text in searched):
            yield f"{guard.name}: no line holds {pattern!r}"
    for path in guard.exempt:
        if not guard.matching_lines(covered.get(path, b"")):
            yield f"{guard.name}: {path} needs no exemption"


def _places(guard: Guard, files: Mapping[str, bytes]) -> Iterator[str]:
    for path in sorted(files):
        if guard.covers(path) and path not in guard.exempt:
            yield from (f"  {path}:{number}" for number in guard.matching_lines(files[path]))
