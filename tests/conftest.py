"""
Fixtures: an isolated environment, the real tools, and the miniature upstreams as a project that can be built.

    demo_session          a run on the demo's project, locked, in a store of its own
      project/            reviewed data, a copy: tests may change it
      upstreams/*.git     vllm, flashinfer, cutlass: real repositories, reached through the mirror map
      store/              its downloaded tools are those of the user's cache
"""

import copy
import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

from sparkwright.builder import toolchain
from sparkwright.cli import demo, options
from sparkwright.core import http, strict_yaml
from sparkwright.core.console import console
from sparkwright.core.store import Store
from sparkwright.demo import upstreams
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project

ROOT = Path(__file__).parents[1]
#: Nothing listens on the discard port, so a test that asks an index, or the hub of models, by mistake fails at once.
NOWHERE = "http://127.0.0.1:9/simple/"
#: Examples of property tests: the same in every run by default, other ones in each with ``random``, twice as many. What a test may take
#: depends on the machine, so neither has a deadline.
settings.register_profile("same", derandomize=True, print_blob=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("random", settings.get_profile("same"), derandomize=False, max_examples=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write the names of the skipped tests below `.pytest_cache`, so that another machine can be asked for them (``pytest @FILE``)."""
    cache = getattr(terminalreporter.config, "cache", None)
    if cache and not hasattr(terminalreporter.config, "workerinput"):
        names = sorted({report.nodeid for report in terminalreporter.stats.get("skipped", [])})
        (cache.mkdir("skipped") / "names").write_text("".join(f"{name}\n" for name in names), "utf-8")


@pytest.fixture(scope="session", autouse=True)
def _quick() -> Iterator[None]:
    """
    Parse the same text once, as the reviewed files would be read some thousand times; wait for no disk, as no test takes the power away; and pause
    briefly before a request is repeated.
    """
    parsed = functools.lru_cache(maxsize=256)(strict_yaml.parse)

    def parse(text: str, kind: Any, origin: str) -> Any:
        return copy.deepcopy(parsed(text, kind, origin))

    with mock.patch.object(strict_yaml, "parse", parse), mock.patch.object(os, "fsync", return_value=None), mock.patch.object(http, "PAUSE", 0.01):
        yield


@pytest.fixture(autouse=True)
def isolated(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a test away from the user's configuration, home and cache, from other tests' console, and, unless marked, from the network."""
    if request.node.get_closest_marker("network") or request.node.get_closest_marker("toolchain"):
        # Both fetch from the user's index into the user's cache, so that a second run is quick.
        monkeypatch.setenv("SPARKWRIGHT_CACHE_DIR", str(options.default_cache()))
    else:
        monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", NOWHERE)
        monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
        monkeypatch.setenv("SPARKWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    # xdist sets COLUMNS.
    for name in [name for name in os.environ if name.startswith("GIT_") or name == "COLUMNS"]:
        monkeypatch.delenv(name)
    for name, value in {"json": False, "_depth": 0, "_document": {}}.items():
        monkeypatch.setattr(console, name, value)
    home = tmp_path / "home"
    home.mkdir()
    # A configuration that would change bytes and names, if it leaked into results.
    (home / ".gitconfig").write_text("[core]\n\tautocrlf = true\n[apply]\n\twhitespace = fix\n[diff]\n\tnoprefix = true\n")
    monkeypatch.setenv("HOME", str(home))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return an empty store."""
    return Store(tmp_path / "store")


@pytest.fixture(scope="session")
def user_store() -> Store:
    """Return the user's store, whose downloads and environments tests share."""
    return Store(options.default_cache())


@pytest.fixture(scope="session")
def tools(user_store: Store) -> toolchain.Toolchain:
    """Return the demo's tools, nvcc among them; installed from the package index on first use."""
    project = Project(ROOT / "ci" / "sparkwright" / "demo" / "project", "demo")
    return toolchain.obtain(RunContext(project, user_store, (), ROOT / "dist"))


@pytest.fixture(scope="session")
def cuda_bin(tools: toolchain.Toolchain) -> Path:
    """Return the folder of nvcc, cuobjdump and nvdisasm."""
    return tools.cuda / "bin"


def lock_demo(folder: Path, user_store: Store, tools: toolchain.Toolchain, target: str = "") -> Path:
    """Return a folder below *folder* with the demo's project, locked against its official wheel for the machine *target*."""
    for name in demo.SHARED:
        (folder / name).symlink_to(user_store.folder(name), target_is_directory=True)
    context = demo.prepare(RunContext(Project(ROOT, "2026.11"), Store(folder), (), ROOT / "dist", target=target))
    with pytest.MonkeyPatch.context() as patch:
        # The demo replaces it, once it has the tools, and nothing restores it.
        patch.setenv("SPARKWRIGHT_INDEX_URL", os.environ.get("SPARKWRIGHT_INDEX_URL", ""))
        with demo.official(context, tools):
            demo.lock_stack(context)
    return context.project.root.parent


@pytest.fixture(scope="session")
def locked_demo(tmp_path_factory: pytest.TempPathFactory, user_store: Store, tools: toolchain.Toolchain) -> Path:
    """Return a folder with the locked demo; made once, to be copied."""
    return lock_demo(tmp_path_factory.mktemp("locked"), user_store, tools)


@pytest.fixture
def demo_session(locked_demo: Path, tmp_path: Path) -> Iterator[RunContext]:
    """Return a run on a copy of the locked demo; every download that it needs is in its store."""
    folder = tmp_path / "demo"
    shutil.copytree(locked_demo, folder, symlinks=True)
    mirrors = {f"{upstreams.HOST}{fork}.git": str(folder / "upstreams" / f"{fork}.git") for fork in upstreams.TAGS}
    project = Project(folder / "project", "demo")
    yield RunContext(project, Store(folder / "store"), tuple(project.spec.forks), folder / "dist", source="git", mirrors=mirrors)
    shutil.rmtree(folder)
