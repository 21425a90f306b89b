"""
Files as assets of a release on GitHub: a draft first, each asset downloaded again and compared, published once, and then immutable.

The tag belongs to exactly these files (`tag_of`), so that a run that comes again finds its own draft, and nobody else's.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from urllib.parse import quote, unquote

from sparkwright.core.console import console
from sparkwright.core.errors import GitHubError
from sparkwright.core.github import GitHub, limited
from sparkwright.core.http import ATTEMPTS, HttpFailure, redact_credentials
from sparkwright.release.errors import ReleaseError
from sparkwright.release.publish import transfer
from sparkwright.release.publish.hosts import Moved, Observe, unmoved, unobserved
from sparkwright.release.publish.remote import About, Asset, Releases, Remote

UPLOADS = "https://uploads.github.com"
#: GitHub's limits: bytes of a file are below it, files of a release at most so many.
LARGEST, MOST = 2 << 30, 1000


def tag_of(name: str, hashes: Iterable[str]) -> str:
    """Return the tag for the release *name* whose files have these *hashes* (sha256)."""
    return f"{name}-{hashlib.sha256(chr(10).join(sorted(hashes)).encode()).hexdigest()[:12]}"


class GitHubReleases:
    """
    A release of a repository on GitHub.

    Args:
        github: The API, with a token that may write the repository's contents.
        uploads: Where GitHub takes files; the token goes nowhere else.
        prerelease: What GitHub is told of a release that is a candidate.
        immutable: Refuse releases that could be changed.
    """

    def __init__(
        self, github: GitHub, repository: str, tag: str, *, uploads: str = UPLOADS, prerelease: bool = False, immutable: bool = True,
        observe: Observe = unobserved,
    ) -> None:  # fmt: skip
        self._github, self._releases, self.tag = github, Releases(github, repository), tag
        self._uploads, self._observe = uploads.rstrip("/"), observe
        self._prerelease, self._immutable = prerelease, immutable
        self.name = f"github:{repository}@{tag}"
        self.sent: list[str] = []
        self.there: list[str] = []
        self._put: dict[str, tuple[int, str]] = {}
        self._found: Remote | None = None

    @cached_property
    def _repository(self) -> About:
        return self._releases.about()

    def ready(self) -> None:
        """See `hosts.Host.ready`; a setting that the token may not read is seen in `finish`."""
        known = self._repository
        if known.private:
            details = ["nobody could install from it; nothing was sent"]
            todo = "Publish in a public repository, or with --files folder."
            raise ReleaseError("publish-failed", f"{known.full_name} is private.", details=details, todo=todo)
        setting = self._releases.setting() if self._immutable else True
        if setting is False or (setting is None and known.permissions.get("admin")):
            raise ReleaseError("release-mutable", f"Releases of {known.full_name} are not immutable.", details=["nothing was sent"])

    def address(self, place: str) -> str:
        """See `hosts.Host.address`."""
        return f"{self._repository.html_url}/releases/download/{quote(self.tag, safe='')}/{quote(_file(place), safe='')}"

    def put(self, place: str, path: Path, sha256: str, moved: Moved = unmoved) -> str:
        """See `hosts.Host.put`."""
        name, size = _file(place), path.stat().st_size
        if not 0 < size < LARGEST:
            raise ReleaseError(
                "publish-failed", f"GitHub takes files of 1 byte up to 2 GiB, and {name} has {size} bytes.", details=["nothing was sent"]
            )
        release, was = self._found or self._release(), len(self.sent)
        for attempt in range(1, ATTEMPTS + 2):
            asset = self._releases.assets(release).get(name)
            if asset and self._holds(asset, size, sha256, moved):
                self._put[name] = (size, sha256)
                if len(self.sent) == was:
                    self.there.append(place)
                return self.address(place)
            if not release.draft:
                raise ReleaseError(
                    "wheel-name-taken",
                    f"The published release {self.tag} has other bytes as {name}, or none.",
                    details=[f"to be: {sha256}"],
                )
            if attempt > ATTEMPTS:
                break
            if asset:
                console.detail(f"{name}: a killed or broken upload is there; sending again")
                self._releases.remove_asset(asset)
            self.sent[was:] = [place]
            self._send(release, name, path, sha256, moved, attempt)
        raise ReleaseError("publish-failed", f"GitHub does not keep {name}.", details=[f"sent {ATTEMPTS} times", f"sha256: {sha256}"])

    def finish(self) -> None:
        """See `hosts.Host.finish`."""
        release = self._release()
        self._same(release, "before it is published")
        if release.draft:
            if len(self._put) > MOST:
                raise ReleaseError("publish-failed", f"GitHub takes {MOST} files in a release, and these are {len(self._put)}.")
            self._observe(f"publish {self.tag}")
            self._releases.publish(release)
            release = self._releases.published(self.tag) or release
        if release.draft:
            raise ReleaseError("publish-failed", f"GitHub did not publish the draft {self.tag}.")
        if self._immutable and not release.immutable:
            # Before anything refers to it, it becomes a draft again, so that the next run can complete it.
            self._releases.withdraw(release)
            raise ReleaseError("release-mutable", f"The release {self.tag} was published, and could still be changed; it is a draft again.")
        self._same(release, "after it was published")

    def remove(self, places: tuple[str, ...]) -> None:  # noqa: ARG002  the release is removed with all that is in it
        """Remove the whole release, draft or published: its tag was made for exactly these files."""
        for release in [*self._releases.drafts(self.tag), *filter(None, [self._releases.published(self.tag)])]:
            self._observe(f"remove {self.tag}")
            self._releases.remove(release)

    def _release(self) -> Remote:
        """Return the release of the tag, published or a draft; a draft is made where there is none."""
        if found := self._releases.published(self.tag):
            self._found = found
            return found
        drafts = self._releases.drafts(self.tag)
        if not drafts:
            self._observe(f"draft {self.tag}")
            self._releases.create(self.tag, self.tag, prerelease=self._prerelease)
            drafts = self._releases.drafts(self.tag)
        if not drafts:
            raise ReleaseError("publish-failed", f"GitHub made no draft for {self.tag}.")
        self._found = drafts[0]
        return drafts[0]

    def _send(self, release: Remote, name: str, path: Path, sha256: str, moved: Moved, attempt: int) -> None:
        """Upload once; what came of it is seen by looking at the assets again."""
        url = release.upload_url.partition("{")[0]
        # The address begins with the host and a slash, so no parser sees another host in it.
        if not url.startswith(f"{self._uploads}/"):
            there = self._github.shown(redact_credentials(url), 200)
            raise GitHubError(
                "github-unreachable",
                f"GitHub asks for {name} at another host.", details=[f"at: {there}", "neither the file nor the token was sent"],
                todo=f"Where that host is right, name it with --mirror {UPLOADS}=ADDRESS.",
            )  # fmt: skip
        self._observe(f"send {name}")
        try:
            reply, read = transfer.upload(self._github, f"{url}?name={quote(name, safe='')}", path, moved)
        except HttpFailure as error:
            # GitHub refuses some uploads before it has read them, which looks like a broken connection.
            self._wait(name, self._github.shown(str(error), 200), 0.25 * 2**attempt, attempt)
            return
        if reply.status == 201 and read != sha256:
            raise ReleaseError(
                "publish-failed",
                f"{name} changed while it was read.", details=[f"read:    {read}", f"decided: {sha256}"],
                todo="Publish again, once nothing writes to the wheel any more.",
            )  # fmt: skip
        if limited(reply):
            if (wait := reply.retry_after) is None or wait > self._github.seconds or attempt == ATTEMPTS:
                raise self._github.refusal(reply, f"the upload of {name}")
            self._wait(name, "GitHub asks to wait", wait, attempt)
        elif reply.status >= 500:
            self._wait(name, f"GitHub answered {reply.status}", 0.25 * 2**attempt, attempt)
        elif reply.status not in (201, 422):  # 422: another upload of that name is there, which the next look judges
            raise self._github.refusal(reply, f"the upload of {name}")
        elif reply.status == 422 and b"already_exists" not in reply.body:
            raise ReleaseError(
                "publish-failed", f"GitHub does not take {name}.", details=[self._github.explanation(reply) or f"answered {reply.status}"]
            )

    def _wait(self, name: str, why: str, seconds: float, attempt: int) -> None:
        if attempt == ATTEMPTS:
            raise GitHubError("github-unreachable", f"GitHub does not take {name}.", details=[why, f"attempts: {attempt}"])
        console.note(f"{name}: {why}; going on in {seconds:.1f} s")
        time.sleep(seconds)

    def _holds(self, asset: Asset, size: int, sha256: str, moved: Moved) -> bool:
        """Whether the asset is whole and right, by what GitHub says of it and by its bytes, downloaded."""
        if asset.state != "uploaded" or asset.size != size:
            return False
        if asset.digest is not None and asset.digest != f"sha256:{sha256}":
            return False
        broke = ""
        for attempt in range(1, ATTEMPTS + 1):
            self._observe(f"read back {asset.name}")
            try:
                count, found = transfer.download(self._github, self._releases.asset_url(asset), size, asset.name, moved)
            except HttpFailure as error:
                broke = self._github.shown(str(error), 200)
            except GitHubError as error:
                if error.reference != "github-unreachable":
                    raise
                broke = "; ".join(error.details)
            else:
                if count >= size:
                    return (count, found) == (size, sha256)
                broke = f"{count} of {size} bytes came"
            if attempt < ATTEMPTS:
                time.sleep(0.1 * 2**attempt)
        raise GitHubError("github-unreachable", f"{asset.name} cannot be read back from GitHub.", details=[broke, f"attempts: {ATTEMPTS}"])

    def _same(self, release: Remote, when: str) -> None:
        """Check that *release* holds exactly what was put, as its API and its public addresses say."""
        found = self._releases.assets(release)
        wrong = [f"{name} is not there" for name in sorted(self._put.keys() - found.keys())]
        wrong += [f"{name} is there, and nobody here put it" for name in sorted(found.keys() - self._put.keys())]
        for name, (size, sha256) in self._put.items():
            if (one := found.get(name)) is None:
                continue
            if (one.state, one.size, one.digest or f"sha256:{sha256}") != ("uploaded", size, f"sha256:{sha256}"):
                wrong.append(f"{name} is another: {one.state}, {one.size} bytes, {one.digest}")
            if not release.draft and unquote(one.browser_download_url) != unquote(self.address(name)):
                wrong.append(f"{name} has the address {self._github.shown(one.browser_download_url, 300)}")
        if wrong:
            raise ReleaseError("publish-failed", f"The release {self.tag} is not what was sent, {when}.", details=wrong)


def of(
    github: GitHub, repository: str, tag: str, uploads: str, *, prerelease: bool, immutable: bool = True, observe: Observe = unobserved
) -> GitHubReleases:
    """
    Return the host for one publication.

    Raises:
        github-refused: There is no token; nothing can be written without one.
    """
    if not github.token:
        todo = "Set GITHUB_TOKEN to one that may write the contents of the repository."
        raise GitHubError("github-refused", "Publishing on GitHub needs a token.", todo=todo)
    return GitHubReleases(github, repository, tag, uploads=uploads, prerelease=prerelease, immutable=immutable, observe=observe)


def _file(place: str) -> str:
    return place.rpartition("/")[2]
