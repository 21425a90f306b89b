"""One issue of a repository that a program keeps: filed once, rewritten when its text changes, closed when there is nothing to tell."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from sparkwright.core.errors import GitHubError
from sparkwright.core.github import Repository

Done = Literal["filed", "updated", "unchanged", "closed", "nothing to tell"]

_Text = Annotated[str, msgspec.Meta(max_length=300_000)]


class _User(msgspec.Struct, frozen=True):
    login: Annotated[str, msgspec.Meta(max_length=120)]


class _Issue(msgspec.Struct, frozen=True):
    """The fields of GitHub's answer that are used; a pull request is listed among issues, and has *pull_request*."""

    number: int
    state: Literal["open", "closed"]
    html_url: _Text
    body: _Text | None = None
    user: _User | None = None
    pull_request: msgspec.Raw | None = None


class Kept(msgspec.Struct, frozen=True):
    """What became of the issue, and where it is; both are empty of a number where there is none."""

    done: Done
    number: int = 0
    url: str = ""


def keep(repository: Repository, name: str, title: str, body: str, *, author: str, wanted: bool) -> Kept:
    """
    Bring the issue *name* to *title* and *body*, and return what that took.

    Only issues of *author* count, so that a stranger who writes the mark is not taken for us; there is at most one open at a time.

    Args:
        name: Of the issue, in a mark that people do not see.
        author: The account that the token stands for (``github-actions[bot]``).
        wanted: Whether there is anything to tell; where not, an open issue is closed with *body* as its last word.

    Raises:
        github-unreachable, github-refused, github-limited: It cannot be done.
    """
    mark = f"<!-- sparkwright:{name} -->"
    text = f"{body.rstrip()}\n\n{mark}\n"
    found = _found(repository, mark, author)
    if found is None:
        return _file(repository, mark, title, text, author) if wanted else Kept("nothing to tell")
    if wanted and found.body == text:
        return Kept("unchanged", found.number, found.html_url)
    record = {"title": title, "body": text} if wanted else {"body": text, "state": "closed", "state_reason": "completed"}
    one = repository.request("PATCH", f"/issues/{found.number}", _Issue, f"the issue {found.number}", record)
    return Kept("updated" if wanted else "closed", one.number, one.html_url)


def _found(repository: Repository, mark: str, author: str) -> _Issue | None:
    """Return the open issue with that mark; of several, which two runs at a time may file, the first."""
    listed = repository.pages("/issues", _Issue, f"the issues of {repository.repository}", "state=open")
    ours = [one for one in listed if one.pull_request is None and one.user and one.user.login == author and mark in (one.body or "")]
    return min(ours, key=lambda one: one.number, default=None)


def _file(repository: Repository, mark: str, title: str, text: str, author: str) -> Kept:
    try:
        one = repository.request("POST", "/issues", _Issue, "a new issue", {"title": title, "body": text})
    except GitHubError as error:
        # Nobody knows whether a question without an answer was heard; asking twice would file two.
        if error.reference != "github-unreachable":
            raise
        if (heard := _found(repository, mark, author)) is None:
            raise
        one = heard
    return Kept("filed", one.number, one.html_url)
