"""
The demo's wheel for the other kind of machine, made on this one; and, where emulation is there, loaded as on that machine.

The tests marked ``emulation`` run programs of the other machine through qemu in a small Debian of its own, made by debootstrap (root).
SPARKWRIGHT_CROSS_WHEEL names a real cross-built wheel of vLLM for them, SPARKWRIGHT_EMULATED_ROOT a Debian that is there already.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from sparkwright.builder.environment import cross, toolchain
from sparkwright.core.store import Store
from sparkwright.demo import base
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import MACHINES, Project

if TYPE_CHECKING:
    from tests.integration.conftest import Demo

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
    assert crossed.wheel().name.endswith(f"-{base.tag(OTHER)}.whl")
    with zipfile.ZipFile(crossed.wheel()) as archive:
        record = json.loads(archive.read(f"{crossed.info}/sparkwright.json"))
    assert record["compiler"].endswith(cross.triple(OTHER))
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
def test_every_unit_was_planned_for_the_other_machine_as_for_this_one(crossed: Demo, undisturbed: Demo) -> None:
    """The plan for the other machine has the same units at the same arch."""
    plans = [
        json.loads(demo.run("plan", "--fork", "vllm", "--json", *words).stdout)["plans"][0]["after"]["units"]
        for demo, words in ((crossed, ("--target", OTHER)), (undisturbed, ()))
    ]

    assert plans[0] == plans[1]


@pytest.mark.toolchain
def test_a_stack_without_a_wheel_of_the_machine_says_so(crossed: Demo) -> None:
    """The crossed demo's lock has no base wheel for this machine: a build for it ends before anything is compiled."""
    done = crossed.run("build", "--fork", "vllm", "--json", "--output", str(crossed.folder / "native"), status=1)  # no --target

    error = json.loads(done.stdout)["error"]
    assert error["reference"] == "not-provided"
    assert HERE in error["what"]


@pytest.mark.toolchain
def test_nothing_is_built_twice(crossed: Demo) -> None:
    """A second build for the other machine takes the wheel from the store."""
    said = crossed.build().stderr

    assert "reused: nothing changed" in said


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


_OPERATORS = """\
import ctypes, json, os, sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
import torch
before = {schema.name for schema in torch._C._jit_get_all_schemas()}
# After torch, which would ask this driver for more than it has.
ctypes.CDLL(sys.argv[2], ctypes.RTLD_GLOBAL)
for path in sys.argv[3:]:
    torch.ops.load_library(path)
print(json.dumps(sorted({schema.name for schema in torch._C._jit_get_all_schemas()} - before)))
"""


def driver(folder: Path, wanted: set[str]) -> Path:
    """Write a ``libcuda.so.1`` for the other machine that has the functions *wanted*, which all fail, and return its path."""
    source = folder / "driver.c"
    source.write_text("".join(f"int {name}(void) {{ return 999; }}\n" for name in sorted(wanted)))
    made = folder / "libcuda.so.1"
    subprocess.run([f"{cross.triple(OTHER)}-gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", made, source], check=True)
    return made


def undefined(library: bytes) -> set[str]:
    """Return the functions of the CUDA driver that *library* leaves to it."""
    tables = [section for section in ELFFile(io.BytesIO(library)).iter_sections() if isinstance(section, SymbolTableSection)]
    symbols = [symbol for table in tables for symbol in table.iter_symbols()]
    return {symbol.name for symbol in symbols if symbol["st_shndx"] == "SHN_UNDEF" and re.match("cu[A-Z]", symbol.name)}


#: What units for SM 9.0 and 10.x register, which a build for 12.1 alone does not compile; vLLM 0.33.0 asks of each whether it is there.
ELSEWHERE = {"_C::beam_allreduce", "_C::beam_allreduce_norm", "_C::kimi_k3_attn_res", "_C::mxfp4_experts_quant_supported"}


@pytest.mark.network
@pytest.mark.emulation
@pytest.mark.timeout(3600)
def test_a_real_wheel_registers_the_operators_of_the_official_one(emulated: Emulated, user_store: Store, tmp_path: Path) -> None:
    """With the other machine's torch, under its Python, each compiled library of vLLM loads and registers what the official one does.

    The only thing that is not real is the driver: without a GPU there is none, and a library of functions that fail stands for it.
    """
    named = os.environ.get("SPARKWRIGHT_CROSS_WHEEL")
    if not named:
        pytest.skip("SPARKWRIGHT_CROSS_WHEEL names no wheel; make one with: sparkwright build --fork vllm --target " + OTHER)
    project = Project(Path(__file__).parents[2], "2026.11")
    session = RunContext(project, user_store, ("vllm",), tmp_path, target=OTHER)
    tools = toolchain.obtain(session)
    against = cross.of(session, tools)
    # torch and CUDA are the target's; what torch needs beside them is pure Python and the same for every machine.
    places = [against.root, *tools.root.glob("lib/python3.*/site-packages")]
    locked = session.lock.forks["vllm"].bases[OTHER]
    official = package_index.obtain(user_store, locked.name, locked.filename, locked.sha256)
    names = [f"{target}.abi3.so" for target in toolchain.spec(project).forks["vllm"].core_targets]
    registered: list[list[str]] = []
    for wheel in (Path(named), official):
        folder = tmp_path / str(len(registered))
        folder.mkdir()
        found = libraries(wheel)
        for name in names:
            (folder / name).write_bytes(found[name])
        paths = [driver(folder, {symbol for name in names for symbol in undefined(found[name])}), *(folder / name for name in names)]
        said = emulated.python(
            "-W", "ignore", "-c", _OPERATORS, os.pathsep.join(map(str, places)), *paths, places=[*places, folder], timeout=1700
        )
        registered.append(json.loads(said.splitlines()[-1]))

    (tmp_path / "operators.json").write_text(json.dumps(registered))
    ours, theirs = map(set, registered)
    assert ours
    assert ours <= theirs
    assert theirs - ours == ELSEWHERE
