"""
A small index, nights, drift and a status for tests of the site: records as they are published, signed, with measurements that are real
records of made-up speeds.

    made = sitedata.Made(tmp_path)
    made.release(verified=True); made.release(slower=0.05); made.night(1); made.drift(); made.sign()
    making.read(session, made.asked())
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from tests.support.wheels import ROOT, STACK
from tests.unit.reportdata import FORK, Maker

from sparkwright.bench.results import Result
from sparkwright.cherry_picks.drift import Drift, Line, Trial
from sparkwright.core.files import canonical, sha256_bytes
from sparkwright.core.states import State
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.operate.site import measured, night
from sparkwright.operate.site.making import Asked
from sparkwright.operate.site.records import File, Night, Stage
from sparkwright.release.client.install import Wish
from sparkwright.release.manifest import change, places, signed, times
from sparkwright.release.manifest.records import (
    Entry,
    Evidence,
    Fork,
    Gate,
    Missing,
    Proof,
    Proved,
    Release,
    Speed,
    Wheel,
)
from sparkwright.release.signing import keys
from sparkwright.release.signing.keys import KeySigner
from sparkwright.release.signing.trust import Trust

URL = "https://wheels.example/spark/"
DAY = "2026-11-22"
GATES = (("G0", "the bytes in the wheel"), ("G4", "the words it says"), ("G8", "throughput, against a baseline"))
PROJECTS = (("cutlass", "sparkwright-cutlass", "any"), ("flashinfer", "flashinfer-python", "any"), ("vllm", "vllm", "aarch64"))
CELLS = ((1024, 1024, 8),)
HOSTILE = '<script>alert(1)</script>"\'>&{{7*7}}</title>\u202e\u2066'


def result(sha256: str, seed: int, slower: float, at: str) -> Result:
    """Return a small gate of the wheel *sha256*; *slower*: than others, as a share."""
    maker = Maker(seed, points=CELLS)
    maker.speed, maker.requests = 0.024 * (1 + slower), 3
    made = maker.gate(blocks=4)
    moment = times.moment(at).timestamp()
    return replace(made, candidate=replace(FORK, sha256=sha256), began=moment)


class Made:
    """
    Everything that a site is made from, in one folder.

    Attributes:
        root: Of the index. *nights*: folder of records. *key*: the publisher's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.root, self.nights = folder, folder / "index", folder / "nights"
        key = folder / "publisher.key"
        if not key.exists():
            self.root.mkdir(parents=True)
            keys.make(key)
        self.signer, self.key = KeySigner.load(key), keys.public_path(key)
        self.manifest = change.first(URL, at=times.now())
        self.documents = sorted(folder.glob("drift-*.json"))
        self.context = context(folder / "store")

    def day(self, number: int) -> str:
        """Return the *number*-th day of the story."""
        return (datetime.date(2026, 10, 1) + datetime.timedelta(days=number)).isoformat()

    def release(
        self, *, verified: bool = False, slower: float = 0.0, yanked: str = "", speeds: bool = True, stack: str = STACK, text: str = "",
        about: str = "",
    ) -> Entry:  # fmt: skip
        """
        Publish the next release of *stack*; *text* stands where people's words do, *about*: another wheel that its measurement is of.
        """
        number = 1 + sum(entry.stack == stack for entry in self.manifest.entries)
        made = f"{self.day(number)}T07:30:00Z"
        wheels = tuple(self._wheel(fork, project, machine, f"{stack}.{number}", made) for fork, project, machine in PROJECTS)
        fork = Fork("vllm", "0.33.0", "git", "https://upstream.example/vllm.git", "4" * 40, "5" * 40, True, "graft", "6" * 40)
        release = Release(f"{stack}.{number}", stack, made, wheels, (fork,), ())
        address = self.put(places.release("{}"), release)
        proved = [self._proved(one, number, slower, made, verified, speeds, text, about) for one in wheels]
        proof = self.put(places.proof(address, "{}"), Proof(address, made, tuple(proved)))
        entry = Entry(address, proof, release.name, stack, made, "verified" if verified else "candidate")
        self.manifest = change.publish(self.manifest, entry, at=times.now(), by=self.signer.by)
        if yanked:
            self.manifest = change.yank(self.manifest, entry.name, at=times.now(), by=self.signer.by, reason=yanked)
        return entry

    def _wheel(self, fork: str, project: str, machine: Any, name: str, made: str) -> Wheel:
        version = f"0.33.0+spark.{name}"
        filename = f"{project.replace('-', '_')}-{version}-py3-none-any.whl"
        sha256 = sha256_bytes(filename.encode())
        return Wheel(filename, sha256, 1234567, fork, project, version, machine, places.wheel(sha256, filename), "1" * 64, made)

    def _proved(
        self, wheel: Wheel, number: int, slower: float, made: str, verified: bool, speeds: bool, text: str, about: str
    ) -> Proved:  # fmt: skip
        states: dict[str, State] = {"G0": "pass", "G4": "pass", "G8": "pass" if verified else "not-run"}
        gates = tuple(
            Gate(name, title, states[name], "" if states[name] == "pass" else text or "no GPU is here") for name, title in GATES
        )
        missing = () if verified else (Missing("G8", "not-run", "no-gpu", text or "no GPU is here"),)
        evidence, told = [self.evidence("verdicts", f'{{"about": "{wheel.sha256}"}}'.encode())], ()
        if wheel.project == "vllm" and speeds:
            data = msgspec.json.encode(result(about or wheel.sha256, number, slower, made))
            evidence.append(self.evidence("throughput", data))
            cells = [f"{prompt}/{answer} c{count}" for prompt, answer, count in CELLS]
            told = tuple(Speed(cell, "tpot", "pass", 0.99, 0.98, 1.004, 40.0, 0.1) for cell in cells)  # type: ignore[assignment]
        return Proved(
            wheel.sha256, "7" * 64, missing, gates, told, text or "stock vllm 0.33.0", 0.02, {"gpu": text or "NVIDIA GB10"}, tuple(evidence)
        )  # fmt: skip

    def evidence(self, kind: Any, data: bytes) -> Evidence:
        """Put a file of evidence."""
        sha256 = sha256_bytes(data)
        path = self.root / places.evidence(sha256)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return Evidence(kind, sha256, len(data))

    def put(self, name: str, record: Any) -> str:
        """Put *record* where *name* says, with ``{}`` for its sha256, and return that."""
        data = canonical(record)
        sha256 = sha256_bytes(data)
        path = self.root / name.format(sha256)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return sha256

    def sign(self) -> None:
        """Sign the manifest as it stands."""
        (self.root / places.MANIFEST).write_bytes(signed.seal(self.manifest, self.signer))

    def night(
        self, number: int, state: State = "pass", *, slower: float | None = None, stack: str = STACK, workflow: str = "pipeline",
        says: str = "", reference: str = "gate-failed",
    ) -> Path:  # fmt: skip
        """Record the *number*-th night; *slower*: measure a wheel of its own."""
        day = self.day(number)
        figures, files = (), ()
        if slower is not None:
            wheel = sha256_bytes(f"night {number}".encode())
            data = msgspec.json.encode(result(wheel, 1000 + number, slower, f"{day}T03:00:00Z"))
            figures = measured.of(msgspec.json.decode(data, type=Result), sha256_bytes(data))  # type: ignore[assignment]
            files = (File("vllm.throughput.json", "throughput", sha256_bytes(data), len(data), state, wheel),)  # type: ignore[assignment]
        stages = (Stage("build", "pass"), Stage("gate", state, "" if state == "pass" else reference, says))
        url = f"https://ci.example/runs/{number}"
        made = Night(
            workflow, f"{workflow}.{number}", stack, f"{day}T05:00:00Z", stages, url, "a" * 40, f"{day}T02:00:00Z", files, figures
        )  # fmt: skip
        return night.write(self.nights, made)

    def drift(self, number: int = 1, *, conflict: str = "clamp.patch", says: str = "hunk 1 of 2 stands nowhere") -> Path:
        """Write what ``drift --json`` printed on the *number*-th day."""
        trials = (
            Trial("fits.patch", "1" * 64, "0.34.0", "applies", (0, 4), ()),
            Trial(conflict, "2" * 64, "0.34.0", "conflict", (1, 9), (), (says,)),
        )
        made = Drift("vllm", STACK, self.day(number), ("0.34.0",), trials)
        path = self.folder / f"drift-{number}.json"
        path.write_bytes(msgspec.json.encode({"drift": [{"of": made, "absorbed": []}]}))
        self.documents.append(path)
        return path

    def status(self, text: str = "it is needed on a Spark") -> Path:
        """Write what ``status --json`` printed."""
        lines = [
            Line("vllm", "clamp.patch", text, 30, 42, "applied", "yes, fits 0.34.0", "", text, text),
            Line("vllm", "#35568", text, -1, 0, "not tried", "not looked at", "", text, text),
        ]
        path = self.folder / "status.json"
        path.write_bytes(msgspec.json.encode({"stacks": {STACK: lines}}))
        return path

    def asked(self, **changed: Any) -> Asked:
        """Return what the site is asked to be made from: everything here."""
        wish = Wish(str(self.root), (self.key,), URL)
        known = self.folder / "status.json"
        given = {"nights": self.nights, "drift": tuple(self.documents), "status": known if known.exists() else None, **changed}
        return Asked(**{"index": wish, "wanted": True, "day": DAY, **given})


def context(store: Path) -> RunContext:
    """Return a run on this repository with a store of its own, which may ask nobody."""
    return RunContext(Project(ROOT, STACK), Store(store), (), store / "dist", offline=True)


def again(folder: Path) -> Made:
    """Return what was made in *folder* before, to go on from there."""
    made = Made(folder)
    made.manifest = signed.read((made.root / places.MANIFEST).read_bytes(), Trust((made.signer.public,)), what="the manifest")
    return made


def story(folder: Path, releases: int = 14, nights: int = 30) -> Made:
    """Return a whole story: releases of which one is yanked and a later half is slower, nights of every state with days left out, drift."""
    made = Made(folder)
    for number in range(1, releases + 1):
        slower, yanked = 0.06 if number > releases // 2 else 0.0, "it writes garbage" if number == 3 else ""
        made.release(verified=number % 4 == 0, slower=slower, yanked=yanked)
    made.release(stack="2026.05", speeds=False)
    states: tuple[State, ...] = ("pass", "pass", "fail", "pass", "inconclusive", "invalid", "pass", "not-run")
    for number in range(1, nights + 1):
        if number % 9:
            made.night(number + 20, states[number % len(states)], slower=0.06 if number % 3 == 0 else None)
    for number in range(40, 43):
        made.drift(number)
        made.night(number, "fail", workflow="drift", reference="patch-conflict")
    made.status()
    made.sign()
    return made
