"""
GitHub's REST API: pull requests. The token comes from the environment.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from sparkwright.core import http
from sparkwright.core.console import one_line
from sparkwright.core.errors import GitHubError
from sparkwright.core.http import HttpFailure

ADDRESS = "https://api.github.com"
#: The statuses of a renamed, missing or removed pull request, and those of a token that is wrong or
#: may not read it, and of limits.
_GONE, _REFUSED = (301, 404, 410), (401, 403, 422, 429)
_HEADERS = {"Accept": "application/vnd.github+json", "X-GitHub-Api-Version": "2022-11-28"}
_REPOSITORY = (
    r"(?P<owner>[A-Za-z0-9][A-Za-z0-9-]*)/(?P<name>(?!\.{1,2}(?:\.git)?/?\Z)[A-Za-z0-9._-]+?)"
)
_URL = re.compile(
    r"(?:(?:https?|ssh|git)://(?:[^/@]*@)?(?i:github\.com)(?::\d+)?/|[^/@:]+@(?i:github\.com):)"
    rf"{_REPOSITORY}(?:\.git)?/?"
)


#: ``unresolved`` if only git was asked, which does not see whether an unmerged one is closed.
PullState = Literal["open", "merged", "closed", "unresolved"]


class PullRequest(msgspec.Struct, frozen=True):
    """
    A pull request as GitHub describes it.

    Attributes:
        title: One printable line of at most 300 characters.
        author: The login; ``ghost`` for a deleted account, as GitHub shows it.
        head: The commit at the tip of its branch.
        base_ref: The branch that it targets.
        merge: The commit that it became on that branch; empty unless merged.
    """

    number: int
    title: str
    author: str
    state: PullState
    head: str
    base_ref: str
    merge: str


_Commit = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{40}\Z")]
# A name that git would take for an option or a range is refused.
_Branch = Annotated[str, msgspec.Meta(pattern=r"^(?![-/.])(?!.*\.\.)[\w./+@#=-]{1,250}\Z")]


class _Account(msgspec.Struct, frozen=True):
    login: Annotated[str, msgspec.Meta(pattern=r"^[\w.-]{1,100}(?:\[bot\])?\Z")]


class _Head(msgspec.Struct, frozen=True):
    sha: _Commit


class _Base(msgspec.Struct, frozen=True):
    ref: _Branch


class _Pull(msgspec.Struct, frozen=True):
    """The fields of GitHub's record that are used."""

    number: int
    title: str
    state: Literal["open", "closed"]
    merged: bool
    merge_commit_sha: _Commit | None
    head: _Head
    base: _Base
    user: _Account | None

    def __post_init__(self) -> None:
        if self.merged and (self.state == "open" or not self.merge_commit_sha):
            raise ValueError("merged, but open or without a merge commit")


def repository_of(url: str) -> tuple[str, str] | None:
    """
    Return owner and name of the GitHub repository at *url* (https, ssh, git, scp form), or None for
    other hosts.
    """
    match = _URL.fullmatch(url)
    return (match["owner"], match["name"]) if match else None


def pull_request(address: str, owner: str, name: str, number: int) -> PullRequest:
    """
    Return pull request *number* of a repository, as GitHub's API at *address* states it.

    Raises:
        github-unreachable: There is no reply in time, or it is not GitHub's.
        github-refused: The token is wrong, may not read the repository, or the rate limit of this
            user or address is used up.
        pull-request-gone: GitHub has no such pull request, or the repository was renamed.
    """
    what, token = f"{owner}/{name}#{number}", _token(address)
    url = f"{address.rstrip('/')}/repos/{owner}/{name}/pulls/{number}"
    try:
        reply = http.request("GET", url, token=token, headers=_HEADERS)
    except HttpFailure as failure:
        raise GitHubError(
            "github-unreachable",
            f"GitHub does not answer for {what}.",
            details=[one_line(str(failure), 300, token)],
        ) from None
    # The token, which a server might send back, is taken out before the text is cut.
    begin = one_line(reply.body.decode("utf-8", "replace"), 200, token)
    if reply.status != 200:
        reference = "github-refused" if reply.status in _REFUSED else "github-unreachable"
        raise GitHubError(
            "pull-request-gone" if reply.status in _GONE else reference,
            f"GitHub answers {reply.status} for {what}.",
            details=[f"asked {'with' if token else 'without'} a token", f"it says: {begin}"],
        )
    try:
        pull = msgspec.json.decode(reply.body, type=_Pull)
        if pull.number != number:
            raise ValueError(f"it is about number {pull.number}")
    except (ValueError, RecursionError) as error:
        raise GitHubError(
            "github-unreachable",
            f"What came for {what} is not GitHub's answer.",
            details=[one_line(str(error), 200, token), f"it begins: {begin}"],
        ) from None
    return PullRequest(
        number,
        one_line(pull.title, 300, token),
        pull.user.login if pull.user else "ghost",
        "merged" if pull.merged else pull.state,
        pull.head.sha,
        pull.base.ref,
        # Before the merge, merge_commit_sha is a trial merge of GitHub's own.
        (pull.merge_commit_sha or "") if pull.merged else "",
    )


def _token(address: str) -> str:
    """
    Return ``GITHUB_TOKEN``, or else ``GH_TOKEN``; empty without one, which is enough for a few
    requests, or if it would be sent over plain http.
    """
    url = urlsplit(address)
    if url.scheme != "https" and url.hostname not in ("localhost", "127.0.0.1", "::1"):
        return ""
    token = os.environ.get("GITHUB_TOKEN", "").strip() or os.environ.get("GH_TOKEN", "").strip()
    # The HTTP library would show such a token when it refuses to send it.
    if token and not re.fullmatch(r"[!-~]+", token):
        raise GitHubError(
            "github-refused",
            "The GitHub token holds a space, a line end or a letter outside ASCII.",
        )
    return token
