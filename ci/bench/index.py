"""
The index of 1,000 releases × 10 wheels: made from nothing, and with one publication more, against dumb-pypi on the same wheels.

Records, proofs and files are made up, in the sizes of real ones: 150 locked packages, eight gates a wheel, speeds of vLLM. Ours writes the
roots of two channels, as HTML and JSON, and the front page, having read every record by its hash and asked for every file; dumb-pypi writes
one root and its pages, without a file for each version. The page, notes and root of a release are made when it is published (one of them is
in "one more") and lie beside its records; what all of them take together is told by itself. Exits with 1 when a budget is broken.
``--hashing MEGABYTES`` compares our hashing with sha256sum instead.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import measure
from sparkwright.core.console import console
from sparkwright.core.files import canonical, sha256_bytes, sha256_file
from sparkwright.release import index
from sparkwright.release.manifest import change, places, signed
from sparkwright.release.manifest.records import (
    Channel,
    Entry,
    Evidence,
    Fork,
    Gate,
    Library,
    Lock,
    Machine,
    Manifest,
    Patch,
    Proof,
    Proved,
    Release,
    Speed,
    Wheel,
)
from sparkwright.release.signing.keys import KeySigner

#: Promised: seconds from nothing, seconds for one publication, megabytes at the most; and the share of sha256sum's speed.
FULL, ONE_MORE, MEMORY, HASHING = 3.0, 0.3, 300.0, 0.8

MACHINES: tuple[Machine, ...] = ("aarch64", "x86_64")
PROJECTS = ("flashinfer-jit-cache", "flashinfer-python", "sparkwright", "sparkwright-cutlass", "vllm")
KINDS = ("provenance", "test-result", "summary", "sbom", "verdicts", "throughput")
GATES = ("G0", "G1", "G2", "G3", "G4", "G5", "G6", "G8")
TIME = "2026-11-22T07:30:00Z"


class Side(msgspec.Struct, frozen=True):
    """What one program took: seconds of each run from nothing, of each with one publication more, and its peak in megabytes."""

    name: str
    full: tuple[float, ...]
    one_more: tuple[float, ...]
    megabytes: float


class Books:
    """The set on disk: *count* releases of ten wheels, and one to come."""

    def __init__(self, root: Path, count: int) -> None:
        self.root, self.signer = root, KeySigner(Ed25519PrivateKey.generate())
        self.packages: list[dict[str, str]] = []
        self._byte: dict[str, Path] = {}
        self.manifest = change.first("https://wheels.example/spark/", at=TIME)
        for number in range(1, count + 1):
            self.add(number)

    def add(self, number: int) -> None:
        """Publish one more; every third is verified."""
        wheels = tuple(self._wheel(project, machine, number) for project in PROJECTS for machine in MACHINES)
        packages = {f"package-{count}": f"1.{count}.{number}" for count in range(150)}
        locks = tuple(Lock(machine, "1" * 64, "2" * 64, packages) for machine in MACHINES)
        patches = tuple(Patch(f"{count}.patch", "3" * 64, f"Patch {count}", "it is needed on a Spark", count) for count in range(8))
        origin = "https://upstream.example/vllm.git"
        fork = Fork("vllm", "0.33.0", "git", origin, "4" * 40, "5" * 40, True, "graft", "6" * 40, patches=patches)
        before = self.manifest.entries[-1].release if self.manifest.entries else ""
        release = Release(f"2026.11.{number}", "2026.11", TIME, wheels, (fork,), locks, before=before)
        address = self._record(release, "release")
        for machine in MACHINES:
            self._file(places.lock(address, machine), "lock")
            self._file(places.requirements(address, machine), "requirements")
        proof = self._record(Proof(address, TIME, tuple(self._proved(wheel) for wheel in wheels)), address)
        channel: Channel = "candidate" if number % 3 else "verified"
        entry = Entry(address, proof, release.name, "2026.11", TIME, channel)
        self.manifest = change.publish(self.manifest, entry, at=TIME, by=self.signer.by)

    def _wheel(self, project: str, machine: Machine, number: int) -> Wheel:
        version = f"0.33.0+spark.2026.11.{number}"
        filename = f"{project.replace('-', '_')}-{version}-cp38-abi3-manylinux_2_34_{machine}.whl"
        sha256 = sha256_bytes(filename.encode())
        url = places.wheel(sha256, filename)
        size = self._file(url, "wheel")
        self._file(f"{url}.metadata", "metadata")
        self.packages.append(
            {"filename": filename, "hash": f"sha256={sha256}", "requires_python": ">=3.10", "core_metadata": f"sha256={sha256}"}
        )
        libraries = tuple(Library(f"_{count}.abi3.so", 100_000_000, "compiled", {"sm_121f": 108, "sm_80": 4}) for count in range(5))
        return Wheel(
            filename, sha256, size, project.partition("-")[0], project, version, machine, url, sha256, TIME, ">=3.10", libraries=libraries
        )

    def _proved(self, wheel: Wheel) -> Proved:
        evidence = []
        for kind in KINDS:
            sha256 = sha256_bytes(f"{kind}{wheel.sha256}".encode())
            size = self._file(places.evidence(sha256), "evidence")
            evidence.append(msgspec.convert({"kind": kind, "sha256": sha256, "size": size}, Evidence))
        cells = tuple(Speed(f"1024/1024/{count}", "output_throughput", "pass", 1.01, 0.99, 1.03, 40.0, 0.1) for count in range(8))
        gates = tuple(Gate(name, f"what {name} looks at", "pass") for name in GATES)
        return Proved(wheel.sha256, "7" * 64, (), gates, cells if wheel.project == "vllm" else (), "stock", 0.02, evidence=tuple(evidence))

    def _record(self, record: Release | Proof, release: str) -> str:
        data = canonical(record)
        sha256 = sha256_bytes(data)
        path = self.root / (places.proof(release, sha256) if isinstance(record, Proof) else places.release(sha256))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return sha256

    def _file(self, name: str, text: str) -> int:
        """Put a few bytes to *name*; a name for bytes that are there already, for the disk's sake."""
        # A file has at most some tens of thousands of names.
        path, kind = self.root / name, f"{text}{len(self.manifest.entries) // 100}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind in self._byte:
            os.link(self._byte[kind], path)
        else:
            path.write_text(text)
            self._byte[kind] = path
        return len(text)

    @property
    def sealed(self) -> bytes:
        return signed.seal(self.manifest, self.signer)


def once(root: Path) -> None:
    """Make the generation of the manifest that lies in *root*, flip, and print the seconds; this runs in a process of its own."""
    # Imports are no work of the generator; those of dumb-pypi are not counted, either.
    import jinja2  # noqa: F401

    from sparkwright.release import notes  # noqa: F401

    manifest = msgspec.json.decode((root / "bench.json").read_bytes(), type=Manifest)
    sealed = (root / "bench.sealed").read_bytes()
    began = time.perf_counter()
    index.generate(root, manifest, sealed)
    index.flip(root, manifest.serial)
    console.result(json.dumps({"seconds": time.perf_counter() - began}))


def child(command: list[str]) -> tuple[float, float, str]:
    """Run *command*; return its seconds, its peak in megabytes, and what it printed."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"failed: {' '.join(command)}")
    return time.perf_counter() - began, usage.ru_maxrss / 1024, said


def ours(books: Books) -> tuple[float, float]:
    """Return seconds and megabytes of one generation and its flip, in a process of its own."""
    (books.root / "bench.json").write_bytes(msgspec.json.encode(books.manifest))
    (books.root / "bench.sealed").write_bytes(books.sealed)
    _, megabytes, said = child([__file__, "--once", str(books.root)])
    return json.loads(said)["seconds"], megabytes


def nothing(root: Path) -> None:
    """Remove every generation."""
    shutil.rmtree(root / "g")
    (root / "current").unlink()
    os.sync()


def theirs(folder: Path, packages: list[dict[str, str]], before: list[dict[str, str]]) -> tuple[float, float]:
    """Return seconds and megabytes of dumb-pypi, without what Python and its imports take."""
    options = []
    for name, found in (("--package-list-json", packages), ("--previous-package-list-json", before)):
        if found:
            (folder / f"{name}.txt").write_text("".join(json.dumps(one) + "\n" for one in found))
            options += [name, str(folder / f"{name}.txt")]
    program = ["-m", "dumb_pypi.main", "--output-dir", str(folder / "out"), "--packages-url", "../../files"]
    os.sync()
    seconds, megabytes, _ = child([*program, *options, "--no-per-release-json", "--no-generate-timestamp"])
    return seconds - child(["-c", "import dumb_pypi.main"])[0], megabytes


def generation(options: argparse.Namespace) -> int:
    """Compare the two, and return the exit code."""
    rival = bool(child(["-c", "import importlib.util as u; print(u.find_spec('dumb_pypi') is not None)"])[2].strip() == "True")
    with tempfile.TemporaryDirectory(dir=options.scratch) as name:
        folder, taken = Path(name), dict[str, list[float]]()
        (folder / "out").mkdir()
        books, peer = Books(folder / "index", options.releases), 0.0
        pages, peak = ours(books)
        for number in range(options.runs):
            before = list(books.packages)
            nothing(books.root)
            seconds, megabytes = ours(books)
            taken.setdefault("full", []).append(seconds)
            peak = max(peak, megabytes)
            if rival:
                shutil.rmtree(folder / "out")
                seconds, megabytes = theirs(folder, before, [])
                taken.setdefault("their full", []).append(seconds)
                peer = max(peer, megabytes)
            books.add(options.releases + number + 1)
            os.sync()
            seconds, megabytes = ours(books)
            taken.setdefault("one more", []).append(seconds)
            peak = max(peak, megabytes)
            if rival:
                seconds, _ = theirs(folder, books.packages, before)
                taken.setdefault("their one more", []).append(seconds)
    sides = [Side("sparkwright", tuple(taken["full"]), tuple(taken["one more"]), round(peak, 1))]
    if rival:
        sides.append(Side("dumb-pypi", tuple(taken["their full"]), tuple(taken["their one more"]), round(peer, 1)))
    else:
        console.note("dumb-pypi is not installed here, so nothing is compared with it.")
    return told(sides, pages, options)


def told(sides: list[Side], pages: float, options: argparse.Namespace) -> int:
    """Print the table of *sides*, and return 1 where a budget is broken."""
    first, rows = sides[0], []
    medians = [(statistics.median(side.full), statistics.median(side.one_more)) for side in sides]
    for side, (full, one_more) in zip(sides, medians, strict=True):
        ratios = f"{full / medians[0][0]:.2f}", f"{one_more / medians[0][1]:.2f}"
        spans = [f"{min(some):.2f} to {max(some):.2f}" for some in (side.full, side.one_more)]
        rows.append([side.name, f"{full:.2f}", spans[0], ratios[0], f"{one_more:.2f}", spans[1], ratios[1], f"{side.megabytes:.0f}"])
    host = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    columns = ["", ">from nothing s", ">range", ">times ours", ">one more s", ">range", ">times ours", ">peak MB"]
    console.table(f"{options.releases} releases × 10 wheels ({options.runs} runs; {host})", columns, rows, result=True)
    broken = [
        f"{name}: {value:.2f} {unit}, promised {bound:g}"
        for name, value, bound, unit in (
            ("from nothing", medians[0][0], FULL, "s"), ("one more", medians[0][1], ONE_MORE, "s"), ("peak", first.megabytes, MEMORY, "MB")
        )
        if value > bound
    ]  # fmt: skip
    console.result(f"with the page, notes and root of each of {options.releases} releases anew: {pages:.1f} s (once; no budget)")
    console.result(f"budgets: {'BROKEN: ' + '; '.join(broken) if broken else 'kept'}")
    console.document({"releases": options.releases, "host": host, "sides": sides, "pages_seconds": pages, "broken": broken})
    console.finish()
    return int(bool(broken))


def hashing(options: argparse.Namespace) -> int:
    """Compare the hashing of one file with sha256sum, in turns."""
    with tempfile.TemporaryDirectory(dir=options.scratch) as name:
        path, taken = Path(name, "wheel"), (list[float](), list[float]())
        with path.open("wb") as stream:
            for _ in range(options.hashing):
                stream.write(os.urandom(1_000_000))
        for _ in range(options.runs + 1):
            began = time.perf_counter()
            found = sha256_file(path)
            middle = time.perf_counter()
            said = subprocess.run(["sha256sum", str(path)], capture_output=True, text=True, check=True).stdout
            taken[0].append(middle - began)
            taken[1].append(time.perf_counter() - middle)
            assert said.split()[0] == found
    speeds = [options.hashing / statistics.median(some[1:]) for some in taken]
    ratio = speeds[0] / speeds[1]
    rows = [["sparkwright", f"{speeds[0]:,.0f}", "1.00"], ["sha256sum", f"{speeds[1]:,.0f}", f"{speeds[1] / speeds[0]:.2f}"]]
    console.table(f"sha256 of {options.hashing} MB ({options.runs} runs)", ["", ">MB/s", ">times ours"], rows, result=True)
    console.result(f"bound: {HASHING:g} of sha256sum; {ratio:.2f}, {'kept' if ratio >= HASHING else 'BROKEN'}")
    console.document({"megabytes": options.hashing, "speeds": speeds, "ratio": ratio})
    console.finish()
    return int(ratio < HASHING)


def more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--releases", type=int, default=1000)
    parser.add_argument("--scratch", type=Path, help="where the set is made; it takes 300 MB")
    parser.add_argument("--hashing", type=int, default=0, metavar="MEGABYTES", help="measure hashing of a file of that size instead")
    parser.add_argument("--once", type=Path, help=argparse.SUPPRESS)


def main() -> int:
    options = measure.arguments(__doc__ or "", more)
    console.json = options.json
    if options.once:
        once(options.once)
        return 0
    return hashing(options) if options.hashing else generation(options)


if __name__ == "__main__":
    sys.exit(main())
