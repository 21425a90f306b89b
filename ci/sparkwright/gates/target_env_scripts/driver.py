"""
Loads cubins with the CUDA driver in a process of its own, with the standard library alone.

    driver.py FOLDER      load FOLDER/*.cubin in the order of their names, with all their kernels

A line for each is a JSON object with its ``error``, empty if it loads.
"""

import ctypes
import json
import os
import sys
from pathlib import Path


def call(name: str, *arguments: object) -> str:
    """Call the driver's function *name*, and return the name of its error; empty without one."""
    library, text = ctypes.CDLL("libcuda.so.1"), ctypes.c_char_p()
    if not (status := getattr(library, name)(*arguments)):
        return ""
    library.cuGetErrorName(status, ctypes.byref(text))
    return f"{name}: {(text.value or b'unknown').decode()}"


def main() -> None:
    """Load the cubins."""
    # Loading is lazy by default: a module would be accepted without a look at its kernels.
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    context, module = ctypes.c_void_p(), ctypes.c_void_p()
    error = call("cuInit", 0)
    error = error or call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    error = error or call("cuCtxSetCurrent", context)
    if error:
        sys.exit(error)
    for path in sorted(Path(sys.argv[1]).glob("*.cubin")):
        error = call("cuModuleLoadData", ctypes.byref(module), path.read_bytes())
        # At once, since the next call may end the process.
        print(json.dumps({"error": error}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
