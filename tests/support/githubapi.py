"""
GitHub's API of releases, as a real server: drafts that only a token sees, uploads at another host, and faults on request.

It follows https://docs.github.com/rest/releases: bytes of an asset come from a third host, behind a redirect whose address is the
permission; an upload that breaks off leaves an asset in the state ``starter``; a published release of a repository whose releases
are immutable takes no change any more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest
from tests.support import loopback
from tests.support.loopback import page

TOKEN = "github_pat_11RELEASERELEASERELEASE"
#: The status and the record of an answer.
Reply = tuple[int, Any]


@dataclasses.dataclass
class Asset:
    id: int
    name: str
    data: bytes
    state: str = "uploaded"


@dataclasses.dataclass
class Release:
    id: int
    tag: str
    draft: bool = True
    immutable: bool = False
    assets: dict[int, Asset] = dataclasses.field(default_factory=dict)


#: Decides, before a request is served, what happens instead: None for nothing out of the ordinary.
Fault = Callable[["Handler", str, str], bool]
Answer = Callable[["Handler"], None]


class World:
    """
    What all of its hosts know.

    Attributes:
        immutable: The repository's setting.
        faults: Asked in turn with each request; the first that returns True has answered it.
        asked: Host, method and path of each request, in order; *authorizations*: of each.
        spoil: What is kept in place of the bytes that an upload brought.
        runs: The workflow runs of the lab by their numbers.
    """

    repository = "acme/wheels"

    def __init__(self) -> None:
        self.releases: dict[int, Release] = {}
        self.immutable, self.private = True, False
        self.faults: list[Fault] = []
        self.asked: list[tuple[str, str, str]] = []
        self.authorizations: list[str] = []
        self.runs: dict[int, dict[str, Any]] = {}
        self.spoil: Callable[[str, bytes], bytes] = lambda _, data: data
        self.lock = threading.RLock()
        self.hosts: dict[str, Server] = {}
        #: Returns the next number of a release or an asset.
        self.number = itertools.count(1).__next__

    @property
    def assets(self) -> dict[int, Asset]:
        return {number: asset for release in self.releases.values() for number, asset in release.assets.items()}

    @property
    def api(self) -> str:
        return self.hosts["api"].url

    @property
    def uploads(self) -> str:
        return self.hosts["uploads"].url

    def once(self, method: str, path: str, answer: Answer, times: int = 1) -> None:
        """Let the next *times* requests of that kind (a regular expression of the path) be answered by *answer*."""
        left = [times]

        def fault(handler: Handler, asked: str, where: str) -> bool:
            with self.lock:
                if left[0] == 0 or asked != method or not re.search(path, where):
                    return False
                left[0] -= 1
            answer(handler)
            return True

        self.faults.append(fault)

    def count(self, method: str, path: str) -> int:
        """Return how often that was asked."""
        return sum(asked == method and re.search(path, where) is not None for _, asked, where in self.asked)


class Handler(loopback.Handler):
    server: Server

    @property
    def world(self) -> World:
        return self.server.world

    @property
    def trusted(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def serve(self) -> None:
        world = self.world
        with world.lock:
            world.asked.append((self.server.name, self.command, self.path))
            world.authorizations.append(self.headers.get("Authorization", ""))
        with contextlib.suppress(OSError):
            if not any(fault(self, self.command, self.path) for fault in list(world.faults)):
                self.respond()

    do_GET = do_POST = do_PATCH = do_DELETE = serve  # noqa: N815  http.server calls them so

    def respond(self) -> None:
        """Answer as GitHub does where nothing is out of the ordinary."""
        world, parts, sent = self.world, urlsplit(self.path), self.body()
        path, query = unquote(parts.path), parse_qs(parts.query)
        releases, assets, repository = r"/releases", r"/releases/(\d+)/assets", f"/repos/{world.repository}"
        routes: list[loopback.Route] = [
            ("GET", r"/(\d+)", lambda number: (200, world.assets[int(number)].data)),
            ("GET", f"/{world.repository}/releases/download/([^/]+)/([^/]+)", self._public),
            ("GET", repository, lambda: (200, {"full_name": world.repository, "html_url": f"{world.api}/{world.repository}", "private": world.private})),
            ("GET", repository + releases, lambda: (200, page([self._release(one) for one in self._visible], query))),
            ("POST", repository + releases, lambda: self._create(json.loads(sent))),
            ("GET", f"{repository}/releases/tags/(.+)", lambda tag: (200, self._release(self._released(tag)))),
            ("GET", repository + assets, lambda number: (200, page(self._release(self._find(number))["assets"], query))),
            ("POST", repository + assets, lambda number: self._upload(self._find(number), query["name"][0], sent)),
            ("PATCH", rf"{repository}/releases/(\d+)", lambda number: self._change(self._find(number), json.loads(sent)["draft"])),
            ("DELETE", rf"{repository}/releases/assets/(\d+)", self._remove),
            ("GET", r"/repos/acme/lab/actions/runs/(\d+)", lambda number: (200, world.runs[int(number)])),
        ]
        found = self.route(routes, path)
        with world.lock:
            try:
                status, record = found[0](*found[1]) if found else (404, {"message": "Not Found"})
            except LookupError:
                status, record = 404, {"message": "Not Found"}
        headers = {"Location": str(record)} if status == 302 else {}
        self.answer(status, record, **headers)

    @property
    def _visible(self) -> list[Release]:
        return [one for one in self.world.releases.values() if self.trusted or not one.draft]

    def _find(self, number: str) -> Release:
        return {one.id: one for one in self._visible}[int(number)]

    def _released(self, tag: str) -> Release:
        return {one.tag: one for one in self.world.releases.values() if not one.draft}[tag]

    def _public(self, tag: str, name: str) -> Reply:
        """Answer as everybody is answered; drafts have no address here."""
        numbers = {asset.name: asset.id for asset in self._released(tag).assets.values()}
        return 302, f"{self.world.hosts['storage'].url}/{numbers[name]}"

    def _release(self, one: Release) -> dict[str, Any]:
        where = f"/repos/{self.world.repository}/releases/{one.id}/assets"
        return {
            "id": one.id, "tag_name": one.tag, "draft": one.draft, "immutable": one.immutable,
            "upload_url": f"{self.world.uploads}{where}{{?name,label}}",
            "assets": [self._asset(one, asset) for asset in one.assets.values()],
        }  # fmt: skip

    def _asset(self, release: Release, one: Asset) -> dict[str, Any]:
        tag = f"untagged-{release.id}" if release.draft else release.tag
        url = f"{self.world.api}/{self.world.repository}/releases/download/{quote(tag)}/{quote(one.name)}"
        digest = f"sha256:{hashlib.sha256(one.data).hexdigest()}"
        return {"id": one.id, "name": one.name, "state": one.state, "size": len(one.data), "digest": digest, "browser_download_url": url}

    def _create(self, record: dict[str, Any]) -> Reply:
        release = Release(self.world.number(), record["tag_name"], record["draft"])
        self.world.releases[release.id] = release
        return 201, self._release(release)

    def _upload(self, release: Release, name: str, data: bytes) -> Reply:
        if release.immutable or any(one.name == name for one in release.assets.values()):
            errors = [{"resource": "ReleaseAsset", "code": "already_exists", "field": "name"}]
            return 422, {"message": "Validation Failed", "errors": errors}
        # GitHub writes what it does not like in names as a full stop.
        asset = Asset(self.world.number(), re.sub(r"[^A-Za-z0-9._+@-]", ".", name), self.world.spoil(name, data))
        release.assets[asset.id] = asset
        return 201, self._asset(release, asset)

    def _change(self, release: Release, draft: bool) -> Reply:
        release.draft, release.immutable = draft, self.world.immutable and not draft
        return 200, self._release(release)

    def _remove(self, number: str) -> Reply:
        holders = {each: release for release in self._visible for each in release.assets}
        del holders[int(number)].assets[int(number)]
        return 204, None


class Server(loopback.Server):
    def __init__(self, name: str, world: World) -> None:
        super().__init__(Handler)
        self.name, self.world = name, world


def reply(status: int, message: str = "", **headers: str) -> Answer:
    """Return an answer with *status*; what was sent along is read first."""

    def answer(handler: Handler) -> None:
        handler.body()
        handler.answer(status, {"message": message}, **headers)

    return answer


def starter(handler: Handler) -> None:
    """Fail an upload as GitHub does when a part of it fails: 502, and an asset without bytes is left."""
    handler.body()
    [number] = re.findall(r"/releases/(\d+)/assets", handler.path)
    [name] = parse_qs(urlsplit(handler.path).query)["name"]
    with handler.world.lock:
        asset = Asset(handler.world.number(), name, b"", "starter")
        handler.world.releases[int(number)].assets[asset.id] = asset
    handler.answer(502, {"message": "Server Error"})


def unheard(handler: Handler) -> None:
    """Do what was asked, and end the connection without saying so."""
    stream, handler.wfile = handler.wfile, io.BytesIO()
    handler.respond()
    handler.wfile = stream


def run(**changes: Any) -> dict[str, Any]:
    """Return GitHub's record of a run of the lab's pipeline that ended, with *changes*."""
    return {
        "path": ".github/workflows/pipeline.yml", "head_branch": "main", "event": "schedule", "status": "completed",
        "head_repository": {"full_name": "acme/lab"}, **changes,
    }  # fmt: skip


@contextlib.contextmanager
def serve() -> Iterator[World]:
    """Yield a world whose hosts answer, without a proxy, until the block ends; their threads end with it."""
    world = World()
    world.hosts = {name: Server(name, world) for name in ("api", "uploads", "storage")}
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        for host in world.hosts.values():
            stack.enter_context(host)
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "PIP_CERT", "SSL_CERT_FILE"):
            patch.delenv(name, raising=False)
        yield world
