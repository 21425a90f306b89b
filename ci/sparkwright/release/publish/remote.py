"""GitHub's releases as its API tells and takes them: records of the fields that are used, and one call for each thing that is asked."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import msgspec

from sparkwright.core.errors import GitHubError
from sparkwright.core.github import Repository

_Text = Annotated[str, msgspec.Meta(max_length=2000, pattern=r"^[^\x00-\x1f\x7f]*$")]


class About(msgspec.Struct, frozen=True):
    """A repository: its name as GitHub writes it, where people see it, and whether the token may change its settings."""

    full_name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9-]+/[A-Za-z0-9._-]+\Z")]
    html_url: _Text
    private: bool = False
    permissions: dict[str, bool] = {}


class Asset(msgspec.Struct, frozen=True):
    """
    A file of a release.

    Attributes:
        state: ``uploaded`` for a whole one; ``starter`` for one whose bytes never came.
        digest: ``sha256:…`` as GitHub computed it; None for old ones.
    """

    id: int
    name: _Text
    state: str
    size: int
    browser_download_url: _Text
    digest: str | None = None


class Remote(msgspec.Struct, frozen=True):
    """A release: a draft, which only those see who may change it, or published; *immutable* once nobody can change it any more."""

    id: int
    tag_name: _Text
    draft: bool
    upload_url: _Text
    immutable: bool = False


class Setting(msgspec.Struct, frozen=True):
    """Whether the repository's releases become immutable when they are published."""

    enabled: bool


class Releases(Repository):
    """
    The releases of one repository.

    Args and raises: as `Repository`.
    """

    def about(self) -> About:
        """Return what GitHub says of the repository."""
        return self.request("GET", "", About, f"the repository {self.repository}")

    def setting(self) -> bool | None:
        """Return whether releases become immutable; None where the token may not know."""
        reply = self.github.send("GET", self.path("/immutable-releases"), f"the settings of {self.repository}")
        if reply.status in (403, 404):
            return None
        return self.github.decode(reply, Setting, f"the settings of {self.repository}").enabled

    def published(self, tag: str) -> Remote | None:
        """Return the published release of *tag*, if there is one."""
        reply = self.github.send("GET", self.path(f"/releases/tags/{quote(tag, safe='')}"), f"the release {tag}")
        return None if reply.status == 404 else self.github.decode(reply, Remote, f"the release {tag}")

    def drafts(self, tag: str) -> list[Remote]:
        """Return the drafts for *tag*, oldest first; there can be several, since GitHub takes a question twice that was sent twice."""
        found = [one for one in self.pages("/releases", Remote, f"the drafts of {self.repository}") if one.draft and one.tag_name == tag]
        return sorted(found, key=lambda one: one.id)

    def create(self, tag: str, title: str, *, prerelease: bool) -> None:
        """Ask for a draft; look with `drafts` whether there is one now."""
        text = "Made by sparkwright. The index says what these files are and what was shown of them; nothing here is ever replaced."
        record = {"tag_name": tag, "name": title, "body": text, "draft": True, "prerelease": prerelease}
        try:
            self.request("POST", "/releases", Remote, f"a draft for {tag}", record)
        except GitHubError as error:
            if error.reference != "github-unreachable":
                raise
            if not self.drafts(tag):
                raise

    def publish(self, release: Remote) -> None:
        """Publish the draft."""
        self.request("PATCH", f"/releases/{release.id}", Remote, f"the release {release.tag_name}", {"draft": False})

    def withdraw(self, release: Remote) -> None:
        """Make a published release that is not immutable a draft again."""
        self.request("PATCH", f"/releases/{release.id}", Remote, f"the release {release.tag_name}", {"draft": True})

    def assets(self, release: Remote) -> dict[str, Asset]:
        """Return the files of *release* by name."""
        return {one.name: one for one in self.pages(f"/releases/{release.id}/assets", Asset, f"the files of {release.tag_name}")}

    def asset_url(self, asset: Asset) -> str:
        """Return where the bytes of *asset* are read back, of a draft too."""
        return f"{self.github.address}{self.path(f'/releases/assets/{asset.id}')}"

    def remove_asset(self, asset: Asset) -> None:
        """Remove a file of a draft."""
        self._gone(f"/releases/assets/{asset.id}", f"the file {asset.name}")

    def remove(self, release: Remote) -> None:
        """Remove a release, and its tag where it has one."""
        self._gone(f"/releases/{release.id}", f"the release {release.tag_name}")
        if not release.draft:
            self._gone(f"/git/refs/tags/{quote(release.tag_name, safe='')}", f"the tag {release.tag_name}")

    def _gone(self, path: str, where: str) -> None:
        reply = self.github.send("DELETE", self.path(path), where)
        # 404: an attempt without an answer was heard; 422: there is no such tag.
        if reply.status not in (204, 404, 422):
            raise self.github.refusal(reply, where)
