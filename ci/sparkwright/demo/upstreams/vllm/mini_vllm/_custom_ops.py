"""The extension libraries, loaded when they are first used."""

import ctypes
import functools
from pathlib import Path


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """Return the extension library *name*, such as ``_C_stable_libtorch``."""
    return ctypes.CDLL(str(Path(__file__).parent / f"{name}.abi3.so"))


def nvfp4_add_row(
    packed: bytes, scales: bytes, factor: float, out: ctypes.Array[ctypes.c_float]
) -> None:
    """
    Add a row of NVFP4 weights, times *factor*, to *out*; a byte of *packed* holds two of them, one
    of *scales* is for sixteen.
    """
    add = library("_C_stable_libtorch").mini_vllm_nvfp4_add_row
    add.argtypes = (
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_float,
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_float),
    )
    add.restype = None
    add(packed, scales, factor, len(out), out)
