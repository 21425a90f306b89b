"""Whether this machine's compiler will do: from the stack's data, and from the words with which projects refuse one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sparkwright.builder.environment import host_compiler
from sparkwright.builder.errors import BuildError

#: As CMake prints them: broken into lines, indented.
REFUSALS = {
    "vLLM 0.33.0": (
        "CMake Error at CMakeLists.txt:1701 (message):",
        "  GCC >= 13 is required to build vLLM with CUDA (found 12.2.0).  The DeepGEMM",
        "  and DeepSelect dependencies use C++20 <format> in host code, which libstdc++",
        "  does not provide before GCC 13.  See: <issue>",
    ),
    "at least": ("CMake Error:", "  gcc version must be at least 13.1, found 12.2.0"),
    "requires": ("CMake Error:", "  The compiler requires", "  version 13; found 12.2"),
}
OTHERS = (
    ("CMake Error at CMakeLists.txt:7 (find_package):", '  Could not find a package configuration file provided by "Torch".'),
    ("CMake Error:", "  GCC >= 9 is required (found 12.2.0) and Python is missing"),
    ("-- The CXX compiler identification is GNU 12.2.0", "CMake Error: something else"),
)


@pytest.mark.parametrize("project", REFUSALS)
def test_a_refusal_in_cmakes_words_becomes_one_of_ours(project: str) -> None:
    """Which version is needed, which is here, the sentence that names the sources, and what to do."""
    error = host_compiler.explained(BuildError("configure-failed", "widget does not configure.", details=REFUSALS[project]))

    assert error.reference == "compiler-too-old"
    assert str(error.data["needed"]).startswith("13")
    assert str(error.data["found"]).startswith("12.2")
    assert "g++-13" in error.todo
    assert set(REFUSALS[project]) <= set(error.details)
    if project.startswith("vLLM"):
        assert "DeepGEMM and DeepSelect dependencies use C++20 <format>" in error.details[0]


@pytest.mark.parametrize("words", OTHERS)
def test_other_failures_stay_what_they_are(words: tuple[str, ...]) -> None:
    """A version that is met, or a message about something else, is no reason to install a compiler."""
    error = BuildError("configure-failed", "widget does not configure.", details=words)

    assert host_compiler.explained(error) is error


def test_the_compiler_is_the_one_that_cmake_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``CXX`` names it; another compiler is another machine for the keys of builds."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CUDAHOSTCXX", raising=False)
    before = host_compiler.identity()
    other = tmp_path / "g++-99"
    other.write_text(f'#!/bin/sh\nif [ "$1" = -dumpfullversion ]; then echo 99.1.0; else exec {shutil.which("c++")} "$@"; fi\n')
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))

    assert before
    assert host_compiler.identity() != before
