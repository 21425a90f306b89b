"""The run of the README's lines on fresh Debian systems: what it reads, how a shell runs it, and what the table says; without a Debian."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests import newcomer
from tests.newcomer import Line

ROOT = Path(__file__).parents[2]

#: Ends with 0 only where an interruption is ignored, as under `nohup … &` in a script.
IGNORES = "nox python3 -c 'import signal, sys; sys.exit(signal.getsignal(signal.SIGINT) != signal.SIG_IGN)'"


def followed(folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str, *texts: str, again: bool = False) -> list[Line]:
    """Return what became of *texts* in a shell whose `nox` runs its arguments."""
    (folder / newcomer.CHECKOUT).mkdir(exist_ok=True)
    (folder / "bin").mkdir(exist_ok=True)
    newcomer.write(folder / "bin" / "nox", '#!/bin/sh\nexec "$@"\n', 0o755)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("PATH", f"{folder}/bin:/usr/bin:/bin")
    told = [Line(text) for text in texts]
    newcomer.write(folder / "lines", newcomer.script(told, {"SAID": "two words"}, mode, again=again))
    newcomer.follow(["bash", str(folder / "lines")], folder / "log", told, 60)
    return told


def test_the_readme_holds_what_a_newcomer_types() -> None:
    """Programs, nox, then the three sessions; the comments are none of it."""
    found = newcomer.lines(ROOT / "README.md")

    assert [line.split(" ", 1)[0] for line in found[:2]] == ["sudo", "pipx"]
    assert found[2:] == [newcomer.LONG, newcomer.TESTS, "nox -s demo"]
    assert not any("#" in line for line in found)


def test_the_lines_share_one_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a line sets the next one has, and what a line says is its own."""
    lines = ("A=1", 'nox test "$A $SAID" = "1 two words"', "nox echo '== 3 passed, 1 skipped in 0.10s =='")
    told = followed(tmp_path, monkeypatch, "foreground", *lines)

    assert [line.result for line in told] == ["passed"] * 3
    assert [line.summaries for line in told] == [[], [], ["3 passed, 1 skipped"]]


def test_what_fails_is_told_and_ends_it_only_before_nox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that fails is followed by the next one; without the programs, nothing is."""
    assert [line.result for line in followed(tmp_path, monkeypatch, "foreground", "nox false", "true")] == ["FAILED, exit 1", "passed"]
    assert [line.result for line in followed(tmp_path, monkeypatch, "foreground", "false", "true")] == ["FAILED, exit 1", "not run"]


def test_in_the_background_an_interruption_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nox's lines are started by `nohup … &` from a script; their output is followed and their exit status taken."""
    told = followed(tmp_path, monkeypatch, "background", "true", IGNORES, "nox sh -c 'echo == 2 failed in 9.00s ==; exit 7'")

    assert [line.result for line in told] == ["passed", "passed", "FAILED, exit 7"]
    assert told[2].summaries == ["2 failed"]


@pytest.mark.parametrize("mode", newcomer.MODES)
def test_what_failed_is_asked_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Tests that fail are asked again where that was wanted; the line passes when the second answer is good."""
    monkeypatch.setattr(newcomer, "TESTS", "nox sh asked")
    answers = 'case "$*" in *--last-failed*) echo == 1 passed in 1.00s ==;; *) echo == 1 failed in 2.00s ==; exit 1;; esac\n'
    newcomer.write(tmp_path / newcomer.CHECKOUT / "asked", answers)

    told = followed(tmp_path, monkeypatch, mode, "nox sh asked", again=True)

    assert (told[0].result, told[0].summaries) == ("passed", ["1 failed", "1 passed"])


def test_what_takes_too_long_is_ended(tmp_path: Path) -> None:
    """A line that hangs is named, with the seconds that it had."""
    told = [Line("nox sleep")]
    newcomer.follow(["bash", "-c", "echo @newcomer begin 0; exec sleep 100"], tmp_path / "log", told, 1)

    assert told[0].result == "did not end (all lines had 1 s)"


def test_folders_of_this_machine_stay_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pip's settings, those go along by which an index is reached."""
    lines = ("[global]", "index-url = https://a.example/", "extra-index-url = file:///srv/x https://b.example/", "find-links = /srv")
    newcomer.write(tmp_path / "pip.conf", "\n".join(lines))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_FIND_LINKS", "/srv")
    monkeypatch.setenv("https_proxy", "http://proxy.example:1")

    settings = newcomer.pip_settings()

    assert (settings["index-url"], settings["extra-index-url"]) == ("https://a.example/", "https://b.example/")
    assert "find-links" not in settings
    assert newcomer.variables()["https_proxy"] == "http://proxy.example:1"
    assert "PIP_FIND_LINKS" not in newcomer.variables()


def test_a_root_is_not_removed_through_a_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where something is mounted below a root, it is left as it is; /dev is such a folder on every machine."""
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("something was run"))

    with pytest.raises(newcomer.CannotRun, match="mounted"):
        newcomer.remove(Path("/dev"))
