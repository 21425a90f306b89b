"""
Bump: a fork of a stack to another upstream release, with its series, its picks and its lock, or not at all.

What the new base has already is dropped, naming the evidence; what stands at other lines is written anew; what conflicts waits in a
worktree. Until the export nothing reviewed is touched.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

import msgspec

from sparkwright.cherry_picks import drift, ledger, series
from sparkwright.cherry_picks.already_upstream import Base
from sparkwright.cherry_picks.drift import Trial
from sparkwright.core import strict_yaml
from sparkwright.core.errors import FileError
from sparkwright.forks import fetch, lock, package_index, resolve
from sparkwright.forks.context import Session
from sparkwright.forks.errors import SourceError
from sparkwright.forks.lock import ForkLock
from sparkwright.forks.stack import ForkSpec, StackSpec, WheelSpec


class Bump(msgspec.Struct, frozen=True):
    """
    What a bump would do.

    Attributes:
        trials: Every patch on the new base.
        gone: Patches that the new base has, each with the evidence.
        files: The reviewed files that change besides the series: path below the checkout → text.
        difference: Of lock.yaml, as a unified diff.
    """

    fork: str
    base: Base
    trials: tuple[Trial, ...]
    gone: dict[str, str]
    files: dict[str, str]
    difference: tuple[str, ...]


def plan(session: Session, fork: str, version: str) -> Bump:
    """
    Return what a bump of *fork* to the release *version* would do.

    Raises:
        not-provided: It is that version already.
        file-invalid: stack.yaml names the version in a way that the program does not rewrite.
        source-unreachable, source-unresolved, offline: The release cannot be had.
    """
    project = session.project
    before = project.fork(fork)
    after = _spec(before, version)
    if after == before:
        raise SourceError("not-provided", f"{fork} is at {version} already.")
    text = _stack_text(session, fork, before, after)
    made = resolve.resolve_fork(session, fork, after)
    locked = msgspec.structs.replace(session.lock, forks={**session.lock.forks, fork: made})
    base = _base(session, fork, made, version)
    book = ledger.load(project.root, fork)
    trials = drift.trials(session, fork, book, series.of(session, fork), base)
    gone = {one.patch: drift.proof(one) for one in trials if one.state in ("already-upstream", "empty")}
    old = project.lock_file.read_text("utf-8")
    files = {f"forks/{project.stack}/stack.yaml": text, f"forks/{project.stack}/lock.yaml": lock.render(locked)}
    if book and (kept := _ledger_text(book, project.stack, gone)):
        files[f"cherry_picks/{fork}.yaml"] = kept
    difference = difflib.unified_diff(old.splitlines(), lock.render(locked).splitlines(), "lock.yaml", "lock.yaml", lineterm="", n=1)
    return Bump(fork, base, tuple(trials), gone, files, tuple(difference))


def _base(session: Session, fork: str, locked: ForkLock, version: str) -> Base:
    fetched = fetch.fetch_locked(session, fork, locked)
    return Base(version, fetched.tree, fetched.pin if fetched.kind == "git" else "")


def _spec(before: ForkSpec, version: str) -> ForkSpec:
    """Return the fork's intent at *version*: the index's files of the same project, and the tag named after it."""
    named = before.sources
    if named.sdist is None:
        raise SourceError(
            "not-provided", "The fork has no release on the package index to bump to.", todo="Edit stack.yaml and run `sparkwright lock`."
        )
    old, project = named.sdist.version, named.sdist.name
    replace = msgspec.structs.replace
    git = replace(named.git, ref=named.git.ref.replace(old, version), commit="") if named.git and named.git.ref.endswith(old) else named.git
    wheel = replace(named.wheel, version=version) if named.wheel and named.wheel.name == project else named.wheel
    bases = {
        machine: replace(one, version=version, tag=_tag(one, version)) if one.name == project else one
        for machine, one in before.bases.items()
    }
    return replace(before, sources=replace(named, git=git, sdist=replace(named.sdist, version=version), wheel=wheel), bases=bases)


def _tag(base: WheelSpec, version: str) -> str:
    """Return the tag of the official wheel of *version* for the machine of *base*: glibc's version in it changes with releases."""
    machine = base.tag.rsplit("_", 1)[-1] if not base.tag.endswith("x86_64") else "x86_64"
    stem = f"{base.name.replace('-', '_')}-{version}-"
    # A file with a build number has one part more, and is another build of the same sources at best.
    tags = [file.name.removeprefix(stem).removesuffix(".whl") for file in package_index.files(base.name) if file.name.startswith(stem)]
    fitting = [tag for tag in tags if tag.count("-") == 2 and tag.endswith(machine) and tag.split("-")[:2] == base.tag.split("-")[:2]]
    return base.tag if base.tag in fitting or len(fitting) != 1 else fitting[0]


def _stack_text(session: Session, fork: str, before: ForkSpec, after: ForkSpec) -> str:
    """Return stack.yaml with the fork's block rewritten in place, so that people's comments stay; read back and compared."""
    assert before.sources.sdist
    assert after.sources.sdist
    old, new = before.sources.sdist.version, after.sources.sdist.version
    text = session.project.stack_file.read_text("utf-8")
    start = re.search(rf"^  {re.escape(fork)}:\n", text, re.MULTILINE)
    end = re.search(r"^ {0,2}[^\s#]", text[start.end() :], re.MULTILINE) if start else None
    if start:
        stop = start.end() + end.start() if end else len(text)
        block = re.sub(rf'(["\'])(v?){re.escape(old)}\1', lambda match: f"{match[1]}{match[2]}{new}{match[1]}", text[start.end() : stop])
        for machine, one in before.bases.items():
            block = block.replace(f'"{one.tag}"', f'"{after.bases[machine].tag}"')
        block = re.sub(r',\s*commit:\s*(["\'])[0-9a-f]+\1', "", block)
        text = text[: start.end()] + block + text[stop:]
    expected = msgspec.structs.replace(session.project.spec, forks={**session.project.spec.forks, fork: after})
    if not start or strict_yaml.parse(text, StackSpec, str(session.project.stack_file)) != expected:
        raise FileError(
            "file-invalid",
            f"{session.project.stack_file} is not written in the form that bump rewrites.",
            details=[f"expected: {fork} at {new} instead of {old}"],
            todo="Change the versions by hand, run `sparkwright lock`, then `sparkwright rebase`.",
        )  # fmt: skip
    return text


def _ledger_text(book: ledger.Ledger, stack: str, gone: Mapping[str, str]) -> str:
    """Return the ledger's text without what the stack no longer carries; empty when nothing changes."""
    dropped = [one for one in book.records if one.name in gone and stack in one.stacks]
    for one in dropped:
        stacks = {name: paths for name, paths in one.stacks.items() if name != stack}
        book = book.with_record(msgspec.structs.replace(one, stacks=stacks))
    return ledger.render(book) if dropped else ""
