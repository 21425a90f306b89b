"""The shared compiler cache: real ccache, a real Redis server, a real web server, and the door between them."""

from __future__ import annotations

import datetime
import http.server
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.refusals import refusal

from sparkwright.builder.environment import remote_cache
from sparkwright.builder.environment.ccache import Cache
from sparkwright.builder.environment.remote_cache import PASSWORD, Door, Shelf, Signer

if TYPE_CHECKING:
    from tests.conftest import Redis

needs_redis = pytest.mark.skipif(not shutil.which("redis-server"), reason="no redis-server (apt-get install redis-server)")
needs_ccache = pytest.mark.skipif(not (shutil.which("ccache") and shutil.which("cc")), reason="no ccache (apt-get install ccache)")


class Bucket(http.server.BaseHTTPRequestHandler):
    """Takes PUT and gives GET, as S3 and plain caches do; `asked` holds the requests."""

    held: dict[str, bytes]
    asked: list[tuple[str, str, str]]

    def do_GET(self) -> None:
        self._note()
        data = self.held.get(self.path)
        self.send_response(200 if data is not None else 404)
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()
        self.wfile.write(data or b"")

    def do_PUT(self) -> None:
        self._note()
        self.held[self.path] = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _note(self) -> None:
        self.asked.append((self.command, self.path, self.headers.get("Authorization", "")))

    def log_message(self, *_: object) -> None:
        """Stay silent."""


@pytest.fixture(name="bucket")
def _bucket() -> Iterator[tuple[str, type[Bucket]]]:
    handler = type("OneBucket", (Bucket,), {"held": {}, "asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}", handler
        server.shutdown()


def compiled(folder: Path, shelf: Shelf) -> str:
    """Compile a unit with an empty ccache of its own behind a door to *shelf*; return what its statistics say of the result."""
    launch, cache = folder / "launch", folder / "ccache"
    launch.mkdir(parents=True)
    (folder / "a.c").write_text("int a(void) { return 1; }\n")
    own = {"CCACHE_DIR": str(cache), "CCACHE_CONFIGPATH": os.devnull, "CCACHE_DEPEND": "true", "CCACHE_BASEDIR": str(folder)}
    with Cache(shutil.which("ccache") or "", own, shelf).door(launch, launch) as door:
        subprocess.run(
            ["ccache", "cc", "-MD", "-MF", "a.d", "-c", f"{folder}/a.c", "-o", "a.o"], cwd=folder, check=True,
            env={"PATH": os.environ["PATH"], **own, **door, "CCACHE_LOGFILE": str(folder / "log")},
        )  # fmt: skip
    assert (folder / "a.o").exists()
    results = [line.rpartition("Result: ")[2].strip() for line in (folder / "log").read_text().splitlines() if "Result: " in line]
    return "hit" if "direct_cache_hit" in results else "miss"


@needs_ccache
@needs_redis
def test_what_one_machine_compiled_another_takes_from_redis(tmp_path: Path, redis: Redis) -> None:
    """The second checkout has an empty cache of its own, and compiles nothing."""
    with redis() as address:
        assert compiled(tmp_path / "one", remote_cache.shelf(address)) == "miss"
        assert compiled(tmp_path / "another", remote_cache.shelf(address)) == "hit"


@needs_redis
def test_the_password_comes_from_the_environment(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that wants one gets it; without it, it answers with an error."""
    with redis("--requirepass", "secret word") as address:
        with pytest.raises(OSError, match="NOAUTH"):
            remote_cache.shelf(address).get("key")
        monkeypatch.setenv(PASSWORD, "secret word")
        shelf = remote_cache.shelf(f"{address}/1")
        shelf.put("key", b"value\r\n\0")

        assert shelf.get("key") == b"value\r\n\0"
        assert remote_cache.shelf(address).get("key") is None, "another database"


@needs_ccache
def test_what_one_machine_compiled_another_takes_from_s3(
    tmp_path: Path, bucket: tuple[str, type[Bucket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results lie in the bucket below the prefix, and every request is signed."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET")
    url = f"s3://store/spark?endpoint=http://{bucket[0]}&region=here"
    assert compiled(tmp_path / "one", remote_cache.shelf(url)) == "miss"
    assert compiled(tmp_path / "another", remote_cache.shelf(url)) == "hit"

    assert all(path.startswith("/store/spark/") for path in bucket[1].held)
    assert all("Credential=KEY/" in authorization and "/here/s3/" in authorization for *_, authorization in bucket[1].asked)
    assert "SECRET" not in str(bucket[1].asked)


@needs_ccache
def test_what_one_machine_compiled_another_takes_from_a_web_server(tmp_path: Path, bucket: tuple[str, type[Bucket]]) -> None:
    """Any server that takes PUT and GET will do."""
    url = f"http://{bucket[0]}/cache"
    assert [compiled(tmp_path / name, remote_cache.shelf(url)) for name in ("one", "another")] == ["miss", "hit"]


def test_a_request_is_signed_as_the_documentation_of_s3_has_it() -> None:
    """The example "GET object" of AWS: same key, date and headers, same signature."""
    signer = Signer(
        "us-east-1", {"AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE", "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"}
    )
    headers = signer.headers(
        "GET", "https://examplebucket.s3.amazonaws.com/test.txt", b"", datetime.datetime(2013, 5, 24, tzinfo=datetime.UTC),
        {"Range": "bytes=0-9"},
    )  # fmt: skip

    assert headers["authorization"].endswith("Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41")


@needs_ccache
def test_a_build_does_not_depend_on_the_shared_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server that is not there makes every question a miss, and one warning."""
    shelf = remote_cache.shelf("redis://127.0.0.1:9")
    assert compiled(tmp_path / "one", shelf) == "miss"
    (tmp_path / "door").mkdir()
    with Door(tmp_path / "door", shelf) as door:
        assert [door._kept("key") for _ in range(5)] == [None] * 5

    assert capsys.readouterr().err.count("the shared compiler cache does not answer") >= 1


@pytest.mark.parametrize(
    "url", ["redis://user:secret@host", "https://user:secret@host/x", "ftp://host", "redis://", "s3://", "s3://b?colour=red", "host:6379"]
)
def test_an_address_that_cannot_be_used_is_refused(url: str) -> None:
    """Secrets are not for files, and what is no address is not guessed at; the secret is not repeated."""
    with refusal("file-invalid") as raised:
        remote_cache.shelf(url)

    assert "secret" not in raised.value.what


@pytest.mark.parametrize(
    "said", [b"nonsense\r\n", b"*0\r\n", b"*99\r\n", b"*1\r\n$-5\r\n", b"*1\r\n$99999999999\r\n", b"*2\r\n$3\r\nGET\r\n"]
)
def test_a_visitor_that_speaks_something_else_is_shown_out(tmp_path: Path, said: bytes) -> None:
    """The door closes that connection, and stays open for the next."""

    class Nothing:
        def get(self, key: str) -> bytes | None:
            return key.encode()

        def put(self, key: str, value: bytes) -> None:
            raise AssertionError

    with Door(tmp_path, Nothing()):
        for words, answer in ((said, b""), (b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n", b"$1\r\nk\r\n")):
            with socket.socket(socket.AF_UNIX) as link:
                link.settimeout(60)
                place = os.open(tmp_path, os.O_RDONLY)
                link.connect(f"/proc/self/fd/{place}/cache")
                os.close(place)
                link.sendall(words)
                link.shutdown(socket.SHUT_WR)
                assert link.recv(100) == answer
