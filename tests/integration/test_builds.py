"""
Builds of the demo, driven by the command line as people drive it.

What a build leaves, a small change costs and a kill loses; what is not compiled again, built elsewhere, or built for the other machine.
"""

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from tests.conftest import NOWHERE, lock_demo
from tests.support import fatbins, processes
from tests.unit.conftest import Repository, append_patch
from uv import find_uv_bin

from sparkwright.builder import ninja, toolchain
from sparkwright.builder.wheel import archive, elf
from sparkwright.core import files, process, store, strict_yaml
from sparkwright.demo import upstreams
from sparkwright.forks import context, stack

pytestmark = pytest.mark.toolchain


class Demo:
    """
    A locked copy of the demo.

    Attributes:
        folder: Holds project, upstreams and store; the output goes to its ``dist``.
        work: Where vllm is configured and compiled.
        target: The machine that its wheels are made for; empty for this one.
        patience: Seconds after which a program hangs.
    """

    patience = 240

    def __init__(self, folder: Path, target: str = "") -> None:
        self.folder, self.target = folder, target
        self.series = folder / "project" / "forks" / "demo" / "vllm" / "series"
        self.output = ["--fork", "vllm", "--output", str(folder / "dist"), *(["--target", target] if target else [])]
        self.work = folder / "store" / "work" / "demo" / "vllm" / (f"build-{target}" if target else "build")

    def command(self, verb: str, *words: str) -> list[str]:
        """Return the command line of *verb*."""
        mirror = f"{upstreams.HOST}={self.folder / 'upstreams'}{os.sep}"
        return [
            sys.executable, "-m", "sparkwright", verb, "--root", str(self.folder / "project"), "--stack", "demo",
            "--cache-dir", str(self.folder / "store"), "--source", "git", "--mirror", mirror, *words,
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Return variables with which the package index cannot be asked; all that a locked demo needs is in its store."""
        return {**os.environ, "SPARKWRIGHT_INDEX_URL": NOWHERE, "HOME": str(self.folder)}

    def run(self, verb: str, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Run *verb* to its end and return what it said; it must end with *status*."""
        done = subprocess.run(
            self.command(verb, *words), env=self.environment(), cwd=self.folder, capture_output=True, text=True,
            timeout=self.patience, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stderr
        return done

    def build(self, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Build vllm, the fork that compiles, into ``dist``."""
        return self.run("build", *self.output, *words, status=status)

    @contextlib.contextmanager
    def building(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Yield a build of vllm that leads a process group of its own, as a shell starts it; if it is left at the end, it is killed."""
        child = subprocess.Popen(
            self.command("build", *self.output, *words), env=self.environment(), cwd=self.folder, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, process_group=0, preexec_fn=processes.heard,  # noqa: PLW1509  system calls, no lock
        )  # fmt: skip
        try:
            yield child
        finally:
            child.kill()
            child.communicate()

    def calls(self) -> list[ninja.CompilerCall]:
        """Return the compiler calls of the last run that compiled and came to its end."""
        lines = (self.work / "launch" / ninja.FINISHED).read_bytes().splitlines()
        calls = [msgspec.json.decode(line, type=ninja.CompilerCall) for line in lines]
        return [msgspec.structs.replace(call, unit=call.unit.rpartition("/src/")[2]) for call in calls]

    def compiled(self) -> list[str]:
        """Return the units that the last run compiled, sorted."""
        return sorted(call.unit for call in self.calls() if not call.hit)

    def taken(self) -> list[str]:
        """Return the units that the last run took from the compiler cache, sorted."""
        return sorted(call.unit for call in self.calls() if call.hit)

    def units(self) -> list[str]:
        """Return all units of the two libraries, as CMake wrote them down, sorted."""
        commands = json.loads((self.work / "build" / "compile_commands.json").read_bytes())
        return sorted(command["file"].rpartition("/src/")[2] for command in commands)

    def wheel(self) -> Path:
        """Return the one wheel of vllm in ``dist``."""
        (path,) = (self.folder / "dist").glob("mini_vllm-*.whl")
        return path

    @property
    def version(self) -> str:
        """The version of that wheel, its label included."""
        return self.wheel().name.split("-")[1]

    @property
    def info(self) -> str:
        """Name of that wheel's ``.dist-info`` folder."""
        return f"mini_vllm-{self.version}.dist-info"

    def sha256(self) -> str:
        """Return the hash of that wheel."""
        return files.sha256_file(self.wheel())

    def members(self) -> dict[str, bytes]:
        """Return the files of that wheel by name."""
        with zipfile.ZipFile(self.wheel()) as archive:
            return {name: archive.read(name) for name in archive.namelist()}

    def processes(self) -> list[str]:
        """Return the command lines of processes that work on this demo: those that name its folder or stand in it."""
        found = []
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = each.cmdline()
                if each.pid != os.getpid() and (str(self.folder) in " ".join(words) or Path(each.cwd()).is_relative_to(self.folder)):
                    found.append(" ".join(words)[:200])
        return found

    def add_patch(self, name: str, path: str, old: str, new: str) -> None:
        """Append to the series of vllm a patch that replaces *old*, which the file at *path* of the patched tree holds once, by *new*."""
        tree = json.loads(self.run("apply", "--fork", "vllm", "--json").stdout)["trees"][0]["patched"]
        objects = str(self.folder / "store" / "objects.git")
        text = subprocess.check_output(["git", "--git-dir", objects, "show", f"{tree}:{path}"], text=True)
        assert text.count(old) == 1
        repository = Repository(self.folder / name)
        repository.commit({path: text.encode()})
        append_patch(self.series.parent, f"{name}.patch", repository.patch({path: text.replace(old, new).encode()}, name.capitalize()))


@pytest.fixture
def demo(demo_session: context.RunContext) -> Demo:
    """Return a locked demo of which nothing is built yet."""
    return Demo(demo_session.project.root.parent)


@pytest.fixture(scope="session")
def both(locked_demo: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Demo, Demo]:
    """Return a demo whose forks were all built in one go, in a store of its own, and a copy of it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    shutil.copytree(locked_demo, folder / "demo", symlinks=True)
    made = Demo(folder / "demo")
    made.run("build", "--output", str(made.folder / "dist"))
    shutil.copytree(made.folder, folder / "copy", symlinks=True)
    return made, Demo(folder / "copy")


@pytest.fixture(scope="session")
def undisturbed(both: tuple[Demo, Demo]) -> Demo:
    """Return what a build that nobody disturbed left: to be read, never to be worked on."""
    return both[1]


@pytest.fixture(scope="session")
def crossed(tmp_path_factory: pytest.TempPathFactory, user_store: store.Store, tools: toolchain.Toolchain) -> Demo:
    """Return a demo that is locked against an official wheel of the other kind of machine, and was built for that machine."""
    other = next(machine for machine in stack.MACHINES if machine != platform.machine())
    program = f"{toolchain.triple(other)}-g++"
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}: sudo apt-get install g++-{toolchain.triple(other)}")
    made = Demo(lock_demo(tmp_path_factory.mktemp("crossed"), user_store, tools, other), other)
    made.build()
    return made


@pytest.fixture
def built_demo(both: tuple[Demo, Demo]) -> Demo:
    """Return a demo of which everything is built, as it was right after that; CMake's folders cannot move, so it is put back in place."""
    made, copy = both
    shutil.rmtree(made.folder)
    # Times come along, which ninja compares.
    shutil.copytree(copy.folder, made.folder, symlinks=True)
    return made


# What a build leaves.


COMPILED = {"mini_vllm/_C_stable_libtorch.abi3.so", "mini_vllm/_moe_C_stable_libtorch.abi3.so"}

# A finished build.

#: As a machine without a GPU can go: every library is loaded, and what runs on the host is called.
LOAD = """\
import ctypes, importlib.metadata, pathlib
import mini_cutlass, mini_flashinfer, mini_vllm
from mini_vllm import _custom_ops
for library in sorted(pathlib.Path(mini_vllm.__file__).parent.glob("*.so")):
    ctypes.CDLL(str(library))
    print("loaded", library.name)
print(len(importlib.metadata.distribution("mini-cutlass").read_text("licenses/LICENSE.txt").split()) > 0, importlib.metadata.metadata("mini-cutlass")["License-File"])
print(importlib.metadata.version("mini-vllm"), mini_vllm.__version__)
packed = (ctypes.c_uint8 * 1)()
_custom_ops.library("_C_stable_libtorch").mini_vllm_quantize_fp4_reference((ctypes.c_float * 2)(0.5, 6.0), packed, 2)
print(bytes(packed).hex())
"""


def test_the_wheels_install_into_an_empty_environment_and_load(undisturbed: Demo) -> None:
    """Every library can be loaded, metadata and package state one version, and a function of a library compiled here runs."""
    folder = undisturbed.folder.parent / "installed"
    python, env = folder / "bin" / "python", process.clean_environment(UV_NO_CONFIG="1", UV_OFFLINE="1", UV_NO_CACHE="1")
    process.output([find_uv_bin(), "venv", "--python", sys.executable, folder], env=env)
    wheels = sorted((undisturbed.folder / "dist").glob("*.whl"))
    process.output([find_uv_bin(), "pip", "install", "--no-index", "--no-deps", "--python", python, *wheels], env=env)

    *loaded, licence, version, packed = process.output([python, "-c", LOAD], env=env).splitlines()

    assert loaded == [f"loaded {name}.abi3.so" for name in ("_C_stable_libtorch", "_big_C", "_moe_C_stable_libtorch")]
    assert licence == "True LICENSE.txt"
    assert version == f"{undisturbed.version} {undisturbed.version}"
    assert packed == "71", "0.5 is E2M1 code 1, 6.0 is code 7, the first in the low half"


def test_a_graft_keeps_what_it_does_not_compile(undisturbed: Demo) -> None:
    """Libraries that are not compiled here, and files that no patch touches, are the base's to the byte; all others differ from it."""
    ours, info = undisturbed.members(), undisturbed.info
    (locked,) = strict_yaml.load(undisturbed.folder / "project/forks/demo/lock.yaml", stack.Lock).forks["vllm"].bases.values()
    with zipfile.ZipFile(undisturbed.folder / "store" / "downloads" / locked.sha256 / locked.filename) as wheel:
        base = {name.replace("-0.33.0.", f"-{undisturbed.version}."): wheel.read(name) for name in wheel.namelist()}

    assert set(ours) ^ set(base) == {f"{info}/sparkwright.json", f"{info}/sboms/sparkwright.cdx.json"}
    patched, restated = {"mini_vllm/quantization/nvfp4_scales.py"}, {"mini_vllm/_version.py", f"{info}/METADATA"}
    # WHEEL is written anew, and may say the same.
    changed = {name for name in base if base[name] != ours[name]} - {f"{info}/WHEEL"}
    assert changed == COMPILED | patched | restated | {f"{info}/RECORD"}


# Small changes.


@pytest.mark.parametrize("damaged", [False, True])
def test_a_build_with_nothing_changed_reuses_every_wheel(built_demo: Demo, damaged: bool) -> None:
    """It starts no stage, and leaves the files in the output folder; one that was deleted, or has other bytes, is put back."""
    dist, before, lost = built_demo.folder / "dist", built_demo.sha256(), built_demo.wheel()
    times = {path: path.stat().st_mtime_ns for path in dist.iterdir() if path != lost}
    lost.unlink()
    if damaged:
        lost.write_bytes(b"cut off")

    said = built_demo.run("build", "--output", str(dist)).stderr

    assert said.count("reused: nothing changed") == 3
    assert not any(word in said for word in ("fetch ", "apply ", "configure ", "compile "))
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert built_demo.sha256() == before


def test_a_patch_to_one_cuda_file_compiles_that_unit_alone(built_demo: Demo) -> None:
    """The build names the series as the reviewed file that changed, compiles one unit, and only that unit's library differs."""
    before, old = built_demo.members(), built_demo.info
    built_demo.add_patch("first-of-equals", "csrc/moe/topk.cu", "int best = 0;", "int best = experts - 1;")

    assert "vllm: rebuilding: forks/demo/vllm/series changed\n" in built_demo.build().stderr
    assert built_demo.compiled() == ["csrc/moe/topk.cu"]
    assert built_demo.info != old, "another patch set is another version"
    after = {name.replace(built_demo.info, old): data for name, data in built_demo.members().items()}
    own = {f"{old}/{name}" for name in ("sparkwright.json", "sboms/sparkwright.cdx.json", "METADATA", "RECORD")}
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {"mini_vllm/_moe_C_stable_libtorch.abi3.so", "mini_vllm/_version.py"} | own


def test_a_symbol_that_nothing_defines_ends_build_audit_and_gate(built_demo: Demo, tmp_path: Path) -> None:
    """Of a library that was compiled here, and of a wheel that was built elsewhere."""
    old = 'extern "C" int mini_vllm_moe_largest_expert_count() { return 512; }'
    new = f'extern "C" int mini_vllm_version();\n{old.replace("512", "mini_vllm_version()")}'
    built_demo.add_patch("undefined", "csrc/moe/bindings.cpp", old, new)
    error = json.loads(built_demo.build("--json", status=1).stdout)["error"]
    text = "undefined-symbol: mini_vllm/_moe_C_stable_libtorch.abi3.so: mini_vllm_version"
    assert (error["reference"], error["details"]) == ("audit-failed", [text])

    library = fatbins.compiled(tmp_path, "void gone(int); void probe() { gone(1); }", compiler="g++")
    name = archive.WheelName("probe", "1", f"py3-none-linux_{HERE}")
    metadata = "Metadata-Version: 2.1\nName: probe\nVersion: 1\n"
    wheel = archive.write(tmp_path, name, {"probe/_C.so": library}, metadata, pure=False)
    for words in (["audit"], ["gate", "--only", "G0"]):
        text = built_demo.run(*words, str(wheel), "--json", status=1).stdout
        assert ("undefined-symbol" in text, "gone(int)" in text) == (True, True)


def test_a_patch_to_a_header_compiles_those_that_include_it(built_demo: Demo) -> None:
    """A header is included by its CUDA units but not by the bindings, which are not compiled again."""
    units = built_demo.units()
    built_demo.add_patch("smaller-blocks", "csrc/launch.cuh", "kThreads = 256;", "kThreads = 128;")

    built_demo.build()

    assert built_demo.compiled() == [unit for unit in units if unit.endswith(".cu")]
    assert set(units) - set(built_demo.compiled()) == {"csrc/bindings.cpp", "csrc/moe/bindings.cpp"}


# Kills.

#: What the build says when it enters a stage, in order; the last one is said when all is compiled and the wheel gets packed.
STAGES = ("fetch vllm", "apply 2 patches", "rewrite vllm", "plan vllm (with ", "plan vllm (without", "compile vllm", "units compiled")


def test_a_build_that_is_killed_in_every_stage_ends_with_the_same_wheel(demo: Demo, undisturbed: Demo) -> None:
    """A kill on entry to each stage, one after the other, leaves nothing that a later run would take for whole."""
    for stage in STAGES:
        with demo.building() as child:
            assert any(stage in line for line in child.stderr or ()), f"the build never came to {stage!r}"
        processes.until(lambda: not demo.processes())

    demo.build()

    assert demo.sha256() == undisturbed.sha256()
    assert not demo.compiled(), "everything was compiled before the last kill"


def test_two_builds_at_once_compile_each_unit_once(demo: Demo) -> None:
    """The second of two builds on one store waits for the first, takes its wheel, and both succeed."""
    with demo.building() as one, demo.building() as other:
        said = [child.communicate(timeout=240)[1] for child in (one, other)]

    assert (one.returncode, other.returncode) == (0, 0), said
    assert demo.compiled() == demo.units()
    for text in ("reused: nothing changed", "another sparkwright works on"):
        assert sorted(text in output for output in said) == [False, True]


# The compiler cache.

needs_ccache = pytest.mark.skipif(not shutil.which("ccache"), reason="no ccache (apt-get install ccache)")


@needs_ccache
def test_a_lost_build_folder_is_made_again_without_a_compiler(built_demo: Demo) -> None:
    """The second build compiles nothing, says so, and gives the same bytes."""
    before, units = built_demo.sha256(), built_demo.units()
    shutil.rmtree(built_demo.work / "build")
    shutil.rmtree(built_demo.folder / "store" / "records" / "wheel")

    said = built_demo.build().stderr

    assert f"0 units compiled (0.0 s of work), {len(units)} taken from the compiler cache" in said
    assert (built_demo.compiled(), built_demo.taken()) == ([], units)
    assert built_demo.sha256() == before


HERE = platform.machine()
OTHER = next(machine for machine in stack.MACHINES if machine != HERE)


def report(demo: Demo) -> dict[str, Any]:
    """Return the audit of the demo's wheel."""
    (found,) = json.loads(demo.run("audit", "--json", str(demo.wheel())).stdout)["reports"]
    return dict(found)


def test_the_wheel_is_one_of_the_other_machine(crossed: Demo, undisturbed: Demo) -> None:
    """
    Its tag, every library's header and what the build record says of the compiler name that machine, and its audit passes. The
    libraries that a build compiles hold the same cubins and PTX for either machine, to the byte.
    """
    assert crossed.wheel().name.endswith(f"-{upstreams.tag(OTHER)}.whl")
    record = json.loads(crossed.members()[f"{crossed.info}/sparkwright.json"])
    assert record["compiler"].startswith(toolchain.triple(OTHER))
    audit = report(crossed)
    assert {elf.shared_object(crossed.members()[library["name"]]).machine for library in audit["libraries"]} == {OTHER}
    assert not audit["findings"]
    ours, native = ({library["name"]: library["device_code"] for library in audited["libraries"]} for audited in (audit, report(undisturbed)))
    compiled = record["transplant"]["libraries"]
    assert compiled
    assert {name: ours[name] for name in compiled} == {name: native[name] for name in compiled}
    assert all(ours.values())


def test_a_stack_without_a_wheel_of_the_machine_says_so(crossed: Demo) -> None:
    """The crossed demo's lock has no base wheel for this machine: a build for it ends before anything is compiled."""
    done = crossed.run("build", "--fork", "vllm", "--json", "--output", str(crossed.folder / "native"), status=1)  # no --target

    error = json.loads(done.stdout)["error"]
    assert (error["reference"], HERE in error["what"]) == ("not-provided", True)
