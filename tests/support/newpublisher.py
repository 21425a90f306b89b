"""
A publisher with keys and an index in one folder: the repository's own policy and stack, and a package index that has nothing else.

    with newpublisher.place(tmp_path) as place:
        place.publish(wheels.release(tmp_path / "dist"))
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support import publishing, verdicts, wheels

from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.release import keys
from sparkwright.release.publisher import Published, Publisher, PublishRequest
from sparkwright.release.repository import IndexFolder

URL = "https://wheels.example/spark/"


class Place:
    """
    A publisher.

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

    def publish(self, made: Sequence[Path], channel: Any = None, **options: Any) -> Published:
        """Publish the wheels *made*."""
        return self.publisher().publish(
            PublishRequest(tuple(made), channel, url=self.url, **options)
        )

    @property
    def index(self) -> IndexFolder:
        """The index as it is now."""
        return IndexFolder(self.root)

    def files(self) -> dict[str, bytes]:
        """Return every served file."""
        paths = (path for path in self.root.rglob("*") if path.is_file() and path.name != ".lock")
        return {path.relative_to(self.root).as_posix(): path.read_bytes() for path in paths}


@contextlib.contextmanager
def place(folder: Path, url: str = URL) -> Iterator[Place]:
    """Yield a publisher whose package index is `publishing.bare_index`."""
    with (
        publishing.bare_index(folder / "packages") as address,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SPARKWRIGHT_INDEX_URL", address)
        patch.setenv("UV_CACHE_DIR", str(folder / "uv"))
        made = Place(folder, url)
        made.environment = {"SPARKWRIGHT_INDEX_URL": address, "UV_CACHE_DIR": str(folder / "uv")}
        yield made
