"""What was compiled once is not compiled again: in another checkout with a store of its own, and in another stack's folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Redis
    from tests.integration.conftest import Demo

pytestmark = [
    pytest.mark.toolchain,
    pytest.mark.skipif(not shutil.which("ccache"), reason="no ccache (apt-get install ccache)"),
]


def test_a_lost_build_folder_is_made_again_without_a_compiler(demo: Demo) -> None:
    """The second build compiles nothing, says so, and gives the same bytes."""
    demo.build()
    before = demo.sha256()
    shutil.rmtree(demo.work / "build")
    shutil.rmtree(demo.folder / "store" / "records" / "wheel")

    said = demo.build().stderr

    assert f"0 units compiled (0.0 s of work), {len(demo.units())} taken from the compiler cache" in said
    assert (demo.compiled(), demo.taken()) == ([], demo.units())
    assert demo.sha256() == before


@pytest.mark.skipif(not shutil.which("redis-server"), reason="no redis-server (apt-get install redis-server)")
def test_two_checkouts_build_as_one(demo: Demo, redis: Redis, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a Redis server between them, the second store compiles nothing; nothing of the server's address is in its log or store."""
    other = type(demo)(tmp_path / "other")
    shutil.copytree(demo.folder, other.folder, symlinks=True)
    with redis() as address:
        monkeypatch.setenv("CCACHE_REMOTE_STORAGE", address)
        demo.build()
        assert demo.compiled() == demo.units()
        said = other.build().stderr

    assert (other.compiled(), other.taken()) == ([], other.units())
    assert other.sha256() == demo.sha256()
    assert address.removeprefix("redis://") not in said
    logs = [path.read_text("utf-8", "replace") for path in (other.folder / "store" / "logs").iterdir()]
    assert not any(address.removeprefix("redis://") in text for text in logs)
