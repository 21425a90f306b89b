"""
The site of 500 releases and a year of nights: made from nothing, again with nothing new, and with one release more.

Records, proofs, measurements and nights are made up, in the shape of real ones: five wheels a release, eight gates for the one that serves,
a measurement of four cells over six launches for each release and each third night. Real measurements are larger (to some 20 MB); each is
read once, and its figures are kept in the store by its hash. Exits with 1 when a budget is broken. No peer has such pages to compare with.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

import measure
from measure import child
from sparkwright.bench.load.vllm_bench import LoadResult, Request
from sparkwright.bench.records import Side
from sparkwright.bench.results import CellResult, Measurement, Result, Series, Subject
from sparkwright.core.console import console
from sparkwright.core.console import size as sized
from sparkwright.core.files import canonical, sha256_bytes
from sparkwright.core.states import State
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.operate.site import making, measured, night
from sparkwright.operate.site.making import Asked
from sparkwright.operate.site.records import Night, Stage
from sparkwright.release.client.install import Wish
from sparkwright.release.manifest import change, places, signed, times
from sparkwright.release.manifest.records import (
    Channel,
    Entry,
    Evidence,
    Fork,
    Gate,
    Machine,
    Missing,
    Proof,
    Proved,
    Release,
    Speed,
    Wheel,
)
from sparkwright.release.signing import keys
from sparkwright.release.signing.keys import KeySigner

#: Promised: seconds from nothing, megabytes of the whole site, megabytes of one view of a page.
FULL, WHOLE, VIEW = 20.0, 5.0, 1.0

URL = "https://wheels.example/spark/"
STACK, DAY = "2026.11", "2026-11-22"
PROJECTS: tuple[tuple[str, str, Machine], ...] = (
    ("cutlass", "sparkwright-cutlass", "any"), ("flashinfer", "flashinfer-jit-cache", "aarch64"),
    ("flashinfer", "flashinfer-python", "any"), ("sparkwright", "sparkwright", "any"), ("vllm", "vllm", "aarch64"),
)  # fmt: skip
KINDS = ("provenance", "test-result", "summary", "sbom", "verdicts")
GATES = ("G0", "G1", "G2", "G3", "G4", "G5", "G6", "G8")
CELLS = ((1024, 1024, 1), (4096, 1024, 1), (1024, 1024, 8), (1024, 1024, 32))


class Books:
    """The set on disk: *count* releases and *nights* nights."""

    def __init__(self, root: Path, count: int, nights: int) -> None:
        self.root, self.random = root, random.Random(8)
        keys.make(root / "key")
        self.signer = KeySigner.load(root / "key")
        self.manifest = change.first(URL, at=times.now())
        self.began = datetime.datetime(2025, 6, 1, 7, tzinfo=datetime.UTC)
        for number in range(1, count + 1):
            self.add(number)
        for number in range(nights):
            self.night(number)

    def add(self, number: int) -> None:
        """Publish one more; every third is verified, and the second half is 4 % slower."""
        made = times.text(self.began + datetime.timedelta(days=number))
        wheels = tuple(self._wheel(*one, number, made) for one in PROJECTS)
        fork = Fork("vllm", "0.33.0", "git", "https://upstream.example/vllm.git", "4" * 40, "5" * 40, True, "graft", "6" * 40)
        release = Release(f"{STACK}.{number}", STACK, made, wheels, (fork,), ())
        address = self._put(places.release("{}"), release)
        proof = self._put(places.proof(address, "{}"), Proof(address, made, tuple(self._proved(one, number, made) for one in wheels)))
        channel: Channel = "candidate" if number % 3 else "verified"
        entry = Entry(address, proof, release.name, STACK, made, channel)
        self.manifest = change.publish(self.manifest, entry, at=times.now(), by=self.signer.by)

    def _wheel(self, fork: str, project: str, machine: Machine, number: int, made: str) -> Wheel:
        version = f"0.33.0+spark.2026.11.{number}.p1a2b3c4d.cu130"
        filename = f"{project.replace('-', '_')}-{version}-py3-none-any.whl"
        sha256 = sha256_bytes(filename.encode())
        return Wheel(filename, sha256, 412_345_678, fork, project, version, machine, places.wheel(sha256, filename), "1" * 64, made)

    def _proved(self, wheel: Wheel, number: int, made: str) -> Proved:
        verified, serves = not number % 3, wheel.project == "vllm"
        state: State = "pass" if verified else "not-run"
        gates = tuple(
            Gate(name, f"what {name} looks at", "pass" if name < "G2" else state, "" if verified or name < "G2" else "no GPU is here")
            for name in (GATES if serves else GATES[:1])
        )
        missing = () if verified or not serves else tuple(Missing(name, "not-run", "no-gpu", "no GPU is here") for name in GATES[2:])
        evidence = [self._evidence(kind, f"{kind}{wheel.sha256}".encode()) for kind in KINDS]
        speeds: tuple[Speed, ...] = ()
        if serves:
            evidence.append(self._evidence("throughput", msgspec.json.encode(self.result(wheel.sha256, 0.04 * (number > 250), made))))
            speeds = tuple(Speed(name, "tpot", "pass", 1.01, 0.99, 1.03, 40.0, 0.1) for name, *_ in _cells())
        host = {"gpu": "NVIDIA GB10 (SM 12.1)", "driver": "580.95.05", "memory": "128.0 GB"}
        return Proved(wheel.sha256, "7" * 64, missing, gates, speeds, "stock vllm 0.33.0", 0.02, host, tuple(evidence))

    def _evidence(self, kind: str, data: bytes) -> Evidence:
        sha256 = sha256_bytes(data)
        path = self.root / places.evidence(sha256)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return msgspec.convert({"kind": kind, "sha256": sha256, "size": len(data)}, Evidence)

    def result(self, sha256: str, slower: float, at: str) -> Result:
        """Return a made-up gate of the wheel *sha256*."""
        day = math.exp(self.random.gauss(0, 0.006))
        legs = tuple(self._legs(slower, day))
        cells = tuple(CellResult(name, prompt, answer, count, (Series("tpot", True),)) for name, prompt, answer, count in _cells())
        subject = Subject("made up", sha256=sha256)
        host = {"gpu": "NVIDIA GB10 (SM 12.1)"}
        made = Result("gate", "pass", "made up", subject, cells, legs, recipe="qwen3-next-80b-nvfp4", host=host)
        return replace(made, began=times.moment(at).timestamp())

    def _legs(self, slower: float, day: float) -> Iterator[Measurement]:
        for block in range(6):
            for name, prompt, answer, count in _cells():
                for position, letter in enumerate("ABBA"):
                    side: Side = "baseline" if letter == "A" else "candidate"
                    share = (1 + slower * (side == "candidate")) * day * math.exp(self.random.gauss(0, 0.004))
                    each = 0.024 * (1 + prompt / 400_000) * (1 + 0.02 * count) * share
                    requests = tuple(
                        Request(0.1 * at, 0.3, 0.3 + each * (answer - 1) * self.random.gauss(1, 0.002), prompt, answer) for at in range(8)
                    )
                    run = LoadResult("made up", "e" * 64, max(one.start + one.latency for one in requests), requests)
                    yield Measurement(name, block, block, side, position, run=run)

    def night(self, number: int) -> None:
        """Record a night; some fail, some are missing, each third measures."""
        if self.random.random() < 0.05:
            return
        day = self.began + datetime.timedelta(days=number)
        state: State = self.random.choice(("pass", "pass", "pass", "fail", "inconclusive", "invalid"))
        wheel, end = sha256_bytes(f"night {number}".encode()), times.text(day)
        data = self.result(wheel, 0.04 * (number > 250), end)
        figures = () if number % 3 else measured.of(data, sha256_bytes(f"result {number}".encode()))
        gated = Stage("gate", state, "" if state == "pass" else "gate-failed", "made up")
        stages = (Stage("build", "pass"), gated, Stage("publish", "not-run"))
        made = Night("pipeline", f"{number}", STACK, end, stages, f"https://ci.example/runs/{number}", "a" * 40, "", (), figures)
        night.write(self.root / "nights", made)

    def _put(self, name: str, record: Release | Proof) -> str:
        data = canonical(record)
        sha256 = sha256_bytes(data)
        path = self.root / name.format(sha256)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return sha256

    def sign(self) -> None:
        (self.root / places.MANIFEST).write_bytes(signed.seal(self.manifest, self.signer))


def _cells() -> list[tuple[str, int, int, int]]:
    return [(f"{prompt}/{answer} c{count}", prompt, answer, count) for prompt, answer, count in CELLS]


def once(folder: Path) -> None:
    """Make the site of what lies in *folder*, and print what it took; this runs in a process of its own."""
    # Imports are no work of the site's.
    import jinja2  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import scipy.stats  # noqa: F401

    context = RunContext(Project(measure.ROOT, STACK), Store(folder / "store"), (), folder / "dist", offline=True)
    books = folder / "books"
    wish = Wish(str(books), (keys.public_path(books / "key"),), URL)
    began, busy = time.perf_counter(), time.process_time()
    found = making.read(context, Asked(wish, True, DAY, books / "nights"))
    read = time.perf_counter() - began
    written = making.make(context, found, folder / "site")
    seconds = time.perf_counter() - began
    figures = sum(len(one.spots) for one in found.histories)
    cpu = time.process_time() - busy
    told = {"seconds": seconds, "cpu": cpu, "read": read, "figures": figures, "problems": len(found.problems)}
    console.result(json.dumps({**told, **msgspec.to_builtins(written)}))


def ours(folder: Path) -> dict[str, float]:
    """Return what one run took, in a process of its own, with its peak in megabytes."""
    _, megabytes, said = child([__file__, "--once", str(folder)])
    return {**json.loads(said), "megabytes": megabytes}


def site(options: argparse.Namespace) -> int:
    """Measure, and return the exit code."""
    with tempfile.TemporaryDirectory(dir=options.scratch) as name:
        folder = Path(name)
        (folder / "books").mkdir()
        os.environ["SPARKWRIGHT_STATE_DIR"] = str(folder / "state")
        books = Books(folder / "books", options.releases, options.nights)
        books.sign()
        runs: dict[str, list[dict[str, float]]] = {"from nothing": [], "nothing new": [], "one release more": []}
        for number in range(options.runs):
            (folder / "store").exists() and (folder / "store").rename(folder / f"store{number}")
            (folder / "site").exists() and (folder / "site").rename(folder / f"site{number}")
            runs["from nothing"].append(ours(folder))
            runs["nothing new"].append(ours(folder))
            books.add(options.releases + number + 1)
            books.sign()
            runs["one release more"].append(ours(folder))
    return told(runs, options)


def told(runs: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> int:
    """Print the table of *runs*, and return 1 where a budget is broken."""
    rows = []
    for name, found in runs.items():
        seconds = [one["seconds"] for one in found]
        read, cpu = (f"{statistics.median(one[part] for one in found):.1f}" for part in ("read", "cpu"))
        peak, last = max(one["megabytes"] for one in found), found[-1]
        written = f"{last['written']:.0f} of {last['files']:.0f}"
        span = f"{min(seconds):.1f} to {max(seconds):.1f}"
        rows.append([name, f"{statistics.median(seconds):.1f}", span, read, cpu, f"{peak:.0f}", written])
    first = runs["from nothing"]
    host = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    title = f"{options.releases} releases, {options.nights} nights, {first[0]['figures']:.0f} figures ({options.runs} runs; {host})"
    console.table(title, ["", ">s", ">range", ">of which reading", ">CPU s", ">peak MB", ">files written"], rows, result=True)
    size, view = max(one["size"] for one in first), max(one["largest"] for one in first)
    console.result(f"the whole site: {sized(size)}; the heaviest view of a page: {sized(view)}")
    took = statistics.median(one["seconds"] for one in first)
    held = (("from nothing", took, FULL, "s"), ("site", size / 1e6, WHOLE, "MB"), ("view", view / 1e6, VIEW, "MB"))
    broken = [f"{name}: {value:.2f} {unit}, promised {bound:g}" for name, value, bound, unit in held if value > bound]
    broken += [f"{one['problems']:.0f} records could not be taken" for one in first if one["problems"]]
    console.result(f"budgets: {'BROKEN: ' + '; '.join(broken) if broken else 'kept'}")
    console.document({"releases": options.releases, "nights": options.nights, "host": host, "runs": runs, "broken": broken})
    console.finish()
    return int(bool(broken))


def more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--releases", type=int, default=500)
    parser.add_argument("--nights", type=int, default=365)
    parser.add_argument("--scratch", type=Path, help="where the set is made; it takes 100 MB")
    parser.add_argument("--once", type=Path, help=argparse.SUPPRESS)


def main() -> int:
    options = measure.arguments(__doc__ or "", more)
    console.json = options.json
    if options.once:
        once(options.once)
        return 0
    return site(options)


if __name__ == "__main__":
    sys.exit(main())
