"""The compiler cache: which ccache is used, and results shared between machines."""

from __future__ import annotations

import http.server
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.refusals import refusal

from sparkwright.builder.environment import ccache
from sparkwright.core import config
from sparkwright.core.config import CompilerCache
from sparkwright.forks.context import RunContext

if TYPE_CHECKING:
    from tests.conftest import Redis
    from tests.unit.conftest import Mini

needs_redis = pytest.mark.skipif(
    not shutil.which("redis-server"), reason="no redis-server (apt-get install redis-server)"
)
needs_ccache = pytest.mark.skipif(
    not (shutil.which("ccache") and shutil.which("cc")), reason="no ccache (apt-get install ccache)"
)


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


def test_an_old_ccache_is_not_used(
    session: RunContext,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ubuntu 22.04 has 4.5, which would preprocess every unit before it looks."""
    program = tmp_path / "ccache"
    program.write_text("#!/bin/sh\necho ccache version 4.5.1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    assert ccache.of(session, CompilerCache(), None) is None
    assert "4.5 is too old" in capsys.readouterr().err


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


class WebServer(http.server.BaseHTTPRequestHandler):
    """Takes PUT and gives GET from one user."""

    held: dict[str, bytes]
    authorizations: list[str]

    def do_GET(self) -> None:
        self._answer(self.held.get(self.path))

    def do_PUT(self) -> None:
        self.held[self.path] = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self._answer(b"")

    def _answer(self, data: bytes | None) -> None:
        self.authorizations.append(self.headers.get("Authorization", ""))
        self.send_response(200 if data is not None else 404)
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()
        self.wfile.write(data or b"")

    def log_message(self, *_: object) -> None:
        """Stay silent."""


@pytest.fixture(name="server")
def _server() -> Iterator[tuple[str, type[WebServer]]]:
    handler = type("OneServer", (WebServer,), {"held": {}, "authorizations": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}", handler
        server.shutdown()


def compiled(folder: Path, remote: str) -> str:
    """Compile a unit with an empty ccache of its own; return ``hit`` or ``miss``."""
    folder.mkdir()
    (folder / "a.c").write_text("int a(void) { return 1; }\n")
    settings = {
        "CCACHE_DIR": str(folder / "ccache"),
        "CCACHE_CONFIGPATH": os.devnull,
        "CCACHE_DEPEND": "true",
        "CCACHE_BASEDIR": str(folder),
        "CCACHE_STATSLOG": str(folder / "statistics"),
        "CCACHE_REMOTE_STORAGE": remote,
    }
    done = subprocess.run(
        ["ccache", "cc", "-MD", "-MF", "a.d", "-c", f"{folder}/a.c", "-o", "a.o"],
        cwd=folder, check=True, capture_output=True, env={"PATH": os.environ["PATH"], **settings},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (b"", b"")
    assert (folder / "a.o").exists()
    return "hit" if "direct_cache_hit" in (folder / "statistics").read_text() else "miss"


@needs_ccache
@needs_redis
@pytest.mark.parametrize("password", ["", "sec:ret/@word"])
def test_machines_share_results_by_redis(tmp_path: Path, redis: Redis, password: str) -> None:
    """The second checkout has an empty cache of its own, and compiles nothing."""
    with redis(*(["--requirepass", password] if password else [])) as address:
        remote = ccache.remote_storage(address, password)
        results = [compiled(tmp_path / name, remote) for name in ("one", "other")]
        stranger = compiled(tmp_path / "stranger", address) if password else "miss"

    assert (results, stranger) == (["miss", "hit"], "miss")


@needs_ccache
def test_machines_share_results_by_a_web_server(
    tmp_path: Path, server: tuple[str, type[WebServer]]
) -> None:
    """Any server that takes PUT and GET will do; user and password are sent as HTTP has it."""
    remote = ccache.remote_storage(f"http://ci@{server[0]}/cache", "secret")
    assert [compiled(tmp_path / name, remote) for name in ("one", "other")] == ["miss", "hit"]
    assert set(server[1].authorizations) == {"Basic Y2k6c2VjcmV0"}


@needs_ccache
def test_a_build_does_not_depend_on_the_remote_cache(tmp_path: Path) -> None:
    """Nothing listens there."""
    assert (
        compiled(tmp_path / "one", ccache.remote_storage("redis://127.0.0.1:9", "word")) == "miss"
    )


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
