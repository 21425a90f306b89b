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
import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.support import loopback
from tests.support.loopback import page

TOKEN = "github_pat_11RELEASERELEASERELEASE"
LIMIT = 2 << 30


@dataclasses.dataclass
class Asset:
    id: int
    name: str
    data: bytes
    state: str = "uploaded"
    #: What the API says of it; the server tells the truth unless a test changes it.
    digest: str = ""


@dataclasses.dataclass
class Release:
    id: int
    tag: str
    draft: bool = True
    immutable: bool = False
    prerelease: bool = False
    assets: dict[int, Asset] = dataclasses.field(default_factory=dict)


#: Decides, before a request is served, what happens instead: None for nothing out of the ordinary.
Fault = Callable[["Handler", str, str], bool]
Answer = Callable[["Handler"], None]


class World:
    """
    What all of its hosts know.

    Attributes:
        immutable: The repository's setting; *told*: whether this token may read it.
        faults: Asked in turn with each request; the first that returns True has answered it.
        asked: Host, method and path of each request, in order; *authorizations*: of each.
        strangers: Requests that carried the token to a host that must not see it.
        spoil: What is kept in place of the bytes that an upload brought.
    """

    repository = "acme/wheels"

    def __init__(self) -> None:
        self.releases: dict[int, Release] = {}
        self.tags: set[str] = set()
        self.immutable, self.told, self.admin, self.private = True, True, True, False
        self.faults: list[Fault] = []
        self.asked: list[tuple[str, str, str]] = []
        self.authorizations: list[str] = []
        self.strangers: list[str] = []
        self.spoil: Callable[[str, bytes], bytes] = lambda _, data: data
        self.lock = threading.RLock()
        self.hosts: dict[str, Server] = {}
        self._next = 0

    def number(self) -> int:
        with self.lock:
            self._next += 1
            return self._next

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
        world, path = self.world, urlsplit(self.path)
        with world.lock:
            world.asked.append((self.server.name, self.command, self.path))
            world.authorizations.append(self.headers.get("Authorization", ""))
            if self.server.name in ("storage", "elsewhere") and self.headers.get("Authorization"):
                world.strangers.append(self.path)
        with contextlib.suppress(OSError):
            if any(fault(self, self.command, self.path) for fault in list(world.faults)):
                return
            match = re.fullmatch(rf"/repos/{world.repository}(?P<rest>/.*)?", unquote(path.path))
            if self.server.name == "storage":
                self._stored(path.path)
            elif public := re.fullmatch(rf"/{world.repository}/releases/download/(?P<tag>[^/]+)/(?P<name>[^/]+)", unquote(path.path)):
                self._public(public["tag"], public["name"])
            elif match is None:
                self.answer(404, {"message": "Not Found"})
            else:
                self._ask(match["rest"] or "", parse_qs(path.query))

    do_GET = do_POST = do_PATCH = do_DELETE = serve  # noqa: N815  http.server calls them so

    def _stored(self, path: str) -> None:
        asset = next((one for release in self.world.releases.values() for one in release.assets.values() if path == f"/{one.id}"), None)
        self.answer(200, asset.data) if asset else self.answer(404)

    def _public(self, tag: str, name: str) -> None:
        """Answer as everybody is answered; drafts have no address here."""
        released = [one for one in self.world.releases.values() if one.tag == tag and not one.draft]
        found = [asset for one in released for asset in one.assets.values() if asset.name == name]
        self.answer(302, Location=f"{self.world.hosts['storage'].url}/{found[0].id}") if found else self.answer(404)

    def _ask(self, path: str, query: dict[str, list[str]]) -> None:
        sent = self.body() if self.server.name == "api" else b""
        routes: list[loopback.Route] = [
            ("GET", "", self._about),
            ("GET", "/immutable-releases", self._setting),
            ("GET", "/releases", lambda: self.answer(200, page([self._release(one) for one in self._visible()], query))),
            ("POST", "/releases", lambda: self._create(json.loads(sent))),
            ("GET", "/releases/tags/(.+)", self._tagged),
            ("GET", r"/releases/(\d+)/assets", lambda number: self._assets(int(number), query)),
            ("POST", r"/releases/(\d+)/assets", lambda number: self._upload(int(number), query)),
            ("PATCH", r"/releases/(\d+)", lambda number: self._change(int(number), json.loads(sent))),
            ("DELETE", r"/releases/(\d+)", self._remove),
            ("GET", r"/releases/assets/(\d+)", self._bytes),
            ("DELETE", r"/releases/assets/(\d+)", self._remove_asset),
            ("DELETE", "/git/refs/tags/(.+)", self._untag),
        ]
        if (found := self.route(routes, path)) is None:
            self.answer(404, {"message": "Not Found"})
        elif self.command != "GET" and not self.trusted:
            self.answer(401, {"message": "Requires authentication"})
        else:
            call, words = found
            with self.world.lock if self.server.name == "api" else contextlib.nullcontext():
                call(*words)

    def _about(self) -> None:
        world = self.world
        record = {"full_name": world.repository, "html_url": f"{world.api}/{world.repository}", "private": world.private}
        self.answer(200, record | ({"permissions": {"admin": world.admin, "push": True}} if self.trusted else {}))

    def _setting(self) -> None:
        if self.trusted and self.world.told:
            self.answer(200, {"enabled": self.world.immutable, "enforced_by_owner": False})
        else:
            self.answer(403, {"message": "Resource not accessible by personal access token"})

    def _visible(self) -> list[Release]:
        return [one for one in self.world.releases.values() if self.trusted or not one.draft]

    def _release(self, one: Release) -> dict[str, Any]:
        where = f"/repos/{self.world.repository}/releases/{one.id}/assets"
        return {
            "id": one.id, "tag_name": one.tag, "draft": one.draft, "immutable": one.immutable, "prerelease": one.prerelease,
            "upload_url": f"{self.world.uploads}{where}{{?name,label}}",
            "assets": [self._asset(one, asset) for asset in one.assets.values()],
        }  # fmt: skip

    def _asset(self, release: Release, one: Asset) -> dict[str, Any]:
        tag = f"untagged-{release.id}" if release.draft else release.tag
        url = f"{self.world.api}/{self.world.repository}/releases/download/{quote(tag)}/{quote(one.name)}"
        found = one.digest or f"sha256:{hashlib.sha256(one.data).hexdigest()}"
        size = len(one.data)
        return {"id": one.id, "name": one.name, "state": one.state, "size": size, "digest": found, "browser_download_url": url}

    def _create(self, record: dict[str, Any]) -> None:
        release = Release(self.world.number(), record["tag_name"], record["draft"], prerelease=record["prerelease"])
        self.world.releases[release.id] = release
        self.answer(201, self._release(release))

    def _tagged(self, tag: str) -> None:
        found = next((one for one in self.world.releases.values() if one.tag == tag and not one.draft), None)
        self.answer(200, self._release(found)) if found else self.answer(404, {"message": "Not Found"})

    def _one(self, number: int) -> Release | None:
        found = self.world.releases.get(number)
        if found is None or (found.draft and not self.trusted):
            self.answer(404, {"message": "Not Found"})
            return None
        return found

    def _assets(self, number: int, query: dict[str, list[str]]) -> None:
        if release := self._one(number):
            self.answer(200, page([self._asset(release, asset) for asset in release.assets.values()], query))

    def _upload(self, number: int, query: dict[str, list[str]]) -> None:
        if self.server.name != "uploads":
            self.answer(404, {"message": "Not Found"})
            return
        length = int(self.headers.get("Content-Length") or 0)
        if length >= LIMIT:
            self.answer(422, {"message": "size must be less than 2147483648"})
            return
        data = self.body()
        with self.world.lock:
            if (release := self._one(number)) is None:
                return
            if release.immutable:
                self.answer(422, {"message": "Cannot upload assets to an immutable release."})
                return
            [name] = query["name"]
            if any(one.name == name for one in release.assets.values()):
                errors = [{"resource": "ReleaseAsset", "code": "already_exists", "field": "name"}]
                self.answer(422, {"message": "Validation Failed", "errors": errors})
                return
            # GitHub writes what it does not like in names as a full stop.
            asset = Asset(self.world.number(), re.sub(r"[^A-Za-z0-9._+@-]", ".", name), self.world.spoil(name, data))
            if len(data) < length:
                asset.data, asset.state = b"", "starter"
            release.assets[asset.id] = asset
            self.answer(201, self._asset(release, asset))

    def _change(self, number: int, record: dict[str, Any]) -> None:
        if (release := self._one(number)) is None:
            return
        if release.immutable:
            self.answer(422, {"message": "Release is immutable."})
            return
        release.draft = record["draft"]
        release.immutable = self.world.immutable and not release.draft
        if not release.draft:
            self.world.tags.add(release.tag)
        self.answer(200, self._release(release))

    def _remove(self, number: str) -> None:
        if self._one(int(number)):
            del self.world.releases[int(number)]
            self.answer(204)

    def _holder(self, number: str) -> Release | None:
        return next((one for one in self._visible() if int(number) in one.assets), None)

    def _bytes(self, number: str) -> None:
        if (release := self._holder(number)) is None:
            self.answer(404, {"message": "Not Found"})
        elif self.headers.get("Accept") == "application/octet-stream":
            self.answer(302, Location=f"{self.world.hosts['storage'].url}/{number}")
        else:
            self.answer(200, self._asset(release, release.assets[int(number)]))

    def _remove_asset(self, number: str) -> None:
        if (release := self._holder(number)) is None:
            self.answer(404, {"message": "Not Found"})
        elif release.immutable:
            self.answer(422, {"message": "Cannot delete asset from an immutable release"})
        else:
            del release.assets[int(number)]
            self.answer(204)

    def _untag(self, tag: str) -> None:
        if tag in self.world.tags:
            self.world.tags.remove(tag)
            self.answer(204)
        else:
            self.answer(422, {"message": "Reference does not exist"})


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


def drop(handler: Handler) -> None:
    """End the connection without an answer."""
    handler.body()
    handler.close_connection = True


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
    place, stream = urlsplit(handler.path), handler.wfile
    handler.wfile = io.BytesIO()
    handler._ask(unquote(place.path).removeprefix(f"/repos/{handler.world.repository}"), parse_qs(place.query))
    handler.wfile = stream


def cut(share: float) -> Answer:
    """Return an answer that breaks off a download after *share* of its bytes."""

    def answer(handler: Handler) -> None:
        number = int(handler.path.strip("/"))
        data = next(release.assets[number].data for release in handler.world.releases.values() if number in release.assets)
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[: int(len(data) * share)])

    return answer


@contextlib.contextmanager
def serve() -> Iterator[World]:
    """Yield a world whose hosts answer until the block ends; their threads end with it."""
    world = World()
    world.hosts = {name: Server(name, world) for name in ("api", "uploads", "storage", "elsewhere")}
    with loopback.serving(*world.hosts.values()):
        yield world
