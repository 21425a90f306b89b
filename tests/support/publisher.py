"""
A publisher with keys and an index in one folder: the repository's own policy and stack, and a package index that has Ray alone.

    with publisher.index_owner(tmp_path) as owner:
        owner.publish(wheels.release(tmp_path / "dist"))
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.support import tufindex, verdicts, wheels

from sparkwright.core.files import sha256_file
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.release import keys, repository
from sparkwright.release.publisher import Published, Publisher

URL = "https://wheels.example/spark/"


class IndexOwner:
    """
    A publisher and the index in ``folder/index``.

    Attributes:
        root: The folder of the index. *keys*: the folder of its keys.
        environment: The variables that a publication needs.
    """

    def __init__(self, folder: Path, url: str, environment: dict[str, str]) -> None:
        self.folder, self.url, self.environment = folder, url, environment
        self.root, self.keys = folder / "index", folder / "keys"
        if not self.keys.exists():
            keys.make(self.keys)

    def publisher(self, **changed: Any) -> Publisher:
        """Return the publisher, with *changed* attributes of its context."""
        project, store = Project(wheels.ROOT, wheels.STACK), Store(self.folder / "store")
        context = RunContext(project, store, (), self.root, offline=True, **changed)
        return Publisher(context, self.root, keys.load([self.keys]), verdicts.release_policy())

    def publish(self, paths: Sequence[Path], channel: Any = None, **options: Any) -> Published:
        """Publish the wheels *paths*."""
        return self.publisher().publish(tuple(paths), channel, url=self.url, **options)

    @property
    def index(self) -> repository.IndexFolder:
        """The index as it is now."""
        return repository.IndexFolder(self.root)


@contextlib.contextmanager
def index_owner(folder: Path, url: str = URL) -> Iterator[IndexOwner]:
    """Yield a publisher whose package index is `bare_index`."""
    with bare_index(folder / "packages") as address, pytest.MonkeyPatch.context() as patch:
        environment = {"SPARKWRIGHT_INDEX_URL": address, "UV_CACHE_DIR": str(folder / "uv")}
        for name, value in environment.items():
            patch.setenv(name, value)
        yield IndexOwner(folder, url, environment)


@contextlib.contextmanager
def bare_index(folder: Path) -> Iterator[str]:
    """Serve a package index that has only Ray, which the policy adds to every set; yield the address of its simple API."""
    offer(folder, wheels.plain(folder / "made", "ray", "2.60.0"))
    with tufindex.serve(folder) as url:
        yield f"{url}simple/"


def offer(folder: Path, wheel: Path, *, hashed: bool = True) -> Path:
    """Move *wheel* into the package index in *folder*, whose page states its sha256 if *hashed*; return where it lies."""
    path = folder / "files" / wheel.name
    path.parent.mkdir(exist_ok=True)
    wheel.rename(path)
    page = folder / "simple" / path.name.partition("-")[0].replace("_", "-") / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    fragment = f"#sha256={sha256_file(path)}" if hashed else ""
    with page.open("a", encoding="utf-8") as stream:
        stream.write(f'<a href="../../files/{quote(path.name)}{fragment}">{path.name}</a>\n')
    return path
