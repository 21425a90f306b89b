"""
The upstream of a fork: its history, the revisions to try patches on, and evidence that it has a
change already.

A mirror has all commits and trees of a repository, but only some of the files. A base can also be a
release on the package index, of which only the tree is known.
"""

import contextlib
import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Literal

import msgspec

from sparkwright.cherry_picks import patch
from sparkwright.cherry_picks.apply import Outcome
from sparkwright.cherry_picks.ledger import Ledger, load_ledger
from sparkwright.cherry_picks.patch import CONTEXT, Patch
from sparkwright.core.console import console, one_line
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.git import Objects
from sparkwright.forks import fetch, package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.fetch import FetchedSource
from sparkwright.forks.mirror import Mirror
from sparkwright.forks.stack import FileLock, SourceError, SourceUnreachable

_NUMBER = re.compile(r"^Merge pull request #(\d+) |\(#(\d+)\)\s*$")


class Commit(msgspec.Struct, frozen=True):
    """An upstream commit: its author, the day on which it reached the branch, and its subject."""

    commit: str
    author: str
    date: str
    subject: str

    @property
    def number(self) -> int:
        """Number of the pull request that a squash or a merge names; 0 if there is none."""
        match = _NUMBER.search(self.subject)
        return int(match[1] or match[2]) if match else 0

    def line(self) -> str:
        """Return the commit as one line of text."""
        return f"{self.commit[:12]} {self.date} {self.subject}"


def log(objects: Objects, *arguments: str) -> list[Commit]:
    """Return the commits that ``git log`` selects, newest first."""
    date, form = "--date=format-local:%Y-%m-%d", "--format=%H%x00%an%x00%cd%x00%s"
    parts = objects.text("log", "-z", date, form, *arguments, "--").split("\0")
    # Names and subjects are untrusted text.
    return [
        Commit(*(one_line(part, 300) for part in parts[at : at + 4]))
        for at in range(0, len(parts) - 3, 4)
    ]


def is_ancestor(objects: Objects, ancestor: str, descendant: str) -> bool | None:
    """
    Return whether *ancestor* is part of the history of *descendant*; None if a commit is not there
    or the history is incomplete here.
    """
    status, _, errors = objects.run(
        ["merge-base", "--is-ancestor", ancestor, descendant], check=False
    )
    return None if errors or status > 1 else status == 0


def touches(objects: Objects, old: str, new: str, lines: Sequence[bytes]) -> bool:
    """
    Return whether a change from blob *old* to blob *new* (empty: no file) removes or adds one of
    *lines*; True if a blob is not there.
    """
    if not (old and new):
        return True
    words = ["diff", "--no-color", "--no-ext-diff", "--no-textconv", "-U0", old, new, "--"]
    status, out, _ = objects.run(words, check=False)
    changed = re.findall(rb"^[-+](.*)", out, re.MULTILINE)
    wanted = set(filter(bytes.strip, b"\n".join(lines).split(b"\n")))
    return status != 0 or b"\nBinary files " in out or not wanted.isdisjoint(changed)


class Base(msgspec.Struct, frozen=True):
    """
    A tree on which patches are tried.

    Attributes:
        name: The release, branch or commit, for people.
        commit: Empty if only the tree is known, as from an sdist.
    """

    name: str
    tree: str
    commit: str = ""


def base_of(source: FetchedSource, name: str = "") -> Base:
    """Return the base of a fetched source, called *name* or after its origin."""
    return Base(name or source.origin, source.tree, source.pin if source.kind == "git" else "")


class Change(msgspec.Struct, frozen=True):
    """
    A commit of a branch.

    Attributes:
        parent: The first one; empty if there is none.
        files: Path → the blob id before and after it; empty if there is none, or a submodule.
    """

    commit: str
    parent: str
    files: dict[str, tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Upstream:
    """
    The upstream of a fork: its ledger, and the mirror of the repository that the ledger names.

    Attributes:
        draft: A ledger that is not written yet, in place of the checkout's.
    """

    context: RunContext
    fork: str
    draft: Ledger | None = None

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger of the fork."""
        return self.draft or load_ledger(self.context.project.root, self.fork)

    @cached_property
    def mirror(self) -> Mirror | None:
        """The mirror of the repository, if there is a ledger."""
        return self.context.mirror(self.ledger.url) if self.ledger.url else None

    def locked(self) -> Base:
        """Return the locked source of the fork."""
        return base_of(fetch.fetch(self.context, self.fork))

    def at_commit(self, name: str, commit: str, patches: Collection[Patch]) -> Base:
        """
        Return the base of an upstream commit, whose trees and files that *patches* change are then
        in the store.

        Raises:
            offline, source-unreachable: The repository may not be asked, or does not have them.
        """
        assert self.mirror
        tree = self.mirror.commit(commit)
        paths, blobs = self.context.objects.paths(tree), set[str]()
        for entry in patches:
            for path in paths.keys() & entry.files:
                blobs.add(paths[path][1])
        self.mirror.files(blobs)
        return Base(name, tree, commit)

    def fetch_files(self, listed: Iterable[Change], paths: Collection[str] = ()) -> None:
        """
        Fetch the files that the commits *listed* changed, or those of *paths* among them, before
        and after the commits.

        Raises:
            offline, source-unreachable: The repository may not be asked, or does not have them.
        """
        blobs = set[str]()
        for change in listed:
            for path in paths or change.files:
                blobs.update(change.files.get(path, ()))
        if self.mirror:
            self.mirror.files(blobs - {""})

    def commit(self, name: str) -> str:
        """
        Return the commit that *name* means: a branch, a tag, or a commit id.

        Raises:
            not-provided: There is none.
            offline, source-unreachable: The repository may not be asked, or does not answer.
        """
        commit: str | None = name if re.fullmatch(r"[0-9a-f]{40}", name) else ""
        if self.mirror and not commit:
            commit = self.mirror.history(name, newest=not self.context.offline)
        if not commit or not self.mirror:
            raise SourceError(
                "not-provided",
                f"{name} is neither a release nor a branch, tag or commit of {self.fork}.",
            )
        return commit

    def find_base(self, name: str, patches: Collection[Patch]) -> Base:
        """
        Return the base that *name* means: a release, or a branch, tag or commit of the repository.

        Raises:
            not-provided: There is none.
            offline, source-unreachable: The index or the repository may not be asked, or does not
                answer.
        """
        spec = self.context.project.fork(self.fork).sources.sdist
        if spec and name[:1].isdigit():
            for release in releases(self.context, spec.name, yanked=True):
                if release.version == name:
                    return of_release(self.context, release)
        return self.at_commit(name, self.commit(name), patches)

    def later(self, patches: Collection[Patch]) -> Iterator[Base]:
        """
        Yield the newest release after the locked source, and the branch's tip if it can be reached.

        Raises:
            source-unreachable: The index does not answer.
        """
        from packaging.version import Version

        sdist = self.context.lock.forks[self.fork].sdist
        newest = releases(self.context, sdist.name)[-1:] if sdist else []
        if sdist and newest and Version(newest[0].version) > Version(sdist.version):
            yield of_release(self.context, newest[0])
        if self.mirror:
            branch = self.ledger.branch
            try:
                tip = self.commit(branch)
                name = f"{branch} {log(self.context.objects, '-1', tip)[0].date}"
                yield self.at_commit(name, tip, patches)
            except SourceUnreachable as error:
                console.note(f"{branch} of {self.fork} is left out: {error.what}")


def of_release(context: RunContext, release: FileLock) -> Base:
    """
    Return the base of *release*, an sdist, in the object database.

    Raises:
        offline, source-unreachable, source-mismatch, archive-unsafe: It cannot be fetched.
    """
    with context.store.lock("objects"):
        return Base(release.version, package_index.import_file(context, release))


def releases(context: RunContext, project: str, *, yanked: bool = False) -> list[FileLock]:
    """
    Return the final releases of *project* that have an sdist, oldest first; none with --offline.

    Args:
        yanked: Also those whose sdist its publisher took back.

    Raises:
        source-unreachable: The index does not answer, or has no such project.
    """
    from packaging.utils import InvalidSdistFilename, parse_sdist_filename

    by_version = {}
    for file in () if context.offline else package_index.files(project):
        with contextlib.suppress(InvalidSdistFilename):
            version = parse_sdist_filename(file.name)[1]
            offered = file.name.endswith(".tar.gz") and file.sha256 and (yanked or not file.yanked)
            if offered and not version.is_prerelease:
                by_version[version] = FileLock(project, str(version), file.name, file.sha256, 0)
    return [by_version[version] for version in sorted(by_version)]


def changes(objects: Objects, tip: str, paths: Collection[str], after: str = "") -> list[Change]:
    """
    Return the commits of the branch ending in *tip* that changed one of *paths*, newest first.

    Args:
        after: A commit, whose history is left out.
    """
    words = [
        *("log", "--first-parent", "-m", "--full-diff", "--raw", "--no-abbrev", "--no-renames"),
        *("-z", "--format=%x01%H%x00%P", tip, *([f"^{after}"] if after else [])),
    ]
    out, listed = objects.text(*words, "--", *paths), list[Change]()
    for entry in re.split(r"\x01(?=[0-9a-f]{40}\0)", out)[1:]:
        commit, parents, *rest = (word.strip("\n") for word in entry.rstrip("\0\n").split("\0"))
        files = dict[str, tuple[str, str]]()
        for row, path in zip(rest[::2], rest[1::2], strict=True):
            files[path] = patch.raw_blobs(row)
        listed.append(Change(commit, parents.partition(" ")[0], files))
    return listed


def _diffs(
    objects: Objects, listed: Iterable[Change], paths: Collection[str], *, context: int = 3
) -> dict[str, bytes]:
    """Return the diff of *paths* of each commit of *listed*, by one call of git for all of them."""
    pairs = "".join(f"{change.commit} {change.parent}\n" for change in listed).encode()
    words = ["diff-tree", "--stdin", *patch.FLAGS, f"-U{context}", "--", *paths]
    parts = re.split(rb"(?m)^([0-9a-f]{40})\n", objects.run(words, stdin=pairs)[1])
    return {name.decode(): diff for name, diff in zip(parts[1::2], parts[2::2], strict=True)}


class Evidence(msgspec.Struct, frozen=True):
    """
    The result of one test of whether upstream has a patch already.

    Attributes:
        holds: True if upstream has the change by this test, None if the test could not be made.
        says: The commit, release or reason, for people.
    """

    test: Literal["ancestor", "patch-id", "reverse"]
    holds: bool | None
    says: str


def evidence(upstream: Upstream, base: Base, ours: Patch, outcome: Outcome) -> tuple[Evidence, ...]:
    """
    Return the results of three tests of whether *base* has the change of *ours*; each finds what
    the others miss. The first two do not hold if a later commit takes the change back.

    The merge commit is an ancestor of the base. The diff as a whole has the patch-id of an upstream
    commit, which finds squashes and re-landed changes. The patch can be reverted in the base, which
    needs no history (as ``stg rebase --merged`` does).

    Args:
        outcome: On *base*; see `apply.try_patches`.
    """
    holds = "holds the whole change" if outcome.reverts else "does not hold all of it"
    return (
        Evidence("ancestor", *_ancestor(upstream, base, ours)),
        Evidence("patch-id", *_same_patch_id(upstream, base, ours)),
        Evidence("reverse", outcome.reverts, f"{base.name} {holds}"),
    )


def _ancestor(upstream: Upstream, base: Base, ours: Patch) -> tuple[bool | None, str]:
    record, commit = upstream.ledger.by_number.get(ours.pick), base.commit
    if record is None or not record.merge:
        return None, "there is no merge commit" if record else "the patch is ours"
    holds = is_ancestor(upstream.context.objects, record.merge, commit) if commit else None
    if holds is None:
        return None, f"the history of {base.name} is not known here"
    says = f"{record.merge[:12]} is {'' if holds else 'not '}part of {base.name}"
    return _unless_reverted(upstream, base, ours, record.merge, says) if holds else (False, says)


def _unless_reverted(
    upstream: Upstream, base: Base, ours: Patch, landed: str, says: str
) -> tuple[bool | None, str]:
    """
    Return False and the commit that takes the change of *ours* back, if the history of *base* has
    one after the commit *landed*; True and *says* if it has none; None if that is not known here.
    """
    objects, paths = upstream.context.objects, set(ours.files)
    try:
        listed = changes(objects, base.commit, ours.files[:1], landed)
        listed = [change for change in listed if paths <= change.files.keys()]
        upstream.fetch_files(listed, paths)
        for commit, diff in _diffs(objects, listed, paths).items():
            if patch.takes_back(diff, ours.data):
                line = log(objects, "-1", commit)[0].line()
                return False, f"{says}, but {line} takes it back"
    except SparkwrightError as error:
        return None, f"{says}; whether it was taken back is not known here: {error.what}"
    return True, says


def _same_patch_id(upstream: Upstream, base: Base, ours: Patch) -> tuple[bool | None, str]:
    """
    Compare *ours* with every commit that changed exactly the same files, with the context of picks
    and with that of ours; of a pick, the whole diff counts.
    """
    objects, record = upstream.context.objects, upstream.ledger.by_number.get(ours.pick)
    own = record.patch_id if record else patch.patch_id(objects, ours.data)
    if not own:
        return None, "the diff is empty"
    if not (upstream.mirror and base.commit):
        return None, f"the history of {base.name} is not known here"
    files = sorted(record.files if record else ours.files)
    try:
        # One path narrows the walk, and finds every commit that changed all of them.
        listed = changes(objects, base.commit, files[:1])
        same = [change for change in listed if sorted(change.files) == files]
        upstream.fetch_files(same)
    except SparkwrightError as error:
        return None, f"the history of {base.name} is not known here: {error.what}"
    for context in (3, CONTEXT):
        for commit, diff in _diffs(objects, same, files, context=context).items():
            if patch.patch_id(objects, diff) == own:
                says = f"{log(objects, '-1', commit)[0].line()} has patch-id {own[:12]}"
                return _unless_reverted(upstream, base, ours, commit, says)
    return False, f"no commit of {base.name} has patch-id {own[:12]}"
