"""A wheel with compiled libraries, built again elsewhere: the same bytes; and what is said where they are not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import Demo

from sparkwright.builder.wheel import archive
from sparkwright.builder.wheel.archive import BUILD_RECORD, SBOM

pytestmark = pytest.mark.toolchain

ROOT = Path(__file__).parents[2] / "ci" / "sparkwright" / "demo" / "project"
LIBRARY = "mini_vllm/_moe_C_stable_libtorch.abi3.so"


def rebuilt(demo: Demo, *words: str, status: int = 0) -> dict[str, Any]:
    """Run ``rebuild --check`` and return its document, less the list around the one rebuild."""
    document = json.loads(demo.run("build", "--again", "--json", "--output", str(demo.folder / "dist"), *words, status=status).stdout)
    return {**document["rebuilds"][0], "error": document.get("error")}


def changed(demo: Demo, members: dict[str, bytes]) -> Path:
    """Return a copy of the demo's wheel with other *members*, its RECORD true to them, in a folder of its own."""
    folder = demo.folder / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    # The same version again: only the members and their hashes change.
    return archive.rewrite(demo.wheel(), folder, version=demo.version, replace=members)


def test_a_grafted_wheel_is_the_same_to_the_byte_when_built_elsewhere(built_demo: Demo) -> None:
    """In another store, without the compiler cache, every unit is compiled again, and the wheel has the same sha256."""
    found = rebuilt(built_demo, "--fork", "vllm")

    assert (found["verdict"], found["first"], found["again"]) == ("identical", built_demo.sha256(), built_demo.sha256())
    assert found["device_code"][0] == found["device_code"][1] != ""


def test_how_the_kind_of_source_was_asked_for_is_not_in_the_wheel(built_demo: Demo) -> None:
    """Built with ``--source auto``, and again by the kind that the record names, the wheel is the same: that of ``--source git``."""
    before = built_demo.sha256()

    assert "--source changed" in built_demo.build("--source", "auto").stderr
    found = rebuilt(built_demo, "--source", "auto", "--fork", "vllm")
    assert (found["verdict"], found["first"], found["again"]) == ("identical", before, before)


def test_a_flag_that_no_file_states_is_found_by_its_effect(built_demo: Demo) -> None:
    """A wheel that was compiled with another flag is refused for its inputs; claiming it was not, it is found by its kernels."""
    members = built_demo.members()
    settings = built_demo.folder / "project" / "build" / "demo" / "environment.yaml"
    text = settings.read_text("utf-8")
    flag = '      CMAKE_CUDA_FLAGS: "-Xptxas=-O1"\n      CMAKE_MODULE_LINKER_FLAGS:'
    settings.write_text(text.replace("      CMAKE_MODULE_LINKER_FLAGS:", flag), "utf-8")
    built_demo.build()
    other = {name: data for name, data in built_demo.members().items() if name.endswith(".so") and data != members[name]}
    papers = {name: members[name] for name in (f"{built_demo.info}/{BUILD_RECORD}", f"{built_demo.info}/{SBOM}")}
    lying = changed(built_demo, {**other, **papers})
    wheel = shutil.copy(built_demo.wheel(), built_demo.folder / built_demo.wheel().name)
    settings.write_text(text, "utf-8")

    refused = json.loads(built_demo.run("build", "--again", "--json", str(wheel), status=1).stdout)["error"]
    assert (refused["reference"], refused["details"]) == ("inputs-differ", ["build/demo/environment.yaml"])
    found = rebuilt(built_demo, str(lying), status=1)
    assert found["verdict"] == "different"
    assert set(found["unexplained"]) <= set(other)
    assert found["device_code"][0] != found["device_code"][1]


