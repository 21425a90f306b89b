"""
The demo's wheel for the other kind of machine, made on this one; and, where emulation is there, loaded as on that machine.

The tests marked ``emulation`` run programs of the other machine through qemu in a small Debian of its own, made by debootstrap (root).
SPARKWRIGHT_EMULATED_ROOT names a Debian that is there already.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import Demo

from sparkwright.builder import toolchain
from sparkwright.demo import upstreams
from sparkwright.forks.stack import MACHINES

HERE = platform.machine()
OTHER = next(machine for machine in MACHINES if machine != HERE)


def report(demo: Demo) -> dict[str, Any]:
    """Return the audit of the demo's wheel."""
    (found,) = json.loads(demo.run("audit", "--json", str(demo.wheel())).stdout)["reports"]
    return dict(found)


@pytest.mark.toolchain
def test_the_wheel_is_one_of_the_other_machine(crossed: Demo, undisturbed: Demo) -> None:
    """
    Its tag, every library's header and what the build record says of the compiler name that machine, and its audit passes. The
    libraries that a build compiles hold the same cubins and PTX for either machine, to the byte.
    """
    assert crossed.wheel().name.endswith(f"-{upstreams.tag(OTHER)}.whl")
    record = json.loads(crossed.members()[f"{crossed.info}/sparkwright.json"])
    assert record["compiler"].startswith(toolchain.triple(OTHER))
    audit = report(crossed)
    assert {library["machine"] for library in audit["libraries"]} == {OTHER}
    assert not audit["findings"]
    ours, native = ({library["name"]: library["device_code"] for library in audited["libraries"]} for audited in (audit, report(undisturbed)))
    compiled = record["transplant"]["libraries"]
    assert compiled
    assert {name: ours[name] for name in compiled} == {name: native[name] for name in compiled}
    assert all(ours.values())


@pytest.mark.toolchain
def test_a_stack_without_a_wheel_of_the_machine_says_so(crossed: Demo) -> None:
    """The crossed demo's lock has no base wheel for this machine: a build for it ends before anything is compiled."""
    done = crossed.run("build", "--fork", "vllm", "--json", "--output", str(crossed.folder / "native"), status=1)  # no --target

    error = json.loads(done.stdout)["error"]
    assert (error["reference"], HERE in error["what"]) == ("not-provided", True)


@pytest.fixture(name="emulated")
def _emulated(tmp_path: Path) -> tuple[Path, Path]:
    """Return a Debian of the other machine with Python and a C++ runtime, and the qemu in it; what it is made with must be installed."""
    qemu = shutil.which(f"qemu-{OTHER}-static")
    if not qemu or not shutil.which("debootstrap") or os.geteuid():
        pytest.skip("needs root, and: sudo apt-get install qemu-user-static debootstrap")
    root = Path(os.environ.get("SPARKWRIGHT_EMULATED_ROOT", tmp_path / "root"))
    if not root.exists():
        arch = {"aarch64": "arm64", "x86_64": "amd64"}[OTHER]
        options = ["--foreign", "--variant=minbase", f"--arch={arch}", "--include=python3-minimal,libpython3-stdlib,libstdc++6"]
        subprocess.run(["debootstrap", *options, "bookworm", root], check=True, capture_output=True, timeout=1200)
        # Unpacked is enough: nothing of it is run but Python.
        for package in sorted((root / "var/cache/apt/archives").glob("*.deb")):
            subprocess.run(["dpkg-deb", "--extract", package, root], check=True)
    return root, Path(shutil.copy2(qemu, root / "qemu"))


_LOAD = """\
import ctypes, platform, sys
print(platform.machine())
for path in sys.argv[1:]:
    ctypes.CDLL(path)
    print("loaded")
"""


@pytest.mark.toolchain
@pytest.mark.emulation
def test_the_libraries_load_on_the_other_machine(crossed: Demo, emulated: tuple[Path, Path], tmp_path: Path) -> None:
    """
    The other machine's own Python, run by qemu in a chroot, loads every library of the wheel: no symbol is missing.

    A mere ``qemu -L`` would show torch the processor's files of this machine, on which it crashes.
    """
    libraries = [name for name in crossed.members() if name.endswith(".so")]
    with zipfile.ZipFile(crossed.wheel()) as wheel:
        paths = [wheel.extract(name, emulated[0] / "srv") for name in libraries]

    inside = [f"/{Path(path).relative_to(emulated[0])}" for path in paths]
    command = ["chroot", emulated[0], "/qemu", "/usr/bin/python3", "-c", _LOAD, *inside]
    done = subprocess.run(command, env={"LC_ALL": "C.UTF-8"}, capture_output=True, text=True, check=False, timeout=900)

    assert done.stdout.split() == [OTHER, *["loaded"] * len(libraries)], done.stderr[-4000:]
