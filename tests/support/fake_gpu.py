"""A GPU of the tests: a driver's script that answers as told, and torch on NumPy (`fake_torch`)."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support import processes

from sparkwright.core import strict_yaml
from sparkwright.gates import device, operators
from sparkwright.gates.core.verdict import Check

ROOT = Path(__file__).parents[2]
POLICY = strict_yaml.load(ROOT / "ci" / "gates" / "device.yaml", device.DevicePolicy)

#: Fewer or smaller shapes of the products, which take a CPU minutes.
SMALL: Mapping[str, tuple[tuple[Any, ...], ...]] = {
    "fp4-gemm": ((129, 256, 384),),
    "fp4-moe": (((3, 0, 17, 129), 256, 512),),
    "fp4-experts-quantise": (((3, 0, 17, 129), 512),),
    "fp8-gemm": ((17, 96, 4096), (1, 64, 512)),
}


def shrink(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the check *name* its shapes of `SMALL`."""
    make, shapes = operators.OPERATORS[name]
    monkeypatch.setitem(operators.OPERATORS, name, (make, SMALL.get(name, shapes)))


def environment(folder: Path, fault: str = "") -> Path:
    """Return an interpreter with the tests' torch, whose operators have *fault*."""
    variables = (
        f"PYTHONPATH='{ROOT / 'tests' / 'support' / 'fake_torch'}:{ROOT / 'ci'}' SPARKWRIGHT_FAULT='{fault}'"
    )
    return processes.script(folder / "python", f'exec env {variables} {sys.executable} "$@"')


def driver(folder: Path, body: str) -> Path:
    """Return a script in place of the driver's, in which *body* has the ``cubins``."""
    script = folder / "driver.py"
    script.write_text(f"import json, os, sys, time\nfrom pathlib import Path\ncubins = [*Path(sys.argv[1]).glob('*.cubin')]\n{body}\n")
    return script


def check(name: str, scratch: Path, fault: str = "") -> Check:
    """Return the check *name* of the tests' operators, which have *fault*."""
    scratch.mkdir()
    return device.operator_check(name, POLICY, environment(scratch, fault), (scratch / "_C.so",), scratch / name)
