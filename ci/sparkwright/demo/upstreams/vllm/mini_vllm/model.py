"""
``mini-vllm`` prints a row of NVFP4 weights by the scale of its layer.

It loads one of the layer's experts, into memory that was used before.
"""

import ctypes
import sys

from . import _custom_ops
from .quantization.nvfp4_scales import ExpertScales

#: A layer is laid out for this many experts; this process loads the first.
_EXPERTS = 4
#: The scale of the loaded expert, and the largest that E4M3 holds, with which memory is measured
#: before any weight is loaded.
_LOADED, _PROFILE = 0.5, 448.0
#: E2M1 codes of 6 and -0.5 in turn, two in a byte, and their scale, 1 in E4M3.
_CODES, _SCALES = bytes([0x97]) * 8, bytes([0x38])


def main() -> None:
    """Print the row."""
    profile = ExpertScales(_EXPERTS)
    for expert in range(_EXPERTS):
        profile.load(expert, _PROFILE)
    profile.free()
    scales = ExpertScales(_EXPERTS)
    scales.load(0, _LOADED)
    row = (ctypes.c_float * 16)()
    _custom_ops.nvfp4_add_row(_CODES, _SCALES, _LOADED / scales.largest(), row)
    sys.stdout.write(" ".join(map("{:g}".format, row)) + "\n")
