"""
Clients and indexes of earlier days against those of today.

Each archive in ``older`` is an index as the code of that day published it, for a hundred years: two releases, and the wheel of the client.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.client.world import CLIENT, ONE, TWO, World
from tests.refusals import refusal
from tests.support import tufindex
from tests.support.publisher import IndexOwner

from sparkwright.release import keys
from sparkwright.release.repository import IndexFolder


@pytest.fixture(params=sorted(Path(__file__).with_name("older").glob("*.zip")), ids=lambda path: path.stem)
def older(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the folder of an index of an earlier day."""
    shutil.unpack_archive(request.param, tmp_path / "older")
    return tmp_path / "older"


def test_client_of_an_earlier_day_uses_an_index_of_today(
    owner: IndexOwner, new: list[Path], older: Path, tmp_path: Path
) -> None:
    """It names a release whose state it cannot read, as a later format would have it, and keeps to the others."""
    owner.publish(new, "candidate")
    [client] = older.glob("files/*/sparkwright_install-*.whl")
    shutil.unpack_archive(client, tmp_path / "client", "zip")
    user = World(tmp_path / "world").user()
    user.environment |= {"PYTHONPATH": str(tmp_path / "client"), "SPARKWRIGHT_INDEX": str(owner.root)}

    def run(line: str) -> str:
        done = subprocess.run([*CLIENT, *line.split()], env=user.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    run(f"install --channel candidate --version {ONE} --trust {owner.index.fingerprint}")
    run(f"install --channel candidate --version {TWO}")
    assert f"* {TWO}" in run("list --channel candidate")
    assert f"{new[0].name}: {TWO}, candidate" in run(f"verify {new[0]}")
    assert (f"{ONE} is current" in run("rollback"), user.current) == (True, ONE)
    assert run("doctor --deep").count("intact") == 2
    # No publisher of today could read it.
    with refusal("index-damaged"), owner.index.changing(keys.load([owner.keys]), tufindex.ROLES) as change:
        change.set_state(TWO, replace(owner.index.entry(TWO).state, channel="candidate.2"))
    assert f"need a newer client, such as {TWO}" in run("list")


def test_index_of_an_earlier_day_is_used_and_continued(older: Path, tmp_path: Path) -> None:
    assert list(IndexFolder(older).entries) == [ONE, TWO]
    user = World(tmp_path / "world").user()
    user.environment["SPARKWRIGHT_INDEX"] = str(older)
    trusted = ("--trust", IndexFolder(older).fingerprint)
    for words in (("install", "--version", ONE, *trusted), ("install",), ("list",), ("rollback",), ("doctor", "--deep")):
        outcome = user.run(*words)
        assert outcome.code == 0, outcome.said
    assert user.current == ONE
