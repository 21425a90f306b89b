"""
The series as commits in a git worktree, for a maintainer, and back to files.

Only in the worktree may git look for the place of a change (``git am --3way``). An exported series
applies strictly, gives the tree of the worktree, and accounts for every patch that was there
before.
"""

import contextlib
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from sparkwright.cherry_picks import apply, ledger, series
from sparkwright.cherry_picks.patch import CONTEXT, PatchError, parse, render
from sparkwright.cherry_picks.upstream import Base, Upstream
from sparkwright.core import git
from sparkwright.core.console import console
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.files import content_key, sha256_file
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import SourceError

#: The ref of the last pick, or of the base if there is none.
PICKS = "refs/sparkwright/picks"
#: Trailer with the file name of a commit; no exported patch has it.
FILE = "Patch-File"
#: In a series while an export writes: the name of a missing patch, so that every reader refuses a
#: half-written series.
KILLED_EXPORT = "this-export-was-killed-run-it-again"
#: Context of the mails for git am: with less, it could put a change to a similar place.
MAIL_CONTEXT = 20

_EPOCH = "Thu, 1 Jan 2026 00:00:00 +0000"
#: A file name without a path, a leading dot or a comment of quilt's list.
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


class WorktreeState(msgspec.Struct, frozen=True):
    """
    The record of a worktree.

    Attributes:
        gone: Patches to leave out, each with the reason.
        files: Reviewed files to write together with the series: path below the checkout → text.
        inputs: See `_inputs`, when the worktree was made.
    """

    gone: dict[str, str]
    files: dict[str, str]
    inputs: str


def folder_of(context: RunContext, fork: str) -> Path:
    """Return the worktree of *fork*, which is in the checkout because a cache may be removed."""
    return context.project.root / ".rebase" / context.project.stack / fork


def refuse_worktree(context: RunContext, fork: str) -> None:
    """
    Check that *fork* has no worktree.

    Raises:
        rebase-unfinished: There is one.
    """
    if (folder := folder_of(context, fork)).exists():
        raise PatchError(
            "rebase-unfinished",
            f"There is a worktree of {fork} already.",
            details=[str(folder)],
        )


def start(
    upstream: Upstream, base: Base, files: Mapping[str, str] = {}, gone: Mapping[str, str] = {}
) -> tuple[dict[str, str], str]:
    """
    Make the worktree: every patch of the series as a commit on *base*, up to the first that needs a
    person.

    Args:
        files, gone: See `WorktreeState`.

    Returns:
        The outcome of each pick, and of each patch that has a commit; and the patch at which git am
        stopped, empty if there is none.

    Raises:
        rebase-unfinished: There is a worktree already.
        patch-conflict: A pick does not apply; nothing is made.
    """
    context, fork = upstream.context, upstream.fork
    refuse_worktree(context, fork)
    folder = folder_of(context, fork)
    states, stuck = dict[str, str](), dict[str, str]()
    patches = [patch for patch in series.load_series(context, fork) if patch.name not in gone]
    picks = [patch for patch in patches if patch.pick]
    tried = list(zip(picks, apply.evaluate(context.objects, base.tree, picks), strict=True))
    for pick, reply in tried:
        states[pick.name] = reply.status
        if reply.status == "conflict":
            stuck[pick.name] = "; ".join(reply.says)
    if stuck:
        raise PatchError(
            "patch-conflict",
            f"{', '.join(stuck)} of {fork} do not apply to {base.name}.",
            details=list(map(": ".join, stuck.items())),
            todo=f"Leave out files: `sparkwright patch pick --stack {context.project.stack} "
            f"--fork {fork} NUMBER --exclude PATH=REASON`; or drop a pick, with `--drop` "
            f"instead, or with `patch bump --drop '#NUMBER'`.",
        )
    with context.store.building(folder) as scratch:
        work = git.Objects(scratch / ".git")
        work.borrow(context.objects.path.parent)
        config = work.path / "config"
        config.write_text(config.read_text() + _CONFIG)
        tip = work.commit(base.tree, f"{fork} {base.name}", author="sparkwright", date=_EPOCH)
        for pick, reply in tried:
            if reply.status == "applied":
                message = f"{pick.subject} ({pick.name})\n\n{pick.reason}\n"
                author, date = pick.author or "upstream", pick.date or _EPOCH
                tip = work.commit(reply.tree, message, tip, author=author, date=date)
        work.run(["update-ref", PICKS, tip])
        git.run(["checkout", "-q", "-B", "series", tip], cwd=scratch)
        (work.path / "sparkwright.json").write_bytes(
            msgspec.json.encode(
                WorktreeState(dict(gone), dict(files), _inputs(context, fork, files))
            )
        )
        stopped = _am(upstream, scratch, [patch.name for patch in patches if not patch.pick])
        # The store may be removed; beyond this copy of it, it serves merges only.
        work.run(["repack", "-q", "-a", "-d", "--window=0", "--threads=1"])
    states |= dict.fromkeys(exported(git.Objects(folder / ".git"), PICKS, "HEAD"), "applied")
    return states, stopped


def _am(upstream: Upstream, folder: Path, names: Sequence[str]) -> str:
    """
    Apply our patches *names* in the worktree, and return the one at which git am stopped. Their
    diffs have more context if the series applies to the locked source; git am then has the files
    that it merges.
    """
    if not names:
        return ""
    objects, diffs = upstream.context.objects, dict[str, bytes]()
    with contextlib.suppress(SparkwrightError):
        before, patches = (
            upstream.locked().tree,
            series.load_series(upstream.context, upstream.fork),
        )
        for step in apply.apply_patches(objects, upstream.fork, before, patches).steps:
            diffs[step.name] = render(objects, before, step.tree, context=MAIL_CONTEXT)
            before = step.tree
    mails = list[str]()
    for number, name in enumerate(names):
        path = upstream.context.project.series_folder(upstream.fork) / name
        head, _, diff = path.read_bytes().partition(b"\n---\n")
        mail = folder / ".git" / f"mail-{number:04}"
        mail.write_bytes(head + f"\n{FILE}: {name}\n---\n".encode() + diffs.get(name, diff))
        mails.append(str(mail))
    words = ["am", "--quiet", "--3way", "--keep-non-patch", "--committer-date-is-author-date"]
    if not git.run([*words, *mails], cwd=folder, env=git.COMMITTER, check=False)[0]:
        return ""
    return names[int((folder / ".git" / "rebase-apply" / "next").read_text()) - 1]


def exported(work: git.Objects, base: str, tip: str) -> dict[str, bytes]:
    """
    Return the commits of ours after *base* up to *tip* as files, oldest first: name → content.

    Raises:
        patch-invalid: The name of a commit is taken or no file name, or its message has a line that
            ends the text of a patch.
    """
    files: dict[str, bytes] = {}
    words = ["rev-list", "--reverse", "--topo-order", "--no-merges", f"{base}..{tip}", "--"]
    for commit in work.text(*words).split():
        text = work.text("log", "-1", "--encoding=UTF-8", _HEADER, commit, "--")
        slug, _, head = text.partition("\n")
        name, start = f"{slug.lower()[:72].strip('-')}.patch", head.rfind(f"\n{FILE}: ")
        if start >= 0:
            name, _, rest = head[start:].removeprefix(f"\n{FILE}: ").partition("\n")
            head = f"{head[:start]}\n{rest}"
        valid = _NAME.fullmatch(name) and name.isprintable() and len(name.encode()) <= 200
        if name in files or not valid or "\n---\n" in head:
            raise PatchError(
                "patch-invalid",
                f"The message of {commit[:12]} has a line ---, which ends the text of a patch, or "
                f"it would become {name!r}, a name that is taken or not a patch's.",
                todo=f"Name its file in the last line of its message: {FILE}: NAME.patch",
            )
        header = head.rstrip("\n").encode("utf-8", "surrogateescape")
        files[name] = header + b"\n---\n" + render(work, f"{commit}^", commit, context=CONTEXT)
    return files


def _inputs(context: RunContext, fork: str, files: Iterable[str]) -> str:
    """Return the digest of what a worktree is made from, and of the *files* to be replaced."""
    paths = map(context.project.root.joinpath, files)
    return content_key("rebase", [series.pins(context, fork), *map(sha256_file, paths)])


def _require(context: RunContext, fork: str) -> Path:
    """
    Return the worktree of *fork*.

    Raises:
        not-provided: There is none.
    """
    folder = folder_of(context, fork)
    if not folder.exists():
        raise SourceError(
            "not-provided",
            f"There is no worktree at {folder}.",
            todo="Make one with `sparkwright patch rebase`.",
        )
    return folder


def abort(context: RunContext, fork: str) -> None:
    """
    Remove the worktree of *fork*.

    Raises:
        not-provided: There is none.
    """
    folder = _require(context, fork)
    # Renamed first, because a killed removal would leave half a worktree; `start` clears it up.
    shutil.rmtree(folder.replace(folder.with_name(f".{fork}.removed")))


def export(context: RunContext, fork: str, drop: Collection[str] = ()) -> list[str]:
    """
    Write the series from the worktree of *fork*, remove the worktree, and return a line per change.

    Args:
        drop: Patches that may be missing.

    Raises:
        rebase-unfinished: git am or git rebase is not done, or something is not committed.
        patch-lost: A patch of the series has no commit.
        patch-invalid: A commit cannot become a patch; that of a changed pick cannot.
        export-mismatch: The files would not give the worktree's tree, or what they replace changed
            meanwhile.
        not-provided: There is no worktree.
    """
    folder = _require(context, fork)
    work = git.Objects(folder / ".git")
    begun, source = work.path / "sparkwright-export", context.project.series_folder(fork)
    state = msgspec.json.decode((work.path / "sparkwright.json").read_bytes(), type=WorktreeState)
    # The store is made anew if it was removed meanwhile.
    work.borrow(context.objects.path.parent)
    changed = git.run(["status", "--porcelain", "--untracked-files=all"], cwd=folder)[1]
    details = list(map("not committed: {}".format, changed.decode("utf-8", "replace").splitlines()))
    for name, command in (("apply", "git am --continue"), ("merge", "git rebase --continue")):
        if (work.path / f"rebase-{name}").exists():
            details.append(command)
    if details:
        raise PatchError(
            "rebase-unfinished",
            f"The worktree of {fork} is not ready.",
            details=[str(folder), *details[:20]],
        )
    files = exported(work, PICKS, "HEAD")
    patches, picks = [parse(*item) for item in files.items()], work.resolve(f"{PICKS}^{{tree}}")
    tree = apply.apply_patches(work, fork, picks, patches).tree
    if tree != work.resolve("HEAD^{tree}"):
        raise PatchError(
            "export-mismatch",
            f"The exported series of {fork} would give another tree than the worktree has.",
            details=[tree],
        )
    # A half-written export is finished here, so it must not matter which files are listed.
    present = {path.name for path in source.glob("*.patch")}
    if lost := sorted(present - {*files, *state.gone, *drop}):
        raise PatchError(
            "patch-lost",
            f"The worktree of {fork} lost {len(lost)} patches.",
            details=lost,
        )
    if not begun.exists() and _inputs(context, fork, state.files) != state.inputs:
        raise PatchError(
            "export-mismatch",
            f"The picks or patches of {fork} changed since the worktree was made.",
            todo="Take those changes back and export again, or give the worktree up: "
            "`sparkwright patch rebase --abort`.",
        )
    begun.touch()
    for name, reason in state.gone.items():
        console.note(f"dropped: {name}, {reason}")
    lines = _write(context, fork, files, state.files)
    abort(context, fork)
    return lines


def _write(
    context: RunContext, fork: str, files: Mapping[str, bytes], others: Mapping[str, str]
) -> list[str]:
    """
    Write our patches *files* and their order, and the reviewed files *others*; return a line per
    change.

    A killed run leaves a series that every reader refuses; the next export from the same worktree
    finishes it.
    """
    root, folder = context.project.root, context.project.series_folder(fork)
    folder.mkdir(parents=True, exist_ok=True)
    listing = folder / "series"
    wanted = {folder / name: data for name, data in files.items()}
    wanted |= {root / name: text.encode() for name, text in others.items()}
    wanted[listing] = "\n".join([*files, ""]).encode()
    changed, lines = list[Path](), list[str]()
    for path, data in wanted.items():
        if data != (path.read_bytes() if path.exists() else b""):
            changed.append(path)
            lines.append(f"written: {path.relative_to(root)}")
    removed = sorted(set(folder.glob("*.patch")) - wanted.keys())
    if changed or removed:
        ledger.write_reviewed(listing, f"{KILLED_EXPORT}\n".encode())
        for path in removed:
            path.unlink()
            lines.append(f"removed: {path.relative_to(root)}")
        for path in dict.fromkeys([*changed, listing]):
            ledger.write_reviewed(path, wanted[path])
    return lines
