"""
Indexes on disk, of small real wheels and made-up proofs, without the verb `publish`: for tests of what is generated from records.

    made = indexdata.Made(tmp_path / "index")
    made.publish("2026.11.1", [wheels.plain(tmp_path, "vllm", "0.33.0+spark.1")])
    made.promote("2026.11.1")
    made.live()
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from packaging.utils import canonicalize_name

from sparkwright.builder.wheel.archive import WheelName
from sparkwright.core.files import canonical, sha256_bytes, sha256_file
from sparkwright.gates.core.verdict import State
from sparkwright.release import index
from sparkwright.release.manifest import change, places, signed
from sparkwright.release.manifest.records import (
    Entry,
    Evidence,
    Fork,
    Gate,
    Library,
    Lock,
    Machine,
    Manifest,
    Missing,
    Patch,
    Proof,
    Proved,
    Release,
    Speed,
    Wheel,
)
from sparkwright.release.signing.keys import KeySigner

URL = "https://wheels.example/spark/"
STARTED = "2026-11-22T07:30:00Z"
#: One key for all: Ed25519 signs the same bytes in the same way.
SIGNER = KeySigner(Ed25519PrivateKey.from_private_bytes(b"made up, for tests of the index "))
GATES = (("G0", "machine code"), ("G1", "numerics"), ("G4", "a served model"), ("G8", "throughput"))
KINDS = ("provenance", "test-result", "summary", "sbom", "verdicts")


def moment(serial: int) -> str:
    """Return the time at which the manifest *serial* is made."""
    return f"2026-11-22T{7 + serial // 60 % 17:02d}:{serial % 60:02d}:00Z"


class Made:
    """
    An index in the making.

    Attributes:
        manifest: As it stands; `live` signs it and puts its generation live.
    """

    def __init__(self, root: Path, url: str = URL) -> None:
        self.root, self.manifest = root, change.first(url, at=STARTED)
        self.releases: dict[str, Release] = {}
        root.mkdir(parents=True, exist_ok=True)

    def at(self) -> str:
        return moment(self.manifest.serial + 1)

    def publish(
        self, name: str, files: Sequence[Path], *, missing: Sequence[Missing] = (), kinds: Sequence[str] = KINDS,
        edit: Callable[[Wheel], Wheel] = lambda wheel: wheel, told: Callable[[Release], Release] = lambda release: release,
        locked: bool = True, yanked: str = "",
    ) -> Entry:  # fmt: skip
        """Put *files* into the index as the candidate *name* (``<stack>.<n>``)."""
        stack = name.rpartition(".")[0]
        found = tuple(edit(self._wheel(path)) for path in files)
        before = next((one.release for one in reversed(self.manifest.entries) if one.stack == stack), "")
        locks = tuple(_lock(machine, found) for machine in ("aarch64", "x86_64")) if locked else ()
        release = told(Release(name, stack, self.at(), found, (FORK,), locks, before=before))
        address = sha256_bytes(canonical(release))
        self._write(places.release(address), canonical(release))
        for lock in locks:
            self._write(places.lock(address, lock.machine), lock_bytes(lock.machine))
            self._write(places.requirements(address, lock.machine), requirements(found))
        proof = self._prove(address, found, missing, kinds)
        entry = Entry(address, proof, release.name, release.stack, release.made, "candidate", yanked)
        self.manifest = change.publish(self.manifest, entry, at=self.at(), by=SIGNER.by)
        self.releases[name] = release
        return entry

    def promote(self, name: str) -> None:
        entry = change.find(self.manifest, name)
        proof = self._prove(entry.release, self.releases[name].wheels, (), KINDS)
        self.manifest = change.promote(self.manifest, name, proof, at=self.at(), by=SIGNER.by)

    def yank(self, name: str, reason: str) -> None:
        self.manifest = change.yank(self.manifest, name, at=self.at(), by=SIGNER.by, reason=reason)

    def retain(self, keep: int) -> None:
        removed = {change.find(self.manifest, name).release: one for name, one in self.releases.items() if self._has(name)}
        self.manifest = change.retain(self.manifest, removed, keep=keep, at=self.at(), by=SIGNER.by)

    def _has(self, name: str) -> bool:
        return any(entry.name == name for entry in self.manifest.entries)

    @property
    def sealed(self) -> bytes:
        return signed.seal(self.manifest, SIGNER)

    def generate(self, *, fresh: bool = False) -> Path:
        return index.generate(self.root, self.manifest, self.sealed, fresh=fresh)

    def live(self, *, fresh: bool = False) -> Path:
        """Put the manifest's generation live, and return the root."""
        self.generate(fresh=fresh)
        index.flip(self.root, self.manifest.serial)
        return self.root

    def _write(self, name: str, data: bytes) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def _wheel(self, path: Path) -> Wheel:
        sha256, name = sha256_file(path), WheelName.of(path.name)
        with zipfile.ZipFile(path) as archive:
            metadata = archive.read(f"{name.info}/METADATA")
        place = self._write(places.wheel(sha256, path.name), path.read_bytes())
        place.with_name(f"{path.name}.metadata").write_bytes(metadata)
        project = canonicalize_name(name.distribution)
        machine: Machine = "aarch64" if "aarch64" in name.tag else "x86_64" if "x86_64" in name.tag else "any"
        return Wheel(
            path.name, sha256, path.stat().st_size, project.split("-")[0], project, name.version, machine, places.wheel(sha256, path.name),
            sha256_bytes(metadata), STARTED, ">=3.9", libraries=(Library("_C.abi3.so", 1_200_000, "compiled", {"sm_121f": 108}),),
        )  # fmt: skip

    def _prove(self, address: str, files: Sequence[Wheel], missing: Sequence[Missing], kinds: Sequence[str]) -> str:
        state: State = "not-run" if missing else "pass"
        gates = tuple(Gate(name, title, state if name == "G8" else "pass", missing[0].says if missing else "") for name, title in GATES)
        speeds = (Speed("1024/1024/1", "output_throughput", "pass", 1.01, 0.99, 1.03, 40.0, 0.1),)
        proved = []
        for wheel in files:
            held = tuple(self._evidence(kind, wheel, missing) for kind in kinds)
            measured = speeds if wheel.project == "vllm" and not missing else ()
            proved.append(Proved(wheel.sha256, "a" * 64, tuple(missing), gates, measured, "stock", 0.02, {"gpu": "made up"}, held))
        data = canonical(Proof(address, STARTED, tuple(proved)))
        proof = sha256_bytes(data)
        self._write(places.proof(address, proof), data)
        return proof

    def _evidence(self, kind: str, wheel: Wheel, missing: Sequence[Missing]) -> Evidence:
        data = msgspec.json.encode({"kind": kind, "wheel": wheel.sha256, "missing": missing, "made": "up"})
        sha256 = sha256_bytes(data)
        self._write(places.evidence(sha256), data)
        return msgspec.convert({"kind": kind, "sha256": sha256, "size": len(data)}, Evidence)


FORK = Fork(
    "vllm", "0.33.0", "git", "https://upstream.example/vllm.git", "4ba787ec9", "c" * 40, True, "graft", "d" * 40, "e" * 64,
    (Patch("clamp.patch", "f" * 64, "Clamp the samples", "a negative estimate exhausts the memory"),), 3, "cu130", "namespace",
)  # fmt: skip
LACK = Missing("G8", "not-run", "gate-not-run", "no GB10 was at hand")


def lock_bytes(machine: str) -> bytes:
    """Return a lock that names nothing."""
    return f'lock-version = "1.0"\ncreated-by = "a test, for {machine}"\npackages = []\n'.encode()


def requirements(files: Sequence[Wheel]) -> bytes:
    """Return *files* as requirements with hashes, named by addresses relative to nothing: by name and version."""
    return "".join(f"{one.project}=={one.version} --hash=sha256:{one.sha256}\n" for one in files).encode()


def _lock(machine: Machine, files: Sequence[Wheel]) -> Lock:
    packages = {one.project: one.version for one in files} | {"torch": "2.14.0"}
    return Lock(machine, sha256_bytes(lock_bytes(machine)), sha256_bytes(requirements(files)), packages)


def tree(root: Path) -> dict[str, bytes]:
    """Return every file that a client can reach at *root*, by its path, links followed."""
    found = [Path(folder, name) for folder, _, names in os.walk(root, followlinks=True) for name in names]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in found}


def manifest_of(root: Path) -> Manifest:
    """Return the live manifest, whose signature holds."""
    from sparkwright.release.signing.trust import Trust

    found = index.current(root)
    assert found
    return signed.read(found[1], Trust(keys=(SIGNER.public,)), what="the manifest")
