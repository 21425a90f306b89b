"""
Files of a release as assets of an immutable release on GitHub.

They go into a draft, each is compared by the sha256 that GitHub states of the bytes that it stores,
and then the draft is published once.
The tag belongs to exactly these files (`tag_of`), so a second run finds the draft of a killed one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import msgspec

from sparkwright.client.records import ReleaseFile
from sparkwright.core import http
from sparkwright.core.console import console
from sparkwright.core.errors import GitHubError
from sparkwright.core.github import GitHub, Repository
from sparkwright.core.http import ATTEMPTS, HttpFailure
from sparkwright.release.errors import ReleaseError

UPLOADS = "https://uploads.github.com"
#: GitHub's limit: the bytes of a file are below it.
LARGEST = 2 << 30
#: Bytes per second below which a transfer is given up, and seconds that it has besides.
SLOWEST, GRACE = 50_000, 300.0

_Text = Annotated[str, msgspec.Meta(max_length=2000, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]


class _About(msgspec.Struct, frozen=True):
    """A repository."""

    html_url: _Text
    private: bool = False


class _Asset(msgspec.Struct, frozen=True):
    """A file. *state* is ``uploaded`` for a whole one; *digest* is GitHub's, of what it stores."""

    id: int
    name: _Text
    state: str
    size: int
    digest: str | None = None


class _GitHubRelease(msgspec.Struct, frozen=True):
    """A release; only the token's owner sees a draft."""

    id: int
    tag_name: _Text
    draft: bool
    immutable: bool = False


def tag_of(stack: str, hashes: Iterable[str]) -> str:
    """
    Return the tag for files of *stack* with these sha256 *hashes*.

    The name of the release is no part of it: another publisher may take that between two runs.
    """
    return f"{stack}-{hashlib.sha256(chr(10).join(sorted(hashes)).encode()).hexdigest()[:12]}"


class GitHubAssets(Repository):
    """
    The release *tag* of a repository on GitHub.

    Args:
        github: The API, with a token that may write the repository's contents.
        uploads: The host that takes files; the token goes to no other.
        prerelease: Whether GitHub marks the release as one.
        immutable: Whether to refuse releases that could be changed.

    Raises:
        github-refused: There is no token, or no such repository.
        publish-failed: The repository is private.
    """

    def __init__(
        self,
        github: GitHub,
        repository: str,
        tag: str,
        *,
        uploads: str = UPLOADS,
        prerelease: bool = False,
        immutable: bool = True,
    ) -> None:
        super().__init__(github, repository)
        if not github.token:
            raise GitHubError(
                "github-refused",
                "Publishing on GitHub needs a token.",
                todo="Set GITHUB_TOKEN to one that may write the contents of the repository.",
            )
        self.tag, self._uploads = tag, uploads.rstrip("/")
        self._prerelease, self._immutable = prerelease, immutable
        about = self.request("GET", "", _About, f"the repository {repository}")
        if about.private:
            raise ReleaseError(
                "publish-failed",
                f"{repository} is private.",
                details=["it could not be installed from; nothing was sent"],
                todo="Publish in a public repository, or with --files folder.",
            )
        self._page = about.html_url

    def url(self, name: str) -> str:
        """Return the address of the file *name* after the publication."""
        return f"{self._page}/releases/download/{quote(self.tag, safe='')}/{quote(name, safe='')}"

    def publish(self, files: Mapping[ReleaseFile, Path]) -> list[str]:
        """
        Bring *files* into the release, publish it, and return the names of those that were sent.

        Raises:
            publish-failed: GitHub keeps other bytes, or does not take a file of that size.
            wheel-name-taken: The release is published and has other files.
            release-mutable: The release could still be changed; it is a draft again.
            github-unreachable, github-limited, github-refused: GitHub does not answer or take it.
        """
        if wrong := [file.name for file in files if not 0 < file.size < LARGEST]:
            raise ReleaseError(
                "publish-failed",
                "GitHub takes files of 1 byte up to 2 GiB; nothing was sent.",
                details=wrong,
            )
        release = self._release()
        sent = [file.name for file, path in files.items() if self._put(release, file, path)]
        self._require_same(release, files)
        if release.draft:
            self._set_draft(release, draft=False)
            release = self._release()
        if self._immutable and not release.immutable:
            self._set_draft(release, draft=True)
            raise ReleaseError(
                "release-mutable",
                f"The release {self.tag} was published and could be changed; it is a draft again.",
            )
        self._require_same(release, files)
        return sent

    def _set_draft(self, release: _GitHubRelease, *, draft: bool) -> None:
        path, record = f"/releases/{release.id}", {"draft": draft}
        self.request("PATCH", path, _GitHubRelease, f"the release {self.tag}", record)

    def _release(self) -> _GitHubRelease:
        """Return the release of the tag, published or a draft; a draft is made if needed."""
        what = f"the release {self.tag}"
        reply = self.github.send(
            "GET", self.path(f"/releases/tags/{quote(self.tag, safe='')}"), what
        )
        if reply.status != 404:
            return self.github.decode(reply, _GitHubRelease, what)
        every = self.pages("/releases", _GitHubRelease, f"the drafts of {self.repository}")
        drafts = [release for release in every if release.draft and release.tag_name == self.tag]
        if drafts:
            return min(drafts, key=lambda release: release.id)
        record = {
            "tag_name": self.tag,
            "name": self.tag,
            "body": "Made by sparkwright. The signed index names these files by hash.",
            "draft": True,
            "prerelease": self._prerelease,
        }
        return self.request("POST", "/releases", _GitHubRelease, f"a draft for {self.tag}", record)

    def _assets(self, release: _GitHubRelease) -> dict[str, _Asset]:
        path, what = f"/releases/{release.id}/assets", f"the files of {self.tag}"
        return {asset.name: asset for asset in self.pages(path, _Asset, what)}

    def _put(self, release: _GitHubRelease, file: ReleaseFile, path: Path) -> bool:
        """
        Bring *file* into the draft, and return whether it was sent.

        An upload without a reply may have succeeded, which the list of assets shows.
        """
        failure = ""
        for attempt in range(ATTEMPTS):
            asset = self._assets(release).get(file.name)
            if asset and _holds(asset, file):
                return attempt > 0
            if not release.draft:
                raise ReleaseError(
                    "wheel-name-taken",
                    f"The published release {self.tag} has other bytes as {file.name}.",
                    details=[f"to be: {file.sha256}"],
                )
            if asset:
                what = f"the file {asset.name}"
                reply = self.github.send("DELETE", self.path(f"/releases/assets/{asset.id}"), what)
                if reply.status not in (204, 404):
                    raise self.github.refusal(reply, what)
            try:
                self._send(release, file, path)
                return True
            except HttpFailure as error:
                failure = self.github.shown(str(error), 200)
                console.note(f"{file.name}: {failure}; trying again")
                time.sleep(0.25 * 2**attempt)
        raise GitHubError(
            "github-unreachable",
            f"{file.name} cannot be sent to GitHub.",
            details=[failure, f"attempts: {ATTEMPTS}"],
        )

    def _send(self, release: _GitHubRelease, file: ReleaseFile, path: Path) -> None:
        """Upload once; raise HttpFailure if that may be tried again."""
        # Not the address in GitHub's reply: the token goes to no host that a reply names.
        url = f"{self._uploads}{self.path(f'/releases/{release.id}/assets')}"
        with (
            path.open("rb") as stream,
            console.step(f"sending {file.name}"),
            http.exchange(
                "POST",
                f"{url}?name={quote(file.name, safe='')}",
                token=self.github.token,
                data=stream,
                headers={"Content-Type": "application/octet-stream"},
                seconds=GRACE + file.size / SLOWEST,
            ) as reply,
        ):
            reply.read()
        if reply.status >= 500:
            raise HttpFailure("status", f"GitHub answered {reply.status}", reply.status)
        if reply.status == 422:
            explanation = self.github.explanation(reply) or "answered 422"
            raise ReleaseError(
                "publish-failed", f"GitHub does not take {file.name}.", details=[explanation]
            )
        if reply.status != 201:
            raise self.github.refusal(reply, f"the upload of {file.name}")

    def _require_same(self, release: _GitHubRelease, files: Mapping[ReleaseFile, Path]) -> None:
        """Require that the release holds exactly *files*."""
        assets, expected = self._assets(release), {file.name: file for file in files}
        faults = [f"{name} is missing" for name in expected.keys() - assets.keys()]
        for name, asset in assets.items():
            if name not in expected or not _holds(asset, expected[name]):
                stated = f"{asset.state}, {asset.size} bytes, {asset.digest}"
                faults.append(f"{name} is another file: {stated}")
        if faults:
            raise ReleaseError(
                "publish-failed",
                f"The release {self.tag} is not what was sent.",
                details=sorted(faults),
            )


def _holds(asset: _Asset, file: ReleaseFile) -> bool:
    """Return whether the asset is *file*, by what GitHub states of it."""
    stated = asset.state, asset.size, asset.digest
    return stated == ("uploaded", file.size, f"sha256:{file.sha256}")
