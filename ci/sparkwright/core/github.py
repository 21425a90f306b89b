"""
GitHub's REST API: pull requests. The token comes from the environment.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec

from sparkwright.core import http
from sparkwright.core.console import one_line
from sparkwright.core.errors import GitHubError
from sparkwright.core.http import HttpFailure, Reply
from sparkwright.core.words import RATE_LIMITED

T = TypeVar("T")

ADDRESS = "https://api.github.com"
#: Lists come in pages of so many, so that no page is larger than a reply that is read; and at most
#: so many pages.
PAGE_SIZE, PAGES = 20, 50

#: The statuses of a renamed, missing or removed pull request.
_GONE = (301, 404, 410)
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


def limited(reply: Reply) -> bool:
    """
    Return True if *reply* refuses because of a rate limit; GitHub has four forms of such a reply.
    """
    return reply.status == 429 or (
        reply.status == 403
        and (
            "retry-after" in reply.headers
            or reply.headers.get("x-ratelimit-remaining") == "0"
            or RATE_LIMITED.search(reply.body) is not None
        )
    )


class GitHub:
    """
    GitHub's API at one address.

    Args:
        address: Its URL, after the mirror map.
        token: Empty for anonymous requests, which are enough for a few reads of public
            repositories.
        seconds: Within these, a request succeeds or fails, all attempts together.

    Raises:
        github-refused: The token has characters that no token has.
    """

    def __init__(self, address: str = ADDRESS, token: str = "", *, seconds: float = 60.0) -> None:
        # The HTTP library would show such a token when it refuses to send it.
        if token and not re.fullmatch(r"[!-~]+", token):
            raise GitHubError(
                "github-refused",
                "The GitHub token holds a space, a line end or a letter outside ASCII.",
            )
        self.address, self.token, self.seconds = address.rstrip("/"), token, seconds

    @classmethod
    def from_environment(
        cls, address: str = ADDRESS, *, seconds: float = 60.0, token: str = ""
    ) -> GitHub:
        """
        Return the API at *address* with *token*, else with that of ``GITHUB_TOKEN`` or
        ``GH_TOKEN``; without one over plain http.
        """
        own = (os.environ.get(name, "").strip() for name in ("GITHUB_TOKEN", "GH_TOKEN"))
        url = urlsplit(address)
        encrypted = url.scheme == "https" or url.hostname in ("localhost", "127.0.0.1", "::1")
        token = next(filter(None, (token, *own)), "") if encrypted else ""
        return cls(address, token, seconds=seconds)

    def pull(self, owner: str, name: str, number: int) -> PullRequest:
        """
        Return pull request *number* of a repository.

        Raises:
            github-unreachable: There is no reply in time, or it is not GitHub's.
            github-refused: The token is wrong, or may not read the repository.
            github-limited: The rate limit of this user or address is used up.
            pull-request-gone: GitHub has no such pull request, or the repository was renamed.
        """
        what = f"{owner}/{name}#{number}"
        reply = self.send("GET", f"/repos/{owner}/{name}/pulls/{number}", what)
        if reply.status in _GONE and not limited(reply):
            raise GitHubError(
                "pull-request-gone",
                f"GitHub has no pull request {what}.",
                details=self._details(reply),
            )
        pull = self.decode(reply, _Pull, what)
        if pull.number != number:
            raise GitHubError(
                "github-unreachable", f"The reply for {what} is about number {pull.number}."
            )
        return PullRequest(
            number,
            self.shown(pull.title, 300),
            pull.user.login if pull.user else "ghost",
            "merged" if pull.merged else pull.state,
            pull.head.sha,
            pull.base.ref,
            # Before the merge, merge_commit_sha is a trial merge of GitHub's own.
            (pull.merge_commit_sha or "") if pull.merged else "",
        )

    def send(self, method: str, path: str, what: str, record: object = None) -> Reply:
        """
        Return the reply to one request, whatever its status below 500.

        A POST is sent once, since one without a reply may have taken effect; all other methods are
        repeated.

        Args:
            path: Below the address of the API.
            what: What the request is about, for messages.
            record: The body, sent as JSON.

        Raises:
            github-unreachable: There is no reply in time, or too large a one.
        """
        try:
            reply = http.request(
                method,
                f"{self.address}{path}",
                token=self.token,
                headers=_HEADERS,
                seconds=self.seconds,
                data=None if record is None else msgspec.json.encode(record),
            )
        except HttpFailure as failure:
            raise GitHubError(
                "github-unreachable",
                f"GitHub does not answer for {what}.",
                details=[self.shown(str(failure), 300)],
            ) from None
        if reply.status >= 500:
            raise self.refusal(reply, what)
        return reply

    def decode(self, reply: Reply, kind: type[T], what: str) -> T:
        """
        Return the body of *reply* as a record.

        Raises:
            github-refused, github-limited, github-unreachable: GitHub refuses, or the body is no
                such record.
        """
        if reply.status not in (200, 201):
            raise self.refusal(reply, what)
        try:
            return msgspec.json.decode(reply.body, type=kind)
        except (ValueError, RecursionError) as error:
            raise GitHubError(
                "github-unreachable",
                f"What came for {what} is not GitHub's answer.",
                details=[
                    self.shown(str(error), 200),
                    # The token is taken out before the text is cut.
                    self.shown(f"it begins: {reply.body.decode('utf-8', 'replace')}", 90),
                ],
            ) from None

    def refusal(self, reply: Reply, what: str) -> GitHubError:
        """Return the error for a *reply* other than success."""
        details, reference = self._details(reply), "github-unreachable"
        if limited(reply):
            reference = "github-limited"
        elif reply.status in (401, 403, 422, *_GONE):
            reference = "github-refused"
        return GitHubError(reference, f"GitHub answers {reply.status} for {what}.", details=details)

    def explanation(self, reply: Reply) -> str:
        """Return GitHub's own explanation in the body of *reply*; empty without one."""
        try:
            body = msgspec.json.decode(reply.body, type=dict[str, Any])
            return self.shown(str(body.get("message", "")), 200)
        except (ValueError, RecursionError):
            return ""

    def _details(self, reply: Reply) -> list[str]:
        text = self.explanation(reply)
        status = f"answered {reply.status}, asked {'with' if self.token else 'without'} a token"
        return [status, f"GitHub says: {text}"] if text else [status]

    def shown(self, text: str, limit: int) -> str:
        """Return *text* as `one_line`, without the token, which a server might send back."""
        return one_line(text, limit, self.token)
