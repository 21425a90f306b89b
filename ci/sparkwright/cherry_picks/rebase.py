"""
Rebase: the series as commits in a worktree, on the locked source or on another base, and its export back to files.

Only here may git look for a place (3-way); only in the worktree is anything half done, and it is the maintainer's until the export. What
the export writes applies strictly, gives the tree that the worktree has, and accounts for every patch that was there before.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from sparkwright import digest, git
from sparkwright.cherry_picks import bases, commits, fit, ledger, patch, series
from sparkwright.cherry_picks.commits import Exported
from sparkwright.cherry_picks.fit import Outcome
from sparkwright.cherry_picks.patch import Patch
from sparkwright.cherry_picks.upstream import Base
from sparkwright.console import console
from sparkwright.errors import ExportMismatch, NotProvided, PatchConflict, PatchLost, RebaseUnfinished, SparkwrightError
from sparkwright.forks.session import Session
from sparkwright.objects import Objects

#: The worktree's branch, and the ref of the base below it.
BRANCH, BASE = "series", "refs/sparkwright/base"

#: The worktree's own configuration, which outranks the maintainer's: what would change bytes, or keep git am from going on.
_CONFIG = {
    "am.keepcr": "true",
    "apply.ignoreWhitespace": "no",
    "apply.whitespace": "nowarn",
    "commit.gpgSign": "false",
    "core.autocrlf": "false",
    "core.hooksPath": "/dev/null",
    "i18n.commitEncoding": "UTF-8",
    "mailinfo.scissors": "false",
}

#: Stands in a series while an export writes: a patch that is not there, so that every reader refuses the half of it.
UNFINISHED = "this-export-was-killed-run-it-again"


class State(msgspec.Struct, frozen=True):
    """
    What a worktree was made for.

    Attributes:
        dropped: Patches that the new base has already, each with the evidence.
        picks: Tree after each pick, by its number; an edit of a pick is none of the patch files'.
        files: Reviewed files to write together with the series (a bump's lock, say): path below the checkout → text.
        before: Digests of what it was made from, and of what *files* replaces, by name; see `_pins`.
        said: Messages that a mail cannot carry, by what is left of them; see `commits.carried`.
    """

    fork: str
    stack: str
    base: Base
    dropped: dict[str, str]
    picks: dict[int, str]
    files: dict[str, str] = {}
    before: dict[str, str] = {}
    said: dict[str, str] = {}


class Rebased(msgspec.Struct, frozen=True):
    """
    How a rebase went.

    Attributes:
        outcomes: Of every patch, by name, up to the one that *stopped* it; the rest waits in the worktree.
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
    pins = _pins(session, fork, files or {})
    patches = [one for one in series.of(session, fork) if one.name not in (gone or {})]
    done, (root, tip), stopped = _commits(session.objects, fork, base, patches)
    dropped = {**(gone or {}), **{name: "; ".join(one.says) for name, one in done.items() if one.status in ("already-upstream", "empty")}}
    picks = {one.pick: done[one.name].tree for one in patches if one.pick and one.name in done}
    rest = patches[[one.name for one in patches].index(stopped) :] if stopped else []
    said = {commits.carried(session.objects, one): commits.message(one) for one in rest}
    state = State(fork, session.project.stack, base, dropped, picks, dict(files or {}), pins, said)
    _worktree(session.objects, folder, root, tip, state)
    if rest:
        _with_blobs(session, fork)
        stopped = _am(folder, rest)
        tip = _brought(session.objects, folder)[1]
        done |= _placed(session.objects, root, tip, rest, stopped)
    return Rebased(str(folder), done, stopped, root, tip)


def _pins(session: Session, fork: str, files: Iterable[str]) -> dict[str, str]:
    """Return the digests of what a worktree is made from and an export replaces: picks by number, files by their path in the checkout."""
    root, book = session.project.root, ledger.load(session.project.root, fork)
    paths = [*session.project.series_folder(fork).glob("*.patch"), *(root / name for name in files)]
    found = {str(path.relative_to(root)): digest.sha256_file(path) for path in paths}
    carried = book.carried(session.project.stack) if book else ()
    return found | {one.name: digest.key("pick", [one.sha256, one.stacks[session.project.stack]]) for one in carried}


def _commits(objects: Objects, fork: str, base: Base, patches: Sequence[Patch]) -> tuple[dict[str, Outcome], tuple[str, str], str]:
    """Return what came of the patches, the base and the last commit, and the patch of ours that conflicts first."""
    root = tip = commits.root(objects, base.tree, f"{fork} {base.name}")
    done, tree = dict[str, Outcome](), base.tree
    with objects.index(base.tree) as index:
        for one in patches:
            outcome = fit.attempt(objects, index, tree, one, movable=True)
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
    """Make the worktree beside its place and put it there as a whole."""
    scratch = _scratch(folder)
    scratch.mkdir(parents=True)
    git.run(["init", "-q", "."], cwd=scratch)
    for name, value in _CONFIG.items():
        git.run(["config", name, value], cwd=scratch)
    (scratch / ".git" / "objects" / "info" / "alternates").write_text(f"{objects.path / 'objects'}\n")
    (scratch / ".git" / "info" / "attributes").write_bytes((objects.path / "info" / "attributes").read_bytes())
    git.run(["update-ref", BASE, base], cwd=scratch)
    git.run(["checkout", "-q", "-B", BRANCH, tip], cwd=scratch)
    # Its own copy of what it is made of; beyond that the store is for merges only.
    git.run(["repack", "-q", "-a", "-d", "--window=0", "--threads=1"], cwd=scratch)
    (scratch / ".git" / "sparkwright.json").write_bytes(msgspec.json.encode(state))
    scratch.replace(folder)


def _scratch(folder: Path) -> Path:
    """Return the place beside *folder* for what is not a worktree yet, or no longer; what a killed run left there is removed."""
    scratch = folder.with_name(f".{folder.name}.half")
    shutil.rmtree(scratch, ignore_errors=True)
    return scratch


def _with_blobs(session: Session, fork: str) -> None:
    """Bring what the patches were made for, as far as the series applies to the locked source: a merge of three states needs it."""
    try:
        series.apply_to(session.objects, fork, bases.of_source(session, fork).tree, series.of(session, fork))
    except SparkwrightError as error:
        console.detail(f"git am may lack what a patch was made for: {error.what}")


def _am(folder: Path, rest: Sequence[Patch]) -> str:
    """Let git place the rest; where it cannot, it stops as it does for everybody. Return the patch at which it stopped."""
    box = folder / ".git" / "sparkwright-mails"
    box.mkdir()
    names = []
    for number, one in enumerate(rest):
        names.append(str(box / f"{number:04}.mail"))
        Path(names[-1]).write_bytes(commits.mail(one))
    words = ["am", "--quiet", "--3way", "--keep", "--keep-cr", "--committer-date-is-author-date", *names]
    if not git.run(words, cwd=folder, env=commits.COMMITTER, check=False)[0]:
        return ""
    at = folder / ".git" / "rebase-apply" / "next"
    return rest[int(at.read_text()) - 1 if at.exists() else 0].name


def _placed(objects: Objects, base: str, tip: str, rest: Sequence[Patch], stopped: str) -> dict[str, Outcome]:
    """Return what git am made of *rest*, up to the patch at which it stopped."""
    commit = {one.name: one.commit for one in commits.read(objects, base, tip)}
    found: dict[str, Outcome] = {}
    for one in rest:
        if one.name == stopped:
            break
        if one.name in commit:
            tree = objects.resolve(f"{commit[one.name]}^{{tree}}")
            found[one.name] = Outcome("applied", tree, says=("git am found a place for it: look at it before the export",))
        else:
            found[one.name] = Outcome("empty", "", says=("git am found nothing left to do; the export asks for --drop",))
    return found


def _unfinished(folder: Path) -> list[str]:
    """Return why the worktree cannot be exported yet."""
    why = ["a patch waits: resolve it, `git add` it, and `git am --continue`"] if (folder / ".git" / "rebase-apply").exists() else []
    why += ["git rebase is not done"] if (folder / ".git" / "rebase-merge").exists() else []
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
    """
    Remove the worktree of *fork*, and what was done in it.

    Raises:
        NotProvided: There is none.
    """
    folder = folder_of(session, fork)
    if not folder.exists():
        state(folder)
    # Out of its place first: a folder that is removed by half would be neither a worktree nor none.
    scratch = _scratch(folder)
    folder.replace(scratch)
    shutil.rmtree(scratch)


def collect(session: Session, fork: str, drop: Collection[str]) -> tuple[State, list[Exported]]:
    """
    Return what the worktree of *fork* would be exported as, checked.

    Args:
        drop: Patches that may be missing although no test says that upstream has them.

    Raises:
        RebaseUnfinished: Something waits, or is not committed.
        PatchLost: A patch of the series has no commit.
        PatchInvalid, PickMismatch: A commit is not of the form; a pick was edited.
        ExportMismatch: The files would not give the worktree's tree, or what they replace was changed since the worktree was made.
        NotProvided: There is no worktree, or *drop* names no patch.
    """
    folder = folder_of(session, fork)
    made_for = state(folder)
    if waiting := _unfinished(folder):
        raise RebaseUnfinished(f"The worktree of {fork} is not ready.", details=[str(folder), *waiting])
    objects = session.objects
    base, tip = _brought(objects, folder)
    files = commits.export(objects, base, tip, made_for.said)
    _account(session, fork, made_for, files, drop)
    for one in files:
        if one.pick and objects.resolve(f"{one.commit}^{{tree}}") != made_for.picks.get(one.pick):
            raise ExportMismatch(
                f"{one.name} is not what the ledger pins.", todo="Put the change into a commit of its own; it becomes a patch of ours."
            )
    _verify(objects, fork, made_for.base.tree, files, objects.resolve(f"{tip}^{{tree}}"))
    return made_for, files


def _account(session: Session, fork: str, made_for: State, files: Sequence[Exported], drop: Collection[str]) -> None:
    """See that no patch is lost, and that nobody changed meanwhile what is about to be written over; half an export is no such change."""
    folder = str(session.project.series_folder(fork).relative_to(session.project.root))
    now = {name.removeprefix(f"{folder}/"): value for name, value in _pins(session, fork, made_for.files).items()}
    before = {name.removeprefix(f"{folder}/"): value for name, value in made_for.before.items()}
    there = {name for name in now if name.startswith("#") or name.endswith(".patch")}
    have = {one.name for one in files}
    if unknown := sorted(set(drop) - there - before.keys()):
        raise NotProvided(f"The series of {fork} has no patch {', '.join(unknown)} to drop.", details=sorted(there))
    if lost := sorted(there - have - made_for.dropped.keys() - set(drop)):
        raise PatchLost(f"The worktree of {fork} lost {len(lost)} patches.", details=lost)
    fresh = {one.name: digest.sha256_bytes(one.data) for one in files if not one.pick}
    fresh |= {name: digest.sha256_bytes(text.encode()) for name, text in made_for.files.items()}
    if changed := [name for name, value in now.items() if value not in (before.get(name), fresh.get(name)) and name not in drop]:
        raise ExportMismatch(
            f"{', '.join(changed)} of {fork} changed since the worktree was made.",
            todo="Take those changes back and export again, or give the worktree up: `sparkwright rebase --abort`.",
        )


def _brought(objects: Objects, folder: Path) -> tuple[str, str]:
    """Bring what was committed in the worktree into the object database, and return its base and its tip."""
    base, tip = git.run(["rev-parse", BASE, "HEAD"], cwd=folder)[1].decode().split()
    # A store that vanished meanwhile gets the base as well.
    wanted = f"{tip}\n^{base}\n" if objects.has(f"{base}^{{tree}}") else f"{tip}\n"
    pack = git.run(["pack-objects", "--quiet", "--revs", "--stdout"], cwd=folder, stdin=wanted.encode())[1]
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
