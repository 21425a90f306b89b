"""
Real indexes for the client: TUF metadata made by the publisher's own code, real wheels, a web server on loopback, and a user.

    world = World(tmp_path)                                  # keys, an empty index, a server
    world.publish("2026.11.1", [wheel("demo", "1.0")])       # wheels of ours, and a locked set
    user = world.user()
    user.run("install", "--trust", world.fingerprint)        # the command line, in this process
"""

import contextlib
import csv
import functools
import io
import json
import os
import platform
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self
from unittest import mock
from urllib.parse import unquote

import msgspec
from tests.support import foldertree, loopback, processes, tufindex, wheels

from sparkwright.client import locked_wheels, main
from sparkwright.client.records import (
    Channel,
    FileEdit,
    Missing,
    Overlay,
    Proof,
    Release,
    ReleaseFile,
    ReleaseLock,
    ReleaseState,
    ReleaseWheel,
)
from sparkwright.core.files import sha256_bytes
from sparkwright.release import locked_set, repository

#: The releases of most tests.
ONE, TWO, THREE = "2026.11.1", "2026.11.2", "2026.11.3"
#: The program, to be run in a process of its own with a user's environment.
CLIENT = [sys.executable, "-m", "sparkwright.client.main"]
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
SITE = f"lib/python{PYTHON}/site-packages"
MACHINE: Any = platform.machine()


#: Runs command lines in copies of itself, which has loaded the client, with what they print in the user's file ``said``. Each kills itself
#: before its k-th change of a file below the user's folder, if k is not 0.
FORKING = """
import json, os, signal, subprocess, sys
import packaging.pylock, requests, securesystemslib.signer, tuf.ngclient
from sparkwright.client import environment, index, install, main

def count(left, told, folder):
    def counted(name, real):
        def call(*words, **options):
            nonlocal left
            writes = name != "open" or words[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and any(folder in str(word) for word in words if isinstance(word, (str, os.PathLike))):
                left -= 1
                if left == 0:
                    os.write(told, name.encode())
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*words, **options)
        return call
    for name in ("link", "mkdir", "rename", "replace", "rmdir", "symlink", "unlink", "open"):
        setattr(os, name, counted(name, getattr(os, name)))
    popen = subprocess.Popen
    class Counted(popen):
        def __init__(self, words, *rest, **options):
            counted("mkdir", lambda *_: None)(" ".join(map(str, words)))
            super().__init__(words, *rest, **options)
    subprocess.Popen = Counted

for line in sys.stdin:
    step, folder, words = json.loads(line)
    hears, told = os.pipe()
    if (child := os.fork()) == 0:
        os.dup2(os.open(folder + "/said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        count(step, told, folder)
        os.write(told, b"ended %d" % main.main(words))
        os._exit(0)
    os.close(told)
    os.waitpid(child, 0)
    print(os.read(hears, 1000).decode(), flush=True)
    os.close(hears)
"""


class Wheel(NamedTuple):
    """A wheel: its file name and its bytes."""

    name: str
    data: bytes

    @property
    def project(self) -> str:
        return self.name.split("-")[0].replace("_", "-").lower()

    @property
    def version(self) -> str:
        return self.name.split("-")[1]

    @property
    def sha256(self) -> str:
        return sha256_bytes(self.data)


def wheel(
    project: str,
    version: str = "1.0",
    files: Mapping[str, bytes] | None = None,
    *,
    name: str = "",
    metadata: str = "",
    format_version: str = "1.0",
    record: Callable[[list[list[str]]], object] = lambda rows: None,
    without: Sequence[str] = (),
    damage: Callable[[zipfile.ZipFile], object] = lambda archive: None,
) -> Wheel:
    """
    Return a wheel of *project*: a package of that name, and *files*, whose names may begin with ``{info}`` or ``{data}``.

    Args:
        name: Its file name, if that is not the right one. *metadata*: the text of METADATA, likewise. *format_version*: of the wheel format.
        record: Changes the rows of RECORD. *without*: files of its ``.dist-info`` that it lacks.
        damage: Adds what no builder would.
    """
    package = project.replace("-", "_")
    stem = f"{package}-{version}"
    info, data = f"{stem}.dist-info", f"{stem}.data"
    text = metadata or f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n"
    members = {
        f"{package}/__init__.py": f'"""{project}."""\n\n__version__ = "{version}"\n'.encode(),
        **{key.format(info=info, data=data): value for key, value in (files or {}).items()},
        f"{info}/METADATA": text.encode(),
        f"{info}/WHEEL": f"Wheel-Version: {format_version}\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n".encode(),
    }
    members = {
        key: value for key, value in members.items() if key.rpartition("/")[2] not in without
    }
    rows = [[key, f"sha256={wheels.unpadded(value)}", str(len(value))] for key, value in members.items()]
    rows.append([f"{info}/RECORD", "", ""])
    record(rows)
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows(rows)
    if "RECORD" not in without:
        members[f"{info}/RECORD"] = lines.getvalue().encode()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for key, value in members.items():
            archive.writestr(zipfile.ZipInfo(key), value, zipfile.ZIP_DEFLATED)
        damage(archive)
    return Wheel(name or f"{stem}-py3-none-any.whl", stream.getvalue())


class Outcome(NamedTuple):
    """How a command ended: exit code, reference of its failure, document, and what it said on standard error."""

    code: int
    reference: str
    document: dict[str, Any]
    said: str


class _Handler(loopback.FileHandler):
    def __init__(self, world: "World", *arguments: Any) -> None:
        self._world = world
        super().__init__(*arguments, directory=str(world.root))

    def do_GET(self) -> None:  # noqa: N802  http.server calls it so
        fault = self._world.faults.get(unquote(self.path).lstrip("/"), _Handler.serve)
        with contextlib.suppress(OSError):
            fault(self)

    def serve(self) -> None:
        super().do_GET()


class World:
    """
    An index in ``folder/index``, served at *url*.

    Attributes:
        machine, pythons: What its releases are for.
        faults: Path of a request → what answers in its place.
    """

    def __init__(
        self, folder: Path, machine: Any = MACHINE, pythons: Sequence[str] = (PYTHON,)
    ) -> None:
        self.folder, self.root = folder, folder / "index"
        self.machine, self.pythons = machine, tuple(pythons)
        self.root.mkdir(parents=True)
        self.keys = tufindex.make_keys(folder / "keys")
        self.faults: dict[str, Callable[[Any], object]] = {}
        self.url = ""
        self._users = 0

    @property
    def fingerprint(self) -> str:
        return sha256_bytes((self.root / "metadata" / "1.root.json").read_bytes())

    @contextlib.contextmanager
    def served(self) -> Iterator[Self]:
        """Serve the index for the block."""
        with loopback.Server(functools.partial(_Handler, self)) as server:
            self.url = f"{server.url}/"
            yield self

    def user(self) -> "User":
        """Return a user without anything."""
        self._users += 1
        return User(self, self.folder / "users" / str(self._users))

    def lock(self, ours: Sequence[Wheel], others: Sequence[Wheel]) -> bytes:
        """Return the lock of the set; the wheels of others lie on the same server, outside of ``files``."""
        needed = {}
        for one in (*ours, *others):
            place = f"files/{one.sha256}/{one.name}"
            if one in others:
                place = f"others/{one.sha256[:8]}/{one.name}"
                path = self.root / place
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(one.data)
            wheel = locked_wheels.LockedWheel(
                one.project, one.version, one.name, f"{self.url}{place}", one.sha256, len(one.data)
            )
            needed[wheel] = self.pythons
        return locked_set.write(needed, self.machine, self.pythons)

    def next_name(self) -> str:
        """Return the name of a release that comes after all others."""
        return f"2026.11.{len(repository.IndexFolder(self.root).entries) + 1}"

    def publish(
        self,
        name: str,
        ours: Sequence[Wheel],
        others: Sequence[Wheel] = (),
        *,
        channel: Channel = "verified",
        lock: bytes = b"",
        edits: tuple[FileEdit, ...] = (),
        overlays: tuple[Overlay, ...] = (),
        change: Callable[[Release], Release] = lambda release: release,
        state: Callable[[ReleaseState], ReleaseState] = lambda state: state,
    ) -> Release:
        """Add a release; *lock*, *change* and *state* make it one that no publisher would."""
        stack, _, number = name.rpartition(".")
        missing = (
            () if channel == "verified" else (Missing("G5", "not-run", "not-run", "nobody ran G5"),)
        )
        data = {}
        records = []
        for one in ours:
            named = ReleaseFile(name=one.name, size=len(one.data), sha256=one.sha256)
            records.append(
                ReleaseWheel(
                    **msgspec.structs.asdict(named), fork="vllm", project=one.project, version=one.version, machine="any",
                    metadata="0" * 64, uploaded="2026-11-22T07:30:00Z", proof=Proof(policy="0" * 64, missing=missing),
                )
            )  # fmt: skip
            data[named] = one.data
        text = lock or self.lock(ours, others)
        packages = {one.project: one.version for one in (*ours, *others)}
        named = ReleaseFile(
            name=f"pylock.{self.machine}.toml", size=len(text), sha256=sha256_bytes(text)
        )
        data[named] = text
        locked = ReleaseLock(
            **msgspec.structs.asdict(named),
            machine=self.machine,
            pythons=self.pythons,
            packages=packages,
        )
        made = f"2026-11-22T07:{int(number) // 60:02}:{int(number) % 60:02}Z"
        release = change(
            Release(
                name=name,
                stack=stack,
                made=made,
                wheels=tuple(records),
                locks=(locked,),
                edits=edits,
                overlays=overlays,
            )
        )
        stands = ReleaseState(
            stack=stack,
            made=made,
            channel=channel,
            machines=(self.machine,),
            pythons=self.pythons,
            missing=tuple(item.gate for item in missing),
        )
        with self.changing() as transaction:
            for file, content in data.items():
                transaction.put(file, content)
            transaction.set_release(release, state(stands))
        return release

    def changing(self) -> contextlib.AbstractContextManager[repository.Transaction]:
        return repository.IndexFolder(self.root).changing(self.keys, tufindex.ROLES)

    def yank(self, name: str, reason: str = "it answers wrongly") -> None:
        entry = repository.IndexFolder(self.root).entry(name)
        with self.changing() as transaction:
            transaction.set_state(name, msgspec.structs.replace(entry.state, yanked=reason))


class User:
    """
    A user with a prefix and a cache of their own.

    Attributes:
        prefix: The folder of the installations. *environment*: variables of the command line.
    """

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder, self.prefix = world, folder, folder / "prefix"
        folder.mkdir(parents=True)
        self.environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("SPARKWRIGHT_", "UV_"))
            },
            "HOME": str(folder),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "SPARKWRIGHT_PREFIX": str(self.prefix),
            "SPARKWRIGHT_INDEX": world.url or str(world.root),
        }

    @property
    def cache(self) -> Path:
        return self.folder / "cache" / "sparkwright" / "client"

    @property
    def current(self) -> str:
        link = self.prefix / "current"
        return link.readlink().name if link.is_symlink() else ""

    def site(self, name: str = "") -> Path:
        return (self.prefix / "releases" / name if name else self.prefix / "current") / SITE

    def run(self, command: str, *words: str | Path) -> Outcome:
        """Run the command line in this process."""
        out, said = io.StringIO(), io.StringIO()
        with (
            mock.patch.dict(os.environ, self.environment, clear=True),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(said),
        ):
            code = main.main([command, "--json", *map(str, words)])
        document = json.loads(out.getvalue() or "{}")
        return Outcome(
            code, document.get("error", {}).get("reference", ""), document, said.getvalue()
        )

    @contextlib.contextmanager
    def forking(self, prepare: str = "") -> Iterator[Callable[[int, Sequence[str]], str]]:
        """
        Yield what runs a command line by `FORKING` and returns how it ended; *prepare* are commands of a shell that may mount, the last of
        which takes the program as its words.
        """
        command = [sys.executable, "-c", FORKING]
        if prepare:
            command = [*processes.mounting_shell(), f"{prepare} {shlex.join(command)}"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=self.environment, **pipes) as child:

            def run(step: int, words: Sequence[str]) -> str:
                assert child.stdout
                print(json.dumps([step, str(self.folder), words]), file=child.stdin, flush=True)
                return str(child.stdout.readline()).strip()

            yield run

    def install(self, *words: str | Path) -> Outcome:
        """Install, with the index trusted."""
        return self.run("install", "--trust", self.world.fingerprint, *words)

    def listing(self) -> dict[str, str]:
        """Return the files and links of the installations: path → what it is."""
        return foldertree.files(self.prefix, foldertree.LOCKS | {"trust"})
