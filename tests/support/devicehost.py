"""The sources of the probe, compiled for the host as they are or with one line changed, and run."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparkwright.core import strict_yaml
from sparkwright.gates.core.verdict import Check
from sparkwright.gates.device.gate import Backend, DevicePolicy, FuzzPolicy, fuzzed
from sparkwright.gates.device.probe import SOURCES

ROOT = Path(__file__).parents[2]
POLICY = strict_yaml.load(ROOT / "ci" / "gates" / "device.yaml", DevicePolicy)
#: Fewer than the product's, since a compiled mutant is run on each.
FUZZ = FuzzPolicy(gemm=10, moe=10, rounded=3, repeats=2, tolerance=POLICY.fuzz.tolerance)

#: File → what stands there, and what is to stand there instead.
Change = Mapping[str, tuple[str, str]]


def sources(folder: Path, change: Change | None = None) -> Path:
    """Return *folder*, made a copy of the sources with *change*."""
    shutil.copytree(SOURCES, folder)
    for name, (right, wrong) in (change or {}).items():
        text = (folder / name).read_text("utf-8")
        assert text.count(right) == 1, f"{right!r} stands {text.count(right)} times in {name}"
        (folder / name).write_text(text.replace(right, wrong), "utf-8")
    return folder


def compiled(folder: Path) -> Path:
    """Return the program that the sources in *folder* make on the host."""
    program = folder / "host"
    # Without contraction, as a fused multiplication would round once where the GPU's two instructions round twice.
    options = ["-O2", "-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["g++", *options, "-o", str(program), str(folder / "host.cpp")], check=True, timeout=300)
    return program


def host(program: Path) -> Backend:
    """Return the host as a backend of the products."""
    command = lambda cases, out, repeats: [str(program), "gemm", str(cases), str(out), str(repeats)]  # noqa: E731  a record's field
    return Backend("host", "the probe's source on the host", command)


def checks(program: Path, scratch: Path, fuzz: FuzzPolicy = FUZZ) -> Sequence[Check]:
    """Return what G2 says of the products of *program*."""
    scratch.mkdir()
    return tuple(fuzzed(host(program), fuzz, 300, scratch))
