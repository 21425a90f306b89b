"""The compiler cache: which ccache is used, and results shared between machines."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.refusals import refusal

from sparkwright.builder.environment import ccache
from sparkwright.core import config
from sparkwright.core.config import CompilerCache
from sparkwright.forks.context import RunContext

if TYPE_CHECKING:
    from tests.unit.conftest import Mini

@pytest.fixture(name="session")
def _session(mini: Mini) -> RunContext:
    return mini.session()


def test_without_ccache_a_build_works_and_says_what_to_install(
    session: RunContext,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is cached then; who asked for ccache gets an error."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ccache.of(session, CompilerCache(), None) is None
    assert "apt-get install ccache" in capsys.readouterr().err
    with refusal("tool-missing", match="ccache"):
        ccache.of(session, CompilerCache(tool="ccache"), None)
    assert ccache.of(session, CompilerCache(tool="none"), None) is None


def test_the_users_own_cache_settings_do_not_reach_a_build() -> None:
    """Where results come from is what sparkwright says, and nothing else."""
    own = {"CCACHE_DIR": "/mine", "CCACHE_DISABLE": "1", "SCCACHE_BUCKET": "b", "PATH": "/bin"}

    assert ccache.without_settings(own) == {"PATH": "/bin"}


def test_the_users_file_configures_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tool, remote and size; anything else is a typing error and refused."""
    file = tmp_path / "config.yaml"
    file.write_text("compiler_cache: {remote: 'redis://cache.example', size: 20G}\n")
    monkeypatch.setenv("SPARKWRIGHT_CONFIG", str(file))
    assert config.config().compiler_cache == CompilerCache("auto", "redis://cache.example", "20G")
    file.write_text("compiler_cache: {tool: distcc}\n")
    with refusal("file-invalid"):
        config.config()


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:word@cache.example", "https://cache.example", "s3://bucket/prefix", "redis:",
        "http://cache.example|read-only", "file:///cache", "cache.example", "redis://[::1",
    ],
)  # fmt: skip
def test_an_address_that_cannot_be_used_is_refused(url: str) -> None:
    """An address in a file holds no password; ccache speaks neither HTTPS nor S3."""
    with refusal("file-invalid", match="compiler_cache"):
        ccache.remote_storage(url, "")


def test_the_password_is_in_no_other_setting(
    session: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes from the environment, and goes to ccache by one variable."""
    if not shutil.which("ccache"):
        pytest.skip("no ccache")
    monkeypatch.setenv(ccache.PASSWORD, "hidden")
    cache = ccache.of(session, CompilerCache(remote="redis://cache.example"), None)

    assert cache is not None
    assert cache.remote
    settings = dict(cache.environment)
    assert settings.pop("CCACHE_REMOTE_STORAGE") == "redis://hidden@cache.example"
    assert "hidden" not in str(settings)
