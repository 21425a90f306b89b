"""
A release published into an index of 200 releases with 10 wheels each, and 1,000 releases read by the client.

Records are made up, in the sizes of real ones: 150 locked packages, nine gates a wheel, twelve speeds of vLLM. Publishing counts the
reading and verification of the whole index, ten new files, the signatures and all pages. Reading counts a refresh from a folder and the
state of every release.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path

import measure
from sparkwright.client import index as client
from sparkwright.client.records import (
    GateResult,
    Machine,
    Missing,
    Proof,
    Release,
    ReleaseFile,
    ReleaseLock,
    ReleaseState,
    ReleaseWheel,
    Speed,
)
from sparkwright.core.files import sha256_bytes
from sparkwright.gates.core.ladder import GATES
from sparkwright.release import keys, pages
from sparkwright.release.policy import RoleRule, Roles
from sparkwright.release.repository import IndexFacts, IndexFolder

ROLES = Roles(RoleRule(365), RoleRule(180), RoleRule(30), RoleRule(30))
#: Promised seconds.
PUBLISH, READ = 3.0, 2.0


def release(number: int, wheels: int = 10) -> tuple[Release, dict[ReleaseFile, bytes]]:
    """Return a release, and what its wheels hold."""
    stack, made = (
        f"2026.{number % 4:02}",
        f"2026-11-22T{number // 3600:02}:{number // 60 % 60:02}:{number % 60:02}Z",
    )
    name, contents, own = f"{stack}.{number + 1}", {}, []
    speeds = tuple(
        Speed(f"{1024 << place % 4}/1024 c{place}", "tpot", "pass", 0.98, 0.97, 0.99)
        for place in range(12)
    )
    gates = tuple(GateResult(gate, title, "pass") for gate, title in GATES.items())
    missing = (Missing("G6", "not-run", "not-climbed", "the gate was not run with these bytes"),)
    for place in range(wheels):
        project = ("vllm", "flashinfer-python", "sparkwright-cutlass")[place % 3]
        data = f"{name} {place}".encode()
        machine: Machine = "x86_64" if place % 2 else "aarch64"
        filename = f"{project.replace('-', '_')}-0.33.{place}+spark.{name}-py3-none-manylinux_2_28_{machine}.whl"
        file = ReleaseFile(name=filename, size=len(data), sha256=sha256_bytes(data))
        contents[file] = data
        own.append(
            ReleaseWheel(
                name=file.name, size=file.size, sha256=file.sha256, fork="vllm", project=project, version=f"0.33.{place}+spark.{name}",
                machine=machine, metadata=sha256_bytes(data), uploaded=made,
                proof=Proof(policy="0" * 64, gates=gates, speeds=speeds, missing=missing),
            )
        )  # fmt: skip
    packages = {f"package-{place}": f"{place}.0" for place in range(150)}
    lock = ReleaseLock(
        name="pylock.aarch64.toml",
        size=1,
        sha256="0" * 64,
        machine="aarch64",
        pythons=("3.12",),
        packages=packages,
    )
    return Release(name=name, stack=stack, made=made, wheels=tuple(own), locks=(lock,)), contents


def add(folder: Path, held: keys.Keys, numbers: range, *, files: bool) -> None:
    """Add releases in one change, with their files if *files*, and write the pages."""
    with IndexFolder(folder).changing(held, ROLES) as change:
        change.facts = IndexFacts("https://wheels.example/")
        for number in numbers:
            made, contents = release(number)
            for file, data in contents.items() if files else ():
                change.put(file, data)
            state = ReleaseState(
                stack=made.stack,
                made=made.made,
                channel="candidate",
                machines=("aarch64",),
                pythons=("3.12",),
            )
            change.set_release(made, state)
    pages.write(IndexFolder(folder))


options = measure.arguments(__doc__ or "")
with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    keys.make(folder / "keys")
    held, numbers = keys.load([folder / "keys"]), itertools.count(200)
    add(folder / "index", held, range(200), files=False)

    def publish() -> None:
        """Publish one release more."""
        number = next(numbers)
        add(folder / "index", held, range(number, number + 1), files=True)

    measure.compare("one release into 200 of 10 wheels", {"publish": publish}, options, PUBLISH)
    add(folder / "large", held, range(1000), files=False)
    fingerprint = IndexFolder(folder / "large").fingerprint

    def read() -> None:
        """Read the states of all releases, as a client that has never seen the index."""
        state = folder / "state" / os.urandom(4).hex()
        state.mkdir(parents=True)
        assert len(client.open_index(state, str(folder / "large"), fingerprint).states) == 1000

    measure.compare("1,000 releases read by the client", {"read": read}, options, READ)
