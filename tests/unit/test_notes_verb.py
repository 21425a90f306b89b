"""``sparkwright release notes``: what was published, read with the same care as an installation reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from msgspec.structs import replace
from tests.refusals import refusal
from tests.support import indexserver, wheels
from tests.support.indexdata import LACK, SIGNER, Made

from sparkwright.cli import main
from sparkwright.core.console import console
from sparkwright.core.files import canonical, sha256_bytes
from sparkwright.release.manifest import places, times

URL = "http://127.0.0.1/spark/"


class Place(NamedTuple):
    """An index with three releases of one stack, the newest yanked, and the public key of its publisher."""

    made: Made
    key: Path

    def page(self, name: str) -> str:
        """Return the notes that the index itself shows."""
        return (self.made.root / "b" / self.address(name) / "notes.md").read_text("utf-8")

    def address(self, name: str) -> str:
        return sha256_bytes(canonical(self.made.releases[name]))


def live(made: Made) -> Made:
    """Put it live as signed now: what tests make up is long past, or yet to come."""
    made.manifest = replace(made.manifest, made=times.now(), expires=times.after(times.now(), 30))
    made.live()
    return made


@pytest.fixture(name="place")
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.yaml").write_text("{}")
    monkeypatch.setenv("SPARKWRIGHT_CONFIG", str(tmp_path / "config" / "config.yaml"))
    monkeypatch.setenv("SPARKWRIGHT_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("SPARKWRIGHT_RELEASES", raising=False)
    made = Made(tmp_path / "index", URL)
    for number, missing in enumerate([(LACK,), (), (LACK,)], 1):
        wheel = wheels.plain(tmp_path, "vllm", f"0.33.{number}+spark.2026.11", tag="cp38-abi3-manylinux_2_34_aarch64")
        made.publish(f"2026.11.{number}", [wheel], missing=missing)
    made.yank("2026.11.3", "it says only zeros")
    key = tmp_path / "key.pub"
    key.write_text(SIGNER.public.text)
    return Place(live(made), key)


Told = Callable[..., str]


@pytest.fixture(name="told")
def _told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Told:
    """Return what runs the verb and returns what it prints."""

    def run(*words: str | Path) -> str:
        capsys.readouterr()
        main.run(["release", "notes", *map(str, words), "--cache-dir", str(tmp_path / "cache")])
        console.finish()
        return capsys.readouterr().out

    return run


def test_the_newest_offered_release_is_shown_as_the_index_shows_it(place: Place, told: Told) -> None:
    """The very text that lies beside the release, the yanked one passed over; without a key, nothing is checked, and that is said."""
    unchecked = msgspec.json.decode(told("--index", place.made.root, "--json"))
    checked = msgspec.json.decode(told("--index", place.made.root, "--key", place.key, "--signed-for", URL, "--json"))
    assert unchecked["signature checked"] is False
    assert checked == {**unchecked, "signature checked": True}
    assert checked["markdown"] == place.page("2026.11.2")


def test_a_release_is_found_by_name_and_by_address(place: Place, told: Told, capsys: pytest.CaptureFixture[str]) -> None:
    """The yanked one, too, with the reason."""
    assert told("2026.11.1", "--index", place.made.root) == place.page("2026.11.1") + "\n"
    assert told(place.address("2026.11.1"), "--index", place.made.root) == place.page("2026.11.1") + "\n"
    assert main.run(["release", "notes", "2026.11.3", "--index", str(place.made.root)]) == 0
    shown = capsys.readouterr().err
    assert "2026.11.3 was yanked: it says only zeros" in shown
    assert "is not checked, as nothing says whose counts" in shown


def test_a_wrong_key_is_refused_even_for_a_folder(place: Place, told: Told, tmp_path: Path) -> None:
    """No signature is one thing, that of somebody else another."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from sparkwright.release.signing.keys import KeySigner

    other = tmp_path / "other.pub"
    other.write_text(KeySigner(Ed25519PrivateKey.generate()).public.text)
    with refusal("signer-unknown"):
        told("--index", place.made.root, "--key", other, "--signed-for", URL)


def test_an_address_is_read_only_with_a_signature(place: Place, told: Told) -> None:
    """Over HTTP nothing is believed without a key; with one, the same text comes."""
    with indexserver.serve(place.made.root) as served:
        with refusal("trust-missing"):
            told("--index", served.url)
        assert told("--index", served.url, "--key", place.key, "--signed-for", URL) == place.page("2026.11.2") + "\n"


def test_what_is_not_there_is_named(place: Place, told: Told, tmp_path: Path) -> None:
    """No index, no such release, and the record of one release in the place of another's."""
    with refusal("index-missing"):
        told("--index", tmp_path / "config")
    with refusal("release-unknown", match=r"no release 2026\.11\.9"):
        told("2026.11.9", "--index", place.made.root)
    one, other = (place.made.root / places.release(place.address(name)) for name in ("2026.11.1", "2026.11.2"))
    other.write_bytes(one.read_bytes())
    with refusal("set-mixed"):
        told("--index", place.made.root)


@pytest.mark.parametrize(
    "data",
    [
        b"<html>",
        b"{}",
        b'{"payload": "", "payloadType": "x", "signatures": [{"sig": ""}]}',
        b'{"mediaType": "application/vnd.dev.sigstore.bundle"}',
    ],
)
def test_a_manifest_that_is_none_is_named_so(place: Place, told: Told, data: bytes) -> None:
    """Also where no signature is asked for."""
    manifest(place).write_bytes(data)
    with refusal("manifest-invalid"):
        told("--index", place.made.root)


def manifest(place: Place) -> Path:
    return place.made.root / "g" / str(place.made.manifest.serial) / places.MANIFEST
