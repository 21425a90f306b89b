"""G1 over the real, patched trees of the default stack: every converter that the reviewed policy names is found, compiled and right."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from sparkwright.builder import toolchain
from sparkwright.core import strict_yaml
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.gates.numerics import gate as numerics
from sparkwright.gates.numerics.gate import NumericsPolicy

pytestmark = [pytest.mark.long, pytest.mark.network, pytest.mark.toolchain]

ROOT = Path(__file__).parents[2]


def test_the_converters_of_the_default_stack_are_right(user_store: Store, tmp_path: Path) -> None:
    """Nothing fails, nothing is invalid, and nothing is left out: vLLM's, FlashInfer's, CUTLASS's and CUDA's own."""
    project = Project(ROOT, "2026.11")
    context = RunContext(project, user_store, tuple(project.spec.forks), ROOT / "dist")
    policy = strict_yaml.load(ROOT / "ci" / "gates" / "numerics.yaml", NumericsPolicy)

    source_trees = numerics.source_trees(context, policy)
    includes = numerics.include_folders(toolchain.obtain(context))

    checks = numerics.run(source_trees, policy, includes, tmp_path)

    wrong = [check for check in checks if check.state != "pass"]
    assert Counter(check.state for check in checks) == {"pass": len(checks)}, wrong
