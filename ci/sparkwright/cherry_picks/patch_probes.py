"""
Patch ideas, and which release took each: a condition on a release's tree in place of somebody's memory.

An idea comes from a report of a patched stack. Its probes say, in short texts that stand in upstream's files, what the idea repairs.
Where a probe cannot be judged nobody knows, and that is never taken for "not needed".
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from sparkwright.core import strict_yaml
from sparkwright.core.errors import FileError
from sparkwright.core.git_store import Objects

State = Literal["needed", "absorbed", "not-there", "unknown"]

Prose = Annotated[str, msgspec.Meta(pattern=r"\S")]
#: An identifier or a fragment of one line: enough to find a place, too little to be a copy of it.
Anchor = Annotated[str, msgspec.Meta(pattern=r"\A\S[^\n]*\Z", max_length=80)]
RelativePath = Annotated[str, msgspec.Meta(pattern=r"\A[\w][\w./+-]*\Z")]
Number = Annotated[int, msgspec.Meta(ge=1)]

#: What decides when an idea's probes differ: one missing piece is enough, and all must be there to do without it.
_DECIDING: tuple[State, ...] = ("needed", "unknown", "not-there", "absorbed")


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    One piece of what an idea repairs; it holds where a place has every text of *has* and none of *lacks*.

    Attributes:
        paths: Where the file lies, or lay in other releases; the first that has a place counts, since upstream leaves empty ones behind.
        within: Narrows the file to places: each line with one of these texts, and what is indented below it.
    """

    paths: Annotated[tuple[RelativePath, ...], msgspec.Meta(min_length=1)]
    has: tuple[Anchor, ...] = ()
    lacks: tuple[Anchor, ...] = ()
    within: tuple[Anchor, ...] = ()

    def __post_init__(self) -> None:
        if not self.has and not self.lacks:
            raise ValueError(f"the probe of {self.paths[0]} asks for nothing")


class Idea(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A patch that somebody needed once.

    Attributes:
        package: Whose releases are asked, by its name on the package index.
        says: What the patch is for.
        needed_when: A release needs it while one of these holds.
        fork: Whose ledger has the numbers below; empty for what is no fork of ours.
        absorbed_by: Pull requests that brought what the idea brings.
        lost_by: Pull requests that took it away again.
        never: Why it never had an effect, or never a right one; the probes then say what would have to be so for it to have one.
    """

    name: Prose
    package: Prose
    says: Prose
    needed_when: Annotated[tuple[Probe, ...], msgspec.Meta(min_length=1)]
    fork: str = ""
    absorbed_by: tuple[Number, ...] = ()
    lost_by: tuple[Number, ...] = ()
    never: str = ""


class Finding(msgspec.Struct, frozen=True):
    """
    What one release says to an idea.

    Attributes:
        state: ``needed``; ``absorbed``: the release does without it; ``not-there``: the folder is, but not the file; ``unknown``: neither
            is, or the file has none of the places, so that upstream may have moved what the idea is about.
        evidence: File, line and text that decided.
    """

    idea: str
    release: str
    state: State
    evidence: str


class NeededUpTo(msgspec.Struct, frozen=True):
    """
    What a row of releases says to an idea; empty where there is no such release.

    Attributes:
        first_needed: The first release that needs it.
        last_needed: The last one, also when others before did not.
        first_absorbed: The first after *first_needed* that does without it: the release that took it.
        regressed: Releases after *first_absorbed* that need it again.
        undecided: Releases that say neither.
        evidence: What decided in *last_needed* and in *first_absorbed*, or in the last release that could be judged.
    """

    idea: str
    first_needed: str
    last_needed: str
    first_absorbed: str
    regressed: tuple[str, ...]
    undecided: tuple[str, ...]
    evidence: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """The whole in words."""
        if not self.last_needed:
            return "never needed" if self.evidence else "not known"
        if not self.first_absorbed:
            return f"still needed in {self.last_needed}"
        again = f", needed again in {self.regressed[0]} to {self.regressed[-1]}" if self.regressed else ""
        return f"needed from {self.first_needed}, taken by {self.first_absorbed}{again}"


class Package(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    Which releases of a package are asked: its sdists from *since* on, or *wheels* (release → file name), of which *folder* is read.
    """

    since: str = ""
    folder: str = ""
    wheels: dict[str, str] = {}


class Ideas(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``cherry_picks/ideas.yaml`` holds."""

    ideas: tuple[Idea, ...]
    packages: dict[str, Package] = {}


class _Place(msgspec.Struct, frozen=True):
    """Some lines of a file, with the number of the first."""

    path: str
    first: int
    lines: tuple[str, ...]

    def find(self, anchor: str) -> str:
        """Return where *anchor* stands, as ``file:line: text``, or nothing."""
        for number, line in enumerate(self.lines, self.first):
            if anchor in line:
                return f"{self.path}:{number}: {anchor}"
        return ""


def load(root: Path) -> tuple[Idea, ...]:
    """
    Return the ideas of the checkout *root*; `book` has their packages, too.

    Raises:
        file-invalid: As `yamlfile.load`; also where two ideas have one name.
    """
    return book(root).ideas


def book(root: Path) -> Ideas:
    """Return all of the file of the checkout *root*; see `load`."""
    path = root / "cherry_picks" / "ideas.yaml"
    found = strict_yaml.load(path, Ideas)
    names = [idea.name for idea in found.ideas]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise FileError("file-invalid", f"{path} has two ideas of one name.", details=twice)
    return found


def examine(objects: Objects, tree: str, idea: Idea, release: str) -> Finding:
    """Return what *release*, whose content is *tree*, says to *idea*; only the files that its probes name are read."""
    answers = [_ask(objects, tree, probe) for probe in idea.needed_when]
    state = min((state for state, _ in answers), key=_DECIDING.index)
    evidence = dict.fromkeys(evidence for said, evidence in answers if said == state)
    return Finding(idea.name, release, state, "; ".join(evidence))


def needed_up_to(findings: Sequence[Finding]) -> NeededUpTo:
    """Return what *findings* of one idea, in the order of the releases, come to; there must be one at least."""
    needs = [place for place, finding in enumerate(findings) if finding.state == "needed"]
    absorbs = [place for place, finding in enumerate(findings) if finding.state == "absorbed"]
    taken = next((place for place in absorbs if needs and place > needs[0]), None)
    deciding = [*needs[-1:], *([] if taken is None else [taken])] if needs else absorbs[-1:]
    return NeededUpTo(
        idea=findings[0].idea,
        first_needed=findings[needs[0]].release if needs else "",
        last_needed=findings[needs[-1]].release if needs else "",
        first_absorbed="" if taken is None else findings[taken].release,
        regressed=tuple(findings[place].release for place in needs if taken is not None and place > taken),
        undecided=tuple(finding.release for finding in findings if finding.state in ("not-there", "unknown")),
        evidence=tuple(f"{findings[place].release}: {findings[place].evidence}" for place in sorted(deciding)),
    )


def _ask(objects: Objects, tree: str, probe: Probe) -> tuple[State, str]:
    found = []
    for path in probe.paths:
        data = objects.blob(tree, path)
        if data is None:
            continue
        found.append(path)
        if judged := [_judge(place, probe) for place in _places(path, data.decode("utf-8", "replace"), probe.within)]:
            return next((("needed", evidence) for holds, evidence in judged if holds), ("absorbed", judged[0][1]))
    if found:
        return "unknown", f"{' and '.join(found)}: no {' or '.join(probe.within)}"
    folders = {posixpath.dirname(path) for path in probe.paths}
    return "not-there" if any(objects.has(f"{tree}:{folder}") for folder in folders) else "unknown", f"no file {' or '.join(probe.paths)}"


def _judge(place: _Place, probe: Probe) -> tuple[bool, str]:
    """Return whether *probe* holds in *place*, and the text that says so."""
    for anchor in probe.lacks:
        if there := place.find(anchor):
            return False, there
    for anchor in probe.has:
        if not place.find(anchor):
            return False, f"{place.path}:{place.first}: no {anchor}"
    absent = "".join(f", no {anchor}" for anchor in probe.lacks)
    return True, (place.find(probe.has[0]) + absent) if probe.has else f"{place.path}:{place.first}: {absent.removeprefix(', ')}"


def _places(path: str, text: str, within: Sequence[str]) -> Iterator[_Place]:
    """Yield the places of a file that *within* narrows it to; without it, the whole file."""
    lines = tuple(text.splitlines())
    if not within:
        yield _Place(path, 1, lines)
    for start, line in enumerate(lines):
        if any(anchor in line for anchor in within):
            yield _Place(path, start + 1, lines[start : _end(lines, start)])


def _end(lines: Sequence[str], start: int) -> int:
    """Return the index behind the last line that belongs to line *start* by its indentation, in Python, C++ and CMake alike."""
    depth, end = _depth(lines[start]), start + 1
    for index in range(start + 1, len(lines)):
        line = lines[index]
        if not line.strip() or line.startswith("#"):
            # Blank lines, and what the preprocessor reads, have no indentation of their own.
            continue
        if _depth(line) < depth or (_depth(line) == depth and line.strip()[0] not in ")]{"):
            break
        end = index + 1
    return end


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())
