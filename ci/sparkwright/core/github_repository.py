"""One repository of GitHub: questions about it, answers as records, and what a refusal means. What is asked for, the rooms say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from sparkwright.core.errors import GitHubError, SparkwrightError
from sparkwright.core.github import GitHub, Reply

T = TypeVar("T")

#: Lists are asked for in pages of so many, so that no page is larger than what is read of a reply.
PAGE, PAGES = 20, 50


class Repository:
    """
    One repository, asked by the API of *github*.

    Args:
        repository: ``OWNER/NAME``.

    Raises:
        github-refused: That cannot be a repository.
    """

    def __init__(self, github: GitHub, repository: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]*/(?!\.{1,2}\Z)[A-Za-z0-9._-]+", repository):
            raise GitHubError("github-refused", f"{repository!r:.200} is no repository of GitHub.", todo="Write it as OWNER/REPOSITORY.")
        self.github, self.repository = github, repository

    def listed(self, path: str, kind: type[T], where: str, query: str = "") -> Iterator[T]:
        """
        Yield every record of a list that GitHub gives in pages.

        Args:
            query: What else is asked of the list, encoded (``state=open``).

        Raises:
            github-refused: The list has no end that is worth waiting for; and as `told`.
        """
        for page in range(1, PAGES + 1):
            asked = f"{path}?{f'{query}&' if query else ''}per_page={PAGE}&page={page}"
            found = self.told("GET", asked, list[kind], where)  # type: ignore[valid-type]
            yield from found
            if len(found) < PAGE:
                return
        raise GitHubError("github-refused", f"There are more than {PAGE * PAGES} of {where}.", todo="Remove what is not needed any more.")

    def told(self, method: str, path: str, kind: type[T], where: str, record: object = None) -> T:
        """
        Ask, and return what came as a record.

        Raises:
            github-unreachable: Nothing came in time, or something that is not GitHub's answer.
            github-refused, github-limited: GitHub does not do it.
        """
        return self.decoded(self.github.ask(method, self.path(path), where, record), kind, where)

    def decoded(self, reply: Reply, kind: type[T], where: str) -> T:
        """Return *reply* as a record; raises as `told`."""
        if reply.status not in (200, 201):
            raise self.refusal(reply, where)
        try:
            return msgspec.json.decode(reply.body, type=kind)
        except (ValueError, RecursionError) as error:
            begins = self.github.shown(reply.body.decode("utf-8", "replace"), 80)
            raise GitHubError(
                "github-unreachable",
                f"What came for {where} is not GitHub's answer.",
                details=[self.github.shown(str(error), 200), f"it begins: {begins}"],
            ) from None

    def refusal(self, reply: Reply, where: str) -> SparkwrightError:
        """Return what a *reply* means that is not what was asked for."""
        if reply.status in (404, 410, 422) and not reply.limited:
            details = [f"answered {reply.status}", *([said] if (said := self.github.said(reply)) else [])]
            todo = "Compare the name of the repository, and give GITHUB_TOKEN the right to write there."
            return GitHubError("github-refused", f"GitHub does not have or do this: {where}.", details=details, todo=todo)
        return self.github.refusal(reply, where)

    def path(self, path: str) -> str:
        """Return the *path* below the repository as one below the API's address."""
        return f"/repos/{self.repository}{path}"
