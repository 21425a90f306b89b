"""
The series as commits in a git worktree, for a maintainer, and back to files.

Only in the worktree may git look for the place of a change (``git am --3way``). An exported series
applies strictly, gives the tree of the worktree, and accounts for every patch that was there
before.
"""

from __future__ import annotations

import itertools
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from sparkwright.cherry_picks import apply, ledger, series
from sparkwright.cherry_picks.patch import CONTEXT, Patch, PatchError, parse, render
from sparkwright.cherry_picks.upstream import Base, Upstream, range_diff
from sparkwright.core import digest, git
from sparkwright.core.console import console
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.git_store import Objects
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError

#: The branch of the worktree, and the refs of the base and of the last pick.
BRANCH, BASE, PICKS = "series", "refs/sparkwright/base", "refs/sparkwright/picks"
#: Trailer with the file name of a commit; no exported patch has it.
FILE = "Patch-File"
#: In a series while an export writes: the name of a missing patch, so that every reader refuses a
#: half-written series.
UNFINISHED = "this-export-was-killed-run-it-again"
#: Context of the mails for git am: with less, it could put a change to a similar place.
MAIL_CONTEXT = 20

_EPOCH = "Thu, 1 Jan 2026 00:00:00 +0000"
_COMMITTER = {
    "GIT_COMMITTER_NAME": "sparkwright",
    "GIT_COMMITTER_EMAIL": "export@sparkwright.invalid",
}
#: A file name without a path, a leading dot, a comment of quilt's list, and short enough for a
#: temporary name beside it.
_NAME = re.compile(r"[^\s.#/-][^#/]{0,190}\.patch")
_HEADER = "--format=%f%nFrom: %an <%ae>%nDate: %aD%nSubject: [PATCH] %s%n%n%b"

#: The configuration of the worktree, which outranks the maintainer's where that would change bytes
#: or stop git am.
_CONFIG = """\
[am]
    keepcr = true
[apply]
    ignoreWhitespace = no
    whitespace = nowarn
[commit]
    gpgSign = false
[core]
    autocrlf = false
    bare = false
    hooksPath = /dev/null
[i18n]
    commitEncoding = UTF-8
[mailinfo]
    scissors = false
"""


class State(msgspec.Struct, frozen=True):
    """
    The record of a worktree.

    Attributes:
        gone: Patches to leave out, each with the reason.
        files: Reviewed files to write together with the series: path below the checkout → text.
        digests: See `_digests`, when the worktree was made.
    """

    gone: dict[str, str]
    files: dict[str, str]
    digests: dict[str, str]


class Rebased(msgspec.Struct, frozen=True):
    """
    The result of a rebase.

    Attributes:
        outcomes: Of every patch by name, up to the one at which git am *stopped*.
        stopped: The patch that needs a person; empty if none does.
        base, tip: The commits of the base and of the last patch so far.
    """

    folder: str
    outcomes: dict[str, str]
    stopped: str
    base: str
    tip: str


def folder_of(session: RunContext, fork: str) -> Path:
    """Return the worktree of *fork*, which is in the checkout because a cache may be removed."""
    return session.project.root / ".rebase" / session.project.stack / fork


def start(
    upstream: Upstream,
    base: Base,
    *,
    files: Mapping[str, str] | None = None,
    gone: Mapping[str, str] | None = None,
) -> Rebased:
    """
    Make the worktree: every patch of the series as a commit on *base*, up to the first that needs a
    person.

    Args:
        files, gone: See `State`.

    Raises:
        rebase-unfinished: There is a worktree already.
        patch-conflict: A pick does not apply; nothing is made.
    """
    session, fork = upstream.session, upstream.fork
    folder = folder_of(session, fork)
    if folder.exists():
        raise PatchError(
            "rebase-unfinished", f"There is a worktree of {fork} already.", details=[str(folder)]
        )
    whole, dropped, outcomes = series.of(session, fork), dict(gone or {}), dict[str, str]()
    ours = [patch for patch in whole if not patch.pick and patch.name not in dropped]
    picks = [patch for patch in whole if patch.pick and patch.name not in dropped]
    steps = list[tuple[Patch, str]]()
    for pick, outcome in zip(picks, apply.evaluate(session.objects, base.tree, picks), strict=True):
        outcomes[pick.name] = outcome.status
        if outcome.status == "conflict":
            raise PatchError(
                "patch-conflict",
                f"{pick.name} does not apply to {base.name}.",
                details=outcome.says,
                todo=f"Leave out files, or all of it: `sparkwright patch pick {fork}{pick.name} "
                f"--exclude PATH=REASON` or `--drop`.",
            )
        if outcome.status == "applied":
            steps.append((pick, outcome.tree))
        else:
            dropped[pick.name] = "; ".join(outcome.says)
    scratch, source = _scratch(folder), session.project.series_folder(fork)
    before = {patch.name: (source / patch.name).read_bytes() for patch in ours}
    work = Objects(scratch / ".git")
    work.borrow(session.objects.path.parent)
    with (work.path / "config").open("a") as config:
        config.write(_CONFIG)
    root, tip = commit_series(work, f"{fork} {base.name}", base.tree, steps)
    refs = f"create {BASE} {root}\ncreate {PICKS} {tip}\n"
    work.run(["update-ref", "--stdin"], stdin=refs.encode())
    git.run(["checkout", "-q", "-B", BRANCH, tip], cwd=scratch)
    state = State(dropped, dict(files or {}), _digests(session, fork, files or {}))
    (work.path / "sparkwright.json").write_bytes(msgspec.json.encode(state))
    stopped = _am(scratch, before, _wide_diffs(upstream, whole))
    # The store may be removed; beyond this copy of it, it serves merges only.
    work.run(["repack", "-q", "-a", "-d", "--window=0", "--threads=1"])
    scratch.replace(folder)
    work = Objects(folder / ".git")
    after = exported(work, tip, "HEAD")
    for name in itertools.takewhile(lambda name: name != stopped, before):
        changed = "written anew" if name in after else "empty: nothing is left to do"
        outcomes[name] = "as it was" if after.get(name) == before[name] else changed
    return Rebased(str(folder), outcomes, stopped, root, work.resolve("HEAD"))


def _wide_diffs(upstream: Upstream, patches: Sequence[Patch]) -> dict[str, bytes]:
    """
    Return the diffs of *patches* with more context, if they apply to the locked source; git am then
    has their files.
    """
    diffs, objects = dict[str, bytes](), upstream.session.objects
    try:
        before = upstream.locked().tree
        for step in apply.apply_patches(objects, upstream.fork, before, patches).steps:
            diffs[step.name] = render(objects, before, step.tree, context=MAIL_CONTEXT)
            before = step.tree
    except SparkwrightError as error:
        console.detail(f"git am may lack the files that a patch was made for: {error.what}")
    return diffs


def _scratch(folder: Path) -> Path:
    """Return the temporary name of *folder*, after removing what a killed run left there."""
    scratch = folder.with_name(f".{folder.name}.half")
    shutil.rmtree(scratch, ignore_errors=True)
    return scratch


def _am(folder: Path, patches: Mapping[str, bytes], diffs: Mapping[str, bytes]) -> str:
    """Apply *patches* in the worktree with git am, and return the one at which it stopped."""
    box = folder / ".git" / "sparkwright-mails"
    box.mkdir()
    for number, (name, data) in enumerate(patches.items()):
        head, _, diff = data.partition(b"\n---\n")
        mail = head + f"\n{FILE}: {name}\n---\n".encode() + diffs.get(name, diff)
        (box / f"{number:04}").write_bytes(mail)
    words = ["am", "--quiet", "--3way", "--keep-non-patch", "--committer-date-is-author-date"]
    mails = sorted(map(str, box.iterdir()))
    if not mails or not git.run([*words, *mails], cwd=folder, env=_COMMITTER, check=False)[0]:
        return ""
    position = folder / ".git" / "rebase-apply" / "next"
    return list(patches)[int(position.read_text()) - 1 if position.exists() else 0]


def load_state(folder: Path) -> State:
    """
    Return the record of the worktree in *folder*.

    Raises:
        not-provided: There is none.
    """
    try:
        return msgspec.json.decode((folder / ".git" / "sparkwright.json").read_bytes(), type=State)
    except (OSError, msgspec.DecodeError):
        raise SourceError(
            "not-provided",
            f"There is no worktree at {folder}.",
            todo="Make one with `sparkwright patch rebase`.",
        ) from None


def abort(session: RunContext, fork: str) -> None:
    """
    Remove the worktree of *fork*.

    Raises:
        not-provided: There is none.
    """
    folder = folder_of(session, fork)
    if not folder.exists():
        load_state(folder)
    # Renamed first, because a killed removal would leave half a worktree.
    scratch = _scratch(folder)
    folder.replace(scratch)
    shutil.rmtree(scratch)


def commit_series(
    work: Objects, title: str, base: str, steps: Iterable[tuple[Patch, str]]
) -> tuple[str, str]:
    """
    Return a commit of the tree *base* and the last commit of *steps*, patches and their trees.

    Raises:
        patch-invalid: git takes the author or the date of a patch for none.
    """

    def commit(tree: str, parent: Sequence[str], author: str, date: str, message: str) -> str:
        name, _, address = author.partition(" <")
        env = {
            "GIT_AUTHOR_NAME": name or "upstream",
            "GIT_AUTHOR_EMAIL": address.rstrip(">") or "upstream@invalid",
            "GIT_AUTHOR_DATE": date or _EPOCH,
            "GIT_COMMITTER_DATE": date or _EPOCH,
            **_COMMITTER,
        }
        words = ["commit-tree", tree, *parent]
        status, out, errors = work.run(words, env=env, stdin=message.encode(), check=False)
        if status:
            raise PatchError(
                "patch-invalid",
                f"git makes no commit of {message.partition(chr(10))[0]!r}.",
                details=errors.splitlines()[-5:],
            )
        return out.decode().strip()

    root = tip = commit(base, [], "sparkwright", "", title)
    for patch, tree in steps:
        text = patch.reason if patch.pick else f"{patch.text}\n{FILE}: {patch.name}"
        subject = f"{patch.subject} ({patch.name})" if patch.pick else patch.subject
        message = f"{subject}\n\n{text}\n"
        tip = commit(tree, ["-p", tip], patch.author, patch.date, message)
    return root, tip


def _commit_locked(upstream: Upstream, work: Objects) -> tuple[str, str]:
    """Commit the series on the locked source, and return the commits of both ends."""
    base, patches = upstream.locked(), series.of(upstream.session, upstream.fork)
    steps = apply.apply_patches(upstream.session.objects, upstream.fork, base.tree, patches).steps
    pairs = zip(patches, (step.tree for step in steps), strict=True)
    return commit_series(work, f"{upstream.fork} {base.name}", base.tree, pairs)


def compare(upstream: Upstream, rebased: Rebased) -> list[str]:
    """Return git's range-diff of the series on the locked source and in the worktree."""
    work = Objects(Path(rebased.folder) / ".git")
    return range_diff(work, _commit_locked(upstream, work), (rebased.base, rebased.tip))


def exported(work: Objects, base: str, tip: str) -> dict[str, bytes]:
    """
    Return the commits of ours after *base* up to *tip* as files, oldest first: name → content.

    Raises:
        patch-invalid: A commit is a merge, its name is taken or no file name, or its message is not
            a patch's.
    """
    files: dict[str, bytes] = {}
    rows = work.run(["rev-list", "--reverse", "--topo-order", "--parents", f"{base}..{tip}", "--"])
    for row in rows[1].decode().splitlines():
        commit, *parents = row.split()
        if len(parents) != 1:
            raise PatchError(
                "patch-invalid",
                f"{commit[:12]} has {len(parents)} parents; a series is a line of commits.",
                todo="Make it one with git rebase.",
            )
        raw = work.run(["log", "-1", "--encoding=UTF-8", _HEADER, commit, "--"])[1]
        slug, _, head = raw.decode("utf-8", "surrogateescape").partition("\n")
        name, start = f"{slug.lower()[:72].strip('-')}.patch", head.rfind(f"\n{FILE}: ")
        if start >= 0:
            name, _, rest = head[start:].removeprefix(f"\n{FILE}: ").partition("\n")
            head = f"{head[:start]}\n{rest}"
        if (
            name in files
            or not (_NAME.fullmatch(name) and name.isprintable())
            or len(name.encode("utf-8", "replace")) > 200
        ):
            raise PatchError(
                "patch-invalid",
                f"{commit[:12]} would become {name!r}, a name that is taken or not a patch's.",
                todo=f"Name its file in the last line of its message: {FILE}: NAME.patch",
            )
        if "\n---\n" in head:
            raise PatchError(
                "patch-invalid",
                f"The message of {commit[:12]} has a line ---, which ends the text of a patch.",
                todo="Change that line.",
            )
        header = head.rstrip("\n").encode("utf-8", "surrogateescape")
        diff = render(work, parents[0], commit, context=CONTEXT)
        files[name] = header + b"\n---\n" + diff
        parse(name, files[name])
    return files


def _digests(session: RunContext, fork: str, files: Iterable[str]) -> dict[str, str]:
    """
    Return the digests of what a worktree is made from and an export replaces: picks by name, files
    by path.
    """
    root, stack = session.project.root, session.project.stack
    book, folder = ledger.load(root, fork), session.project.series_folder(fork)
    digests = {path.name: digest.sha256_file(path) for path in folder.glob("*.patch")}
    digests |= {name: digest.sha256_file(root / name) for name in files}
    for record in book.carried(stack) if book else ():
        digests[record.name] = digest.key("pick", [record.sha256, record.stacks[stack]])
    return digests


def collect(
    session: RunContext, fork: str, drop: Collection[str]
) -> tuple[State, dict[str, bytes]]:
    """
    Return the record of the worktree of *fork*, and the verified files that it would be exported
    as.

    Args:
        drop: Patches that may be missing although upstream does not have them.

    Raises:
        rebase-unfinished: git am or git rebase is not done, or something is not committed.
        patch-lost: A patch of the series has no commit.
        patch-invalid: A commit cannot become a patch.
        export-mismatch: The files would not give the worktree's tree, a pick was changed there, or
            what they replace changed meanwhile.
        not-provided: There is no worktree, or *drop* names no patch.
    """
    folder = folder_of(session, fork)
    recorded, work = load_state(folder), Objects(folder / ".git")
    # The store is made anew if it was removed meanwhile.
    work.borrow(session.objects.path.parent)
    _check_finished(fork, folder)
    if work.run(["merge-base", "--is-ancestor", PICKS, "HEAD"], check=False)[0]:
        raise PatchError(
            "export-mismatch",
            f"The worktree of {fork} has other picks than the ledger pins.",
            todo="Put changes into commits of their own, after the picks; they become patches.",
        )
    files = exported(work, PICKS, "HEAD")
    # A half-written export is finished here, so it must not matter which files are listed.
    paths = session.project.series_folder(fork).glob("*.patch")
    missing = [parse(path.name, path.read_bytes()) for path in paths if path.name not in files]
    tree = work.resolve(f"{BASE}^{{tree}}")
    present = dict.fromkeys(
        apply.taken_away(work, tree, missing), "the base holds the whole change"
    )
    recorded = msgspec.structs.replace(recorded, gone=present | recorded.gone)
    _account(session, fork, recorded, files, drop)
    written = [parse(name, data) for name, data in files.items()]
    applied = apply.apply_patches(work, fork, work.resolve(f"{PICKS}^{{tree}}"), written).tree
    if applied != work.resolve("HEAD^{tree}"):
        raise PatchError(
            "export-mismatch",
            f"The exported series of {fork} would give another tree than the worktree has.",
            details=[applied],
        )
    return recorded, files


def _check_finished(fork: str, folder: Path) -> None:
    am = "a patch waits: resolve it, `git add` it, and `git am --continue`"
    unfinished = {"rebase-apply": am, "rebase-merge": "git rebase is not done"}
    waiting = [why for name, why in unfinished.items() if (folder / ".git" / name).exists()]
    status = git.run(["status", "--porcelain", "--untracked-files=all"], cwd=folder)[1]
    changed = status.decode("utf-8", "replace").splitlines()[:10]
    if waiting := [*waiting, *(f"not committed: {line}" for line in changed)]:
        raise PatchError(
            "rebase-unfinished",
            f"The worktree of {fork} is not ready.",
            details=[str(folder), *waiting],
        )


def _account(
    session: RunContext,
    fork: str,
    recorded: State,
    files: Mapping[str, bytes],
    drop: Collection[str],
) -> None:
    """
    Refuse lost patches, and files that changed since the worktree was made, except by a killed
    export.
    """
    now, before = _digests(session, fork, recorded.files), recorded.digests
    present = {name for name in now if name.endswith(".patch")}
    if unknown := sorted(set(drop) - present - before.keys()):
        raise SourceError(
            "not-provided",
            f"The series of {fork} has no patch {', '.join(unknown)} to drop.",
            details=sorted(present),
        )
    if lost := sorted(present - files.keys() - recorded.gone.keys() - set(drop)):
        raise PatchError(
            "patch-lost", f"The worktree of {fork} lost {len(lost)} patches.", details=lost
        )
    fresh = {name: digest.sha256_bytes(data) for name, data in files.items()}
    fresh |= {name: digest.sha256_bytes(text.encode()) for name, text in recorded.files.items()}
    if changed := [
        name
        for name, value in now.items()
        if value not in (before.get(name), fresh.get(name)) and name not in drop
    ]:
        give_up = "or give the worktree up: `sparkwright patch rebase --abort`."
        raise PatchError(
            "export-mismatch",
            f"{', '.join(changed)} of {fork} changed since the worktree was made.",
            todo=f"Take those changes back and export again, {give_up}",
        )


def write(
    session: RunContext,
    fork: str,
    files: Mapping[str, bytes],
    others: Mapping[str, str] | None = None,
) -> list[str]:
    """
    Write our patches *files* and their order, and return a line per change.

    A killed run leaves a series that every reader refuses; the next export from the same worktree
    finishes it.

    Args:
        others: Other reviewed files to write; None if the patches keep their meaning, so that half
            of the files would do no harm.
    """
    root, folder = session.project.root, session.project.series_folder(fork)
    folder.mkdir(parents=True, exist_ok=True)
    listing, order = folder / "series", list(files)
    text = listing.read_text("utf-8", "replace") if listing.exists() else ""
    old = text.replace(f"{UNFINISHED}\n", "")
    listed = list(filter(None, (line.partition("#")[0].strip() for line in old.splitlines())))
    wanted = {folder / name: data for name, data in files.items()}
    wanted |= {root / name: text.encode() for name, text in (others or {}).items()}
    before = {
        path: path.read_bytes() for path in {*folder.glob("*.patch"), *wanted} if path.exists()
    }
    fresh = {path: data for path, data in wanted.items() if before.get(path) != data}
    removed = sorted(before.keys() - wanted.keys())
    changed = [
        f"{'changed' if path in before else 'new'}: "
        f"{path.name if path.parent == folder else path.relative_to(root)}"
        for path in fresh
    ]
    changed += [f"removed: {path.name}" for path in removed]
    changed += ["order: series"] if listed and order != listed else []
    if changed and others is not None:
        _replace(listing, f"{UNFINISHED}\n{old}".encode())
    for path, data in fresh.items():
        _replace(path, data)
    for path in removed:
        path.unlink()
    if order != listed:
        comments = [line for line in old.splitlines() if line.startswith("#")]
        old = "".join(f"{line}\n" for line in (*comments, *order))
    if changed or old != text:
        _replace(listing, old.encode())
    for left in folder.glob(".*.new"):
        left.unlink()
    return changed


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_bytes(data)
    fresh.replace(path)


def rendered(upstream: Upstream) -> dict[str, bytes]:
    """
    Return the series as commits on the locked source, exported again; the same bytes unless a file
    was edited.
    """
    objects = upstream.session.objects
    with tempfile.TemporaryDirectory(dir=objects.path) as folder:
        work = Objects(Path(folder) / "work.git")
        work.borrow(objects.path.parent)
        _, tip = _commit_locked(upstream, work)
        picks = sum(bool(patch.pick) for patch in series.of(upstream.session, upstream.fork))
        commits = work.run(["rev-list", "--reverse", tip])[1].decode().split()
        return exported(work, commits[picks], tip)


def check(upstream: Upstream) -> int:
    """
    Check that the files of the series are in the exported form, and return their number.

    Raises:
        export-mismatch: They are not.
    """
    folder = upstream.session.project.series_folder(upstream.fork)
    files = rendered(upstream)
    if wrong := [name for name, data in files.items() if (folder / name).read_bytes() != data]:
        raise PatchError(
            "export-mismatch",
            f"{len(wrong)} patches of {upstream.fork} are not in the exported form.",
            details=wrong,
        )
    console.note(f"{upstream.fork}: {len(files)} patches are in the exported form")
    return len(files)
