"""
Small real indexes for what a client does with them: releases of real wheels with verdicts and signed evidence, served on loopback.

    with world.hosted(folder) as host:
        index = host.index()                       # a copy with the releases 2026.11.1 and 2026.11.2, signed for its own address
        entry = index.entry("2026.11.2")
        index.change(entry, lock=b"...")           # a publisher who signs something wrong
        index.path(places.MANIFEST).write_bytes(…) # a mirror that serves something else

What a publisher decides and signs is made by the program's own code; nothing of `release.publish` or `release.index` is needed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from tests.support import indexserver, verdicts, wheels
from uv import find_uv_bin

from sparkwright.builder.wheel.archive import WheelName
from sparkwright.core.files import canonical, sha256_bytes, sha256_file
from sparkwright.core.store import Store
from sparkwright.forks.context import StandaloneContext
from sparkwright.release.client import packages
from sparkwright.release.client.install import Wish
from sparkwright.release.decide import decision, facts
from sparkwright.release.decide import verdicts as judged
from sparkwright.release.evidence import make
from sparkwright.release.manifest import change, places, signed, times
from sparkwright.release.manifest.records import (
    Channel,
    Entry,
    Evidence,
    Lock,
    Manifest,
    Proof,
    Proved,
    Release,
    Wheel,
)
from sparkwright.release.signing import keys
from sparkwright.release.signing.keys import KeySigner

STACK, MACHINE = wheels.STACK, wheels.MACHINE
#: A day before now, so that a manifest may be a little old and still good.
BEGAN = times.text(datetime.now(UTC) - timedelta(days=1))
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


def sha(data: bytes) -> str:
    return sha256_bytes(data)


class Index:
    """
    An index in a folder.

    Attributes:
        root: The folder. *url*: what its manifest is signed for. *others*: address of the wheels that are not ours.
        signer: Its publisher. *public*: the file of the public key.
    """

    def __init__(self, root: Path, url: str, others: Path, others_url: str, key: Path) -> None:
        self.root, self.url, self.others, self.others_url = root, url, others, others_url
        self.signer, self.public = KeySigner.load(key), keys.public_path(key)
        self.manifest = change.first(url, at=BEGAN)

    def path(self, name: str) -> Path:
        return self.root / name

    def entry(self, name: str) -> Entry:
        return change.find(self.manifest, name)

    def release(self, name: str) -> Release:
        return msgspec.json.decode(self.path(places.release(self.entry(name).release)).read_bytes(), type=Release)

    def proof(self, name: str) -> Proof:
        entry = self.entry(name)
        return msgspec.json.decode(self.path(places.proof(entry.release, entry.proof)).read_bytes(), type=Proof)

    def write(self, name: str, data: bytes) -> str:
        """Write the file *name*, and return its sha256."""
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return sha(data)

    def add(
        self, ours: Sequence[Path], others: Sequence[Path], *, channel: Channel = "verified", stack: str = STACK, onsite: bytes = b""
    ) -> Entry:
        """Publish a release of the wheels *ours*, with what lies beside them, and of *others*."""
        inspected = facts.inspect_all(ours)
        beside = {path.name: judged.beside(path) for path in ours}
        decided = decision.decide_all(inspected, beside, verdicts.release_policy())  # type: ignore[arg-type]
        made, proved = [], []
        for one, about in zip(inspected, decided, strict=True):
            wheel = replace(one.wheel, url=places.wheel(one.wheel.sha256, one.wheel.filename), uploaded=BEGAN)
            self._put(wheel.url, one.path)
            self.write(f"{wheel.url}.metadata", one.metadata)
            raw: dict[Any, bytes] = {
                "verdicts": beside[wheel.filename].verdicts,
                "throughput": beside[wheel.filename].throughput,
                "sbom": one.sbom,
            }
            proved.append(self.evidence(wheel, one, about, {kind: data for kind, data in raw.items() if data}))
            made.append(wheel)
        for path in others:
            self._other(path)
        number = 1 + sum(entry.stack == stack for entry in self.manifest.entries)
        lock = self.lock(made, others)
        versions = {packages.canonical(WheelName.of(path.name).distribution): WheelName.of(path.name).version for path in (*ours, *others)}
        locks = (Lock(MACHINE, sha(lock), sha(b""), versions),)  # type: ignore[arg-type]  # this machine's name
        forks = {one.fork.name: one.fork for one in inspected}
        release = Release(
            f"{stack}.{number}", stack, BEGAN, tuple(made), tuple(forks.values()), locks, onsite=sha(onsite) if onsite else ""
        )
        return self.put(release, tuple(proved), lock, channel, onsite)

    def evidence(self, wheel: Wheel, one: facts.Inspected, about: Proved, raw: Mapping[Any, bytes]) -> Proved:
        """Sign what there is to say of *wheel*, write it, and return what is proved with it."""
        payloads = make.statements(wheel, one.fork, about, raw, record=one.record, stack=one.stack)
        files = make.signed(payloads, raw, wheel, self.signer)
        for named, data in files.items():
            self.write(places.evidence(named.sha256), data)
        return replace(about, evidence=tuple(sorted(files, key=lambda file: file.kind)))

    def put(self, release: Release, proved: Sequence[Proved], lock: bytes, channel: Channel, onsite: bytes = b"") -> Entry:
        """Write the records of *release*, and publish it; nothing is checked."""
        data = canonical(release)
        proof = canonical(Proof(sha(data), BEGAN, tuple(proved)))
        entry = Entry(sha(data), sha(proof), release.name, release.stack, release.made, channel)
        self.write(places.release(entry.release), data)
        self.write(places.proof(entry.release, entry.proof), proof)
        self.write(places.lock(entry.release, release.locks[0].machine), lock)
        if onsite:
            self.write(places.onsite(entry.release), onsite)
        self.save(change.publish(self.manifest, entry, at=BEGAN, by=self.signer.by))
        return entry

    def again(
        self,
        name: str,
        *,
        channel: Channel = "verified",
        lock: bytes = b"",
        proved: Callable[[Proved], Proved] | None = None,
        **changed: Any,
    ) -> Entry:
        """
        Publish the release *name* again, changed, under the next number: what a publisher would sign who makes or tells it wrong.

        Args:
            lock: The bytes of its lock in place of those that it had. *proved*: changes what is proved of each wheel.
        """
        release = self.release(name)
        old = lock or self.path(places.lock(self.entry(name).release, release.locks[0].machine)).read_bytes()
        number = 1 + sum(entry.stack == release.stack for entry in self.manifest.entries)
        locks = tuple(replace(one, sha256=sha(old)) for one in release.locks)
        made = replace(release, **{"name": f"{release.stack}.{number}", "locks": locks, **changed})
        about = [(proved or (lambda one: one))(one) for one in self.proof(name).wheels]
        return self.put(made, about, old, channel)

    def save(self, manifest: Manifest) -> bytes:
        """Sign *manifest* and serve it."""
        self.manifest = manifest
        data = signed.seal(manifest, self.signer)
        self.write(places.MANIFEST, data)
        return data

    def yank(self, name: str, reason: str = "it is slow") -> None:
        self.save(change.yank(self.manifest, name, at=BEGAN, by=self.signer.by, reason=reason))

    def lock(self, ours: Sequence[Wheel], others: Sequence[Path]) -> bytes:
        """Return the lock of these wheels (PEP 751)."""
        rows = [(one.project, one.version, self.url + one.url, one.size, one.sha256) for one in ours]
        for path in others:
            name = WheelName.of(path.name)
            rows.append(
                (packages.canonical(name.distribution), name.version, self._other(path), path.stat().st_size, sha256_file(path))
            )
        text = 'lock-version = "1.0"\ncreated-by = "tests"\nrequires-python = ">=3.9"\n'
        for project, version, url, size, sha256 in sorted(rows):
            text += f'\n[[packages]]\nname = "{project}"\nversion = "{version}"\n'
            text += f'wheels = [{{ url = "{url}", size = {size}, hashes = {{ sha256 = "{sha256}" }} }}]\n'
        return text.encode()

    def _other(self, path: Path) -> str:
        kept = self.others / sha256_file(path)[:16] / path.name
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, kept)
        return f"{self.others_url}{kept.parent.name}/{kept.name}"

    def _put(self, name: str, path: Path) -> None:
        place = self.path(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)

    def named(self, evidence: Sequence[Evidence], kind: str) -> Evidence:
        return next(one for one in evidence if one.kind == kind)


class Host:
    """A static host with any number of indexes, each in a folder of its own, that are copies of one."""

    def __init__(self, folder: Path, served: indexserver.Served) -> None:
        self.folder, self.served = folder, served
        self._numbers = itertools.count(1)
        self.key = folder / "publisher.key"
        keys.make(self.key)
        self._template: Index | None = None
        self.made: dict[str, list[Path]] = {}

    def bare(self) -> Index:
        """Return an index without a release."""
        name = f"i{next(self._numbers)}"
        root = self.folder / "served" / name
        root.mkdir(parents=True)
        return Index(root, f"{self.served.url}{name}/", self.folder / "served" / "others", f"{self.served.url}others/", self.key)

    def index(self) -> Index:
        """Return an index with 2026.11.1 and 2026.11.2, both verified, signed for its own address."""
        if self._template is None:
            self._template = self._first()
        made = self.bare()
        shutil.copytree(self._template.root, made.root, dirs_exist_ok=True)
        made.save(replace(self._template.manifest, url=made.url))
        return made

    def _first(self) -> Index:
        made, folder = self.bare(), self.folder / "wheels"
        torch = wheels.plain(folder, "torch", "2.14.0", size=200_000)
        numpy = wheels.plain(
            folder, "numpy", "2.4.0", files={"numpy/core/__init__.py": b"", "numpy-2.4.0.data/scripts/f2py": b"#!python\nprint(1)\n"}
        )
        scipy = wheels.plain(folder, "scipy", "1.18.0")
        self.made["1"] = wheels.release(folder / "1", requires=["torch==2.14.0"], size=300_000)
        self.made["2"] = wheels.release(folder / "2", requires=["torch==2.14.0"], label=f"{wheels.LABEL}.2")
        self.made["others"] = [torch, numpy, scipy]
        made.add(self.made["1"], [torch, numpy])
        made.add(self.made["2"], [torch, scipy])
        return made


@contextlib.contextmanager
def hosted(folder: Path) -> Iterator[Host]:
    """Serve an empty host until the block ends."""
    (folder / "served").mkdir(parents=True)
    with indexserver.serve(folder / "served") as served:
        yield Host(folder, served)


class User:
    """
    A user's machine: a store, a folder for state, and an environment.

    Attributes:
        store, venv: Where they lie.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.store, self.venv = folder, folder / "store", folder / "venv"
        self.uv("venv", "--python", sys.executable, self.venv)
        self.site = next(self.venv.glob("lib/python3.*/site-packages"))

    @property
    def env(self) -> dict[str, str]:
        """Variables that keep everything of this user in its folder."""
        config = self.folder / "config.yaml"
        config.parent.mkdir(parents=True, exist_ok=True)
        config.touch()
        if not config.read_text():
            config.write_text("mirrors: {}\n")
        return {"SPARKWRIGHT_STATE_DIR": str(self.folder / "state"), "SPARKWRIGHT_CONFIG": str(config), "SPARKWRIGHT_RELEASES": ""}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Be this user in this process until the block ends."""
        before = {name: os.environ.get(name) for name in self.env}
        os.environ.update(self.env)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def context(self, *, offline: bool = False) -> StandaloneContext:
        return StandaloneContext(Store(self.store), offline)

    def uv(self, *words: str | Path) -> str:
        command = [find_uv_bin(), "--offline", "--quiet", "--no-config", "--cache-dir", str(self.folder / "uv"), *map(str, words)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def pip(self, verb: str, *words: str | Path) -> str:
        """Let uv install or uninstall in the environment, as people do."""
        options = ("--no-index", "--no-deps", "--reinstall") if verb == "install" else ()
        return self.uv("pip", verb, "--python", self.venv / "bin" / "python", *options, *words)

    def words(self, verb: str, *more: str | Path) -> list[str]:
        """Return the command line of *verb* on this machine."""
        return [verb, "--cache-dir", str(self.store), "--into", str(self.venv), *map(str, more)]

    def run(self, verb: str, *more: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        """Run the program as people do."""
        command = [sys.executable, "-m", "sparkwright", *self.words(verb, *more)]
        return subprocess.run(
            command, env={**os.environ, **self.env, **env}, cwd=self.folder, capture_output=True, text=True, check=False, timeout=120
        )

    def listing(self) -> dict[str, str]:
        """Return every file of the environment that a run could change: its name, and its bytes or where it points."""
        found = {}
        for path in sorted(self.venv.rglob("*")):
            name = path.relative_to(self.venv).as_posix()
            if path.is_symlink():
                found[name] = f"-> {path.readlink()}"
            elif path.is_file() and not name.endswith((".lock", ".pyc")):
                found[name] = sha256_file(path)
        return found


def wish(index: Index, /, **changed: Any) -> Wish:
    """Return the wish for the newest release of *index* by somebody who has its publisher's key."""
    return Wish(**{"index": index.url, "keys": (index.public,), **changed})
