"""
Arch rules: how the arch lists in a fork's CMake are changed, and which units stay at another arch,
as reviewed data.

A rule names one argument of one command in one branch, and the value that it expects there. It
appends to that list and does nothing else; when it finds another number of places, upstream has
moved, and the rewrite stops (DESIGN §7.2).
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import msgspec

from sparkwright.builder.arch import cmake_file
from sparkwright.builder.arch.cmake_file import Argument, Command, Edit
from sparkwright.builder.arch.forbidden_patterns import Guard
from sparkwright.core import strict_yaml
from sparkwright.core.errors import FileError

#: Text that a person wrote: a reason of one blank is none.
Prose = Annotated[str, msgspec.Meta(pattern=r"\S")]
Count = Annotated[int, msgspec.Meta(ge=1)]


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
            branch that the command is in). sites: How many places the rule must find. drop_when:
            What has to happen upstream for the rule to go.
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
    sites: Count = 1


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    Units that stay at another arch, because somebody looked and found that they should.

    Attributes:
        unit: Path inside the source tree; ``*`` and ``?`` match as in a shell, ``*`` also across
            folders. gencode: The virtual arch that every gencode of the unit has, such as
            ``compute_89``.
    """

    fork: str
    unit: str
    gencode: Annotated[str, msgspec.Meta(pattern=r"^compute_[0-9]+[af]?$")]
    reason: Prose

    def covers(self, source: str) -> bool:
        return fnmatchcase(source, self.unit)


class Dropped(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    Units that are not compiled although upstream compiles them for this request, because a rule
    empties their list.

    Attributes:
        unit: As in `Kept`.
    """

    fork: str
    unit: str
    reason: Prose

    def covers(self, source: str) -> bool:
        return fnmatchcase(source, self.unit)


class ArchRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    What ``build/<stack>/archs.yaml`` holds.

    Attributes:
        guards: Texts that the tree must not hold (`sparkwright.builder.arch.forbidden_patterns`).
    """

    rules: tuple[Rule, ...] = ()
    kept: tuple[Kept, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    guards: tuple[Guard, ...] = ()

    def of(self, fork: str) -> ArchRules:
        """Return what concerns *fork*."""
        return ArchRules(
            rules=tuple(rule for rule in self.rules if rule.fork == fork),
            kept=tuple(entry for entry in self.kept if entry.fork == fork),
            dropped=tuple(entry for entry in self.dropped if entry.fork == fork),
            guards=tuple(entry for entry in self.guards if entry.fork == fork),
        )

    def without(self, *names: str) -> ArchRules:
        """
        Return the rules less those *names*: what upstream would give, or what one rule is good for.
        """
        return msgspec.structs.replace(
            self, rules=tuple(rule for rule in self.rules if rule.name not in names)
        )

    def without_units(self, prefix: str) -> ArchRules:
        """Return the rules less the exceptions for units whose path begins with *prefix*."""
        kept = tuple(entry for entry in self.kept if not entry.unit.startswith(prefix))
        dropped = tuple(entry for entry in self.dropped if not entry.unit.startswith(prefix))
        return msgspec.structs.replace(self, kept=kept, dropped=dropped)


class Site(msgspec.Struct, frozen=True):
    """A place that a rule changed: the list *before* and *after*, and the line of its command."""

    rule: str
    file: str
    line: int
    before: str
    after: str


class Rewritten(msgspec.Struct, frozen=True):
    """The files that the rules changed, whole, and the sites in the order of the rules."""

    files: dict[str, bytes]
    sites: tuple[Site, ...]


def load(path: Path) -> ArchRules:
    """
    Return the rules of the file at *path*.

    Raises:
        file-invalid: As `yamlfile.load`; also where two rules have one name, guards included.
    """
    rules = strict_yaml.load(path, ArchRules)
    names = [*(rule.name for rule in rules.rules), *(guard.name for guard in rules.guards)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise FileError(
            "file-invalid", f"{path} has two rules of one name; guards count, too.", details=twice
        )
    return rules


def rewrite(files: Callable[[str], bytes], rules: ArchRules, fork: str) -> Rewritten:
    """
    Apply the rules of *fork*; every rule reads the text as upstream wrote it, so their order does
    not matter.

    Args:
        files: Returns the bytes of a file of the source tree by its path; raises FileNotFoundError
            or KeyError where there is none.

    Raises:
        rule-mismatch: A rule finds another number of sites than it expects, or has no effect, or a
            file is missing or malformed.
    """
    mine = [rule for rule in rules.rules if rule.fork == fork]
    changed: dict[str, bytes] = {}
    sites: dict[str, list[Site]] = {rule.name: [] for rule in mine}
    for file in dict.fromkeys(rule.file for rule in mine):
        before = _read(files, file, next(rule.name for rule in mine if rule.file == file))
        commands = cmake_file.parse(before, file)
        edits: dict[int, Edit] = {}
        for rule in (rule for rule in mine if rule.file == file):
            for command, place in _matches(rule, commands):
                if place.start in edits:
                    raise FileError(
                        "rule-mismatch",
                        f"Rule {rule.name} changes a list that another rule changes.",
                        details=[f"{file}:{command.line}"],
                    )
                after = ";".join((*([place.text] if place.text else []), *rule.append))
                edits[place.start] = Edit(place.start, place.end, after)
                sites[rule.name].append(Site(rule.name, file, command.line, place.text, after))
        changed[file] = cmake_file.apply(before, edits.values())
    return Rewritten(changed, tuple(site for rule in mine for site in sites[rule.name]))


def _read(files: Callable[[str], bytes], file: str, rule: str) -> bytes:
    try:
        return files(file)
    except (FileNotFoundError, KeyError) as error:
        raise FileError(
            "rule-mismatch",
            f"Rule {rule} is for {file}, which the source tree does not have.",
            details=[file],
        ) from error


def _matches(rule: Rule, commands: tuple[Command, ...]) -> list[tuple[Command, Argument]]:
    """Return the commands that *rule* is for, each with the argument that it changes."""
    near = [command for command in commands if _named(rule, command)]
    found = [
        command
        for command in near
        if command.arguments[rule.argument].text == rule.expect and _under(rule, command)
    ]
    done = [command for command in found or near if _under(rule, command) and _holds(rule, command)]
    if done:
        raise FileError(
            "rule-mismatch",
            f"Rule {rule.name} has no effect: the list at {rule.file}:{done[0].line} holds "
            f"{', '.join(rule.append)} already.",
            details=[
                f"{rule.file}:{command.line}: {command.arguments[rule.argument].text}"
                for command in done
            ],
            todo=f"Upstream may have done what the rule does. It may go when: {rule.drop_when}",
        )
    if len(found) != rule.sites:
        raise FileError(
            "rule-mismatch",
            f"Rule {rule.name} matches {len(found)} places in {rule.file} instead of {rule.sites}.",
            details=[_explain(rule, command) for command in near]
            or [f"no {rule.command}({' '.join(rule.where)} …) in {rule.file}"],
        )
    return [(command, command.arguments[rule.argument]) for command in found]


def _named(rule: Rule, command: Command) -> bool:
    same = command.name == rule.command.lower() and command.texts[: len(rule.where)] == rule.where
    return same and rule.argument < len(command.arguments)


def _under(rule: Rule, command: Command) -> bool:
    return all(any(text in scope.text for scope in command.scopes) for text in rule.under)


def _holds(rule: Rule, command: Command) -> bool:
    return set(rule.append) <= set(command.arguments[rule.argument].text.split(";"))


def _explain(rule: Rule, command: Command) -> str:
    value = command.arguments[rule.argument].text
    faults = [] if value == rule.expect else [f"holds {value!r}, the rule expects {rule.expect!r}"]
    if not _under(rule, command):
        branch = command.scopes[-1] if command.scopes else None
        faults.append(
            f"lies in the branch {branch.kind}({branch.text})" if branch else "lies in no branch"
        )
    return f"{rule.file}:{command.line}: {'; '.join(faults) or 'matches'}"
