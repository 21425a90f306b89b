"""
Export: the commits of a worktree back to patch files, checked as a build will read them, and written so that a kill loses nothing.

What is written applies strictly, gives the tree that the worktree has, and accounts for every patch that was there before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from sparkwright.cherry_picks import ledger, patch, series, series_git, worktree
from sparkwright.cherry_picks.already_upstream import Base
from sparkwright.cherry_picks.errors import PatchError
from sparkwright.cherry_picks.series_git import Exported
from sparkwright.cherry_picks.worktree import State
from sparkwright.core import digest
from sparkwright.core.console import console
from sparkwright.core.git_store import Objects
from sparkwright.forks.context import Session
from sparkwright.forks.errors import SourceError

#: Stands in a series while an export writes: a patch that is not there, so that every reader refuses the half of it.
UNFINISHED = "this-export-was-killed-run-it-again"


def pins(session: Session, fork: str, files: Iterable[str]) -> dict[str, str]:
    """Return the digests of what a worktree is made from and an export replaces: picks by number, files by their path in the checkout."""
    root, book = session.project.root, ledger.load(session.project.root, fork)
    paths = [*session.project.series_folder(fork).glob("*.patch"), *(root / name for name in files)]
    found = {str(path.relative_to(root)): digest.sha256_file(path) for path in paths}
    carried = book.carried(session.project.stack) if book else ()
    return found | {one.name: digest.key("pick", [one.sha256, one.stacks[session.project.stack]]) for one in carried}


def collect(session: Session, fork: str, drop: Collection[str]) -> tuple[State, list[Exported]]:
    """
    Return what the worktree of *fork* would be exported as, checked.

    Args:
        drop: Patches that may be missing although no test says that upstream has them.

    Raises:
        rebase-unfinished: Something waits, or is not committed.
        patch-lost: A patch of the series has no commit.
        patch-invalid, pick-mismatch: A commit is not of the form; a pick was edited.
        export-mismatch: The files would not give the worktree's tree, or what they replace was changed since the worktree was made.
        not-provided: There is no worktree, or *drop* names no patch.
    """
    folder = worktree.folder_of(session, fork)
    made_for = worktree.state(folder)
    if waiting := worktree.unfinished(folder):
        raise PatchError("rebase-unfinished", f"The worktree of {fork} is not ready.", details=[str(folder), *waiting])
    objects = session.objects
    base, tip = worktree.brought(objects, folder)
    files = series_git.export(objects, base, tip, made_for.said)
    _account(session, fork, made_for, files, drop)
    for one in files:
        if one.pick and objects.resolve(f"{one.commit}^{{tree}}") != made_for.picks.get(one.pick):
            raise PatchError(
                "export-mismatch",
                f"{one.name} is not what the ledger pins.",
                todo="Put the change into a commit of its own; it becomes a patch of ours.",
            )
    _verify(objects, fork, made_for.base.tree, files, objects.resolve(f"{tip}^{{tree}}"))
    return made_for, files


def _account(session: Session, fork: str, made_for: State, files: Sequence[Exported], drop: Collection[str]) -> None:
    """See that no patch is lost, and that nobody changed meanwhile what is about to be written over; half an export is no such change."""
    folder = str(session.project.series_folder(fork).relative_to(session.project.root))
    now = {name.removeprefix(f"{folder}/"): value for name, value in pins(session, fork, made_for.files).items()}
    before = {name.removeprefix(f"{folder}/"): value for name, value in made_for.before.items()}
    there = {name for name in now if name.startswith("#") or name.endswith(".patch")}
    have = {one.name for one in files}
    if unknown := sorted(set(drop) - there - before.keys()):
        raise SourceError("not-provided", f"The series of {fork} has no patch {', '.join(unknown)} to drop.", details=sorted(there))
    if lost := sorted(there - have - made_for.dropped.keys() - set(drop)):
        raise PatchError("patch-lost", f"The worktree of {fork} lost {len(lost)} patches.", details=lost)
    fresh = {one.name: digest.sha256_bytes(one.data) for one in files if not one.pick}
    fresh |= {name: digest.sha256_bytes(text.encode()) for name, text in made_for.files.items()}
    if changed := [name for name, value in now.items() if value not in (before.get(name), fresh.get(name)) and name not in drop]:
        raise PatchError(
            "export-mismatch",
            f"{', '.join(changed)} of {fork} changed since the worktree was made.",
            todo="Take those changes back and export again, or give the worktree up: `sparkwright rebase --abort`.",
        )


def _verify(objects: Objects, fork: str, base: str, files: Sequence[Exported], expected: str) -> None:
    """Apply what would be written, as a build will."""
    tree, ours = base, []
    for one in files:
        if one.pick:
            tree = objects.resolve(f"{one.commit}^{{tree}}")
        else:
            ours.append(patch.parse(one.name, one.data))
    if (applied := series.apply_to(objects, fork, tree, ours)).tree != expected:
        raise PatchError(
            "export-mismatch", f"The exported series of {fork} would give another tree than the worktree has.", details=[applied.tree]
        )


def write(session: Session, fork: str, files: Sequence[Exported], others: Mapping[str, str] | None = None) -> list[str]:
    """
    Write the patches of ours in *files* and their order, and return what changed, a line each.

    A run that is killed in between leaves a series that every reader refuses; the next export from the same worktree finishes it.

    Args:
        others: Reviewed files to write with it; None where the patches stay what they are, so that half of it would do no harm.
    """
    folder = session.project.series_folder(fork)
    folder.mkdir(parents=True, exist_ok=True)
    listing = folder / "series"
    ours = [one for one in files if not one.pick]
    before = {path.name: path.read_bytes() for path in folder.glob("*.patch")}
    text = listing.read_text("utf-8", "replace") if listing.exists() else ""
    old = text.replace(f"{UNFINISHED}\n", "")
    order, was = [one.name for one in ours], [name for name in map(_listed, old.splitlines()) if name]
    fresh = {listing.parent / one.name: one.data for one in ours if before.get(one.name) != one.data}
    root = session.project.root
    fresh |= {root / name: text.encode() for name, text in (others or {}).items() if not _holds(root / name, text.encode())}
    changed = [f"new: {name}" for name in order if name not in before]
    changed += [f"changed: {path.name}" for path in fresh if path.parent == folder and path.name in before]
    changed += [f"removed: {name}" for name in sorted(before.keys() - set(order))]
    changed += ["order: series"] if was and order != was else []
    changed += [f"changed: {path.relative_to(root)}" for path in fresh if path.parent != folder]
    if changed and others is not None:
        _replace(listing, f"{UNFINISHED}\n{old}".encode())
    for path, data in fresh.items():
        _replace(path, data)
    for name in before.keys() - set(order):
        (folder / name).unlink()
    if changed or order != was or old != text:
        _replace(listing, _ordered(old, order).encode() if order != was else old.encode())
    for left in folder.glob(".*.new"):
        left.unlink()
    return changed


def _listed(line: str) -> str:
    return line.partition("#")[0].strip()


def _holds(path: Path, data: bytes) -> bool:
    return path.exists() and path.read_bytes() == data


def _ordered(old: str, order: Sequence[str]) -> str:
    """Return the series file *old* for the patches *order*; a comment goes with the patch on its line or below it."""
    lines: dict[str, list[str]] = {}
    above: list[str] = []
    for line in old.splitlines():
        above.append(line)
        if _listed(line):
            lines[_listed(line)], above = above, []
    return "".join(f"{line}\n" for line in [line for name in order for line in lines.get(name, [name])] + above)


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_bytes(data)
    fresh.replace(path)


def line(session: Session, fork: str, base: Base) -> tuple[str, str]:
    """Return the series of *fork* as commits on *base*: their root and their tip."""
    patches = series.of(session, fork)
    applied = series.apply_to(session.objects, fork, base.tree, patches)
    root = series_git.root(session.objects, base.tree, f"{fork} {base.name}")
    return root, series_git.build(session.objects, root, [(one, step.tree) for one, step in zip(patches, applied.steps, strict=True)])


def rendered(session: Session, fork: str, base: Base) -> list[Exported]:
    """Return the series of *fork* imported and exported again, without a worktree; the same bytes, unless somebody edited a file."""
    return series_git.export(session.objects, *line(session, fork, base))


def check(session: Session, fork: str, base: Base) -> int:
    """
    See that the files of the series are what its commits give, and return how many there are.

    Raises:
        export-mismatch: They are not; the details name them.
    """
    folder = session.project.series_folder(fork)
    files = [one for one in rendered(session, fork, base) if not one.pick]
    wrong = [one.name for one in files if (folder / one.name).read_bytes() != one.data]
    if wrong:
        raise PatchError("export-mismatch", f"{len(wrong)} patches of {fork} are not in the exported form.", details=wrong)
    console.note(f"{fork}: {len(files)} patches are what their commits give")
    return len(files)
