"""
Patch ideas, and the release that took each, decided by a condition on the trees of releases
(``cherry_picks/ideas.yaml``).

An idea comes from a report of a patched stack. Its probes describe, in short texts of upstream's
files, what the idea repairs. A probe that cannot be judged makes the idea undecided, never "not
needed".
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from sparkwright.cherry_picks import upstream
from sparkwright.cherry_picks.upstream import Release
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.core.git_store import Objects
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError

State = Literal["needed", "unknown", "not-there", "absorbed"]
#: The first state of any probe decides: one missing piece is enough, and all must be there to do
#: without the idea.
_DECIDING: tuple[State, ...] = ("needed", "unknown", "not-there", "absorbed")

Prose = Annotated[str, msgspec.Meta(pattern=r"\S")]
#: A fragment of one line: enough to find a place, too little to be a copy of it.
Anchor = Annotated[str, msgspec.Meta(pattern=r"\A\S[^\n]*\Z", max_length=80)]
RelativePath = Annotated[str, msgspec.Meta(pattern=r"\A[\w][\w./+-]*\Z")]
Number = Annotated[int, msgspec.Meta(ge=1)]


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A piece of what an idea repairs; it holds in a part of a file that has every text of *has* and
    none of *lacks*.

    Attributes:
        paths: The file, in this or other releases; the first that has such a part counts.
        within: Narrows the file to parts: each line with one of these texts, and the lines indented
            below it.
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
    A patch that was needed once.

    Attributes:
        package: Whose releases are asked, by its name on the package index.
        says: The purpose of the patch.
        needed_when: A release needs it while one of these holds.
        fork: The fork whose ledger has the numbers below.
        absorbed_by, lost_by: Pull requests that brought what the idea brings, and that removed it
            again.
        never: Why it never had an effect; the probes then describe what would have to be so.
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
    An idea on one release.

    Attributes:
        state: ``absorbed``: not needed; ``not-there``: the file is missing, but not its folder;
            ``unknown``: both are, or the part of the file is.
        evidence: File, line and text that decided.
    """

    idea: str
    release: str
    state: State
    evidence: str


class Absorption(msgspec.Struct, frozen=True):
    """
    An idea over all releases of its package; fields are empty if there is no such release.

    Attributes:
        first_absorbed: The first release after *first_needed* that does not need it.
        regressed: Releases after that which need it again.
        undecided: Releases that could not be judged.
        evidence: What decided in *last_needed* and in *first_absorbed*, or in the last release that
            was judged.
    """

    idea: str
    package: str
    verdict: str
    first_needed: str
    last_needed: str
    first_absorbed: str
    regressed: tuple[str, ...]
    undecided: tuple[str, ...]
    evidence: tuple[str, ...]
    findings: tuple[Finding, ...]


class Package(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The releases of a package: its sdists from *since* on, or *wheels* (release → file name), of
    which *folder* is read.
    """

    since: str = ""
    folder: str = ""
    wheels: dict[str, str] = {}


class Ideas(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of ``cherry_picks/ideas.yaml``."""

    ideas: tuple[Idea, ...]
    packages: dict[str, Package] = {}

    def __post_init__(self) -> None:
        names = [idea.name for idea in self.ideas]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two ideas of one name: {', '.join(twice)}")


def load(root: Path) -> Ideas:
    """
    Return the ideas of the checkout *root*.

    Raises:
        file-invalid: The file is damaged, or has two ideas of one name.
    """
    return strict_yaml.load(root / "cherry_picks" / "ideas.yaml", Ideas)


def examine(objects: Objects, tree: str, idea: Idea, release: str) -> Finding:
    """Return the finding of *idea* on *release*, whose content is *tree*."""
    answers = [_ask(objects, tree, probe) for probe in idea.needed_when]
    state = min((state for state, _ in answers), key=_DECIDING.index)
    evidence = dict.fromkeys(evidence for answer, evidence in answers if answer == state)
    return Finding(idea.name, release, state, "; ".join(evidence))


def _ask(objects: Objects, tree: str, probe: Probe) -> tuple[State, str]:
    present = []
    for path in probe.paths:
        data = objects.blob(tree, path)
        if data is None:
            continue
        present.append(path)
        parts = _parts(data.decode("utf-8", "replace").splitlines(), probe.within)
        if judged := [_judge(path, first, lines, probe) for first, lines in parts]:
            return next(
                (("needed", evidence) for holds, evidence in judged if holds),
                ("absorbed", judged[0][1]),
            )
    if present:
        return "unknown", f"{' and '.join(present)}: no {' or '.join(probe.within)}"
    folders = {posixpath.dirname(path) for path in probe.paths}
    there = any(objects.has(f"{tree}:{folder}") for folder in folders)
    return "not-there" if there else "unknown", f"no file {' or '.join(probe.paths)}"


def _judge(path: str, first: int, lines: Sequence[str], probe: Probe) -> tuple[bool, str]:
    """
    Return whether *probe* holds in a part of a file, which begins at line *first*, and the text
    that decides.
    """

    def find(anchor: str) -> str:
        return next(
            (
                f"{path}:{number}: {anchor}"
                for number, line in enumerate(lines, first)
                if anchor in line
            ),
            "",
        )

    if there := next(filter(None, map(find, probe.lacks)), ""):
        return False, there
    if missing := [anchor for anchor in probe.has if not find(anchor)]:
        return False, f"{path}:{first}: no {missing[0]}"
    absent = ", ".join(f"no {anchor}" for anchor in probe.lacks)
    evidence = find(probe.has[0]) if probe.has else f"{path}:{first}:"
    return True, f"{evidence}{',' if probe.has and absent else ''} {absent}".rstrip()


def _parts(lines: Sequence[str], within: Sequence[str]) -> Iterator[tuple[int, Sequence[str]]]:
    """
    Yield the parts of a file that *within* narrows it to, each with the number of its first line.
    """
    if not within:
        yield 1, lines
    for start, line in enumerate(lines):
        if any(anchor in line for anchor in within):
            yield start + 1, lines[start : _end(lines, start)]


def _end(lines: Sequence[str], start: int) -> int:
    """
    Return the index behind the last line that belongs to line *start* by its indentation, in
    Python, C++ and CMake alike.
    """

    def depth(line: str) -> int:
        return len(line) - len(line.lstrip())

    end = start + 1
    for index, line in enumerate(lines[start + 1 :], start + 1):
        # Blank lines and lines of the preprocessor have no indentation of their own.
        if not line.strip() or line.startswith("#"):
            continue
        if depth(line) < depth(lines[start]) or (
            depth(line) == depth(lines[start]) and line.strip()[0] not in ")]{"
        ):
            break
        end = index + 1
    return end


def absorption(package: str, findings: Sequence[Finding]) -> Absorption:
    """
    Return the absorption of an idea by its *findings*, in the order of the releases; there must be
    at least one.
    """
    needed = [number for number, finding in enumerate(findings) if finding.state == "needed"]
    absorbed = [number for number, finding in enumerate(findings) if finding.state == "absorbed"]
    taken = [number for number in absorbed if needed and number > needed[0]][:1]
    deciding = sorted([*needed[-1:], *taken]) if needed else absorbed[-1:]

    def release(numbers: Sequence[int]) -> str:
        return findings[numbers[0]].release if numbers else ""

    first, last, by = release(needed), release(needed[-1:]), release(taken)
    regressed = tuple(findings[number].release for number in needed if taken and number > taken[0])
    if not needed:
        verdict = "never needed" if absorbed else "not known"
    else:
        again = f", needed again in {regressed[0]} to {regressed[-1]}" if regressed else ""
        verdict = f"needed from {first}, taken by {by}{again}" if by else f"still needed in {last}"
    undecided = tuple(
        finding.release for finding in findings if finding.state in ("not-there", "unknown")
    )
    evidence = tuple(
        f"{findings[number].release}: {findings[number].evidence}" for number in deciding
    )
    return Absorption(
        findings[0].idea,
        package,
        verdict,
        first,
        last,
        by,
        regressed,
        undecided,
        evidence,
        tuple(findings),
    )


def releases(session: RunContext, name: str, package: Package, last: str = "") -> list[Release]:
    """
    Return the releases of the package *name*, up to the version *last*, in order.

    Raises:
        source-unreachable: The index does not answer, or lacks a wheel that the file names.
    """
    from packaging.version import Version

    if not package.wheels:
        listed = upstream.releases(session, name, optional=True)
        return [
            release
            for release in listed
            if Version(release.version) >= Version(package.since)
            and not (last and Version(release.version) > Version(last))
        ]
    wheels = []
    for version, filename in package.wheels.items():
        project = filename.split("-", maxsplit=1)[0].replace("_", "-")
        sha256 = package_index.find(project, filename).sha256
        wheels.append(Release(project, version, filename, sha256, folder=package.folder))
    return wheels


def derive(session: RunContext, last: Sequence[tuple[str, str]] = ()) -> list[Absorption]:
    """
    Return the absorption of every idea, in the order of the file.

    Args:
        last: Packages, and the last version of each that is asked.

    Raises:
        not-provided: A package of an idea has no releases to ask.
        offline, source-unreachable, source-mismatch: A release cannot be fetched.
    """
    book = load(session.project.root)
    trees: dict[str, list[tuple[str, str]]] = {}
    for name in dict.fromkeys(idea.package for idea in book.ideas):
        listed = releases(
            session, name, book.packages.get(name, Package()), dict(last).get(name, "")
        )
        if not listed:
            raise SourceError(
                "not-provided",
                f"No release of {name} can be asked.",
                todo="Run this with a connection once; the releases stay in the store.",
            )
        trees[name] = []
        with console.progress(f"releases of {name}", len(listed)) as progress:
            for number, release in enumerate(listed, 1):
                trees[name].append((release.version, upstream.of_release(session, release).tree))
                progress.update(number, release.version)
    return [
        absorption(
            idea.package,
            [
                examine(session.objects, tree, idea, version)
                for version, tree in trees[idea.package]
            ],
        )
        for idea in book.ideas
    ]
