"""The run of the README's lines on fresh Debian systems: what it reads, and how a shell runs it; without a Debian."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests import newcomer

ROOT = Path(__file__).parents[2]

#: Ends with 0 only where an interruption is ignored, as under `nohup … &` in a script.
IGNORES = "nox python3 -c 'import signal, sys; sys.exit(signal.getsignal(signal.SIGINT) != signal.SIG_IGN)'"


def test_the_readme_holds_what_a_newcomer_types() -> None:
    """Programs, nox, then the three sessions; the comments are none of it."""
    found = newcomer.lines(ROOT / "README.md")
    assert ([line.split(" ", 1)[0] for line in found[:2]], found[2:]) == (["sudo", "pipx"], [newcomer.LONG, newcomer.TESTS, "nox -s demo"])


@pytest.mark.parametrize(
    ("mode", "lines", "results"),
    [
        ("foreground", ("A=1", 'nox test "$A $SAID" = "1 two words"'), "00"), ("foreground", ("nox false", "true"), "10"),
        ("foreground", ("false", "true"), "1"), ("background", ("true", IGNORES, "nox sh -c 'exit 7'"), "007"),
        ("foreground", ("nox sh asked",), "0"), ("background", ("nox sh asked",), "0"),
    ],
)  # fmt: skip
def test_the_lines_share_one_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, lines: tuple[str, ...], results: str) -> None:
    """What a line sets the next one has; what fails ends it only before nox; tests that failed are asked once more."""
    monkeypatch.setattr(newcomer, "TESTS", "nox sh asked")
    newcomer.write(tmp_path / newcomer.CHECKOUT / "asked", 'case "$*" in *--last-failed*) exit 0;; *) exit 1;; esac\n')
    newcomer.write(tmp_path / "bin" / "nox", '#!/bin/sh\nexec "$@"\n', 0o755)
    script = newcomer.script(lines, {"SAID": "two words"}, mode, again=True)
    subprocess.run(["bash", "-c", script], env={"HOME": str(tmp_path), "PATH": f"{tmp_path}/bin:/usr/bin:/bin"}, check=False, timeout=60)

    assert "".join(row.split()[1] for row in (tmp_path / "results").read_text().splitlines()) == results


def test_folders_of_this_machine_stay_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pip's settings, those go along by which an index is reached."""
    lines = ("[global]", "index-url = https://a.example/", "extra-index-url = file:///srv/x https://b.example/", "find-links = /srv")
    newcomer.write(tmp_path / "pip.conf", "\n".join(lines))
    for name, value in (("PIP_CONFIG_FILE", str(tmp_path / "pip.conf")), ("PIP_FIND_LINKS", "/srv"), ("https_proxy", "http://proxy.example:1")):
        monkeypatch.setenv(name, value)

    settings, variables = newcomer.pip_settings(), newcomer.variables()
    assert (settings["index-url"], settings["extra-index-url"]) == ("https://a.example/", "https://b.example/")
    assert (variables["https_proxy"], {"find-links", "PIP_FIND_LINKS"} & {*settings, *variables}) == ("http://proxy.example:1", set())
