"""The verbs of a publisher, as people run them: what they print, how they end, and that secrets stay unsaid."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import publishing, wheels
from tests.support.publishing import Place

from sparkwright.cli.main import main
from sparkwright.release.signing import keys

Run = Callable[..., tuple[int, Any]]

#: A passphrase, which no output may hold.
SECRET = "hush-hush"


@pytest.fixture(name="place")
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Return a publisher whose index does not exist yet."""
    with publishing.bare_index(tmp_path / "bare") as url:
        monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", url)
        yield Place(tmp_path / "place")


@pytest.fixture(name="run")
def _run(place: Place, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return what runs a verb on the index with --json, and returns exit code and document."""

    def run(*words: str | Path, key: Path | None = place.key) -> tuple[int, Any]:
        signed = ["--key", str(key)] if key else []
        shared = ["--at", str(place.root), *signed, "--root", str(wheels.ROOT), "--stack", wheels.STACK, "--offline", "--json"]
        code = main([*map(str, words), *shared])
        told = capsys.readouterr()
        assert SECRET not in told.out + told.err
        return code, json.loads(told.out)

    return run


def refused(found: tuple[int, Any]) -> tuple[int, str]:
    code, document = found
    return code, document["error"]["reference"]


def test_a_life_of_an_index(run: Run, place: Place, tmp_path: Path) -> None:
    """Published as a candidate, refused and then taken for verified, followed by another, yanked, retained, refreshed."""
    made = wheels.release(tmp_path / "dist", judged=False)
    assert refused(run("publish", *made, "--url", publishing.URL)) == (1, "verified-refused")
    code, told = run("publish", *made, "--url", publishing.URL, "--channel", "candidate", "--reason", "for those who test")
    assert (code, told["published"]["release"], len(told["published"]["sent"])) == (0, "2026.11.1", 10)
    assert set(told["published"]["missing"]) == {path.name for path in made}
    assert refused(run("release", "promote", "2026.11.1", "--verdicts", tmp_path / "dist")) == (1, "verified-refused")
    for path in made:
        wheels.judge(path, companions=[one for one in made if one != path] if path == made[-1] else ())
    assert run("release", "promote", "2026.11.1", "--verdicts", tmp_path / "dist")[1]["changed"]["releases"] == ["2026.11.1"]

    later = wheels.release(tmp_path / "later", label=f"{wheels.LABEL}.1")
    code, told = run("publish", *later, "--dry-run")
    assert (code, told["published"]["release"], told["dry_run"]) == (0, "2026.11.2", True)
    assert run("publish", *later)[1]["published"]["channel"] == "verified"
    assert refused(run("release", "yank", "2026.11.1")) == (2, "usage")
    assert run("release", "yank", "2026.11.2", "--reason", "it is slow")[1]["changed"]["releases"] == ["2026.11.2"]
    assert run("release", "yank", "2026.11.1", "--reason", "wrong")[0] == 0
    assert refused(run("release", "yank", "2026.11.7", "--reason", "wrong")) == (1, "release-unknown")
    assert run("release", "prune", "--keep", "1")[1]["changed"]["action"] == "retain"
    code, told = run("release", "refresh")
    assert (code, told["changed"]["serial"]) == (0, 7)
    assert [one.action for one in place.manifest().log] == ["publish", "promote", "publish", "yank", "yank", "retain", "refresh"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["publish", "missing.whl"], (2, "usage")),
        (["publish", "WHEEL", "--files", "ftp:there"], (2, "usage")),
        (["publish", "WHEEL", "--channel", "candidate"], (2, "usage")),
        (["publish", "WHEEL", "--url", publishing.URL, "--identity"], (2, "usage")),
        (["release", "refresh"], (1, "index-missing")),
        (["release", "prune", "--keep", "-1"], (2, "usage")),
    ],
    ids=["no-wheel", "no-such-host", "no-address", "two-signers", "no-index", "keep-less-than-none"],
)
def test_what_cannot_be_is_said_first(run: Run, place: Place, tmp_path: Path, words: list[str], expected: tuple[int, str]) -> None:
    """Wrong words and missing things end at once, with their reference, and no index comes of it."""
    wheel = wheels.vllm(tmp_path / "dist")

    assert refused(run(*(str(wheel) if word == "WHEEL" else word for word in words))) == expected
    assert not (place.root / "current").exists()


def test_a_passphrase_comes_from_the_environment(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked of nobody, stands on no command line, and is in no message."""
    keys.make(tmp_path / "locked", SECRET)
    assert refused(run("release", "refresh", key=tmp_path / "locked")) == (1, "key-invalid")
    monkeypatch.setenv(keys.PASSPHRASE, SECRET)

    assert refused(run("release", "refresh", key=tmp_path / "locked")) == (1, "index-missing")
