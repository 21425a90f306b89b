"""
Arch rules, as reviewed data: how the arch lists in a fork's CMake are changed, which units stay at
another arch.

A rule replaces a text that occurs exactly once in its file; if it does not, upstream has moved, and
the rewrite stops. Every other byte stays as it was. Whether a rule has its effect is seen by the
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Annotated

import msgspec

from sparkwright.builder import BuildError
from sparkwright.core import strict_yaml

#: Bytes of a line that a message shows.
_LONGEST_LINE = 100


class ArchRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    One rewrite.

    Attributes:
        source: The vendored source that holds the file; empty for the fork's own tree.
        file: Path inside the source tree.
        before: The text as upstream wrote it, from the name of the list on.
        after: The same text with more elements.
        drop_when: The change upstream after which the rule is no longer needed.
    """

    name: str
    fork: str
    file: str
    before: strict_yaml.Prose
    after: strict_yaml.Prose
    reason: strict_yaml.Prose
    drop_when: strict_yaml.Prose
    source: str = ""

    def __post_init__(self) -> None:
        if self.before == self.after:
            raise ValueError(f"{self.name}: `before` and `after` are the same text")


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
    """A place that a rule changed: its line, and its text *before* and *after*."""

    rule: str
    file: str
    line: int
    before: str
    after: str


def rewrite(
    read: Callable[[str], bytes | None], rules: Sequence[ArchRule]
) -> tuple[dict[str, bytes], tuple[Site, ...]]:
    """
    Return the changed files, and the sites in the order of *rules*.

    Args:
        read: Returns the bytes of a file of the source tree, None if there is none.

    Raises:
        rule-mismatch: A rule's text does not occur exactly once.
    """
    changed: dict[str, bytes] = {}
    sites: list[Site] = []
    for rule in rules:
        data = changed.get(rule.file) or read(rule.file) or b""
        before, after = rule.before.encode(), rule.after.encode()
        count = data.count(before)
        if count != 1:
            raise BuildError(
                "rule-mismatch",
                f"The text of rule {rule.name} occurs {count} times in {rule.file}, not once.",
                details=[f"expected: {rule.before}", *_near_misses(rule, data)],
                todo="See where upstream moved the list, or whether upstream has done what the "
                f"rule does. It may go when: {rule.drop_when}",
            )
        line = data[: data.index(before)].count(b"\n") + 1
        changed[rule.file] = data.replace(before, after)
        old, new = (" ".join(text.split()) for text in (rule.before, rule.after))
        sites.append(Site(rule.name, rule.file, line, old, new))
    return changed, tuple(sites)


def _near_misses(rule: ArchRule, data: bytes) -> list[str]:
    """Return the lines of *data* that hold the name of the list that *rule* changes."""
    name, lines = rule.before.split()[0], data.decode("utf-8", "replace").splitlines()
    near = [
        f"{rule.file}:{number}: {line.strip()[:_LONGEST_LINE]}"
        for number, line in enumerate(lines, 1)
        if name in line
    ]
    return near or [f"{rule.file} does not hold {name}"]
