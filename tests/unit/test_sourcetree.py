"""From lock to tree on the demo's upstreams: fetch, apply, rewrite, each step with an id that git confirms."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.refusals import refusal

from sparkwright.builder.workspace import source_tree

if TYPE_CHECKING:
    from tests.unit.conftest import Mini

SERIES = "forks/demo/vllm"
RULES = "build/demo/archs.yaml"


def test_the_patched_tree_is_what_plain_git_makes(mini: Mini, tmp_path: Path) -> None:
    """A clone of the upstream with the series applied by hand has the same tree id."""
    made = source_tree(mini.context(), "vllm")
    clone = tmp_path / "clone"
    plain = ["git", "-c", "core.autocrlf=false", "-c", "diff.noprefix=false", "-c", "apply.whitespace=nowarn"]
    subprocess.run([*plain, "clone", "--quiet", "--branch", "v0.33.0", str(mini.upstreams / "vllm.git"), str(clone)], check=True)
    for step in made.steps:
        subprocess.run([*plain, "apply", "--index", str(mini.root / SERIES / step.name)], cwd=clone, check=True)
    tree = subprocess.run([*plain, "write-tree"], cwd=clone, check=True, capture_output=True, text=True).stdout.strip()

    assert made.patched == tree


# What goes wrong.


def test_a_changed_patch_is_applied_anew(mini: Mini) -> None:
    """The key of a tree holds the patches' bytes: an edited one gives another tree, and its trailers still count."""
    first = source_tree(mini.context(), "vllm")
    name = f"{SERIES}/take-the-largest-scale-from-loaded-experts-only.patch"
    mini.edit(name, "default=0.0)", "default=1.0)")
    assert source_tree(mini.context(), "vllm").tree != first.tree
    mini.edit(name, "Drop-When: ", "Drop-Never: ")

    with refusal("patch-invalid") as caught:
        source_tree(mini.context(), "vllm")
    assert caught.value.details == ("missing trailer: Drop-When",)
