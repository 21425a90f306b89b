"""
Stack 2026.05's cutlass-dsl as it is reviewed: the real wheels from the package index, edited, and asked to compile for SM 12.1.

No GPU is needed: the DSL writes the machine code before it looks for a driver. That the code runs is another question.
"""

from __future__ import annotations

import base64
import csv
import dataclasses
import hashlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from uv import find_uv_bin

from sparkwright.core.files import sha256_file
from sparkwright.core.store import Store
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.release import onsite, spec
from sparkwright.release.onsite import Installed
from sparkwright.release.spec import OnsiteSpec

pytestmark = pytest.mark.network

ROOT = Path(__file__).parents[2]
NEEDS = ("numpy", "typing-extensions", "cuda-python>=13,<14")
ADDED = ("RECORD", "INSTALLER", "REQUESTED", "sparkwright.json", "direct_url.json", "uv_cache.json")

#: The operation whose guard is edited, made for the arch in CUTE_DSL_ARCH.
ASK = """
import cutlass
from cutlass.cute.nvgpu import warp
warp.MmaMXF4NVF4Op(cutlass.Float4E2M1FN, cutlass.Float32, cutlass.Float8E4M3FN)
"""

#: One warp that multiplies one NVFP4 tile with block scales.
KERNEL = """
import cutlass, cutlass.cute as cute
from cutlass.cute.nvgpu import warp
from cutlass.cute.runtime import make_ptr

FP4, SCALE, SUM = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN, cutlass.Float32
LAYOUTS = (((8, 2, 2), 1, 1), ((8, 2), 1, 1), ((2, 2), 1, 1))

@cute.kernel
def tile(left: cute.Tensor, right: cute.Tensor, scale: cute.Tensor, result: cute.Tensor):
    atom = cute.make_mma_atom(warp.MmaMXF4NVF4Op(FP4, SUM, SCALE))
    a, b = (cute.make_rmem_tensor(cute.make_layout(shape), FP4) for shape in LAYOUTS[:2])
    s = cute.make_rmem_tensor(cute.make_layout((16, 4), stride=(0, 1)), SCALE)
    c = cute.make_rmem_tensor(cute.make_layout(LAYOUTS[2]), SUM)
    a.store(left.load())
    b.store(right.load())
    s[0] = scale[0]
    c.fill(0.0)
    for field in (warp.mma.Field.SFA, warp.mma.Field.SFB):
        atom.set(field, s.iterator)
    cute.gemm(atom, c[None, 0, 0], a[None, 0, 0], b[None, 0, 0], c[None, 0, 0])
    result.store(c.load())

@cute.jit
def start(left: cute.Pointer, right: cute.Pointer, scale: cute.Pointer, result: cute.Pointer):
    tile(
        cute.make_tensor(left, cute.make_layout(LAYOUTS[0])), cute.make_tensor(right, cute.make_layout(LAYOUTS[1])),
        cute.make_tensor(scale, cute.make_layout(4)), cute.make_tensor(result, cute.make_layout(LAYOUTS[2])),
    ).launch(grid=(1, 1, 1), block=(32, 1, 1))

cute.compile(start, *(make_ptr(kind, 16, cute.AddressSpace.gmem, assumed_align=16) for kind in (FP4, FP4, SCALE, SUM)))
"""


@dataclasses.dataclass(frozen=True)
class Dsl:
    """An environment with what the DSL needs, and the wheels that belong into it."""

    context: RunContext
    spec: OnsiteSpec
    venv: Path

    @property
    def site(self) -> Path:
        return next(self.venv.glob("lib/python3.*/site-packages"))

    def install(self, *, restore: bool = False) -> Installed:
        return onsite.install(self.context.store, self.spec, self.venv, restore=restore)

    def uv(self, *words: str | Path) -> None:
        cache = self.context.store.root / "cache" / "uv"
        subprocess.run([find_uv_bin(), "--quiet", "--no-config", "--cache-dir", cache, *words], check=True)

    def unpack(self, number: int, done: Installed) -> None:
        """Let uv install the wheel of that place in the order over what is there."""
        filename, sha256 = list(done.wheels.items())[number]
        path = package_index.path_of(self.context.store, sha256, filename)
        options = ("--no-index", "--no-deps", "--reinstall", "--link-mode", "copy")
        self.uv("pip", "install", "--python", self.venv / "bin" / "python", *options, path)

    def python(self, script: str, arch: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run *script* with the DSL told to compile for *arch*, and keep what it makes in *cwd*."""
        folders = {name: str(cwd) for name in ("CUTE_DSL_CACHE_DIR", "CUTE_DSL_DUMP_DIR")}
        (cwd / "script.py").write_text(script)
        return subprocess.run(
            [self.venv / "bin" / "python", "script.py"], cwd=cwd, capture_output=True, text=True, errors="replace", check=False,
            env={**os.environ, "CUTE_DSL_ARCH": arch, "CUTE_DSL_KEEP_CUBIN": "1", **folders},
        )  # fmt: skip

    def files(self) -> dict[str, str]:
        """Return the sha256 of every file of the DSL but those that installers add."""
        found = (path for path in self.site.glob("nvidia_cutlass_dsl*/**/*") if path.is_file() and path.name not in ADDED)
        return {path.relative_to(self.site).as_posix(): sha256_file(path) for path in found if path.suffix != ".pyc"}


def made(folder: Path, store: Store) -> Dsl:
    project = Project(ROOT, "2026.05")
    wanted = spec.load(project)
    assert wanted is not None
    return Dsl(RunContext(project, store, (), ROOT / "dist"), wanted, folder / "venv")


@pytest.fixture(name="dsl", scope="module")
def _dsl(tmp_path_factory: pytest.TempPathFactory, user_store: Store) -> Dsl:
    """Return an environment into which the DSL is installed and edited."""
    dsl = made(tmp_path_factory.mktemp("dsl"), user_store)
    dsl.uv("venv", "--python", sys.executable, dsl.venv)
    dsl.uv("pip", "install", "--python", dsl.venv / "bin" / "python", "--default-index", package_index.index_url(), *NEEDS)
    dsl.install()
    return dsl


def test_the_real_wheels_fit_the_reviewed_file(dsl: Dsl) -> None:
    """Every hash, count and anchor of onsite.yaml is right; a second run finds the edit and writes nothing; RECORDs are true."""
    done = dsl.install()

    assert [(one.files, one.differ) for one in done.shared] == [(176, 93)]
    assert [edit.state for edit in done.edits] == ["there already"]
    assert done.written == 0
    for edit in dsl.spec.edits:
        assert sha256_file(dsl.site / edit.file) == edit.after
    for record in dsl.site.glob("nvidia_cutlass_dsl*/RECORD"):
        for name, value, count in csv.reader(io.StringIO(record.read_text())):
            data = (dsl.site / name).read_bytes()
            plain = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert (value, count) in ((f"sha256={plain}", str(len(data))), ("", "")), name


def test_restored_it_is_what_uv_makes_in_that_order(dsl: Dsl, tmp_path: Path, user_store: Store) -> None:
    """Without the edit, every file is the one that uv leaves after unpacking libs-base and then libs-cu13."""
    done = dsl.install(restore=True)
    ours = dsl.files()
    dsl.install()
    other = made(tmp_path, user_store)
    other.uv("venv", "--python", sys.executable, other.venv)
    for number in range(len(done.wheels)):
        other.unpack(number, done)

    assert len(ours) > 180
    assert ours == other.files()


@pytest.mark.parametrize(
    ("arch", "admitted"),
    [("sm_120a", True), ("sm_121a", True), ("sm_121f", False), ("sm_120f", False), ("sm_121", False), ("sm_100a", False)],
)
def test_the_edit_admits_what_it_names(dsl: Dsl, tmp_path: Path, arch: str, admitted: bool) -> None:
    """The block-scaled MMA is made for sm_120a and sm_121a; another arch is refused by a message that names both."""
    asked = dsl.python(ASK, arch, tmp_path)

    assert (asked.returncode == 0) == admitted, asked.stderr
    assert admitted or "['sm_120a', 'sm_121a']" in asked.stderr


def test_without_the_edit_it_is_refused(dsl: Dsl, tmp_path: Path) -> None:
    """The restored wheel refuses sm_121a, which is why there is an edit."""
    dsl.install(restore=True)
    refused = dsl.python(ASK, "sm_121a", tmp_path)
    dsl.install()

    assert refused.returncode
    assert "expects arch to be one of ['sm_120a'], but got Arch.sm_121a" in refused.stderr


def test_machine_code_for_sm_121a_is_made(dsl: Dsl, tmp_path: Path) -> None:
    """Behind the guard, the DSL's own compiler takes a kernel of ours to a cubin for 12.1."""
    said = dsl.python(KERNEL, "sm_121a", tmp_path)
    cubins = list(tmp_path.glob("*.cubin"))

    assert len(cubins) == 1, said.stdout + said.stderr
    with cubins[0].open("rb") as stream:
        # Since CUDA 13 the second byte of the flags is the SM number.
        assert ELFFile(stream).header.e_flags >> 8 & 0xFF == 121


def test_with_libs_base_on_top_nothing_is_made(dsl: Dsl, tmp_path: Path) -> None:
    """The order matters: libs-base's compiler refuses the same kernel even for sm_120a, and the next run puts libs-cu13 back on top."""
    done = dsl.install()
    dsl.unpack(1, done)
    said = dsl.python(KERNEL, "sm_120a", tmp_path)

    assert not list(tmp_path.glob("*.cubin"))
    assert "ptxas" in said.stdout + said.stderr
    # 93 files with other bytes, and what uv wrote down; RECORD and INSTALLER of libs-base among them.
    assert dsl.install().written >= 93
    assert [edit.state for edit in dsl.install().edits] == ["there already"]
