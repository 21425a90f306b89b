"""
Bump: a fork of a stack to another upstream release, with its series, its picks and its lock, or not
at all.

Patches that the new base has are dropped, with the evidence. What conflicts waits in a worktree;
until the export nothing reviewed changes.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

from sparkwright.cherry_picks import drift, ledger, series
from sparkwright.cherry_picks.upstream import Base, Upstream
from sparkwright.core import strict_yaml
from sparkwright.core.errors import FileError
from sparkwright.forks import fetch, lock, package_index, resolve
from sparkwright.forks.stack import ForkSpec, Project, SourceError, StackSpec, WheelSpec


class Bump(msgspec.Struct, frozen=True):
    """
    The changes of a bump.

    Attributes:
        trials: Every patch on the new base, without the dropped ones.
        gone: Patches that are left out, each with the evidence or the option that says so.
        files: The reviewed files that change besides the series: path below the checkout → text.
    """

    fork: str
    base: Base
    trials: tuple[drift.Trial, ...]
    gone: dict[str, str]
    files: dict[str, str]


def plan(upstream: Upstream, version: str, drop: Collection[str] = ()) -> Bump:
    """
    Return the changes of a bump to the release *version*.

    Args:
        drop: Patches and picks to leave out; the series is tried on the new base without them.

    Raises:
        not-provided: The fork is at that version already, or *drop* names no patch.
        file-invalid: stack.yaml names the version in a form that is not rewritten.
        source-unreachable, source-unresolved, offline: The release cannot be fetched.
    """
    context, fork, project = upstream.context, upstream.fork, upstream.context.project
    before = project.fork(fork)
    after = _spec(before, version)
    if after == before:
        raise SourceError("not-provided", f"{fork} is at {version} already.")
    patches = series.of(context, fork)
    if unknown := sorted(set(drop) - {patch.name for patch in patches}):
        raise SourceError(
            "not-provided",
            f"The series of {fork} has no patch {', '.join(unknown)} to drop.",
            details=[patch.name for patch in patches],
        )
    stack_text = _stack_text(project, fork, before, after)
    resolved = resolve.resolve_fork(context, fork, after)
    source = fetch.fetch(context, fork, resolved)
    base = Base(version, source.tree, source.pin if source.kind == "git" else "")
    tried = drift.trials(upstream, [patch for patch in patches if patch.name not in drop], base)
    gone = dict.fromkeys(drop, "dropped with --drop")
    gone |= {
        trial.patch: trial.proof for trial in tried if trial.state in ("already-upstream", "empty")
    }
    lock_text = lock.render(
        msgspec.structs.replace(context.lock, forks={**context.lock.forks, fork: resolved})
    )
    files = {
        f"forks/{project.stack}/stack.yaml": stack_text,
        f"forks/{project.stack}/lock.yaml": lock_text,
    }
    if (book := upstream.book.without(project.stack, gone)) != upstream.book:
        files[f"cherry_picks/{fork}.yaml"] = ledger.render(book)
    return Bump(fork, base, tuple(tried), gone, files)


def _spec(before: ForkSpec, version: str) -> ForkSpec:
    """
    Return the fork at *version*: the files of the same project on the index, and the tag named
    after it.
    """
    sources, replace = before.sources, msgspec.structs.replace
    if sources.sdist is None:
        raise SourceError(
            "not-provided",
            "The fork has no release on the package index to bump to.",
            todo="Edit stack.yaml and run `sparkwright lock`.",
        )
    old, project, git = sources.sdist.version, sources.sdist.name, sources.git
    if git and git.ref.endswith(old):
        git = replace(git, ref=git.ref.replace(old, version), commit="")
    wheel = sources.wheel
    if wheel and wheel.name == project:
        wheel = replace(wheel, version=version)
    bases = {
        machine: replace(base, version=version, tag=_tag(base, version))
        if base.name == project
        else base
        for machine, base in before.bases.items()
    }
    return replace(
        before,
        sources=replace(
            sources, git=git, sdist=replace(sources.sdist, version=version), wheel=wheel
        ),
        bases=bases,
    )


def _tag(base: WheelSpec, version: str) -> str:
    """
    Return the tag of the official wheel of *version* for the machine of *base*; the glibc version
    in it changes.
    """
    machine = base.tag.rsplit("_", 1)[-1] if not base.tag.endswith("x86_64") else "x86_64"
    stem = f"{base.name.replace('-', '_')}-{version}-"
    names = [
        file.name.removeprefix(stem).removesuffix(".whl")
        for file in package_index.files(base.name)
        if file.name.startswith(stem)
    ]
    # A name with a build number has one part more.
    tags = [
        tag
        for tag in names
        if tag.count("-") == 2
        and tag.endswith(machine)
        and tag.split("-")[:2] == base.tag.split("-")[:2]
    ]
    return base.tag if base.tag in tags or len(tags) != 1 else tags[0]


def _stack_text(project: Project, fork: str, before: ForkSpec, after: ForkSpec) -> str:
    """
    Return stack.yaml with the fork's block rewritten in place, so that comments stay, and verified
    by reading it back.
    """
    assert before.sources.sdist
    assert after.sources.sdist
    old, new = before.sources.sdist.version, after.sources.sdist.version
    text = project.stack_file.read_text("utf-8")
    if match := re.search(rf"(?ms)^  {re.escape(fork)}:\n(.*?)(?=^ {{0,2}}[^\s#]|\Z)", text):
        block = re.sub(
            rf'(["\'])(v?){re.escape(old)}\1',
            lambda version: f"{version[1]}{version[2]}{new}{version[1]}",
            match[1],
        )
        for machine, base in before.bases.items():
            block = block.replace(f'"{base.tag}"', f'"{after.bases[machine].tag}"')
        block = re.sub(r',\s*commit:\s*(["\'])[0-9a-f]+\1', "", block)
        text = text[: match.start(1)] + block + text[match.end(1) :]
    expected = msgspec.structs.replace(project.spec, forks={**project.spec.forks, fork: after})
    if strict_yaml.parse(text, StackSpec, str(project.stack_file)) != expected:
        raise FileError(
            "file-invalid",
            f"{project.stack_file} is not written in the form that bump rewrites.",
            details=[f"expected: {fork} at {new} instead of {old}"],
            todo="Change the versions by hand, run `sparkwright lock`, then `sparkwright patch "
            "rebase`.",
        )
    return text
