"""
Make environments with a fault from the candidate's, each for the gate that should catch it.

    mutants.py ROOT NAME

A wheel with a fault lies in ``ROOT/mutants/NAME``, its environment in ``ROOT/environments/NAME``.
"""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple


class Fault(NamedTuple):
    """
    A fault: in the file *member*, *old* becomes *new*.

    Attributes:
        wheel: Whether the wheel has it, too, so that the environment is the wheel's.
    """

    member: str
    old: bytes
    new: bytes
    wheel: bool = True


FAULTS = {
    # The scale of every FP8 product is a quarter too large.
    "scale": Fault(
        "vllm/_custom_ops.py",
        b"cutlass_scaled_mm(out, a, b, scale_a, scale_b, bias)",
        b"cutlass_scaled_mm(out, a, b, scale_a * 1.25, scale_b, bias)",
    ),
    # Every block of a prompt has the hash of its place alone, so the cache gives blocks of others.
    "cache": Fault(
        "vllm/v1/core/kv_cache_utils.py",
        b"curr_block_token_ids_tuple = tuple(curr_block_token_ids)",
        b"curr_block_token_ids_tuple = ()",
    ),
    # A byte of a library after the audit, in a section that nothing reads.
    "byte": Fault("vllm/_flashmla_C.abi3.so", b"GCC: (", b"gCC: (", wheel=False),
    # The server computes without CUDA graphs.
    "eager": Fault("", b"", b"", wheel=False),
}

EAGER = "import sys; 'serve' in sys.argv and sys.argv.append('--enforce-eager')\n"


def main() -> None:
    """Make the environment, and the wheel if it has the fault."""
    root, name = Path(sys.argv[1]), sys.argv[2]
    fault = FAULTS[name]
    source, target = (root / "environments" / each for each in ("candidate", name))
    shutil.copytree(source, target, symlinks=True, copy_function=os.link)
    (site,) = target.glob("lib/python3*/site-packages")
    if not fault.member:
        (site / "eager.pth").write_text(EAGER, "utf-8")
        return
    path = site / fault.member
    content = path.read_bytes()
    if fault.old not in content:
        raise SystemExit(f"error: {fault.member} does not hold {fault.old!r}")
    changed = content.replace(fault.old, fault.new, 1)
    path.unlink()
    path.write_bytes(changed)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()
    if fault.wheel:
        (wheel,) = (root / "dist").glob("*.whl")
        (root / "mutants" / name).mkdir(parents=True)
        with (
            zipfile.ZipFile(wheel) as before,
            zipfile.ZipFile(root / "mutants" / name / wheel.name, "w") as after,
        ):
            for info in before.infolist():
                data = changed if info.filename == fault.member else before.read(info)
                after.writestr(zipfile.ZipInfo(info.filename, info.date_time), data)


if __name__ == "__main__":
    main()
