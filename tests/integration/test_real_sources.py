"""Stack 2026.11 as it is reviewed: the real releases, fetched from the package index, patched and rewritten."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.refusals import refusal

from sparkwright.builder.arch import rules as archs
from sparkwright.builder.workspace import source_tree
from sparkwright.cherry_picks import series
from sparkwright.core.store import Store
from sparkwright.forks import fetch
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project

pytestmark = pytest.mark.network

ROOT = Path(__file__).parents[2]
PROJECT = Project(ROOT, "2026.11")


@pytest.fixture(name="context")
def _context(user_store: Store) -> RunContext:
    return RunContext(PROJECT, user_store, tuple(PROJECT.spec.forks), ROOT / "dist")


@pytest.mark.parametrize("fork", PROJECT.spec.forks)
def test_the_locked_source_has_the_locked_tree(context: RunContext, fork: str) -> None:
    """What the index delivers today is what the lock names: the archive by sha256, its content by tree id."""
    locked = context.lock.forks[fork]
    fetched = fetch.fetch(context, fork)
    file = locked.sdist or locked.wheel

    assert file is not None
    assert (fetched.tree, fetched.pin) == (file.tree, file.sha256)
    assert context.objects.has(f"{fetched.tree}^{{tree}}")


@pytest.mark.parametrize("fork", PROJECT.spec.forks)
def test_series_and_rules_apply_exactly_and_have_an_effect(context: RunContext, fork: str) -> None:
    """Each patch of the series and each rule is applied once, and every patch leaves another tree behind."""
    made = source_tree(context, fork)
    patches = series.load(PROJECT.series_folder(fork))
    rules = archs.load(PROJECT.build_folder / "archs.yaml").of(fork).rules
    trees = [made.source.tree, *(step.tree for step in made.steps)]

    assert [step.name for step in made.steps] == [one.name for one in patches]
    assert [site.rule for site in made.sites] == [rule.name for rule in rules]
    assert len(set(trees)) == len(trees)
    assert (made.tree != made.patched) == bool(rules)


def test_only_named_files_change(context: RunContext) -> None:
    """Between upstream's vLLM and ours differ the files that patches and rules name, and no other."""
    made = source_tree(context, "vllm")
    named = {path for one in series.load(PROJECT.series_folder("vllm")) for path in one.files} | {site.file for site in made.sites}

    assert context.objects.changes(made.source.tree, made.tree).keys() == named


def test_what_was_fetched_once_needs_no_network(context: RunContext, tmp_path: Path) -> None:
    """Offline the same trees come out of the store; an empty store says that it is offline."""
    trees = [source_tree(context, fork).tree for fork in context.forks]
    offline = dataclasses.replace(context, offline=True)
    empty = dataclasses.replace(context, offline=True, store=Store(tmp_path / "empty"))

    assert [source_tree(offline, fork).tree for fork in context.forks] == trees
    with refusal("offline"):
        fetch.fetch(empty, "flashinfer")


def test_a_rule_for_another_release_stops_the_rewrite(context: RunContext) -> None:
    """On the tree that has the rules already, every rule finds that its list is not the one it was written for."""
    made = source_tree(context, "vllm")
    rules = archs.load(PROJECT.build_folder / "archs.yaml")
    text = context.objects.blob(made.tree, "CMakeLists.txt")

    assert text is not None
    with refusal("rule-mismatch"):
        archs.rewrite({"CMakeLists.txt": text}.get, rules.of("vllm").rules)
