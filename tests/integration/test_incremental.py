"""A small change costs a small build: what is compiled again is what includes the changed file, and the build says what changed."""

from __future__ import annotations

import pytest
from tests.integration.conftest import Demo

pytestmark = pytest.mark.toolchain


def test_a_patch_to_one_cuda_file_compiles_that_unit_alone(built_demo: Demo) -> None:
    """The build names the series as the reviewed file that changed, compiles one unit, and only that unit's library differs."""
    before, old = built_demo.members(), built_demo.info
    built_demo.add_patch("first-of-equals", "csrc/moe/topk.cu", "int best = 0;", "int best = experts - 1;")

    said = built_demo.build().stderr

    assert "vllm: rebuilding: forks/demo/vllm/series changed\n" in said
    assert built_demo.compiled() == ["csrc/moe/topk.cu"]
    assert built_demo.info != old, "another patch set is another version"
    after = {name.replace(built_demo.info, old): data for name, data in built_demo.members().items()}
    changed = {name for name in after if after[name] != before.get(name)}
    own = ("sparkwright.json", "sboms/sparkwright.cdx.json", "METADATA", "RECORD")
    restated = {f"{old}/{name}" for name in own} | {"mini_vllm/_version.py"}
    assert changed == {"mini_vllm/_moe_C_stable_libtorch.abi3.so"} | restated


def test_a_patch_to_a_header_compiles_those_that_include_it(built_demo: Demo) -> None:
    """A header of the tree is included by its CUDA units but not by the bindings, which are not compiled again."""
    units = built_demo.units()
    built_demo.add_patch("smaller-blocks", "csrc/launch.cuh", "kThreads = 256;", "kThreads = 128;")

    built_demo.build()

    assert built_demo.compiled() == [unit for unit in units if unit.endswith(".cu")]
    assert [unit for unit in units if unit not in built_demo.compiled()] == ["csrc/bindings.cpp", "csrc/moe/bindings.cpp"]


def test_a_build_with_nothing_changed_reuses_every_wheel(built_demo: Demo) -> None:
    """The second build says so for each fork, starts no stage, and leaves the files in the output folder as they are."""
    before = {path: path.stat().st_mtime_ns for path in (built_demo.folder / "dist").iterdir()}

    said = built_demo.run("build", "--output", str(built_demo.folder / "dist")).stderr

    assert said.count("reused: nothing changed") == len(before) == 3
    assert not any(word in said for word in ("fetch ", "apply ", "configure ", "compile "))
    assert {path: path.stat().st_mtime_ns for path in (built_demo.folder / "dist").iterdir()} == before
