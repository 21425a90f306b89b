"""What one has after a build: wheels that install and load, and a next build that is quick because it loads and makes nothing."""

from __future__ import annotations

import sys

import pytest
from tests.integration.conftest import Demo
from uv import find_uv_bin

from sparkwright.core import process

pytestmark = pytest.mark.toolchain

#: As a machine without a GPU can go: every library is loaded, and what runs on the host is called.
LOAD = """\
import ctypes, importlib.metadata, pathlib
import mini_cutlass, mini_flashinfer, mini_vllm
from mini_vllm import _custom_ops
for library in sorted(pathlib.Path(mini_vllm.__file__).parent.glob("*.so")):
    ctypes.CDLL(str(library))
    print("loaded", library.name)
print(importlib.metadata.version("mini-vllm"), mini_vllm.__version__)
print(_custom_ops.quantize_fp4_reference([0.5, 6.0]).hex())
"""


def test_the_wheels_install_into_an_empty_environment_and_load(undisturbed: Demo) -> None:
    """Every library can be loaded, metadata and package state one version, and a function of a library compiled here runs."""
    folder = undisturbed.folder.parent / "installed"
    python, env = folder / "bin" / "python", process.clean_environment(UV_NO_CONFIG="1", UV_OFFLINE="1", UV_NO_CACHE="1")
    process.output([find_uv_bin(), "venv", "--python", sys.executable, folder], env=env)
    wheels = sorted((undisturbed.folder / "dist").glob("*.whl"))
    process.output([find_uv_bin(), "pip", "install", "--no-index", "--no-deps", "--python", python, *wheels], env=env)

    *loaded, version, packed = process.output([python, "-c", LOAD], env=env).splitlines()

    assert loaded == [f"loaded {name}.abi3.so" for name in ("_C_stable_libtorch", "_big_C", "_moe_C_stable_libtorch")]
    assert version == f"{undisturbed.version} {undisturbed.version}"
    assert packed == "71", "0.5 is E2M1 code 1, 6.0 is code 7, the first in the low half"


@pytest.mark.parametrize("damaged", [False, True])
def test_a_wheel_that_is_gone_from_the_output_is_put_back(built_demo: Demo, damaged: bool) -> None:
    """A wheel that was deleted, or replaced by other bytes, comes back from the store, and nothing is compiled."""
    before, wheel = built_demo.sha256(), built_demo.wheel()
    wheel.unlink()
    if damaged:
        wheel.write_bytes(b"cut off")

    said = built_demo.build().stderr

    assert "reused: nothing changed" in said
    assert built_demo.sha256() == before
