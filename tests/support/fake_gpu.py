"""A GPU of the tests: a driver's script that answers as told, and torch on NumPy (`fake_torch`)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from sparkwright.core import strict_yaml
from sparkwright.gates.core.verdict import Check
from sparkwright.gates.device import gate as device
from sparkwright.gates.device import operators
from sparkwright.gates.device.gate import DevicePolicy

ROOT = Path(__file__).parents[2]
POLICY = strict_yaml.load(ROOT / "ci" / "gates" / "device.yaml", DevicePolicy)


def _one(name: str, index: int) -> operators.Cases:
    """Return the cases of *name* without all but one."""
    cases = operators.CASES[name]
    return lambda random, bounds: iter([list(cases(random, bounds))[index]])


#: Fewer or smaller shapes of the products, which take a CPU minutes.
SMALL: Mapping[str, operators.Cases] = {
    "fp4-gemm": _one("fp4-gemm", -1),
    "fp4-moe": _one("fp4-moe", 0),
    "marlin-fp4": _one("marlin-fp4", -1),
    "marlin-int4": _one("marlin-int4", -1),
    "fp8-gemm": operators.scaled_mm(operators.FP8, (17, 96, 4096), (1, 64, 512)),
    "int8-gemm": operators.scaled_mm(np.dtype(np.int8), (17, 96, 512)),
}


def environment(folder: Path, fault: str = "") -> Path:
    """Return an interpreter with the tests' torch, whose operators have *fault*."""
    python = folder / "python"
    variables = (
        f"PYTHONPATH='{ROOT / 'tests' / 'support' / 'fake_torch'}' SPARKWRIGHT_FAULT='{fault}'"
    )
    python.write_text(f'#!/bin/sh\nexec env {variables} {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def driver(folder: Path, body: str) -> Path:
    """Return a script in place of the driver's, in which *body* has ``command`` and ``json``."""
    script = folder / "driver.py"
    script.write_text(
        "import json, os, sys, time\ncommand = sys.argv[1]\n"
        "if command == 'facts':\n"
        "    print(json.dumps(dict(name='a GPU', major=12, minor=1, driver=13000)))\n"
        "    sys.exit()\n"
        "if command == 'load':\n    cubins = json.load(open(sys.argv[2]))\n"
        f"{body}\n"
    )
    return script


def check(name: str, scratch: Path, fault: str = "") -> Check:
    """Return the check *name* of the tests' operators, which have *fault*."""
    scratch.mkdir()
    command = [str(environment(scratch, fault)), str(device.SCRIPT)]
    return device.operator_check(name, POLICY.operators, command, (), scratch)
