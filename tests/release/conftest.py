"""An index with a verified release, its publisher, and the wheels of the next release."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import publisher, wheels


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[publisher.IndexOwner]:
    """Yield a publisher of 2026.11.1, whose wheels lie in ``first``; those in ``next`` may follow it."""
    folder = tmp_path_factory.mktemp("stock")
    with publisher.index_owner(folder) as owner:
        owner.publish(wheels.release(folder / "first"))
        wheels.release(folder / "next", label="spark.2026.11.2")
        yield owner


@pytest.fixture
def owner(stock: publisher.IndexOwner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> publisher.IndexOwner:
    """Return a publisher of a copy of that index, whose folder can be changed."""
    folder = tmp_path / "owner"
    shutil.copytree(stock.folder, folder)
    for name, value in stock.environment.items():
        monkeypatch.setenv(name, value)
    return publisher.IndexOwner(folder, stock.url, stock.environment)


@pytest.fixture
def first(owner: publisher.IndexOwner) -> list[Path]:
    """Return the wheels of the first release, that of vLLM last."""
    return sorted(owner.folder.glob("first/*.whl"))


@pytest.fixture
def new(owner: publisher.IndexOwner) -> list[Path]:
    """Return the wheels of the next release, that of vLLM last, without the verdicts of one gate."""
    paths = sorted(owner.folder.glob("next/*.whl"))
    wheels.judge(paths[-1], companions=paths[:-1], without=("G5",))
    return paths
