"""
A publisher with keys and an index in one folder: the repository's own policy and stack, and a package index that has Ray alone.

    with publisher.index_owner(tmp_path) as owner:
        owner.publish(wheels.release(tmp_path / "dist"))
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support import tufindex, verdicts, wheels

from sparkwright.core.files import sha256_file
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.release import keys
from sparkwright.release.publisher import Published, Publisher
from sparkwright.release.repository import IndexFolder

URL = "https://wheels.example/spark/"


class IndexOwner:
    """
    A publisher and the index in ``folder/index``.

    Attributes:
        root: The folder of the index. *keys*: the folder of its keys.
        environment: The variables that a publication needs.
    """

    environment: Mapping[str, str] = {}

    def __init__(self, folder: Path, url: str = URL) -> None:
        self.root, self.keys, self.url = folder / "index", folder / "keys", url
        self._store = Store(folder / "store")
        if not self.keys.exists():
            keys.make(self.keys)

    def publisher(self, **changed: Any) -> Publisher:
        """Return the publisher, with *changed* attributes of its context."""
        context = RunContext(
            Project(wheels.ROOT, wheels.STACK), self._store, (), self.root, offline=True, **changed
        )
        return Publisher(context, self.root, keys.load([self.keys]), verdicts.release_policy())

    def publish(self, paths: Sequence[Path], channel: Any = None, **options: Any) -> Published:
        """Publish the wheels *paths*."""
        return self.publisher().publish(tuple(paths), channel, url=self.url, **options)

    @property
    def index(self) -> IndexFolder:
        """The index as it is now."""
        return IndexFolder(self.root)

    def files(self) -> dict[str, bytes]:
        """Return every served file."""
        paths = (path for path in self.root.rglob("*") if path.is_file() and path.name != ".lock")
        return {path.relative_to(self.root).as_posix(): path.read_bytes() for path in paths}


@contextlib.contextmanager
def index_owner(folder: Path, url: str = URL) -> Iterator[IndexOwner]:
    """Yield a publisher whose package index is `bare_index`."""
    with bare_index(folder / "packages") as address, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARKWRIGHT_INDEX_URL", address)
        patch.setenv("UV_CACHE_DIR", str(folder / "uv"))
        owner = IndexOwner(folder, url)
        owner.environment = {"SPARKWRIGHT_INDEX_URL": address, "UV_CACHE_DIR": str(folder / "uv")}
        yield owner


@contextlib.contextmanager
def bare_index(folder: Path) -> Iterator[str]:
    """Serve a package index that has only Ray, which the policy adds to every set; yield the address of its simple API."""
    wheel = wheels.plain(folder / "files", "ray", "2.60.0")
    page = folder / "simple" / "ray" / "index.html"
    page.parent.mkdir(parents=True)
    link = f'<a href="../../files/{wheel.name}#sha256={sha256_file(wheel)}">{wheel.name}</a>'
    page.write_text(f"<!DOCTYPE html><html><body>{link}</body></html>")
    (folder / "simple" / "index.html").write_text(
        '<!DOCTYPE html><html><body><a href="ray/">ray</a></body></html>'
    )
    with tufindex.serve(folder) as url:
        yield f"{url}simple/"
