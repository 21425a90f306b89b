"""
A change of reviewed files as a pull request, made by questions to GitHub alone: nothing is pushed, so no credentials lie in a repository.

The branch belongs to the proposal: when it is made again, the branch is set to the new change.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Annotated, Literal
from urllib.parse import quote

import msgspec

from sparkwright.core.errors import GitHubError
from sparkwright.core.github import Repository

_Id = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{40}\Z")]
_Text = Annotated[str, msgspec.Meta(max_length=300_000)]


class _Object(msgspec.Struct, frozen=True):
    sha: _Id


class _Ref(msgspec.Struct, frozen=True):
    object: _Object


class _Commit(msgspec.Struct, frozen=True):
    sha: _Id
    tree: _Object


class _Pull(msgspec.Struct, frozen=True):
    number: int
    html_url: _Text


class Proposed(msgspec.Struct, frozen=True):
    """A pull request: *done* says whether it is new, was set to another change, or says the same as before."""

    done: Literal["opened", "updated", "unchanged"]
    number: int
    url: str
    commit: str


def propose(
    repository: Repository, base: str, head: str, branch: str, files: Mapping[str, bytes | None], *, title: str, body: str
) -> Proposed:
    """
    Offer *files* as one commit on *branch*, and return the pull request for it.

    Args:
        base: The branch that it is made for. *head*: the commit of it that the files were changed on.
        files: Path → bytes; None removes one.

    Raises:
        github-unreachable, github-refused, github-limited: It cannot be done; what was made until then is on the branch, and is set anew.
    """
    before = repository.request("GET", f"/git/commits/{head}", _Commit, f"the commit {head[:12]}")
    tree = repository.request("POST", "/git/trees", _Object, "a tree", {"base_tree": before.tree.sha, "tree": _entries(repository, files)})
    if tree.sha == before.tree.sha:
        raise GitHubError("github-refused", "The proposal changes nothing.", todo="Compare the files with those of the branch.")
    there = _branch(repository, branch)
    opened = _open(repository, base, branch)
    if there and opened and _same(repository, there, tree.sha, head):
        return Proposed("unchanged", opened.number, opened.html_url, there)
    record = {"message": f"{title}\n\n{body}", "tree": tree.sha, "parents": [head]}
    commit = repository.request("POST", "/git/commits", _Object, "a commit", record).sha
    if there:
        set_to = {"sha": commit, "force": True}
        repository.request("PATCH", f"/git/refs/heads/{quote(branch)}", _Ref, f"the branch {branch}", set_to)
    else:
        repository.request("POST", "/git/refs", _Ref, f"the branch {branch}", {"ref": f"refs/heads/{branch}", "sha": commit})
    if opened:
        changed = {"title": title, "body": body}
        one = repository.request("PATCH", f"/pulls/{opened.number}", _Pull, f"the pull request {opened.number}", changed)
        return Proposed("updated", one.number, one.html_url, commit)
    asked = {"title": title, "body": body, "head": branch, "base": base}
    one = repository.request("POST", "/pulls", _Pull, "a pull request", asked)
    return Proposed("opened", one.number, one.html_url, commit)


def _entries(repository: Repository, files: Mapping[str, bytes | None]) -> list[dict[str, object]]:
    return [
        {"path": path, "mode": "100644", "type": "blob", "sha": None if data is None else _blob(repository, path, data)}
        for path, data in sorted(files.items())
    ]


def _blob(repository: Repository, path: str, data: bytes) -> str:
    record = {"content": base64.b64encode(data).decode(), "encoding": "base64"}
    return repository.request("POST", "/git/blobs", _Object, path, record).sha


def _branch(repository: Repository, branch: str) -> str:
    """Return the commit that *branch* ends in; empty where there is none."""
    where = f"the branch {branch}"
    reply = repository.github.send("GET", repository.path(f"/git/ref/heads/{quote(branch)}"), where)
    return "" if reply.status == 404 else repository.github.decode(reply, _Ref, where).object.sha


def _same(repository: Repository, commit: str, tree: str, head: str) -> bool:
    """Is *commit* the same change: that tree, on that parent?"""

    class Full(_Commit, frozen=True):
        parents: tuple[_Object, ...] = ()

    one = repository.request("GET", f"/git/commits/{commit}", Full, f"the commit {commit[:12]}")
    return one.tree.sha == tree and [parent.sha for parent in one.parents] == [head]


def _open(repository: Repository, base: str, branch: str) -> _Pull | None:
    owner = repository.repository.partition("/")[0]
    asked = f"state=open&base={quote(base, safe='')}&head={quote(f'{owner}:{branch}', safe='')}"
    return next(repository.pages("/pulls", _Pull, f"the pull requests of {branch}", asked), None)
