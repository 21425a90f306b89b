"""
What a wheel is made of, taken apart into pieces that can be exchanged one by one, and put together again as a checkout of its own.

A search tries states of the reviewed data that nobody ever committed: an older upstream commit under today's patches, half of a series,
one stack with a single tool of another. Each becomes a folder with the few files that a build reads, so that the build is the real one.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from sparkwright.builder.environment import toolchain
from sparkwright.builder.environment.toolchain import EnvironmentSpec
from sparkwright.cherry_picks import series
from sparkwright.cherry_picks.errors import PatchError
from sparkwright.cherry_picks.patch import Patch
from sparkwright.core import digest, strict_yaml
from sparkwright.core.errors import FileError
from sparkwright.forks import fetch as sources
from sparkwright.forks import lock
from sparkwright.forks.context import Session
from sparkwright.forks.lock import ForkLock, Lock
from sparkwright.forks.stack import ForkSpec, Project, StackSpec

T = TypeVar("T")

#: The one patch of a fork's series in such a checkout: all that its patches do, where they stand in this tree.
PATCH = "series.patch"

_HEAD = b"""\
From: sparkwright <sparkwright@localhost>
Date: Thu, 1 Jan 1970 00:00:00 +0000
Subject: [PATCH] What the series does

Upstream-Status: Inappropriate [made for one step of a search]
Reason: the step needs the patches where they stand in its tree
Drop-When: the step ends
---
"""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """
    What a fork and those that it needs are made of.

    Attributes:
        stack: Name of the stack, its arch and its label.
        sources: Fork → what is wanted and what is locked.
        patches: Fork → its series, picks included.
        rules: ``archs.yaml``.
        settings: ``environment.yaml``, by fork.
        tools: ``pylock.toml``: the head under the empty name, then what it says of each package.
        bases: Fork → tree of its source, where that is here already.
    """

    stack: tuple[str, str, str]
    sources: Mapping[str, tuple[ForkSpec, ForkLock]]
    patches: Mapping[str, tuple[Patch, ...]]
    rules: str
    settings: EnvironmentSpec
    tools: Mapping[str, str]
    bases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def pieces(self) -> dict[str, str]:
        """Return the digest of each piece, by the name that people know it by."""
        parts: dict[str, object] = {"arch": self.stack[1], "rules": self.rules}
        for fork, source in self.sources.items():
            parts |= {f"source of {fork}": source, f"series of {fork}": [(one.name, one.sha256) for one in self.patches[fork]]}
            parts[f"settings of {fork}"] = self.settings.forks[fork]
        parts |= {f"tool {name}" if name else "head of pylock.toml": text for name, text in self.tools.items()}
        return {name: digest.key("piece", part) for name, part in parts.items()}


def of(session: Session, fork: str) -> Recipe:
    """Return what *fork* is made of in the checkout of *session*."""
    project = session.project
    forks = (*project.fork(fork).needs, fork)
    wanted = toolchain.spec(project)
    return Recipe(
        stack=(project.stack, project.spec.arch, project.spec.label),
        sources={name: (project.fork(name), session.lock.forks[name]) for name in forks},
        patches={name: series.of(session, name) for name in forks},
        rules=(project.build_folder / "archs.yaml").read_text("utf-8"),
        settings=EnvironmentSpec({name: wanted.forks[name] for name in forks if name in wanted.forks}),
        tools=_packages((project.build_folder / "pylock.toml").read_text("utf-8")),
    )


def _packages(text: str) -> dict[str, str]:
    """Return the text of pylock.toml by package; several entries of one package stay together."""
    head, *blocks = re.split(r"(?m)^(?=\[\[packages\]\]$)", text)
    found = {"": head}
    for block in blocks:
        try:
            name = str(tomllib.loads(block)["packages"][0]["name"])
        except (tomllib.TOMLDecodeError, LookupError, TypeError) as error:
            raise FileError("file-invalid", "pylock.toml has a package without a name.", details=block.splitlines()[:5]) from error
        found[name] = found.get(name, "") + block
    return found


def mixed(one: Recipe, other: Recipe, taken: Collection[str]) -> Recipe:
    """Return *one* with the pieces *taken* of *other*; their names are those of `Recipe.pieces`."""
    forks = tuple(dict.fromkeys([*one.sources, *other.sources]))

    def by_fork(kind: str, first: Mapping[str, T], second: Mapping[str, T]) -> dict[str, T]:
        chosen = {name: (second if f"{kind} of {name}" in taken else first) for name in forks}
        return {name: side[name] for name, side in chosen.items() if name in side}

    names = dict.fromkeys([*one.tools, *other.tools])
    tools = {name: (other if (f"tool {name}" if name else "head of pylock.toml") in taken else one).tools.get(name) for name in names}
    return dataclasses.replace(
        one,
        stack=(one.stack[0], other.stack[1] if "arch" in taken else one.stack[1], one.stack[2]),
        sources=by_fork("source", one.sources, other.sources),
        patches=by_fork("series", one.patches, other.patches),
        rules=other.rules if "rules" in taken else one.rules,
        settings=EnvironmentSpec(by_fork("settings", one.settings.forks, other.settings.forks)),
        tools={name: text for name, text in tools.items() if text is not None},
    )


def patched(session: Session, base: str, patches: Collection[Patch]) -> str:
    """
    Return the tree that *patches* make of the tree *base*, each where its lines stand there; what is there already is left out.

    Raises:
        patch-conflict: One does not apply.
    """
    done = series.evaluate(session.objects, base, list(patches))
    if bad := [one.name for one, outcome in zip(patches, done, strict=True) if outcome.status == "conflict"]:
        raise PatchError("patch-conflict", f"{', '.join(bad)} cannot be applied here.")
    return done[-1].tree if done else base


def write(session: Session, made: Recipe, folder: Path) -> tuple[Session, dict[str, str]]:
    """
    Make *folder* a checkout that holds *made*.

    Returns:
        A run on it, and the patched tree of each fork.

    Raises:
        patch-conflict, and what fetching raises: It cannot be made.
    """
    shutil.rmtree(folder, ignore_errors=True)
    stack, arch, label = made.stack
    place, build = folder / "forks" / stack, folder / "build" / stack
    for path in (place, build):
        path.mkdir(parents=True)
    spec = StackSpec(stack, arch, label, {name: wanted for name, (wanted, _) in made.sources.items()})
    (place / "stack.yaml").write_text(strict_yaml.dump(spec), "utf-8")
    (place / "lock.yaml").write_text(lock.render(Lock(1, stack, {name: locked for name, (_, locked) in made.sources.items()})), "utf-8")
    (build / "archs.yaml").write_text(made.rules, "utf-8")
    (build / "environment.yaml").write_text(strict_yaml.dump(made.settings), "utf-8")
    (build / "pylock.toml").write_text("".join(made.tools.values()), "utf-8")
    other = dataclasses.replace(session, project=Project(folder, stack), output=folder.parent / "dist")
    trees = {}
    for fork in made.sources:
        base = made.bases.get(fork) or sources.fetch(other, fork).tree
        trees[fork] = patched(other, base, made.patches.get(fork, ()))
        _series(other, place / fork, base, trees[fork])
    return other, trees


def _series(session: Session, folder: Path, base: str, tree: str) -> None:
    change = session.objects.run(["diff", "-U1", "--full-index", "--binary", "--no-renames", "--no-color", "--no-ext-diff", base, tree])[1]
    folder.mkdir()
    (folder / "series").write_text(f"{PATCH}\n" if change else "", "utf-8")
    if change:
        (folder / PATCH).write_bytes(_HEAD + change)


def at_commit(made: Recipe, fork: str, commit: str, tree: str, base: str) -> Recipe:
    """Return *made* with the upstream *commit* as the source of *fork*: its *tree*, and that less what is not fetched, *base*."""
    wanted, locked = made.sources[fork]
    assert locked.git is not None
    git = msgspec.structs.replace(locked.git, ref=commit, commit=commit, tree=tree)
    source = (wanted, msgspec.structs.replace(locked, git=git, sdist=None, wheel=None))
    return dataclasses.replace(made, sources={**made.sources, fork: source}, bases={fork: base})
