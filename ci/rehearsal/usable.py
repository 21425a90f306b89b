"""Fail unless this user can load torch and vLLM, and use the GPU if there is one."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path

assert find_spec("torch")
assert find_spec("vllm")
if Path("/dev/nvidiactl").exists():
    assert ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
