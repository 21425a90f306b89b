"""Upkeep on GitHub: the one issue about drift, and a bump as a pull request."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

import msgspec

from sparkwright.cherry_picks.drift import MEANING, Bump, Document, Drift, Trial
from sparkwright.core import git
from sparkwright.core.errors import FileError, UsageError
from sparkwright.core.files import read_json
from sparkwright.core.github import Repository
from sparkwright.core.pages import environment

#: Bytes of the largest report of drift; one over forty releases has some megabytes.
LARGEST_REPORT = 16 << 20
#: Characters of the largest text; GitHub takes 65,536.
LONGEST = 60_000
#: States in which a patch is to be mended or dropped.
UNUSABLE = ("conflict", "likely-upstream", "already-upstream", "empty")
#: Folders whose files a bump writes.
FOLDERS = ("forks", "cherry_picks")
#: By this, which readers do not see, the issue is recognised.
MARK = "<!-- sparkwright:drift -->"

_Id = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{40}\Z")]
_Text = Annotated[str, msgspec.Meta(max_length=300_000)]
_Path = Annotated[
    str, msgspec.Meta(pattern=rf"\A({'|'.join(FOLDERS)})(/(?!\.\.?(/|\Z))[^/\x00-\x1f]+)+\Z")
]


class IssueUpdate(msgspec.Struct, frozen=True):
    """An issue or a pull request after an update; without a number if there is none."""

    action: Literal["opened", "updated", "unchanged", "closed", "none"]
    number: int = 0
    url: str = ""


class Proposal(msgspec.Struct, frozen=True):
    """
    A bump as a pull request, the output of ``patch bump --json``.

    Attributes:
        bump: None if there is no later release.
        range_diff: Of both series.
        files: The files that differ from the commit; None for a removed one.
        error: Of a bump that failed.
    """

    stack: str = ""
    bump: Bump | None = None
    range_diff: tuple[str, ...] = ()
    files: dict[_Path, bytes | None] = {}
    error: dict[str, object] = {}


class _User(msgspec.Struct, frozen=True):
    login: Annotated[str, msgspec.Meta(max_length=120)]


class _Issue(msgspec.Struct, frozen=True):
    """Fields of an issue; GitHub lists pull requests among them, which have *pull_request*."""

    number: int
    html_url: _Text
    body: _Text | None = None
    user: _User | None = None
    pull_request: msgspec.Raw | None = None


class _Object(msgspec.Struct, frozen=True):
    sha: _Id


class _Commit(msgspec.Struct, frozen=True):
    tree: _Object
    parents: tuple[_Object, ...]


class _Pull(msgspec.Struct, frozen=True):
    number: int
    html_url: _Text
    head: _Object


def read_drift(path: Path) -> list[Drift]:
    """
    Return the drifts in the file at *path*, the output of ``patch drift --json``.

    Raises:
        file-invalid: It is something else, or reports a failure.
    """
    document = read_json(path, Document, limit=LARGEST_REPORT)
    if document.error or not document.drift:
        details = [f"{name}: {document.error.get(name)}" for name in document.error]
        raise FileError("file-invalid", f"{path} holds no drift.", details=details)
    return [entry.of for entry in document.drift]


def read_proposal(path: Path) -> Proposal:
    """
    Return the bump in the file at *path*, the output of ``patch bump --json``.

    Raises:
        file-invalid: It is something else, names a file outside of `FOLDERS`, or reports a failure.
    """
    proposal = read_json(path, Proposal, limit=LARGEST_REPORT)
    if proposal.error:
        raise FileError("file-invalid", f"{path} holds no bump.")
    return proposal


def unusable_patches(drifts: Iterable[Drift]) -> list[tuple[Drift, Trial]]:
    """Return the trials on the newest base whose patches are to be mended or dropped."""
    return [
        (drift, trial)
        for drift in drifts
        for trial in drift.trials
        if trial.base == drift.bases[-1] and trial.state in UNUSABLE
    ]


def drift_text(drifts: Sequence[Drift], run: str = "") -> str:
    """Return the text of the issue about *drifts*; *run* is the address of the log, if any."""
    return _text("drift.md", drifts=drifts, unusable=unusable_patches(drifts), run=run)


def update_issue(
    repository: Repository, drifts: Sequence[Drift], *, author: str, run: str = ""
) -> IssueUpdate:
    """
    Open, update or close the issue about *drifts*.

    Args:
        author: The login that the token belongs to. Issues of others are never touched.
        run: See `drift_text`.

    Raises:
        github-unreachable, github-refused, github-limited: GitHub does not do it.
    """
    unusable, text = unusable_patches(drifts), f"{drift_text(drifts, run)}\n{MARK}\n"
    stacks = ", ".join(dict.fromkeys(drift.stack for drift, _ in unusable))
    issues = repository.pages(
        "/issues", _Issue, f"the issues of {repository.repository}", "state=open"
    )
    ours = (
        issue
        for issue in issues
        if issue.user and issue.user.login == author and MARK in (issue.body or "")
        if issue.pull_request is None
    )
    issue = min(ours, key=lambda issue: issue.number, default=None)
    title = f"Drift: patches to mend or drop in {stacks}: {len(unusable)}"
    record: dict[str, Any] = {"title": title, "body": text}
    if issue is None:
        if not unusable:
            return IssueUpdate("none")
        issue = repository.request("POST", "/issues", _Issue, "a new issue", record)
        return IssueUpdate("opened", issue.number, issue.html_url)
    if not unusable:
        record = {"body": text, "state": "closed", "state_reason": "completed"}
    what = f"the issue {issue.number}"
    repository.request("PATCH", f"/issues/{issue.number}", _Issue, what, record)
    return IssueUpdate("updated" if unusable else "closed", issue.number, issue.html_url)


def require_clean(root: Path) -> None:
    """
    Require that the checkout *root* has no changes that a pull request would take along.

    Raises:
        UsageError: Files of `FOLDERS` differ from its commit.
    """
    words = ["status", "--porcelain", "--untracked-files=all", "--no-renames", "--", *FOLDERS]
    if rows := git.run(words, cwd=root)[1].decode("utf-8", "replace").splitlines():
        todo = "Commit or stash them first; the pull request is to hold the bump alone."
        raise UsageError("usage", "The checkout has changes.", details=rows[:20], todo=todo)


def contents(root: Path, changed: Iterable[str]) -> dict[str, bytes | None]:
    """Return the files in the lines *changed* of `rebase.export`; None for a removed one."""
    paths = [line.partition(": ")[2] for line in changed]
    return {path: (root / path).read_bytes() if (root / path).is_file() else None for path in paths}


def propose(repository: Repository, root: Path, proposal: Proposal, *, base: str) -> IssueUpdate:
    """
    Open or update the pull request of *proposal* against the branch *base*, if it has a bump.

    Everything is sent to GitHub's API, so that git needs no credentials. The branch belongs to the
    bump: it is set to the new change.

    Args:
        root: The checkout whose commit the files of *proposal* change.

    Raises:
        github-unreachable, github-refused, github-limited: GitHub does not do it.
    """
    stack, bump = proposal.stack, proposal.bump
    if bump is None:
        return IssueUpdate("none")
    request, words = repository.request, [stack, bump.fork, bump.base.name]
    branch = "bump/" + "-".join(re.sub(r"[^\w.]+", "-", word, flags=re.A) for word in words)
    title = f"{bump.fork} of {stack} to {bump.base.name}"
    body = _text("bump.md", stack=stack, bump=bump, range_diff=proposal.range_diff)
    output = git.run(["show", "-s", "--format=%H %T", "HEAD"], cwd=root)[1]
    head, base_tree = output.decode().split()
    entries = list(_entries(repository, proposal.files))
    tree = request(
        "POST", "/git/trees", _Object, "a tree", {"base_tree": base_tree, "tree": entries}
    )
    pull = _open_pull(repository, base, branch)
    if pull:
        what = f"the commit {pull.head.sha}"
        commit = request("GET", f"/git/commits/{pull.head.sha}", _Commit, what)
        if commit == _Commit(tree, (_Object(head),)):
            return IssueUpdate("unchanged", pull.number, pull.html_url)
    record: dict[str, Any] = {"message": f"{title}\n\n{body}", "tree": tree.sha, "parents": [head]}
    _set_branch(
        repository, branch, request("POST", "/git/commits", _Object, "a commit", record).sha
    )
    record = {"title": title, "body": body}
    if pull:
        what = f"the pull request {pull.number}"
        request("PATCH", f"/pulls/{pull.number}", _Pull, what, record)
        return IssueUpdate("updated", pull.number, pull.html_url)
    record |= {"head": branch, "base": base}
    pull = request("POST", "/pulls", _Pull, "a pull request", record)
    return IssueUpdate("opened", pull.number, pull.html_url)


def _entries(repository: Repository, files: Mapping[str, bytes | None]) -> Iterator[dict[str, Any]]:
    """Store *files* on GitHub, and yield the entries of their tree; None removes one."""
    for path, data in sorted(files.items()):
        blob = None
        if data is not None:
            record = {"content": base64.b64encode(data).decode(), "encoding": "base64"}
            blob = repository.request("POST", "/git/blobs", _Object, path, record).sha
        yield {"path": path, "mode": "100644", "type": "blob", "sha": blob}


def _open_pull(repository: Repository, base: str, branch: str) -> _Pull | None:
    """Return the open pull request of *branch* against *base*."""
    head = f"{repository.repository.partition('/')[0]}:{branch}"
    query = f"state=open&base={quote(base, safe='')}&head={quote(head, safe='')}"
    what = f"the pull requests of {branch}"
    return next(repository.pages("/pulls", _Pull, what, query), None)


def _set_branch(repository: Repository, branch: str, commit: str) -> None:
    """Set *branch* to *commit*, and create it if there is none."""
    what, path = f"the branch {branch}", repository.path("/git/refs")
    record: dict[str, Any] = {"ref": f"refs/heads/{branch}", "sha": commit}
    reply = repository.github.send("POST", path, what, record)
    if reply.status == 422:  # It exists.
        record = {"sha": commit, "force": True}
        reply = repository.github.send("PATCH", f"{path}/heads/{quote(branch)}", what, record)
    repository.github.decode(reply, msgspec.Raw, what)


def _text(template: str, **values: Any) -> str:
    """Return the Markdown of *template*, cut if GitHub would not take it."""
    templates = environment("sparkwright.lab")
    text = templates.get_template(template).render(meaning=MEANING, **values)
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST].rpartition(chr(10))[0]}\n```\n\n*Cut here; the log has the rest.*\n"
