"""A Sigstore identity that holds the targets role, with Sigstore's own library and an instance of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sigstore.oidc
from sigstore.models import ClientTrustConfig
from sigstore.verify import Verifier
from tests.refusals import refusal
from tests.support import tufindex
from tests.support.sigstoreworld import GITHUB, WORKFLOW, World

from sparkwright.release import keys
from sparkwright.release.policy import Identity
from sparkwright.release.repository import IndexFolder

HOLDER = Identity(WORKFLOW, GITHUB)


@pytest.fixture(name="world")
def _world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with World() as world:
        config = ClientTrustConfig.from_json(world.config())
        monkeypatch.setattr(ClientTrustConfig, "production", lambda *_, **__: config)
        verifier = Verifier(trusted_root=config.trusted_root)
        monkeypatch.setattr(Verifier, "production", lambda *_, **__: verifier)
        monkeypatch.setattr(sigstore.oidc, "detect_credential", world.token)
        yield world


def test_identity_signs_and_another_one_does_not(world: World, tmp_path: Path) -> None:
    keys.make(tmp_path / "keys", ["root", "online"])
    folder = tmp_path / "index"
    tufindex.publish(folder, keys.load([tmp_path / "keys"], HOLDER), "2026.11.1")
    root = (folder / "metadata" / "1.root.json").read_bytes()
    with tufindex.serve(folder) as url:
        assert "2026.11.1" in tufindex.read(url, tmp_path / "client", root)
        world.identity = WORKFLOW.replace("publish.yml", "other.yml")
        # The publisher has read the index, and verified the identity, by then.
        tufindex.publish(folder, keys.load([tmp_path / "keys"], HOLDER), "2026.11.2")
        with refusal("index-unsigned"):
            tufindex.read(url, tmp_path / "client", root)
    with refusal("index-damaged"):
        IndexFolder(folder)


def test_identity_without_credentials_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys.make(tmp_path / "keys")
    with refusal("identity-unusable"):
        keys.load([tmp_path / "keys"], Identity(WORKFLOW, "https://accounts.example"))
    monkeypatch.setattr(sigstore.oidc, "detect_credential", lambda: None)
    with refusal("identity-unusable"):
        keys.load([tmp_path / "keys"], HOLDER)
