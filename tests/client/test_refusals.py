"""Locks, downloads, folders and disks that are wrong in one way each, and how an installation refuses them without a trace."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from tests.client.world import CLIENT, MACHINE, ONE, TWO, User, World, wheel
from tests.support import mounts

from sparkwright.client import environment, locked_wheels
from sparkwright.core import http

HTML = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head><body>Please sign in.</body></html>\n"
EXTRA = '[[packages]]\nname = "more"\nversion = "1"\n'


def refusal_of(user: User, *words: str | Path) -> str:
    """Install, which has to fail without a change, and return the reference."""
    before = user.listing()
    outcome = user.run("install", *words)
    assert (outcome.code > 0, user.listing()) == (True, before), outcome.said
    return outcome.reference


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
        lambda text: text.replace(f"'{MACHINE}'", "'riscv64'"),
    ),
}


@pytest.mark.parametrize("case", LOCKS)
def test_hostile_lock_is_refused(settled: User, case: str) -> None:
    """A lock names wheels by hash at an address, of exactly the release's versions, for this machine."""
    expected, change = LOCKS[case]
    world, demo, other = settled.world, wheel("demo", "1.1"), wheel("other", "2.0")
    text = world.lock([demo], [other]).decode()
    assert change(text) != text
    world.publish(world.next_name(), [demo], [other], lock=change(text).encode())

    assert refusal_of(settled) == expected


def answer(
    body: bytes, status: int = 200, length: int | None = None, **headers: str
) -> Callable[[BaseHTTPRequestHandler], None]:
    """Return what answers with *body*."""
    headers["Content-Length"] = str(len(body) if length is None else length)

    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return reply


def repeating(piece: bytes, pause: float) -> Callable[[BaseHTTPRequestHandler], None]:
    """Return what answers with *piece* again and again."""

    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            handler.wfile.write(piece)
            time.sleep(pause)

    return reply


endless, dripping = repeating(b" " * (1 << 16), 0), repeating(b" ", 0.05)
DOWNLOADS: dict[str, tuple[str, Callable[[BaseHTTPRequestHandler], object]]] = {
    "a page in its place": ("download-invalid", answer(HTML)),
    "other bytes": ("download-invalid", answer(b"x" * len(wheel("demo", "1.1").data))),
    "cut off": ("download-invalid", answer(b"PK", length=len(wheel("demo", "1.1").data))),
    "endless": ("download-invalid", endless),
    "dripping": ("index-unreachable", dripping),
    "missing": ("index-damaged", answer(b"", 404)),
    "a file, by a redirect": ("download-invalid", answer(b"", 302, Location="file:///etc/passwd")),
    "a fault of the server": ("index-unreachable", answer(b"", 503)),
}


@pytest.mark.parametrize("case", DOWNLOADS)
def test_bad_download_is_refused(
    installed: User, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other bytes are not kept; nothing waits for ever."""
    monkeypatch.setattr(http, "STALL", 0.5)
    expected, fault = DOWNLOADS[case]
    bad, world = wheel("demo", "1.1"), installed.world
    world.publish(TWO, [wheel("more")], [bad])
    world.faults[f"others/{bad.sha256[:8]}/{bad.name}"] = fault

    began = time.monotonic()
    assert refusal_of(installed) == expected
    assert time.monotonic() - began < 30
    world.faults.clear()
    assert installed.run("install").code == 0


def test_all_downloads_together_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that each bring a little now and then hold up nothing for ever."""
    monkeypatch.setattr(locked_wheels, "SECONDS", 0.5)
    demo, other = wheel("demo"), wheel("other")
    sized = world.lock([other], [demo])
    unsized = sized.replace(f"size = {len(demo.data)}, ".encode(), b"")
    world.publish(ONE, [other], [demo], lock=unsized)
    slow = repeating(bytes(http.CHUNK), 0.2)
    world.faults[f"others/{demo.sha256[:8]}/{demo.name}"] = slow
    user, began = world.user(), time.monotonic()

    assert user.install().reference == "index-unreachable"
    assert time.monotonic() - began < 10


def test_files_of_the_cache_are_hashed_again(installed: User) -> None:
    """A wheel that was changed in the cache, or came there by a link, is fetched anew; what the link led to stays."""
    secret = installed.folder / "secret"
    secret.write_text("a secret")
    installed.run("uninstall")
    first, second = sorted(installed.cache.rglob("*.whl"))
    first.write_bytes(first.read_bytes()[::-1])
    second.unlink()
    second.symlink_to(secret)

    assert installed.run("install").code == 0
    assert installed.run("doctor", "--deep").code == 0
    assert (secret.read_text(), second.is_symlink()) == ("a secret", False)


@pytest.mark.parametrize("plant", [os.symlink, os.link])
def test_planted_links_are_not_written_through(
    user: User, plant: Callable[[Path, Path], None]
) -> None:
    """A link where a partial download, a record or a log belongs is replaced."""
    secret, demo = user.folder / "secret", wheel("demo")
    secret.write_text("a secret")
    for path in (
        user.cache / "wheels" / demo.sha256 / f"{demo.name}.part",
        user.cache / "logs" / "install.log",
        user.prefix / ".history.json",
        user.prefix / ".current",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        plant(secret, path)

    assert user.install().code == 0
    assert secret.read_text() == "a secret"


LINK = "mkdir -p elsewhere {0} && rmdir {0} && ln -s $PWD/elsewhere {0}"


@pytest.mark.parametrize(
    ("script", "reference"),
    [
        (LINK.format("cache/sparkwright/client/wheels"), "cache-unusable"),
        (LINK.format("cache/sparkwright/client/uv"), "cache-unusable"),
        (LINK.format("prefix/releases"), "cache-unusable"),
        (LINK.format("prefix/trust"), "cache-unusable"),
        (LINK.format(f"prefix/releases/{ONE}"), "environment-unusable"),
        ("mkdir elsewhere prefix && chmod 777 prefix", "cache-unusable"),
    ],
)
def test_folder_of_somebody_else_is_refused(user: User, script: str, reference: str) -> None:
    """Nothing is written into a folder that somebody else put there, or could change."""
    subprocess.run(script, shell=True, check=True, cwd=user.folder)

    assert refusal_of(user, "--trust", user.world.fingerprint) == reference
    assert list((user.folder / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("place", ["cache", "prefix"])
def test_full_disk_is_refused_before_anything_is_created(world: World, place: str) -> None:
    """The room for the downloads and for what they unpack to is compared with what is free."""
    world.publish(ONE, [wheel("demo", files={"demo/data.bin": os.urandom(3_000_000)})])
    user = world.user()
    folder = user.folder / place
    folder.mkdir()
    mount = f"mount -t tmpfs -o size=2m,mode=755 none {shlex.quote(str(folder))}"
    install = shlex.join([*CLIENT, "install", "--trust", world.fingerprint])
    script = f"{mount} && {install} 2>&1; ls -A {folder}/releases 2>/dev/null | sed s/^/left:/"
    command = [*mounts.mounting_shell(), script]
    said = subprocess.check_output(command, env=user.environment, text=True)

    assert "disk-full" in said
    assert "left:" not in said


def test_uv_that_fails_leaves_nothing(
    installed: User, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An environment that could not be made is removed, and the one before stays current."""
    installed.world.publish(TWO, [wheel("demo", "1.1")])
    program = tmp_path / "uv"
    program.write_text(
        '#!/bin/sh\ncase "$1" in venv) mkdir -p "$8/bin";; *) echo "no room in /dev/null"; exit 2;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(environment, "find_uv_bin", lambda: str(program))

    assert refusal_of(installed) == "command-failed"


def test_what_others_put_into_the_prefix_stays(user: User) -> None:
    """Only what an installation began is removed; a folder that is in the way is refused."""
    for name in ("notes", ONE):
        (user.prefix / "releases" / name).mkdir(parents=True)
        (user.prefix / "releases" / name / "mine.txt").write_text("mine")

    assert user.install().reference == "environment-unusable"
    (user.prefix / "releases" / ONE).rename(user.folder / "away")
    assert user.run("install").code == 0
    assert user.run("uninstall").code == 0
    assert (user.prefix / "releases/notes/mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("script", "doctor", "install"),
    [
        ("mv ../prefix ../elsewhere; ln -s elsewhere ../prefix", "environment-broken", ""),
        (f"cp -a releases/{ONE} releases/mine", "environment-broken", ""),
        (f"ln -s {ONE} releases/mine", "environment-broken", ""),
        ("rm current; mkdir current", "", "environment-unusable"),
    ],
)
def test_what_users_did_to_the_prefix_is_seen(
    installed: User, script: str, doctor: str, install: str
) -> None:
    """A moved environment names the old place; a copy or a link is none, and is never removed."""
    subprocess.run(script, shell=True, check=True, cwd=installed.prefix)

    assert installed.run("doctor").reference == doctor
    assert installed.run("uninstall", "mine").reference in (install, "nothing-installed")
    assert installed.run("install").reference == install
    shown = installed.run("doctor", "--deep").document
    assert shown.get("error", shown)["releases"][ONE]["faults"] == []


def test_uninstalling_a_link_to_another_disk_removes_the_link(installed: User) -> None:
    """What lies outside of the prefix stays whole."""
    release = installed.prefix / "releases" / ONE
    disk = release.rename(installed.folder / "disk")
    release.symlink_to(disk)
    before = sorted(disk.rglob("*"))

    assert installed.run("uninstall", ONE).code == 0
    assert (release.is_symlink(), sorted(disk.rglob("*"))) == (False, before)


def test_index_in_a_folder_may_lack_files_or_have_pipes(user: User) -> None:
    """A pipe or nothing in the place of a file of an index on this machine is no fault of the program."""
    user.environment["SPARKWRIGHT_INDEX"] = str(user.world.root)
    timestamp = user.world.root / "metadata/timestamp.json"
    for path, piped, absent in (
        (next(user.world.root.glob("files/*/*.whl")), "index-damaged", "index-damaged"),
        (timestamp, "index-invalid", "index-missing"),
    ):
        path.unlink()
        os.mkfifo(path)
        assert user.install().reference == piped
        path.unlink()
        assert user.run("install").reference == absent
    assert user.listing() == {}


def test_damaged_trust_is_not_taken_for_none(user: User) -> None:
    """The list of trusted indexes is not begun anew; metadata is fetched again, from the root that is trusted by its hash."""
    assert user.install("--dry-run").code == 0
    trust = user.prefix / "trust"
    for path in trust.glob("*/*.json"):
        path.write_bytes(b"{")
    assert user.run("install", "--dry-run").code == 0
    [timestamp] = trust.glob("*/timestamp.json")
    timestamp.unlink()
    timestamp.mkdir()
    assert refusal_of(user) == "state-unusable"
    (trust / "indexes.json").write_bytes(b"{")
    assert refusal_of(user) == "file-invalid"
