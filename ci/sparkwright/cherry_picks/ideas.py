"""
Patch ideas, and the release that took each: a search of the trees of releases for the texts that
``cherry_picks/ideas.yaml`` names.

An idea comes from a report of a patched stack. Its probes describe, in short texts of upstream's
files, what the idea repairs. A probe that cannot be judged makes the idea undecided, never "not
needed".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from sparkwright.cherry_picks import upstream
from sparkwright.cherry_picks.ledger import Prose
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.core.git import Objects
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import SourceError

IdeaState = Literal["needed", "unknown", "absorbed"]
#: The first state of any probe decides: one missing piece is enough, and all must be there to do
#: without the idea.
_DECIDING: tuple[IdeaState, ...] = ("needed", "unknown", "absorbed")

#: The release, its state, and the files, lines and texts that decide it.
Finding = tuple[str, IdeaState, str]

#: A fragment of one line: enough to find a place, too little to be a copy of it.
Anchor = Annotated[str, msgspec.Meta(pattern=r"\A\S[^\n]*\Z", max_length=80)]
RelativePath = Annotated[str, msgspec.Meta(pattern=r"\A[\w][\w./+-]*\Z")]


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A piece of what an idea repairs; it holds in a part of a file that has every text of *has* and
    none of *lacks*.

    Attributes:
        paths: The file, in this or other releases; the first that has such a part counts.
        within: Narrows the file to parts: each line with one of these texts, and the lines that
            belong to it by their indentation.
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
        says: The purpose of the patch, the pull requests that brought the same to upstream, or why
            it never had an effect.
        needed_when: A release needs it while one of these holds.
    """

    says: Prose
    needed_when: Annotated[tuple[Probe, ...], msgspec.Meta(min_length=1)]


class Package(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The releases of a package, and its *ideas* by their names.

    Attributes:
        since: The first sdist that is searched.
        wheels: The releases instead (version → file name), of which *folder* is read.
    """

    ideas: dict[Prose, Idea]
    since: str = "0"
    folder: str = ""
    wheels: dict[str, str] = {}


class Absorption(msgspec.Struct, frozen=True):
    """
    An idea over all releases of its package.

    Attributes:
        undecided: Releases that could not be judged.
        evidence: What decided in the last release that needs it and in the one that took it, or in
            the last release that was judged.
    """

    idea: str
    package: str
    verdict: str
    undecided: tuple[str, ...]
    evidence: tuple[str, ...]


def load(root: Path) -> dict[str, Package]:
    """
    Return the ideas of the checkout *root*, by the names of packages on the package index.

    Raises:
        file-invalid: The file is damaged, or has two ideas of one name.
    """
    return strict_yaml.load(root / "cherry_picks" / "ideas.yaml", dict[str, Package])


def examine(objects: Objects, tree: str, idea: Idea, release: str) -> Finding:
    """Return the finding of *idea* on *release*, whose content is *tree*."""
    answers = [_try_probe(objects, tree, probe) for probe in idea.needed_when]
    state = min((state for state, _ in answers), key=_DECIDING.index)
    evidence = dict.fromkeys(evidence for answer, evidence in answers if answer == state)
    return release, state, "; ".join(evidence)


def _try_probe(objects: Objects, tree: str, probe: Probe) -> tuple[IdeaState, str]:
    for path in probe.paths:
        text = (objects.blob(tree, path) or b"").decode("utf-8", "replace")
        if judged := [_judge(path, text, start, end, probe) for start, end in _parts(text, probe)]:
            return min(judged, key=lambda answer: _DECIDING.index(answer[0]))
    place = f"{' or '.join(probe.within)} in " if probe.within else ""
    return "unknown", f"no {place}{' or '.join(probe.paths)}"


def _parts(text: str, probe: Probe) -> list[tuple[int, int]]:
    """Return where the parts of *text* begin and end to which the probe narrows it."""
    pattern = r"(?s).+"
    if probe.within:
        # Deeper lines belong to a line, and so do closing brackets below it. Blank lines and lines
        # of the preprocessor have no indentation of their own.
        anchor = "|".join(map(re.escape, probe.within))
        body = r"(?:[ \t\r]*\n|#.*\n|\1[ \t]+.*\n|\1[)\]{].*\n)*"
        pattern = rf"(?m)^([ \t]*).*(?:{anchor}).*\n{body}"
    return [match.span() for match in re.finditer(pattern, text)]


def _judge(path: str, text: str, start: int, end: int, probe: Probe) -> tuple[IdeaState, str]:
    """Return whether *probe* holds in a part of a file, and the text that decides."""
    part = text[start:end]
    wrong = [anchor for anchor in probe.lacks if anchor in part]
    wrong += [f"no {anchor}" for anchor in probe.has if anchor not in part]
    texts = wrong[:1] or [*probe.has[:1], *(f"no {anchor}" for anchor in probe.lacks)]
    line = 1 + text.count("\n", 0, start + max(part.find(texts[0]), 0))
    return "absorbed" if wrong else "needed", f"{path}:{line}: {', '.join(texts)}"


def absorption(name: str, package: str, findings: Sequence[Finding]) -> Absorption:
    """Return the absorption of an idea by its *findings*, in the order of the releases."""
    names, states, evidence = zip(*findings, strict=True)
    needed = [number for number, state in enumerate(states) if state == "needed"]
    absorbed = [number for number, state in enumerate(states) if state == "absorbed"]
    taken = [number for number in absorbed if needed and number > needed[0]][:1]
    regressed = [number for number in needed if taken and number > taken[0]]
    verdict = "never needed" if absorbed else "not known"
    if needed:
        verdict = f"still needed in {names[needed[-1]]}"
    if taken:
        verdict = f"needed from {names[needed[0]]}, taken by {names[taken[0]]}"
    if regressed:
        verdict += f", needed again in {names[regressed[0]]} to {names[regressed[-1]]}"
    deciding = sorted([*needed[-1:], *taken] or absorbed[-1:])
    undecided = tuple(release for release, state, _ in findings if state == "unknown")
    because = tuple(f"{names[number]}: {evidence[number]}" for number in deciding)
    return Absorption(name, package, verdict, undecided, because)


def _releases(name: str, package: Package, context: RunContext) -> list[upstream.Release]:
    from packaging.version import Version

    if not package.wheels:
        listed = upstream.releases(context, name, optional=True)
        return [entry for entry in listed if Version(entry.version) >= Version(package.since)]
    wheels = []
    for version, filename in package.wheels.items():
        project = filename.split("-", maxsplit=1)[0].replace("_", "-")
        sha256 = package_index.find(project, filename).sha256
        wheels.append(upstream.Release(project, version, filename, sha256, folder=package.folder))
    return wheels


def derive(context: RunContext) -> list[Absorption]:
    """
    Return the absorption of every idea, in the order of the file.

    Raises:
        not-provided: A package has no releases to search.
        offline, source-unreachable, source-mismatch: A release cannot be fetched.
    """
    absorptions = list[Absorption]()
    for name, package in load(context.project.root).items():
        listed = _releases(name, package, context)
        if not listed:
            raise SourceError(
                "not-provided",
                f"No release of {name} can be searched.",
                todo="Run this with a connection once; the releases stay in the store.",
            )
        with console.step(f"{len(listed)} releases of {name}"):
            bases = [upstream.of_release(context, release) for release in listed]
        absorptions += [
            absorption(
                key,
                name,
                [examine(context.objects, base.tree, idea, base.name) for base in bases],
            )
            for key, idea in package.ideas.items()
        ]
    return absorptions
