"""The tree of a fork as git confirms it, its version label, and reproducible compiler flags."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.conftest import Mini

from sparkwright.builder import pipeline, workspace
from sparkwright.builder.wheel import archive
from sparkwright.builder.workspace import source_tree
from sparkwright.cherry_picks import ledger
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project

ROOT = Path(__file__).parents[2]


def label(mini: Mini, fork: str = "vllm") -> str:
    context = mini.context()
    return workspace.version_label(context, source_tree(context, fork))


def patch_of(mini: Mini) -> Path:
    """Return a patch of the demo's vllm that changes Python alone."""
    return mini.root / "forks/demo/vllm/take-the-largest-scale-from-loaded-experts-only.patch"


def test_the_patched_tree_is_what_plain_git_makes(mini: Mini, tmp_path: Path) -> None:
    """A clone of the upstream with the series applied by hand has the same tree id."""
    made = source_tree(mini.context(), "vllm")
    clone = tmp_path / "clone"
    plain = ["git", "-c", "core.autocrlf=false", "-c", "diff.noprefix=false", "-c", "apply.whitespace=nowarn"]
    subprocess.run([*plain, "clone", "--quiet", "--branch", "v0.33.0", str(mini.upstreams / "vllm.git"), str(clone)], check=True)
    for step in made.steps:
        subprocess.run([*plain, "apply", "--index", str(mini.root / "forks/demo/vllm" / step.name)], cwd=clone, check=True)
    tree = subprocess.run([*plain, "write-tree"], cwd=clone, check=True, capture_output=True, text=True).stdout.strip()

    assert made.patched == tree


def test_equal_inputs_have_equal_labels_in_every_checkout(mini: Mini, locked_mini: Mini) -> None:
    assert re.fullmatch(r"spark\.demo\.p[0-9a-f]{8}\.cu130", label(mini))
    assert label(mini) == label(locked_mini)
    assert label(mini, "cutlass") == "spark.demo.p0.cu130", "it has no patches"


def test_a_patch_changes_the_label_of_its_fork_by_its_effect_alone(mini: Mini) -> None:
    before = {fork: label(mini, fork) for fork in ("cutlass", "flashinfer", "vllm")}
    patch = patch_of(mini)
    patch.write_text(patch.read_text().replace("Subject: [PATCH] ", "Subject: [PATCH] Really ", 1))
    assert label(mini) == before["vllm"]

    added = next(line for line in patch.read_text().splitlines() if line.startswith("+    ") and line.strip("+ "))
    patch.write_text(patch.read_text().replace(added, f"{added}  # changed"))
    assert [fork for fork in before if before[fork] != label(mini, fork)] == ["vllm"]


def test_rules_and_needed_forks_are_part_of_the_patch_set(mini: Mini) -> None:
    context = mini.context()
    vllm, needed = (source_tree(context, fork) for fork in ("vllm", "cutlass"))
    other = msgspec.structs.replace(needed, tree=vllm.tree)
    before = workspace.patch_set(context.objects, (vllm, needed))
    assert before == workspace.patch_set(context.objects, (vllm,)) != workspace.patch_set(context.objects, (vllm, other))


@pytest.mark.parametrize(
    ("old", "expected"), [("0.33.0", "0.33.0+spark.1"), ("0.7.2.post1", "0.7.2.post1+spark.1"), ("1.0+cu130", "1.0+spark.1")]
)
def test_a_label_replaces_an_earlier_one(old: str, expected: str) -> None:
    assert archive.labelled(old, "spark.1") == expected


def test_flags_are_added_to_those_of_the_fork_from_the_outer_folder_to_the_inner() -> None:
    paths = {Path("/a/b"): Path("/in/needed"), Path("/a"): Path("/in"), Path("/a, b"): Path("/in"), Path("/c=d"): Path("/in")}
    host = "-ffile-prefix-map=/a=/in -ffile-prefix-map=/a/b=/in/needed"
    names = " ".join(workspace.NVCC_NAMES)

    assert workspace.reproducible_flags({"CMAKE_CXX_FLAGS": '-D"X=a b"', "X": "1"}, paths) == {
        "X": "1",
        "CMAKE_C_FLAGS": host,
        "CMAKE_CXX_FLAGS": f'-D"X=a b" {host}',
        "CMAKE_CUDA_FLAGS": f"{names} -Xcompiler=-ffile-prefix-map=/a=/in -Xcompiler=-ffile-prefix-map=/a/b=/in/needed",
    }
    assert workspace.reproducible_flags({}, {}) == {"CMAKE_CUDA_FLAGS": names}


def test_a_build_that_is_interrupted_at_its_end_leaves_no_second_wheel(
    mini: Mini, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the next one, of a third label."""
    put = Store.put

    def interrupted(store: Store, kind: str, key: str, record: Any) -> None:
        if kind == "last":
            raise KeyboardInterrupt
        put(store, kind, key, record)

    output = mini.context().output
    pipeline.build(mini.context(), "cutlass")
    mini.edit("forks/demo/stack.yaml", '"spark.demo"', '"spark.demo.1"')
    with monkeypatch.context() as patched:
        patched.setattr(Store, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipeline.build(mini.context(), "cutlass")
    mini.edit("forks/demo/stack.yaml", '"spark.demo.1"', '"spark.demo.2"')
    built = pipeline.build(mini.context(), "cutlass")

    assert [path.name for path in output.glob("*.whl")] == [built.filename]


def test_every_output_folder_has_one_wheel_of_a_release(mini: Mini, tmp_path: Path) -> None:
    """A build takes the place of the last one in its output folder; other wheels there stay."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine.whl").touch()
    outputs = [tmp_path / "a", tmp_path / "b", tmp_path / "a"]
    for number, output in enumerate(outputs):
        context = dataclasses.replace(mini.context(), output=output)
        built = pipeline.build(context, "cutlass")
        label = f'"spark.demo{f".{number}" if number else ""}"'
        mini.edit("forks/demo/stack.yaml", label, f'"spark.demo.{number + 1}"')

    assert {path.name for path in (tmp_path / "a").glob("*.whl")} == {"mine.whl", built.filename}


def test_another_set_of_picks_is_another_build(tmp_path: Path) -> None:
    """The inputs of the real stack change with what its ledger carries, and name the ledger."""
    for name in ("forks", "build", "cherry_picks"):
        shutil.copytree(ROOT / name, tmp_path / name)
    context = RunContext(Project(tmp_path, "2026.06"), Store(tmp_path / "store"), ("vllm",), tmp_path / "dist")
    before, book = pipeline.inputs(context, "vllm"), ledger.load_ledger(tmp_path, "vllm")
    ledger.write(tmp_path, "vllm", book.without("2026.06", [book.carried("2026.06")[0].name]))

    after = pipeline.inputs(context, "vllm")

    assert [name for name in before if before[name] != after[name]] == ["cherry_picks/vllm.yaml"]
