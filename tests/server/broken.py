"""Real servers that a test breaks while they serve: with the plugin of ``faulty/``."""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from tests.support.serving import launch

from sparkwright.bench.server.server_process import Server
from sparkwright.cli.options import default_cache
from sparkwright.core.files import sha256_bytes
from sparkwright.core.store import Store, write_file
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.gates import accuracy, long_text

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GATES = ROOT / "ci" / "gates"
WORDS = GATES / "generation.yaml"


class Broken(Server):
    """A server of *model*, with further *flags*, whose fault can be chosen; its log and the fault's file lie in *folder*."""

    def __init__(self, python: Path, model: Path, folder: Path, *flags: str) -> None:
        self._switch = folder / "fault.json"
        self._write({})
        variables = {"PYTHONPATH": str(HERE / "faulty"), "SPARKWRIGHT_TEST_FAULT_FILE": str(self._switch), "VLLM_COMPUTE_NANS_IN_LOGITS": "1"}
        super().__init__(launch(python, model, *flags, **variables), folder / "server.log")

    @contextlib.contextmanager
    def fault(self, name: str, **options: object) -> Iterator[None]:
        """Have the fault *name* in the server for the block; see ``faulty/README.md``."""
        self._write({"fault": name, **options})
        try:
            yield
        finally:
            self._write({})

    def _write(self, fault: dict[str, object]) -> None:
        write_file(self._switch, json.dumps(fault).encode())


@contextlib.contextmanager
def serving(python: Path, model: Path, folder: Path, *flags: str) -> Iterator[Broken]:
    """Yield a server that has no fault yet; see `Broken`."""
    with Broken(python, model, folder, *flags) as broken:
        assert not broken.failure, f"{broken.failure}\n{broken.log.read_text(errors='replace')[-4000:]}"
        yield broken


@pytest.fixture(scope="module", name="trained")
def _trained(vllm_python: Path) -> Path:
    """Return the folder of the model that every gate can judge; it is made in two minutes on the first use."""
    files = [HERE / name for name in ("learnt.py", "learnt_texts.yaml", "trained.py")]
    sources = (*files, WORDS, GATES / "logprobs.yaml", Path(long_text.__file__))
    key = sha256_bytes(b"".join(path.read_bytes() for path in sources))[:12]
    cache = default_cache() / "tests"
    folder, made = cache / f"trained-{key}", cache / f".trained-{key}"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "trained.lock"):
        if not folder.exists():
            shutil.rmtree(made, ignore_errors=True)
            environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT / 'ci'}{os.pathsep}{HERE}", "HF_HUB_OFFLINE": "1"}
            subprocess.run([vllm_python, HERE / "trained.py", made, GATES], env=environment, check=True)
            made.rename(folder)
    return folder


@pytest.fixture(scope="module", name="broken")
def _broken(vllm_python: Path, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    """Return a server of that model, sound until a test breaks it."""
    with serving(vllm_python, trained, tmp_path_factory.mktemp("broken")) as broken:
        yield broken


@pytest.fixture(scope="module", name="context")
def _context(tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    """Return a run on this checkout with the user's store, which has the harness afterwards."""
    context = RunContext(Project(ROOT, "2026.11"), Store(default_cache()), (), tmp_path_factory.mktemp("dist"))
    accuracy.obtain_harness(context)
    return context
