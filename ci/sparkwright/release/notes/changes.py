"""What changed since the release before: sources, the packages of the locks, and the patches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from sparkwright.core.files import canonical, sha256_bytes
from sparkwright.release.manifest.records import Fork, Patch, Release
from sparkwright.release.notes.blocks import Block, Code, Grid, Heading, Inline, Says, Words, short

#: What a GPU program stands or falls with comes first in a table of packages.
_FIRST = (re.compile(r"torch$"), re.compile(r"torch|triton"), re.compile(r"nvidia-|cuda-|cupy"))


def stack(release: Release, before: Release | None) -> Iterator[Block]:
    """Yield what changed in the stack, or why nothing can be compared."""
    if before is None:
        yield Heading("Changes")
        yield Says(
            ("It follows the release ", Code(release.before), ", whose record was not at hand; nothing is compared.")
            if release.before
            else f"It is the first release of the stack {release.stack} in its index, so there is nothing to compare it with."
        )
        return
    yield Heading(f"Changes since {before.name}")
    if sha256_bytes(canonical(before)) != release.before:
        yield Says(f"{before.name} is not the release that this one names as the one before it; the comparison is only for reading.")
    yield from _sources(release, before)
    yield from _packages(release, before)


def _sources(release: Release, before: Release) -> Iterator[Block]:
    now, then = ({fork.name: fork for fork in one.forks} for one in (release, before))
    rows = [row for name in dict.fromkeys((*now, *then)) for row in _source(name, then.get(name), now.get(name))]
    if rows:
        yield Grid(("fork", "what", "before", "now"), tuple(rows), 4)
    else:
        yield Says("All forks have the sources, patches and rules that they had.")


def _source(name: str, then: Fork | None, now: Fork | None) -> Iterator[tuple[Words, ...]]:
    if then is None or now is None:
        yield name, "version", then.version if then else "–", f"{now.version} (new)" if now else "removed"
        return
    facts: dict[str, tuple[Words, Words]] = {
        "version": (then.version, now.version),
        "source": (_pin(then), _pin(now)),
        "built": (then.built, now.built),
        "official wheel": (short(then.base), short(now.base)),
        "patch set": _sets(then.patches, now.patches),
        "places changed by arch rules": (str(then.sites), str(now.sites)),
        "compiler": (then.cuda or "–", now.cuda or "–"),
    }
    yield from ((name, what, before, after) for what, (before, after) in facts.items() if before != after)


def _pin(fork: Fork) -> Words:
    return (f"{fork.kind} ", Code(fork.pin[:16]))


def _sets(then: Sequence[Patch], now: Sequence[Patch]) -> tuple[Words, Words]:
    if [(one.name, one.sha256) for one in then] == [(one.name, one.sha256) for one in now]:
        return "", ""
    old, new = {one.sha256 for one in then}, {one.sha256 for one in now}
    return _patches(len(then)), f"{_patches(len(now))} ({len(new - old)} new, {len(old - new)} gone)"


def _patches(count: int) -> str:
    return f"{count} patch{'' if count == 1 else 'es'}"


def _packages(release: Release, before: Release) -> Iterator[Block]:
    then = {lock.machine: lock.packages for lock in before.locks}
    for lock in release.locks:
        yield Heading(f"Packages of the set for {lock.machine}", 3)
        if lock.machine not in then:
            yield Says(f"{before.name} has no set for {lock.machine}; this one has {len(lock.packages)} packages.")
            continue
        old = then[lock.machine]
        changed = [name for name in _ordered({**old, **lock.packages}) if old.get(name) != lock.packages.get(name)]
        if changed:
            rows = tuple((name, old.get(name, "–"), lock.packages.get(name, "–"), _change(name, old, lock.packages)) for name in changed)
            yield Grid(("package", "before", "now", "change"), rows, 4)
        same = sum(old.get(name) == version for name, version in lock.packages.items())
        yield Says(
            f"{same} packages have the version that they had." if changed else f"All {same} packages have the version that they had."
        )
    for machine in then.keys() - {lock.machine for lock in release.locks}:
        yield Says(f"There is no set for {machine} any more.")


def _change(name: str, old: Mapping[str, str], new: Mapping[str, str]) -> str:
    return "changed" if name in old and name in new else "added" if name in new else "removed"


def _ordered(names: Mapping[str, str]) -> list[str]:
    """Return *names*, torch and CUDA first."""
    return sorted(names, key=lambda name: (next((n for n, one in enumerate(_FIRST) if one.match(name)), len(_FIRST)), name))


def patches(release: Release, before: Release | None) -> Iterator[Block]:
    """Yield every patch with what became of it, and those that are gone."""
    now, then = _by_fork(release), _by_fork(before) if before else {}
    rows: list[tuple[Words, ...]] = []
    for fork, mine in now.items():
        old = {one.name: one for one in then.get(fork, ())}
        rows += [(fork, name(one), one.subject, _state(one, old, before), one.reason) for one in mine]
    gone = [(fork, one) for fork, had in then.items() for one in had if one.name not in {kept.name for kept in now.get(fork, ())}]
    rows += [(fork, name(one), one.subject, _gone(fork, one, release, before), one.reason) for fork, one in gone]
    yield Heading("Patches")
    if not rows:
        yield Says("No fork carries a patch.")
        return
    yield Grid(("fork", "patch", "what it does", "state", "why it is carried"), tuple(rows), 5)
    if without := [fork.name for fork in release.forks if not fork.patches]:
        yield Says(f"Without a patch: {', '.join(without)}.")


def name(one: Patch) -> Inline:
    """Return how people call a patch: the number of its pull request, or its file."""
    return f"#{one.pick}" if one.pick else Code(one.name)


def _by_fork(release: Release) -> dict[str, tuple[Patch, ...]]:
    return {fork.name: fork.patches for fork in release.forks if fork.patches}


def _state(one: Patch, old: Mapping[str, Patch], before: Release | None) -> Words:
    if before is None:
        return "carried"
    if one.name not in old:
        return "added"
    return "kept" if old[one.name].sha256 == one.sha256 else "changed"


def _gone(fork: str, one: Patch, release: Release, before: Release | None) -> Words:
    """Return why a patch is gone, as far as a record says so: only that upstream had it counts as absorbed."""
    needs = (*release.needs, *(before.needs if before else ()))
    found = next((need for need in needs if (need.fork, need.patch) == (fork, one.name) and need.state == "upstream"), None)
    return f"absorbed upstream: {found.says}" if found else "dropped"
