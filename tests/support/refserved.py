"""
Environments whose ``vllm serve`` is the reference server: an A/B of known truth, through everything that starts, watches and ends servers.

The real vLLM is asked in `tests/server`; here a launch takes a second, and the server has exactly the fault that a test is about.
"""

import re
import shutil
import sysconfig
from pathlib import Path

import msgspec
from tests.support import fake_openai_server, standin

CODE = Path(__file__).parents[2] / "ci"

_CLI = '''
"""Serves what the file beside the environment says, at the port that the command line says."""
import argparse, os, pathlib, sys
import msgspec
from tests.support.fake_openai_server import Behaviour, FakeServer

found = argparse.ArgumentParser()
found.add_argument("serve"), found.add_argument("model")
found.add_argument("--served-model-name"), found.add_argument("--host"), found.add_argument("--port", type=int)
known, _ = found.parse_known_args()
root = pathlib.Path(sys.prefix)
launches = root / "launches"
number = int(launches.read_text() or 0) if launches.exists() else 0
launches.write_text(str(number + 1))
behaviour = msgspec.json.decode((root / "behaviour.json").read_bytes(), type=Behaviour)
print("Initializing a V1 LLM engine (v0.33.0)", flush=True)
kernel = pathlib.Path(os.environ["TRITON_CACHE_DIR"], "A", "kernel.cubin")
if not kernel.exists():
    kernel.parent.mkdir(parents=True, exist_ok=True)
    kernel.write_text("compiled")
if "starts-never" in os.environ.get("REFERENCE", ""):
    sys.exit("there is no GPU")
FakeServer(msgspec.structs.replace(behaviour, name=known.served_model_name), known.port).serve_forever()
'''


#: What the machine's probe needs of torch, by NumPy.
TORCH = '''
import types
import numpy
from numpy import float32, matmul
__version__ = "of the tests"
cuda = types.SimpleNamespace(is_available=lambda: False)
def get_num_threads():
    return 1
def ones(shape, dtype, device):
    return numpy.ones(shape, dtype)
'''
#: Its timer, by Python's.
TIMER = '''
import statistics, timeit, types
class Timer:
    def __init__(self, stmt, globals, num_threads):
        self.timer = timeit.Timer(stmt, globals=globals)
    def blocked_autorange(self, min_run_time):
        return types.SimpleNamespace(median=statistics.median(self.timer.repeat(5, 1)))
'''


def environment(root: Path, behaviour: fake_openai_server.Behaviour, version: str = "0.33.0") -> Path:
    """Make an environment in *root* whose vLLM has *behaviour*, and return its Python."""
    folders = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), CODE, CODE.parent)
    files = {
        "more.pth": "".join(f"{folder}\n" for folder in folders), "torch/__init__.py": TORCH, "torch/utils/benchmark.py": TIMER, "vllm/__init__.py": "", "vllm/entrypoints/__init__.py": "",
        "vllm/entrypoints/cli/__init__.py": "", "vllm/entrypoints/cli/main.py": _CLI,
    }  # fmt: skip
    python = standin.write_environment(root, version, files)
    (root / "behaviour.json").write_bytes(msgspec.json.encode(behaviour))
    return python


def project(root: Path, **changes: float) -> Path:
    """
    Make a checkout in *root* whose gates are as ours but for the machine, which may be as busy as it likes, and return it.

    Args:
        changes: Of ``throughput.yaml``.
    """
    for name in ("forks", "cherry_picks", "build", "ci/audit", "ci/gates", "ci/recipes"):
        shutil.copytree(CODE.parent / name, root / name)
    for name in ("audit.yaml", "release.yaml"):
        shutil.copy(CODE / name, root / "ci")
    gates = root / "ci" / "gates"
    edit(gates / "machine.yaml", max_other_load=1.0, cooldown=0.1, preheat=0, floor=1, discrete_floor=1)
    edit(gates / "machine.yaml", matrix=8, stream=8, warmup=0.0, seconds=0.02, readings=3, band=900)
    edit(gates / "throughput.yaml", **{"timeout_s": 60, "most_requests": 3, **changes})
    return root


def edit(path: Path, **values: object) -> None:
    """Replace the values of keys, wherever in the file they stand; a key that is not there is a mistake."""
    text = path.read_text("utf-8")
    for name, value in values.items():
        text, count = re.subn(rf"^(\s*){name}: .*$", rf"\g<1>{name}: {value}", text, flags=re.MULTILINE)
        assert count == 1, (path.name, name, count)
    path.write_text(text, "utf-8")
