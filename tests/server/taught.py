"""A real server with a model that every gate can judge (`trained`), which a test can break and mend; and the harness, installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.broken import ROOT, Broken, model, serving

from sparkwright.cli.options import default_cache
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.gates.accuracy import harness


@pytest.fixture(scope="module", name="trained")
def _trained(vllm_python: Path) -> Path:
    """Return the model."""
    return model(vllm_python, "trained")


@pytest.fixture(scope="module", name="taught")
def _taught(vllm_python: Path, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    """Return a server of that model, sound until a test breaks it."""
    with serving(vllm_python, trained, tmp_path_factory.mktemp("taught")) as server:
        yield server


@pytest.fixture(scope="module", name="context")
def _context(tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    """Return a run on this checkout with the user's store, which has the harness afterwards."""
    context = RunContext(Project(ROOT, "2026.11"), Store(default_cache()), (), tmp_path_factory.mktemp("dist"))
    harness.obtain(context)
    return context
