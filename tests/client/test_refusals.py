"""Locks, downloads, folders, disks, wheels and records that are wrong in one way each, and how they are refused without a trace."""

import json
import os
import shlex
import struct
import subprocess
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.client.world import CLIENT, MACHINE, ONE, SITE, TWO, User, Wheel, World, wheel
from tests.refusals import refusal
from tests.support import processes, tufindex

from sparkwright.client import folders, install, locked_wheels, records
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
    "a name that no file may have": (
        "lock-invalid",
        lambda text: text.replace('name = "other-2.0-', f'name = "other-2.0-{"1" * 225}-'),
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


@pytest.mark.parametrize(("expected", "change"), LOCKS.values(), ids=LOCKS)
def test_hostile_lock_is_refused(settled: User, expected: str, change: Callable[[str], str]) -> None:
    """A lock names wheels by hash at an address, of exactly the release's versions, for this machine."""
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


@pytest.mark.parametrize(("expected", "fault"), DOWNLOADS.values(), ids=DOWNLOADS)
def test_bad_download_is_refused(
    installed: User, expected: str, fault: Callable[[BaseHTTPRequestHandler], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other bytes are not kept; nothing waits for ever."""
    monkeypatch.setattr(http, "STALL", 0.5)
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
    unsized = world.lock([other], [demo]).replace(f"size = {len(demo.data)}, ".encode(), b"")
    world.publish(ONE, [other], [demo], lock=unsized)
    world.faults[f"others/{demo.sha256[:8]}/{demo.name}"] = repeating(bytes(http.CHUNK), 0.2)
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
        *(
            pytest.param(
                f"mkdir -p elsewhere $(dirname {link}) && ln -s $PWD/elsewhere {link} && chown -h 1:1 {link}", "cache-unusable",
                marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root makes links of others"),
            )
            for link in ("cache/sparkwright/client", "cache", "prefix")
        ),
    ],
)
def test_folder_of_somebody_else_is_refused(user: User, script: str, reference: str) -> None:
    """Nothing is written into a folder that somebody else put there, or could change."""
    subprocess.run(script, shell=True, check=True, cwd=user.folder)

    assert refusal_of(user, "--trust", user.world.fingerprint) == reference
    assert list((user.folder / "elsewhere").iterdir()) == []


def test_links_are_followed_as_the_system_does(tmp_path: Path) -> None:
    """A target may lead through a further link and up from there."""
    subprocess.run("mkdir -p real/deep real/y y; ln -s real/deep x; ln -s x/../y link; ln -s loop loop", shell=True, check=True, cwd=tmp_path)
    for name in ("link", "x/../y", "x/new", "y/../link/new"):
        assert folders.without_links(tmp_path / name) == Path(os.path.realpath(tmp_path / name))
    with refusal("cache-unusable"):
        folders.without_links(tmp_path / "loop")


@pytest.mark.parametrize(
    ("prefix", "reference"),
    [("~nobody-of-that-name/x", "environment-unusable"), ("closed/x", "access-denied")],
)
def test_prefix_that_cannot_be_read_is_named(user: User, prefix: str, reference: str) -> None:
    """The error names it. Root runs the command without the right to read everything."""
    unprivileged = [] if os.geteuid() else ["setpriv", "--bounding-set=-all"]
    command = shlex.join([*unprivileged, *CLIENT, "list", "--prefix", prefix])
    script = f"cd {shlex.quote(str(user.folder))} && mkdir --mode=0 closed && {command}"

    assert f"error: {reference}: " in subprocess.getoutput(script)


@pytest.mark.parametrize("place", ["cache", "prefix"])
def test_full_disk_is_refused_before_anything_is_created(world: World, place: str) -> None:
    """The room for the downloads and for what they unpack to is compared with what is free."""
    world.publish(ONE, [wheel("demo", files={"demo/data.bin": os.urandom(3_000_000)})])
    user = world.user()
    folder = shlex.quote(str(user.folder / place))
    mount = f"mkdir {folder} && mount -t tmpfs -o size=2m,mode=755 none {folder}"
    install = shlex.join([*CLIENT, "install", "--trust", world.fingerprint])
    script = f"{mount} && {install} 2>&1; ls -A {folder}/releases 2>/dev/null | sed s/^/left:/"
    said = subprocess.check_output(
        [*processes.mounting_shell(), script], env=user.environment, text=True
    )

    assert "disk-full" in said
    assert "left:" not in said


def test_uv_that_fails_leaves_nothing(
    installed: User, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An environment that could not be made is removed, and the one before stays current."""
    installed.world.publish(TWO, [wheel("demo", "1.1")])
    program = processes.script(
        tmp_path / "uv", 'case "$1" in venv) mkdir -p "$8/bin";; *) echo "no room in /dev/null"; exit 2;; esac'
    )
    monkeypatch.setattr(install, "find_uv_bin", lambda: str(program))

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
        ("mv ../prefix ../elsewhere; ln -s elsewhere ../prefix", "environment-broken", "environment-broken"),
        (f"cp -a releases/{ONE} releases/mine", "environment-broken", ""),
        (f"ln -s {ONE} releases/mine", "environment-broken", ""),
        ("rm current; mkdir current", "", "environment-unusable"),
        ("rm current history.json; mkdir history.json", "", "environment-unusable"),
        ("rm .lock; mkdir .lock", "", "cache-unusable"),
        ("ln -sf ../elsewhere .lock", "", "cache-unusable"),
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
    assert bool(shown.get("error", shown)["releases"][ONE]["faults"]) == (install == "environment-broken")


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
    timestamp.rmdir()
    (trust / "indexes.json").write_bytes(b"{")
    assert refusal_of(user) == "file-invalid"


# Wheels.


def evil(**options: Any) -> Callable[[], Wheel]:
    """Return what makes a wheel with these options of `wheel`."""
    return lambda: wheel("evil", **options)


def with_file(name: str, data: bytes = b"x") -> Callable[[], Wheel]:
    """Return what makes a wheel with a further file."""
    return evil(files={name: data})


def with_entry(line: str) -> Callable[[], Wheel]:
    return with_file("{info}/entry_points.txt", f"[console_scripts]\n{line}\n".encode())


def _link(archive: zipfile.ZipFile) -> None:
    info = zipfile.ZipInfo("evil/link")
    info.external_attr = 0o120777 << 16
    archive.writestr(info, "/etc/passwd")


def _twice(archive: zipfile.ZipFile) -> None:
    info = zipfile.ZipInfo("evil/__init__.py")
    archive.filelist.append(archive.getinfo("evil/__init__.py"))
    archive.NameToInfo["again"] = info


def _local_name() -> Wheel:
    """Return a wheel, one member of which has another name in its own header than in the directory."""
    good = wheel("evil", files={"evil/data.bin": b"x"})
    return Wheel(good.name, good.data.replace(b"evil/data.bin", b"evil/date.bin", 1))


def _bomb(archive: zipfile.ZipFile) -> None:
    """Add a member that states to be 3 GB in a few KB."""
    archive.writestr("evil/zeros.bin", bytes(1 << 20))
    archive.getinfo("evil/zeros.bin").file_size = 3 << 30


def _bad_checksum() -> Wheel:
    good = wheel("evil")
    crc = struct.pack("<L", zlib.crc32(b'"""evil."""\n\n__version__ = "1.0"\n'))
    assert good.data.count(crc) == 2
    return Wheel(good.name, good.data.replace(crc, b"\0\0\0\0"))


def _unhashed(rows: list[list[str]]) -> None:
    for row in rows:
        if row[0].endswith(".dist-info/RECORD"):
            row[1] = ""


def _metadata(text: str) -> Callable[[], Wheel]:
    return evil(metadata=f"Metadata-Version: 2.1\n{text}\n")


CASES: dict[str, tuple[str, Callable[[], Wheel]]] = {
    # What an environment is made of.
    "pyvenv.cfg": ("wheel-unsafe", with_file("{data}/data/pyvenv.cfg", b"home = /usr/bin\n")),
    "interpreter": ("wheel-unsafe", with_file("{data}/data/bin/python")),
    "packages by data": ("wheel-unsafe", with_file(f"{{data}}/data/{SITE}/torch/__init__.py")),
    "file for a folder": ("wheel-unsafe", with_file("{data}/data/bin")),
    "lib64": ("wheel-unsafe", with_file("{data}/data/lib64/x")),
    "folder for a file": ("wheel-unsafe", with_file("{data}/data/caches.env/x")),
    "marker": ("wheel-unsafe", with_file("{data}/data/sparkwright.json")),
    "unknown scheme": ("wheel-unsafe", with_file("{data}/elsewhere/x")),
    "data of another": ("wheel-unsafe", with_file("torch-1.data/data/share/x")),
    "sitecustomize": ("wheel-unsafe", with_file("sitecustomize.py", b"import os; os._exit(0)\n")),
    "usercustomize": ("wheel-unsafe", with_file("usercustomize/__init__.py")),
    "hidden sitecustomize": ("wheel-unsafe", with_file("{data}/purelib/sitecustomize.py")),
    "hidden dist-info": ("wheel-unsafe", with_file("{data}/purelib/torch-1.dist-info/METADATA")),
    "script pip": ("wheel-unsafe", with_file("{data}/scripts/pip")),
    "script python": ("wheel-unsafe", with_file("{data}/scripts/python3.12")),
    "script activate": ("wheel-unsafe", with_file("{data}/scripts/activate")),
    "script -rf": ("wheel-unsafe", with_file("{data}/scripts/-rf")),
    "script in a folder": ("wheel-unsafe", with_file("{data}/scripts/a/b")),
    "entry point ../evil": ("wheel-unsafe", with_entry("../evil = evil:main")),
    "entry point python": ("wheel-unsafe", with_entry("python = evil:main")),
    "entry point Activate": ("wheel-unsafe", with_entry("Activate.ps1 = evil:main")),
    "entry point with code": ("wheel-unsafe", with_entry("evil = evil:main()); import os #")),
    "entry points twice": ("wheel-invalid", with_entry("evil = evil:main\nevil = evil:other")),
    "entry points unreadable": ("wheel-invalid", with_file("{info}/entry_points.txt", b"\xff\xfe")),
    # Names.
    "climbs": ("archive-unsafe", with_file("../../../../escaped")),
    "absolute": ("archive-unsafe", with_file("/tmp/escaped")),
    "climbs by scheme": ("archive-unsafe", with_file("{data}/data/share/../../escaped")),
    "newline": ("archive-unsafe", with_file("evil/a\nb")),
    "empty part of a path": ("archive-unsafe", with_file("evil//x.py")),
    "empty path": ("archive-unsafe", with_file("")),
    "empty path in RECORD": ("wheel-invalid", evil(record=lambda rows: rows.append(["", "", ""]))),
    "longer than a file system allows": ("archive-unsafe", with_file(f"evil/{'x' * 256}")),
    "right to left": ("archive-unsafe", with_file("evil/a\u202eyp.py")),
    "control character of C1": ("archive-unsafe", with_file("evil/a\x85b")),
    "link": ("archive-unsafe", evil(damage=_link)),
    "a file for a folder": ("wheel-invalid", with_file("evil", b"x")),
    "twice by scheme": ("wheel-unsafe", with_file("{data}/purelib/evil/__init__.py")),
    "twice": ("wheel-invalid", evil(damage=lambda archive: archive.writestr("evil/__init__.py", b"other"))),
    "same member twice": ("wheel-invalid", evil(damage=_twice)),
    # The archive.
    "no zip": ("wheel-invalid", lambda: Wheel("evil-1.0-py3-none-any.whl", b"<!DOCTYPE html>")),
    "cut off": (
        "wheel-invalid",
        lambda: Wheel("evil-1.0-py3-none-any.whl", wheel("evil").data[:-80]),
    ),
    "bytes before it": ("wheel-invalid", lambda: Wheel(wheel("evil").name, b"#!" + wheel("evil").data)),
    "bytes after it": ("wheel-invalid", lambda: Wheel(wheel("evil").name, wheel("evil").data + b"\n")),
    "bad checksum": ("wheel-invalid", _bad_checksum),
    "bomb": ("wheel-invalid", evil(damage=_bomb)),
    "another local name": ("wheel-invalid", _local_name),
    "lzma": (
        "wheel-invalid",
        evil(damage=lambda archive: archive.writestr("evil/x", b"x", zipfile.ZIP_LZMA)),
    ),
    # RECORD and metadata.
    "no RECORD": ("wheel-invalid", evil(without=["RECORD"])),
    "no WHEEL": ("wheel-invalid", evil(without=["WHEEL"])),
    "large METADATA": ("wheel-invalid", _metadata("Name: evil\nVersion: 1.0\n" + "a:\n" * (2 << 20))),
    "RECORD of another without a hash": (
        "wheel-invalid",
        evil(files={"evil/a.dist-info/RECORD": b""}, record=_unhashed),
    ),
    "no METADATA": ("wheel-invalid", evil(without=["METADATA"])),
    "wrong hash": (
        "wheel-invalid",
        evil(record=lambda rows: rows[0].__setitem__(1, f"sha256={'A' * 43}")),
    ),
    "no hash": ("wheel-invalid", evil(record=lambda rows: rows[0].__setitem__(1, ""))),
    "weak hash": (
        "wheel-invalid",
        evil(record=lambda rows: rows[0].__setitem__(1, "md5=1B2M2Y8AsgTpgAmY7PhCfg")),
    ),
    "wrong size": ("wheel-invalid", evil(record=lambda rows: rows[0].__setitem__(2, "1"))),
    "not in RECORD": ("wheel-invalid", evil(record=lambda rows: rows.pop(0))),
    "only in RECORD": (
        "wheel-invalid",
        evil(record=lambda rows: rows.append(["../../../bin/python", "", ""])),
    ),
    "twice in RECORD": ("wheel-invalid", evil(record=lambda rows: rows.append(rows[0]))),
    "short RECORD": ("wheel-invalid", evil(record=lambda rows: rows[0].pop())),
    "another project": ("wheel-mismatch", _metadata("Name: torch\nVersion: 1.0")),
    "another version": ("wheel-mismatch", _metadata("Name: evil\nVersion: 2.0")),
    "two names": ("wheel-invalid", _metadata("Name: evil\nName: torch\nVersion: 1.0")),
    "dist-info of another": ("wheel-invalid", with_file("torch-2.0.dist-info/RECORD")),
    "renamed": ("wheel-mismatch", lambda: wheel("torch", name="evil-1.0-py3-none-any.whl")),
    "future format": ("wheel-invalid", evil(format_version="2.0")),
    # Other packages.
    "overlaps": ("wheel-unsafe", with_file("torch/__init__.py", b"evil")),
    "in another package": ("wheel-unsafe", with_file("torch/nn/evil.py")),
    "in the place of a folder": ("wheel-unsafe", with_file("torch", b"x")),
    "program of another": ("wheel-unsafe", with_entry("torchrun = evil:main")),
}


TORCH = wheel(
    "torch",
    "2.0",
    {
        "torch/nn/__init__.py": b"# ours\n",
        "{info}/entry_points.txt": b"[console_scripts]\ntorchrun = torch:main\n",
    },
)


@pytest.fixture(scope="module")
def confined(settled: User) -> Iterator[Callable[[int, Sequence[str]], str]]:
    """Yield what runs the user's commands where only the user's folder can be written."""
    folder, root = shlex.quote(str(settled.folder)), shlex.quote(f"{settled.world.folder}-root")
    # A root that is no mount, as in a plain chroot, cannot be made read-only itself.
    with settled.forking(
        f"mkdir {root} && mount --rbind / {root} && mount --bind {folder} {root}{folder} && mount -o remount,bind,ro {root}"
        f" && ! chroot {root} touch /escaped 2>/dev/null && export TMPDIR={folder}/tmp && mkdir $TMPDIR && exec chroot {root}"
    ) as run:
        yield run


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(("expected", "make"), CASES.values(), ids=CASES)
def test_hostile_wheel_is_refused_and_nothing_is_created(settled: User, confined: Callable[[int, Sequence[str]], str], expected: str, make: Callable[[], Wheel]) -> None:
    """
    Signed by the publisher and known by hash, it is refused all the same, where only the user's own
    folders can be written; the release before stays as it was.
    """
    before = settled.listing()
    settled.world.publish(settled.world.next_name(), [TORCH], [make()])
    assert confined(0, ["install", "--json"]) == "ended 1"

    said = json.loads((settled.folder / "said").read_text())
    assert (said["error"]["reference"], settled.listing()) == (expected, before), said
    assert not list(settled.prefix.glob("releases/.*")) + list(
        settled.world.folder.rglob("escaped")
    )


# Records, whose fields accept nothing that could leave a folder, a line or a shell word.


#: Field → values that it refuses; the last part of each name is the field of the first element of a list.
HOSTILE: dict[str, list[object]] = {
    "name": ["", "2026", "2026.11.0", "2026.11.1\n", "../2026.11.1", "2026.11.1/x", "-rf.1"],
    "stack": ["", "2026.11\n", "../x", "-rf", "a b"],
    "made": ["2026-11-22T07:30:00Z\n", "now", "2026-11-22"],
    "wheels.name": ["", "../x.whl", "/etc/passwd", "x.whl\n", ".x.whl", "-x.whl", "a b.whl"],
    "wheels.sha256": ["0" * 63, "0" * 64 + "\n", "G" * 64, "0" * 63 + "A"],
    "wheels.size": [-1, "1", 1.5],
    "wheels.url": ["file:///etc/passwd", "ftp://a.example/x", "//a.example/x", "https://u:p@a.example/x", "https://a.example/x\n"],
    "wheels.machine": ["sparc", ""],
    "wheels.version": ["1.0\n", ""],
    "wheels.requires_python": ["\x1b[31m", "a\nb", "x" * 1001],
    "edits.file": ["../x", "/x", "a/../b", "..", "a/..", "a/.", "a\n", "a//b", ""],
    "edits.package": ["a\n", "../a"],
    "edits.changes": [[], [{"anchor": " ", "replacement": "x"}]],
    "overlays.files": [-1],
    "overlays.reason": [1],
    "format": [2],
}  # fmt: skip
#: The same of how a release stands.
HOSTILE_STATE: dict[str, list[object]] = {
    "stack": ["2026.11\n"],
    "made": ["2026-11-22T07:30:00Z\n"],
    "channel": ["stable"],
    "pythons": [["3.12\n"]],
    "yanked": ["a\nb", "\x1b[2J"],
}
PLAIN = tufindex.release(ONE)[0]
EDIT = records.FileEdit("x", "demo", "demo/a.py", "0" * 64, "1" * 64, (records.TextChange("a", "b"),), "it refuses", "it admits")
FULL = replace(PLAIN, edits=(EDIT,), overlays=(records.Overlay("a", "b", 1, "it overlaps"),))


@pytest.mark.parametrize(
    ("record", "field", "values"),
    [
        *((FULL, field, values) for field, values in HOSTILE.items()),
        *((tufindex.state(PLAIN), field, values) for field, values in HOSTILE_STATE.items()),
    ],
)
def test_hostile_value_is_no_record(
    record: records.Release | records.ReleaseState, field: str, values: list[object]
) -> None:
    assert msgspec.convert(msgspec.to_builtins(record), type(record)) == record
    first, _, rest = field.partition(".")
    for value in values:
        document = msgspec.to_builtins(record)
        holder = document[first][0] if rest else document
        holder[rest or first] = value
        with pytest.raises(msgspec.ValidationError, match=rest or first):
            msgspec.convert(document, type(record))
