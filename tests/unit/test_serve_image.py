"""Which release a serving image is made of, what the image says of itself, and what is refused before any engine is asked; its entrypoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
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


def test_dry_run_asks_no_engine_and_candidate_has_to_be_asked_for(world: World, run: Run) -> None:
    """Release and base are checked, and the labels shown: every wheel, lock, record and root by hash; a candidate is labelled."""
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
        (["--base", BASE, ""], "usage"),
        (["--base", BASE, "--offline", "--index", "https://wheels.example/"], "usage"),
        (["--base", BASE, "--index", "https://me:secret@wheels.example/"], "usage"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else value,
)
def test_refused_before_anything_is_built(run: Run, words: list[str], reference: str) -> None:
    code, document, said = run(*words)

    assert code == (2 if reference == "usage" else 1), said
    assert reference in json.dumps(document) + said


# The entrypoint: what each command makes of arguments and variables, and who gets the signals.


#: Where the program lies in the image.
PROGRAM = "/opt/sparkwright/program/bin/python"
#: Stands for the program's Python: says who it is, what it was given and what it sees.
SEEN = """\
import json, os, sys
print(json.dumps({"pid": os.getpid(), "words": sys.argv[1:], "given": os.environ.get("GIVEN")}))
"""
#: Of the stand-in.
NAME = "a python"
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)


@pytest.fixture(name="entry", scope="module")
def _entry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the entrypoint as it would be if the program lay in a folder of the test."""
    folder = tmp_path_factory.mktemp("entry")
    text = (ROOT / "build" / "entrypoint.sh").read_text()
    assert text.count(PROGRAM) == 1
    for name, body in ((NAME, f"#!{sys.executable} -ES\n{SEEN}"), ("entrypoint.sh", text.replace(PROGRAM, f"'{folder / NAME}'"))):
        (folder / name).write_text(body)
        (folder / name).chmod(0o755)
    return folder / "entrypoint.sh"


def ran(entry: Path, *words: str, **variables: str) -> tuple[int, dict[str, object], str]:
    """Return status, what the program saw, and what was said."""
    with subprocess.Popen([entry, *words], env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        out, said = child.communicate()
    seen = json.loads(out or "{}")
    assert seen.pop("pid", child.pid) == child.pid, "a signal reaches the program, and nothing between"
    return child.returncode, seen, said


RUN = ["-P", "-m", "sparkwright.client.main", "run", "--"]


def serve(entry: Path, *words: str) -> list[str]:
    """Return the words of the program that runs `serve` in the environment of the release."""
    return [*RUN, str(entry.parent / NAME), "-P", "-m", "sparkwright", "serve", "--host", "0.0.0.0", "--port", "8888", *words]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], []),
        (["serve", "a-recipe", "--port", "80"], ["a-recipe", "--port", "80"]),
        (["health", "--json"], ["--health", "--json"]),
        (["bash", "-c", "x y"], None),
    ],
    ids=lambda words: " ".join(words[:3]) if words is not None else "",
)
def test_command_is_an_option_of_serve_or_a_shell_of_the_release(entry: Path, words: list[str], wanted: list[str] | None) -> None:
    status, seen, _ = ran(entry, *words)

    assert (status, seen["words"]) == (0, [*RUN, "/bin/bash", *words[1:]] if wanted is None else serve(entry, *wanted))


@pytest.mark.parametrize("word", ["server", "vllm", "", "--model", "serve;id", "$(id)", "ray-head"])
def test_an_unknown_command_is_refused_with_the_list(entry: Path, word: str) -> None:
    """Nothing is run for a word that is no command, and those that there are, are named."""
    status, seen, said = ran(entry, word)

    assert (status, seen) == (2, {})
    assert all(command in said for command in ("serve", "health", "bash"))


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(words=st.lists(TEXT, max_size=4), value=TEXT)
def test_arguments_and_variables_arrive_as_they_are(
    entry: Path, words: list[str], value: str
) -> None:
    """Whatever blanks, quotes, newlines and dollars they hold, nothing is split, expanded or run."""
    _, seen, _ = ran(entry, "serve", *words, GIVEN=value)

    assert seen["words"] == serve(entry, *words)
    assert seen["given"] == value
