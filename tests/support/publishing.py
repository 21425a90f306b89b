"""
A publisher and its index, for tests: the repository's own policy and stack, small wheels, a key, and a package index that has nothing else.

    with publishing.place(tmp_path) as place:
        place.publish(wheels.release(tmp_path / "dist"))
        place.manifest().entries[-1].name == "2026.11.1"
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import msgspec
import requests
from tests.support import publisher, verdicts, wheels

from sparkwright.core.files import sha256_bytes, sha256_file
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.release.manifest import places, signed
from sparkwright.release.manifest.records import Manifest, Proof, Release
from sparkwright.release.publish import ground, sequence
from sparkwright.release.publish.hosts import Observe, unobserved
from sparkwright.release.publish.prepare import Publisher
from sparkwright.release.publish.sequence import Asked, Published
from sparkwright.release.signing import keys
from sparkwright.release.signing.keys import KeySigner
from sparkwright.release.signing.trust import Trust

URL = "https://wheels.example/spark/"


class Place:
    """
    An index, its publisher's key and store, in one folder.

    Attributes:
        root: The folder of the index. *key*: file of the private key. *url*: where the index is served, as its manifest says.
    """

    def __init__(self, folder: Path, url: str = URL) -> None:
        self.root, self.key, self.store, self.url = (
            folder / "index",
            folder / "key",
            folder / "store",
            url,
        )
        if not self.key.exists():
            folder.mkdir(parents=True, exist_ok=True)
            keys.make(self.key)
        self.signer = KeySigner.load(self.key)
        self.trust = Trust((self.signer.public,))

    def publisher(self, observe: Observe = unobserved, **changed: Any) -> Publisher:
        """Return who publishes, without asking any network but that of ``SPARKWRIGHT_INDEX_URL``."""
        session = RunContext(
            Project(wheels.ROOT, wheels.STACK),
            Store(self.store),
            (),
            self.root,
            offline=True,
            **changed,
        )
        return Publisher(session, self.root, self.signer, self.trust, verdicts.release_policy(), observe)  # type: ignore[arg-type]

    def publish(
        self,
        made: Sequence[Path],
        channel: str | None = None,
        observe: Observe = unobserved,
        **asked: Any,
    ) -> Published:
        """Publish the wheels *made*."""
        given = {
            "wheels": tuple(made),
            "channel": channel,
            "url": self.url if not self.root.exists() else "",
            **asked,
        }
        return sequence.publish(self.publisher(observe), Asked(**given))

    def manifest(self) -> Manifest:
        return ground.required(self.root, self.trust)

    def files(self) -> dict[str, str]:
        """Return every file that a client can ask for → its sha256, links followed, without what the publisher keeps for itself."""
        found = {}
        for folder, names, files in os.walk(self.root, followlinks=True):
            names[:] = [name for name in names if name != ground.WORK]
            for name in files:
                path = Path(folder) / name
                found[path.relative_to(self.root).as_posix()] = sha256_file(path)
        return found


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


class Client:
    """
    Somebody who reads an index over HTTP, believing nothing: every file that the manifest or a page of pip's leads to is there, and right.

    Args:
        url: Where the index is served. *trust*: whose manifest counts.
    """

    def __init__(self, url: str, trust: Trust) -> None:
        self.url, self.trust = url, trust
        self.serials: list[int] = []
        self._seen: set[str] = set()
        self._session = requests.Session()
        self._session.trust_env = False

    def look(self) -> int:
        """Read everything once, and return the serial; 0 where there is no index yet."""
        reply = self._session.get(urljoin(self.url, places.MANIFEST), timeout=60)
        if reply.status_code == 404 and not self.serials:
            return 0
        assert reply.status_code == 200, (reply.url, reply.status_code)
        manifest = signed.read(reply.content, self.trust, what=reply.url)
        assert manifest.serial >= max(self.serials, default=0)
        self.serials.append(manifest.serial)
        for entry in manifest.entries:
            release = msgspec.json.decode(
                self.hashed(places.release(entry.release), entry.release), type=Release
            )
            proof = msgspec.json.decode(
                self.hashed(places.proof(entry.release, entry.proof), entry.proof), type=Proof
            )
            self._release(entry.release, release, proof)
            assert entry.channel == "candidate" or not any(one.missing for one in proof.wheels)
        for channel in ("verified", "candidate"):
            for project in self.links(f"{places.simple(channel)}/"):
                for file in self.links(project):
                    self.hashed(file.partition("#")[0], file.partition("#sha256=")[2])
        return manifest.serial

    def _release(self, address: str, release: Release, proof: Proof) -> None:
        for lock in release.locks:
            self.hashed(places.lock(address, lock.machine), lock.sha256)
            self.hashed(places.requirements(address, lock.machine), lock.requirements)
        if release.onsite:
            self.hashed(places.onsite(address), release.onsite)
        for wheel in release.wheels:
            self.hashed(wheel.url, wheel.sha256)
            self.hashed(f"{wheel.url}.metadata", wheel.metadata)
        for one in proof.wheels:
            for evidence in one.evidence:
                self.hashed(places.evidence(evidence.sha256), evidence.sha256)

    def hashed(self, place: str, sha256: str) -> bytes:
        """Return the file at *place*, which must have that hash."""
        where = urljoin(self.url, place)
        reply = self._session.get(where, timeout=60)
        assert reply.status_code == 200, (where, reply.status_code)
        assert sha256_bytes(reply.content) == sha256, where
        self._seen.add(unquote(urlsplit(where).path))
        return reply.content

    def links(self, page: str) -> list[str]:
        """Return what the page leads to."""
        where = urljoin(self.url, page)
        reply = self._session.get(where, timeout=60)
        assert reply.status_code == 200, (where, reply.status_code)
        found = _Links()
        found.feed(reply.text)
        return [urljoin(where, link) for link in found.found]


bare_index = publisher.bare_index
