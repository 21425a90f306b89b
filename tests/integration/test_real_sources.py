"""Stack 2026.11 as it is reviewed: the real releases, fetched from the package index, patched, rewritten and compiled in part."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkwright.builder import toolchain
from sparkwright.builder.workspace import rules_of, source_tree
from sparkwright.cherry_picks import patch
from sparkwright.core import strict_yaml
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.gates import numerics

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
    patches = patch.load_folder(PROJECT.series_folder(fork))
    rules = rules_of(context, fork).rules
    trees = [made.source.tree, *(step.tree for step in made.steps)]
    named = {path for patch in patches for path in patch.files} | {site.file for site in made.sites}

    assert file
    assert made.source.tree == file.tree
    # The commit, once `lock` has recorded that the archive proves it.
    assert made.source.pin == (locked.git.commit if locked.proof and locked.git else file.sha256)
    assert [step.name for step in made.steps] == [patch.name for patch in patches]
    # Rules for vendored sources are applied where CMake is configured.
    assert [site.rule for site in made.sites] == [rule.name for rule in rules if not rule.source]
    assert len(set(trees)) == len(trees)
    assert context.objects.changes(made.source.tree, made.tree).keys() == named


def test_a_session_that_was_installed_needs_no_network(tmp_path: Path) -> None:
    """Nox runs a command of a checkout again where no index is reached and no cache holds its build requirements."""
    subprocess.run(["git", "clone", "--quiet", ROOT, tmp_path / "checkout"], check=True)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "nox"], check=True)
    subprocess.run([f"{tmp_path}/nox/bin/pip", "install", "--quiet", "nox", "uv"], check=True)
    nowhere = {"UV_OFFLINE": "1", "PIP_NO_INDEX": "1", "UV_CACHE_DIR": str(tmp_path / "cache")}
    session = [f"{tmp_path}/nox/bin/nox", "-s", "audit", "--", "--help"]
    subprocess.run(session, cwd=tmp_path / "checkout", check=True)
    again = subprocess.run(session, cwd=tmp_path / "checkout", env={**os.environ, **nowhere}, check=False)

    assert again.returncode == 0


@pytest.mark.long
@pytest.mark.toolchain
def test_the_converters_of_the_default_stack_are_right(context: RunContext, tmp_path: Path) -> None:
    """G1: every converter that the reviewed policy names is found, compiled and right: vLLM's, FlashInfer's, CUTLASS's and CUDA's own."""
    policy = strict_yaml.load(ROOT / "ci" / "gates" / "numerics.yaml", numerics.NumericsPolicy)
    trees, includes = numerics.source_trees(context, policy), numerics.include_folders(toolchain.obtain(context))
    checks = numerics.run(trees, policy, includes, tmp_path)

    assert checks
    assert [check for check in checks if check.state != "pass"] == []
