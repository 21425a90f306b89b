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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import Demo

from sparkwright.builder import toolchain
from sparkwright.demo import upstreams
from sparkwright.forks.stack import MACHINES

HERE = platform.machine()
OTHER = next(machine for machine in MACHINES if machine != HERE)


def libraries(wheel: Path) -> dict[str, bytes]:
    """Return the libraries of *wheel* by the last part of their name."""
    with zipfile.ZipFile(wheel) as archive:
        return {Path(name).name: archive.read(name) for name in archive.namelist() if name.endswith(".so")}


def report(demo: Demo) -> dict[str, Any]:
    """Return the audit of the demo's wheel."""
    (found,) = json.loads(demo.run("audit", "--json", str(demo.wheel())).stdout)["reports"]
    return dict(found)


@pytest.mark.toolchain
def test_the_wheel_is_one_of_the_other_machine(crossed: Demo) -> None:
    """Its tag, every library's header and what the build record says of the compiler name that machine, and its audit passes."""
    assert crossed.wheel().name.endswith(f"-{upstreams.tag(OTHER)}.whl")
    with zipfile.ZipFile(crossed.wheel()) as archive:
        record = json.loads(archive.read(f"{crossed.info}/sparkwright.json"))
    assert record["compiler"].startswith(toolchain.triple(OTHER))
    audit = report(crossed)
    assert {library["machine"] for library in audit["libraries"]} == {OTHER}
    assert not audit["findings"]


@pytest.mark.toolchain
def test_device_code_does_not_depend_on_who_compiles(crossed: Demo, undisturbed: Demo) -> None:
    """The libraries that a build compiles hold the same cubins and PTX for either machine, to the byte."""
    with zipfile.ZipFile(crossed.wheel()) as archive:
        compiled = json.loads(archive.read(f"{crossed.info}/sparkwright.json"))["transplant"]["libraries"]
    ours, native = ({library["name"]: library["device_code"] for library in report(demo)["libraries"]} for demo in (crossed, undisturbed))

    assert compiled
    assert {name: ours[name] for name in compiled} == {name: native[name] for name in compiled}
    assert all(ours.values())


@pytest.mark.toolchain
def test_a_stack_without_a_wheel_of_the_machine_says_so(crossed: Demo) -> None:
    """The crossed demo's lock has no base wheel for this machine: a build for it ends before anything is compiled."""
    done = crossed.run("build", "--fork", "vllm", "--json", "--output", str(crossed.folder / "native"), status=1)  # no --target

    error = json.loads(done.stdout)["error"]
    assert error["reference"] == "not-provided"
    assert HERE in error["what"]


#: Shows folders of this machine below the root at the same paths, and runs a program there; the mounts end with the process.
_ENTER = """\
root=$1 count=$2; shift 2
while [ "$count" -gt 0 ]; do mkdir -p "$root$1"; mount --bind "$1" "$root$1"; shift; count=$((count - 1)); done
exec chroot "$root" "$@"
"""


class Emulated:
    """
    A Debian of the other machine, entered as root.

    A mere ``qemu -L`` would show torch the processor's files of this machine, on which it crashes.

    Attributes:
        root: Its file system, with qemu in it.
    """

    def __init__(self, root: Path, qemu: str) -> None:
        self.root = root
        shutil.copy2(qemu, root / "qemu")

    def python(self, *words: str | Path, places: Sequence[Path], timeout: int = 900) -> str:
        """Run its Python, which sees the folders *places*, and return what it printed."""
        command = [
            "unshare",
            "--mount",
            "sh",
            "-ec",
            _ENTER,
            "sh",
            self.root,
            str(len(places)),
            *places,
            "/qemu",
            "/usr/bin/python3",
            *words,
        ]
        done = subprocess.run(command, env={"LC_ALL": "C.UTF-8"}, capture_output=True, text=True, check=False, timeout=timeout)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    """Return a Debian of the other machine with Python and a C++ runtime; what it is made with must be installed."""
    qemu = shutil.which(f"qemu-{OTHER}-static")
    if not qemu or not shutil.which("debootstrap") or os.geteuid():
        pytest.skip("needs root, and: sudo apt-get install qemu-user-static debootstrap")
    if named := os.environ.get("SPARKWRIGHT_EMULATED_ROOT"):
        yield Emulated(Path(named), qemu)
        return
    root = tmp_path_factory.mktemp("emulated")
    arch = {"aarch64": "arm64", "x86_64": "amd64"}[OTHER]
    options = ["--foreign", "--variant=minbase", f"--arch={arch}", "--include=python3-minimal,libpython3-stdlib,libstdc++6"]
    subprocess.run(["debootstrap", *options, "bookworm", root], check=True, capture_output=True, timeout=1200)
    # Unpacked is enough: nothing of it is run but Python.
    for package in sorted((root / "var/cache/apt/archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", package, root], check=True)
    yield Emulated(root, qemu)
    shutil.rmtree(root)


_LOAD = """\
import ctypes, platform, sys
print(platform.machine())
for path in sys.argv[1:]:
    ctypes.CDLL(path)
    print("loaded")
"""


@pytest.mark.toolchain
@pytest.mark.emulation
def test_the_libraries_load_on_the_other_machine(crossed: Demo, emulated: Emulated, tmp_path: Path) -> None:
    """The other machine's own Python, run by qemu, loads every library of the wheel: no symbol is missing."""
    made = []
    for name, data in libraries(crossed.wheel()).items():
        (tmp_path / name).write_bytes(data)
        made.append(tmp_path / name)

    said = emulated.python("-c", _LOAD, *made, places=[tmp_path]).split()

    assert said == [OTHER, *["loaded"] * len(made)]
