"""What nvcc will be given: every spelling of it, and a real configure of a small tree."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec
import pytest
from tests.refusals import refusal

from sparkwright.builder import configure
from sparkwright.builder.configure import Configured, TranslationUnit
from sparkwright.builder.sandbox import Sandbox
from sparkwright.core import process

PTX80 = ("compute_80:compute_80", "compute_80:sm_80")

TREE = {
    "CMakeLists.txt": """\
cmake_minimum_required(VERSION 3.26)
project(mini LANGUAGES CXX CUDA)
set(CMAKE_CUDA_ARCHITECTURES OFF)
file(WRITE "${CMAKE_BINARY_DIR}/made.cu" "__global__ void made() {}\\n")
add_library(first OBJECT one.cu two.cu plain.cpp "${CMAKE_BINARY_DIR}/made.cu")
set_source_files_properties(one.cu "${CMAKE_BINARY_DIR}/made.cu" PROPERTIES COMPILE_OPTIONS
  "$<$<COMPILE_LANGUAGE:CUDA>:-gencode;arch=compute_121f,code=sm_121f>")
set(WIDE "$<$<COMPILE_LANGUAGE:CUDA>:--generate-code=arch=compute_80,code=[compute_80,sm_80]>")
set_source_files_properties(two.cu plain.cpp PROPERTIES COMPILE_OPTIONS "${WIDE}")
add_subdirectory(sub)
""",
    "sub/CMakeLists.txt": """\
add_library(second OBJECT three.cu)
set_target_properties(second PROPERTIES CUDA_ARCHITECTURES "90-virtual;121f-real")
""",
    "one.cu": "__global__ void one() {}\n",
    "two.cu": "__global__ void two() {}\n",
    "sub/three.cu": "__global__ void three() {}\n",
    "plain.cpp": "int plain() { return 0; }\n",
}


def write(folder: Path, tree: dict[str, str]) -> Path:
    for name, text in tree.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def run(source: Path, build: Path, cuda_bin: Path, cuda_env: Path, *targets: str) -> Configured:
    return configure.configure(
        source, build, targets=targets, sandbox=Sandbox.create({}), log=build.with_suffix(".log"), cmake=cuda_env / "bin" / "cmake",
        env=process.clean_environment(CUDACXX=str(cuda_bin / "nvcc")),
        defines={"CMAKE_BUILD_TYPE": "Release", "CMAKE_MAKE_PROGRAM": str(cuda_env / "bin" / "ninja")},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("nvcc -gencode arch=compute_121f,code=sm_121f -c a.cu", ("compute_121f:sm_121f",)),
        ("nvcc -gencode=arch=compute_121f,code=sm_121f -gencode arch=compute_121f,code=sm_121f a.cu", ("compute_121f:sm_121f",)),
        ("nvcc '--generate-code=arch=compute_80,code=[compute_80,sm_80]' a.cu", PTX80),
        ('nvcc --generate-code arch=compute_80,code=\\"sm_80,compute_80\\" a.cu', PTX80),
        ("nvcc --gpu-architecture sm_121f a.cu", ("sm_121f:sm_121f",)),
        ("nvcc -arch=native a.cu", ("native:native",)),
        ("nvcc -Xcompiler -arch=sm_90 -Xcompiler=-march=native -DX=-arch=sm_80 a.cu", ()),
        ("nvcc -c a.cu -arch", ()),
    ],
)
def test_every_spelling(command: str, expected: tuple[str, ...]) -> None:
    assert configure.gencode(shlex.split(command)) == expected


@pytest.mark.toolchain
def test_the_units_of_a_real_configure(tmp_path: Path, cuda_bin: Path, cuda_env: Path) -> None:
    source = write(tmp_path / "tree", TREE)
    found = run(source, tmp_path / "build", cuda_bin, cuda_env)
    assert {unit.object for unit in found.units if unit.source == "one.cu"} == {"CMakeFiles/first.dir/one.cu.o"}
    assert tuple(msgspec.structs.replace(unit, object="") for unit in found.units) == (
        TranslationUnit("first", "<build>/made.cu", ("compute_121f:sm_121f",)),
        TranslationUnit("first", "one.cu", ("compute_121f:sm_121f",)),
        TranslationUnit("first", "two.cu", PTX80),
        TranslationUnit("second", "sub/three.cu", ("compute_121f:sm_121f", "compute_90:compute_90")),
    )
    assert ("sub/CMakeLists.txt", 2, "set_target_properties") in [(call.file, call.line, call.command) for call in found.calls]
    assert not any(str(tmp_path) in argument for call in found.calls for argument in call.arguments)

    (source / "two.cu").rename(source / "zwei.cu")
    (source / "CMakeLists.txt").write_text(TREE["CMakeLists.txt"].replace("two.cu", "zwei.cu"))
    again = run(source, tmp_path / "build", cuda_bin, cuda_env, "first")
    assert [unit.source for unit in again.units] == ["<build>/made.cu", "one.cu", "zwei.cu"]

    with refusal("configure-failed", match=r"no target absent") as caught:
        run(source, tmp_path / "build", cuda_bin, cuda_env, "first", "absent")
    assert caught.value.details == ("targets: first, second",)


def test_a_failed_configure_shows_the_words_of_cmake(tmp_path: Path) -> None:
    """A compiler that upstream refuses, for example, with the advice to name another."""
    cmake = tmp_path / "cmake"
    cmake.write_text("#!/bin/sh\necho 'GCC >= 13 is required (found 12.2.0)'\nexit 1\n")
    cmake.chmod(0o755)
    with refusal("configure-failed") as caught:
        configure.configure(
            tmp_path, tmp_path / "build", defines={}, env=process.clean_environment(), log=tmp_path / "log", cmake=cmake, sandbox=Sandbox("none")
        )
    assert "GCC >= 13 is required (found 12.2.0)" in caught.value.details
    assert "CXX=g++-13" in caught.value.todo
