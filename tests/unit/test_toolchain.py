"""The locked tools: additions to the CUDA wheels, the host compiler, and wheel tags."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from tests.refusals import refusal
from tests.unit.conftest import Mini

from sparkwright.builder import toolchain
from sparkwright.builder.toolchain import Toolchain

HEADER = """
#define CUDAAPI
#define cuMemAlloc cuMemAlloc_v2
typedef int CUresult;
/* CUresult CUDAAPI cuCommented(int flags); */
CUresult CUDAAPI cuInit(unsigned flags);
CUresult CUDAAPI
    cuMemAlloc(void **place, unsigned long size);
typedef CUresult (*cuCallback)(int);
"""


@pytest.fixture(name="cuda")
def _cuda(tmp_path: Path) -> Path:
    """Return a folder with a header and a library, as CUDA's wheels have them."""
    for name in ("include", "lib"):
        (tmp_path / "cu13" / name).mkdir(parents=True)
    (tmp_path / "cu13" / "include" / "cuda.h").write_text(HEADER)
    (tmp_path / "cu13" / "lib" / "libcudart.so.13").touch()
    return tmp_path / "cu13"


def test_the_stub_of_the_driver_is_kept_by_the_linker(cuda: Path, tmp_path: Path) -> None:
    """What calls the driver wants its library in the end, also where the linker leaves out what nobody calls; what does not, does not."""
    toolchain.complete_cuda(cuda, tmp_path / "log")
    codes = {"caller": '#include "cuda.h"\nint f(void) { return cuMemAlloc(0, 1); }\n', "other": "int g(void) { return 1; }\n"}
    needs = {}
    for name, code in codes.items():
        (tmp_path / f"{name}.c").write_text(code)
        words: list[str | Path] = ["-Wl,--as-needed,--no-undefined", "-I", cuda / "include", "-L", cuda / "lib" / "stubs"]
        subprocess.run(["cc", "-shared", "-fPIC", *words, f"{name}.c", "-lcuda", "-lc", "-o", f"{name}.so"], cwd=tmp_path, check=True)
        said = subprocess.run(["readelf", "-d", f"{name}.so"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
        needs[name] = re.findall(r"NEEDED.*\[(.*)\]", said)

    assert "libcuda.so.1" in needs["caller"]
    assert "libcuda.so.1" not in needs["other"]
    assert (cuda / "lib" / "libcudart.so").resolve() == cuda / "lib" / "libcudart.so.13"


def test_nvcc_takes_the_compiler_of_cmake_but_in_a_cross_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CMake would prefer the variable to its toolchain file, and compile host code for this machine; builds are keyed by its version."""
    (tmp_path / "g++-99").write_text("#!/bin/sh\necho g++ 99.1.0\n")
    (tmp_path / "g++-99").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CXX", "g++-99")
    monkeypatch.setenv("CUDAHOSTCXX", "g++-98")
    cuda = tmp_path / "lib/python3.12/site-packages/nvidia/cu13"
    cuda.mkdir(parents=True)

    assert toolchain.compiler_version(*toolchain.host_compiler()) == "g++ 99.1.0"
    assert Toolchain("key", tmp_path).environment()["CUDAHOSTCXX"] == "g++-99"
    assert "CUDAHOSTCXX" not in Toolchain("key", tmp_path, tmp_path).environment()
    monkeypatch.setenv("CXX", "ccache g++-99")
    assert "CUDAHOSTCXX" not in Toolchain("key", tmp_path).environment(), "CMake would take ccache for the compiler"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("  flashinfer:\n", "  flashlight:\n", "name different forks"),
        # A wheel that its own backend makes states its requirements in its tree, where a patch can change them.
        ("distribution: mini-flashinfer\n", "distribution: mini-flashinfer\n    requires: {numpy: ''}\n", "flashinfer, which is not grafted"),
    ],
)
def test_an_environment_that_contradicts_the_stack_is_refused(mini: Mini, old: str, new: str, says: str) -> None:
    mini.edit("build/demo/environment.yaml", old, new)
    with refusal("file-invalid", match=says):
        toolchain.spec(mini.context().project)
