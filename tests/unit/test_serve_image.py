"""Which release a serving image is made of, what the image says of itself, and what is refused before any engine is asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.client.world import World, wheel

from sparkwright.cli.main import main
from sparkwright.core.console import console

ROOT = Path(__file__).parents[2]
BASE = "debian@sha256:" + "0123456789abcdef" * 4
Run = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture(name="world")
def _world(tmp_path: Path) -> World:
    """Return an index in a folder: for the Spark 2026.11.1, and 2026.11.2, which is a candidate."""
    world = World(tmp_path)

    for name, channel in (("2026.11.1", "verified"), ("2026.11.2", "candidate")):
        made = wheel("vllm", files={"vllm/release.txt": name.encode()})
        world.publish(
            name, [made], channel=channel,  # type: ignore[arg-type]
            change=lambda release: replace(release, locks=tuple(replace(lock, machine="aarch64") for lock in release.locks)),
            state=lambda state: replace(state, machines=("aarch64",)),
        )  # fmt: skip
    return world


@pytest.fixture(name="run")
def _run(
    world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Return what runs the command with no engine on the machine, and returns its exit code, its document, and what it said."""
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/engine.sock")
    monkeypatch.setenv("SPARKWRIGHT_PREFIX", str(tmp_path / "prefix"))

    def run(*words: str) -> tuple[int, dict[str, Any], str]:
        index = [] if "--index" in words else ["--index", str(world.root)]
        given = [*index, "--trust", world.fingerprint, "--root", str(ROOT), "--cache-dir", str(tmp_path / "store")]
        code = main(["lab", "image", *given, "--json", *words])
        monkeypatch.setattr(console, "_document", {})
        out, said = capsys.readouterr()
        return code, json.loads(out or "{}"), said

    return run


def test_dry_run_asks_no_engine(world: World, run: Run) -> None:
    """Release and base are checked, and the labels shown: every wheel, lock, record and root by hash."""
    code, document, said = run("--base", BASE, "--dry-run")
    labels = document["labels"]

    assert (code, document["state"], document["release"]) == (0, "would be built", "2026.11.1")
    assert "no release is named; the newest of verified is 2026.11.1" in said
    assert labels["sparkwright.index.fingerprint"] == world.fingerprint
    assert (world.root / "targets/releases" / f"{labels['sparkwright.release.sha256']}.2026.11.1.json").is_file()
    for label, name in (("wheel.vllm", "vllm-1.0-py3-none-any.whl"), ("lock.sha256", "*.toml")):
        assert [*(world.root / "files" / labels[f"sparkwright.{label}"]).glob(name)]
    # A folder of this machine says nothing elsewhere.
    assert not {"sparkwright.missing", "sparkwright.index"} & set(labels)


def test_candidate_has_to_be_asked_for_and_is_labelled(run: Run) -> None:
    code, document, said = run("2026.11.2", "--channel", "candidate", "--base", BASE, "--dry-run")

    assert (code, document["channel"]) == (0, "candidate")
    assert document["labels"]["sparkwright.missing"] == "G5"
    assert "not shown: G5" in said


@pytest.mark.parametrize(
    ("words", "reference"),
    [
        (["--base", BASE], "engine-missing"),
        (["--base", "debian:12"], "base-unresolved"),
        ([], "base-unresolved"),
        (["--base", BASE, "--platform", "linux/amd64"], "release-unknown"),
        (["--base", BASE, "2026.11.9"], "release-unknown"),
        (["--base", BASE, "2026.11.2"], "release-unproved"),
        (["--base", BASE, "--trust", "0" * 64], "trust-missing"),
        *((["--base", BASE, "--push", name], "usage") for name in ("Not/A:repository", BASE, "a b", "/x", "a//b", "x\n", "é", "a" * 300)),
        (["--base", BASE, ""], "usage"),
        (["--base", BASE, "--built", "dist"], "usage"),
        (["--base", BASE, "--offline", "--index", "https://wheels.example/"], "usage"),
        (["--base", BASE, "--index", "https://me:secret@wheels.example/"], "usage"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else value,
)
def test_refused_before_anything_is_built(run: Run, words: list[str], reference: str) -> None:
    code, document, said = run(*words)

    assert code == (2 if reference == "usage" else 1), said
    assert reference in json.dumps(document) + said


def test_yanked_release_is_refused_by_name_too(world: World, run: Run) -> None:
    world.yank("2026.11.1")

    codes = [run("--base", BASE, "--dry-run", *words)[1]["error"]["reference"] for words in ((), ("2026.11.1",))]
    assert codes == ["release-yanked"] * 2
