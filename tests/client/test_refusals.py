"""Locks, downloads, folders and disks that are wrong in one way each, and how an installation refuses them without a trace."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from tests.client.world import User, World, wheel
from tests.support import mounts, refused

from sparkwright.client import downloads
from sparkwright.core import http

ONE, TWO = "2026.11.1", "2026.11.2"
HTML = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head><body>Please sign in.</body></html>\n"
EXTRA = '[[packages]]\nname = "more"\nversion = "1"\n'


Record = Callable[[str, object], None]


def refusal_of(user: User, record_property: Record, *words: str | Path) -> str:
    """Install, which has to fail without a change, and return the reference."""
    before = user.listing()
    outcome = user.run("install", *words)
    reference, touched = refused.record(record_property, outcome.reference, before, user.listing())
    assert (outcome.code > 0, touched) == (True, "nothing"), outcome.said
    return reference


LOCKS: dict[str, tuple[str, Callable[[str], str]]] = {
    "no TOML": ("lock-invalid", lambda text: HTML.decode()),
    "no lock": ("lock-invalid", lambda text: "a = 1\n"),
    "a folder of this machine": (
        "lock-invalid",
        lambda text: text + EXTRA + 'directory = { path = "/etc" }\n',
    ),
    "a file of this machine": (
        "lock-invalid",
        lambda text: text.replace("http://127", "file:///127"),
    ),
    "a path of this machine": (
        "lock-invalid",
        lambda text: text.replace('url = "http', 'path = "http'),
    ),
    "an archive": (
        "lock-invalid",
        lambda text: (
            text
            + EXTRA
            + 'archive = { url = "https://a.example/x.zip", hashes = { sha256 = "" } }\n'
        ),
    ),
    "a repository": (
        "lock-invalid",
        lambda text: (
            text + EXTRA + 'vcs = { type = "git", url = "https://a.example/x", commit-id = "0" }\n'
        ),
    ),
    "a source distribution": (
        "lock-invalid",
        lambda text: (
            text
            + EXTRA
            + 'sdist = { name = "more-1.tar.gz", url = "https://a.example/more-1.tar.gz", hashes = { sha256 = "" } }\n'
        ),
    ),
    "nothing to install": ("lock-invalid", lambda text: text + EXTRA),
    "no hash": ("lock-invalid", lambda text: text.replace("sha256 =", "md5 =")),
    "a short hash": ("lock-invalid", lambda text: text.replace('sha256 = "', 'sha256 = "0')),
    "credentials": (
        "lock-invalid",
        lambda text: text.replace("http://127", "http://user:word@127"),
    ),
    "a name that climbs": (
        "lock-invalid",
        lambda text: text.replace('name = "other-', 'name = "../other-'),
    ),
    "a relative address that climbs": (
        "lock-invalid",
        lambda text: text.replace('url = "http://127', 'url = "../../127'),
    ),
    "extras": ("lock-invalid", lambda text: 'extras = ["all"]\n' + text),
    "another version of the format": (
        "lock-invalid",
        lambda text: text.replace('lock-version = "1.0"', 'lock-version = "2.0"'),
    ),
    "a name with a blank": (
        "lock-invalid",
        lambda text: text.replace('name = "other-', 'name = "an other-'),
    ),
    "another project's file": (
        "lock-invalid",
        lambda text: text.replace('name = "other-', 'name = "demo-'),
    ),
    "another version's file": (
        "lock-invalid",
        lambda text: text.replace('name = "other-2', 'name = "other-3'),
    ),
    "a source beside the wheels": (
        "lock-invalid",
        lambda text: (
            text
            + 'sdist = { name = "other-2.0.tar.gz", url = "https://a.example/o.tar.gz", hashes = { sha256 = "" } }\n'
        ),
    ),
    "another kind of address": ("lock-invalid", lambda text: text.replace("http://", "ftp://")),
    "another host without a scheme": (
        "lock-invalid",
        lambda text: text.replace("http://", "//"),
    ),
    "no version": ("lock-invalid", lambda text: text.replace('version = "2.0"\n', "")),
    "a negative size": ("lock-invalid", lambda text: text.replace("size = ", "size = -")),
    "nested without end": ("lock-invalid", lambda text: text + "a = " + "[" * 100_000),
    "another version": ("set-mixed", lambda text: text.replace("2.0", "2.1")),
    "without a wheel of ours": (
        "set-mixed",
        lambda text: text[: text.index("[[packages]]")] + text[text.rindex("[[packages]]") :],
    ),
    "another wheel of ours": (
        "set-mixed",
        lambda text: text.replace("demo-1.1-py3", "demo-1.1-1-py3"),
    ),
    "one more package": (
        "set-mixed",
        lambda text: (
            text
            + EXTRA
            + f'wheels = [{{ url = "https://a.example/more-1-py3-none-any.whl", hashes = {{ sha256 = "{"0" * 64}" }} }}]\n'
        ),
    ),
    "two wheels of a project": (
        "release-unknown",
        lambda text: text + text[text.rindex("[[packages]]") :],
    ),
    "another Python": (
        "release-unknown",
        lambda text: text.replace("py3-none-any", "cp39-cp39-manylinux_2_28_aarch64"),
    ),
    "another machine": (
        "release-unknown",
        lambda text: "environments = [\"platform_machine == 'riscv64'\"]\n" + text,
    ),
}


@pytest.mark.parametrize("case", LOCKS)
def test_hostile_lock_is_refused(settled: User, case: str, record_property: Record) -> None:
    """A lock names wheels by hash at an address, of exactly the release's versions, for this machine."""
    expected, change = LOCKS[case]
    world, demo, other = settled.world, wheel("demo", "1.1"), wheel("other", "2.0")
    text = world.lock([demo], [other]).decode()
    assert change(text) != text
    world.publish(world.next_name(), [demo], [other], lock=change(text).encode())

    assert refusal_of(settled, record_property) == expected


def answer(
    body: bytes, status: int = 200, length: int | None = None, **headers: str
) -> Callable[[BaseHTTPRequestHandler], None]:
    """Return what answers with *body*."""

    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        handler.end_headers()
        handler.wfile.write(body)

    return reply


def endless(handler: BaseHTTPRequestHandler) -> None:
    """Answer without end."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        handler.wfile.write(b" " * (1 << 16))


def dripping(handler: BaseHTTPRequestHandler) -> None:
    """Answer a byte at a time."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        handler.wfile.write(b" ")
        time.sleep(0.05)


DOWNLOADS: dict[str, tuple[str, Callable[[BaseHTTPRequestHandler], object]]] = {
    "a page in its place": ("download-invalid", answer(HTML)),
    "other bytes": ("download-invalid", answer(b"x" * len(wheel("demo", "1.1").data))),
    "cut off": ("download-invalid", answer(b"PK", length=len(wheel("demo", "1.1").data))),
    "endless": ("download-invalid", endless),
    "dripping": ("index-unreachable", dripping),
    "missing": ("index-damaged", answer(b"", 404)),
    "forbidden": ("index-unreachable", answer(b"", 403)),
    "a file, by a redirect": ("download-invalid", answer(b"", 302, Location="file:///etc/passwd")),
    "a loop of redirects": (
        "download-invalid",
        lambda handler: answer(b"", 302, Location=handler.path)(handler),
    ),
    "a fault of the server": ("index-unreachable", answer(b"", 503)),
}


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("case", DOWNLOADS)
def test_bad_download_is_refused(
    world: World,
    case: str,
    ours: bool,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Record,
) -> None:
    """Other bytes are not kept, whoever serves them; nothing waits for ever."""
    monkeypatch.setattr(http, "STALL", 0.5)
    expected, fault = DOWNLOADS[case]
    bad = wheel("demo", "1.1")
    world.publish(ONE, [wheel("demo", "1.0")])
    user = world.user()
    user.install()
    world.publish(TWO, [bad if ours else wheel("more")], [] if ours else [bad])
    world.faults[
        f"files/{bad.sha256}/{bad.name}" if ours else f"others/{bad.sha256[:8]}/{bad.name}"
    ] = fault

    began = time.monotonic()
    assert refusal_of(user, record_property) == expected
    assert time.monotonic() - began < 30
    world.faults.clear()
    assert user.run("install").code == 0


def test_all_downloads_together_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that each bring a little now and then hold up nothing for ever."""
    monkeypatch.setattr(downloads, "SECONDS", 0.5)

    def slow(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            handler.wfile.write(bytes(http.CHUNK))
            time.sleep(0.2)

    demo = wheel("demo")
    world.publish(
        ONE,
        [wheel("other")],
        [demo],
        lock=world.lock([wheel("other")], [demo]).replace(
            f"size = {len(demo.data)}, ".encode(), b""
        ),
    )
    world.faults[f"others/{demo.sha256[:8]}/{demo.name}"] = slow
    user = world.user()
    began = time.monotonic()

    assert user.install().reference == "index-unreachable"
    assert time.monotonic() - began < 10


def test_download_is_resumed(world: World) -> None:
    """What arrived is kept, and only the rest is asked for again."""
    demo = wheel("demo", "1.1", {"demo/data.bin": os.urandom(300_000)})
    world.publish(ONE, [demo])
    user, ranges = world.user(), list[str]()

    def serve(handler: BaseHTTPRequestHandler) -> None:
        ranges.append(handler.headers.get("Range", ""))
        start = int(ranges[-1][6:-1] or 0)
        total = len(demo.data)
        extra = {"Content-Range": f"bytes {start}-{total - 1}/{total}"} if start else {}
        answer(demo.data[start : start + 120_000], 206 if start else 200, total - start, **extra)(
            handler
        )

    world.faults[f"files/{demo.sha256}/{demo.name}"] = serve
    assert user.install().code == 0
    assert ranges == ["", "bytes=120000-", "bytes=240000-"]


def test_files_of_the_cache_are_hashed_again(world: World) -> None:
    """A wheel that was changed in the cache, or came there by a link, is fetched anew; what the link led to stays."""
    world.publish(ONE, [wheel("demo")], [wheel("other", "2.0")])
    user, secret = world.user(), world.folder / "secret"
    secret.write_text("a secret")
    user.install()
    user.run("uninstall")
    first, second = sorted(user.cache.rglob("*.whl"))
    first.write_bytes(first.read_bytes()[::-1])
    second.unlink()
    second.symlink_to(secret)

    assert user.run("install").code == 0
    assert user.run("doctor", "--deep").code == 0
    assert secret.read_text() == "a secret"
    assert not second.is_symlink()


@pytest.mark.parametrize("link", ["symbolic", "hard"])
def test_planted_links_are_not_written_through(world: World, link: str) -> None:
    """A link where a partial download, a record or a folder belongs is replaced or refused."""
    demo = wheel("demo")
    world.publish(ONE, [demo])
    user, secret = world.user(), world.folder / "secret"
    secret.write_text("a secret")
    plant = os.symlink if link == "symbolic" else os.link
    partial = user.cache / "wheels" / demo.sha256 / f"{demo.name}.part"
    partial.parent.mkdir(parents=True)
    user.prefix.mkdir()
    log = user.cache / "logs" / "install.log"
    log.parent.mkdir()
    for path in (partial, user.prefix / "history.json", user.prefix / ".current", log):
        plant(secret, path)
    (user.prefix / "history.json").unlink()
    plant(secret, user.prefix / ".history.json")

    assert user.install().code == 0
    assert secret.read_text() == "a secret"


@pytest.mark.parametrize(
    "place",
    [
        "cache/sparkwright/client/wheels",
        "cache/sparkwright/client/uv",
        "prefix/releases",
        "prefix/trust",
        f"prefix/releases/{ONE}",
    ],
)
def test_a_link_in_the_place_of_a_folder_is_refused(
    world: World, place: str, record_property: Record
) -> None:
    """Nothing is written into a folder that somebody else put there."""
    world.publish(ONE, [wheel("demo")])
    user, elsewhere = world.user(), world.folder / "elsewhere"
    elsewhere.mkdir()
    (user.folder / place).parent.mkdir(parents=True, exist_ok=True)
    (user.folder / place).symlink_to(elsewhere)

    reference = refusal_of(user, record_property, "--trust", world.fingerprint)
    assert reference in ("cache-unusable", "environment-unusable")
    assert list(elsewhere.iterdir()) == []


def test_a_folder_of_everybody_is_refused(world: World, record_property: Record) -> None:
    """Whoever can write there could change what is installed."""
    world.publish(ONE, [wheel("demo")])
    user = world.user()
    user.prefix.mkdir()
    user.prefix.chmod(0o777)

    assert refusal_of(user, record_property, "--trust", world.fingerprint) == "cache-unusable"


@pytest.mark.parametrize("place", ["cache", "prefix"])
def test_full_disk_is_refused_before_anything_is_created(
    world: World, place: str, record_property: Record
) -> None:
    """The room for the downloads and for what they unpack to is compared with what is free."""
    world.publish(ONE, [wheel("demo", files={"demo/data.bin": os.urandom(3_000_000)})])
    user = world.user()
    folder = user.folder / place
    folder.mkdir()
    command = shlex.join(
        [sys.executable, "-m", "sparkwright.client.main", "install", "--trust", world.fingerprint]
    )
    script = f"mount -t tmpfs -o size=2m,mode=755 none {shlex.quote(str(folder))} && {command}; status=$?; ls -A {folder}/releases; exit $status"
    environment = {**user.environment, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*mounts.mounting_shell(), script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert "disk-full" in done.stderr
    after = dict.fromkeys(done.stdout.splitlines(), "folder")
    assert refused.record(record_property, "disk-full", {}, after)[1] == "nothing"


def test_uv_that_fails_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, record_property: Record
) -> None:
    """An environment that could not be made is removed, and the one before stays current."""
    from sparkwright.client import environment

    world.publish(ONE, [wheel("demo")])
    user = world.user()
    user.install()
    world.publish(TWO, [wheel("demo", "1.1")])
    program = tmp_path / "uv"
    program.write_text(
        '#!/bin/sh\ncase "$1" in venv) mkdir -p "$7/bin";; *) echo "no room in /dev/null"; exit 2;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(environment, "find_uv_bin", lambda: str(program))

    assert refusal_of(user, record_property) == "command-failed"


def test_what_others_put_into_the_prefix_stays(world: World) -> None:
    """Only what an installation began is removed; a folder that is in the way is refused."""
    world.publish(ONE, [wheel("demo")])
    user = world.user()
    for name in ("notes", ONE):
        (user.prefix / "releases" / name).mkdir(parents=True)
        (user.prefix / "releases" / name / "mine.txt").write_text("mine")

    assert user.install().reference == "environment-unusable"
    (user.prefix / "releases" / ONE / "mine.txt").unlink()
    (user.prefix / "releases" / ONE).rmdir()
    assert user.run("install").code == 0
    assert user.run("uninstall").code == 0
    assert (user.prefix / "releases/notes/mine.txt").read_text() == "mine"


def _moved(user: User) -> None:
    user.prefix = user.prefix.rename(user.folder / "elsewhere")
    user.environment["SPARKWRIGHT_PREFIX"] = str(user.prefix)


def _copied(user: User) -> None:
    releases = user.prefix / "releases"
    shutil.copytree(releases / ONE, releases / "mine", symlinks=True)


def _linked(user: User) -> None:
    (user.prefix / "releases" / "mine").symlink_to(ONE)


def _folder(user: User) -> None:
    (user.prefix / "current").unlink()
    (user.prefix / "current").mkdir()


@pytest.mark.parametrize(
    ("change", "doctor", "install"),
    [
        (_moved, "environment-broken", ""),
        (_copied, "environment-broken", ""),
        (_linked, "environment-broken", ""),
        (_folder, "", "environment-unusable"),
    ],
)
def test_what_users_did_to_the_prefix_is_seen(
    world: World, change: Callable[[User], None], doctor: str, install: str
) -> None:
    """A moved environment names the old place; a copy or a link is none, and is never removed."""
    world.publish(ONE, [wheel("demo")])
    user = world.user()
    assert user.install().code == 0
    change(user)

    assert user.run("doctor").reference == doctor
    assert user.run("uninstall", "mine").reference in (install, "nothing-installed")
    assert user.run("install").reference == install
    if not install:
        assert not [fault for fault in _faults(user, ONE) if "__pycache__" not in fault]


def _faults(user: User, name: str) -> list[str]:
    document = user.run("doctor", "--deep").document
    return list(document.get("error", document)["releases"][name]["faults"])


def test_uninstalling_a_link_to_another_disk_removes_the_link(world: World) -> None:
    """What lies outside of the prefix stays whole."""
    world.publish(ONE, [wheel("demo")])
    user = world.user()
    assert user.install().code == 0
    release = user.prefix / "releases" / ONE
    disk = release.rename(user.folder / "disk")
    release.symlink_to(disk)
    before = sorted(disk.rglob("*"))

    assert user.run("uninstall", ONE).code == 0
    assert not release.is_symlink()
    assert sorted(disk.rglob("*")) == before


def test_a_folder_that_cannot_be_read_is_refused(world: World) -> None:
    """A pipe, a folder or nothing in the place of a file of an index on this machine is no fault of the program."""
    demo = wheel("demo")
    world.publish(ONE, [demo])
    user = world.user()
    user.environment["SPARKWRIGHT_INDEX"] = str(world.root)
    path = world.root / "files" / demo.sha256 / demo.name
    path.unlink()
    os.mkfifo(path)
    assert user.install().reference == "index-damaged"
    path.unlink()
    path.mkdir()
    assert user.run("install").reference == "index-damaged"
    timestamp = world.root / "metadata/timestamp.json"
    timestamp.unlink()
    os.mkfifo(timestamp)
    assert user.run("install").reference == "index-invalid"
    assert user.run("verify", timestamp).reference == "index-invalid"
    timestamp.unlink()
    assert user.run("install").reference == "index-missing"
    assert user.listing() == {}


def test_damaged_trust_is_not_taken_for_none(world: World, record_property: Record) -> None:
    """The list of trusted indexes is not begun anew; metadata is fetched again, from the root that is trusted by its hash."""
    world.publish(ONE, [wheel("demo")])
    user = world.user()
    assert user.install("--dry-run").code == 0
    trust = user.prefix / "trust"
    for path in trust.glob("*/*.json"):
        path.write_bytes(b"{")
    assert user.run("install", "--dry-run").code == 0
    (trust / "indexes.json").write_bytes(b"{")
    assert refusal_of(user, record_property) == "file-invalid"


@pytest.mark.parametrize("text", ['head -c 2000000 /dev/zero && touch "$0.flooded"', "exit 0", "echo '{}'"])
def test_a_python_that_floods_or_says_nothing_is_refused(
    world: World, text: str, record_property: Record
) -> None:
    """An interpreter is a stranger's program: its answer is bounded in bytes and in time."""
    world.publish(ONE, [wheel("demo")])
    user = world.user()
    assert user.install("--dry-run").code == 0
    python = user.folder / "python"
    # uv is answered as by a sound one: it has no limit of bytes, and reads a flood for a minute.
    sound = f'[[ $2 == -S ]] || exec -a "$0" {sys._base_executable} "$@"'  # type: ignore[attr-defined]
    python.write_text(f"#!/bin/bash\n{sound}\n{text}\n")
    python.chmod(0o755)
    assert refusal_of(user, record_property, "--python", python) == "environment-unusable"
    assert not python.with_name("python.flooded").exists()
