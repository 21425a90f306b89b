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

from sparkwright.cherry_picks import drift, series
from sparkwright.cherry_picks.ledger import render
from sparkwright.cherry_picks.upstream import Base, Upstream, base_of
from sparkwright.core import strict_yaml
from sparkwright.core.errors import FileError
from sparkwright.forks import fetch, package_index, resolve
from sparkwright.forks.stack import (
    ForkSpec,
    Project,
    SourceError,
    StackSpec,
    WheelSpec,
    render_lock,
)


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
    stack_text, after = _stack_text(project, fork, version)
    patches = series.of(context, fork)
    if unknown := sorted(set(drop) - {patch.name for patch in patches}):
        raise SourceError(
            "not-provided",
            f"The series of {fork} has no patch {', '.join(unknown)} to drop.",
            details=[patch.name for patch in patches],
        )
    resolved = resolve.resolve_fork(context, fork, after)
    base = base_of(fetch.fetch(context, fork, resolved), version)
    tried = drift.trials(upstream, [patch for patch in patches if patch.name not in drop], base)
    gone = dict.fromkeys(drop, "dropped with --drop")
    gone |= {
        trial.patch: trial.proof for trial in tried if trial.state in ("already-upstream", "empty")
    }
    lock_text = render_lock(
        msgspec.structs.replace(context.lock, forks={**context.lock.forks, fork: resolved})
    )
    files = {
        f"forks/{project.stack}/stack.yaml": stack_text,
        f"forks/{project.stack}/lock.yaml": lock_text,
    }
    if (ledger := upstream.ledger.without(project.stack, gone)) != upstream.ledger:
        files[f"cherry_picks/{fork}.yaml"] = render(ledger)
    return Bump(fork, base, tuple(tried), gone, files)


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


def _pins(fork: ForkSpec, version: str = "") -> list[tuple[str, ...]]:
    """
    Return the names and versions of the files of *fork* on the index, and its git ref and commit;
    with *version* as they are after a bump to it.
    """
    sdist, git = fork.sources.sdist, fork.sources.git
    assert sdist
    files = [file for file in (sdist, fork.sources.wheel, *fork.bases.values()) if file]
    pins: list[tuple[str, ...]] = [
        (file.name, version if version and file.name == sdist.name else file.version)
        for file in files
    ]
    if git:
        ref = git.ref.replace(sdist.version, version or sdist.version)
        pins.append((ref, "" if version else git.commit))
    return pins


def _stack_text(project: Project, fork: str, version: str) -> tuple[str, ForkSpec]:
    """
    Return stack.yaml with the versions in the block of the fork rewritten in place, so that
    comments stay; and the fork as it is then.
    """
    before, text = project.fork(fork), project.stack_file.read_text("utf-8")
    old = before.sources.sdist.version if before.sources.sdist else ""
    if old in ("", version):
        raise SourceError(
            "not-provided",
            f"{fork} is at {old} already."
            if old
            else f"{fork} has no release on the package index to bump to.",
            todo="" if old else "Edit stack.yaml and run `sparkwright lock`.",
        )
    if match := re.search(rf"(?ms)^  {re.escape(fork)}:\n(.*?)(?=^ {{0,2}}[^\s#]|\Z)", text):
        quoted = rf'(["\'])(v?){re.escape(old)}\1'
        block = re.sub(quoted, lambda old: f"{old[1]}{old[2]}{version}{old[1]}", match[1])
        for base in before.bases.values():
            block = block.replace(f'"{base.tag}"', f'"{_tag(base, version)}"')
        block = re.sub(r',\s*commit:\s*(["\'])[0-9a-f]+\1', "", block)
        text = text[: match.start(1)] + block + text[match.end(1) :]
    after = strict_yaml.parse(text, StackSpec, str(project.stack_file)).forks[fork]
    others = msgspec.structs.replace(after, sources=before.sources, bases=before.bases)
    if others != before or _pins(after) != _pins(before, version):
        raise FileError(
            "file-invalid",
            f"{project.stack_file} is not written in the form that bump rewrites.",
            details=[f"expected: {fork} at {version} instead of {old}"],
            todo="Change the versions by hand, run `sparkwright lock`, then `sparkwright patch "
            "rebase`.",
        )
    return text, after
