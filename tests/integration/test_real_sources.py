"""Stack 2026.11 as it is reviewed: the real releases, fetched from the package index, patched and rewritten; their converters."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.refusals import refusal

from sparkwright.builder import toolchain
from sparkwright.builder.arch import rules as archs
from sparkwright.builder.workspace import source_tree
from sparkwright.cherry_picks import series
from sparkwright.core import strict_yaml
from sparkwright.core.store import Store
from sparkwright.forks import fetch
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.gates.numerics import gate as numerics

pytestmark = pytest.mark.network

ROOT = Path(__file__).parents[2]
PROJECT = Project(ROOT, "2026.11")


@pytest.fixture(name="context")
def _context(user_store: Store) -> RunContext:
    return RunContext(PROJECT, user_store, tuple(PROJECT.spec.forks), ROOT / "dist")


@pytest.mark.parametrize("fork", PROJECT.spec.forks)
def test_what_the_lock_names_is_patched_and_rewritten(context: RunContext, fork: str) -> None:
    """The index delivers it; each patch of the series and each rule is applied once, and changes only the files that they name."""
    locked = context.lock.forks[fork]
    made, file = source_tree(context, fork), locked.sdist or locked.wheel
    patches = series.load(PROJECT.series_folder(fork))
    rules = archs.load(PROJECT.build_folder / "archs.yaml").of(fork).rules
    trees = [made.source.tree, *(step.tree for step in made.steps)]
    named = {path for patch in patches for path in patch.files} | {site.file for site in made.sites}

    assert file
    assert (made.source.tree, made.source.pin) == (file.tree, file.sha256)
    assert [step.name for step in made.steps] == [patch.name for patch in patches]
    assert [site.rule for site in made.sites] == [rule.name for rule in rules]
    assert len(set(trees)) == len(trees)
    assert context.objects.changes(made.source.tree, made.tree).keys() == named


def test_what_was_fetched_once_needs_no_network(context: RunContext, tmp_path: Path) -> None:
    """Offline the same trees come out of the store; an empty store says that it is offline."""
    trees = [source_tree(context, fork).tree for fork in context.forks]
    offline = dataclasses.replace(context, offline=True)

    assert [source_tree(offline, fork).tree for fork in context.forks] == trees
    with refusal("offline"):
        fetch.fetch(dataclasses.replace(offline, store=Store(tmp_path / "empty")), "flashinfer")


@pytest.mark.long
@pytest.mark.toolchain
def test_the_converters_of_the_default_stack_are_right(context: RunContext, tmp_path: Path) -> None:
    """G1: every converter that the reviewed policy names is found, compiled and right: vLLM's, FlashInfer's, CUTLASS's and CUDA's own."""
    policy = strict_yaml.load(ROOT / "ci" / "gates" / "numerics.yaml", numerics.NumericsPolicy)
    trees, includes = numerics.source_trees(context, policy), numerics.include_folders(toolchain.obtain(context))
    checks = numerics.run(trees, policy, includes, tmp_path)

    assert checks
    assert [check for check in checks if check.state != "pass"] == []
