"""``sparkwright gate`` as people and programs meet it: what nobody named did not run, what is wrong stops it, and verdicts are kept."""

from __future__ import annotations

import json
import socket
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkwright.cli import gateoptions
from sparkwright.core.digest import sha256_file
from sparkwright.gates import ladder
from sparkwright.gates.athand import model_digest
from sparkwright.gates.ladder import RUNGS

if TYPE_CHECKING:
    from tests.unit.conftest import Cli

ROOT = Path(__file__).parents[2]


@pytest.fixture(name="words")
def _words(tmp_path: Path) -> list[str]:
    """Return what a command line says to work on this checkout with a store and an output folder of its own."""
    return ["--root", str(ROOT), "--cache-dir", str(tmp_path / "cache"), "--output", str(tmp_path / "out"), "--json"]


@pytest.fixture(name="wheel")
def _wheel(tmp_path: Path) -> Path:
    """Return a wheel with next to nothing in it."""
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny.py", "")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture(name="nobody")
def _nobody() -> str:
    """Return the URL of a port on which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def states(document: dict[str, Any]) -> dict[str, str]:
    return {verdict["rung"]: verdict["state"] for verdict in document["ladder"]["verdicts"]}


def test_the_options_name_the_rungs() -> None:
    """The parser, which loads nothing heavy, knows the rungs of the ladder."""
    assert tuple(RUNGS) == gateoptions.RUNGS


def test_what_nobody_named_did_not_run(cli: Cli, words: list[str]) -> None:
    """Rungs without their server are listed with the option that names it, and are no pass."""
    done = cli("gate", "--rung", "G3", "--rung", "G4", "--rung", "G5", "--rung", "G6", "--rung", "G7", *words)
    document = json.loads(done.stdout)

    assert done.returncode == 1
    assert set(states(document).values()) == {"not-run"}
    assert document["ladder"]["state"] == "not-run"
    assert document["error"]["reference"] == "gate-not-run"
    assert all("--" in check["says"] for verdict in document["ladder"]["verdicts"] for check in verdict["checks"])


def test_a_server_that_is_not_there_stops_the_ladder(cli: Cli, words: list[str], nobody: str) -> None:
    """The rung is invalid, not failed: nothing is known of the wheel; the next rung is not tried."""
    done = cli("gate", "--server", nobody, "--rung", "G4", "--rung", "G7", *words)
    document = json.loads(done.stdout)

    assert done.returncode == 1
    assert states(document) == {"G4": "invalid", "G7": "not-run"}
    assert document["error"]["reference"] == "measurement-invalid"
    assert document["ladder"]["verdicts"][0]["checks"][0]["reference"] == "server-unreachable"


def test_verdicts_are_kept_under_the_wheels_name(cli: Cli, words: list[str], wheel: Path, nobody: str, tmp_path: Path) -> None:
    """The file is bound to the wheel's bytes and holds what was printed."""
    done = cli("gate", str(wheel), "--server", nobody, "--rung", "G4", *words)
    kept = (tmp_path / "out" / "tiny-1.0-py3-none-any.verdicts.json").read_bytes()

    assert json.loads(kept) == json.loads(done.stdout)["ladder"]
    made = ladder.read(kept)
    assert made.wheel is not None
    assert {made.wheel.sha256, *(verdict.wheel for verdict in made.verdicts)} == {sha256_file(wheel)}
    assert all(len(verdict.policy) == 64 for verdict in made.verdicts)
    assert str(tmp_path) not in kept.decode()


def test_people_see_a_table_and_the_reason(cli: Cli, words: list[str], nobody: str) -> None:
    """Without --json the checks stand in a table, and the error says what to do."""
    done = cli("gate", "--server", nobody, "--rung", "G4", *words[:-1])

    assert "G4 the words it says: invalid" in done.stdout
    assert "invalid (server-unreachable)" in done.stdout
    assert "error: measurement-invalid: " in done.stderr


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--serve", "model"], "--python"),
        (["--serve", "model", "--python", "python", "--server", "http://127.0.0.1:1"], "one of them"),
        (["--server", "http://127.0.0.1:1", "--server-log", "log", "--recipe", "no-such"], "nvfp4-marlin"),
        (["--server", "http://127.0.0.1:1", "--profile", "no-such"], "default"),
        (["--server", "http://127.0.0.1:1", "--against", "folder", "--task", "no-such"], "gsm8k"),
        (["--variable", "VLLM_X"], "NAME=VALUE"),
    ],
)
def test_what_does_not_go_together_is_wrong_usage(cli: Cli, words: list[str], options: list[str], names: str) -> None:
    """Nothing is started, and the message names what there is."""
    rungs = [word for name in ("G3", "G4", "G6") for word in ("--rung", name)]
    done = cli("gate", *rungs, *options, *words)

    assert done.returncode == 2
    assert names in done.stderr


def test_a_models_digest_follows_its_files(tmp_path: Path) -> None:
    """A renamed, resized or edited file is another model."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"0" * 100)
    seen = {model_digest(model)}
    (model / "config.json").write_text("{} ")
    seen.add(model_digest(model))
    (model / "model.safetensors").write_bytes(b"0" * 101)
    seen.add(model_digest(model))
    (model / "model.safetensors").rename(model / "other.safetensors")
    seen.add(model_digest(model))

    assert len(seen) == 4
