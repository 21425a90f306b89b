"""A real server with a model that every gate can judge (`trained`), which a test can break and mend; and the harness, installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from tests.server.broken import HERE, ROOT, SOURCES, Broken, digest, serving

from sparkwright.bench.server.client import Client
from sparkwright.cli.options import default_cache
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.gates.accuracy import harness

GATES = ROOT / "ci" / "gates"


def patient(url: str) -> Client:
    """Return a client of the server at *url* that waits as long as a text takes on a processor that others use too."""
    return Client(url, deadline=900)


@pytest.fixture(scope="module", name="trained")
def _trained(vllm_python: Path) -> Path:
    """Return the model, made in two minutes on the first use."""
    cache = default_cache() / "tests"
    key = digest(*SOURCES, HERE / "trained.py", GATES / "logprobs.yaml")
    folder, made = cache / f"trained-{key}", cache / f".trained-{key}"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "trained.lock"):
        if not folder.exists():
            shutil.rmtree(made, ignore_errors=True)
            environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT / 'ci'}{os.pathsep}{HERE}", "HF_HUB_OFFLINE": "1"}
            subprocess.run([vllm_python, HERE / "trained.py", made, GATES], env=environment, check=True)
            made.rename(folder)
    return folder


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
