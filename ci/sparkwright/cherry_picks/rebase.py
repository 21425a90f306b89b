"""
Rebase: the series as commits in a worktree, on the locked source or on another base, and its export back to files.

Only here may git look for a place (3-way); only in the worktree is anything half done, and it is the maintainer's until the export. What
the export writes applies strictly, gives the tree that the worktree has, and accounts for every patch that was there before.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from sparkwright import git
from sparkwright.cherry_picks import commits, patch, series
from sparkwright.cherry_picks.commits import Exported
from sparkwright.cherry_picks.patch import Patch
from sparkwright.cherry_picks.series import Outcome
from sparkwright.cherry_picks.upstream import Base
from sparkwright.console import console
from sparkwright.errors import ExportMismatch, NotProvided, PatchConflict, PatchLost, RebaseUnfinished
from sparkwright.forks.session import Session
from sparkwright.git import Objects

#: The worktree's branch, and the ref of the base below it.
BRANCH, BASE = "series", "refs/sparkwright/base"


class State(msgspec.Struct, frozen=True):
    """
    What a worktree was made for.

    Attributes:
        dropped: Patches that the new base has already, each with the evidence.
        picks: Tree after each pick, by its number; an edit of a pick is none of the patch files'.
        files: Reviewed files to write together with the series (a bump's lock, say): path below the checkout → text.
    """

    fork: str
    stack: str
    base: Base
    dropped: dict[str, str]
    picks: dict[int, str]
    files: dict[str, str] = {}


class Rebased(msgspec.Struct, frozen=True):
    """
    How a rebase went.

    Attributes:
        outcomes: Of every patch, by name; those after a conflict wait in the worktree.
        stopped: The patch that needs a person; empty when all is done.
        tip: The last commit so far.
    """

    folder: str
    outcomes: dict[str, Outcome]
    stopped: str
    base: str
    tip: str


def folder_of(session: Session, fork: str) -> Path:
    """Return where the worktree of *fork* lies: in the checkout, since a cache may vanish and a person's work may not."""
    return session.project.root / ".rebase" / session.project.stack / fork


def start(
    session: Session, fork: str, base: Base, *, files: Mapping[str, str] | None = None, gone: Mapping[str, str] | None = None
) -> Rebased:
    """
    Make the worktree: every patch of *fork* as a commit on *base*, up to the first that needs a person.

    Args:
        files: Reviewed files that the export writes, too; see `State`.
        gone: Patches to leave out, each with the evidence that the base has it.

    Raises:
        RebaseUnfinished: There is a worktree already.
        PatchConflict: A pick does not apply; it is not ours to mend, so nothing is made.
    """
    folder = folder_of(session, fork)
    if folder.exists():
        raise RebaseUnfinished(f"There is a worktree of {fork} already.", details=[str(folder)])
    patches = [one for one in series.of(session, fork) if one.name not in (gone or {})]
    done, commit, stopped = _commits(session.objects, fork, base, patches)
    dropped = {**(gone or {}), **{name: "; ".join(one.says) for name, one in done.items() if one.status in ("already-upstream", "empty")}}
    picks = {one.pick: done[one.name].tree for one in patches if one.pick and one.name in done}
    _worktree(session.objects, folder, commit[0], commit[1], State(fork, session.project.stack, base, dropped, picks, dict(files or {})))
    if stopped:
        rest = patches[[one.name for one in patches].index(stopped) :]
        _am(folder, [commits.mail(one) for one in rest])
    return Rebased(str(folder), done, stopped if stopped and _unfinished(folder) else "", commit[0], _tip(folder))


def _commits(objects: Objects, fork: str, base: Base, patches: Sequence[Patch]) -> tuple[dict[str, Outcome], tuple[str, str], str]:
    """Return what came of the patches, the base and the last commit, and the patch of ours that conflicts first."""
    root = tip = commits.root(objects, base.tree, f"{fork} {base.name}")
    done, tree = dict[str, Outcome](), base.tree
    with objects.index(base.tree) as index:
        for one in patches:
            outcome = series.attempt(objects, index, tree, one, movable=True)
            if outcome.status == "conflict" and not one.pick:
                return done, (root, tip), one.name
            if outcome.status == "conflict":
                raise PatchConflict(
                    f"{one.name} does not apply to {base.name}.", details=outcome.says,
                    todo=f"Leave the files out that conflict, or all of it: `sparkwright pick {fork}{one.name} --exclude …` or `--drop`.",
                )  # fmt: skip
            if outcome.status == "applied":
                tip = commits.add(objects, tip, outcome.tree, one)
            tree, done[one.name] = outcome.tree, outcome
    return done, (root, tip), ""


def _worktree(objects: Objects, folder: Path, base: str, tip: str, state: State) -> None:
    folder.mkdir(parents=True)
    git.run(["init", "-q", "."], cwd=folder)
    (folder / ".git" / "objects" / "info" / "alternates").write_text(f"{objects.path / 'objects'}\n")
    (folder / ".git" / "info" / "attributes").write_bytes((objects.path / "info" / "attributes").read_bytes())
    git.run(["update-ref", BASE, base], cwd=folder)
    git.run(["checkout", "-q", "-B", BRANCH, tip], cwd=folder)
    (folder / ".git" / "sparkwright.json").write_bytes(msgspec.json.encode(state))


def _am(folder: Path, mails: Sequence[bytes]) -> None:
    """Let git place the rest; where it cannot, it stops as it does for everybody, with its own words in the worktree."""
    box = folder / ".git" / "sparkwright-mails"
    box.mkdir()
    names = []
    for number, data in enumerate(mails):
        names.append(str(box / f"{number:04}.mail"))
        Path(names[-1]).write_bytes(data)
    words = ["am", "--quiet", "--3way", "--keep-cr", "--committer-date-is-author-date", *names]
    git.run(words, cwd=folder, env=commits.COMMITTER, check=False)


def _tip(folder: Path) -> str:
    return git.run(["rev-parse", "HEAD"], cwd=folder)[1].decode().strip()


def _unfinished(folder: Path) -> list[str]:
    """Return why the worktree cannot be exported yet."""
    why = ["a patch waits: resolve it, `git add` it, and `git am --continue`"] if (folder / ".git" / "rebase-apply").exists() else []
    changed = git.run(["status", "--porcelain", "--untracked-files=all"], cwd=folder)[1].decode().splitlines()
    return why + [f"not committed: {line}" for line in changed[:10]]


def state(folder: Path) -> State:
    """
    Return what the worktree in *folder* was made for.

    Raises:
        NotProvided: There is none.
    """
    try:
        return msgspec.json.decode((folder / ".git" / "sparkwright.json").read_bytes(), type=State)
    except (OSError, msgspec.DecodeError):
        raise NotProvided(f"There is no worktree at {folder}.", todo="Make one with `sparkwright rebase`.") from None


def abort(session: Session, fork: str) -> None:
    """Remove the worktree of *fork*, and what was done in it."""
    folder = folder_of(session, fork)
    state(folder)
    shutil.rmtree(folder)


def collect(session: Session, fork: str, drop: Collection[str]) -> tuple[State, list[Exported]]:
    """
    Return what the worktree of *fork* would be exported as, checked.

    Args:
        drop: Patches that may be missing although no test says that upstream has them.

    Raises:
        RebaseUnfinished: Something waits, or is not committed.
        PatchLost: A patch of the series has no commit.
        PatchInvalid, PickMismatch: A commit is not of the form; a pick was edited.
        ExportMismatch: The files would not give the worktree's tree.
    """
    folder = folder_of(session, fork)
    made_for = state(folder)
    if waiting := _unfinished(folder):
        raise RebaseUnfinished(f"The worktree of {fork} is not ready.", details=[str(folder), *waiting])
    objects = session.objects
    base, tip = _brought(objects, folder)
    files = commits.export(objects, base, tip)
    have = {one.name for one in files}
    if lost := [
        one.name for one in series.of(session, fork) if one.name not in have and one.name not in made_for.dropped and one.name not in drop
    ]:
        raise PatchLost(f"The worktree of {fork} lost {len(lost)} patches.", details=lost)
    for one in files:
        if one.pick and objects.resolve(f"{one.commit}^{{tree}}") != made_for.picks.get(one.pick):
            raise ExportMismatch(
                f"{one.name} is not what the ledger pins.", todo="Put the change into a commit of its own; it becomes a patch of ours."
            )
    _verify(objects, fork, made_for.base.tree, files, objects.resolve(f"{tip}^{{tree}}"))
    return made_for, files


def _brought(objects: Objects, folder: Path) -> tuple[str, str]:
    """Bring what was committed in the worktree into the object database, and return its base and its tip."""
    base, tip = git.run(["rev-parse", BASE, "HEAD"], cwd=folder)[1].decode().split()
    pack = git.run(["pack-objects", "--quiet", "--revs", "--stdout"], cwd=folder, stdin=f"{tip}\n^{base}\n".encode())[1]
    objects.run(["unpack-objects", "-q"], stdin=pack)
    return base, tip


def _verify(objects: Objects, fork: str, base: str, files: Sequence[Exported], expected: str) -> None:
    """Apply what would be written, as a build will."""
    tree, ours = base, []
    for one in files:
        if one.pick:
            tree = objects.resolve(f"{one.commit}^{{tree}}")
        else:
            ours.append(patch.parse(one.name, one.data))
    if (applied := series.apply_to(objects, fork, tree, ours)).tree != expected:
        raise ExportMismatch(f"The exported series of {fork} would give another tree than the worktree has.", details=[applied.tree])


def write(session: Session, fork: str, files: Sequence[Exported]) -> list[str]:
    """
    Write the patches of ours in *files* and their order, and return what changed, a line each.

    A run that is killed in between leaves a series that disagrees with its folder, which every reader refuses; the next export mends it.
    """
    folder = session.project.series_folder(fork)
    folder.mkdir(parents=True, exist_ok=True)
    ours = [one for one in files if not one.pick]
    before = {path.name: path.read_bytes() for path in folder.glob("*.patch")}
    changed = [f"new: {one.name}" for one in ours if one.name not in before]
    changed += [f"changed: {one.name}" for one in ours if before.get(one.name, one.data) != one.data]
    changed += [f"removed: {name}" for name in sorted(before.keys() - {one.name for one in ours})]
    for one in ours:
        if before.get(one.name) != one.data:
            _replace(folder / one.name, one.data)
    listing = folder / "series"
    text = "".join(f"{one.name}\n" for one in ours)
    if not listing.exists() or [line for line in listing.read_text("utf-8").splitlines() if line.strip()] != text.splitlines():
        changed += ["order: series"] if listing.exists() else []
        _replace(listing, text.encode())
    for name in before.keys() - {one.name for one in ours}:
        (folder / name).unlink()
    return changed


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_bytes(data)
    fresh.replace(path)


def line(session: Session, fork: str, base: Base) -> tuple[str, str]:
    """Return the series of *fork* as commits on *base*: their root and their tip."""
    patches = series.of(session, fork)
    applied = series.apply_to(session.objects, fork, base.tree, patches)
    root = commits.root(session.objects, base.tree, f"{fork} {base.name}")
    return root, commits.build(session.objects, root, [(one, step.tree) for one, step in zip(patches, applied.steps, strict=True)])


def rendered(session: Session, fork: str, base: Base) -> list[Exported]:
    """Return the series of *fork* imported and exported again, without a worktree; the same bytes, unless somebody edited a file."""
    return commits.export(session.objects, *line(session, fork, base))


def check(session: Session, fork: str, base: Base) -> int:
    """
    See that the files of the series are what its commits give, and return how many there are.

    Raises:
        ExportMismatch: They are not; the details name them.
    """
    folder = session.project.series_folder(fork)
    files = [one for one in rendered(session, fork, base) if not one.pick]
    wrong = [one.name for one in files if (folder / one.name).read_bytes() != one.data]
    if wrong:
        raise ExportMismatch(f"{len(wrong)} patches of {fork} are not in the exported form.", details=wrong)
    console.note(f"{fork}: {len(files)} patches are what their commits give")
    return len(files)
