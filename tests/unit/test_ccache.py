"""The compiler cache: when ccache is used, and with which settings."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.refusals import refusal

from sparkwright.builder import ninja
from sparkwright.core import config
from sparkwright.core.config import CompilerCache

if TYPE_CHECKING:
    from tests.unit.conftest import Mini

OWN = {"CCACHE_DIR": "/mine", "CCACHE_DISABLE": "1", "PATH": "/bin"}


def test_without_ccache_a_build_works_and_says_what_to_install(
    mini: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert ninja.cache_variables(mini.context(), OWN, None) == {"PATH": "/bin"}
    assert "apt-get install ccache" in capsys.readouterr().err


@pytest.mark.skipif(not shutil.which("ccache"), reason="no ccache (apt-get install ccache)")
def test_only_the_remote_storage_of_the_user_reaches_a_build(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ninja.REMOTE, "redis://hidden@cache.example")
    variables = ninja.cache_variables(mini.context(), OWN, None)

    assert variables.pop(ninja.REMOTE) == "redis://hidden@cache.example"
    assert "hidden" not in str(variables)
    assert variables["CCACHE_DIR"] == str(mini.context().store.root / "ccache")
    assert "CCACHE_DISABLE" not in variables


def test_the_users_file_configures_the_cache(mini: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("compiler_cache: {tool: none, size: 20G}\n")
    monkeypatch.setenv("SPARKWRIGHT_CONFIG", str(file))
    assert config.config().compiler_cache == CompilerCache("none", "20G")
    assert ninja.cache_variables(mini.context(), OWN, None) == {"PATH": "/bin"}
    file.write_text("compiler_cache: {tool: distcc}\n")
    with refusal("file-invalid"):
        config.config()
