"""
The series as commits in a git worktree, for a maintainer, and back to files: each is the inverse of
the other, byte for byte.

Only in the worktree may git look for the place of a change (``git am --3way``). An exported series
applies strictly, gives the tree of the worktree, and accounts for every patch that was there
before.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from email.header import Header
from pathlib import Path

import msgspec

from sparkwright.cherry_picks import apply, ledger, series
from sparkwright.cherry_picks.already_upstream import CONTEXT
from sparkwright.cherry_picks.patch import Patch, PatchError, parse, render
from sparkwright.cherry_picks.upstream_revisions import Base, Upstream
from sparkwright.core import digest, git
from sparkwright.core.console import console
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.git_store import Objects
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError

#: The branch of the worktree, and the refs of the base and of the last pick.
BRANCH, BASE, PICKS = "series", "refs/sparkwright/base", "refs/sparkwright/picks"
#: Trailers with the file name or the pull request of a commit; no exported patch has them.
FILE, PICK = "Patch-File", "Patch-Pick"
#: In a series while an export writes: the name of a missing patch, so that every reader refuses a
#: half-written series.
UNFINISHED = "this-export-was-killed-run-it-again"
#: Context of the mails for git am; in a merge of three states it does not matter.
MAIL_CONTEXT = 20

COMMITTER = {
    "GIT_COMMITTER_NAME": "sparkwright",
    "GIT_COMMITTER_EMAIL": "export@sparkwright.invalid",
}
AUTHOR = "sparkwright <export@sparkwright.invalid>"
_EPOCH = "Thu, 1 Jan 2026 00:00:00 +0000"
_PERSON = re.compile(r"\s*(.*?)\s*<([^<>]*)>\s*")
#: A file name without a path, a leading dot, a comment of quilt's list, and short enough for a
#: temporary name beside it.
_NAME = re.compile(r"[^\s.#/-][^#/]{0,190}\.patch")
#: Beginnings of lines that git takes out of a mail (mailinfo.c, mailsplit.c).
_TAKEN = ("diff -", "index: ", "---", "from ", ">from ", "from:", "subject:", "date:", "[patch]")

#: The configuration of the worktree, which outranks the maintainer's where that would change bytes
#: or stop git am.
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


class State(msgspec.Struct, frozen=True):
    """
    What git does not know of a worktree.

    Attributes:
        gone: Patches to leave out, each with the reason.
        files: Reviewed files to write together with the series: path below the checkout → text.
        pins: See `pins`, when the worktree was made.
    """

    gone: dict[str, str]
    files: dict[str, str]
    pins: dict[str, str]


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


class Exported(msgspec.Struct, frozen=True):
    """A commit as a file; of a pull request, *pick* is set and *data* is empty."""

    name: str
    data: bytes
    pick: int
    commit: str


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
    session, objects, fork = upstream.session, upstream.session.objects, upstream.fork
    folder = folder_of(session, fork)
    if folder.exists():
        raise PatchError(
            "rebase-unfinished", f"There is a worktree of {fork} already.", details=[str(folder)]
        )
    whole = series.of(session, fork)
    patches = [patch for patch in whole if patch.name not in (gone or {})]
    picks = [patch for patch in patches if patch.pick]
    ours = [patch for patch in patches if not patch.pick]
    dropped, outcomes, steps = dict(gone or {}), dict[str, str](), list[tuple[Patch, str]]()
    for pick, outcome in zip(picks, apply.evaluate(objects, base.tree, picks), strict=True):
        outcomes[pick.name] = outcome.status
        if outcome.status == "conflict":
            what = f"{pick.name} does not apply to {base.name}."
            command = f"sparkwright pick {fork}{pick.name}"
            todo = f"Leave out files, or all of it: `{command} --exclude PATH=REASON` or `--drop`."
            raise PatchError("patch-conflict", what, details=outcome.says, todo=todo)
        if outcome.status == "applied":
            steps.append((pick, outcome.tree))
        else:
            dropped[pick.name] = "; ".join(outcome.says)
    root, tip = commit_line(objects, f"{fork} {base.name}", base.tree, steps)
    recorded = State(dropped, dict(files or {}), pins(session, fork, files or {}))
    diffs = _wide_diffs(upstream, whole)
    scratch = _scratch(folder)
    _make_worktree(objects, scratch, root, tip, recorded)
    stopped = _am(scratch, ours, diffs)
    # The store may be removed; beyond this copy of it, it serves merges only.
    git.run(["repack", "-q", "-a", "-d", "--window=0", "--threads=1"], cwd=scratch)
    scratch.replace(folder)
    tip = fetch_commits(objects, folder)[-1]
    written = {
        file.name: file.data for file in export(objects, root, tip, _messages(objects, ours))
    }
    series_folder = session.project.series_folder(fork)
    for patch in itertools.takewhile(lambda patch: patch.name != stopped, ours):
        same = written.get(patch.name) == (series_folder / patch.name).read_bytes()
        changed = "written anew" if patch.name in written else "empty: nothing is left to do"
        outcomes[patch.name] = "as it was" if same else changed
    return Rebased(str(folder), outcomes, stopped, root, tip)


def _wide_diffs(upstream: Upstream, patches: Sequence[Patch]) -> dict[str, bytes]:
    """
    Return the diffs of *patches* with more context, if they apply to the locked source; git am then
    has their files.
    """
    objects = upstream.session.objects
    try:
        base = upstream.locked().tree
        steps = apply.apply_patches(objects, upstream.fork, base, patches).steps
    except SparkwrightError as error:
        console.detail(f"git am may lack the files that a patch was made for: {error.what}")
        return {}
    before = [base, *(step.tree for step in steps)]
    return {
        step.name: render(objects, tree, step.tree, context=MAIL_CONTEXT)
        for tree, step in zip(before, steps, strict=False)
    }


def _make_worktree(objects: Objects, folder: Path, base: str, tip: str, recorded: State) -> None:
    folder.mkdir(parents=True)
    git.run(["init", "-q", "."], cwd=folder)
    for name, value in _CONFIG.items():
        git.run(["config", name, value], cwd=folder)
    alternates = folder / ".git" / "objects" / "info" / "alternates"
    alternates.write_text(f"{objects.path / 'objects'}\n")
    attributes = (objects.path / "info" / "attributes").read_bytes()
    (folder / ".git" / "info" / "attributes").write_bytes(attributes)
    for ref, commit in ((BASE, base), (PICKS, tip)):
        git.run(["update-ref", ref, commit], cwd=folder)
    git.run(["checkout", "-q", "-B", BRANCH, tip], cwd=folder)
    (folder / ".git" / "sparkwright.json").write_bytes(msgspec.json.encode(recorded))


def _scratch(folder: Path) -> Path:
    """Return the temporary name of *folder*, after removing what a killed run left there."""
    scratch = folder.with_name(f".{folder.name}.half")
    shutil.rmtree(scratch, ignore_errors=True)
    return scratch


def _am(folder: Path, patches: Sequence[Patch], diffs: Mapping[str, bytes]) -> str:
    """Apply *patches* in the worktree with git am, and return the patch at which it stopped."""
    box = folder / ".git" / "sparkwright-mails"
    box.mkdir()
    mails = [box / f"{number:04}.mail" for number in range(len(patches))]
    for mail, ours in zip(mails, patches, strict=True):
        author, date = (
            encoded_header(ours.author or "upstream <upstream@invalid>"),
            ours.date or _EPOCH,
        )
        subject, _, text = _safe(_message(ours)).partition("\n")
        head = f"From: {author}\nDate: {date}\nSubject: {encoded_header(subject)}\n{text}---\n"
        mail.write_bytes(head.encode("utf-8", "surrogateescape") + diffs.get(ours.name, ours.data))
    words = [
        "am",
        "--quiet",
        "--3way",
        "--keep",
        "--keep-cr",
        "--committer-date-is-author-date",
        *map(str, mails),
    ]
    if not mails or not git.run(words, cwd=folder, env=COMMITTER, check=False)[0]:
        return ""
    position = folder / ".git" / "rebase-apply" / "next"
    return patches[int(position.read_text()) - 1 if position.exists() else 0].name


def state(folder: Path) -> State:
    """
    Return the state of the worktree in *folder*.

    Raises:
        not-provided: There is none.
    """
    try:
        return msgspec.json.decode((folder / ".git" / "sparkwright.json").read_bytes(), type=State)
    except (OSError, msgspec.DecodeError):
        todo = "Make one with `sparkwright rebase`."
        raise SourceError("not-provided", f"There is no worktree at {folder}.", todo=todo) from None


def abort(session: RunContext, fork: str) -> None:
    """
    Remove the worktree of *fork*.

    Raises:
        not-provided: There is none.
    """
    folder = folder_of(session, fork)
    if not folder.exists():
        state(folder)
    # Renamed first, because a killed removal would leave half a worktree.
    scratch = _scratch(folder)
    folder.replace(scratch)
    shutil.rmtree(scratch)


def fetch_commits(objects: Objects, folder: Path) -> list[str]:
    """Bring the commits of the worktree into the store; return its base, last pick and tip."""
    words = ["rev-parse", BASE, PICKS, "HEAD"]
    base, picks, tip = git.run(words, cwd=folder)[1].decode().split()
    # A store that was removed meanwhile gets the base as well.
    known = f"^{base}\n" if objects.has(f"{base}^{{tree}}") else ""
    words = ["pack-objects", "--quiet", "--revs", "--stdout"]
    pack = git.run(words, cwd=folder, stdin=f"{tip}\n{picks}\n{known}".encode())[1]
    objects.run(["unpack-objects", "-q"], stdin=pack)
    return [base, picks, tip]


def _commit(objects: Objects, tree: str, parent: str, author: str, date: str, text: str) -> str:
    """Return a commit whose id depends on the arguments only."""
    if "\0" in author + date:
        what = f"The author or the date of {text.partition(chr(10))[0]!r} holds a NUL."
        raise PatchError("patch-invalid", what)
    person = _PERSON.fullmatch(author)
    variables = {
        # Python writes variables in the locale's encoding, and git reads UTF-8.
        "GIT_AUTHOR_NAME": os.fsdecode(
            ((person[1] if person else author) or "upstream").encode("utf-8", "surrogateescape")
        ),
        "GIT_AUTHOR_EMAIL": person[2] if person else "upstream@invalid",
        "GIT_AUTHOR_DATE": date or _EPOCH,
        "GIT_COMMITTER_DATE": date or _EPOCH,
        **COMMITTER,
    }
    words = ["commit-tree", tree, *(["-p", parent] if parent else [])]
    status, out, errors = objects.run(
        words, env=variables, stdin=text.encode("utf-8", "surrogateescape"), check=False
    )
    if status:
        details = errors.splitlines()[-5:]
        raise PatchError(
            "patch-invalid",
            f"git makes no commit of {text.partition(chr(10))[0]!r}.",
            details=details,
        )
    return out.decode().strip()


def commit_line(
    objects: Objects, title: str, base: str, steps: Iterable[tuple[Patch, str]]
) -> tuple[str, str]:
    """
    Return a commit of the tree *base*, and the last commit of *steps*: patches and their trees.
    """
    root = tip = _commit(objects, base, "", AUTHOR, "", title)
    for patch, tree in steps:
        tip = _commit(objects, tree, tip, patch.author, patch.date, _message(patch))
    return root, tip


def commits(upstream: Upstream, base: Base) -> tuple[str, str]:
    """Return the series as commits on *base*: the commit of the base and the last one."""
    objects, patches = upstream.session.objects, series.of(upstream.session, upstream.fork)
    steps = apply.apply_patches(objects, upstream.fork, base.tree, patches).steps
    pairs = zip(patches, (step.tree for step in steps), strict=True)
    return commit_line(objects, f"{upstream.fork} {base.name}", base.tree, pairs)


def _message(patch: Patch) -> str:
    if patch.pick:
        return f"{patch.subject} ({patch.name})\n\n{patch.reason}\n\n{PICK}: {patch.pick}\n"
    return f"{patch.subject}\n\n{patch.text}\n{FILE}: {patch.name}\n"


def _messages(objects: Objects, patches: Iterable[Patch]) -> dict[str, str]:
    """
    Return the messages of *patches* by what git am makes of them, since a mail cannot carry every
    line.
    """
    pairs = [
        (_safe(_message(patch)).encode("utf-8", "surrogateescape"), _message(patch))
        for patch in patches
    ]
    return {
        objects.run(["stripspace"], stdin=safe)[1].decode("utf-8", "replace"): text
        for safe, text in pairs
    }


def _safe(text: str) -> str:
    """Return *text* with a blank before each line that git would take out of a mail."""
    subject, *rest = text.split("\n")
    return "\n".join(
        [subject, *(f" {line}" if line.lower().startswith(_TAKEN) else line for line in rest)]
    )


def encoded_header(text: str) -> str:
    """Return a header's text for a mail: encoded if it is not ASCII or looks encoded (RFC 2047)."""
    person = _PERSON.fullmatch(text)
    if text.isascii() and "=?" not in text:
        return text
    return (
        f"{Header(person[1], 'utf-8').encode()} <{person[2]}>"
        if person
        else Header(text, "utf-8", maxlinelen=900).encode()
    )


def export(
    objects: Objects, base: str, tip: str, messages: Mapping[str, str] | None = None
) -> list[Exported]:
    """
    Return the commits after *base* up to *tip* as files, oldest first.

    Args:
        messages: See `_messages`.

    Raises:
        patch-invalid: A commit is a merge, its name is taken or no file name, or its message is not
            a patch's.
    """
    files: list[Exported] = []
    form = "--format=%H%x00%P%x00%an <%ae>%x00%aD%x00%B"
    words = [
        "log",
        "--reverse",
        "--topo-order",
        "-z",
        "--encoding=UTF-8",
        form,
        f"{base}..{tip}",
        "--",
    ]
    raw = objects.run(words)[1].split(b"\0")
    for at in range(0, len(raw) - 4, 5):
        try:
            commit, parents, author, date, text = (part.decode() for part in raw[at : at + 5])
        except UnicodeDecodeError:
            raise PatchError(
                "patch-invalid", f"The message of {raw[at].decode()[:12]} is not UTF-8."
            ) from None
        if len(parents.split()) != 1:
            what, todo = (
                f"{commit[:12]} has {len(parents.split())} parents; a series is a line of commits.",
                "Make it one with git rebase.",
            )
            raise PatchError("patch-invalid", what, todo=todo)
        text, name = _split_name((messages or {}).get(text, text))
        if re.fullmatch(r"#[1-9][0-9]*", name):
            files.append(Exported(name, b"", int(name[1:]), commit))
            continue
        head, _, body = text.partition("\n\n")
        subject, body = " ".join(head.split()), body.strip("\n")
        slug = re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-")[:72].strip("-")
        name = name or f"{slug}.patch"
        if (
            name in {file.name for file in files}
            or not _NAME.fullmatch(name)
            or not name.isprintable()
            or len(name.encode()) > 200
        ):
            what = (
                f"{commit[:12]} would become {name!r}, which is taken or is no file name of a "
                f"patch."
            )
            raise PatchError(
                "patch-invalid",
                what,
                todo=f"Name its file in the last line of its message: {FILE}: NAME.patch",
            )
        if "---" in body.split("\n"):
            what = f"The message of {commit[:12]} has a line ---, which ends the text of a patch."
            raise PatchError("patch-invalid", what, todo="Change that line.")
        top = (
            f"From: {encoded_header(author)}\nDate: {date}\nSubject: [PATCH] "
            f"{encoded_header(subject)}\n\n{body}\n---\n"
        )
        files.append(
            Exported(
                name, top.encode() + render(objects, parents, commit, context=CONTEXT), 0, commit
            )
        )
        parse(name, files[-1].data)
    return files


def _split_name(text: str) -> tuple[str, str]:
    """
    Return *text* without our trailer, the last of its kind in the last paragraph, and the name in
    that trailer.
    """
    lines = text.rstrip("\n").split("\n")
    for at in range(len(lines) - 1, -1, -1):
        key, _, value = lines[at].partition(": ")
        if key in (FILE, PICK):
            return "\n".join(
                lines[:at] + lines[at + 1 :]
            ), f"#{value.strip()}" if key == PICK else value.strip()
        if not lines[at].strip():
            break
    return text, ""


def pins(session: RunContext, fork: str, files: Iterable[str]) -> dict[str, str]:
    """
    Return the digests of what a worktree is made from and an export replaces: picks by name, files
    by path.
    """
    root, book, stack = (
        session.project.root,
        ledger.load(session.project.root, fork),
        session.project.stack,
    )
    paths = [*session.project.series_folder(fork).glob("*.patch"), *(root / name for name in files)]
    picks = {
        record.name: digest.key("pick", [record.sha256, record.stacks[stack]])
        for record in (book.carried(stack) if book else ())
    }
    return {str(path.relative_to(root)): digest.sha256_file(path) for path in paths} | picks


def collect(session: RunContext, fork: str, drop: Collection[str]) -> tuple[State, list[Exported]]:
    """
    Return the state of the worktree of *fork*, and the verified files that it would be exported as.

    Args:
        drop: Patches that may be missing although upstream does not have them.

    Raises:
        rebase-unfinished: git am or git rebase is not done, or something is not committed.
        patch-lost: A patch of the series has no commit.
        patch-invalid: A commit cannot become a patch.
        export-mismatch: The files would not give the worktree's trees, or what they replace changed
            meanwhile.
        not-provided: There is no worktree, or *drop* names no patch.
    """
    folder, objects = folder_of(session, fork), session.objects
    recorded = state(folder)
    am = "a patch waits: resolve it, `git add` it, and `git am --continue`"
    unfinished = {"rebase-apply": am, "rebase-merge": "git rebase is not done"}
    waiting = [why for name, why in unfinished.items() if (folder / ".git" / name).exists()]
    changed = (
        git.run(["status", "--porcelain", "--untracked-files=all"], cwd=folder)[1]
        .decode("utf-8", "replace")
        .splitlines()
    )
    if waiting := [*waiting, *(f"not committed: {line}" for line in changed[:10])]:
        raise PatchError(
            "rebase-unfinished",
            f"The worktree of {fork} is not ready.",
            details=[str(folder), *waiting],
        )
    base, picks_tip, tip = fetch_commits(objects, folder)
    # A half-written export is finished here, so it must not matter which files are listed.
    paths = session.project.series_folder(fork).glob("*.patch")
    ours = [parse(path.name, path.read_bytes()) for path in paths]
    files = export(objects, base, tip, _messages(objects, ours))
    tree = objects.resolve(f"{base}^{{tree}}")
    missing = [patch for patch in ours if patch.name not in {file.name for file in files}]
    present = apply.taken_away(objects, tree, missing)
    gone = dict.fromkeys(present, "the base holds the whole change") | recorded.gone
    recorded = msgspec.structs.replace(recorded, gone=gone)
    _account(session, fork, recorded, files, drop)
    trees = {file.commit: objects.resolve(f"{file.commit}^{{tree}}") for file in files}
    picks = {file.pick: file.commit for file in export(objects, base, picks_tip)}
    for file in files:
        if file.pick and trees[file.commit] != objects.resolve(f"{picks.get(file.pick)}^{{tree}}"):
            what = f"{file.name} is not what the ledger pins."
            todo = "Put the change into a commit of its own; it becomes a patch of ours."
            raise PatchError("export-mismatch", what, todo=todo)
        tree = trees[file.commit] if file.pick else tree
    written = [parse(file.name, file.data) for file in files if not file.pick]
    applied = apply.apply_patches(objects, fork, tree, written).tree
    if applied != objects.resolve(f"{tip}^{{tree}}"):
        what = f"The exported series of {fork} would give another tree than the worktree has."
        raise PatchError("export-mismatch", what, details=[applied])
    return recorded, files


def _account(
    session: RunContext,
    fork: str,
    recorded: State,
    files: Sequence[Exported],
    drop: Collection[str],
) -> None:
    """
    Refuse lost patches, and files that changed since the worktree was made, except by a killed
    export.
    """
    folder = f"{session.project.series_folder(fork).relative_to(session.project.root)}/"
    now = {
        name.removeprefix(folder): value
        for name, value in pins(session, fork, recorded.files).items()
    }
    before = {name.removeprefix(folder): value for name, value in recorded.pins.items()}
    present = {name for name in now if name.startswith("#") or name.endswith(".patch")}
    if unknown := sorted(set(drop) - present - before.keys()):
        what = f"The series of {fork} has no patch {', '.join(unknown)} to drop."
        raise SourceError("not-provided", what, details=sorted(present))
    if lost := sorted(present - {file.name for file in files} - recorded.gone.keys() - set(drop)):
        raise PatchError(
            "patch-lost", f"The worktree of {fork} lost {len(lost)} patches.", details=lost
        )
    fresh = {file.name: digest.sha256_bytes(file.data) for file in files if not file.pick}
    fresh |= {name: digest.sha256_bytes(text.encode()) for name, text in recorded.files.items()}
    if changed := [
        name
        for name, value in now.items()
        if value not in (before.get(name), fresh.get(name)) and name not in drop
    ]:
        what = f"{', '.join(changed)} of {fork} changed since the worktree was made."
        give_up = "or give the worktree up: `sparkwright rebase --abort`."
        raise PatchError(
            "export-mismatch", what, todo=f"Take those changes back and export again, {give_up}"
        )


def write(
    session: RunContext,
    fork: str,
    files: Sequence[Exported],
    others: Mapping[str, str] | None = None,
) -> list[str]:
    """
    Write our patches of *files* and their order, and return a line per change.

    A killed run leaves a series that every reader refuses; the next export from the same worktree
    finishes it.

    Args:
        others: Other reviewed files to write; None if the patches keep their meaning, so that half
            of the files would do no harm.
    """
    root, folder = session.project.root, session.project.series_folder(fork)
    folder.mkdir(parents=True, exist_ok=True)
    listing = folder / "series"
    text = listing.read_text("utf-8", "replace") if listing.exists() else ""
    old = text.replace(f"{UNFINISHED}\n", "")
    order = [file.name for file in files if not file.pick]
    listed = [
        name for name in (line.partition("#")[0].strip() for line in old.splitlines()) if name
    ]
    before = set(folder.glob("*.patch"))
    wanted = {folder / file.name: file.data for file in files if not file.pick}
    wanted |= {root / name: text.encode() for name, text in (others or {}).items()}
    fresh = {
        path: data
        for path, data in wanted.items()
        if not path.exists() or path.read_bytes() != data
    }
    removed = sorted(before - wanted.keys())
    label = {
        path: path.name if path.parent == folder else str(path.relative_to(root))
        for path in [*fresh, *removed]
    }
    changed = [f"{'changed' if path.exists() else 'new'}: {label[path]}" for path in fresh]
    changed += [f"removed: {label[path]}" for path in removed] + (
        ["order: series"] if listed and order != listed else []
    )
    if changed and others is not None:
        _replace(listing, f"{UNFINISHED}\n{old}".encode())
    for path, data in fresh.items():
        _replace(path, data)
    for path in removed:
        path.unlink()
    if changed or order != listed or old != text:
        _replace(listing, (_ordered(old, order) if order != listed else old).encode())
    for left in folder.glob(".*.new"):
        left.unlink()
    return changed


def _ordered(old: str, order: Sequence[str]) -> str:
    """
    Return the series file *old* for the patches *order*; a comment stays with the patch on its line
    or below it.
    """
    lines: dict[str, list[str]] = {}
    above: list[str] = []
    for line in old.splitlines():
        above.append(line)
        if name := line.partition("#")[0].strip():
            lines[name], above = above, []
    return "".join(
        f"{line}\n" for line in [line for name in order for line in lines.get(name, [name])] + above
    )


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_bytes(data)
    fresh.replace(path)


def rendered(upstream: Upstream) -> list[Exported]:
    """
    Return the series as commits on the locked source, exported again; the same bytes unless a file
    was edited.
    """
    return export(upstream.session.objects, *commits(upstream, upstream.locked()))


def check(upstream: Upstream) -> int:
    """
    Check that the files of the series are in the exported form, and return their number.

    Raises:
        export-mismatch: They are not.
    """
    folder = upstream.session.project.series_folder(upstream.fork)
    files = [file for file in rendered(upstream) if not file.pick]
    if wrong := [file.name for file in files if (folder / file.name).read_bytes() != file.data]:
        what = f"{len(wrong)} patches of {upstream.fork} are not in the exported form."
        raise PatchError("export-mismatch", what, details=wrong)
    console.note(f"{upstream.fork}: {len(files)} patches are in the exported form")
    return len(files)
